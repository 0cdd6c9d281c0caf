"""The token dispatcher: it sends tokens to the experts that they chose, and brings the results back.

The six phases are MoE Parallel Folding's (its figure 4; Megatron-Core's names): dispatch_preprocess
(permute), token_dispatch (all_to_all over EP), dispatch_postprocess (all_gather over ETP, sort by
expert), and their mirror: combine_preprocess (unsort, reduce_scatter over ETP), token_combine
(all_to_all over EP), combine_postprocess (the weighted sum). The backward pass of each goes the way of
its mirror. Where it moves less, or runs faster, tokens go to all ranks instead, or, over nodes, in two
levels: what a phase does is told by the kind (:mod:`commlayer.integrations.moe.dispatch_kinds`).

One exchange of counts goes before, in :meth:`TokenDispatcher.prepare`. What follows from it is kept in
a frozen handle, so that combine, backward and recompute exchange no counts.

Shapes: T tokens of this rank, K choices of each, E experts, H hidden, R rows that this rank's experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn, TypeVar

import torch

from commlayer.collectives import GroupCommunicator, Held, Pending
from commlayer.integrations.moe.agreement import (
    Offer,
    agree_on_experts,
    number_of,
    number_of_wire,
    weights_error,
)
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.dispatch_kinds import DISPATCH_KINDS, AllToAll
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.expert_spilling import ExpertSpiller
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import ChoiceCounts, Chunk, DispatchHandle, Experts
from commlayer.integrations.moe.lent_experts import LentExperts
from commlayer.integrations.moe.load_recorder import layer_record
from commlayer.integrations.moe.planning import (
    DispatchDecision,
    DispatchPlanner,
    is_sharded,
    puts_off,
    slices_of,
)
from commlayer.integrations.moe.routing import who
from commlayer.integrations.pass_parts import Parts
from commlayer.integrations.remat import recomputable_from
from commlayer.integrations.wire_choice import DispatchWire, dispatch_wire
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.placement.spilling import SpillDecision, Spilling
from commlayer.statistics import count_dispatch, count_spill

__all__ = ["TokenDispatcher"]

_Beside = TypeVar("_Beside")
_NO_INDICES = torch.zeros(0, 1, dtype=torch.int64)


class TokenDispatcher:
    """Dispatch and combine over the EP and ETP groups of a mapping.

    Args:
        num_experts: E, over all ranks, in order; where EP does not divide them its first ranks have one more.
        ep: the ranks that hold different experts.
        etp: the ranks that hold shards of the same experts, where there are several.
        etp_ep: both together; needed where there is ``etp``.
        kind: ``all_to_all``, ``all_gather``, ``two_level``, or ``auto``: whichever the profile predicts to be fastest for a call,
            and without a profile whichever of the first two moves fewer rows.
        chunks: in how many chunks tokens go through :meth:`run`: 1, 2, 4 or 8 equal ones; how many eighths of the tokens each
            has, such as (1, 3, 3, 1); or ``auto``: by the profile and the experts' measured times, one without a profile.
        weights_travel: in :meth:`run` gating weights go with the tokens, and the experts apply them, not the combine.
        wire: formats that tokens may take between ranks, such as ``fp8_e4m3`` (see :class:`DispatchWire`); None: the setting
            ``COMMLAYER_WIRE``. Inside a node, and where the profile finds it no faster, they go as they are.
        slots: where experts lie, if not in order: rows are then those of slots, of which every rank has as many. Choices and
            capacities stay those of experts.
        spilling: how rows of busy ranks, and the weights of their experts, go to idle ones for a call
            (:class:`~commlayer.scheduler.placement.spilling.Spilling`, or the name of its rule); None: they stay. Tokens then go
            through :meth:`run` only, and the experts are :class:`~commlayer.integrations.moe.experts.GroupedExperts`.
        used_by: whose it is, for statistics.

    Attributes:
        decision: of the latest :meth:`prepare`.
        spill_decision: of the latest one whose load was uneven, where experts may spill.
        spiller: what decides that; None: rows stay.
        weights_travel: as given.

    Raises:
        UsageError: fewer experts than EP ranks, or an unknown ``kind`` or number of chunks.
        GroupError: the groups are no grid, or ``two_level`` is asked for and the EP group has not two levels.
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
        _check_slots(slots, num_experts, ep)
        self.slots = slots
        self.grid = ExpertGrid.of(num_experts if slots is None else slots.num_slots, ep, etp, etp_ep)
        if kind not in ("auto", *DISPATCH_KINDS):
            raise UsageError(f"kind (dispatch of a layer) must be auto, {' or '.join(DISPATCH_KINDS)}, got {kind!r}")
        slices = None if chunks == "auto" else slices_of(chunks)
        if kind != "auto":
            if slices is not None and len(slices) > 1 and not DISPATCH_KINDS[kind].takes_chunks:
                raise UsageError(f"{kind} brings all tokens at once: leave chunks out, or take kind all_to_all")
            DISPATCH_KINDS[kind].require(self.grid)
        self.ways = WireGroups(ep, self.grid.all, dispatch_wire(wire))
        # It times, and asks the group for predictions: nothing to compile.
        self._decide = torch.compiler.disable(DispatchPlanner(self.grid, kind, slices, self.ways).decide)
        self._count = torch.compiler.disable(partial(count_dispatch, used_by, self.grid.all.ranks))
        wanted = Spilling.of(spilling)
        self.spiller = None if wanted is None else ExpertSpiller(self.grid, slots, wanted)
        self.spill_decision: SpillDecision | None = None
        self._used_by = used_by
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

    def watch(self, seen: Callable[[ChoiceCounts, ExpertSlots | None], None]) -> Callable[[], None]:
        """Have ``seen`` called with the counts of every call, which all ranks of the group know, and the slots that they are of
        (None: of experts), until what is returned is called."""
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
            capacity: each rank sends exactly so many rows to every expert, padded with zeros; the same on all ranks.
            like: the tokens [T, H]: to predict times, to see that ranks agree on H and dtype, and whether they need a gradient.
            weights: [T, K], for the same reasons.
            experts: what will work on them: needed to choose chunks by its times, which the first call measures.
            needs_gradient: whether a backward pass will go the way back; None: as autograd says of what is given here.

        Raises TensorError for indices of another shape, dtype or range, weights that are NaN or infinite, and more choices of an
        expert than its capacity: here; and DisagreementError on the other ranks, before a token moves.
        """
        try:
            if needs_gradient is None:
                needs_gradient = torch.is_grad_enabled() and any(map(_needs_gradient, (like, weights, experts)))
            offer = self._offer(indices, capacity, like, weights, experts, needs_gradient)
        except Exception as error:  # noqa: BLE001  the others hear of it first
            offer = Offer(_NO_INDICES, error=error)
        agree_on_experts(self.grid)
        layout = ChoiceCounts.exchange(self.grid, offer)
        for seen in self._watching:
            seen(layout, self.slots)
        lent: LentExperts | None = None
        if self.spiller is not None:
            layout, lent = self._spill(layout, experts)
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it decides by numbers, and talks to others
    def _spill(self, layout: ChoiceCounts, experts: Experts | None) -> tuple[ChoiceCounts, LentExperts | None]:
        """Change a call's choices to what spills, and find what this rank lends and is lent; or leave all as it is."""
        assert self.spiller is not None
        assert isinstance(experts, GroupedExperts)  # or the offer was refused
        layout, lent, decision = self.spiller.spill(layout, experts)
        if not self.spiller.is_on:
            self.spill_decision = None  # an earlier one is no longer what is done
        if decision is None:
            return layout, lent
        self.spill_decision = decision
        each, rank = sum(weight[0].nbytes for weight in experts.weights), self.grid.ep.rank
        sources, targets = decision.ends
        count_spill(
            self._used_by,
            self.grid.all.ranks,
            decision.rule,
            experts=len(decision.parts),
            rows=sum(part.rows for part in decision.parts),
            weight_bytes=(each * sources.count(rank), each * targets.count(rank)),
            reason=decision.reason(),
        )
        return layout, lent

    def _offer(
        self,
        indices: torch.Tensor,
        capacity: int | None,
        like: torch.Tensor | None,
        weights: torch.Tensor | None,
        experts: Experts | None,
        needs_gradient: bool,
    ) -> Offer:
        on_device = (
            weights is not None and not weights.is_cpu
        )  # they are looked at with the indices: the host waits once
        self._check_weights(weights, *indices.shape[:2], is_sound=on_device)
        is_elsewhere = like is not None and not like.is_cpu
        trained = () if self.spiller is None else (self.spiller.is_on, *_trained(experts, capacity))
        way = (*self._setup, experts is None, is_sharded(experts), puts_off(experts, like), is_elsewhere, *trained)
        if self.slots is not None:
            indices = self.slots.slots_of(indices)
        return Offer(indices, capacity, like, number_of(way), needs_gradient, weights=weights if on_device else None)

    def refuse(self, error: Exception) -> NoReturn:
        """Refuse a call in place of :meth:`prepare`, where this rank cannot go on: tell the others, then raise ``error``."""
        agree_on_experts(self.grid)
        ChoiceCounts.exchange(self.grid, Offer(_NO_INDICES, error=error))
        raise error

    # The six phases, of one chunk

    def dispatch_preprocess(self, x: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Permute: the chunk's tokens [T, H] → rows to send, by expert [S, H]."""
        return chunk.dispatch_preprocess(x)

    def hold(self, rows: torch.Tensor, chunk: Chunk) -> Held:
        """Hold rows for a later :meth:`token_dispatch`: the backward pass waits for their gradient here."""
        return chunk.hold(rows)

    def token_dispatch(self, rows: torch.Tensor | Held, chunk: Chunk) -> Pending:
        """Start their exchange."""
        return chunk.token_dispatch(rows)

    def dispatch_postprocess(self, rows: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Make the rows of the local experts, sorted by expert, of what arrived: [R, H]."""
        return chunk.dispatch_postprocess(rows)

    def combine_preprocess(self, rows: torch.Tensor, weights: torch.Tensor | None, chunk: Chunk) -> torch.Tensor:
        """Mirror :meth:`dispatch_postprocess`: [R, H] → rows, or partial sums, to send back."""
        return chunk.combine_preprocess(rows, weights)

    def token_combine(self, rows: torch.Tensor, chunk: Chunk) -> Pending:
        """Start the way back."""
        return chunk.token_combine(rows)

    def combine_postprocess(self, rows: torch.Tensor, weights: torch.Tensor | None, chunk: Chunk) -> torch.Tensor:
        """Sum over choices, ``Σ_k weights[t, k] · row of choice k``: [T, H]; ``weights`` None: the plain sum."""
        return chunk.combine_postprocess(rows, weights)

    # Whole

    def dispatch(
        self, x: torch.Tensor, handle: DispatchHandle, *, beside: Callable[[], object] | None = None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Send tokens to their experts: [T, H] → (rows [R, H] sorted by expert, rows of each local expert). Collective.

        Again with the same handle, the same rows come again (recompute). ``beside`` is called while they travel. Raises
        TensorError for another number of tokens, UsageError for a handle of another dispatcher, or one of several chunks (see
        :meth:`run`).
        """
        self._check(x, None, handle)
        if self.spiller is not None:
            raise UsageError("dispatch: where experts may spill, their weights go along with tokens: use run()")
        chunk = self._only(handle)
        handle.use.dispatched += 1
        handle.use.hidden, handle.use.dtype = x.shape[1], x.dtype
        x = _for_backward(x, handle)
        sent = self.token_dispatch(self.dispatch_preprocess(x, chunk), chunk)
        if beside is not None:
            beside()
        return self.dispatch_postprocess(sent.wait(), chunk), chunk.expert_rows

    def dispatch_weights(self, weights: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Bring the gating weights of the rows that :meth:`dispatch` brings, for experts that apply them: [T, K] → [R, 1].

        Collective. The combine then goes without weights. Raises as :meth:`dispatch` does.
        """
        self._check_handle(handle)
        self._check_weights(weights, handle.num_tokens, handle.top_k, sound=handle.sound_weights)
        return self._only(handle).fetch_weights(_for_backward(weights, handle))

    def combine(
        self,
        rows: torch.Tensor,
        handle: DispatchHandle,
        weights: torch.Tensor | None = None,
        *,
        beside: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Bring experts' outputs back: [R, H] → tokens [T, H], each choice times its weight [T, K]. Collective.

        ``beside`` is called while they travel. Raises TensorError for shapes that are not the handle's, UsageError for a handle
        that has come back already.
        """
        self._check_handle(handle)
        self._check_weights(weights, handle.num_tokens, handle.top_k, sound=handle.sound_weights)
        chunk = self._only(handle)
        if handle.use.combined >= handle.use.dispatched:
            raise UsageError(
                "combine: the tokens of this handle have come back already (or never went): a handle is for one dispatch and "
                "one combine; dispatch again with it to recompute, or prepare another"
            )
        rows = _returned(rows, (sum(chunk.expert_rows), handle.use.hidden), handle.use.dtype)
        handle.use.combined += 1
        if weights is not None:
            weights = _for_backward(weights, handle)
        back = self.token_combine(self.combine_preprocess(rows, weights, chunk), chunk)
        if beside is not None:
            beside()
        return self.combine_postprocess(back.wait(), weights, chunk)

    def run(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        experts: Experts,
        weights: torch.Tensor | None = None,
        *,
        beside: Callable[[], _Beside] | None = None,
    ) -> tuple[torch.Tensor, _Beside | None]:
        """Run dispatch, ``experts`` and combine, chunk by chunk: those behind chunk j go out and chunk j−1 comes back while
        chunk j computes.

        ``weights`` [T, K] are applied in the combine, or, with ``weights_travel``, by the experts. ``beside``: what else may be
        computed while the first chunk travels, such as shared experts. The backward pass overlaps in the same way (see
        :mod:`commlayer.collectives`). Returns the tokens [T, H] and what ``beside`` returned. Collective.

        Raises TensorError and UsageError as :meth:`dispatch` and :meth:`combine` do.
        """
        stages = self._start(x, handle, experts, weights)
        other = beside() if beside is not None else None
        stages.compute(experts)
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
        """The parts of :meth:`run`, for passes in turns: another goes on while tokens go out, and while they come back."""
        stages = self._start(x, handle, experts, weights)
        others: Sequence[torch.Tensor] = () if beside is None else (beside(),)
        others = stages.carry_on((yield (*stages.crossing(), *others)))
        stages.compute(experts)
        others = stages.carry_on((yield (*stages.crossing(), *others)))
        return stages.finish(), others[0] if others else None

    def _start(
        self, x: torch.Tensor, handle: DispatchHandle, experts: Experts, weights: torch.Tensor | None
    ) -> _ChunkStages:
        self._check(x, weights, handle)
        if handle.use.dispatched:
            raise UsageError("run: the tokens of this handle have gone already: prepare another")
        handle.use.dispatched = handle.use.combined = 1
        x = _for_backward(x, handle)
        if weights is not None:
            weights = _for_backward(weights, handle)
        return _ChunkStages(self, x, handle, experts, weights)

    @staticmethod
    def _only(handle: DispatchHandle) -> Chunk:
        if len(handle.chunks) != 1:
            raise UsageError(f"dispatch() and combine() move one chunk, the handle has {len(handle.chunks)}: use run()")
        return handle.chunks[0]

    # Checks

    def _check(self, x: torch.Tensor, weights: torch.Tensor | None, handle: DispatchHandle) -> None:
        self._check_handle(handle)
        if x.dim() != 2 or x.shape[0] != handle.num_tokens:
            raise TensorError(
                f"{who()}expected the {handle.num_tokens} tokens of the handle as [tokens, hidden], got {list(x.shape)}"
            )
        self._check_weights(weights, handle.num_tokens, handle.top_k, sound=handle.sound_weights)

    def _check_handle(self, handle: DispatchHandle) -> None:
        if handle.owner is not self:
            raise UsageError(
                "the handle was prepared by another dispatcher, perhaps on another group: prepare it on this one"
            )
        if self.slots is not None and handle.placement is not self.slots.placement:
            raise UsageError(f"{who()}experts have moved since the handle was prepared: prepare another")

    @staticmethod
    def _check_weights(
        weights: torch.Tensor | None,
        *shape: int,
        sound: weakref.ref[torch.Tensor] | None = None,
        is_sound: bool = False,
    ) -> None:
        """``sound``: weights that need not be looked at again; ``is_sound``: these need not."""
        if weights is None:
            return
        if tuple(weights.shape) != shape:
            raise TensorError(f"{who()}weights must be {list(shape)}, got {list(weights.shape)}")
        is_sound = is_sound or (sound is not None and sound() is weights)
        if not is_sound and not bool(torch.isfinite(weights).all()):
            raise weights_error()


def _check_slots(slots: ExpertSlots | None, num_experts: int, ep: GroupCommunicator) -> None:
    if slots is None:
        return
    if (slots.num_experts, slots.placement.num_ranks, slots.rank) != (num_experts, ep.size, ep.rank):
        raise UsageError(
            f"slots of {slots.num_experts} experts for rank {slots.rank} of {slots.placement.num_ranks}: expected {num_experts} "
            f"experts for rank {ep.rank} of the {ep.size} ranks of EP"
        )


def _trained(experts: Experts | None, capacity: int | None) -> tuple[bool, ...]:
    """Tell which weights of experts that may spill are trained, as on all ranks: their gradients come back. Raises UsageError."""
    if is_sharded(experts):
        raise UsageError(
            f"{who()}experts that FSDP shards cannot spill: no rank has all weights of one; leave them out of fully_shard, or "
            "spilling out"
        )
    if not isinstance(experts, GroupedExperts):
        raise UsageError(
            f"{who()}experts spill by sending weights that must be known: expected GroupedExperts as experts=, got "
            f"{type(experts).__name__}; leave spilling out"
        )
    if capacity is not None:
        raise UsageError(
            f"{who()}rows are padded to a capacity, so every rank has as many: there is nothing to spill; leave pad_to_capacity "
            "out, or spilling"
        )
    return tuple(weight.requires_grad for weight in experts.weights)


def _with_guests(experts: Experts, lent: LentExperts | None) -> AbstractContextManager[None]:
    """The block in which experts compute the rows of their guests too."""
    return experts.with_guests(lent) if lent is not None and isinstance(experts, GroupedExperts) else nullcontext()


def _weight_gradients_last(experts: Experts, x: torch.Tensor) -> AbstractContextManager[None]:
    """The block in which experts that can do so put off the products for their weights' gradients."""
    if isinstance(experts, GroupedExperts) and puts_off(experts, x):
        return experts.weight_gradients_last()
    return nullcontext()


def _needs_gradient(given: object) -> bool:
    if isinstance(given, torch.nn.Module):
        return any(parameter.requires_grad for parameter in given.parameters())
    return isinstance(given, torch.Tensor) and given.requires_grad


def _for_backward(x: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
    """``x``, in the graph where any rank's is: the gradient is a collective too."""
    if handle.needs_gradient and not x.requires_grad and torch.is_grad_enabled():
        return x.detach().requires_grad_()
    return x


class _ChunkStages:
    """All chunks of a handle on their way through :meth:`TokenDispatcher.run`; the first of them are sent when it is made."""

    def __init__(
        self,
        dispatcher: TokenDispatcher,
        x: torch.Tensor,
        handle: DispatchHandle,
        experts: Experts,
        weights: torch.Tensor | None,
    ) -> None:
        sizes = [chunk.num_tokens for chunk in handle.chunks]
        self._x, self._travel = x, dispatcher.weights_travel
        self._xs = _split(x, sizes)
        self._ws = [None] * len(sizes) if weights is None else _split(weights, sizes)
        self._stages = [_ChunkStage(dispatcher, handle, place) for place in range(len(sizes))]
        # With a gradient all are sent before the first computes, so that the link never waits for experts: what arrives is kept
        # for the backward pass anyway. Without, one ahead.
        self._ahead = len(sizes) if handle.needs_gradient and torch.is_grad_enabled() else 1
        for j in range(self._ahead):  # each is packed while those before it travel
            self._send(j)
        self._lent = handle.lent
        if self._lent is not None:  # behind the tokens, which every rank waits for first
            assert isinstance(experts, GroupedExperts)  # when the handle was prepared
            self._lent.start(experts.weights)

    def _send(self, j: int) -> None:
        self._stages[j].pack(self._xs[j], self._ws[j], self._travel)
        self._stages[j].send()

    def compute(self, experts: Experts) -> None:
        """Run the experts on one chunk after another, and send each back."""
        with _with_guests(experts, self._lent), _weight_gradients_last(experts, self._x):
            for j, stage in enumerate(self._stages):
                if self._ahead <= j + 1 < len(self._stages):
                    self._send(j + 1)
                stage.compute(experts, self._x)

    def finish(self) -> torch.Tensor:
        parts = [stage.finish() for stage in self._stages]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def crossing(self) -> list[torch.Tensor]:
        """List what the next part takes from this one."""
        crossing = [x for stage in self._stages for x in stage.crossing()]
        return crossing if self._lent is None else [*crossing, *self._lent.crossing]

    def carry_on(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Take back what :meth:`crossing` has listed, and return what was given beside it."""
        for stage in self._stages:
            given = stage.carry_on(given)
        return given if self._lent is None else self._lent.cut(given)


class _ChunkStage:
    """Chunk ``place`` of a handle on its way through :meth:`TokenDispatcher.run`."""

    def __init__(self, dispatcher: TokenDispatcher, handle: DispatchHandle, place: int) -> None:
        self.dispatcher, self.chunk = dispatcher, handle.chunks[place]
        self._sizes, self._place = [chunk.num_tokens for chunk in handle.chunks], place
        self._weights: torch.Tensor | None = None
        """The weights that have not been sent: for the combine, or, where they travel apart from the rows, for the experts."""
        self._packed: list[tuple[Callable[[Held], Pending], Held]] = []
        self._going: list[Pending] = []
        self._returning: Pending | None = None

    def pack(self, x: torch.Tensor, weights: torch.Tensor | None, weights_travel: bool) -> None:
        """Put the chunk's tokens in the order in which they go. The backward pass waits for their gradients here: after the
        experts of all chunks that are packed before the first is computed. Until they are sent, the rows take memory: those
        of all chunks together as much as of one."""
        dispatcher, chunk = self.dispatcher, self.chunk
        rows = [dispatcher.dispatch_preprocess(x, chunk)]
        starts: list[Callable[[Held], Pending]] = [lambda held: dispatcher.token_dispatch(held, chunk)]
        if weights is not None and weights_travel and isinstance(chunk, AllToAll):
            rows.append(chunk.weights_preprocess(weights))
            starts.append(chunk.weights_dispatch)
        else:
            self._weights = weights
        self._packed = [(start, dispatcher.hold(each, chunk)) for start, each in zip(starts, rows, strict=True)]

    def send(self) -> None:
        self._going = [start(held) for start, held in self._packed]
        self._packed = []

    def compute(self, experts: Experts, x: torch.Tensor) -> None:
        """Run the experts on the chunk. ``x``: the tokens of all chunks, of which it is sent again in a recomputation."""
        dispatcher, chunk = self.dispatcher, self.chunk
        arrived = [dispatcher.dispatch_postprocess(pending.wait(), chunk) for pending in self._going]
        self._going = []
        promise = recomputable_from(x, arrived[0], lambda tokens: _Arriving(self, tokens))
        if self._weights is not None and dispatcher.weights_travel:
            arrived.append(chunk.fetch_weights(self._weights))
            self._weights = None
        computed = experts(arrived[0], chunk.expert_rows, arrived[1] if len(arrived) > 1 else None)
        computed = _returned(computed, arrived[0].shape, arrived[0].dtype)
        self._returning = dispatcher.token_combine(dispatcher.combine_preprocess(computed, self._weights, chunk), chunk)
        if promise is not None:  # the tokens come again while the gradient of the combine travels
            self._returning.on_gradient(promise.start)

    def send_again(self, x: torch.Tensor) -> Pending:
        """Start the exchange of the chunk once more, out of the tokens ``x`` [T, H] or [S, B, H] of all chunks."""
        tokens = x.flatten(0, -2).split(self._sizes)[self._place]
        return self.dispatcher.token_dispatch(self.dispatcher.dispatch_preprocess(tokens, self.chunk), self.chunk)

    def crossing(self) -> list[torch.Tensor]:
        under_way = self._going if self._returning is None else [self._returning]
        return [*(pending.unfinished for pending in under_way), *([] if self._weights is None else [self._weights])]

    def carry_on(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for pending in self._going if self._returning is None else [self._returning]:
            pending.cut(given[0])
            given = given[1:]
        if self._weights is not None:
            self._weights, given = given[0], given[1:]
        return given

    def finish(self) -> torch.Tensor:
        assert self._returning is not None  # compute() came before
        returning, self._returning = self._returning, None
        return self.dispatcher.combine_postprocess(returning.wait(), self._weights, self.chunk)


class _Arriving:
    """A chunk's tokens on their way to the experts once more."""

    def __init__(self, stage: _ChunkStage, x: torch.Tensor) -> None:
        self._stage, self._pending = stage, stage.send_again(x)

    def wait(self) -> torch.Tensor:
        return self._stage.dispatcher.dispatch_postprocess(self._pending.wait(), self._stage.chunk)


def _returned(computed: object, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the experts' output for rows [R, H] in the tokens' dtype: all ranks send back in one dtype, whatever
    autocast or an expert without rows has made of it here. Raises TensorError for another shape.
    """
    if not isinstance(computed, torch.Tensor) or computed.shape != tuple(shape):
        got = list(computed.shape) if isinstance(computed, torch.Tensor) else repr(computed)
        raise TensorError(
            f"{who()}the experts got rows {list(shape)} and returned {got}: expected as many, and as wide"
        )
    return computed.to(dtype)


def _split(x: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    return (x,) if len(sizes) == 1 else x.split(sizes)
