"""Dumps of torch's Flight Recorder, of any backend: found among files, and read as data.

They are JSON, or a pickle that may name nothing to import or to call, of versions from 2.0 on. A
large job's dumps are read by several processes, each of which keeps of a dump what is needed: for a
diagnosis the calls that have not ended, and the last ones of each group that have; for times all
calls.

Rejected: torch's own reader, which needs torch, and unpickles by importing and calling what the
file names.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import re
import resource
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from commlayer.calls.group_life import INNER_NAME
from commlayer.diagnosis.evidence_files import named
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.printable import shortened

__all__ = [
    "RANK_LIMIT",
    "CallFrame",
    "Dump",
    "Entry",
    "MessageEnd",
    "begins_as_dump",
    "rank_in_name",
    "read_dump",
    "read_dumps",
]

_MOST_BYTES = 1 << 28
_MOST_ENDED = 16
"""The number of calls of each group that a diagnosis keeps beside those that have not ended, to
compare calls that differ."""
_LEAST_PARALLEL = 16
"""The number of dumps from which on several processes read them."""
_WRAPPERS = ("typing_extensions.py", "contextlib.py", "functools.py", "warnings.py")
"""Files of decorators: torch's deprecated all_gather_into_tensor is called through one of these."""
_HOST_BACKENDS = ("gloo", "mpi", "ucc", "fake", "commlayer")
_RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE | re.ASCII)
_LAST_DIGITS = re.compile(r"(\d+)\D*$", re.ASCII)
_MESSAGE = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})", re.ASCII)
_MOST_MEMORY = 4 << 30
"""Bytes that reading a dump may take: a small pickle can ask for any amount."""
RANK_LIMIT = 1 << 20
"""No job has so many ranks: a larger number in a file's name is a date, and in a dump it is
damaged."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Size = Annotated[list[_Count], msgspec.Meta(max_length=64)]
_Sizes = Annotated[list[_Size], msgspec.Meta(max_length=1 << 16)]


class CallFrame(msgspec.Struct):
    """A place in a program, innermost first in an entry."""

    name: str = ""
    filename: str = ""
    line: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = 0


class MessageEnd(msgspec.Struct):
    """The other end of a message. ``peer``: its place in the group."""

    kind: str
    peer: int


class Entry(msgspec.Struct):
    """A call, by the fields of torch's recorder that are used here; a dump has more.

    ``process_group``: the group's name and description; ``profiling_name``: backend and collective,
    as ``nccl:all_reduce``; ``op_id``: the number of operations of the group by then, with its
    messages; ``time_discovered_completed_ns``: when torch's watchdog, which looks ten times a
    second, saw that the call had ended; ``duration_ms``: between events of the device.
    """

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: _Count
    state: str
    pg_id: _Count = 0
    record_id: _Count = 0
    op_id: _Count = 0
    p2p_seq_id: _Count = 0
    is_p2p: bool = False
    retired: bool = False
    input_sizes: _Sizes = []
    output_sizes: _Sizes = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    time_created_ns: _Count = 0
    time_discovered_started_ns: _Count | None = None
    time_discovered_completed_ns: _Count | None = None
    duration_ms: float | None = None
    timeout_ms: _Count = 0
    frames: Annotated[list[CallFrame], msgspec.Meta(max_length=1024)] = []
    thread_id: str = "0"
    message: MessageEnd | None = None
    """Set by :func:`read_dumps`."""

    @property
    def is_on_host(self) -> bool:
        """Whether the call was made by a backend of the CPU, which runs it where it is made."""
        return self.profiling_name.partition(":")[0].lower() in _HOST_BACKENDS

    @property
    def has_ended(self) -> bool:
        """Whether the call is known to have ended."""
        # On a device a call that is retired and not completed has timed out; Gloo leaves the state
        # as it was at first.
        return self.state == "completed" or (self.is_on_host and self.retired)

    @property
    def has_begun(self) -> bool:
        """Whether the call is known to have begun."""
        return self.has_ended or self.state == "started" or bool(self.time_discovered_started_ns)


class _Config(msgspec.Struct):
    ranks: str = "[]"


class _Content(msgspec.Struct):
    version: str
    entries: Annotated[list[Entry], msgspec.Meta(max_length=1 << 20)] = []
    pg_config: dict[str, _Config] = {}
    pg_status: Any = None

    @property
    def num_enqueued(self) -> int:
        """The largest number of a group's calls that are counted beside the recorded ones."""
        states = self.pg_status.values() if isinstance(self.pg_status, dict) else ()
        numbers = [each.get("last_enqueued_collective") for each in states if isinstance(each, dict)]
        return max((number for number in numbers if isinstance(number, int)), default=0)


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    ``written_ns``: when its file was written; without ``has_time``, when the newest call was made
    that any dump has; ``entries``: the calls that were kept, oldest first; ``group_ranks``: the
    ranks of groups, by name, where the dump lists them; ``backends``: whose calls were recorded;
    ``knows_beginnings``: whether it is recorded which calls have begun on the device; ``lost``: how
    many of the oldest calls the ring has lost; ``num_left_out``: how many calls of commlayer's own
    groups are left out, of which torch's recorder sees but some.
    """

    path: Path
    rank: int
    written_ns: int
    entries: list[Entry]
    group_ranks: dict[str, tuple[int, ...]]
    backends: tuple[str, ...]
    knows_beginnings: bool
    lost: int = 0
    num_left_out: int = 0
    has_time: bool = True


def begins_as_dump(head: bytes, name: str) -> bool:
    """Tell whether a file of this name that begins so looks like a dump: a pickle with a rank in
    its name, as any program writes pickles, or JSON with a dump's fields."""
    if head[:1] == b"\x80":
        return head[1:2] <= b"\x05" and rank_in_name(name, or_last_number=True) is not None
    return head[:1] == b"{" and (b'"entries"' in head or b'"pg_config"' in head)


def read_dumps(
    paths: Sequence[Path],
    damaged: list[str] | None = None,
    advance: Callable[[str], None] = lambda _: None,
    others: Sequence[Dump] = (),
    *,
    keeps_all: bool = False,
) -> list[Dump]:
    """Read dumps, sorted by rank, which is in a file's name: ``nccl_trace_rank_3``,
    ``dump-0003.json``.

    Args:
        damaged: takes the errors of files that are not sound, or contradict others of their rank: the rest is used.
        advance: called with the name of each file that was read.
        others: dumps of the same job that were in archives.
        keeps_all: keep also the calls that ended long ago, without their places in the program.

    Raises:
        UsageError: unless ``damaged`` takes them, files that are damaged, have no rank in their names, are of a version before
            2.0, or are of one rank: with all of them named.
    """
    dumps, errors = list(others), list[str]()
    for path, result in zip(paths, _results(paths, keeps_all), strict=True):
        advance(path.name)
        if isinstance(result, str):
            errors.append(result)
        else:
            dumps.append(result)
    dumps = list(_one_of_each_rank(dumps, errors))
    if errors and damaged is None:
        raise UsageError("\n".join(errors))
    if damaged is not None:
        damaged += errors
    newest_ns = max((entry.time_created_ns for dump in dumps for entry in dump.entries), default=0)
    return [dump if dump.written_ns else replace(dump, written_ns=newest_ns, has_time=False) for dump in dumps]


def _one_of_each_rank(dumps: Sequence[Dump], errors: list[str]) -> Iterator[Dump]:
    """Yield one dump of each rank, by rank: the newest, where it continues the others. ``errors``
    takes those left out, save copies."""
    by_rank: dict[int, list[Dump]] = {}
    for dump in dumps:
        of_rank = by_rank.setdefault(dump.rank, [])
        if not dump.entries or not any(
            dump.entries == each.entries and dump.group_ranks == each.group_ranks for each in of_rank
        ):
            of_rank.append(dump)
    for rank, each in sorted(by_rank.items()):
        *older, newest = sorted(each, key=_progress)
        if all(_continues(newest, each) for each in older):
            yield newest
            errors += [
                f"{named(each.path)}: expected one dump of each rank, got a newer one of rank {rank}, "
                f"{named(newest.path)}: the older one is left out"
                for each in older
            ]
        else:
            names = " and ".join(named(each.path) for each in (*older, newest))
            errors.append(
                f"{names}: expected one dump of each rank, got several of rank {rank} that are not of one run: they are "
                "left out; give the dumps of one moment"
            )


def _progress(dump: Dump) -> tuple[int, int, int]:
    """How far a rank had come when its dump was written: its last call, how many have ended, the
    time."""
    last = dump.entries[-1].record_id if dump.entries else -1
    return last, sum(entry.has_ended for entry in dump.entries), dump.written_ns


def _continues(newer: Dump, older: Dump) -> bool:
    """Tell whether two dumps of a rank are of one run: the newer one has the calls of the older
    one, or only later calls."""
    calls = {entry.record_id: _made(entry) for entry in newer.entries}
    first_ns = min((entry.time_created_ns for entry in newer.entries), default=0)
    return (
        bool(calls)
        and all(
            calls[entry.record_id] == _made(entry) if entry.record_id in calls else entry.record_id < max(calls)
            for entry in older.entries
        )
        and (
            any(entry.record_id in calls for entry in older.entries)
            or all(entry.time_created_ns <= first_ns for entry in older.entries)
        )
    )


def _made(entry: Entry) -> tuple[object, ...]:
    """The part of a call that stays as it is once it is made."""
    return entry.process_group, entry.profiling_name, entry.collective_seq_id, entry.time_created_ns


def _results(paths: Sequence[Path], keeps_all: bool) -> Iterator[Dump | str]:
    """Yield the dump in each file, or what is wrong with it."""
    read = partial(_read_or_error, keeps_all=keeps_all)
    if len(paths) < _LEAST_PARALLEL:
        yield from map(read, paths)
        return
    num_read = 0
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(paths))) as pool:
        try:
            for result in pool.map(read, paths, chunksize=4):
                num_read += 1
                yield result
        except BrokenProcessPool:
            for path in paths[num_read:]:
                yield (
                    f"{named(path)}: cannot read the dump of a rank: a process that reads dumps was ended, as for "
                    "want of memory: give it alone"
                )


class _DataOnly(pickle.Unpickler):
    """Reads plain data: a file that names anything to be imported or called is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {shortened(module)}.{shortened(name)}, and a dump is plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of the file, and a dump is plain data")


def _read_or_error(path: Path, *, keeps_all: bool) -> Dump | str:
    """The dump in a file, or what is wrong with it."""
    try:
        return read_dump(path, read_file(path, _MOST_BYTES), path.stat().st_mtime_ns, keeps_all=keeps_all)
    except OSError as error:
        return f"{named(path)}: cannot read the dump of a rank: {error.strerror or error}"
    except UsageError as error:
        return str(error)


def read_dump(path: Path, data: bytes, written_ns: int, *, keeps_all: bool = False) -> Dump:
    """Read the dump that ``path``, which may be in an archive, has in it. ``keeps_all``: as of
    :func:`read_dumps`.

    Raises UsageError, which names it.
    """
    where = named(path)
    rank = rank_in_name(path.name, or_last_number=True)
    if rank is None:
        raise UsageError(f"{where}: expected a name with the rank, such as nccl_trace_rank_3: rename it")
    try:
        with _bounded_memory():
            if data[:1] == b"{":
                content = msgspec.json.decode(data, type=_Content, strict=False)
            else:
                content = msgspec.convert(_DataOnly(io.BytesIO(data)).load(), _Content, strict=False)
            if any(config.ranks[:1].isdigit() for config in content.pg_config.values()):  # torchcomms lists them so
                _as_of_torch(where, content.entries)
            lost = content.entries[0].record_id if content.entries else 0
            foreign = [entry for entry in content.entries if INNER_NAME not in entry.process_group]
            num_left_out = len(content.entries) - len(foreign)
            content.entries = foreign
            entries = _kept(content.entries, has_lost=lost > 0, keeps_all=keeps_all)
    except UsageError:
        raise
    except Exception as error:  # what a damaged pickle raises is not listed anywhere
        raise UsageError(
            f"{where}: expected a dump of torch's Flight Recorder, got a damaged or foreign file: "
            f"{shortened(str(error) or type(error).__name__, 400)}. Copy it again, or remove it to go on without"
        ) from error
    if not re.fullmatch(r"[2-9]\d*\.\d+", content.version):
        raise UsageError(
            f"{where}: expected a dump of version 2.0 or later, got {shortened(content.version)}: record it with "
            "torch ≥ 2.4"
        )
    if num_left_out and (keeps_all or not content.entries):
        raise UsageError(
            f"{where}: expected all calls of each group, got those of commlayer's groups that run by no plan: torch's "
            "recorder sees no others. Give the calls-*.json of the ranks, which a job writes into "
            "COMMLAYER_DIAGNOSE_DIR when its calls hang"
        )
    if len({entry.pg_id for entry in content.entries if not entry.process_group[0]}) > 1:
        raise UsageError(
            f"{where}: expected groups that have names, got calls of several without one, which cannot be told apart: make "
            "groups by torch.distributed"
        )
    if not (content.entries or num_left_out) and (content.num_enqueued > 0 or not content.pg_config):
        raise UsageError(
            f"{where}: expected the calls of rank {rank}, got a dump without any, which says nothing of the rank: dump with "
            "collectives, and set TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.13) above 0"
        )
    group_ranks = {name: _ranks(config.ranks) for name, config in content.pg_config.items()}
    _check_rank(where, rank, entries, group_ranks)
    return Dump(
        path=path,
        rank=rank,
        written_ns=written_ns,
        entries=entries,
        group_ranks={name: tuple(sorted(ranks)) for name, ranks in group_ranks.items() if ranks},
        backends=tuple(sorted({entry.profiling_name.partition(":")[0] for entry in content.entries})),
        knows_beginnings=any(entry.state == "started" or entry.time_discovered_started_ns for entry in content.entries),
        lost=lost,
        num_left_out=num_left_out,
    )


def _check_rank(where: str, rank: int, entries: Sequence[Entry], group_ranks: dict[str, tuple[int, ...]]) -> None:
    """Raise UsageError for lists of ranks that no group has, and where a rank made calls of a group
    that its own dump lists without it."""
    for name, listed in group_ranks.items():
        if len(set(listed)) < len(listed) or max(listed, default=0) >= RANK_LIMIT:
            raise UsageError(
                f"{where}: expected ranks below {RANK_LIMIT}, each once, in group {shortened(name)}, got "
                f"{', '.join(map(str, listed[:8]))}: the dump is damaged. Copy it again, or remove it to go on without"
            )
    for name in dict.fromkeys(entry.process_group[0] for entry in entries):
        ranks = group_ranks.get(name)
        if ranks and rank not in ranks:
            raise UsageError(
                f"{where}: expected rank {rank} to be in its group {shortened(name)}, got ranks "
                f"{', '.join(map(str, ranks[:8]))}: give the dumps of one job, named by their ranks"
            )


def _as_of_torch(where: str, entries: Sequence[Entry]) -> None:
    """Change what torchcomms' recorder notes in another way: calls are numbered from 0, and are
    retired when they have ended.

    Raises UsageError for calls of several communicators: they share their numbers, messages have no
    peers, and the ranks that are listed are not the job's.
    """
    if len({entry.process_group for entry in entries}) > 1:
        raise UsageError(
            f"{where}: expected calls of one communicator in a dump of torchcomms' recorder, got those of several, which "
            "it numbers together: give each a FlightRecorderHook(isolated=True)"
        )
    if any(entry.profiling_name.partition(":")[2] in ("send", "recv", "batch_op_issue") for entry in entries):
        raise UsageError(
            f"{where}: expected collectives alone in a dump of torchcomms' recorder, got messages, whose peers it does not "
            "note, and which it numbers with the collectives: remove the dump to go on without"
        )
    for entry in entries:
        entry.collective_seq_id += 1
        entry.state = "completed" if entry.retired else entry.state


def rank_in_name(name: str, *, or_last_number: bool = False) -> int | None:
    """Return the rank in a file's name: of ``nccl_trace_rank_3``; with ``or_last_number`` also of
    ``dump-0003.json``."""
    path = Path(name)
    suffix = path.suffix[1:]
    numbers = _RANK.findall(path.name)
    if not numbers and or_last_number:
        numbers = _LAST_DIGITS.findall(suffix if suffix.isdigit() else path.stem)
    rank = int(numbers[-1]) if numbers and len(numbers[-1]) <= 9 else RANK_LIMIT
    return rank if rank < RANK_LIMIT else None


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Inside, this process may take ``_MOST_MEMORY`` more address space; MemoryError is raised
    beyond. No garbage is collected: a dump is a hundred thousand objects, none of which is garbage
    before it is read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + _MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if collects:
            gc.enable()


def _ranks(text: str) -> tuple[int, ...]:
    """The ranks in a text such as ``[0, 1]``."""
    return tuple(int(each) for each in re.findall(r"\d{1,9}", text[: 1 << 20]))


def _kept(entries: Sequence[Entry], *, has_lost: bool, keeps_all: bool) -> list[Entry]:
    """Choose the entries to keep, each with the place that it was called from: where the ring has
    lost some, no message that has ended, as messages of the two ends are paired by counting
    them."""
    ended: dict[tuple[str, str], deque[int]] = {}
    kept: dict[int, Entry] = {}
    for place, entry in enumerate(entries):
        is_over = entry.has_ended
        entry.message = None
        message = _MESSAGE.fullmatch(entry.profiling_name.partition(":")[2])
        if message is not None and not (has_lost and is_over):
            entry.message = MessageEnd(message[1], int(message[3]))
        elif message is not None or entry.is_p2p or entry.collective_seq_id <= 0:
            continue
        kept[place] = entry
        if is_over and message is None and not keeps_all:
            last = ended.setdefault(entry.process_group, deque())
            last.append(place)
            if len(last) > _MOST_ENDED:
                del kept[last.popleft()]
    for entry in kept.values():
        entry.frames = [] if keeps_all else _innermost(entry.frames)
    return list(kept.values())


def _innermost(frames: list[CallFrame]) -> list[CallFrame]:
    """The innermost place that is neither torch's nor a decorator's, alone; without one, the
    innermost."""
    for frame in frames:
        file = frame.filename
        is_own = file and "/torch/" not in file and file[:1] != "<"
        if is_own and file.rpartition("/")[2] not in _WRAPPERS:
            return [frame]
    return frames[:1]
