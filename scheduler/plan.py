"""The plan: a small DAG of steps on resources. The only description of a schedule; see ``price``, the executor, the drawer.

A plan lists its steps in the order in which an executor posts them, so that one loop serves every executor: for each
step, wait for the steps it names in ``after``, then post it. A resource does one step at a time, in plan order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource, bus_factor
from commlayer.profiles.profile import Profile
from commlayer.scheduler.moves import Buffer, Moves
from commlayer.scheduler.slow_pairs import direct_hindrance
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = [
    "Buffer",
    "CurveKey",
    "Cut",
    "Gather",
    "Leg",
    "Op",
    "Plan",
    "Span",
    "Step",
    "Strategy",
    "is_duplex",
    "owned_by_node",
    "owned_parts",
]

CurveKey = tuple[str, Resource, int]
"""Collective, link and group size, by which a profile finds a curve."""


class Strategy(str, Enum):
    """How a collective is moved. The order is from simple to elaborate.

    The terms are MoNTA's (table 6: O1, O2, O3 of an all_to_all of replicated tokens); the other collectives have the same
    forms over nodes: a stage inside the nodes and one between them, whole or in chunks.
    """

    FLAT = "flat"  # one call of the backend's own
    DIRECT = "flat_direct"  # also one level, by messages from every rank to every rank, with sums on the spot
    HIERARCHICAL = "hierarchical"  # O1: drop, all_to_all between nodes, all_gather inside
    LEADERS = "leaders"  # one rank of each node does all between nodes: few messages
    PIPELINED = "pipelined"  # O2: the same in chunks, inter ∥ intra
    RING = "ring"  # round the nodes, in an order that goes past slow ways between two of them; in chunks too
    PIPELINED_COPY = "pipelined_copy"  # O3: the placing copy is a pipeline stage of its own


class Op(str, Enum):
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"  # this one and the next two only as a call of the backend's own
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE = "reduce"  # of blocks that have arrived, in memory
    COPY = "copy"
    ENCODE = "encode"  # into a wire format
    DECODE = "decode"  # back, and added where the collective sums
    COMPUTE = "compute"  # the model's own work, which transfers may hide behind


class Gather(str, Enum):
    """The blocks that the all_gather stage moves.

    WHOLE is MoNTA's form (eq. 9): the whole tensor, also the block that never left the node. REMOTE is ours: tokens are
    replicated, so the local block already lies on every rank of the node; only blocks that crossed the wire are gathered.
    """

    WHOLE = "whole"
    REMOTE = "remote"


class Span(str, Enum):
    """Between whom bytes go, and so over which link."""

    SELF = "self"  # within the memory of a rank
    HOLDERS = "holders"  # the ranks of a node that hold the same tokens
    NODE = "node"  # the ranks of each node
    RAIL = "rail"  # one rank of every node
    LEADERS = "leaders"  # one rank of every node, and of each only this one
    GROUP = "group"  # all ranks of the group

    def link(self, traffic: Traffic) -> Resource:
        """The slowest link class between them."""
        if self is Span.GROUP:
            return traffic.link
        if self in (Span.RAIL, Span.LEADERS):
            return Resource.INTER
        return Resource.DEVICE if self is Span.SELF else Resource.INTRA

    def ranks(self, traffic: Traffic) -> int:
        """How many ranks exchange with each other."""
        if self is Span.NODE:
            return max(traffic.nodes)
        if self in (Span.RAIL, Span.LEADERS):
            return len(traffic.nodes)
        return {Span.SELF: 1, Span.HOLDERS: traffic.replication}.get(self, traffic.group_size)

    def near(self, traffic: Traffic) -> int:
        """How many of them a rank reaches without that link: itself, and the others of its node where not all are on one."""
        is_wide = self is Span.GROUP and traffic.link is Resource.INTER and len(traffic.nodes) > 1
        return max(traffic.nodes) if is_wide else 1


class Cut:
    """A call's traffic, cut into ``chunks``, of which each goes between nodes in ``pieces``, in the format ``wire``.

    ``is_on_one_level``: the plan takes its group for one node. ``is_ring``: it goes round the nodes.
    """

    def __init__(
        self,
        traffic: Traffic,
        chunks: int = 1,
        pieces: int = 1,
        wire: Wire = NATIVE,
        gather: Gather = Gather.WHOLE,
        *,
        is_on_one_level: bool = False,
        is_ring: bool = False,
    ) -> None:
        self.traffic, self.chunks, self.pieces, self.gather = traffic, chunks, pieces, gather
        self.size = float(traffic.logical_bytes)
        self.block = self.size / traffic.group_size
        """Bytes of the largest block."""
        self.is_duplex = not is_on_one_level and not is_ring and is_duplex(traffic, chunks, wire)
        if (
            traffic.collective == "all_reduce"
            and not is_on_one_level
            and not (traffic.is_uniform and not traffic.rates)
        ):
            owned = owned_by_node(traffic, is_duplex=self.is_duplex)
            self.block = self.size * max(part / ranks for part, ranks in zip(owned, traffic.nodes, strict=True))
        self.ratio = wire.ratio(traffic.element_bytes)
        """Bytes on the wire for each of the tensor."""

    def over_rails(self, size: float) -> float:
        """The size of an exchange between ranks of every node by which ``size`` bytes of the tensor go there.

        Nodes of equal numbers of ranks: each rank's part. Else the size that takes as many bytes through a card, in or out,
        as go through the busiest one (for its rate: curves are those of the slowest), with as many such exchanges at once as
        the emptiest node has ranks: so many a curve is measured with (:mod:`commlayer.scheduler.probes`), and which ranks of
        a node send does not matter to its card. Where each rank has a card of its own, those of the emptiest node have most
        to carry. In a duplex plan the blocks' sums go out of a card while others come in: so the mean of both directions.
        """
        traffic = self.traffic
        if traffic.is_uniform and not self.is_duplex:
            return size / max(traffic.nodes)
        nodes, m, rates = traffic.nodes, len(traffic.nodes), traffic.node_rates
        owned = owned_parts(traffic, is_duplex=self.is_duplex)
        both = [(1 - part, part * (m - 1)) for part in owned]  # out and in, or in and out, of each card
        loads = [sum(ways) / 2 if self.is_duplex else max(ways) for ways in both]
        busiest = max(load / rate for load, rate in zip(loads, rates, strict=True)) * min(rates)
        return size * busiest * m / (m - 1) / min(nodes)


def is_duplex(traffic: Traffic, chunks: int, wire: Wire) -> bool:
    """Whether an all_reduce over nodes sends sums of some chunks while it collects those of others.

    It does where cards are unequal, of three nodes or more: a slow node then owns less, which loads its card in one direction
    while it shares and in the other while it hears of sums, so that the time is saved only where both go on at once.
    """
    is_wide = len(traffic.nodes) > 2 and max(traffic.nodes) > 1
    return traffic.collective == "all_reduce" and bool(traffic.rates) and is_wide and chunks > 1 and wire.is_native


def owned_by_node(traffic: Traffic, *, is_duplex: bool) -> tuple[float, ...]:
    """The part of an all_reduce's tensor that each node sums up, by which its card's load goes.

    As much as the others; where the plan is duplex, as much as its card's rate allows: node i, owning the part w of S bytes,
    sends and receives S·(1 + (m − 2)·w) each, so all cards end together at T where w = (T·rate/S − 1)/(m − 2), and those too
    slow for that own nothing.
    """
    m = len(traffic.nodes)
    if not is_duplex:
        return (1 / m,) * m
    owners = sorted(range(m), key=lambda node: -traffic.rates[node])
    while True:
        time = (m - 2 + len(owners)) / sum(traffic.rates[node] for node in owners)
        if len(owners) == 1 or time * traffic.rates[owners[-1]] >= 1:
            parts = {node: (time * traffic.rates[node] - 1) / (m - 2) for node in owners}
            return tuple(parts.get(node, 0.0) for node in range(m))
        owners.pop()


def owned_parts(traffic: Traffic, *, is_duplex: bool) -> tuple[float, ...]:
    """The part of the bytes that each node owns: of an all_reduce as :func:`owned_by_node` says, else the blocks of its ranks."""
    if traffic.collective == "all_reduce":
        return owned_by_node(traffic, is_duplex=is_duplex)
    return tuple(ranks / traffic.group_size for ranks in traffic.nodes)


@dataclass(frozen=True)
class Leg(ABC):
    """One way that every chunk of a call goes: side by side what that costs and what it moves.

    A strategy is a list of legs, and each leg has a step for each chunk. ``source`` and ``target``: between which buffers
    bytes go. ``after``: the legs, of those that the strategy has, for whose steps of the same chunk it waits. Whatever is to be
    known of a step beside its chunk, its bytes and its place in the plan is asked of its leg.
    """

    name: str
    op: Op
    span: Span
    source: Buffer
    target: Buffer
    after: tuple[Leg, ...] = ()

    is_whole: ClassVar[bool] = False
    """Whether it has one step, for all chunks."""
    is_in_turn: ClassVar[bool] = False
    """Whether each step waits for that of the chunk before."""
    is_in_pieces: ClassVar[bool] = False
    """Whether a chunk's pieces have a step each."""
    yields: ClassVar[bool] = False
    """Whether other legs' steps are posted between those of its pieces."""
    is_exchange: ClassVar[bool] = True
    """Whether bytes leave the rank."""
    tells_counts: ClassVar[bool] = False
    """Whether its bytes are numbers that hosts need to size the steps after it."""

    def size(self, cut: Cut) -> float:
        """The bytes of a step (see :class:`Step`): if nothing else is said, those of a chunk."""
        return cut.size / cut.chunks

    @abstractmethod
    def moves(self, place: Any, tag: int, chunk: int) -> Moves:
        """Say what the rank at ``place`` does in the step of a chunk; ``tag``: the first of the step's."""

    @abstractmethod
    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        """The curves that time its steps, each of them some; a profile has to have the last one."""

    def curve(self, profile: Profile, plan: Plan, size: float) -> Curve | None:
        """The curve that times a step of ``size`` bytes. Raises PlanError where the profile lacks it."""
        return profile.curve(*self.curve_keys(plan)[-1])

    def resource(self, traffic: Traffic) -> Resource:
        """The resource that its steps occupy."""
        return self.span.link(traffic)

    def looked_up(self, size: float, plan: Plan) -> float:
        """The size by which a step of ``size`` bytes is looked up in its curve."""
        return size

    def hindrance(self, plan: Plan) -> float:
        """The factor by which a step takes longer for the slow ways between two nodes that it uses, at least 1."""
        traffic = plan.traffic
        if not traffic.slow_pairs or self.resource(traffic) is not Resource.INTER:
            return 1.0
        owned = owned_parts(traffic, is_duplex=plan.is_duplex)
        return direct_hindrance(traffic, owned, is_duplex=plan.is_duplex)

    def connections(self, traffic: Traffic) -> int:
        """Over how many connections a rank sends in a step on its link, at least 1."""
        return max(1, self.span.ranks(traffic) - self.span.near(traffic))

    def share_of_link(self, traffic: Traffic, curve: Curve) -> float:
        """How much of a step's bytes cross its link: by the bus factor, and of those of a whole group what leaves the node."""
        factor, near = bus_factor(curve.collective, curve.group_size), self.span.near(traffic)
        return factor if near == 1 else factor * ((traffic.group_size - near) / (traffic.group_size - 1))

    def step(self, cut: Cut, chunk: int = 0, after: tuple[int, ...] = ()) -> Step:
        """The step of a chunk, which waits for the steps of these indices."""
        return Step(self, self.resource(cut.traffic), chunk, self.size(cut), after)


@dataclass(frozen=True, slots=True)
class Step:
    """A leg's operation on one chunk, which occupies one resource.

    ``bytes`` is the size by which curves are looked up, nccl-tests' S: all_to_all the send buffer of one rank,
    all_gather the gathered total, copy what is copied, reduce what is added to the first block, encode and decode the bytes
    of the tensor, not of the wire. It is the mean over ranks (hence a float): slices that do not divide differ by less than one
    alignment unit. Where nodes hold different numbers of ranks it is that of the busiest rank, and between nodes that of the
    busiest card (:meth:`Cut.over_rails`). ``after`` are indices of earlier steps in the same plan.
    """

    leg: Leg
    resource: Resource
    chunk: int
    bytes: float
    after: tuple[int, ...]

    @property
    def op(self) -> Op:
        return self.leg.op

    @property
    def source(self) -> Buffer:
        return self.leg.source

    @property
    def target(self) -> Buffer:
        return self.leg.target


@dataclass(frozen=True, slots=True)
class Plan:
    """How one collective call is moved. Frozen, hashable, the same on every rank.

    ``pieces``: in how many exchanges each chunk goes between nodes; of their steps ``chunk`` counts pieces: those of chunk j are
    j·pieces and the following. They let others go before at less cost than more chunks, which every stage would pay for.

    ``connections``: over how many connections the parts of a large message go to a rank of another node.
    """

    traffic: Traffic
    strategy: Strategy
    chunks: int
    gather: Gather
    steps: tuple[Step, ...]
    wire: Wire = NATIVE
    pieces: int = 1
    connections: int = 1
    name: str = field(init=False, repr=False, compare=False)
    """``flat``; ``pipelined×4`` when there is more than one chunk; ``pipelined×4÷2`` where each crosses nodes in two pieces;
    ``flat_direct∥2`` where large messages go over two connections; ``pipelined×4/bf16`` where the wire has another format."""

    def __post_init__(self) -> None:
        name = self.strategy.value if self.chunks == 1 else f"{self.strategy.value}×{self.chunks}"
        name = name if self.pieces == 1 else f"{name}÷{self.pieces}"
        name = name if self.connections == 1 else f"{name}∥{self.connections}"
        object.__setattr__(self, "name", name if self.wire.is_native else f"{name}/{self.wire}")
        for index, step in enumerate(self.steps):
            if any(not 0 <= earlier < index for earlier in step.after):
                raise InternalError(
                    f"step {index} of {self.name} waits for {step.after}: only earlier steps may be named"
                )

    @property
    def is_duplex(self) -> bool:
        """Whether sums of some chunks are sent while those of others are collected: see :func:`is_duplex`."""
        return self.strategy is Strategy.PIPELINED and is_duplex(self.traffic, self.chunks, self.wire)

    @property
    def is_chunked(self) -> bool:
        """Whether exchanges follow each other on a link."""
        return self.chunks * self.pieces > 1

    @property
    def slices(self) -> int:
        """Into how many slices a chunk of a block is dropped: one for each rank that holds the same tokens."""
        return 1 if self.strategy is Strategy.FLAT else self.traffic.replication

    @property
    def tags_per_step(self) -> int:
        """How many messages one rank may send another in one step, and so how far apart the steps' tags are."""
        traffic = self.traffic
        is_exchange = traffic.collective in ("all_to_all", "all_to_all_v")
        if is_exchange or not traffic.is_uniform or self.strategy is Strategy.LEADERS:
            return traffic.group_size
        return len(traffic.nodes)

    def moves(self, place: Any, tags: int | None = None) -> tuple[Moves, ...]:
        """Say what the rank at ``place`` does in each step; ``tags``: how far apart those of the steps are, if not as usual."""
        apart = self.tags_per_step if tags is None else tags
        return tuple(step.leg.moves(place, index * apart, step.chunk) for index, step in enumerate(self.steps))

    @property
    def capture_objection(self) -> str:
        """Why calls of it on a device cannot be captured in a CUDA graph; empty where they can, behind a first call that was not
        captured, which makes communicators and memory."""
        if any(step.leg.tells_counts for step in self.steps):
            return "ranks tell each other their splits on the host in each call, unless they are even or known to all"
        if self.wire.format.is_scaled:
            return "NaN and infinity are looked for on the host in each call, unless the policy passes them on"
        return ""

    @property
    def is_staged(self) -> bool:
        """Whether received bytes land in a staging buffer and are placed by copies."""
        return any(step.target is Buffer.STAGING for step in self.steps)
