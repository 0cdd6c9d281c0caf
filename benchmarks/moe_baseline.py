"""The rivals of the MoE layer: the same layer on plain torch.distributed calls, and DeepSpeed's.

Shapes: T tokens of this rank, K choices of each, E experts, H hidden, R rows that this rank's experts receive.
"""

from __future__ import annotations

import io
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from commlayer.integrations.moe.handle import Chunk
from commlayer.integrations.moe.layer import MoELayer

__all__ = ["Clock", "PlainMoE", "deepspeed_layer", "instrument", "phase", "why_no_deepspeed"]


class Clock:
    """Charges each moment of a rank's main thread to one phase: the time since the mark before to that of the next."""

    def __init__(self) -> None:
        self.spent_us: Counter[str] = Counter()
        self._last = time.perf_counter()

    def restart(self) -> None:
        self.spent_us.clear()
        self._last = time.perf_counter()

    def charge(self, label: str) -> None:
        now = time.perf_counter()
        self.spent_us[label] += (now - self._last) * 1e6  # type: ignore[assignment]  # of floats
        self._last = now


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, label: str, is_entry: bool) -> torch.Tensor:
        ctx.charge = (clock, label) if is_entry else None
        if not is_entry:
            clock.charge(label)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.charge is not None:
            clock, label = ctx.charge
            clock.charge(label)
        return gradient, None, None, None


_mark: Callable[[torch.Tensor, Clock, str, bool], torch.Tensor] = cast("Any", _Mark.apply)


def phase(
    clock: Clock | None, label: str, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """``call(x)``, charged to ``label`` forward and backward."""
    if clock is None:
        return call(x)
    return _mark(call(_mark(x, clock, label, True)), clock, label, False)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way = send, receive, group
        return _exchanged(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _exchanged(gradient, receive, send, group), None, None, None


def _exchanged(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


_all_to_all: Callable[[torch.Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], torch.Tensor] = cast(
    "Any", _AllToAll.apply
)


class PlainMoE:
    """Megatron-Core's order on plain calls: route, exchange counts, permute, all_to_all, sort by expert, experts, and back.

    Nothing is planned and nothing overlaps. It works with the weights of ``layer``, so that both must agree.
    """

    def __init__(self, layer: MoELayer, group: dist.ProcessGroup, top_k: int, clock: Clock | None = None) -> None:
        self.layer, self.group, self.top_k, self.clock = layer, group, top_k, clock
        self.num_experts = layer.dispatcher.grid.num_experts
        self.ranks = group.size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] → [T, H]; E must be a multiple of the group's ranks."""
        indices: torch.Tensor | None = None

        def route(x: torch.Tensor) -> torch.Tensor:
            nonlocal indices
            scores = torch.softmax(F.linear(x, self.layer.router.weight).float(), -1)
            top, indices = scores.topk(self.top_k, dim=-1)
            return top / top.sum(-1, keepdim=True)

        weights = phase(self.clock, "router", route, x)
        assert indices is not None
        flat = indices.reshape(-1)
        order = flat.argsort(stable=True)
        tokens = order // self.top_k
        counts = torch.bincount(flat, minlength=self.num_experts)
        everyones = torch.empty(self.ranks * self.num_experts, dtype=counts.dtype)
        dist.all_gather_single(everyones, counts, group=self.group)
        local = self.num_experts // self.ranks
        first = self.group.rank() * local
        arriving = everyones.view(self.ranks, self.num_experts)[:, first : first + local]
        send, receive = counts.view(self.ranks, local).sum(1).tolist(), arriving.sum(1).tolist()
        if self.clock:
            self.clock.charge("permute")
        rows = phase(self.clock, "permute", lambda x: x.index_select(0, tokens), x)
        rows = phase(self.clock, "dispatch", lambda rows: _all_to_all(rows, send, receive, self.group), rows)
        rows = phase(self.clock, "permute", lambda rows: _transposed(rows, arriving), rows)
        rows = phase(self.clock, "experts", lambda rows: self.experts(rows, arriving.sum(0).tolist()), rows)
        rows = phase(self.clock, "permute", lambda rows: _transposed_back(rows, arriving), rows)
        rows = phase(self.clock, "combine", lambda rows: _all_to_all(rows, receive, send, self.group), rows)
        gates = weights.reshape(-1)[order].unsqueeze(1)
        return phase(self.clock, "permute", lambda rows: torch.zeros_like(x).index_add(0, tokens, rows * gates), rows)

    def experts(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """One expert after another on its rows."""
        experts = self.layer.experts
        parts = zip(rows.split(list(counts)), experts.w_gate, experts.w_up, experts.w_down, strict=True)
        outs = [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _transposed(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Segments of rows by source, then expert → by expert, then source. ``lengths`` [sources, experts]."""
    if lengths.shape[1] == 1:
        return rows
    parts = rows.split(lengths.reshape(-1).tolist())
    sources, experts = lengths.shape
    return torch.cat([parts[source * experts + expert] for expert in range(experts) for source in range(sources)])


def _transposed_back(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return _transposed(rows, lengths.t().contiguous()) if lengths.shape[1] > 1 else rows


def instrument(layer: MoELayer, clock: Clock) -> None:
    """Charge the phases of ``layer`` to ``clock`` from now on. What is charged to dispatch and combine is what is *exposed*:
    posting, and waiting for what has not arrived by then."""
    dispatcher, router, experts, prepare = layer.dispatcher, layer.router, layer.experts, layer.dispatcher.prepare

    def routed(x: torch.Tensor, *rest: Any) -> Any:
        kept: list[Any] = []

        def route(x: torch.Tensor) -> torch.Tensor:
            kept.append(router_forward(x, *rest))
            return cast("torch.Tensor", kept[0].weights)

        weights = phase(clock, "router", route, x)
        routing = kept[0]
        object.__setattr__(routing, "weights", weights)
        return routing

    def prepared(*args: Any, **kwargs: Any) -> Any:
        handle = prepare(*args, **kwargs)
        clock.charge("permute")
        watched = tuple(_WatchedChunk(chunk, clock) for chunk in handle.chunks)
        return replace(handle, chunks=cast("tuple[Chunk, ...]", watched))

    router_forward = router.forward
    experts_forward = experts.forward
    _replace(router, "forward", routed)
    _replace(dispatcher, "prepare", prepared)
    _replace(experts, "forward", lambda x, *rest: phase(clock, "experts", lambda x: experts_forward(x, *rest), x))


def _replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    object.__setattr__(owner, name, call)


class _WatchedChunk:
    """A chunk whose phases are charged; for the rest it is ``chunk``."""

    def __init__(self, chunk: Chunk, clock: Clock) -> None:
        self._chunk = chunk
        self.dispatch_preprocess = _local(clock, chunk.dispatch_preprocess)
        self.dispatch_postprocess = _local(clock, chunk.dispatch_postprocess)
        self.combine_preprocess = _local(clock, chunk.combine_preprocess)
        self.combine_postprocess = _local(clock, chunk.combine_postprocess)
        self.token_dispatch = _remote(clock, "dispatch", chunk.token_dispatch)
        self.token_combine = _remote(clock, "combine", chunk.token_combine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


def _local(clock: Clock, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, *rest: phase(clock, "permute", lambda x: call(x, *rest), x)


def _remote(clock: Clock, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def started(x: torch.Tensor, *rest: Any) -> _Watched:
        pending = call(_mark(x, clock, label, True), *rest)
        clock.charge(label)
        return _Watched(pending, clock, label)

    return started


class _Watched:
    def __init__(self, pending: Any, clock: Clock, label: str) -> None:
        self._pending, self._clock, self._label = pending, clock, label

    def wait(self) -> torch.Tensor:
        self._clock.charge("permute")  # splitting and the like, since the mark before
        return _mark(self._pending.wait(), self._clock, self._label, False)


class SwiGLU(nn.Module):
    """The same expert as a module of its own, for DeepSpeed."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def why_no_deepspeed() -> str | None:
    """Why DeepSpeed cannot be run here; None where it can."""
    try:
        version("deepspeed")
    except PackageNotFoundError:
        return "not installed: pip install 'deepspeed>=0.19'"
    try:
        import_module("deepspeed.moe.layer")
    except Exception as error:  # noqa: BLE001  whatever its import does on a machine that it does not know
        return f"cannot be imported: {type(error).__name__}: {error}"
    return None


def deepspeed_layer(
    hidden: int, width: int, num_experts: int, top_k: int, group: dist.ProcessGroup
) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Parameter]]:
    """DeepSpeed's MoE over ``group``: capacity factor 1, tokens above it dropped, which is the least that it can move."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with redirect_stdout(io.StringIO()):  # it tells what it builds
        import_module("deepspeed").init_distributed(dist_backend="gloo", verbose=False)
        layer = import_module("deepspeed.moe.layer").MoE(
            hidden,
            SwiGLU(hidden, width),
            num_experts=num_experts,
            ep_size=group.size(),
            k=top_k,
            capacity_factor=1.0,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
    layer.deepspeed_moe._set_ep_group(group)
    return lambda x: cast("torch.Tensor", layer(x)[0]), list(layer.parameters())
