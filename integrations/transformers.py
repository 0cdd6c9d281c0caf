"""transformers with our token dispatcher, by its own table of expert-parallel implementations: no
file of it changes.

    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation=register_experts())
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

transformers 5.23 has an ``EPImplementation`` for each way in which experts get their tokens: its
own exchanges them by all_to_all, or has every rank run its experts on the whole batch.
:class:`SpreadExperts` is ours: tokens go by all_to_all, in two levels or by all_gather, in chunks
beside the experts, in a wire format, as :class:`~commlayer.integrations.TokenDispatcher` decides.

Shapes: T tokens of this rank, K choices of each, R rows that this rank's experts receive, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.groups import expert_communicator, planned_from, say_first
from commlayer.integrations.moe.choice_rows import experts_of_rows, moves_choices, return_choices, send_choices
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.shares import gather_shares, take_share
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import UsageError

__all__ = ["SpreadExperts", "register_experts"]

ExpertsForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' experts of one rank: rows [R, H], the local expert of each [R, 1], its weight [R,
1] → [R, H]."""


def register_experts(
    name: str = "commlayer",
    *,
    kind: str = "auto",
    chunks: int | Sequence[int] | str = "auto",
    wire: DispatchWire | str | None = None,
) -> str:
    """Register our way to the experts, and return ``name``, for
    ``DistributedConfig(ep_implementation=name)``. On every rank, before the model is made.

    Args:
        name: others than transformers' own; one that is registered already is replaced.
        kind, chunks, wire: as for :class:`~commlayer.integrations.TokenDispatcher`.

    Raises UsageError where transformers is too old to have the table, or ``name`` is one of its
    own.
    """
    try:
        parallel: Any = import_module("transformers.distributed.expert_parallel")
        table: Any = parallel.EPImplementationInterface
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"register_experts needs transformers 5.23 or newer, which has a table of expert-parallel implementations: {error}"
        ) from error
    if name in ("auto", "all_to_all", "all_reduce", "deepgemm_megamoe"):
        raise UsageError(f"register_experts: {name!r} is an implementation of transformers' own: take another name")

    class CommlayerEP(parallel.EPImplementation):  # type: ignore[misc]  # transformers', of which nothing is known here
        """transformers' experts of one layer, reached by :class:`SpreadExperts`."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self._spread = SpreadExperts(
                self.experts_forward,
                self.num_local_experts,
                ep_mesh.get_group(),
                tp_mesh.get_group(),
                kind=kind,
                chunks=chunks,
                wire=wire,
            )

        def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return self._spread(hidden_states, top_k_index, top_k_weights)

    table.register(name, CommlayerEP)
    return name


class SpreadExperts:
    """The experts of one layer, spread over the ranks of ``ep``: called with the tokens of this
    rank.

    Args:
        forward: of this rank's experts.
        num_local: how many these are.
        ep: the ranks that hold different experts; of backend ``commlayer``, as is ``tp``.
        tp: the ranks that hold the same tokens; each takes its share of them.
        kind, chunks, wire: as for :class:`~commlayer.integrations.TokenDispatcher`.

    Raises GroupError for groups of another backend.
    """

    def __init__(
        self,
        forward: ExpertsForward,
        num_local: int,
        ep: dist.ProcessGroup,
        tp: dist.ProcessGroup,
        *,
        kind: str = "auto",
        chunks: int | Sequence[int] | str = "auto",
        wire: DispatchWire | str | None = None,
    ) -> None:
        communicator = expert_communicator(
            ep,
            "the group of expert parallelism",
            'call torch.distributed.init_process_group("commlayer") before the model is made, or start the job '
            f"with COMMLAYER_AS={dist.get_backend(ep)}",
        )
        self._forward, self._num_local = forward, num_local
        self._holders = GroupCommunicator(tp if tp.size() > 1 else None, "tp")
        self.tokens = TokenDispatcher(
            num_local * ep.size(),
            ep=communicator,
            kind=kind,
            chunks=chunks,
            wire=wire,
            used_by="transformers",
        )

    def __call__(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run ``x`` [T, H] through the experts ``indices`` [T, K], summed with ``weights`` [T, K]:
        [T, H]. Collective."""
        total, holders = x.shape[0], self._holders
        x, indices, weights = (take_share(each, holders) for each in (x, indices, weights))
        handle = self.tokens.prepare(indices.to(torch.int64), like=x, weights=weights, experts=self._compute)
        decision, group = self.tokens.decision, self.tokens.grid.all
        assert decision is not None  # of the call that was just prepared
        say_first(
            "transformers",
            lambda: f"tokens go to experts on {group.size} ranks by {decision.name}, planned {planned_from(group)}",
        )
        if not moves_choices(handle):
            out, _ = self.tokens.run(x, handle, self._compute, weights)
            return gather_shares(out, holders, total)
        order = torch.argsort(indices.reshape(-1))  # transformers' experts sort rows anew, as they arrive
        rows = send_choices(x[order // max(indices.shape[1], 1)], handle, by_expert=False)
        computed = self._of_experts(rows, experts_of_rows(handle))
        back = return_choices(computed, handle, by_expert=False)
        of_choice = torch.empty_like(back)
        of_choice[order] = back
        summed = (of_choice.view(*weights.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
        return gather_shares(summed, holders, total)

    def _compute(self, rows: torch.Tensor, expert_rows: Sequence[int], weights: torch.Tensor | None) -> torch.Tensor:
        del weights  # they are applied where rows are summed
        return self._of_experts(rows, torch.arange(self._num_local).repeat_interleave(torch.tensor(expert_rows)))

    def _of_experts(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Run rows [R, H] through the local ``experts`` [R]."""
        experts = experts.to(rows.device).unsqueeze(-1)
        if rows.shape[0]:
            return self._forward(rows, experts, rows.new_ones(rows.shape[0], 1)).to(rows.dtype)
        # A row of zeros, dropped again: its graph is that of the experts.
        nobody = experts.new_zeros(1, 1)
        return self._forward(rows.sum(dim=0, keepdim=True), nobody, rows.new_ones(1, 1))[:0].to(rows.dtype)
