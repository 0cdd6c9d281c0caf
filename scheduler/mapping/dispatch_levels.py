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
        return tuple(one for each in exchanges for one in self._in_place_of(each))

    def _in_place_of(self, flat: StepCollective) -> tuple[StepCollective, ...]:
        name, _, suffix = flat.name.partition("_")
        if flat.axis != "ep" or flat.collective != "all_to_all_v" or name not in ("dispatch", "combine"):
            return (flat,)
        found = [
            self._rows(flat, "rails", self.rail_rows, Span.RAIL),
            self._rows(flat, "inside", self.inside_rows, Span.NODE),
        ]
        is_back = suffix.startswith("gradient")
        if (name == "combine") != is_back:  # towards the tokens
            found.reverse()
        if name == "combine":
            collective = "reduce_scatter" if is_back else "all_gather"
            weights = self._of_all(flat, "weights", WEIGHT_BYTES, collective)
            found = [*found, weights] if is_back else [weights, *found]
        elif suffix == "" or (suffix == "again" and self.setup.recompute != "megascale"):
            index_bytes = packed_index_bytes(self.job.model.experts)
            found.insert(0, self._of_all(flat, "choices", index_bytes, "all_gather"))
        return tuple(found)

    def _rows(self, flat: StepCollective, which: str, rows: int, over: Span) -> StepCollective:
        size = rows * self.job.model.routed_hidden * self.software.activation_bytes
        return replace(flat, name=_named(flat.name, which), logical_bytes=size, over=over)

    def _of_all(self, flat: StepCollective, which: str, each: int, collective: str) -> StepCollective:
        """The call by which all ranks tell each other all of their choices."""
        size = self.tokens * self.setup.ep * self.job.model.top_k * each
        return replace(flat, name=_named(flat.name, which), logical_bytes=size, collective=collective)

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


def _named(name: str, which: str) -> str:
    """``dispatch_again`` → ``dispatch_rails_again``."""
    kind, _, suffix = name.partition("_")
    return f"{kind}_{which}" + (f"_{suffix}" if suffix else "")
