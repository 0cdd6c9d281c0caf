"""Statistics of what the backend's groups have moved: counted on every call, read by :func:`stats`,
printed at exit by ``COMMLAYER_STATS=1``.

Every rank counts for itself. A call costs a few additions here; everything else happens when
somebody reads.
"""

from __future__ import annotations

import atexit
from collections import deque
from typing import TypedDict

from commlayer.calls.counters import CallStats, GroupStats, counted_groups, reset_groups
from commlayer.calls.under_way import settle_calls
from commlayer.forked_child import in_forked_child
from commlayer.profiles.counted import counted
from commlayer.profiles.printable import say_table

__all__ = [
    "DispatchStats",
    "PlacementStats",
    "SpillStats",
    "Stats",
    "came_of_placement",
    "count_dispatch",
    "count_spill",
    "name_replica",
    "note_placement",
    "print_at_exit",
    "reset_stats",
    "stats",
]


class DispatchStats(TypedDict):
    """The statistics of MoE dispatches of one way: who asked for them (``dispatcher``, such as
    ``Megatron-Core``), among which global ``ranks``, which way they took (``kind``, such as
    ``two_level × 1``), how many there were, and of how many of this rank's tokens.

    Their bytes and times are those of the groups' calls, and not counted again.
    """

    dispatcher: str
    ranks: list[int]
    kind: str
    calls: int
    tokens: int


class PlacementStats(TypedDict):
    """One decision about where experts lie, as rank 0 of a pipeline stage knows it, or one
    migration: at which ``step``, how many ``layers`` changed, how many ``copies`` of experts moved
    and how many bytes each took, and ``reason``, in words, with what is expected.

    Of a migration also what was promised and measured, µs. ``migration_us``: from its start until
    weights and optimizer state had come, on the slowest rank, beside a step; ``waited_us``: for how
    long a step stood still for it, with the gradients that follow. ``step_before_us``, ``step_us``:
    the median of a training step before experts began to move, and behind the migration;
    ``promised_step_us``: the former less what was promised to be saved, at least 0. None where it
    is not known (yet): nothing is promised of placements that a program chose itself, and a median
    takes three steps.
    """

    step: int
    layers: int
    copies: int
    copy_bytes: int
    reason: str
    promised_migration_us: float | None
    migration_us: float | None
    waited_us: float | None
    step_before_us: float | None
    promised_step_us: float | None
    step_us: float | None


class SpillStats(TypedDict):
    """The statistics of experts whose weights went along with rows: among which global ``ranks`` of
    a dispatcher, by which ``rule``; in how many ``calls`` the load was uneven, in how many of these
    something ``spilled``; how many ``experts`` were lent in all, each once to a rank, and for how
    many ``rows``, of all ranks; the bytes of weights that this rank lent and was lent, without
    gradients, which take as many where there are some; and the latest ``reason``, in words.
    """

    dispatcher: str
    ranks: list[int]
    rule: str
    calls: int
    spilled: int
    experts: int
    rows: int
    lent_bytes: int
    guest_bytes: int
    reason: str


class Stats(TypedDict):
    """The statistics of this rank. ``rank`` is None before the first group. ``placements``: the
    last 64."""

    rank: int | None
    groups: list[GroupStats]
    dispatches: list[DispatchStats]
    placements: list[PlacementStats]
    spills: list[SpillStats]


_dispatches: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
"""Calls and tokens, by dispatcher, ranks and kind."""


def count_dispatch(dispatcher: str, ranks: tuple[int, ...], kind: str, num_tokens: int) -> None:
    """Count one dispatch of this rank's tokens."""
    counted = _dispatches.setdefault((dispatcher, ranks, kind), [0, 0])
    counted[0] += 1
    counted[1] += num_tokens


_spills: dict[tuple[str, tuple[int, ...], str], SpillStats] = {}
"""Counts of what spilled, by dispatcher, ranks and rule."""


def count_spill(
    dispatcher: str,
    ranks: tuple[int, ...],
    rule: str,
    *,
    experts: int,
    rows: int,
    weight_bytes: tuple[int, int],
    reason: str,
) -> None:
    """Count one call whose load was uneven; ``weight_bytes``: that this rank lent, and was lent."""
    before = _spills.get((dispatcher, ranks, rule))
    _spills[dispatcher, ranks, rule] = {
        "dispatcher": dispatcher,
        "ranks": list(ranks),
        "rule": rule,
        "calls": 1 + (before["calls"] if before else 0),
        "spilled": (experts > 0) + (before["spilled"] if before else 0),
        "experts": experts + (before["experts"] if before else 0),
        "rows": rows + (before["rows"] if before else 0),
        "lent_bytes": weight_bytes[0] + (before["lent_bytes"] if before else 0),
        "guest_bytes": weight_bytes[1] + (before["guest_bytes"] if before else 0),
        "reason": reason,
    }


_placements: deque[PlacementStats] = deque(maxlen=64)


def note_placement(noted: PlacementStats) -> None:
    """Keep a decision about where experts lie."""
    _placements.append(noted)


def came_of_placement(placed: PlacementStats) -> str:
    """Say what a migration took, and steps behind it, against what was promised; nothing of a
    decision that moved nothing."""
    from commlayer.units import format_us

    def promised(us: float | None) -> str:
        return "" if us is None else f" (promised {format_us(us)})"

    words = []
    if placed["migration_us"] is not None:
        words.append(
            f"the migration took {format_us(placed['migration_us'])}{promised(placed['promised_migration_us'])}"
        )
    if placed["waited_us"] is not None:
        words.append(f"a step waited {format_us(placed['waited_us'])} for it")
    if placed["step_us"] is not None:
        before = "" if placed["step_before_us"] is None else f", {format_us(placed['step_before_us'])} before"
        words.append(f"steps take {format_us(placed['step_us'])}{promised(placed['promised_step_us'])}{before}")
    return "; ".join(words)


def stats() -> Stats:
    """Return what this rank has moved over the groups of the backend ``commlayer`` since the start,
    or :func:`reset_stats`.

    Plain data (:class:`Stats`), also of groups that are destroyed: the last 64 of these each, all
    earlier ones as one group, ``ended groups``. Not collective: every rank has its own numbers.
    """
    settle_calls()
    rank, groups = counted_groups()
    return {
        "rank": rank,
        "groups": [group for group in groups if group["calls"] or group["unplanned"]],
        "dispatches": [
            {"dispatcher": dispatcher, "ranks": list(ranks), "kind": kind, "calls": calls, "tokens": tokens}
            for (dispatcher, ranks, kind), (calls, tokens) in list(_dispatches.items())
        ],
        "placements": [each.copy() for each in list(_placements)],
        "spills": list(_spills.values()),
    }


def reset_stats() -> None:
    """Start counting anew."""
    reset_groups()
    _dispatches.clear()
    _placements.clear()
    _spills.clear()


_printing: tuple[int, str] | None = None
"""This rank, and the name of its replica, once they are to be printed."""


def print_at_exit(rank: int, replica: str = "") -> None:
    """Print the table when the interpreter ends, where ``rank`` is 0, to stderr.

    ``rank``: in the job, which a replica of several may be: of its name, ``replica``, the first
    that is told is printed.
    """
    global _printing
    if _printing is None:
        atexit.register(_print)
    _printing = rank, replica or (_printing[1] if _printing else "")


def name_replica(name: str) -> None:
    """Note what others call the replica that this job is: for what is printed, where nobody has
    given it another name."""
    global _printing
    if _printing is not None and not _printing[1]:
        _printing = _printing[0], name


@in_forked_child
def _begin_anew() -> None:
    """A forked child's calls are its own, and its parent prints what it has counted before."""
    global _printing
    _dispatches.clear()
    _placements.clear()
    _spills.clear()
    atexit.unregister(_print)
    _printing = None


def _print() -> None:
    numbers = stats()
    rank, replica = _printing or (0, "")
    if rank == 0 and numbers["rank"] is not None:
        print_stats(numbers, f"commlayer, {replica + ', ' if replica else ''}rank {rank}")


def print_stats(found: Stats, title: str = "") -> None:
    """Write ``found`` as a table to stderr, under ``title``, or the rank."""
    from commlayer.units import format_bytes, format_us

    def wire(call: CallStats, link: str) -> str:
        return "?" if call["wire_bytes"] is None else format_bytes(call["wire_bytes"][link])

    columns = ["group", "collective", "plan", ">calls", ">logical", ">sent inter", ">sent intra", ">time", ">µs/call"]
    rows = [
        [
            f"{group['group'][:12]} ({counted(len(group['ranks']), 'rank')})",
            call["collective"],
            call["plan"],
            str(call["calls"]),
            format_bytes(call["logical_bytes"]),
            wire(call, "inter"),
            wire(call, "intra"),
            format_us(call["time_us"]),
            f"{call['time_us'] / call['calls']:.4g}",
        ]
        for group in found["groups"]
        for call in group["calls"]
    ]
    lines = [
        f"{each['dispatcher']} dispatched over {counted(len(each['ranks']), 'rank')} by {each['kind']}: "
        f"{counted(each['calls'], 'call')}, {counted(each['tokens'], 'token')}"
        for each in found["dispatches"]
    ]
    for spill in found["spills"]:
        lent, guests = format_bytes(spill["lent_bytes"]), format_bytes(spill["guest_bytes"])
        lines.append(
            f"{spill['dispatcher']} over {len(spill['ranks'])} ranks: experts spilled in {spill['spilled']} of "
            f"{counted(spill['calls'], 'uneven call')}, {counted(spill['rows'], 'row')}; this rank lent weights of "
            f"{lent}, and was lent {guests}. {spill['reason']}"
        )
    for placed in found["placements"]:
        came = came_of_placement(placed)
        lines.append(f"experts, step {placed['step']}: {placed['reason']}{'; ' if came else ''}{came}")
    lines += [
        f"group {group['group'][:12]}: {counted(count, 'call')} flat: {reason}"
        for group in found["groups"]
        for reason, count in group["unplanned"].items()
    ]
    say_table(title or f"commlayer, rank {found['rank']}", columns, rows, lines)
