"""A tiny GPT of Megatron-Core with experts, trained by Megatron's own layers, DDP and gradient reduction. Runs inside ranks.

What Megatron asks of CUDA the CPU answers (:mod:`megatron_on_cpu`), for the stock dispatcher and for the
planned one alike.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_on_cpu import stand_in_for_cuda
from model_size import Size
from wrong_rows import sorted_wrongly

import commlayer.backend.new_groups  # noqa: F401  # needs no import where commlayer is installed; here: once, before ranks are forked
from commlayer.integrations import plan_megatron_moe
from commlayer.statistics import Stats, reset_stats, stats

SIZE = Size()
_MODULES = (
    "parallel_state",
    "distributed",
    "distributed.finalize_model_grads",
    "models.backends",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "tensor_parallel.random",
    "transformer",
    "transformer.transformer_block",
    "transformer.moe.token_dispatcher",
    "transformer.spec_utils",
)
SPEC = "commlayer.integrations.megatron_spec", "planned_layer_spec"
"""The words after ``--spec``, of which Megatron-LM makes such a tuple."""


def core(module: str) -> Any:
    """A module of Megatron-Core's. Through importorskip because mypy would otherwise read all of it."""
    why = "NOT TESTED: megatron-core is not installed (extra 'trainers')"
    return pytest.importorskip(f"megatron.core.{module}", reason=why)


def load() -> None:
    """Import what ranks will need: before the fork, once, not in each of them."""
    for module in _MODULES:
        core(module)
    import_module(SPEC[0])


@dataclass(frozen=True)
class Case:
    """A model and its mapping: ``layout``, sizes of tp, ep and etp; ``options`` of its TransformerConfig.

    ``kind``, ``chunks``, ``wire``: of the planned dispatcher. ``tolerance``: relative, of losses. ``by_spec``: whether the
    dispatcher comes by the layer's spec, or into the model when that is made; ``by_name``: by the one that ``--spec`` names.
    ``overlap``: of DDP's gradients with the backward pass.
    """

    name: str
    layout: tuple[int, int, int] = (1, 4, 1)
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "all_to_all"
    chunks: int | tuple[int, ...] | str = "auto"
    wire: str | None = None
    tolerance: float = 0.0
    by_spec: bool = False
    by_name: bool = False
    overlap: bool = False
    bucket_size: int = 20_000
    steps: int = 2
    size: Size = SIZE
    wrong: bool = False

    @property
    def moe_layers(self) -> int:
        """How many layers have experts."""
        return sum(self.options.get("moe_layer_freq", [1] * self.size.layers))


@dataclass(frozen=True)
class Trained:
    """The losses of a rank, what ran of ours, whose dispatchers the layers have, and which warnings were given."""

    losses: list[float]
    stats: Stats
    dispatchers: set[str]
    warnings: set[str]


class Norm(torch.nn.LayerNorm):
    """torch's norm, where Megatron's wrapper of it refuses sequence parallelism: weights whose gradients are summed over tp."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def config_of(case: Case) -> Any:
    (tp, ep, etp), size = case.layout, case.size
    options = {"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01} | case.options
    return core("transformer").TransformerConfig(
        num_layers=size.layers,
        transformer_impl="local",
        hidden_size=size.hidden,
        ffn_hidden_size=size.width,
        moe_ffn_hidden_size=size.width,
        num_attention_heads=4,
        num_moe_experts=size.num_experts,
        moe_router_topk=size.top_k,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,  # smaller, and a token at the wrong expert would hardly change the loss
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        **options,
    )


def spec_of(case: Case, config: Any, plan: Callable[[Any], Any] | None) -> Any:
    """The spec of the layers, or of all of them together; ``plan``: what makes it ours, where it is to be."""
    specs = core("models.gpt.gpt_layer_specs")
    if case.by_name:
        if plan is None:
            return specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        return core("transformer.spec_utils").import_module(SPEC)
    spec = specs.get_gpt_layer_local_spec(num_experts=case.size.num_experts)
    return spec if plan is None or not case.by_spec else plan(spec)


def layers_with_experts(model: Any) -> list[Any]:
    return [layer for layer in model.decoder.layers if hasattr(layer.mlp, "token_dispatcher")]


def build(case: Case, *, planned: bool) -> Any:
    """The model, with distinct experts and equal weights in every build."""
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(0)
    config = config_of(case)
    plan = partial(plan_megatron_moe, kind=case.kind, chunks=case.chunks, wire=case.wire)
    model = core("models.gpt").GPTModel(
        config,
        spec_of(case, config, plan if planned else None),
        case.size.vocabulary,
        case.size.sequence,
        share_embeddings_and_output_weights=False,
    )
    if config.bf16:
        model.bfloat16()  # as Megatron's Float16Module has it
    if planned and not case.by_spec and not case.by_name:
        assert plan(model) is model
    for layer in layers_with_experts(model):
        weights = [expert.linear_fc1.weight for expert in layer.mlp.experts.local_experts]
        assert not any(torch.equal(one, other) for one, other in combinations(weights, 2)), "experts are clones"
    return model


def train(case: Case, model: Any) -> Iterator[float]:
    """Megatron's DDP around ``model``, its finalize_model_grads, and plain gradient descent: this rank's losses, step by step."""
    distributed, size = core("distributed"), case.size
    ddp_config = distributed.DistributedDataParallelConfig(
        overlap_grad_reduce=case.overlap, bucket_size=case.bucket_size
    )
    ddp = distributed.DistributedDataParallel(model.config, ddp_config, model)
    replica = core("parallel_state").get_data_parallel_rank()  # whose tokens all of its tensor-parallel ranks have
    generator = torch.Generator().manual_seed(1 + replica)
    positions = torch.arange(size.sequence).expand(size.batch, -1)
    mask = torch.ones(size.sequence, size.sequence).triu(1).bool()[None, None]
    for _ in range(case.steps):
        tokens = torch.randint(0, size.vocabulary, (size.batch, size.sequence + 1), generator=generator)
        ddp.zero_grad_buffer()
        loss = ddp(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        distributed.finalize_model_grads([ddp])
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.sub_(parameter.main_grad, alpha=0.1)
        yield loss.item()


@contextlib.contextmanager
def groups_on(backend: str, layout: tuple[int, int, int]) -> Iterator[None]:
    """Megatron's groups of this mapping, on this backend."""
    state, (tp, ep, etp) = core("parallel_state"), layout
    with mock.patch.object(dist, "new_group", partial(_new_group, dist.new_group, backend)):
        state.initialize_model_parallel(
            tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, create_gloo_process_groups=False
        )
    try:
        yield
    finally:
        state.destroy_model_parallel()


def _new_group(make: Callable[..., Any], wanted: str, *args: Any, backend: str | None = None, **options: Any) -> Any:
    assert backend is None
    return make(*args, backend=wanted, **options)


@contextlib.contextmanager
def warnings_kept() -> Iterator[set[str]]:
    """All warnings that are given meanwhile, by the end."""
    kept: set[str] = set()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield kept
    kept.update(str(each.message) for each in given)


KEPT: list[object] = []
"""Models left behind: freed in a rank, the last to hold a Gloo group may hang in its destructor (see tiny_moe.py)."""


def _forget_metrics() -> None:
    """Empty Megatron's tracker of MoE metrics, which is as long as the first model has layers: a dict of its own up to 0.18, and
    in 0.19 that of an object, whose own ``clear`` keeps what is as long."""
    tracker = getattr(core("transformer.moe.moe_utils"), "_MOE_LAYER_WISE_LOGGING_TRACKER", None)
    if tracker is None:
        tracker = core("transformer.moe.moe_logging").get_moe_metrics_tracker()._metrics
    tracker.clear()


def run_case(case: Case, *, planned: bool) -> Trained:
    """Train from the same weights on the same tokens as ever."""
    reset_stats()
    _forget_metrics()
    with warnings_kept() as given, sorted_wrongly() if case.wrong and planned else contextlib.nullcontext():
        model = build(case, planned=planned)
        losses = list(train(case, model))
    KEPT.append(model)
    names = {type(layer.mlp.token_dispatcher).__name__ for layer in layers_with_experts(model)}
    return Trained(losses, stats(), names, given)


def begin(backend: str, environment: dict[str, str]) -> None:
    """Prepare a rank, before all else."""
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "none", **environment})
    stand_in_for_cuda()
    core("models.backends").LNImpl = core("transformer.transformer_block").LayerNormImpl = Norm
    dist.init_process_group(backend)


def losses_of(case: Case, backend: str, environment: dict[str, str]) -> Iterator[float]:
    """The losses of one rank, step by step, with our dispatcher where the backend is ours."""
    begin(backend, environment)
    with groups_on(backend, case.layout):
        model = build(case, planned=backend == "commlayer")
        KEPT.append(model)
        yield from train(case, model)


def job(cases: tuple[Case, ...], environment: dict[str, str]) -> list[tuple[Trained, Trained]]:
    """The job of one rank: what each case finds with Megatron's dispatcher on Gloo, and with ours."""
    begin("commlayer", environment)
    found: dict[str, list[Trained]] = {case.name: [] for case in cases}
    for layout in dict.fromkeys(case.layout for case in cases):
        for backend in ("gloo", "commlayer"):
            with groups_on(backend, layout):
                for case in cases:
                    if case.layout == layout:
                        found[case.name].append(run_case(case, planned=backend == "commlayer"))
    return [(stock, planned) for stock, planned in found.values()]
