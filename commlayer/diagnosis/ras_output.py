"""Outputs of NCCL's RAS (``ncclras``, also with ``-f json``): communicators, ranks that miss, and
counts of calls.

Formats are those of NCCL 2.24 to 2.32 (``src/ras/client_support.cc``). RAS counts the collectives
that ranks have launched, by kind; sends and receives, and what is made of them, are in no count. A
rank with a lower count than others has not come to their call. One output cannot tell a rank that
is behind from one that hangs: of a job that hangs, a second one says the same.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog, Site, inferred_log
from commlayer.diagnosis.diagnosis_words import ranks_words
from commlayer.diagnosis.dump_groups import collective_kind
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable, shortened
from commlayer.profiles.strict_json import parse_record

__all__ = ["RasCommunicator", "RasOutput", "diagnose_ras", "is_ras_json", "is_ras_text", "read_ras"]

_ONE_OUTPUT = (
    "one output of RAS does not tell a rank that is behind from one that hangs: "
    "take another a minute later, and give both"
)
_LAST_IN_FLIGHT = "RAS counts calls that were launched: the last one of each rank is taken not to have ended"
_IN_MESSAGE = "it may be in a message, which RAS does not count"
_UNLISTED_STAND = "communicators of which RAS lists no fault are taken to stand still too"
_GOES_ON = "the two outputs have different counts: the job makes progress"
_EVEN = (
    "no rank has launched a collective between the two outputs, and all have launched as many: the "
    "last ones may hang (network, device), or the program is in messages, or in none"
)
_LEAST_APART_S = 5.0
"""Seconds between two outputs from which on counts that stay the same say that a job hangs."""
_MOST_NOTES = 4
_MOST_RANKS = 1 << 17
_MOST_COMMUNICATORS = 1 << 14
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)]
_TEXT_MARK = b"Ranks    Status  Errors"
_ROW = re.compile(r"\s*(\d{1,9})\s+\d{1,9}\s+\d{1,9}\s+[\d-]{1,9}\s+(\d{1,9})\s+\d{1,9}\s+\w+\s+\S+\s*")
_HEAD = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_JOB_HEAD = re.compile(r"(INCOMPLETE|DEAD|TIMEOUT)\s*")
_DIFFERENT = re.compile(r"  Communicator ranks have different (\w{1,40}) operation counts")
_MANY = re.compile(r"  (\d{1,9}) ranks have (?:launched up to operation (\d{1,18})|not launched any operations)")
_ONE = re.compile(r"  Rank (\d{1,9}) has (?:launched up to operation (\d{1,18})|not launched any operations)")
_LISTED = re.compile(r"  Rank (\d{1,9}) -- ")
_MISSING = re.compile(r"  The missing ranks?: ([\d, ]{1,150})")


@dataclass
class RasCommunicator:
    """A communicator. ``counts``: of each rank that answered, how many calls of each kind it has
    launched; ``announced``: of each kind, how many ranks have each count, where only ranks with
    rare counts are listed; ``processes``: the host, process and device of each rank, where they are
    told; ``dead``, ``silent``: ranks that did not answer."""

    key: str
    size: int
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    announced: dict[str, Counter[int]] = field(default_factory=dict)
    processes: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)

    @property
    def untold(self) -> list[str]:
        """Kinds of which some ranks have other counts than most, and are not listed."""
        counts = self.counts.values()
        return [
            kind
            for kind, announced in self.announced.items()
            if Counter(each[kind] for each in counts if kind in each) != announced
        ]

    @property
    def told(self) -> dict[int, dict[str, int]]:
        """The counts of the kinds of which every rank's is known."""
        untold = self.untold
        return {
            rank: {kind: count for kind, count in counts.items() if kind not in untold}
            for rank, counts in self.counts.items()
        }

    def is_as(self, before: RasCommunicator | None) -> bool:
        """Tell whether it has made no progress since ``before``."""
        return before is not None and (self.counts, self.announced) == (
            before.counts,
            before.announced,
        )


@dataclass(frozen=True)
class RasOutput:
    """An output. ``communicators``: those of a text are only the ones with something wrong;
    ``moment``: the time that it says, which a text does not; ``checksum``: of its bytes; ``notes``:
    sentences on faults that cannot be told of ranks."""

    name: str
    communicators: tuple[RasCommunicator, ...]
    moment: str = ""
    checksum: int = 0
    notes: tuple[str, ...] = ()

    def is_copy_of(self, other: RasOutput) -> bool:
        """Tell whether both are one output: of a text, in files of one name."""
        if self.moment:
            return self.moment == other.moment
        in_two_files = self.name != other.name and Path(self.name).name == Path(other.name).name
        return in_two_files and self.checksum == other.checksum

    def is_long_after(self, other: RasOutput) -> bool:
        """Tell whether so much time lies between both that a job makes progress in it; of texts,
        which do not tell: that is taken for granted."""
        try:
            apart = datetime.fromisoformat(self.moment) - datetime.fromisoformat(other.moment)
        except (TypeError, ValueError):
            return True
        return apart.total_seconds() >= _LEAST_APART_S


class _MissingStatus(msgspec.Struct):
    considered_dead: bool = False


class _MissingRank(msgspec.Struct):
    rank: _Rank
    status: _MissingStatus = msgspec.field(default_factory=_MissingStatus)


class _RasRank(msgspec.Struct):
    rank: _Rank
    host: str = ""
    pid: int = -1
    cuda_dev: int = -1
    collective_counts: dict[str, _Count] = {}


_Hash = Annotated[str, msgspec.Meta(max_length=64)]


class _JsonCommunicator(msgspec.Struct):
    hash: _Hash
    secondary_hash: _Hash
    size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS)]
    ranks: Annotated[list[_RasRank], msgspec.Meta(max_length=_MOST_RANKS)] = []
    missing_ranks: Annotated[list[_MissingRank], msgspec.Meta(max_length=_MOST_RANKS)] = []


class _RasJson(msgspec.Struct):
    communicators: Annotated[list[_JsonCommunicator], msgspec.Meta(max_length=_MOST_COMMUNICATORS)]
    timestamp: Annotated[str, msgspec.Meta(max_length=64)] = ""


def is_ras_json(head: bytes) -> bool:
    """Tell whether a file that begins so is an output in JSON."""
    return head[:1] == b"{" and b'"nccl_version"' in head and b'"communicators"' in head


def is_ras_text(data: bytes) -> bool:
    """Tell whether a text is an output, or has one in it."""
    return _TEXT_MARK in data


def read_ras(name: str, data: bytes) -> RasOutput:
    """Read the output in ``data``, of the file ``name``. Raises UsageError, which names it."""
    if data.lstrip()[:1] != b"{":
        text = _Text()
        for line in data.decode("utf-8", "replace").splitlines():
            text.take(line[:200])
        # Those of which no rank is beyond their size, and what it says of processes and errors.
        sound = (each for each in text.communicators.values() if max((*each.counts, *each.silent, 0)) < each.size)
        notes = (
            f"RAS writes {of}: {printable('; '.join(lines[:_MOST_NOTES]), keep='')}"
            for of, lines in itertools.islice(text.notes.items(), _MOST_NOTES)
        )
        return RasOutput(name, tuple(sound), checksum=zlib.crc32(data), notes=tuple(notes))
    content = parse_record(data, _RasJson, name, "the output of ncclras -f json")
    for each in content.communicators:
        places = [rank.rank for rank in each.ranks] + [rank.rank for rank in each.missing_ranks]
        if max(places, default=0) >= each.size:
            raise UsageError(
                f"{shortened(name)}: expected ranks below {each.size} in communicator {shortened(each.hash)}, got "
                f"{max(places)}. Copy it again, or remove it to go on without"
            )
    return RasOutput(name, tuple(map(_of_json, content.communicators)), content.timestamp)


def _of_json(content: _JsonCommunicator) -> RasCommunicator:
    dead = {each.rank for each in content.missing_ranks if each.status.considered_dead}
    return RasCommunicator(
        key=printable(f"{content.hash}:{content.secondary_hash}", keep=""),
        size=content.size,
        counts={each.rank: dict(each.collective_counts) for each in content.ranks},
        processes={each.rank: (each.host, each.pid, each.cuda_dev) for each in content.ranks},
        dead=dead,
        silent={each.rank for each in content.missing_ranks} - dead,
    )


class _Text:
    """The state of reading a text. ``at``, ``section``, ``kind``: the communicator, the fault and
    the kind of calls that the next lines are about; ``common``: the count of the ranks that they
    list, −1: none yet. Ranks that are not listed have the count that most have."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.communicators: dict[str, RasCommunicator] = {}
        self.notes: dict[str, list[str]] = {}
        self.at: RasCommunicator | None = None
        self.section, self.kind, self.common = "", "", -1

    def take(self, line: str) -> None:
        """Take the next line."""
        row, head, of_job = _ROW.fullmatch(line), _HEAD.match(line), _JOB_HEAD.fullmatch(line)
        if row:
            self.sizes[row[1]] = int(row[2])
        elif head or of_job:
            self.at = None
            size = self.sizes.get(head[1], 0) if head else 0
            if head and 0 < size <= _MOST_RANKS and len(self.communicators) < _MOST_COMMUNICATORS:
                self.at = self.communicators.setdefault(head[2], RasCommunicator(f"0x{head[2]}", size))
            self.section, self.kind = head[3] if head else line.strip(), ""
        elif self.section == "MISMATCH":
            if line.startswith("  Communicator ranks have different"):
                different = _DIFFERENT.match(line)
                self.kind, self.common = different[1] if different else "", -1
            elif self.at is not None and self.kind:
                self._take_count(self.at, line)
        elif self.section and line[:2] == "  ":
            of = f" of communicator {self.at.key}" if self.at else ""
            self.notes.setdefault(f"{self.section}{of}", []).append(line.strip())
            if self.at and self.section == "INCOMPLETE":
                listed_rank, missing = _LISTED.match(line), _MISSING.match(line)
                ranks = re.findall(r"\d{1,9}", missing[1]) if missing else []
                self.at.silent.update(map(int, [listed_rank[1]] if listed_rank else ranks))

    def _take_count(self, at: RasCommunicator, line: str) -> None:
        """Take the counts of a line. The first is the most frequent one."""
        many, one, listed_rank = _MANY.match(line), _ONE.match(line), _LISTED.match(line)
        announced = at.announced.setdefault(self.kind, Counter())
        if many:
            count = int(many[2] or 0)
            announced[count] += int(many[1])
            if self.common < 0:
                for rank in set(range(at.size)) - at.silent:
                    at.counts.setdefault(rank, {})[self.kind] = count
            self.common = count
        elif one:
            announced[int(one[2] or 0)] += 1
            at.counts.setdefault(int(one[1]), {})[self.kind] = int(one[2] or 0)
        elif listed_rank and self.common >= 0:
            at.counts.setdefault(int(listed_rank[1]), {})[self.kind] = self.common


# What follows


def diagnose_ras(outputs: Sequence[RasOutput]) -> dict[str, tuple[list[RankLog], Diagnosis]]:
    """Return the logs that the last of ``outputs`` amounts to, and what is wrong.

    All communicators are judged together where one has all processes, whose ranks are the job's
    then; each by itself otherwise.
    """
    distinct: list[RasOutput] = []
    for output in outputs:  # an archive may lie beside its files
        if not any(output.is_copy_of(other) for other in distinct):
            distinct.append(output)
    *earlier, last = sorted(distinct, key=lambda output: output.moment)
    before = next((each for each in reversed(earlier) if last.is_long_after(each)), None)
    progress = _progress(last, before)
    widest = max(last.communicators, key=lambda each: each.size, default=None)
    rank_of = {process: rank for rank, process in widest.processes.items()} if widest else {}
    if all(each.processes and rank_of.keys() >= set(each.processes.values()) for each in last.communicators):
        ranks_of = {
            each.key: {rank: rank_of[process] for rank, process in each.processes.items()}
            for each in last.communicators
        }
        if widest is not None:
            ranks_of[widest.key] |= {rank: rank for rank in widest.dead | widest.silent}
        return {"": _judged(last.communicators, ranks_of, last, progress)}
    results = {}
    for each in last.communicators:
        own = {each.key: {rank: rank for rank in range(each.size)}}
        results[f"communicator {each.key}"] = _judged((each,), own, last, progress)
    return results if len(results) > 1 else {"": next(iter(results.values()))}


_Progress = tuple[bool, dict[str, tuple[str, ...]]]


def _progress(last: RasOutput, before: RasOutput | None) -> _Progress:
    """Whether some ranks are behind others or dead, and none has launched a call between two
    outputs; and sentences, by the field of a diagnosis that they belong to."""
    has_trouble = any(_differ(each) or each.untold or each.dead for each in last.communicators)
    if before is None:
        is_open = has_trouble or any(each.silent for each in last.communicators)
        return False, {"open" if is_open else "remarks": (_ONE_OUTPUT,)}
    of_key = {each.key: each for each in before.communicators}
    if not all(each.is_as(of_key.get(each.key)) for each in last.communicators):
        return False, {"remarks": (_GOES_ON,)}
    if not has_trouble:
        return False, {"open": (_EVEN,) if last.communicators else ()}
    return True, {"assumed": (_LAST_IN_FLIGHT, *(() if last.moment else (_UNLISTED_STAND,)))}


def _differ(communicator: RasCommunicator) -> bool:
    return len({tuple(sorted(counts.items())) for counts in communicator.told.values()}) > 1


def _judged(
    communicators: Sequence[RasCommunicator],
    ranks_of: dict[str, dict[int, int]],
    last: RasOutput,
    progress: _Progress,
) -> tuple[list[RankLog], Diagnosis]:
    stands_still, sentences = progress
    ranks = tuple(sorted({rank for of in ranks_of.values() for rank in of.values()}))
    dead = {ranks_of[each.key].get(rank, -1) for each in communicators for rank in each.dead} - {-1}
    silent = {ranks_of[each.key].get(rank, -1) for each in communicators for rank in each.silent} - {-1}
    reason = "timeout" if stands_still else "asked"
    logs = [_log(rank, ranks, communicators, ranks_of, dead, reason) for rank in ranks if rank not in dead | silent]
    open_ = [*sentences.get("open", ()), *last.notes]
    if dead:
        open_.append(f"RAS considers {ranks_words(sorted(dead))} dead")
    if silent:
        open_.append(f"{ranks_words(sorted(silent))} did not answer RAS")
    open_ += [
        f"cannot tell which ranks of communicator {each.key} have launched fewer {kind}: RAS does not "
        "list them: run ncclras -v"
        for each in communicators
        for kind in each.untold
    ]
    diagnosis = diagnose(logs)
    return logs, msgspec.structs.replace(
        diagnosis,
        waits=tuple(each.doubted(_IN_MESSAGE, each.certainty) for each in diagnosis.waits),
        is_timeout=stands_still or bool(dead),
        **{**sentences, "open": tuple(open_)},
    )


def _log(
    rank: int,
    ranks: tuple[int, ...],
    communicators: Sequence[RasCommunicator],
    ranks_of: dict[str, dict[int, int]],
    dead: set[int],
    reason: str,
) -> RankLog:
    """The log of a rank: it waits in the last call of each kind of which others have launched
    fewer."""
    groups, calls = [], []
    for each in communicators:
        members = ranks_of[each.key]
        told = each.told
        own = next((counts for place, counts in told.items() if members.get(place) == rank), {})
        for kind, count in own.items():
            counts = [other.get(kind, 0) for other in told.values()]
            is_ahead = count > 0 and (count > min(counts) or (bool(each.dead) and count == max(counts)))
            if len(set(counts)) == 1 and not is_ahead:
                continue
            key, of = f"{each.key}|{kind}", tuple(sorted(members.values()))
            groups.append(GroupLog(key=key, name=each.key, ranks=of, issued=count, done=count - is_ahead))
            if is_ahead:
                calls.append(
                    CallLog(
                        group=len(groups) - 1,
                        number=count,
                        kind=collective_kind(kind),
                        site=Site("", 0, ""),
                        thread=len(groups),
                        is_async=True,
                    )
                )
    gone = dict.fromkeys(sorted(dead), "RAS considers it dead")
    return inferred_log(rank=rank, ranks=ranks, reason=reason, groups=groups, calls=calls, gone=gone)
