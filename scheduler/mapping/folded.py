"""The folded mapping: which ranks form which group, for attention and for MoE layers. Pure arithmetic, without torch.

Attention lays a job's ranks out as TP × CP × DP × PP, MoE layers lay the same ranks out as ETP × EP × EDP × PP. The two agree
on nothing but the pipeline: a stage holds attention and MoE layers of the same ranks, so the pipeline groups of both must
be the same, member for member. MoE Parallel Folding (arXiv:2504.14960) states that rule, and its listing 1 breaks it, by
laying pipeline ranks inside data ranks. Here the pipeline is outermost unless an order says otherwise, and an order whose
pipeline groups differ is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import GroupError
from commlayer.profiles.topology import Topology
from commlayer.scheduler.mapping.describe import MeshDescription, describe_groups
from commlayer.scheduler.mapping.divisors import divisors, nearest

__all__ = ["ATTENTION_AXES", "AXES", "MOE_AXES", "FoldedMapping", "offsets"]

ATTENTION_AXES = ("tp", "cp", "dp", "pp")
MOE_AXES = ("etp", "ep", "edp", "pp")

#: Every axis that has groups, and the axes of which it is made.
AXES: dict[str, tuple[str, ...]] = {
    **{axis: (axis,) for axis in ATTENTION_AXES},
    **{axis: (axis,) for axis in MOE_AXES},
    "tp_cp": ("tp", "cp"),  # one sample's tokens
    "dp_cp": ("dp", "cp"),  # replicas of a dense parameter: its gradients are reduced here (an expert's over edp)
    "etp_ep": ("etp", "ep"),  # one copy of a MoE layer's experts: the dispatcher's ranks
    "model": ("tp", "cp"),  # what a stage is without its data parallelism; the ranks of tp_cp
    "stage": ("tp", "cp", "dp"),  # one pipeline stage; also etp × ep × edp
    "world": ("tp", "cp", "dp", "pp"),
}

_GIVEN = {"attention": ("tp", "cp", "pp"), "moe": ("etp", "ep", "pp")}


@dataclass(frozen=True)
class FoldedMapping:
    """Two mappings over ranks 0 … ``world_size``-1. Frozen and hashable.

    Attributes:
        tp, cp, pp, ep, etp: the degrees; ``dp`` and ``edp`` are what is left.
        attention_order, moe_order: axes from the innermost (neighbouring ranks) to the outermost. Any order will do as long
            as both have the same pipeline groups.

    Raises:
        GroupError: a degree that is no whole number of at least 1; degrees whose product does not divide the world, with
            the nearest ones that do; an order that does not name its four axes; orders whose pipeline groups differ.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    attention_order: str = "tp-cp-dp-pp"
    moe_order: str = "etp-ep-edp-pp"
    dp: int = field(init=False, repr=False, compare=False)
    edp: int = field(init=False, repr=False, compare=False)
    _strides: dict[str, int] = field(init=False, repr=False, compare=False)
    """How far apart neighbours on each axis are."""

    def __post_init__(self) -> None:
        _check_degrees(self.world_size, {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "etp", "ep")})
        object.__setattr__(self, "dp", self.world_size // (self.tp * self.cp * self.pp))
        object.__setattr__(self, "edp", self.world_size // (self.etp * self.ep * self.pp))
        for name, axes in (("attention_order", ATTENTION_AXES), ("moe_order", MOE_AXES)):
            order = getattr(self, name)
            if not isinstance(order, str) or sorted(order.split("-")) != sorted(axes):
                raise GroupError(
                    f"{name}: expected {', '.join(axes)} each once, innermost first, such as {'-'.join(axes)!r}, got {order!r}"
                )
        orders = _strides_of(self, self.attention_order), _strides_of(self, self.moe_order)
        attention, moe = (strides["pp"] for strides in orders)
        object.__setattr__(self, "_strides", orders[1] | orders[0])
        if self.pp > 1 and attention != moe:
            first, second = (list(range(0, self.pp * stride, stride)) for stride in (attention, moe))
            raise GroupError(
                f"the pipeline groups of attention and MoE layers differ: that of rank 0 is {first} by "
                f"attention_order {self.attention_order!r}, but {second} by moe_order {self.moe_order!r} "
                f"(tp={self.tp} × cp={self.cp}, dp={self.dp}; etp={self.etp} × ep={self.ep}, edp={self.edp}): write pp last "
                "in both, which makes it outermost"
            )

    @property
    def expert_gradient_scale(self) -> float:
        """The factor by which the *mean over edp* of an expert's gradient is multiplied to match dense gradients: edp / (dp·cp).

        The tokens of a stage are split into dp·cp shards, one for each tp group. Let L_s be the loss of shard s (a mean over
        its tokens), and L = 1/(dp·cp) · Σ L_s the loss of the step. Each rank of that tp group starts backward from its own
        tokens' part of L_s.

        - Dense: a rank of dp_cp holds ∂L_s/∂w of its shard (once tp has done its part). The mean over dp_cp is ∂L/∂w.
        - Expert: the dispatcher brings an expert the tokens of all ranks of its etp_ep group, and their gradients in
          backward. Its gradient is already a *sum* over those ranks, and the etp_ep groups of one edp group make up the
          stage. So the sum over edp is Σ ∂L_s/∂w, and ∂L/∂w = sum over edp / (dp·cp) = mean over edp · edp/(dp·cp).

        As tp·cp·dp = etp·ep·edp, the factor is tp / (etp·ep). Who forgets it has expert gradients that are etp·ep/tp times
        too large: ep times where etp = tp.

        It holds where every token is dispatched once: ranks of a tp group dispatch different tokens (sequence parallelism),
        or the copies count once. Where all tp ranks dispatch copies of the same tokens *and* each backpropagates the whole
        loss, experts see every token tp times: multiply by 1/tp more. Where the loss is a sum over tokens that is divided by
        their number in the end, sum (not mean) over dp_cp and over edp, and divide both by that number: no other factor.
        """
        return self.edp / (self.dp * self.cp)

    def size(self, axis: str) -> int:
        """Number of ranks in each group of ``axis``. Raises GroupError for an unknown axis."""
        return math.prod(size for size, _ in self._layout(axis))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of ``axis``, by their lowest rank; the ranks of each in increasing order.

        Raises GroupError for an unknown axis.
        """
        layout = self._layout(axis)
        places = offsets(layout)
        first = (rank for rank in range(self.world_size) if _place(rank, layout) == 0)
        return [tuple(rank + place for place in places) for rank in first]

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of ``axis`` in which ``rank`` is. Raises GroupError for an unknown axis or rank."""
        self._check_rank(rank)
        layout = self._layout(axis)
        first = rank - _place(rank, layout)
        return tuple(first + offset for offset in offsets(layout))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of ``rank`` on tp, cp, dp, pp, etp, ep and edp. Raises GroupError for an unknown rank."""
        self._check_rank(rank)
        axes = dict.fromkeys(ATTENTION_AXES + MOE_AXES)
        return {axis: rank // self._strides[axis] % int(getattr(self, axis)) for axis in axes}

    def describe(self, topology: Topology, rank: int = 0) -> MeshDescription:
        """Describe what each axis crosses on ``topology``: print it, or read its rows. ``rank``: whose groups the table shows.

        Raises GroupError for a topology of another number of ranks, or an unknown rank.
        """
        self._check_rank(rank)
        if topology.world_size != self.world_size:
            raise GroupError(
                f"the mapping has {self.world_size} ranks, but the topology {topology.shape} has {topology.world_size}: "
                "describe it on a topology of as many ranks"
            )
        return describe_groups(str(self), {axis: self.groups(axis) for axis in AXES}, topology, rank)

    def __str__(self) -> str:
        attention = " × ".join(f"{axis} {getattr(self, axis)}" for axis in self.attention_order.split("-"))
        moe = " × ".join(f"{axis} {getattr(self, axis)}" for axis in self.moe_order.split("-"))
        return f"{counted(self.world_size, 'rank')}: attention {attention}, MoE {moe}"

    def _layout(self, axis: str) -> list[tuple[int, int]]:
        """Size and stride of each axis of which ``axis`` is made."""
        if axis not in AXES:
            raise GroupError(f"expected one of the axes {', '.join(AXES)}, got {axis!r}")
        return [(getattr(self, part), self._strides[part]) for part in AXES[axis]]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise GroupError(f"expected a rank from 0 to {self.world_size - 1}, got {rank}")


def _strides_of(mapping: FoldedMapping, order: str) -> dict[str, int]:
    """How far apart neighbours on each axis of one side are."""
    strides, stride = {}, 1
    for axis in order.split("-"):
        strides[axis] = stride
        stride *= getattr(mapping, axis)
    return strides


def _place(rank: int, layout: Sequence[tuple[int, int]]) -> int:
    """How far ``rank`` is from the lowest rank of its group."""
    return sum(rank // stride % size * stride for size, stride in layout)


def offsets(layout: Sequence[tuple[int, int]]) -> list[int]:
    """How far the ranks of a group are from its lowest; ``layout``: size and stride of each part."""
    return sorted(map(sum, product(*(range(0, size * stride, stride) for size, stride in layout))))


# Degrees that cannot be, and what could be instead


def _check_degrees(world_size: int, degrees: dict[str, int]) -> None:
    for name, value in {"world_size": world_size, **degrees}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            instead = ""
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if name != "world_size" and is_number:
                closest = min(divisors(world_size), key=lambda size: abs(size - value))
                instead = f"; the nearest that divides world_size {world_size} is {closest}"
            raise GroupError(f"{name}: expected a whole number of at least 1, got {value!r}{instead}")
    for side in _GIVEN.values():
        size = math.prod(degrees[axis] for axis in side)
        if world_size % size:
            given = " × ".join(f"{axis}={degrees[axis]}" for axis in side)
            raise GroupError(
                f"{given} = {size} does not divide world_size {world_size}; nearest valid: "
                + _nearest(world_size, degrees, side)
            )


def _nearest(world_size: int, degrees: dict[str, int], side: Sequence[str]) -> str:
    """One degree changed, the others kept; where no single change helps, the nearest valid degrees of the whole side."""
    single = []
    for axis in side:
        valid = [size for size in divisors(world_size) if _fits(world_size, degrees | {axis: size}, [axis])]
        if around := nearest(degrees[axis], valid):
            single.append(f"{axis} {' or '.join(map(str, around))}")
    if single:
        return "; ".join(single)
    # Not one degree but several are wrong. MoE degrees keep the pp that attention was found to have room for.
    axes = side if side == _GIVEN["attention"] else [axis for axis in side if axis != "pp"]
    room = world_size // math.prod(degrees[axis] for axis in side if axis not in axes)
    changes = [dict(zip(axes, sizes, strict=True)) for sizes in _products_within(room, len(axes))]
    whole = [change for change in changes if _fits(world_size, degrees | change, axes)]
    # as ratios: 2 is as far from 4 as 8 is
    best = min(whole or changes, key=lambda change: sum(abs(math.log(change[a] / degrees[a])) for a in change))
    return ", ".join(f"{axis}={size}" for axis, size in best.items())


def _fits(world_size: int, degrees: Mapping[str, int], changed: Sequence[str]) -> bool:
    """Whether the sides that have one of the ``changed`` axes divide the world."""
    sides = [side for side in _GIVEN.values() if not set(side).isdisjoint(changed)]
    return all(world_size % math.prod(degrees[axis] for axis in side) == 0 for side in sides)


def _products_within(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ``count`` sizes whose product divides ``number``."""
    if count == 0:
        yield ()
        return
    for size in divisors(number):
        for rest in _products_within(number // size, count - 1):
            yield (size, *rest)
