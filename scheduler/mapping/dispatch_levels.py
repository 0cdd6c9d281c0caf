"""The exchanges of a dispatch in two levels, in place of the flat all_to_all that a mapping's step has (docs/moe.md).

A token crosses once to each node that holds any of its experts, over the rail, and goes on inside it to each rank that holds
any. How many those are follows from experts and choices alone, all choices being as likely
(:func:`~commlayer.scheduler.rails.distinct_nodes`); the run time's dispatcher counts them in every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from commlayer.scheduler.dispatch_price import WEIGHT_BYTES, packed_index_bytes
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.mapping.step_collectives import StepCollective, rows_of_rank
from commlayer.scheduler.plan import Span
from commlayer.scheduler.rails import distinct_nodes

__all__ = ["DispatchLevels", "parts_of_token"]


_CALLS = ("rails", "inside", "weights", "choices")
"""The words that stand in their names for what they are: ``dispatch_again`` becomes ``dispatch_rails_again``."""


def parts_of_token(job: Job, parts: int) -> float:
    """The expected number of ``parts`` (nodes, ranks), of which each holds as many experts, on which a token has any: within a
    router's limit of groups, and by recorded popularity where the job has it."""
    model = job.model
    found = distinct_nodes(model.experts, parts, model.top_k, model.router_groups, model.router_group_limit)
    return found if job.loads is None else max(1.0, found * job.loads.togetherness(parts, model.top_k))


@dataclass(frozen=True, slots=True)
class DispatchLevels:
    """The two levels of an EP group over ``num_nodes``, for ``tokens`` of a rank in a micro-batch.

    ``nodes``, ``ranks``: on how many of either a token has an expert, as expected. ``rail_rows``, ``inside_rows``: of an even
    exchange of as many as the busiest rank's, its own included.
    """

    job: Job
    setup: Setup
    software: Software
    num_nodes: int
    tokens: int
    nodes: float
    ranks: float
    rail_rows: int
    inside_rows: int

    @classmethod
    def of(cls, job: Job, setup: Setup, software: Software, shape: tuple[int, ...]) -> DispatchLevels | None:
        """The levels of a setup whose EP group lies as ``shape`` on nodes; None where its dispatcher would not consider them."""
        model, width = job.model, max(shape)
        is_over_rails = len(shape) > 1 and width > 1 and len(set(shape)) == 1
        is_flat_kind = setup.exchange == "all_to_all" and setup.etp == 1 and job.capacity_factor is None
        is_ours = software.two_levels and not software.sends_weights  # they stay for the combine
        if not (is_ours and is_flat_kind and is_over_rails) or model.experts % setup.ep:
            return None
        tokens = rows_of_rank(job, setup) * setup.micro_batch
        nodes, ranks = (parts_of_token(job, count) for count in (len(shape), setup.ep))
        rails, inside = (
            round(tokens * min(most, count * job.imbalance)) for most, count in ((len(shape), nodes), (setup.ep, ranks))
        )
        return cls(job, setup, software, len(shape), tokens, nodes, ranks, rails, inside)

    def replaced(self, exchanges: Iterable[StepCollective]) -> tuple[StepCollective, ...]:
        """Put these levels' exchanges in place of the flat ones to the experts and back, others as they are."""
        sent: list[StepCollective] = []
        hidden, element_bytes = self.job.model.routed_hidden, self.software.activation_bytes
        choices = self.tokens * self.setup.ep * self.job.model.top_k  # of all ranks, which they tell each other
        for flat in exchanges:
            kind, _, suffix = flat.name.partition("_")
            if flat.axis != "ep" or flat.collective != "all_to_all_v" or kind not in ("dispatch", "combine"):
                sent.append(flat)
                continue
            names = {each: "_".join(filter(None, (kind, each, suffix))) for each in _CALLS}
            rails, inside = (
                replace(flat, name=names[name], logical_bytes=rows * hidden * element_bytes, over=over)
                for name, rows, over in (("rails", self.rail_rows, Span.RAIL), ("inside", self.inside_rows, Span.NODE))
            )
            is_back = suffix.startswith("gradient")
            goes_home = (kind == "combine") != is_back  # towards the tokens: first inside the experts' node
            calls = [inside, rails] if goes_home else [rails, inside]
            if kind == "combine":
                collective = "reduce_scatter" if is_back else "all_gather"
                size = choices * WEIGHT_BYTES
                weights = replace(flat, name=names["weights"], logical_bytes=size, collective=collective)
                calls = [*calls, weights] if is_back else [weights, *calls]
            elif suffix == "" or (suffix == "again" and self.setup.recompute != "megascale"):
                size = choices * packed_index_bytes(self.job.model.experts)
                calls.insert(0, replace(flat, name=names["choices"], logical_bytes=size, collective="all_gather"))
            sent += calls
        return tuple(sent)

    @property
    def moved_elements(self) -> float:
        """Elements that a pass reads and writes beyond those of a flat dispatch: rows are copied at each stop.

        At the source, where they are passed on, and where experts take them; flat at the source, and, where a rank has several
        experts, again at theirs.
        """
        top_k = self.job.model.top_k
        sorted_again = 2 * top_k if self.job.model.experts > self.setup.ep else 0
        each_way = max(0.0, 2 * self.nodes + 2 * self.ranks - sorted_again)
        return 2 * each_way * self.tokens * self.job.model.routed_hidden
