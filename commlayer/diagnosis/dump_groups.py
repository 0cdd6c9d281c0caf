"""The groups of a job and the calls of them, from dumps of torch's Flight Recorder: who is in a
group, which collective a call was, how many bytes it moved.

A dump may leave out the ranks of its groups, as Gloo's does; the dumps of the other ranks tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from commlayer.diagnosis.call_logs import GroupLog
from commlayer.diagnosis.evidence_files import named
from commlayer.diagnosis.recorder_dumps import RANK_LIMIT, Dump, Entry
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable, shortened

__all__ = ["RECORDED_DTYPES", "DumpGroups", "collective_kind", "contradicted_lists", "entry_bytes", "entry_dtype"]

_KINDS = (
    ("barrier", "barrier"),
    ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("all_gather", "all_gather"),
    ("allgather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
)
"""Words in torch's names of collectives, such as ``_all_gather_base``, and our kinds; the first
that fits."""
RECORDED_DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "UInt16": ("uint16", 2),
    "UInt32": ("uint32", 4),
    "UInt64": ("uint64", 8),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
}
"""Names of dtypes in dumps, and the dtype's name and bytes."""


class DumpGroups:
    """The groups of a job, from all its dumps. ``inferred``: names of groups whose members no dump
    lists; ``made_at``: when each collective was first made, by the group's name and its number;
    ``lossy``: ranks whose rings have lost calls."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.listed: dict[str, set[tuple[int, ...]]] = {}
        users: dict[str, set[int]] = {}
        self.descriptions: dict[str, str] = {}
        for dump in dumps:
            for name, members in dump.group_ranks.items():
                self.listed.setdefault(name, set()).add(members)
            for name, description in {entry.process_group for entry in dump.entries}:
                users.setdefault(name, set()).add(dump.rank)
                if description and description != "undefined":
                    self.descriptions[name] = description
        self.inferred = sorted(set(users) - set(self.listed))
        listed_ranks = (rank for each in self.listed.values() for members in each for rank in members)
        ranks = {dump.rank for dump in dumps}.union(listed_ranks)
        sizes = _least_sizes(dumps) if self.inferred else {}
        if self.inferred and ranks:  # ranks count from 0, so that those that are missing between are known
            ranks |= set(range(max(ranks)))
        silent = ranks - {dump.rank for dump in dumps}
        for name in self.inferred:
            is_world = self.descriptions.get(name) == "default_pg"
            size = max(sizes.get(name, 0), len(ranks) if is_world else 0)
            ranks |= set(range(size)) if is_world else set()
            lacking = size - len(users[name])
            if not is_world and lacking > 0:
                silent = silent or set(range(max(ranks) + 1, max(ranks) + 1 + lacking))
                ranks |= silent
                users[name] |= silent if len(silent) == lacking else set()
        self.ranks = tuple(sorted(ranks))
        self.made_at: dict[str, dict[int, int]] = {}
        for entry in (entry for dump in dumps for entry in dump.entries):
            times = self.made_at.setdefault(entry.process_group[0], {})
            number, created_ns = entry.collective_seq_id, entry.time_created_ns
            times[number] = min(times.get(number, created_ns), created_ns)
        self.lossy = {dump.rank for dump in dumps if dump.lost}
        self.users = {name: tuple(sorted(each)) for name, each in users.items()}

    @property
    def assumed(self) -> str:
        """The sentence on groups whose members no dump lists, by what they are called; empty: there
        are none."""
        names = [shortened(printable(self.descriptions.get(name, name), keep="")) for name in self.inferred]
        words = f"{counted(len(names), 'group')} ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"
        return f"no dump lists the ranks of {words}: taken from who recorded their calls" if names else ""

    def group(self, dump: Dump, name: str) -> GroupLog:
        """The group that ``dump`` calls ``name``. Raises UsageError if its rank is not among those
        that are listed for it."""
        description = self.descriptions.get(name, "")
        ranks = dump.group_ranks.get(name)
        if ranks is None and name in self.listed:
            with_rank = [each for each in self.listed[name] if dump.rank in each]
            ranks = with_rank[0] if len(with_rank) == 1 else ()
        elif ranks is None:
            ranks = self.ranks if description == "default_pg" else self.users[name]
        if dump.rank not in ranks:
            raise UsageError(
                f"{named(dump.path)}: expected rank {dump.rank} to be in its group {shortened(name)}, got ranks "
                f"{', '.join(map(str, ranks[:16])) or 'that differ'}: give the dumps of one job, with their own names"
            )
        key = f"{name}|{','.join(map(str, ranks))}"
        return GroupLog(key=key, name=name, ranks=ranks, description=description)


def contradicted_lists(dumps: Sequence[Dump]) -> set[tuple[str, tuple[int, ...]]]:
    """The lists of a group's ranks, with the group's name, that more dumps contradict than have
    them, or as many.

    Two lists of one name contradict each other where they differ and have a rank in common: groups
    of other ranks may share a name. A dump without a list contradicts those of a group that it has
    calls of if no list has its rank.
    """
    having: dict[tuple[str, tuple[int, ...]], int] = {}
    for dump in dumps:
        for each in dump.group_ranks.items():
            having[each] = having.get(each, 0) + 1
    by_rank: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, ranks in having:
        for rank in ranks:
            by_rank.setdefault((name, rank), []).append(ranks)
    listed = {name for name, _ in having}
    against: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, ranks in having:
        others = {other for rank in ranks for other in by_rank[name, rank]} - {ranks}
        against[name, ranks] = sum(having[name, other] for other in others)
    outside: dict[str, int] = {}
    for dump in dumps:
        for name in {entry.process_group[0] for entry in dump.entries} & listed - dump.group_ranks.keys():
            outside[name] = outside.get(name, 0) + ((name, dump.rank) not in by_rank)
    return {
        (name, ranks)
        for (name, ranks), count in having.items()
        if 0 < against[name, ranks] >= count or outside.get(name, 0) > count
    }


def _least_sizes(dumps: Sequence[Dump]) -> dict[str, int]:
    """How many ranks groups have at least, by name: those in which a call is overdue, data was
    gathered, or a message went to a later member."""
    sizes: dict[str, int] = {}
    for dump in dumps:
        for entry in dump.entries:
            size = 1 if entry.has_ended else 2
            sent, received = sum(map(math.prod, entry.input_sizes)), sum(map(math.prod, entry.output_sizes))
            if collective_kind(entry.profiling_name.partition(":")[2]) == "all_gather" and sent:
                parts = received // sent
                size = max(size, parts) if parts < RANK_LIMIT else size  # else the parts are uneven
            if entry.message is not None:
                size = max(size, min(entry.message.peer + 1, RANK_LIMIT))
            name = entry.process_group[0]
            sizes[name] = max(sizes.get(name, 0), size)
    return sizes


def collective_kind(name: str) -> str:
    """Return our kind of a collective that torch calls ``name``; where there is none, torch's
    name."""
    return next((kind for word, kind in _KINDS if word in name.lower()), shortened(name))


def entry_dtype(entry: Entry) -> tuple[str, int]:
    """Return the name of an entry's dtype and the bytes of an element; "" without tensors, 0 for
    bytes that are not known."""
    dtypes = [*entry.input_dtypes, *entry.output_dtypes]
    return RECORDED_DTYPES.get(dtypes[0], (dtypes[0].lower(), 0)) if dtypes else ("", 0)


def entry_bytes(entry: Entry) -> tuple[int, int]:
    """Return the bytes that go into a call and that come out of it, −1 where they are not known.

    They are not where the recorded sizes are not those of the call, or where ranks need not have
    them alike.
    """
    name, (_, width) = entry.profiling_name.partition(":")[2], entry_dtype(entry)
    if (entry.input_sizes and not width) or "_v" in name or "coalesced" in name:
        return -1, -1
    return width * sum(map(math.prod, entry.input_sizes)), width * sum(map(math.prod, entry.output_sizes))
