"""Which calls go together, and where they do not: the n-th call of a group must be the same on all
its members.

What has to be alike depends on the kind: the dtype always (save of a message, which is bytes), the
operation and the root where there are any, sizes as far as the kind asks for it. What a rank sends
to another must be what that one expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from commlayer.diagnosis.call_logs import CallLog
from commlayer.profiles.counted import listed

__all__ = ["Unlike", "difference", "message_difference", "shared_signature"]

_SENT_ALIKE = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
_EXCHANGES = ("all_to_all", "all_gather")
"""The kinds in which each member may have parts of its own size, which both ends have to know."""
_FIELDS: tuple[tuple[str, Callable[[CallLog], object]], ...] = (
    ("collective", lambda call: call.kind),
    ("dtype", lambda call: call.dtype),
    ("operation", lambda call: call.op),
    ("root", lambda call: call.root if call.root >= 0 else ""),
)


class Unlike(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between calls that should be one. ``what``: collective, dtype, operation, root,
    size or splits.

    ``odd``: the ranks that differ from most others; where no more agree than differ, those of the
    higher ranks.
    """

    what: str
    odd: tuple[int, ...]
    words: str


def shared_signature(call: CallLog) -> tuple[object, ...]:
    """The part of a call that all ranks must have alike, as far as one rank can say it."""
    size = call.sent if call.kind in _SENT_ALIKE and call.of is None else -1
    return call.kind, call.dtype, size  # operation and root are known of a group's last call only


def difference(calls: Mapping[int, CallLog], members: Sequence[int]) -> Unlike | None:
    """How the calls of these ranks (global) differ; None: they fit. ``members``: all of the group,
    in its order."""
    for what, value in _FIELDS:
        unlike = _odd(what, {rank: value(call) for rank, call in calls.items()})
        if unlike is not None:
            return unlike
    kind = next(iter(calls.values())).kind
    if kind in _SENT_ALIKE and all(call.of is None and call.sent >= 0 for call in calls.values()):
        unlike = _odd("size", {rank: call.sent for rank, call in calls.items()}, unit=" bytes")
        if unlike is not None:
            return unlike
    if kind in _SENT_ALIKE:
        counts = {rank: call.elements if call.elements >= 0 else "" for rank, call in calls.items()}
        unlike = _odd("size", counts, unit=" elements")
        if unlike is not None:
            return unlike
    if kind not in _EXCHANGES:
        return None
    unlike = _parts(calls, members)
    if unlike is not None or len(calls) != len(members):
        return unlike
    # Splits are not known: what all members of an all_to_all send against what they expect, in sum.
    unknown = any(call.kind != "all_to_all" or min(call.sent, call.received) < 0 for call in calls.values())
    sent, expected = sum(call.sent for call in calls.values()), sum(call.received for call in calls.values())
    if unknown or sent == expected:
        return None
    uneven = tuple(sorted(rank for rank, call in calls.items() if call.sent != call.received))
    return Unlike(
        what="splits",
        odd=uneven if 2 * len(uneven) < len(calls) else tuple(sorted(calls)),
        words=f"splits differ: all members together send {sent} bytes and expect {expected}",
    )


def _odd(what: str, values: Mapping[int, object], unit: str = "") -> Unlike | None:
    known = {rank: value for rank, value in values.items() if value != ""}
    if len(set(known.values())) < 2:
        return None
    ranks = sorted(known)
    counts = Counter(known.values())
    most = max(counts, key=lambda value: (counts[value], -min(rank for rank in ranks if known[rank] == value)))
    odd = tuple(rank for rank in ranks if known[rank] != most)
    each = "; ".join(
        f"{listed('rank', (rank for rank in ranks if known[rank] == value))}: {value}{unit}"
        for value in sorted(counts, key=lambda value: (value != most, str(value)))
    )
    return Unlike(what=what, odd=odd, words=f"{what} differs: {each}")


def _parts(calls: Mapping[int, CallLog], members: Sequence[int]) -> Unlike | None:
    """The splits of each pair of ranks: what one sends to the other against what that one
    expects."""
    member_of = {rank: index for index, rank in enumerate(members)}
    expected = [(receiver, call.of) for receiver, call in calls.items() if call.of is not None]
    wrong: list[tuple[int, int, int, int]] = []
    for sender, sent in calls.items():
        of_all = sent.sent if sent.kind == "all_gather" and sent.sent >= 0 else None
        parts = sent.to if sent.kind != "all_gather" else None
        for receiver, of in expected:
            going = of_all if parts is None else parts[member_of[receiver]]
            if going is not None and going != of[member_of[sender]]:
                wrong.append((sender, receiver, going, of[member_of[sender]]))
    if not wrong:
        return None
    counts = Counter(rank for sender, receiver, _, _ in wrong for rank in {sender, receiver})
    worst = max(counts.values())
    sender, receiver, going, coming = wrong[0]
    more = f" (and {len(wrong) - 1} more pairs)" if len(wrong) > 1 else ""
    words = f"splits differ: rank {sender} sends {going} bytes to rank {receiver}, which expects {coming}{more}"
    return Unlike(what="splits", odd=tuple(sorted(rank for rank in counts if counts[rank] == worst)), words=words)


def message_difference(send: CallLog, recv: CallLog) -> str:
    """How a message differs at its two ends, in words; empty: it does not."""
    if send.sent == recv.received or min(send.sent, recv.received) < 0:
        return ""
    return f"size differs: {send.sent} bytes are sent, {recv.received} are expected"
