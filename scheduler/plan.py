"""The plan: a small DAG of steps on resources. The only description of a schedule; see ``price``, the executor, the drawer.

A plan lists its steps in the order in which an executor posts them, so that one loop serves every executor: for each
step, wait for the steps it names in ``after``, then post it. A resource does one step at a time, in plan order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = ["Buffer", "Gather", "Op", "Plan", "Step", "Strategy"]


class Strategy(str, Enum):
    """How a collective is moved. The order is from simple to elaborate.

    The terms are MoNTA's (table 6: O1, O2, O3 of an all_to_all of replicated tokens); the other collectives have the same
    forms over nodes: a stage inside the nodes and one between them, whole or in chunks.
    """

    FLAT = "flat"  # one call of the backend's own
    DIRECT = "flat_direct"  # also one level, by messages from every rank to every rank, with sums on the spot
    HIERARCHICAL = "hierarchical"  # O1: drop, all_to_all between nodes, all_gather inside
    PIPELINED = "pipelined"  # O2: the same in chunks, inter ∥ intra
    PIPELINED_COPY = "pipelined_copy"  # O3: the placing copy is a pipeline stage of its own


class Op(str, Enum):
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"  # this one and the next two only as a call of the backend's own
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    REDUCE = "reduce"  # of blocks that have arrived, in memory
    COPY = "copy"
    ENCODE = "encode"  # into a wire format
    DECODE = "decode"  # back, and added where the collective sums
    COMPUTE = "compute"  # the model's own work, which transfers may hide behind

    # Enum hashes the member's name, in Python: pricing looks steps up by their operation, a hundred times a plan.
    __hash__ = str.__hash__


class Buffer(str, Enum):
    INPUT = "input"
    OUTPUT = "output"
    STAGING = "staging"
    TRANSIT = "transit"  # what is passed on, of a size that is known only during the call
    ENCODED = "encoded"  # in a wire format, to be sent
    ARRIVED = "arrived"  # in a wire format, received


class Gather(str, Enum):
    """What the all_gather stage moves.

    WHOLE is MoNTA's form (eq. 9): the whole tensor, also the block that never left the node. REMOTE is ours: tokens are
    replicated, so the local block already lies on every rank of the node; only blocks that crossed the wire are gathered.
    """

    WHOLE = "whole"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on one resource.

    ``bytes`` is the size by which curves are looked up, nccl-tests' S: all_to_all the send buffer of one rank,
    all_gather the gathered total, copy what is copied, reduce what is added to the first block, encode and decode the bytes
    of the tensor, not of the wire. It is the mean over ranks
    (hence a float): slices that do not divide differ by less than one alignment unit. ``after`` are indices of earlier
    steps in the same plan. ``source`` and ``target`` say between which buffers the bytes go; an all_gather works in place.
    ``group_size`` is how many ranks exchange with each other in this step; 0 where the traffic says it (an even
    all_to_all: its group, and for the all_gather its replication).
    """

    op: Op
    resource: Resource
    chunk: int
    bytes: float
    after: tuple[int, ...]
    source: Buffer
    target: Buffer
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How one collective call is moved. Frozen, hashable, the same on every rank.

    ``pieces``: in how many exchanges each chunk goes between nodes; of their steps ``chunk`` counts pieces: those of chunk j are
    j·pieces and the following. They let others go before at less cost than more chunks, which every stage would pay for.
    """

    traffic: Traffic
    strategy: Strategy
    chunks: int
    gather: Gather
    steps: tuple[Step, ...]
    wire: Wire = NATIVE
    pieces: int = 1

    def __post_init__(self) -> None:
        for index, step in enumerate(self.steps):
            if any(not 0 <= earlier < index for earlier in step.after):
                raise InternalError(
                    f"step {index} of {self.name} waits for {step.after}: only earlier steps may be named"
                )

    @property
    def name(self) -> str:
        """``flat``; ``pipelined×4`` when there is more than one chunk; ``pipelined×4÷2`` where each crosses nodes in two pieces;
        ``pipelined×4/bf16`` where the wire has another format."""
        name = self.strategy.value if self.chunks == 1 else f"{self.strategy.value}×{self.chunks}"
        name = name if self.pieces == 1 else f"{name}÷{self.pieces}"
        return name if self.wire.is_native else f"{name}/{self.wire}"

    @property
    def is_chunked(self) -> bool:
        """Whether exchanges follow each other on a link."""
        return self.chunks * self.pieces > 1

    @property
    def slices(self) -> int:
        """Into how many slices a chunk of a block is dropped: one for each rank that holds the same tokens."""
        return 1 if self.strategy is Strategy.FLAT else self.traffic.replication

    @property
    def is_staged(self) -> bool:
        """Whether received bytes land in a staging buffer and are placed by copies."""
        return any(step.target is Buffer.STAGING for step in self.steps)
