"""A mixture of experts as a module: router, dispatcher, experts, shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.dispatcher import Parts, TokenDispatcher
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.experts import GroupedExperts, swiglu
from commlayer.integrations.moe.handle import DispatchHandle
from commlayer.integrations.moe.layer_options import check_layer_options
from commlayer.integrations.moe.replicated_tokens import ReplicatedDispatcher, run_shares
from commlayer.integrations.moe.router import Router, RouterConfig, Routing
from commlayer.integrations.moe.routing import ValidTokens
from commlayer.integrations.parameter_marks import mark_replicated
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError, UsageError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.spilling import Spilling

__all__ = ["MoELayer", "SharedExperts"]


class SharedExperts(nn.Module):
    """A SwiGLU MLP that every token goes through, computed while the first chunk of tokens travels.

    Its weights are whole on every rank, like the router's: tokens are sharded, and so are their
    gradients' sums.
    """

    def __init__(self, hidden: int, width: int, *, seed: int = 0) -> None:
        super().__init__()
        if hidden < 1 or width < 1:
            raise UsageError(f"shared experts of hidden size {hidden} and width {width}: both must be 1 or more")
        generator = torch.Generator().manual_seed(seed)
        self.gate = nn.Parameter(torch.randn(width, hidden, generator=generator) * hidden**-0.5)
        self.up = nn.Parameter(torch.randn(width, hidden, generator=generator) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(hidden, width, generator=generator) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the MLP on tokens [T, H]."""
        return F.linear(swiglu(F.linear(x, self.gate), F.linear(x, self.up)), self.down)


class MoELayer(nn.Module):
    """A mixture-of-experts layer, ``Σ_k weight_k · expert_k(x)``, over the EP and ETP groups of a
    mesh; plus the shared experts.

    Weights are the same under every mapping for one seed.

    Args:
        hidden, width: of a token, and of an expert's inner layer.
        router: how tokens choose.
        mesh: the groups; None: all experts are here.
        shared_width: inner width of the shared experts; 0: there are none.
        dispatch: ``all_to_all``, ``all_gather``, ``two_level`` (over nodes), or ``auto``: whichever
            the profile predicts to be fastest for each call.
        chunks: in how many chunks tokens go through the experts: 1, 2, 4, 8, the eighths of the
            tokens in each, such as (1, 3, 3, 1), or ``auto``: by the profile and the experts' own
            measured times.
        weights_at: ``combine``: gating weights are applied to the experts' outputs, where they are
            summed; ``experts``: before each expert's last product, as MegaScale-MoE does. Their
            values differ by rounding.
        tokens: ``sharded``: every rank brings tokens of its own. ``replicated``: the ranks of tp
            all bring the same ones (tensor parallelism without sequence parallelism) and get the
            same outputs; see :mod:`commlayer.integrations.moe.replicated_tokens`.
        wire: formats that tokens may take between nodes, such as ``fp8_e4m3``; see
            :class:`TokenDispatcher`.
        communicator: over the ep and etp groups; moves tokens that are replicated and padded by
            MoNTA's plans, and goes with no option that a dispatcher looks at. Without it each rank
            takes its share of the tokens.
        spare_slots: places for copies of experts on each rank, beside those that experts in order
            take. Given, 0 too, experts can be placed anew while the model trains
            (:mod:`commlayer.integrations.moe.expert_placer`); None: they stay in order.
        spilling: where routing is uneven, rows of busy ranks may be computed on idle ones, to which
            the experts' weights go along: ``priced``, where that is predicted to pay; ``llep``, by
            LLEP's rule; or a :class:`~commlayer.scheduler.placement.spilling.Spilling`. Decided in
            every forward pass; None: rows stay.
        sequence, balance: the ranks that share a sequence, and those whose tokens are balanced
            together, for the router.
        seed: of all weights.

    Attributes:
        routing: what the router decided in the latest forward pass, and its losses, for logs:
            without gradients.

    Raises:
        UsageError: options that are none, or do not go together; ``priced`` without a profile that
            can price this expert group.
        GroupError: ``two_level`` over an expert group that has not two levels.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        router: RouterConfig,
        *,
        mesh: FoldedMesh | None = None,
        shared_width: int = 0,
        dispatch: Literal["all_to_all", "all_gather", "two_level", "auto"] = "auto",
        chunks: int | Sequence[int] | Literal["auto"] = "auto",
        weights_at: Literal["combine", "experts"] = "combine",
        tokens: Literal["sharded", "replicated"] = "sharded",
        wire: DispatchWire | str | None = None,
        communicator: Communicator | None = None,
        spare_slots: int | None = None,
        spilling: Spilling | str | None = None,
        sequence: GroupCommunicator | None = None,
        balance: GroupCommunicator | None = None,
        seed: int = 0,
    ) -> None:
        options = dict(locals())  # copied first: a comprehension would be one more local on Python 3.12
        for name in ("self", "__class__"):
            options.pop(name, None)
        check_layer_options(**options)
        super().__init__()
        self.hidden = hidden
        generator = torch.Generator().manual_seed(seed)
        self.router = Router(router, hidden, sequence=sequence, balance=balance, generator=generator)
        slots = None
        if spare_slots is not None:
            ep_size, rank = (1, 0) if mesh is None else (mesh.size("ep"), mesh.rank("ep"))
            placement = ExpertPlacement.in_order(router.num_experts, ep_size, spare_slots)
            slots = ExpertSlots(placement, rank, 0 if mesh is None else mesh.rank("etp_ep"))
        self.dispatcher = TokenDispatcher(
            router.num_experts,
            kind=dispatch,
            chunks=chunks,
            weights_travel=weights_at == "experts",
            wire=wire,
            slots=slots,
            spilling=spilling,
            **_groups(mesh),  # type: ignore[arg-type]
        )
        grid = self.dispatcher.grid
        self.experts = GroupedExperts(
            hidden,
            width,
            first=grid.first_local_expert,
            count=grid.num_local_experts,
            etp_rank=grid.etp.rank,
            etp_size=grid.etp.size,
            seed=seed,
            slots=slots,
        )
        self.shared = SharedExperts(hidden, shared_width, seed=seed + 1) if shared_width else None
        self.holders = GroupCommunicator(mesh.group("tp") if mesh and tokens == "replicated" else None, "tp")
        if communicator is not None and self.holders.size == 1:
            raise UsageError(
                "a communicator moves tokens that several ranks of tp hold, and tp has one: leave communicator out"
            )
        if communicator is not None and self.holders.ranks != grid.etp.ranks:
            raise UsageError(
                f"a communicator moves tokens that the ranks of etp {list(grid.etp.ranks)} hold, but those of tp "
                f"{list(self.holders.ranks)} do: make both one group, or leave communicator out"
            )
        self.replicated = ReplicatedDispatcher(router.num_experts, communicator, grid.etp) if communicator else None
        self.routing: Routing | None = None
        # Whole on every tp rank: each of which has tokens of its own, or all of which have the
        # same.
        over = ("tp",) if tokens == "sharded" else ()
        mark_replicated(self.router, over=over)
        if self.shared is not None:
            mark_replicated(self.shared, over=over)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the layer on ``x`` [..., H]; the result has the same shape. Collective over EP × ETP,
        also where this rank has no tokens, or no valid ones.

        Args:
            positions: [tokens] int64: for the router, where it drops from a sequence of which ranks
                hold no consecutive slices.
            valid: bool, as many as tokens, True where a token is no padding; None: all are valid.
                Padding is neither routed nor sent nor computed: its output is zero, and so is its
                gradient. Where tokens are replicated, the ranks that hold them pass the same.

        Raises TensorError for another hidden size, dtype or device, PeerError and
        CollectiveTimeoutError as collectives do.
        """
        tokens, routing, padding = self._routed(x, positions, valid)
        if self.holders.size > 1:
            return padding.put_back(self._mix_shared(tokens, routing)).view(x.shape)
        handle, beside = self._prepared(tokens, routing), self._beside(tokens)
        out, other = self.dispatcher.run(tokens, handle, self.experts, routing.weights, beside=beside)
        return padding.put_back(out if other is None else out + other).view(x.shape)

    def parts(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> Parts[torch.Tensor]:
        """The parts of the layer's forward pass, with what it returns, for passes that go in turns. Of
        tokens that are replicated there is one. Hooks of the module do not run.
        """
        tokens, routing, padding = self._routed(x, positions, valid)
        if self.holders.size > 1:
            return padding.put_back(self._mix_shared(tokens, routing)).view(x.shape)
        handle, beside = self._prepared(tokens, routing), self._beside(tokens)
        out, other = yield from self.dispatcher.run_in_parts(
            tokens, handle, self.experts, routing.weights, beside=beside
        )
        return padding.put_back(out if other is None else out + other).view(x.shape)

    def _prepared(self, tokens: torch.Tensor, routing: Routing) -> DispatchHandle:
        return self.dispatcher.prepare(
            routing.indices,
            capacity=routing.padded_rows,
            like=tokens,
            weights=routing.weights,
            experts=self.experts,
        )

    def _beside(self, tokens: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """The shared experts' work, for when the first chunk travels."""
        shared = self.shared
        return None if shared is None else lambda: shared(tokens)

    def _routed(
        self, x: torch.Tensor, positions: torch.Tensor | None, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, Routing, ValidTokens]:
        """The valid tokens [V, H] of ``x`` [..., H], their routing, and where they lie among
        all."""
        tokens = x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
        if valid is not None and valid.shape == x.shape[:-1]:  # of another shape the router refuses it
            valid = valid.flatten()
        try:
            routing: Routing = self.router(tokens, positions, valid)
        except (PeerError, CollectiveTimeoutError):  # nothing more can be sent
            raise
        except Exception as error:  # of this rank alone, perhaps
            if self._goes_by_plans:  # whose ranks exchange no counts
                raise
            self.dispatcher.refuse(error)
        losses = {name: loss.detach() for name, loss in routing.losses.items()}
        self.routing = replace(routing, weights=routing.weights.detach(), losses=losses)  # without the graph behind it
        padding = routing.valid_tokens
        if padding.places is None:
            return tokens, routing, padding
        indices, weights = padding.take(routing.indices), padding.take(routing.weights)
        return padding.take_tokens(tokens), replace(routing, indices=indices, weights=weights), padding

    @property
    def _goes_by_plans(self) -> bool:
        return self.replicated is not None and self.holders.size > 1 and self.router.config.pad_to_capacity

    def _mix_shared(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        indices, weights = routing.indices, routing.weights
        if self._goes_by_plans and self.replicated is not None and routing.padded_rows is not None:
            out = self.replicated.run(tokens, indices, weights, routing.padded_rows, self.experts)
        else:
            out = run_shares(self.dispatcher, self.holders, tokens, indices, weights, self.experts)
        return out if self.shared is None else out + self.shared(tokens)


def _groups(mesh: FoldedMesh | None) -> dict[str, GroupCommunicator]:
    if mesh is None:
        return {"ep": GroupCommunicator(None, "ep")}
    groups = {"ep": GroupCommunicator(mesh.group("ep"), "ep")}
    if mesh.size("etp") > 1:
        groups["etp"] = GroupCommunicator(mesh.group("etp"), "ep")
    if mesh.size("etp") > 1 or mesh.group("etp_ep") is not mesh.group("ep"):  # apart: counts do not queue behind tokens
        groups["etp_ep"] = GroupCommunicator(mesh.group("etp_ep"), "ep")
    return groups
