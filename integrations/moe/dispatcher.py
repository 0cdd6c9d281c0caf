"""The token dispatcher: it sends tokens to the experts that they chose, and brings the results
back.

The six phases are MoE Parallel Folding's (its figure 4; Megatron-Core's names): dispatch_preprocess
(permute), token_dispatch (all_to_all over EP), dispatch_postprocess (all_gather over ETP, sort by
expert), and their mirror: combine_preprocess (unsort, reduce_scatter over ETP), token_combine
(all_to_all over EP), combine_postprocess (the weighted sum). The backward pass of each goes the way
of its mirror. Where it moves less, or runs faster, tokens go to all ranks instead, or, over nodes,
in two levels: what a phase does is told by the kind
(:mod:`commlayer.integrations.moe.dispatch_kinds`).

One exchange of counts goes before, in :meth:`TokenDispatcher.prepare`. What follows from it is kept
in a frozen handle, so that combine, backward and recompute exchange no counts.

Shapes: T tokens of this rank, K choices of each, E experts, H hidden, R rows that this rank's
experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.agreement import (
    Offer,
    agree_on_experts,
    number_of,
    number_of_wire,
)
from commlayer.integrations.moe.chunk_stages import ChunkStages, returned_rows
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.dispatch_kinds import DISPATCH_KINDS
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.expert_spilling import ExpertSpiller
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import ChoiceCounts, Chunk, DispatchHandle, Experts, check_weights
from commlayer.integrations.moe.lent_experts import LentExperts
from commlayer.integrations.moe.levels import Levels
from commlayer.integrations.moe.load_recorder import layer_record
from commlayer.integrations.moe.planning import (
    DispatchDecision,
    DispatchPlanner,
    is_sharded,
    puts_off,
    slices_of,
)
from commlayer.integrations.moe.routing import who
from commlayer.integrations.wire_choice import DispatchWire, dispatch_wire
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.spilling import SpillDecision, Spilling
from commlayer.statistics import count_dispatch

__all__ = ["Parts", "TokenDispatcher"]

_Beside = TypeVar("_Beside")
_Result = TypeVar("_Result")
Parts = Generator[tuple[torch.Tensor, ...], Sequence[torch.Tensor], _Result]
"""The parts of a forward pass. Where tokens are under way it yields what the next part takes from this
one, and is sent it back: as it is, or cut, so that the backward pass has parts too. It returns the
pass's result. A part leaves no context open, such as autocast. ``examples/pass_parts.py`` of a checkout
runs two passes in turns."""
_NO_INDICES = torch.zeros(0, 1, dtype=torch.int64)


class TokenDispatcher:
    """Dispatch and combine over the EP and ETP groups of a mapping.

    Args:
        num_experts: E, over all ranks, in order; where EP does not divide them its first ranks have
            one more.
        ep: the ranks that hold different experts.
        etp: the ranks that hold shards of the same experts, where there are several.
        etp_ep: both together; needed where there is ``etp``.
        kind: ``all_to_all``, ``all_gather``, ``two_level``, or ``auto``: whichever the profile
            predicts to be fastest for a call, and without a profile whichever of the first two
            moves fewer rows.
        chunks: in how many chunks tokens go through :meth:`run`: 1, 2, 4 or 8 equal ones; how many
            eighths of the tokens each has, such as (1, 3, 3, 1); or ``auto``: by the profile and
            the experts' measured times, one without a profile.
        weights_travel: in :meth:`run` gating weights go with the tokens, and the experts apply
            them, not the combine.
        wire: formats that tokens may take between ranks, such as ``fp8_e4m3`` (see
            :class:`DispatchWire`); None: the setting ``COMMLAYER_WIRE``. Inside a node, and where
            the profile finds it no faster, they go as they are.
        slots: where experts lie, if not in order: rows are then those of slots, of which every rank
            has as many. Choices and capacities stay those of experts.
        spilling: how rows of busy ranks, and the weights of their experts, go to idle ones for a
            call (:class:`~commlayer.scheduler.placement.spilling.Spilling`, or the name of its
            rule); None: they stay. Tokens then go through :meth:`run` only, and the experts are
            :class:`~commlayer.integrations.moe.experts.GroupedExperts`.
        used_by: whose it is, for statistics.

    Attributes:
        decision: of the latest :meth:`prepare`.
        spill_decision: of the latest one whose load was uneven, where experts may spill.
        spiller: what decides that; None: rows stay.
        weights_travel: as given.

    Raises:
        UsageError: fewer experts than EP ranks, or an unknown ``kind`` or number of chunks.
        GroupError: the groups are no grid, or ``two_level`` is asked for and the EP group has not
            two levels.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        ep: GroupCommunicator,
        etp: GroupCommunicator | None = None,
        etp_ep: GroupCommunicator | None = None,
        kind: str = "auto",
        chunks: int | Sequence[int] | str = "auto",
        weights_travel: bool = False,
        wire: DispatchWire | str | None = None,
        slots: ExpertSlots | None = None,
        spilling: Spilling | str | None = None,
        used_by: str = "TokenDispatcher",
    ) -> None:
        if slots is not None:
            expected = (num_experts, ep.size, ep.rank)
            if (slots.num_experts, slots.placement.num_ranks, slots.rank) != expected:
                raise UsageError(
                    f"slots of {slots.num_experts} experts for rank {slots.rank} of {slots.placement.num_ranks}: expected "
                    f"{num_experts} experts for rank {ep.rank} of the {ep.size} ranks of EP"
                )
        self.slots = slots
        self.grid = ExpertGrid.of(num_experts if slots is None else slots.num_slots, ep, etp, etp_ep)
        if kind not in ("auto", *DISPATCH_KINDS):
            raise UsageError(f"kind (dispatch of a layer) must be auto, {' or '.join(DISPATCH_KINDS)}, got {kind!r}")
        slices = None if chunks == "auto" else slices_of(chunks)
        if kind != "auto":
            if slices is not None and len(slices) > 1 and not DISPATCH_KINDS[kind].takes_chunks:
                raise UsageError(f"{kind} brings all tokens at once: leave chunks out, or take kind all_to_all")
            if kind == "two_level":
                Levels.require(ep, self.grid.etp)
        self.ways = WireGroups(ep, self.grid.all, dispatch_wire(wire))
        # It times, and asks the group for predictions: nothing to compile.
        self._decide = torch.compiler.disable(DispatchPlanner(self.grid, kind, slices, self.ways).decide)
        self._count = torch.compiler.disable(partial(count_dispatch, used_by, self.grid.all.ranks))
        wanted = Spilling.of(spilling)
        self.spiller = None if wanted is None else ExpertSpiller(self.grid, slots, wanted, used_by)
        self._setup = (
            0 if self.spiller is None else self.spiller.number,
            number_of_wire(self.ways.wire),
            ("auto", *DISPATCH_KINDS).index(kind),
            weights_travel,
            *(slices or ()),
        )
        self.weights_travel = weights_travel
        self.record = layer_record(self.grid, num_experts)
        self._watching: list[Callable[[ChoiceCounts, ExpertSlots | None], None]] = []
        if self.record is not None:
            self.watch(self.record.add)
        self.decision: DispatchDecision | None = None
        self.spill_decision: SpillDecision | None = None

    def watch(self, seen: Callable[[ChoiceCounts, ExpertSlots | None], None]) -> Callable[[], None]:
        """Have ``seen`` called with the counts of every call, which all ranks of the group know,
        and the slots that they are of (None: of experts), until what is returned is called."""
        watching = torch.compiler.disable(seen)
        self._watching.append(watching)
        return lambda: self._watching.remove(watching)

    def prepare(
        self,
        indices: torch.Tensor,
        *,
        capacity: int | None = None,
        like: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        experts: Experts | None = None,
        needs_gradient: bool | None = None,
    ) -> DispatchHandle:
        """Exchange counts, and decide how these tokens go; collective over EP × ETP.

        Args:
            indices: [T, K] int64: the expert of each choice, −1 where dropped.
            capacity: each rank sends exactly so many rows to every expert, padded with zeros; the
                same on all ranks.
            like: the tokens [T, H]: to predict times, to see that ranks agree on H and dtype, and
                whether they need a gradient.
            weights: [T, K], for the same reasons.
            experts: what will work on them: needed to choose chunks by its times, which the first
                call measures.
            needs_gradient: whether a backward pass will go the way back; None: as autograd says of
                what is given here.

        Raises TensorError for indices of another shape, dtype or range, weights that are NaN or
        infinite, and more choices of an expert than its capacity: here; and DisagreementError on
        the other ranks, before a token moves.
        """
        try:
            if needs_gradient is None:
                trained = experts.parameters() if isinstance(experts, torch.nn.Module) else ()
                tensors = [tensor for tensor in (like, weights, *trained) if isinstance(tensor, torch.Tensor)]
                needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            offer = self._offer(indices, capacity, like, weights, experts, needs_gradient)
        except Exception as error:  # noqa: BLE001  the others hear of it first
            offer = Offer(_NO_INDICES, error=error)
        agree_on_experts(self.grid)
        layout = ChoiceCounts.exchange(self.grid, offer)
        for seen in self._watching:
            seen(layout, self.slots)
        lent: LentExperts | None = None
        if self.spiller is not None:
            assert isinstance(experts, GroupedExperts)  # or the offer was refused
            layout, lent = self.spiller.spill(layout, experts)
            self.spill_decision = self.spiller.decision
        self.decision = decision = self._decide(layout, like, experts)
        self._count(decision.name, indices.shape[0])
        return DispatchHandle(
            decision.kind,
            indices.shape[0],
            indices.shape[1],
            DISPATCH_KINDS[decision.kind].chunks(layout, self.ways, decision.slices),
            self,
            needs_gradient=layout.needs_gradient,
            sound_weights=None if weights is None else weakref.ref(weights),
            placement=None if self.slots is None else self.slots.placement,
            lent=lent,
        )

    def _offer(
        self,
        indices: torch.Tensor,
        capacity: int | None,
        like: torch.Tensor | None,
        weights: torch.Tensor | None,
        experts: Experts | None,
        needs_gradient: bool,
    ) -> Offer:
        # Weights on a device are looked at with the indices: the host waits once.
        on_device = weights is not None and not weights.is_cpu
        if weights is not None:
            check_weights(weights, indices.shape[:2], is_sound=on_device)
        is_elsewhere = like is not None and not like.is_cpu
        way = (*self._setup, experts is None, is_sharded(experts), puts_off(experts, like), is_elsewhere)
        if self.spiller is not None:
            if is_sharded(experts):
                raise UsageError(
                    f"{who()}experts that FSDP shards cannot spill: no rank has all weights of one; leave them out of "
                    "fully_shard, or spilling out"
                )
            if not isinstance(experts, GroupedExperts):
                raise UsageError(
                    f"{who()}experts spill by sending weights that must be known: expected GroupedExperts as experts=, got "
                    f"{type(experts).__name__}; leave spilling out"
                )
            if capacity is not None:
                raise UsageError(
                    f"{who()}rows are padded to a capacity, so every rank has as many: there is nothing to spill; leave "
                    "pad_to_capacity out, or spilling"
                )
            # Gradients of those that are trained come back: as many on all ranks.
            way = (*way, self.spiller.is_on, *(weight.requires_grad for weight in experts.weights))
        if self.slots is not None:
            indices = self.slots.slots_of(indices)
        sent_weights = weights if on_device else None
        return Offer(indices, capacity, like, number_of(way), needs_gradient, weights=sent_weights)

    def refuse(self, error: Exception) -> NoReturn:
        """Refuse a call in place of :meth:`prepare`, where this rank cannot go on: tell the others,
        then raise ``error``."""
        agree_on_experts(self.grid)
        ChoiceCounts.exchange(self.grid, Offer(_NO_INDICES, error=error))
        raise error

    def dispatch(
        self, x: torch.Tensor, handle: DispatchHandle, *, beside: Callable[[], object] | None = None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Send tokens to their experts: [T, H] → (rows [R, H] sorted by expert, rows of each local
        expert). Collective.

        Again with the same handle, the same rows come again (recompute). ``beside`` is called while
        they travel. Raises TensorError for another number of tokens, UsageError for a handle of
        another dispatcher, or one of several chunks (see :meth:`run`).
        """
        handle.require(self, self.slots, x)
        if self.spiller is not None:
            raise UsageError("dispatch: where experts may spill, their weights go along with tokens: use run()")
        chunk = _only_chunk(handle)
        handle.use.dispatched += 1
        handle.use.hidden, handle.use.dtype = x.shape[1], x.dtype
        x = handle.in_graph(x)
        sent = chunk.token_dispatch(chunk.dispatch_preprocess(x))
        if beside is not None:
            beside()
        return chunk.dispatch_postprocess(sent.wait()), chunk.expert_rows

    def dispatch_weights(self, weights: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Bring the gating weights of the rows that :meth:`dispatch` brings, for experts that apply
        them: [T, K] → [R, 1].

        Collective. The combine then goes without weights. Raises as :meth:`dispatch` does.
        """
        handle.require(self, self.slots, weights=weights)
        return _only_chunk(handle).fetch_weights(handle.in_graph(weights))

    def combine(
        self,
        rows: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None = None,
        *,
        beside: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Bring experts' outputs back: [R, H] → tokens [T, H], each choice times its weight [T, K].
        Collective.

        ``beside`` is called while they travel. Raises TensorError for shapes that are not the
        handle's, UsageError for a handle that has come back already.
        """
        handle.require(self, self.slots, weights=weights)
        chunk = _only_chunk(handle)
        if handle.use.combined >= handle.use.dispatched:
            raise UsageError(
                "combine: the tokens of this handle have come back already (or never went): a handle is for one dispatch and "
                "one combine; dispatch again with it to recompute, or prepare another"
            )
        rows = returned_rows(rows, (sum(chunk.expert_rows), handle.use.hidden), handle.use.dtype)
        handle.use.combined += 1
        if weights is not None:
            weights = handle.in_graph(weights)
        back = chunk.token_combine(chunk.combine_preprocess(rows, weights))
        if beside is not None:
            beside()
        return chunk.combine_postprocess(back.wait(), weights)

    def run(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        experts: Experts,
        weights: torch.Tensor | None = None,
        *,
        beside: Callable[[], _Beside] | None = None,
    ) -> tuple[torch.Tensor, _Beside | None]:
        """Run dispatch, ``experts`` and combine, chunk by chunk: those behind chunk j go out and
        chunk j−1 comes back while chunk j computes.

        ``weights`` [T, K] are applied in the combine, or, with ``weights_travel``, by the experts.
        ``beside``: what else may be computed while the first chunk travels, such as shared experts.
        The backward pass overlaps in the same way (see :mod:`commlayer.collectives`). Returns the
        tokens [T, H] and what ``beside`` returned. Collective.

        Raises TensorError and UsageError as :meth:`dispatch` and :meth:`combine` do.
        """
        handle.require(self, self.slots, x, weights)
        stages = ChunkStages(handle, x, weights, experts, weights_travel=self.weights_travel)
        other = beside() if beside is not None else None
        stages.compute()
        return stages.finish(), other

    def run_in_parts(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        experts: Experts,
        weights: torch.Tensor | None = None,
        *,
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> Parts[tuple[torch.Tensor, torch.Tensor | None]]:
        """The parts of :meth:`run`, for passes in turns: another goes on while tokens go out, and
        while they come back."""
        handle.require(self, self.slots, x, weights)
        stages = ChunkStages(handle, x, weights, experts, weights_travel=self.weights_travel)
        others: Sequence[torch.Tensor] = () if beside is None else (beside(),)
        others = stages.carry_on((yield (*stages.crossing(), *others)))
        stages.compute()
        others = stages.carry_on((yield (*stages.crossing(), *others)))
        return stages.finish(), others[0] if others else None


def _only_chunk(handle: DispatchHandle) -> Chunk:
    if len(handle.chunks) != 1:
        raise UsageError(f"dispatch() and combine() move one chunk, the handle has {len(handle.chunks)}: use run()")
    return handle.chunks[0]
