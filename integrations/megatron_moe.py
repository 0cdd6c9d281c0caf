"""Megatron-Core's MoE layers on our dispatcher: Megatron's router, experts and layers, of which
only the token dispatcher changes.

Megatron has no slot for a dispatcher: its MoELayer makes one of three by name. So ours takes the
place of that one in a layer that is made, with that one's very groups; a layer spec becomes one of
layers that do so when they are made. Rejected: a subclass of MoELayer in the spec's place for the
MLP. TransformerLayer passes its groups on to a list of known classes only, by identity, and warns
of others, which then fall back on the groups of parallel_state, whatever the model was given.

Megatron's experts apply the gating weights themselves, so these travel with the tokens. The rows
that experts get are those of Megatron's alltoall dispatcher, in its order (local expert, then ETP
rank, then source, then token), and so are the sums of up to two choices of a token: bit for bit the
same training. With more choices, by ``all_gather`` and ``two_level``, and in chunks
(:mod:`commlayer.integrations.megatron_chunks`), sums are taken in another order.

Shapes: T tokens of this rank, K choices of each, E experts, H hidden, R rows that this rank's
experts receive.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from commlayer.integrations.groups import expert_communicator, planned_from, say_first
from commlayer.integrations.megatron_chunks import ChunkedExperts, compute_in_chunks, why_in_one_chunk
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.handle import DispatchHandle
from commlayer.integrations.moe.planning import slices_of
from commlayer.integrations.moe.routing import who
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import TensorError, UsageError

__all__ = ["MegatronDispatcher", "check_config", "plan_megatron_moe"]

_Planned = TypeVar("_Planned")


def plan_megatron_moe(
    what: _Planned,
    *,
    kind: str = "auto",
    chunks: int | Sequence[int] | str = "auto",
    wire: DispatchWire | str | None = None,
) -> _Planned:
    """Have the MoE layers of Megatron-Core dispatch their tokens by commlayer's plans; returns the
    planned model, or layer spec.

    On all ranks alike. Megatron's groups must be of backend ``commlayer``: initialise
    torch.distributed with that name before ``initialize_model_parallel``, or set ``COMMLAYER_AS``.

    Args:
        what: a model, or the list of its chunks, whose layers are changed in place; or the spec of
            a layer or a block, such as ``get_gpt_layer_local_spec`` and
            ``get_gpt_decoder_block_spec`` return, of which a planned copy is returned.
        kind, chunks, wire: as :class:`~commlayer.integrations.TokenDispatcher` takes them. In
            several chunks the layer's experts compute one while others travel; by ``auto`` tokens
            go so where the profile and the experts' own times, measured at the first call, predict
            that to be faster.

    Raises:
        UsageError: ``what`` is neither, or has no experts; Megatron-Core is not installed; a layer
            is set up for what our dispatcher does not do, or chunks are asked for that it cannot
            have (see docs/trainers/megatron.md).
        GroupError: Megatron's groups are of another backend.
    """
    planned = _Dispatchers(kind, chunks, wire)
    if isinstance(what, nn.Module):
        planned.give_to_model(what)
    elif isinstance(what, list) and what and all(isinstance(chunk, nn.Module) for chunk in what):
        for chunk in what:
            planned.give_to_model(chunk)
    else:
        what = _planned_spec(what, planned)
    return what


class MegatronDispatcher:
    """A dispatcher with the phases and attributes of Megatron-Core's ``MoETokenDispatcher``, on a
    :class:`TokenDispatcher`.

    All communication is in :meth:`token_dispatch` and :meth:`token_combine`, or, of tokens in
    several chunks, in :meth:`run`; but for the counts, which go before as in Megatron's own.

    Args:
        stock: the dispatcher that Megatron has made for the layer, whose config and groups are
            taken.
        folded: what moves the tokens; layers may share it.
        experts: the layer's, where tokens may go in several chunks.
        why_whole: why they may not.

    Attributes:
        goes_in_chunks: whether the tokens under way go in several chunks, by :meth:`run`.
    """

    def __init__(
        self, stock: Any, folded: TokenDispatcher, experts: ChunkedExperts | None = None, why_whole: str | None = None
    ) -> None:
        missing = [name for name in _NEEDED if not hasattr(stock, name)]
        if missing:
            raise UsageError(
                f"{who()}this Megatron-Core's dispatcher has no {', '.join(missing)}: 0.16 is what was tested"
            )
        self.config = stock.config
        self.ep_group, self.tp_group, self.tp_ep_group = stock.ep_group, stock.tp_group, stock.tp_ep_group
        self.ep_size, self.tp_size, self.tp_rank = stock.ep_size, stock.tp_size, stock.tp_rank
        self.shared_experts: Any = stock.shared_experts
        self.cudagraph_attrs: list[str] = []
        self.valid_cudagraph_attrs: list[str] | None = None
        self.folded = folded
        self._experts, self._why_whole = experts, why_whole
        self._handle: DispatchHandle | None = None
        self.goes_in_chunks = False
        self._shape = torch.Size()
        self._expert_rows: tuple[int, ...] = ()

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Have the shared experts computed while tokens travel."""
        self.shared_experts = shared_experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the way of the tokens [..., H] by the router's ``routing_map`` and ``probs`` [T, E];
        counts are exchanged.

        Returns the tokens [T, H] and their weights [T, K].
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        top_k = int(self.config.moe_router_topk)
        if self.config.moe_expert_capacity_factor is not None and self.config.moe_pad_expert_input_to_capacity:
            # An expert is filled up with tokens that did not choose it: a token may be in any
            # number of them. All ranks take the most.
            own = routing_map.sum(1).max().view(1).cpu() if routing_map.numel() else torch.zeros(1)
            top_k = int(self.folded.grid.all.all_gather(own.long()).max())
        try:
            indices, weights = _choices(routing_map, probs, top_k)
        except TensorError as error:
            self.folded.refuse(error)
        self._handle = self.folded.prepare(indices, like=tokens, weights=weights, experts=self._experts)
        self.goes_in_chunks = len(self._handle.chunks) > 1
        self._shape = hidden_states.shape
        say_first("Megatron-Core", partial(_first_words, self.folded, self._why_whole))
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return tokens, weights

    def run(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Send tokens [T, H] and weights [T, K] to the experts, run these and bring the sums back,
        chunk by chunk: [T, H].

        Shared experts are computed while the first chunk travels.
        """
        assert self._experts is not None  # else there is one chunk
        shared = self.shared_experts

        def compute_shared() -> None:
            shared.linear_fc1_forward_and_act()
            _compute_second_half(shared)

        beside = None if shared is None else compute_shared
        return self.folded.run(hidden_states, _asked_for(self._handle), self._experts, probs, beside=beside)[0]

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the tokens to their experts: → rows [R, H] sorted by expert, and their weights [R].

        Those that go in several chunks, and their weights [T, K], are handed on for :meth:`run`.
        """
        shared, handle = self.shared_experts, _asked_for(self._handle)
        if self.goes_in_chunks:
            return hidden_states, probs
        beside = None if shared is None else shared.linear_fc1_forward_and_act
        rows, self._expert_rows = self.folded.dispatch(hidden_states, handle, beside=beside)
        return rows, self.folded.dispatch_weights(probs, handle).view(-1)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hand on the rows [R, H], how many each local expert has (on the host), and their weights
        [R]."""
        return hidden_states, torch.tensor(self._expert_rows), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hand on the experts' outputs [R, H]."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Bring the experts' outputs [R, H] back, and sum over choices: [T, H]; hand on what
        :meth:`run` has brought back."""
        shared, handle = self.shared_experts, _asked_for(self._handle)
        self._handle = None
        if self.goes_in_chunks:
            return hidden_states
        beside = None if shared is None else partial(_compute_second_half, shared)
        return self.folded.combine(hidden_states, handle, beside=beside)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Give the sums the shape of the layer's input, and add the shared experts' output."""
        out = hidden_states.view(self._shape)
        return out if self.shared_experts is None else out + self.shared_experts.get_output()

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Return no buffers: experts write their outputs where they like. Later versions of
        Megatron-Core ask."""
        return None, None


def _asked_for(handle: DispatchHandle | None) -> DispatchHandle:
    if handle is None:
        raise UsageError(f"{who()}Megatron-Core's layer combines, or dispatches, tokens whose way it has not asked for")
    return handle


def _first_words(folded: TokenDispatcher, why_whole: str | None) -> str:
    decision, grid = folded.decision, folded.grid
    assert decision is not None  # of the call that was just prepared
    sizes = f"EP {grid.ep.size}" + (f" × ETP {grid.etp.size}" if grid.etp.size > 1 else "")
    why_one_chunk = f"; always in one chunk: {why_whole}" if why_whole else ""
    return (
        f"Megatron-Core's MoE layers dispatch over {sizes}, planned {planned_from(grid.ep)}; the first {decision.name} by "
        f"{decision.reason}{why_one_chunk}"
    )


def _compute_second_half(shared: Any) -> None:
    shared.linear_fc2_forward()
    shared.post_forward_comm()


def _choices(routing_map: torch.Tensor, probs: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token in their order, [T, K] int64, −1 where it has fewer; and its
    weights of them [T, K].

    Raises TensorError where a token has more than ``top_k`` of the experts.
    """
    token, expert = routing_map.nonzero(as_tuple=True)
    counts = routing_map.bool().sum(1)
    if bool((counts == top_k).all()):
        indices = expert.view(-1, top_k)
        return indices, probs.gather(1, indices)
    if int(counts.max()) > top_k:
        raise TensorError(
            f"{who()}Megatron-Core's router sends a token to {int(counts.max())} experts, expected {top_k} at most "
            "(moe_router_topk): its map was padded, or changed, on the way to the dispatcher"
        )
    column = torch.arange(len(expert), device=expert.device) - (counts.cumsum(0) - counts)[token]
    indices = expert.new_full((len(counts), top_k), -1)
    indices[token, column] = expert
    return indices, probs.gather(1, indices.clamp(min=0)).masked_fill(indices < 0, 0)


class _Dispatchers:
    """Gives the layers of a model its dispatchers: one that moves tokens for all layers with the
    same groups and experts."""

    def __init__(self, kind: str, chunks: int | Sequence[int] | str, wire: DispatchWire | str | None) -> None:
        self._kind, self._chunks, self._wire = kind, chunks, wire
        self._wants_chunks = chunks != "auto" and len(slices_of(chunks)) > 1
        self._folded: dict[tuple[int, ...], TokenDispatcher] = {}

    def __deepcopy__(self, memo: object) -> _Dispatchers:
        return self  # of a spec's parameters, which Megatron copies: the copy's layers have the same groups

    def give_to_model(self, model: nn.Module) -> None:
        """Give every MoE layer of ``model`` a dispatcher. Raises UsageError where it was not to
        have any."""
        layers = [module for module in model.modules() if isinstance(module, _moe_layer())]
        for layer in layers:
            self.give_to_layer(layer)
        config = getattr(model, "config", None) or getattr(getattr(model, "module", None), "config", None)
        # Of a model with experts a stage of a pipeline may have none.
        if not layers and getattr(config, "num_moe_experts", None) is None:
            raise UsageError(
                f"{who()}{type(model).__name__} has no MoELayer of Megatron-Core's: nothing is to be dispatched"
            )

    def give_to_layer(self, layer: Any) -> None:
        stock = layer.token_dispatcher
        if isinstance(stock, MegatronDispatcher):
            return
        check_config(layer.config)
        why_whole = why_in_one_chunk(layer, _moe_layer())
        if why_whole is not None and self._wants_chunks:
            raise UsageError(
                f"{who()}plan_megatron_moe: chunks={self._chunks!r} cannot be had, {why_whole}: leave chunks out"
            )
        experts = ChunkedExperts(layer.experts) if why_whole is None else None
        folded = self._of(stock, layer.config.num_moe_experts)
        layer.token_dispatcher = MegatronDispatcher(stock, folded, experts, why_whole)
        if experts is not None:
            compute_in_chunks(layer)

    def _of(self, stock: Any, num_experts: int) -> TokenDispatcher:
        groups = stock.ep_group, stock.tp_group, stock.tp_ep_group
        key = (num_experts, *map(id, groups))
        if key not in self._folded:
            ep, etp, etp_ep = (
                expert_communicator(
                    group,
                    f"Megatron-Core's {axis} group",
                    'call torch.distributed.init_process_group("commlayer") before '
                    "initialize_model_parallel(), or set COMMLAYER_AS=nccl",
                )
                for group, axis in zip(groups, _AXES, strict=True)
            )
            if etp.size == 1:
                etp_ep = ep
            self._folded[key] = TokenDispatcher(
                num_experts,
                ep=ep,
                etp=etp,
                etp_ep=etp_ep,
                kind=self._kind,
                chunks=self._chunks,
                weights_travel=True,
                wire=self._wire,
                used_by="Megatron-Core",
            )
        return self._folded[key]


_NEEDED = (
    "ep_group",
    "tp_group",
    "tp_ep_group",
    "ep_size",
    "tp_size",
    "tp_rank",
    "shared_experts",
    "dispatch_preprocess",
)
_AXES = ("expert model parallel", "expert tensor parallel", "expert tensor and model parallel")


def check_config(config: Any) -> None:
    """Check that layers with this TransformerConfig can have our dispatcher.

    Raises UsageError for what needs the inside of Megatron's own dispatchers, and for layers that
    choose theirs themselves.
    """
    # Megatron-Core 0.20's layer sets one of its own in each forward; 0.17's, when it goes over to
    # inference.
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        raise UsageError(
            f"{who()}Megatron-Core's transformer_impl is 'inference_optimized': its MoE layers go back to dispatchers of their "
            "own, and ours would never be asked; train with 'transformer_engine', or leave plan_megatron_moe() out"
        )
    wanted = {
        "moe_router_padding_for_quantization": False,
        "overlap_moe_expert_parallel_comm": False,
        "overlap_dispatch_backward_with_experts_wgrad": False,
        "cuda_graph_impl": "none",
    }
    for name, value in wanted.items():
        got = getattr(config, name, value)
        if got not in (value, None):
            raise UsageError(
                f"{who()}Megatron-Core's {name} is {got!r}: our dispatcher goes with {value!r} only; leave plan_megatron_moe() "
                "out, and the backend plans Megatron's own dispatcher"
            )


def _moe_layer() -> Any:
    try:
        return importlib.import_module("megatron.core.transformer.moe.moe_layer").MoELayer
    except ImportError as error:
        raise UsageError(f"{who()}megatron.core cannot be imported ({error}): install megatron-core") from error


def _planned_spec(spec: Any, planned: _Dispatchers) -> Any:
    """A copy of a layer's, or a block's, spec whose layers get their dispatchers when they are
    made."""
    _moe_layer()  # says so where Megatron-Core is missing
    copied: Any = replace
    if is_dataclass(spec) and isinstance(getattr(spec, "layer_specs", None), Sequence):
        listed = vars(spec)["layer_specs"]
        layers = {id(layer): _planned_spec(layer, planned) for layer in listed}
        return copied(spec, layer_specs=[layers[id(layer)] for layer in listed])
    module: Any = getattr(spec, "module", None)
    if not is_dataclass(spec) or not isinstance(module, type) or not issubclass(module, nn.Module):
        raise UsageError(
            f"{who()}plan_megatron_moe() takes a model, a list of its chunks, or the ModuleSpec of a layer or a block, got "
            f"{spec!r}"
        )
    params = {**vars(spec)["params"], "planned_dispatchers": planned}
    made: Any = _planned_layer
    return copied(spec, module=made(module), params=params)


@cache
def _planned_layer(stock: Any) -> Any:
    """A subclass of Megatron's layer that gives its MoE layers their dispatchers when it is
    made."""

    def make(self: nn.Module, *args: Any, planned_dispatchers: _Dispatchers, **kwargs: Any) -> None:
        stock.__init__(self, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, _moe_layer()):
                planned_dispatchers.give_to_layer(module)

    return type(f"Planned{stock.__name__}", (stock,), {"__init__": make, "__doc__": stock.__doc__})
