"""Lanes: who goes first where several kinds of traffic meet on one link, and what the others' chunks look like. Pure.

MoNTA gives the expert all_to_all the link where traffic conflicts, and orders the rest EP ≪ PP ≪ CP ≪ DP (its figure 11): expert
before pipeline before context before data parallel. Tensor-parallel traffic stays inside nodes and is on the critical path, so it
goes with the experts'.

A collective on a lane that others go before is cut into *chunks*, the finest that keep :attr:`LanePolicy.efficiency` of the
link's bandwidth and cost the call no more than :attr:`LanePolicy.most_loss`. ``CHUNKS_IN_FLIGHT`` of them, its *credits*, are on
the link at a time: a higher lane waits for these at most. At each edge the call is *held* while a higher lane has issued
work; for how long at most says :func:`longest_hold_us`. Who holds it is :mod:`commlayer.engine.lane_holds`.

Why this cannot deadlock. A hold ends by itself: its length has a bound that depends on nobody. So a program on lanes is the same
program without them, with other finite delays before some of its messages; messages, their order in a group and who waits for
whom are the same. What ends for all delays (and only such a program is free of deadlock on a network) ends on lanes.

Rejected: a hold that lasts until the higher lane is idle. Rank A issues gradients, then an exchange of experts, and waits for
both; rank B issues the gradients and waits for them before it issues the exchange, which is a sound program. A's gradients would
wait for the exchange, which waits for B, who waits for A's gradients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Step

__all__ = ["CHUNKS_IN_FLIGHT", "LANES", "LanePolicy", "lane_of", "level_of", "longest_hold_us", "paced"]

LANES = {"ep": 0, "pp": 1, "cp": 2, "dp": 3, "tp": 0}
"""Every lane and its level: 0 goes first. No lane at all ("") is level 0 too: what nobody has classified waits for nobody."""
CHUNKS_IN_FLIGHT = 2
"""One on the wire and one behind it, so that the wire does not wait for a rank to wake up. More only adds to what is in the
way of a higher lane."""
_LONGEST_HOLD_US = 200_000.0
"""The longest hold of any chunk, whatever a profile says: timeouts count holds too."""

_AXIS_LANES = {
    "etp": "ep",
    "edp": "dp",
    "fsdp": "dp",
    "efsdp": "dp",
    "hsdp": "dp",
    "dp_cp": "dp",
    "dp_shard": "dp",
    "dp_replicate": "dp",
    "dp_shard_cp": "dp",
    "dp_shard_mod_ep": "dp",
    "dp_shard_in_ep": "dp",
    "tp_cp": "ep",
    "etp_ep": "ep",
    "stage": "dp",
}
_MEGATRON = (
    (r"EXPERT_DATA|DATA_PARALLEL|PARTIAL_DATA", "dp"),
    (r"EXPERT|EP_GROUP", "ep"),
    (r"PIPELINE|EMBEDDING", "pp"),
    (r"CONTEXT", "cp"),
    (r"TENSOR", "tp"),
)
"""Words of Megatron-Core's group descriptions (parallel_state.py), the first that fits: an expert's data-parallel group is one of
gradients, and TENSOR_AND_CONTEXT is mostly used by the second."""


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """How lower lanes yield.

    ``share``: of the link, that a lower lane keeps while higher ones have work without end, 0 < share ≤ 1; 1 never holds.
    ``efficiency``: what part of the link's bandwidth the chunks of a lower lane's calls keep, each by itself.
    ``most_loss``: by how much such a call may be slower for its chunks, as a fraction.

    Raises UsageError for values out of their range.
    """

    share: float = 0.05
    efficiency: float = 0.85
    most_loss: float = 0.08

    def __post_init__(self) -> None:
        if not 0 <= self.most_loss < math.inf:
            raise UsageError(f"LanePolicy.most_loss: expected 0 or more, got {self.most_loss!r}")
        for name in ("share", "efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"LanePolicy.{name}: expected more than 0 and at most 1, got {getattr(self, name)!r}")


def level_of(lane: str) -> int:
    """0 for those that go first; "" is no lane. Raises UsageError for a lane that does not exist."""
    if lane and lane not in LANES:
        raise UsageError(f"lane must be one of {', '.join(LANES)}, got {lane!r}")
    return LANES.get(lane, 0)


def lane_of(description: str) -> str:
    """The lane of a group that a trainer has described in its own words; "" where they say nothing.

    Known are the dims of torch's DeviceMesh (``mesh_ep``, ``mesh_dp_shard``), our FoldedMesh's (``folded ep``) and the names
    that Megatron-Core gives (``EXPERT_MODEL_PARALLEL_GROUP``).
    """
    if description.isupper():
        return next((lane for words, lane in _MEGATRON if re.search(words, description)), "")
    found = re.fullmatch(r"(?:mesh_|folded )(\w+)", description)
    axis = found.group(1) if found else ""
    return axis if axis in LANES else _AXIS_LANES.get(axis, "")


def longest_hold_us(step_us: float, policy: LanePolicy) -> float:
    """For how long a step of a lower lane may be held, µs, that takes ``step_us`` by itself: so it keeps its share."""
    return min(step_us * (1 / policy.share - 1), _LONGEST_HOLD_US)


def paced(steps: Sequence[Step], link: Resource) -> tuple[Step, ...]:
    """``steps``, of which ``CHUNKS_IN_FLIGHT`` of a leg are on ``link`` at a time: each waits for the one so many before it.

    What has arrived here from the others says how far they are, and so how far they have taken what this rank sent.
    """
    posted: dict[int, list[int]] = {}  # by leg
    found = []
    for index, step in enumerate(steps):
        after = step.after
        if step.resource is link:
            earlier = posted.setdefault(id(step.leg), [])
            if len(earlier) >= CHUNKS_IN_FLIGHT:
                after = tuple(dict.fromkeys((*after, earlier[-CHUNKS_IN_FLIGHT])))
            earlier.append(index)
        found.append(step if after is step.after else replace(step, after=after))
    return tuple(found)
