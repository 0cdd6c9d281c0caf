"""The logs of ranks as dumps of torch's Flight Recorder, for the analyzers that there are for
those.

Torch's own (``torchfrtrace``, ``torch.distributed.flight_recorder``) matches the calls of each
group by their numbers; it takes uneven splits under the name all_to_all only, and cannot tell there
whether they meet. It sees no circle over several groups.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commlayer.calls.group_life import LIFE_KEY
from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog
from commlayer.diagnosis.dump_groups import RECORDED_DTYPES
from commlayer.profiles.files import write_file

__all__ = ["flight_recorder_dump", "write_flight_recorder"]

_VERSION = "2.10"
_PREFIX = "commlayer_rank_"
_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "all_to_all",
    "all_to_all_v": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
_STATES = {"issued": "scheduled", "started": "started", "done": "completed"}
_DTYPES = {name: (of_torch, width) for of_torch, (name, width) in RECORDED_DTYPES.items()}
"""The names that torch's recorder gives dtypes, and the bytes of an element."""


def flight_recorder_dump(log: RankLog, logs: Sequence[RankLog]) -> dict[str, Any]:
    """Return what torch would have pickled for this rank. ``logs``: those of all ranks, which must
    name groups alike."""
    described = {group.key: group.description for each in logs for group in each.groups if group.description}
    config: dict[str, dict[str, str]] = {}
    for group in log.groups:
        if group.key.endswith(LIFE_KEY):
            continue
        name, description = group.key, described.get(group.key, "undefined")
        config[name] = {"name": name, "desc": description, "ranks": str(list(group.ranks))}
    oldest: dict[tuple[object, ...], int] = {}  # the number from which on the rings of all ranks still have the calls
    for each in logs:
        own: dict[tuple[object, ...], int] = {}
        for call in each.calls:
            line = _line(each, call)
            own[line] = min(own.get(line, call.number), call.number)
        oldest |= {line: max(oldest.get(line, 0), number) for line, number in own.items()}
    order = sorted(log.calls, key=lambda call: call.issued_ns)
    entries = [
        _entry(index, call, log, described.get(log.groups[call.group].key, "undefined"))
        for index, call in enumerate(order)
        if (call.is_message or call.kind in _NAMES) and call.number >= oldest.get(_line(log, call), 0)
    ]
    return {
        "version": _VERSION,
        "pg_config": config,
        "pg_status": {
            str(index): {
                "last_enqueued_collective": group.issued,
                "last_started_collective": min(group.issued, group.done + 1),
                "last_completed_collective": group.done,
            }
            for index, group in enumerate(log.groups)
        },
        "entries": entries,
    }


def _line(log: RankLog, call: CallLog) -> tuple[object, ...]:
    """Which calls are numbered with this one: its group's, or the messages between two ranks."""
    key = log.groups[call.group].key
    if not call.is_message:
        return (key,)
    return key, *((log.rank, call.peer) if call.kind == "send" else (call.peer, log.rank)), call.tag


def write_flight_recorder(folder: Path, logs: Sequence[RankLog]) -> list[Path]:
    """Write a dump for each rank, as the analyzer finds them: ``torchfrtrace FOLDER``. Raises
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for log in logs:
        path = folder / f"{_PREFIX}{log.rank}"
        write_file(path, pickle.dumps(flight_recorder_dump(log, logs), protocol=4))
        paths.append(path)
    return paths


def _entry(index: int, call: CallLog, log: RankLog, description: str) -> dict[str, Any]:
    group = log.groups[call.group]
    dtype, width = _DTYPES.get(call.dtype, (call.dtype, 1))
    into, out = _sizes(call, group, width)
    dtypes = [dtype] if dtype else []
    return {
        # The analyzer drops by this number what other ranks do not have any more; ranks of several
        # groups count differently.
        "record_id": 0,
        "pg_id": call.group,
        "process_group": (group.key, description),
        "collective_seq_id": 0 if call.is_message else call.number,
        "p2p_seq_id": call.number if call.is_message else 0,
        "op_id": index + 1,
        "profiling_name": f"gloo:{_name(call, log, group)}",
        "time_created_ns": call.issued_ns,
        "duration_ms": None,
        "input_sizes": into,
        "input_dtypes": dtypes if into else [],
        "output_sizes": out,
        "output_dtypes": dtypes if out else [],
        "state": _STATES[call.state],
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": call.state == "done",
        "timeout_ms": 0,
        "is_p2p": call.is_message,
        "frames": [{"name": call.site.function, "filename": call.site.file, "line": call.site.line}],
        "thread_id": str(call.thread),
    }


def _name(call: CallLog, log: RankLog, group: GroupLog) -> str:
    if not call.is_message:
        return _NAMES[call.kind]
    ordered = sorted(group.ranks)  # the analyzer's places in a group
    here = ordered.index(log.rank)
    there = ordered.index(call.peer) if call.peer in ordered else here
    return f"send {here}->{there}" if call.kind == "send" else f"recv {here}<-{there}"


def _sizes(call: CallLog, group: GroupLog, width: int) -> tuple[list[list[int]], list[list[int]]]:
    """The numbers of elements that go in and come out."""
    sent, received = max(call.sent, 0) // width, max(call.received, 0) // width
    if call.kind in ("barrier", "monitored_barrier"):
        return [[1]], [[1]]
    if call.kind == "send":
        return [[sent]], [[sent]]
    if call.kind == "recv":
        return [[received]], [[received]]
    if call.kind == "all_gather" and call.of is None and received != sent * len(group.ranks):
        received = sent * len(group.ranks)
    return [[sent]], [[received]]
