"""One rank's step as a graph: what it computes, the collectives and messages that it takes part in, and what each waits for.

Layers are the estimate's programs (:mod:`commlayer.scheduler.mapping.layers`), micro-batches go in 1F1B's order. What is computed
waits for what was before, and for the calls whose results it takes; calls of one group wait for each other, as they run first in,
first out; a message that is received waits for nothing, and what it brings is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.folded import offsets
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.offloading import KEPT
from commlayer.scheduler.mapping.parameters import kinds_of_chunks
from commlayer.scheduler.mapping.pipeline_orders import order
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.step_collectives import step_exchanges
from commlayer.scheduler.programs import Compute, Issue, Item, PlannedCall
from commlayer.scheduler.rails import is_one_of_two

__all__ = ["RankNode", "group_ranks", "rank_graph", "stage_ranks"]

_MOST_NODES = 1_000_000


@dataclass(frozen=True, slots=True)
class RankNode:
    """One thing that a rank does.

    Attributes:
        number: from 0, in the order in which the program comes to it.
        collective: ``compute``, ``send``, ``recv``, or a collective.
        us: of what is computed. nbytes: of what is sent, nccl-tests' S.
        axis, ranks: the group of a collective; sender and receiver of a message.
        tag: of a message, equal on both sides.
        after: numbers of those that it waits for, all of them smaller.
    """

    number: int
    name: str
    collective: str
    us: float = 0.0
    nbytes: int = 0
    axis: str = ""
    ranks: tuple[int, ...] = ()
    tag: int = 0
    after: tuple[int, ...] = ()


def stage_ranks(setup: Setup) -> list[int]:
    """The first rank of every pipeline stage: the others of a stage do as much, with other peers."""
    return [stage * (setup.gpus // setup.pp) for stage in range(setup.pp)]


def group_ranks(setup: Setup, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks of the group of ``axis`` that ``rank`` is in. Raises GroupError for an unknown axis."""
    layout = setup.layout(axis)
    first = rank - sum(rank // stride % size * stride for size, stride in layout)
    return tuple(sorted(first + offset for offset in offsets(layout)))


def rank_graph(estimator: Estimator, setup: Setup, stage: int) -> list[RankNode]:
    """Everything that the first rank of ``stage`` does in a step, in an order in which it can be done.

    Raises:
        UsageError: what a graph of single calls has no words for (merged passes and DualPipe, the ring of context parallelism,
            tokens in two levels, activations in the host's memory), or more than a million nodes; a mapping that the estimator
            refuses.
        GroupError: degrees that do not divide the batch.
    """
    setup.check(estimator.job)
    if setup.schedule != "1f1b":
        raise UsageError(f"a graph has whole passes, in the order of 1f1b: got the schedule {setup.schedule}")
    if setup.offload != KEPT:
        raise UsageError(f"a graph has no copies to the host: got offload {setup.offload}; keep activations on the GPU")
    if modules := estimator.job.model.mtp_layers:
        raise UsageError(f"a graph has no modules of multi-token prediction: got {modules}; set mtp to 0")
    if setup.cp > 1 and setup.attention == "tensor":
        raise UsageError(
            f"a graph has no ring of context parallelism: got cp={setup.cp}; set cp=1, or put what it does into tp"
        )
    graph = _Graph(estimator, setup, stage)
    graph.edge("parameters")
    for slot in order(setup.pp, stage, graph.count, setup.vpp):
        virtual = slot.chunk * setup.pp + stage
        (graph.forward if slot.is_forward else graph.backward)(virtual, slot.micro_batch)
    graph.edge("gradients")
    for each in graph.exchanges["loss"]:
        if each.axis != "tp":
            graph.waits.add(graph.collective(each.name, each.collective, each.logical_bytes, each.axis))
    graph.compute("optimizer", graph.head[2])
    return graph.nodes


class _Graph:
    def __init__(self, estimator: Estimator, setup: Setup, stage: int) -> None:
        self.estimator, self.setup, self.stage = estimator, setup, stage
        self.rank = stage_ranks(setup)[stage]
        self.count = setup.micro_batches(estimator.job)
        self.chunks = setup.pp * setup.vpp
        self.nodes: list[RankNode] = []
        self.waits: set[int] = set()
        """The nodes that the next computation waits for."""
        self.last_of_group: dict[str, int] = {}
        exchanges = step_exchanges(estimator.job, setup, estimator.software, stage=stage)
        self.exchanges = {place: [each for each in exchanges if each.place == place] for place in _PLACES}
        self.message_bytes = next((each.logical_bytes for each in self.exchanges["boundary"]), 0)
        self.head = estimator.ends_us(setup)
        self.kinds = kinds_of_chunks(estimator.job.model, setup.pipeline)
        """For each chunk, and each of its layers, whether it has experts."""

    def forward(self, virtual: int, micro_batch: int) -> None:
        if virtual:
            self.waits.add(self.message("recv", virtual - 1, virtual, micro_batch, is_forward=True))
        else:
            self.ends("embedding", is_gradient=False)
        for is_moe in self.kinds[virtual]:
            self.run(self.estimator.programs(self.setup, is_moe)[0], f"forward {micro_batch}")
        if virtual < self.chunks - 1:
            self.message("send", virtual, virtual + 1, micro_batch, is_forward=True)
        else:
            self.ends("head", is_gradient=False)
            self.compute(f"head forward {micro_batch}", self.head[0])
            self.ends("loss", is_gradient=False)

    def backward(self, virtual: int, micro_batch: int) -> None:
        if virtual < self.chunks - 1:
            self.waits.add(self.message("recv", virtual + 1, virtual, micro_batch, is_forward=False))
        else:
            self.compute(f"head backward {micro_batch}", self.head[1])
            self.ends("head", is_gradient=True)
        for is_moe in reversed(self.kinds[virtual]):
            self.run(self.estimator.programs(self.setup, is_moe)[1], f"backward {micro_batch}")
        if virtual:
            self.message("send", virtual, virtual - 1, micro_batch, is_forward=False)
        else:
            self.ends("embedding", is_gradient=True)

    def run(self, program: Sequence[Item], name: str) -> None:
        """The items of a layer's program. What is still under way at its end is waited for by what comes next."""
        under_way: dict[PlannedCall, int] = {}
        for item in program:
            if isinstance(item, Compute):
                if item.us:
                    self.compute(f"{item.name or 'compute'} {name}", item.us)
            elif isinstance(item, Issue):
                call, traffic = item.call, item.call.plan.traffic
                if is_one_of_two(call.plan):
                    raise UsageError(
                        f"{call.name}: tokens go in two levels here, for which a graph of single calls has no words: take the "
                        "dispatcher nccl, whose tokens go by one all_to_all"
                    )
                size, collective = traffic.logical_bytes, traffic.collective
                under_way[call] = self.collective(f"{call.name} {name}", collective, size, call.group)
            else:
                self.waits.add(under_way.pop(item.call))
        self.waits |= set(under_way.values())

    def ends(self, place: str, *, is_gradient: bool) -> None:
        """Add what the model's ends send for a micro-batch, one after the other."""
        for each in self.exchanges[place]:
            if each.axis == "tp" and each.name.endswith("_gradient") is is_gradient:
                for _ in range(max(1, each.count // self.count)):
                    self.waits.add(self.collective(each.name, each.collective, each.logical_bytes, each.axis))

    def edge(self, place: str) -> None:
        """Add what a step sends at its start, or at its end; all of it is waited for."""
        for each in self.exchanges[place]:
            found = [
                self.collective(each.name, each.collective, each.logical_bytes, each.axis) for _ in range(each.count)
            ]
            self.waits |= set(found)

    def compute(self, name: str, us: float) -> int:
        number = self.add(RankNode(len(self.nodes), name, "compute", us, after=tuple(sorted(self.waits))))
        self.waits = {number}
        return number

    def collective(self, name: str, collective: str, nbytes: int, axis: str) -> int:
        """A call after all that was computed, and after the last one of its group."""
        after = self.waits | ({self.last_of_group[axis]} if axis in self.last_of_group else set())
        ranks = group_ranks(self.setup, axis, self.rank)
        if name == "tied_gradients":  # of the pipeline's two ends alone
            ranks = ranks[0], ranks[-1]
        node = RankNode(len(self.nodes), name, collective, 0.0, nbytes, axis, ranks, after=tuple(sorted(after)))
        self.last_of_group[axis] = self.add(node)
        return node.number

    def message(self, way: str, sender: int, receiver: int, micro_batch: int, *, is_forward: bool) -> int:
        """A message between two chunks; both sides know it by its tag."""
        ranks = stage_ranks(self.setup)
        ends = ranks[sender % self.setup.pp], ranks[receiver % self.setup.pp]
        tag = 2 * (micro_batch * self.chunks + sender) + is_forward
        after = tuple(sorted(self.waits)) if way == "send" else ()
        name = f"{'activations' if is_forward else 'gradients'} of {micro_batch}"
        return self.add(
            RankNode(len(self.nodes), f"{way} {name}", way, 0.0, self.message_bytes, "pp", ends, tag, after)
        )

    def add(self, node: RankNode) -> int:
        if node.number >= _MOST_NODES:
            raise UsageError(
                f"a graph of more than {_MOST_NODES:,} nodes: take a smaller batch, of which a step is made in the same way"
            )
        self.nodes.append(node)
        return node.number


_PLACES = ("boundary", "embedding", "head", "loss", "gradients", "parameters")
