"""Models of trainers' software, which says what is done with a mapping: how its collectives move, and what it hides behind
what."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.dispatch_kernels import DISPATCH_KERNELS, DispatchKernels
from commlayer.scheduler.mapping.recomputation import RECOMPUTE, Recompute
from commlayer.scheduler.plan import Strategy

__all__ = [
    "COMMLAYER",
    "DISPATCHERS",
    "GRAPHS",
    "MEGATRON",
    "PLANNED",
    "SOFTWARE",
    "STATE_BYTES",
    "Graphed",
    "Software",
    "named_dispatcher",
    "own_dispatcher",
    "software",
    "splits_ffn",
    "with_dispatcher",
    "with_fp8_activations",
    "with_fused_experts",
    "with_graphs",
    "with_optimizer",
    "with_overlap",
]


DispatchPrecision = Literal["bf16", "fp8"]
Graphed = Literal["attention", "router", "step"]
"""The part of a step that a CUDA graph holds: of each layer attention, or the router (with shared experts); or all."""
_SCALED = 128
"""Elements of a row that share an FP32 scale (DeepSeek-V3, arXiv:2412.19437, section 3.3.2; DeepEP's FP8 dispatch)."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How a step is run.

    Attributes:
        strategies: by which collectives may move; flat alone is what NCCL does without us.
        gradient_bytes: of an element in the sums of gradients: 4 (FP32) or 2.
        context: how context parallelism meets keys and values: ``ring`` (blocks beside the attention of those before them)
            or ``gather`` (all of them, then the attention).
        overlaps_gradients: their sums run beside the backward pass of the last micro-batch.
        overlaps_parameters: sharded weights are gathered beside the forward pass.
        lanes: traffic yields by class (:mod:`commlayer.scheduler.lanes`).
        hides_dispatch: tokens go to experts in chunks, beside the experts' work (:mod:`commlayer.scheduler.overlap`).
        two_levels: a dispatch by all_to_all goes in two levels where that is predicted faster (docs/moe.md).
        kernels: by which tokens are dispatched, in place of calls of all_to_all; None: by these.
        dispatch_precision: of rows on their way to experts, forward (tokens) and backward (gradients): ``bf16`` or ``fp8`` with
            scales; they come back in BF16.
        overlaps_shared: shared experts compute beside the exchange of tokens, where these are not dispatched in chunks and no
            passes are merged (Megatron-Core's ``--moe-shared-expert-overlap``).
        activation_bytes, parameter_bytes: of an element that travels; 2: BF16.
        gathers_again: a sequence that was gathered for a product is not kept, but gathered once more for the weight's gradient
            (Megatron-LM's linear layers).
        puts_off_weights: the backward pass makes the gradients of experts' weights when those of tokens are on their way back.
        splits_ends: tp splits embedding and head, and (but with Ulysses: :func:`splits_ffn`) shared experts and dense FFNs; else
            each of its ranks has them whole, for its own rows.
        keeps_whole_kv: where tp does not divide the key-value heads, each of its ranks has the projections of all of them; else
            those of the heads that it needs, at least one.
        sums_replicas_over_tp: gradients of what all tp ranks have whole (norms, routers) are summed over tp by themselves, then
            with the others; else at once, over tp, cp and dp.
        fuses_experts: experts' activation function, biases and clamps are part of their products (Transformer Engine's fused
            operations, Megatron-LM's --use-transformer-engine-op-fuser); else kernels of their own, and in FP8 each expert's
            rows are cast by one.
        graphs: what CUDA graphs hold, and the host launches at once.
        host: whether it ``waits`` in every layer for the counts of tokens that calls of all_to_all bring, or ``runs ahead`` of
            the GPU; ``unknown``: no time is added for its launches (mapping/host_launches.py).
        sends_weights: gating weights (FP32) go with the tokens, and experts apply them; else they stay, for the combine.
        count_words: int64 numbers that a rank tells the others of etp·ep before its tokens go: so many, so many per expert, and,
            without etp, so many per rank of ep.
        bucket_bytes: gradients are summed in buckets of at most so many bytes; None: layer by layer.
        balances: a router's losses look at the tokens of all ranks of a stage.
        sums_loss_over_world: all ranks learn the loss; else the last stage's.
        main_weight_bytes, moment_bytes: of an element of the optimizer's own weights, and of its two moments.
        keeps_fp8_weights: with a recipe of FP8 a linear layer has no BF16 weights beside those, and they are gathered so
            (Megatron-LM's --fp8-param-gather).
        keeps_fp8_activations: what goes into a gated activation function is kept in FP8 for the backward pass
            (Megatron-LM's --activation-func-fp8-input-store).
        recomputes: the ways of recomputation that a search offers it, of those that it can run.
        offloads: it can have activations in the host's memory until their backward pass (``Setup.offload``).
        offloaded_optimizer: the part of the optimizer's state that lies in the host's memory, and is stepped there.
    """

    name: str
    strategies: tuple[Strategy, ...]
    gradient_bytes: int = 4
    context: Literal["ring", "gather"] = "ring"
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    lanes: bool = False
    hides_dispatch: bool = False
    two_levels: bool = False
    kernels: DispatchKernels | None = None
    dispatch_precision: DispatchPrecision = "bf16"
    overlaps_shared: bool = False
    activation_bytes: int = 2
    parameter_bytes: int = 2
    gathers_again: bool = True
    puts_off_weights: bool = False
    splits_ends: bool = True
    keeps_whole_kv: bool = False
    sums_replicas_over_tp: bool = True
    fuses_experts: bool = False
    graphs: frozenset[Graphed] = frozenset()
    host: Literal["waits", "runs ahead", "unknown"] = "waits"
    sends_weights: bool = True
    count_words: tuple[int, int, int] = (0, 1, 0)
    bucket_bytes: int | None = None
    balances: bool = False
    sums_loss_over_world: bool = False
    main_weight_bytes: int = 4
    moment_bytes: tuple[int, int] = (4, 4)
    keeps_fp8_weights: bool = False
    keeps_fp8_activations: bool = False
    recomputes: tuple[Recompute, ...] = ("none", "moe_act+layernorm", "full")
    offloads: bool = True
    offloaded_optimizer: float = 0.0

    @property
    def adam_bytes(self) -> int:
        """Bytes of a parameter's optimizer state: Adam's."""
        return self.main_weight_bytes + sum(self.moment_bytes)

    @property
    def adam_moved_bytes(self) -> int:
        """Bytes that a step of Adam moves for a parameter: its gradient is read for the norm and for the step, its weight and
        both moments are read and written, and a BF16 weight is written."""
        return 2 * self.gradient_bytes + 2 * self.adam_bytes + 2

    def gathered_weight_bytes(self, precision: str) -> int:
        """Bytes of a weight that data parallelism gathers, where products are in ``precision``: in BF16 none is kept in FP8."""
        return 1 if self.keeps_fp8_weights and precision != "bf16" else self.parameter_bytes

    def row_bytes(self, hidden: int, *, to_experts: bool = False) -> int:
        """Bytes of a token that travels. ``to_experts``: on its way to them; a gradient is too, in the backward pass."""
        if to_experts and self.dispatch_precision == "fp8":
            return hidden + _SCALE_BYTES * math.ceil(hidden / _SCALED)
        return hidden * self.activation_bytes


MEGATRON = Software(name="megatron", strategies=(Strategy.FLAT,))
"""Megatron-Core as it is: every collective is one call of NCCL's."""
PLANNED = replace(MEGATRON, name="megatron+commlayer", strategies=tuple(Strategy), lanes=True)
"""Megatron-Core with our backend under it: the same calls, each planned, on lanes."""
COMMLAYER = Software(
    name="commlayer",
    strategies=tuple(Strategy),
    context="gather",
    lanes=True,
    hides_dispatch=True,
    two_levels=True,
    overlaps_parameters=False,
    gathers_again=False,
    splits_ends=False,
    keeps_whole_kv=True,
    sums_replicas_over_tp=False,
    sends_weights=False,
    count_words=(13, 8, 2),
    bucket_bytes=25 << 20,
    sums_loss_over_world=True,
    recomputes=RECOMPUTE,
    offloads=False,
)
"""This project's own layers, with plans, lanes and overlap."""
SOFTWARE = {entry.name: entry for entry in (COMMLAYER, MEGATRON, PLANNED)}


def software(name: str) -> Software:
    """Look software up by its name. Raises UsageError for an unknown one."""
    if name not in SOFTWARE:
        raise UsageError(f"software: expected {', '.join(SOFTWARE)}, got {name!r}")
    return SOFTWARE[name]


DISPATCHERS = ("nccl", *DISPATCH_KERNELS, "commlayer")
"""The names of dispatchers, which send tokens to their experts."""


def own_dispatcher(name: str) -> str:
    """The dispatcher of software by its name, where it has no other: ``commlayer`` or ``nccl``."""
    return "commlayer" if name.split(",")[0] == COMMLAYER.name else "nccl"


def named_dispatcher(name: str) -> str:
    """The name of software with its dispatcher in it, also where that is its own."""
    return name if " dispatcher" in name else f"{name}, {own_dispatcher(name)} dispatcher"


STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Formats of what an optimizer keeps."""
_MAY_HAVE = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": tuple(STATE_BYTES),
    "exp_avg_sq_dtype": tuple(STATE_BYTES),
}
"""The formats of each part in Megatron-LM's precision-aware optimizer. An fp16 weight is the lower half, beside BF16."""


def with_optimizer(
    software: Software,
    *,
    main_grads_dtype: str | None = None,
    main_params_dtype: str = "fp32",
    exp_avg_dtype: str = "fp32",
    exp_avg_sq_dtype: str = "fp32",
    fp8_param_gather: bool = False,
    optimizer_offload_fraction: float = 0.0,
) -> Software:
    """The same software with an optimizer whose state has other formats, or is partly in the host's memory: named as
    Megatron-LM's arguments (--use-precision-aware-optimizer, --optimizer-cpu-offload).

    ``main_grads_dtype`` None: the software's own. Raises UsageError for a format that a part cannot have, or a fraction that
    is not in [0, 1].
    """
    own = "fp32" if software.gradient_bytes == STATE_BYTES["fp32"] else "bf16"
    given = {
        "main_grads_dtype": main_grads_dtype or own,
        "main_params_dtype": main_params_dtype,
        "exp_avg_dtype": exp_avg_dtype,
        "exp_avg_sq_dtype": exp_avg_sq_dtype,
    }
    for name, word in given.items():
        if word not in _MAY_HAVE[name]:
            raise UsageError(f"{name}: expected {', '.join(_MAY_HAVE[name])}, got {word!r}")
    if not 0 <= optimizer_offload_fraction <= 1:
        raise UsageError(f"optimizer_offload_fraction: expected 0 to 1, got {optimizer_offload_fraction!r}")
    return replace(
        software,
        gradient_bytes=STATE_BYTES[given["main_grads_dtype"]],
        main_weight_bytes=STATE_BYTES[main_params_dtype],
        moment_bytes=(STATE_BYTES[exp_avg_dtype], STATE_BYTES[exp_avg_sq_dtype]),
        keeps_fp8_weights=fp8_param_gather,
        offloaded_optimizer=optimizer_offload_fraction,
    )


def with_fp8_activations(software: Software) -> Software:
    """The same software, which keeps what goes into SwiGLU in FP8 for the backward pass, as DeepSeek-V3 does
    (arXiv:2412.19437, section 3.3.3) and Megatron-LM with --activation-func-fp8-input-store."""
    return replace(software, keeps_fp8_activations=True)


def with_fused_experts(software: Software) -> Software:
    """The same software with experts whose activation function, biases, clamps and casts are part of their products.

    Raises UsageError where it is this project's own, whose experts have no such kernels.
    """
    if software.hides_dispatch:
        raise UsageError(f"{software.name} has no fused experts: take --software megatron")
    return replace(software, name=f"{software.name}, fused experts", fuses_experts=True)


GRAPHS: dict[str, frozenset[Graphed]] = {
    "none": frozenset(),
    "router": frozenset({"router"}),
    "attention": frozenset({"attention"}),
    "attention+router": frozenset({"attention", "router"}),
    "full-iteration": frozenset({"step"}),
}
"""The parts that CUDA graphs can hold, by the names of Megatron-Core's scopes (docs, user-guide/features/cuda_graph)."""


def with_graphs(software: Software, graphs: str) -> Software:
    """The same software with CUDA graphs of a kind in GRAPHS.

    Raises UsageError for an unknown one, and where it is this project's own, whose calls no graph can hold.
    """
    if graphs not in GRAPHS:
        raise UsageError(f"cuda graphs: expected {', '.join(GRAPHS)}, got {graphs!r}")
    if graphs != "none" and software.hides_dispatch:
        raise UsageError(f"{software.name} has no CUDA graphs: take --software megatron")
    name = software.name if graphs == "none" else f"{software.name}, graphs of {graphs}"
    return replace(software, name=name, graphs=GRAPHS[graphs])


def with_dispatcher(software: Software, dispatcher: str) -> Software:
    """The same software with another dispatcher, of DISPATCHERS.

    ``nccl``: an all_to_all, without chunks. ``commlayer``: ours, in chunks or in two levels. Others: a
    library's kernels (mapping/dispatch_kernels.py).

    Raises UsageError for an unknown one.
    """
    if dispatcher not in DISPATCHERS:
        raise UsageError(f"dispatcher: expected {', '.join(DISPATCHERS)}, got {dispatcher!r}")
    name = software.name if dispatcher == software.name else f"{software.name}, {dispatcher} dispatcher"
    if dispatcher == "commlayer":
        return replace(software, name=name, hides_dispatch=True, two_levels=True, sends_weights=False, kernels=None)
    kernels = DISPATCH_KERNELS.get(dispatcher)
    return replace(software, name=name, hides_dispatch=False, two_levels=False, kernels=kernels)


def with_overlap(
    software: Software, *, dispatch_precision: DispatchPrecision = "bf16", overlaps_shared: bool = False
) -> Software:
    """The same software with rows that go to experts in another precision, and shared experts beside the exchange.

    Raises UsageError where tokens go in chunks or in two levels, as with our dispatcher, which has neither.
    """
    changes = ("FP8 dispatch",) * (dispatch_precision != "bf16") + ("shared experts beside it",) * overlaps_shared
    if changes and software.hides_dispatch:
        raise UsageError(
            f"{software.name} dispatches in chunks, without {' and '.join(changes)}: take another dispatcher"
        )
    name = ", ".join((software.name, *changes))
    return replace(software, name=name, dispatch_precision=dispatch_precision, overlaps_shared=overlaps_shared)


def splits_ffn(software: Software, attention: str) -> bool:
    """Whether tp splits the widths of shared experts and of dense FFNs; else each of its ranks has them whole, for its own rows.

    Ulysses splits nothing but heads (MegaScale-MoE, section 3.1), and neither does a software that leaves the ends whole.
    """
    return software.splits_ends and attention == "tensor"
