"""The interface of DeepEP's ``Buffer`` on our dispatcher, under the name ``deep_ep`` once
:func:`install_deep_ep` was called.

Megatron-Core's ``--moe-token-dispatcher-type flex`` sends tokens by a library of that name, which
needs NVSHMEM and a GPU. What it asks of the library (a layout, dispatch and combine with a handle,
events, hints of sizes) stands here; tokens go as :class:`~commlayer.integrations.TokenDispatcher`
decides, on the CPU too. To that dispatcher the ranks are the experts: a token goes once to each
rank that has any of its experts, and with it go which of them, and their weights.

    torchrun … -m commlayer.integrations.deep_ep pretrain_gpt.py … --moe-token-dispatcher-type flex

runs a program with the name in place. Work is done in the order of the calling stream, so that
events have nothing to wait for but what a caller has recorded on another one.

Shapes: T tokens of this rank, K choices of each, E experts, n ranks, H hidden, R rows that arrive
here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from commlayer.integrations.groups import expert_communicator, planned_from, say_first
from commlayer.integrations.moe.agreement import weights_error
from commlayer.integrations.moe.dispatch_kinds import DISPATCH_KINDS
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.handle import DispatchHandle
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.run_as_main import run_as_main

__all__ = ["DeepEPBuffer", "DeepEPConfig", "EventHandle", "EventOverlap", "install_deep_ep"]

_MEGATRONS = "megatron.core.transformer.moe.fused_a2a"


def install_deep_ep(*, kind: str = "auto", replace: bool = False) -> None:
    """Make ``import deep_ep`` give this module's interface, from now on in this process. Before
    Megatron-Core is imported.

    Args:
        kind: of dispatch, as :class:`~commlayer.integrations.TokenDispatcher` takes it.
        replace: also where the real DeepEP is installed, which is otherwise left in its place.

    Raises UsageError where the real one is installed, or Megatron-Core has looked for it already,
    and for another ``kind``.
    """
    if kind not in ("auto", *DISPATCH_KINDS):
        raise UsageError(f"install_deep_ep: kind must be auto, {' or '.join(DISPATCH_KINDS)}, got {kind!r}")
    if "is_commlayers" in vars(sys.modules.get("deep_ep", object)):
        DeepEPBuffer.kind = kind
        return
    if not replace and ("deep_ep" in sys.modules or importlib.util.find_spec("deep_ep") is not None):
        raise UsageError(
            "install_deep_ep: DeepEP itself is installed: pass replace=True to send tokens by commlayer's plans instead"
        )
    if _MEGATRONS in sys.modules:
        raise UsageError(
            "install_deep_ep: Megatron-Core's dispatchers are imported, and looked for deep_ep then: call this before any import "
            "of megatron"
        )
    package, utils = _stand_in("deep_ep", is_package=True), _stand_in("deep_ep.utils")
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    vars(package).update(
        Buffer=DeepEPBuffer,
        Config=DeepEPConfig,
        EventOverlap=EventOverlap,
        utils=utils,
        is_commlayers=True,
        __path__=[],
    )
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = package, utils
    DeepEPBuffer.kind = kind


def _stand_in(name: str, *, is_package: bool = False) -> ModuleType:
    """A module of this name, which says of what it has not whose it is."""
    module = ModuleType(name, __doc__)

    def missing(asked: str) -> NoReturn:
        raise AttributeError(_not_offered(name, asked, vars(module)))

    vars(module).update(__spec__=ModuleSpec(name, None, is_package=is_package), __getattr__=missing)
    return module


def _not_offered(of: str, asked: str, has: Iterable[str]) -> str:
    offered = ", ".join(sorted(name for name in has if not name.startswith("_")))
    return f"{of} has no {asked}: it is commlayer's stand-in for DeepEP, and offers {offered}"


class DeepEPConfig:
    """The sizes that DeepEP would be tuned by, in its constructor's order. Plans come from a
    profile: nothing is read here."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return 0: nothing is reserved before a call."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class EventHandle:
    """The point that the current stream has come to; on the CPU, where every call has ended when it
    returns, nothing."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if self._event is not None:
            self._event.record()

    def current_stream_wait(self) -> None:
        """Have the current stream wait for that point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event that a caller waits for, or None where there is nothing to wait for; as a context,
    it is waited for at the end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Have the current stream wait for the event."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


class DeepEPBuffer:
    """The exchange of tokens between the ranks of ``group``, each of which holds as many of the
    experts, in order.

    Args:
        group: of backend ``commlayer``.
        num_nvl_bytes, num_rdma_bytes: kept for who asks; nothing is reserved.
        low_latency_mode: False; DeepEP's calls for decoding are not offered.
        ignored: what else DeepEP's constructor takes, which tunes its kernels.

    Raises:
        GroupError: the group has another backend.
        UsageError: ``low_latency_mode`` is asked for.
    """

    kind = "auto"
    """The kind of dispatch of those that are made from now on."""
    num_sms = 20
    """The number that :meth:`set_num_sms` was given: no kernel of ours asks for it."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        **ignored: object,
    ) -> None:
        if low_latency_mode:
            raise UsageError(f"{who()}deep_ep of commlayer has no low-latency mode: it is for training")
        communicator = expert_communicator(
            group,
            "deep_ep's group",
            'call torch.distributed.init_process_group("commlayer"), or set COMMLAYER_AS=nccl',
        )
        del ignored
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.group_size = group.rank(), group.size()
        # Wire formats are left out: gradients come and go by the very calls that tokens do, and
        # would be rounded with them.
        self._tokens = TokenDispatcher(
            group.size(), ep=communicator, kind=self.kind, chunks=1, wire="native", used_by="deep_ep"
        )

    if not TYPE_CHECKING:  # it would have every name

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_not_offered("deep_ep.Buffer", name, vars(type(self))))

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Keep how many of a GPU's processors DeepEP would take."""
        DeepEPBuffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> DeepEPConfig:
        """Return sizes for a dispatch: none are needed."""
        return DeepEPConfig()

    @staticmethod
    def get_combine_config(num_ranks: int) -> DeepEPConfig:
        """Return sizes for a combine: none are needed."""
        return DeepEPConfig()

    @staticmethod
    def capture() -> EventOverlap:
        """Record where the current stream is."""
        return EventOverlap(EventHandle())

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where tokens go by their experts ``topk_idx`` [T, K], −1 for none: tokens for each
        rank [n], None, tokens for each expert [E], and whether a token goes to a rank [T, n].
        """
        _wait_for(previous_event)
        if num_experts % self.group_size:
            raise UsageError(f"{who()}deep_ep: {num_experts} experts on {self.group_size} ranks: each has as many")
        if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64:
            raise TensorError(
                f"{who()}deep_ep: topk_idx must be [T, K] int64, got {list(topk_idx.shape)} {topk_idx.dtype}"
            )
        if topk_idx.is_cpu and topk_idx.numel() and int(topk_idx.max()) >= num_experts:
            message = f"{who()}deep_ep: a token chose expert {int(topk_idx.max())}, there are {num_experts}"
            self._tokens.refuse(TensorError(message))  # the others wait in their dispatch
        per_rank = num_experts // self.group_size
        # One column more, for choices of no expert.
        hit = topk_idx.new_zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool)
        hit.scatter_(1, torch.where(topk_idx < 0, num_experts, topk_idx), True)
        hit = hit[:, :num_experts]
        in_rank = hit.view(-1, self.group_size, per_rank).any(2)
        return in_rank.sum(0, dtype=torch.int32), None, hit.sum(0, dtype=torch.int32), in_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: _Way | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: DeepEPConfig | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, list[int] | None, _Way | None, EventOverlap]:
        """Send tokens ``x`` [T, H] once to each rank that has any of their experts. Collective.

        Returns the rows [R, H] that arrived, by source and there in its order; their experts,
        counted on this rank, −1 for those of others, and their weights, zero there, both [R, K];
        how many rows each local expert has, as a multiple of ``expert_alignment``; a handle for
        :meth:`combine`; and an event. With a ``handle`` other tokens go the same way, and only the
        rows and the event are not None.
        """
        _wait_for(previous_event)
        if not isinstance(x, torch.Tensor) or num_worst_tokens:
            raise UsageError(f"{who()}deep_ep of commlayer sends plain tensors, of as many rows as there are")
        if handle is not None:
            if x.dim() != 2 or x.shape[0] != handle.of_tokens.num_tokens:
                raise TensorError(
                    f"{who()}deep_ep: tokens {list(x.shape)} are to go the way of a handle of {handle.of_tokens.num_tokens} "
                    "tokens"
                )
            return self._send_rows(x.contiguous(), handle.of_tokens), None, None, None, None, EventOverlap()
        if is_token_in_rank is None or num_tokens_per_expert is None or topk_idx is None or topk_weights is None:
            raise UsageError(
                f"{who()}deep_ep: dispatch needs a handle, or topk_idx, topk_weights and what get_dispatch_layout returns"
            )
        wrong = self._why_wrong(x, topk_idx, topk_weights, is_token_in_rank)
        if wrong is not None:
            self._tokens.refuse(wrong)  # the others wait in their dispatch
        targets = _targets(is_token_in_rank, min(topk_idx.shape[1], self.group_size))
        # Callers are functions of autograd, inside which it is off: the tokens themselves say
        # whether a gradient comes back.
        prepared = self._tokens.prepare(targets, like=x, needs_gradient=x.requires_grad)
        say_first("deep_ep", self._first_words)
        way = _Way(prepared, num_tokens_per_expert.numel() // self.group_size)
        experts, weights = self._choices(topk_idx, topk_weights, way)
        counts = torch.bincount(experts[experts >= 0], minlength=way.num_local_experts).tolist()
        padded = [-(-count // expert_alignment) * expert_alignment for count in counts]
        return self._send_rows(x.contiguous(), prepared), experts, weights, padded, way, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: _Way,
        topk_weights: torch.Tensor | None = None,
        bias: object = None,
        config: DeepEPConfig | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows ``x`` [R, H] back, and sum a token's: [T, H]; so with ``topk_weights`` [R, K]
        → [T, K]. Collective."""
        _wait_for(previous_event)
        if bias is not None:
            raise UsageError(f"{who()}deep_ep of commlayer adds no bias: add it to what combine returns")
        weights = None if topk_weights is None else self._return_rows(topk_weights.contiguous(), handle.of_tokens)
        return self._return_rows(x.contiguous(), handle.of_tokens), weights, EventOverlap()

    def _why_wrong(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, in_rank: torch.Tensor
    ) -> TensorError | None:
        """The error for tensors that do not fit each other, or weights that are no numbers; None
        where all is well."""
        tokens = x.shape[:1]
        fit = x.dim() == topk_idx.dim() == 2 and topk_idx.shape[:1] == tokens and topk_weights.shape == topk_idx.shape
        if not fit or in_rank.shape != (*tokens, self.group_size) or in_rank.dtype != torch.bool:
            return TensorError(
                f"{who()}deep_ep: expected x [T, H], topk_idx and topk_weights [T, K], is_token_in_rank [T, {self.group_size}] "
                f"bool, got {list(x.shape)}, {list(topk_idx.shape)}, {list(topk_weights.shape)} and {list(in_rank.shape)} "
                f"{in_rank.dtype}"
            )
        return None if bool(topk_weights.isfinite().all()) else weights_error()

    def _choices(
        self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, way: _Way
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the experts [T, K] and their weights with the tokens: as they are here, of the local
        experts only, [R, K] both."""
        # One message of both: weights are 32 bits wide, as are numbers of experts.
        bits = torch.cat([topk_idx.to(torch.int32), topk_weights.float().contiguous().view(torch.int32)], 1)
        experts, weights = self._send_rows(bits, way.of_tokens).chunk(2, 1)
        local = experts.to(torch.int64) - self.rank * way.num_local_experts
        is_here = (local >= 0) & (local < way.num_local_experts)
        return torch.where(is_here, local, -1), weights.contiguous().view(torch.float32).masked_fill(~is_here, 0)

    def _send_rows(self, x: torch.Tensor, way: DispatchHandle) -> torch.Tensor:
        (chunk,) = way.chunks
        sent = chunk.token_dispatch(chunk.dispatch_preprocess(x))
        return chunk.dispatch_postprocess(sent.wait())

    def _return_rows(self, rows: torch.Tensor, way: DispatchHandle) -> torch.Tensor:
        (chunk,) = way.chunks
        if rows.shape[0] != sum(chunk.expert_rows):
            raise TensorError(
                f"{who()}deep_ep: {rows.shape[0]} rows are to come back, {sum(chunk.expert_rows)} went out by this handle"
            )
        back = chunk.token_combine(chunk.combine_preprocess(rows, None))
        return chunk.combine_postprocess(back.wait(), None)

    def _first_words(self) -> str:
        decision = self._tokens.decision
        assert decision is not None  # of the call that was just prepared
        profile = planned_from(self._tokens.grid.all)
        return f"deep_ep dispatches over {self.group_size} ranks, planned {profile}; the first by {decision.reason}"


class _Way:
    """The handle of a dispatch, for DeepEP's callers: the way of its tokens, and how many experts a
    rank has."""

    def __init__(self, of_tokens: DispatchHandle, num_local_experts: int) -> None:
        self.of_tokens, self.num_local_experts = of_tokens, num_local_experts


def _targets(is_token_in_rank: torch.Tensor, most: int) -> torch.Tensor:
    """The ranks that each token goes to, in order, [T, most] int64; −1 where there are fewer."""
    num_ranks = is_token_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_token_in_rank.device)
    first = torch.where(is_token_in_rank, ranks, num_ranks).sort(1).values[:, :most]
    return torch.where(first == num_ranks, -1, first)


def _wait_for(event: EventOverlap | None) -> None:
    if event is not None:
        event.current_stream_wait()


if __name__ == "__main__":  # run the program that the command line names, with the name ``deep_ep`` in place
    assert __spec__ is not None  # of a module that is run by -m
    named: Any = importlib.import_module(__spec__.name)  # this file's copy is called __main__
    named.install_deep_ep()
    usage = "usage: python -m commlayer.integrations.deep_ep PROGRAM.py, or -m MODULE, and its arguments"
    run_as_main(sys.argv[1:], usage)
