"""Outputs of NCCL's RAS (``ncclras``, also with ``-f json``): communicators, ranks that miss, and
counts of calls.

Formats are those of NCCL 2.24 to 2.32 (``src/ras/client_support.cc``). RAS counts the collectives
that ranks have launched, by kind; sends and receives, and what is made of them, are in no count. A
rank with a lower count than others has not come to their call. One output cannot tell a rank that
is behind from one that hangs: of a job that hangs, a second one says the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog, Site, WaitLog, as_foreign
from commlayer.diagnosis.dump_readings import collective_kind
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.profiles.counted import listed
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.profiles.strict_json import parse_record

__all__ = ["RasCommunicator", "RasOutput", "diagnose_ras", "is_ras_json", "is_ras_text", "read_ras"]

_ONE_OUTPUT = (
    "one output of RAS does not tell a rank that is behind from one that hangs: "
    "take another a minute later, and give both"
)
_MOST_RANKS = 1 << 17
_MOST_COMMUNICATORS = 1 << 14
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)]
_TEXT_MARK = b"Ranks    Status  Errors"
_ROW = re.compile(r"\s*(\d{1,9})\s+\d{1,9}\s+\d{1,9}\s+[\d-]{1,9}\s+(\d{1,9})\s+\d{1,9}\s+\w+\s+\S+\s*")
_HEAD = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_DIFFERENT = re.compile(r"  Communicator ranks have different (\w{1,40}) operation counts")
_MANY = re.compile(r"  (\d{1,9}) ranks have (?:launched up to operation (\d{1,18})|not launched any operations)")
_ONE = re.compile(r"  Rank (\d{1,9}) has (?:launched up to operation (\d{1,18})|not launched any operations)")
_LISTED = re.compile(r"  Rank (\d{1,9}) -- ")


@dataclass
class RasCommunicator:
    """A communicator. ``counts``: of each rank that answered, how many calls of each kind it has
    launched; ``processes``: the host, process and device of each rank, where they are told;
    ``dead``, ``silent``: ranks that did not answer."""

    key: str
    size: int
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    processes: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RasOutput:
    """An output. ``communicators``: those of a text are only the ones with something wrong."""

    name: str
    communicators: tuple[RasCommunicator, ...]


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


class _JsonCommunicator(msgspec.Struct):
    hash: str
    secondary_hash: str
    size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_RANKS)]
    ranks: Annotated[list[_RasRank], msgspec.Meta(max_length=_MOST_RANKS)] = []
    missing_ranks: Annotated[list[_MissingRank], msgspec.Meta(max_length=_MOST_RANKS)] = []


class _RasJson(msgspec.Struct):
    communicators: Annotated[list[_JsonCommunicator], msgspec.Meta(max_length=_MOST_COMMUNICATORS)]


def is_ras_json(head: bytes) -> bool:
    """Tell whether a file that begins so is an output in JSON."""
    return head[:1] == b"{" and b'"nccl_version"' in head and b'"communicators"' in head


def is_ras_text(data: bytes) -> bool:
    """Tell whether a text is an output, or has one in it."""
    return _TEXT_MARK in data


def read_ras(name: str, data: bytes) -> RasOutput:
    """Read the output in ``data``, of the file ``name``. Raises UsageError, which names it."""
    if data.lstrip()[:1] != b"{":
        return RasOutput(name, tuple(_of_text(data.decode("utf-8", "replace"))))
    content = parse_record(data, _RasJson, name, "the output of ncclras -f json")
    for each in content.communicators:
        places = [rank.rank for rank in each.ranks] + [rank.rank for rank in each.missing_ranks]
        if max(places, default=0) >= each.size:
            raise UsageError(
                f"{shortened(name)}: expected ranks below {each.size} in communicator {shortened(each.hash)}, got "
                f"{max(places)}. Copy it again, or remove it to go on without"
            )
    return RasOutput(name, tuple(map(_of_json, content.communicators)))


def _of_json(content: _JsonCommunicator) -> RasCommunicator:
    missing = {each.rank: each.status.considered_dead for each in content.missing_ranks}
    return RasCommunicator(
        key=f"{content.hash}:{content.secondary_hash}",
        size=content.size,
        counts={each.rank: dict(each.collective_counts) for each in content.ranks},
        processes={each.rank: (each.host, each.pid, each.cuda_dev) for each in content.ranks},
        dead={rank for rank, is_dead in missing.items() if is_dead},
        silent={rank for rank, is_dead in missing.items() if not is_dead},
    )


def _of_text(text: str) -> list[RasCommunicator]:
    """The communicators with errors or warnings. Ranks that are not named one by one have the count
    that most have."""
    sizes: dict[str, int] = {}
    communicators: dict[str, RasCommunicator] = {}
    at: RasCommunicator | None = None
    section, kind, common = "", "", 0
    for line in text.splitlines():
        row, head = _ROW.fullmatch(line[:200]), _HEAD.match(line[:200])
        if row:
            sizes[row[1]] = int(row[2])
        elif head and 0 < sizes.get(head[1], 0) <= _MOST_RANKS and len(communicators) < _MOST_COMMUNICATORS:
            at, section = (
                communicators.setdefault(head[2], RasCommunicator(f"0x{head[2]}", sizes[head[1]])),
                head[3],
            )
        elif at is not None and section == "INCOMPLETE" and (one := _LISTED.match(line[:200])):
            at.silent.add(int(one[1]))
        elif at is not None and (different := _DIFFERENT.match(line[:200])):
            kind, common = different[1], -1
        elif at is not None and section == "MISMATCH" and kind:
            common = _take_count(at, kind, common, line[:200])
    return [each for each in communicators.values() if max((*each.counts, *each.silent, 0)) < each.size]


def _take_count(communicator: RasCommunicator, kind: str, common: int, line: str) -> int:
    """Take the counts of a line; return the one that the ranks listed below it have. The first is
    the most frequent."""
    many, one, each = _MANY.match(line), _ONE.match(line), _LISTED.match(line)
    if many:
        count = int(many[2] or 0)
        if common < 0:
            for rank in range(communicator.size):
                communicator.counts.setdefault(rank, {})[kind] = count
        return count
    if one:
        communicator.counts.setdefault(int(one[1]), {})[kind] = int(one[2] or 0)
    elif each and common >= 0:
        communicator.counts.setdefault(int(each[1]), {})[kind] = common
    return common


# What follows


def diagnose_ras(outputs: Sequence[RasOutput]) -> dict[str, tuple[list[RankLog], Diagnosis]]:
    """Return the logs that the last of ``outputs`` amounts to, and what is wrong.

    All communicators are judged together where one has all processes, whose ranks are the job's
    then; each by itself otherwise.
    """
    last = outputs[-1]
    before = {each.key: each.counts for output in outputs[:-1] for each in output.communicators}
    differing = [each for each in last.communicators if _differ(each)]
    stands_still = len(outputs) > 1 and all(before.get(each.key) == each.counts for each in differing)
    ranks_of = _job_ranks(last.communicators)
    remarks = () if stands_still else (_ONE_OUTPUT,)
    if ranks_of is not None:
        return {"": _judged(last.communicators, ranks_of, remarks, stands_still=stands_still)}
    results = {}
    for each in last.communicators:
        own = {each.key: {rank: rank for rank in range(each.size)}}
        results[f"communicator {each.key}"] = _judged((each,), own, remarks, stands_still=stands_still)
    nothing = Diagnosis(findings=(), waits=(), ranks=(), without=(), is_timeout=False)
    return results if len(results) > 1 else {"": next(iter(results.values()), ([], nothing))}


def _differ(communicator: RasCommunicator) -> bool:
    return len({tuple(sorted(counts.items())) for counts in communicator.counts.values()}) > 1


def _job_ranks(communicators: Sequence[RasCommunicator]) -> dict[str, dict[int, int]] | None:
    """The job's ranks of each communicator's: those in the one that has all processes; None: there
    is none such."""
    whole = max(communicators, key=lambda each: each.size, default=None)
    if whole is None or not all(each.processes for each in communicators):
        return None
    rank_of = {process: rank for rank, process in whole.processes.items()}
    ranks_of = {}
    for each in communicators:
        if any(process not in rank_of for process in each.processes.values()):
            return None
        ranks_of[each.key] = {rank: rank_of[process] for rank, process in each.processes.items()}
        if each is whole:
            ranks_of[each.key] |= {rank: rank for rank in each.dead | each.silent}
    return ranks_of


def _judged(
    communicators: Sequence[RasCommunicator],
    ranks_of: dict[str, dict[int, int]],
    remarks: tuple[str, ...],
    *,
    stands_still: bool,
) -> tuple[list[RankLog], Diagnosis]:
    ranks = tuple(sorted({rank for of in ranks_of.values() for rank in of.values()}))
    dead = {ranks_of[each.key].get(rank, -1) for each in communicators for rank in each.dead} - {-1}
    silent = {ranks_of[each.key].get(rank, -1) for each in communicators for rank in each.silent} - {-1}
    logs = [
        _log(rank, ranks, communicators, ranks_of, dead, is_over=stands_still)
        for rank in ranks
        if rank not in dead | silent
    ]
    diagnosis = diagnose(logs)
    if silent:
        remarks = (*remarks, f"{listed('rank', sorted(silent), 8)} did not answer RAS")
    return logs, msgspec.structs.replace(diagnosis, remarks=remarks)


def _log(
    rank: int,
    ranks: tuple[int, ...],
    communicators: Sequence[RasCommunicator],
    ranks_of: dict[str, dict[int, int]],
    dead: set[int],
    *,
    is_over: bool,
) -> RankLog:
    """The log of a rank: it waits in the last call of each kind of which others have launched
    fewer."""
    groups, calls, waits = [], [], []
    for each in communicators:
        members = ranks_of[each.key]
        own = next((counts for place, counts in each.counts.items() if members.get(place) == rank), None)
        if own is None:
            continue
        for kind, count in own.items():
            counts = [other.get(kind, 0) for other in each.counts.values()]
            is_ahead = count > 0 and (count > min(counts) or (bool(each.dead) and count == max(counts)))
            if len(set(counts)) == 1 and not is_ahead:
                continue
            key = f"{each.key}|{kind}"
            of = tuple(sorted(members.values()))
            groups.append(GroupLog(key=key, name=each.key, ranks=of, issued=count, done=count - is_ahead))
            if is_ahead:
                thread, site = len(groups), Site("", 0, "")
                calls.append(
                    CallLog(
                        group=len(groups) - 1,
                        number=count,
                        kind=collective_kind(kind),
                        site=site,
                        thread=thread,
                        is_async=True,
                    )
                )
                waits.append(
                    WaitLog(
                        thread=thread,
                        group=len(groups) - 1,
                        kind=collective_kind(kind),
                        number=count,
                        site=site,
                    )
                )
    return as_foreign(
        RankLog(
            job="",
            rank=rank,
            ranks=ranks,
            reason="timeout" if is_over else "asked",
            groups=tuple(groups),
            calls=tuple(calls),
            waits=tuple(waits),
            hidden=tuple(wait.thread for wait in waits) or (0,),
            gone=dict.fromkeys(sorted(dead), "RAS considers it dead"),
        )
    )
