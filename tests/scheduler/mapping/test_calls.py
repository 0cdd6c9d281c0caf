"""Mappings are said to send what the run time counts, call by call and byte by byte; and what the papers' formulas say.

The model is the example's language model on a real, emulated cluster; ZeRO's first stage is torch's fully_shard. Where sizes
depend on the router's choices (rows that arrive, and their gradients on the way back) the sum over all ranks does not, and is
compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard

from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.agreement import agree_on_experts
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.remat import Rematerialise
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import bus_factor
from commlayer.scheduler.mapping.dispatch_levels import DispatchLevels
from commlayer.scheduler.mapping.folded import AXES
from commlayer.scheduler.mapping.job import Attention, Job, Setup
from commlayer.scheduler.mapping.model import LatentAttention, ModelShape
from commlayer.scheduler.mapping.parameters import stage_parameters
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software
from commlayer.scheduler.mapping.step_collectives import (
    StepCollective,
    dispatched_rows,
    layer_backward,
    layer_forward,
    step_exchanges,
    whole_step,
)
from commlayer.scheduler.plan import Span
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from examples.language_model import ModelConfig, MoELanguageModel

SEQUENCE, BATCH = 16, 8
SHAPE = ModelShape(
    name="tiny",
    layers=1,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    experts=8,
    top_k=2,
    width=8,
    shared_width=4,
    vocabulary=32,
)
FP32 = replace(COMMLAYER, activation_bytes=4, parameter_bytes=4, bucket_bytes=2000)
"""The model computes in float32 on the CPU; buckets are so small that there are several, and parameters larger than one."""


@dataclass(frozen=True)
class Case:
    """A way of running the tiny model."""

    gpus: int
    degrees: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    layers: int = 1
    capacity_factor: float | None = None
    software: Software = FP32
    top_k: int = SHAPE.top_k
    in_levels: bool = False

    @property
    def job(self) -> Job:
        return Job(
            model=replace(SHAPE, layers=self.layers, top_k=self.top_k),
            gpus=self.gpus,
            global_batch=BATCH,
            sequence=SEQUENCE,
            capacity_factor=self.capacity_factor,
        )

    @property
    def setup(self) -> Setup:
        return Setup(gpus=self.gpus, **{"zero": 0, "exchange": "all_to_all", **self.degrees, **self.options})

    @property
    def is_static(self) -> bool:
        """Whether no size depends on the router's choices."""
        return self.capacity_factor is not None or self.setup.exchange == "all_gather" or self.top_k == SHAPE.experts

    @property
    def described(self) -> Iterable[tuple[StepCollective, int]]:
        """Exchanges of each stage."""
        shape = (self.setup.ep // 2,) * 2
        levels = DispatchLevels.of(self.job, self.setup, self.software, shape) if self.in_levels else None
        for stage in range(self.setup.pp):
            found = whole_step(self.job, self.setup, self.software, stage=stage)
            yield from ((each, stage) for each in (found if levels is None else levels.replaced(found)))

    @property
    def config(self) -> ModelConfig:
        model, setup = self.job.model, self.setup
        return ModelConfig(
            router=RouterConfig(
                num_experts=model.experts,
                top_k=model.top_k,
                aux_loss_coefficient=0.01 * self.software.balances,
                capacity_factor=self.capacity_factor,
                pad_to_capacity=self.capacity_factor is not None,
            ),
            vocabulary=model.vocabulary,
            hidden=model.hidden,
            num_layers=model.layers,
            num_heads=model.heads,
            num_kv_heads=model.kv_heads,
            width=model.width,
            shared_width=model.shared_width,
            attention=setup.attention,
            dispatch="two_level" if self.in_levels else setup.exchange,
            chunks="auto" if self.capacity_factor or self.in_levels or setup.exchange == "all_gather" else 1,
            bucket_bytes=self.software.bucket_bytes or 1,
            overlap_gradients=self.setup.zero == 0,
        )


CASES = [
    Case(4, {"tp": 2, "ep": 4}, {"attention": "ulysses"}, layers=2),
    Case(4, {"tp": 4, "ep": 2}, {"attention": "ulysses"}),  # two ranks need the same key-value head
    Case(4, {"tp": 4, "ep": 2}, {"attention": "tensor"}),  # key and value projections are whole on every rank
    Case(4, {"ep": 2, "etp": 2}, capacity_factor=1.5),
    Case(4, {"cp": 2, "ep": 4}, {"micro_batch": 2}, software=replace(FP32, balances=True)),
    Case(4, {"ep": 2, "etp": 2}, {"exchange": "all_gather"}),
    Case(4, {"pp": 2, "cp": 2}, {"micro_batch": 2}, layers=3),
    Case(4, {"tp": 2, "ep": 2, "etp": 2}, {"attention": "tensor", "recompute": "megascale"}),
    Case(4, {"tp": 2, "ep": 4}, {"attention": "ulysses", "recompute": "megascale"}, capacity_factor=1.0),
    Case(
        4, {"ep": 2}, {"micro_batch": 2, "zero": 1}, layers=2, software=replace(FP32, bucket_bytes=None)
    ),  # fully_shard
    Case(4, {"ep": 4}, top_k=8, in_levels=True),  # every token goes to every rank
    Case(4, {"ep": 4}, {"recompute": "megascale"}, top_k=8, in_levels=True),
    Case(8, {"tp": 2, "cp": 2, "ep": 2, "etp": 4}, {"attention": "tensor"}),
    Case(8, {"pp": 2, "tp": 2, "ep": 2, "etp": 2}, {"attention": "tensor", "micro_batch": 4}, layers=2),
    Case(8, {"tp": 2, "ep": 8}, {"exchange": "all_gather", "attention": "ulysses"}),
]
Key = tuple[str, str]
"""Axis (the first of those that share a group) and collective."""
Moved = tuple[int, int]
"""Calls, and logical bytes of all of them."""
STATISTICS = {"all_to_all_v": "all_to_all", "send_recv": "send"}
"""Collectives that the run time counts under another name."""


@dataclass(frozen=True)
class Step:
    """The bytes of one rank in a step, as counted and as described; ``routed``: axes on whose groups tokens go."""

    counted: dict[Key, Moved]
    described: dict[Key, Moved]
    routed: set[str]


def run_case(case: Case) -> Step:
    """Collective."""
    with FoldedMesh(case.degrees) as mesh:
        names: dict[str, str] = {}
        for axis in AXES:
            names.setdefault(mesh.group(axis).group_name, axis)
        model = MoELanguageModel(case.config, mesh)
        # What ranks agree on at a group's first call: the number of experts, and gradients' formats.
        for layer in model._layers():
            agree_on_experts(layer.moe.dispatcher.grid)
        if case.setup.zero:
            shard(model, mesh)
        else:
            model._gradient_buckets(None)
        tokens = torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) * 7 % SHAPE.vocabulary
        reset_stats()
        with contextlib.ExitStack() as stack:
            if case.setup.recompute == "megascale":
                stack.enter_context(Rematerialise())
            if case.setup.zero:  # sums the gradients itself
                stack.enter_context(mock.patch("examples.language_model.synchronise_gradients"))
            model.train_step(tokens, tokens, num_micro_batches=case.setup.micro_batches(case.job))
        counted = {
            (names[group["group"]], call["collective"]): (call["calls"], call["logical_bytes"])
            for group in stats()["groups"]
            for call in group["calls"]
            if call["collective"] != "recv"  # the other side of a send
        }
        described: dict[Key, Moved] = {}
        for each in (each for each, stage in case.described if stage == mesh.rank("pp")):
            is_whole = each.over is Span.GROUP
            kind = STATISTICS.get(each.collective, each.collective) if is_whole else each.collective
            key = names[mesh.group(each.axis).group_name], kind
            calls, size = described.get(key, (0, 0))
            described[key] = calls + each.count, size + each.count * each.logical_bytes
        if case.setup.zero:  # fully_shard makes as many calls as there are modules that it was given
            for moved in (counted, described):
                moved.update({key: (1, size) for key, (_, size) in moved.items() if key[0] in ("dp", "edp")})
        routed = {names[mesh.group(axis).group_name] for axis in ("ep", "etp")}
    return Step(counted, described, set() if case.is_static else routed)


def shard(model: MoELanguageModel, mesh: FoldedMesh) -> None:
    """Shard as ZeRO's first stage does, whose weights are gathered once in a step: experts over edp, all else over dp and cp."""
    experts = [layer.moe.experts for layer in model._layers()]
    for each in experts:
        fully_shard(each, mesh=mesh.device_mesh("edp"), reshard_after_forward=False)
    fully_shard(model, mesh=mesh.device_mesh("dp_cp"), reshard_after_forward=False)


def run_cases(cases: list[Case]) -> list[Step]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    found = [run_case(case) for case in cases]
    dist.destroy_process_group()
    return found


def total(found: Sequence[dict[Key, Moved]]) -> dict[Key, Moved]:
    """The bytes of all ranks."""
    sums: dict[Key, Moved] = {}
    for each in found:
        for key, (calls, size) in each.items():
            before = sums.get(key, (0, 0))
            sums[key] = before[0] + calls, before[1] + size
    return sums


@pytest.mark.parametrize("gpus", [4, 8])
def test_run_time_counts_what_is_described(emulated_cluster: ClusterFactory, gpus: int) -> None:
    cases = [case for case in CASES if case.gpus == gpus]
    ranks = emulated_cluster(nodes=2, ranks_per_node=gpus // 2).run(run_cases, cases)
    for index, case in enumerate(cases):
        steps = [rank[index] for rank in ranks]
        assert total([step.counted for step in steps]) == total([step.described for step in steps]), case
        for step in steps:
            counted, described = (
                {key: moved for key, moved in each.items() if key[0] not in step.routed}
                for each in (step.counted, step.described)
            )
            assert counted == described, case


# Without processes

BF16 = 2
TOKENS_OF = st.builds(
    lambda heads_per_key, kv_heads, size, k, n, cp, tokens: (heads_per_key, kv_heads, size, k, n, cp, tokens),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([8, 16]),
    st.sampled_from([2, 8, 64]),
    st.integers(1, 8),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 9),
)


def sent_elements(exchanges: Iterable[StepCollective], axis: str, ranks: int) -> float:
    """The bytes that one rank sends on an axis of ``ranks``, each of its tokens to itself among them not counted."""
    total = 0.0
    for each in exchanges:
        if each.axis == axis and each.place != "counts" and "weights" not in each.name:
            total += each.count * each.logical_bytes / BF16 * bus_factor(each.collective, ranks)
    return total


@given(TOKENS_OF)
def test_a_layer_sends_what_megascale_says(drawn: tuple[int, ...]) -> None:
    """MegaScale-MoE's equations 1 to 4 (arXiv:2505.11432), in elements that one rank sends in a layer's forward pass.

    Equation 2 as printed has twice what its two all_to_all send, (1+2/m)bsh/n of queries, keys and values and bsh/n of outputs,
    while equations 1, 3 and 4 agree with their calls.
    """
    heads_per_key, kv_heads, size, k, n, cp, factor = drawn
    heads = heads_per_key * kv_heads
    model = replace(SHAPE, heads=heads, kv_heads=kv_heads, head_dim=size, hidden=heads * size, top_k=k, shared_width=0)
    sequence = 2 * cp * n * factor
    job = Job(model=model, gpus=n * cp, global_batch=2, sequence=sequence)
    sent = 2 * sequence // cp * model.hidden * (n - 1) / n  # bsh(n-1)/n
    gathered, exchanged = 2 * sent, 2 * k / n * sent  # equations 1 and 4, and 3
    for software in (COMMLAYER, MEGATRON):
        kinds: dict[Attention, float] = {
            "tensor": gathered,
            "ulysses": sent * (2 + 2 / heads_per_key) / n,
        }
        for attention, volume in kinds.items():
            setup = Setup(gpus=n * cp, tp=n, cp=cp, ep=n, micro_batch=2, attention=attention)
            found = layer_forward(job, setup, software)
            assert sent_elements(found, "tp", n) == pytest.approx(volume)
            assert sent_elements(found, "ep", n) == pytest.approx(exchanged)
            assert sent_elements(layer_backward(job, setup, COMMLAYER), "ep", n) == pytest.approx(exchanged)
            of_all = sent_elements(layer_forward(job, replace(setup, exchange="all_gather"), software), "ep", n)
            assert of_all == pytest.approx(gathered)
            assert (of_all < exchanged) == (k > n)


def test_ring_and_gather_move_the_same_keys_and_values() -> None:
    model = replace(SHAPE, heads=8, kv_heads=4, head_dim=16, hidden=128)
    job = Job(model=model, gpus=8, global_batch=2, sequence=64)
    setup = Setup(gpus=8, tp=2, cp=4)
    ring, gather = (
        sent_elements([each for each in layer_forward(job, setup, software) if each.axis == "cp"], "cp", 4)
        for software in (MEGATRON, COMMLAYER)
    )
    assert ring == gather == 3 * (64 // 4) * 2 * (4 // 2) * 16
    back = [each for each in layer_backward(job, setup, MEGATRON) if each.axis == "cp"]
    assert sent_elements(back, "cp", 4) == 2 * ring  # keys and values go round once more, with their gradients


def test_megatron_gathers_a_sequence_again() -> None:
    job = Job(model=replace(SHAPE, dense_layers=1, dense_width=32), gpus=2, global_batch=1, sequence=16)
    setup = Setup(gpus=2, tp=2)
    names = [each.name for each in layer_backward(job, setup, MEGATRON, moe=False)]
    wanted = ["ffn_sum_gradient", "ffn_sequence_again", "ffn_sequence_gradient", "attention_sum_gradient"]
    assert names == [*wanted, "sequence_again", "sequence_gradient"]
    kept = replace(MEGATRON, gathers_again=False)
    assert [each.name for each in layer_backward(job, setup, kept, moe=False)] == [
        name for name in names if "again" not in name
    ]
    assert not [each for each in layer_forward(job, setup, COMMLAYER, moe=False) if each.place == "before_ffn"]
    full = layer_backward(job, replace(setup, recompute="full"), kept, moe=False)
    forward = layer_forward(job, setup, kept, moe=False)
    assert [each.name for each in full[: len(forward)]] == [f"{each.name}_again" for each in forward]


@given(st.sampled_from([0, 1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([COMMLAYER, MEGATRON]))
def test_every_parameter_is_summed_and_gathered_once(zero: int, pp: int, software: Software) -> None:
    """The bytes of all stages: as many gradient bytes as there are parameters on a rank, in each micro-batch or once, and where
    ZeRO 1 or 2 shards them as many bytes of parameters, once."""
    software = replace(software, bucket_bytes=None)
    model = replace(SHAPE, layers=5, dense_layers=1, dense_width=8, vocabulary=64)
    job = Job(model=model, gpus=8 * pp, global_batch=32, sequence=16)
    setup = Setup(gpus=8 * pp, tp=2, ep=4, pp=pp, zero=zero)
    times = setup.micro_batches(job) if zero >= 2 else 1
    for stage in range(pp):
        wanted: dict[str, int] = {}
        for axis, elements in stage_parameters(model, setup, software, stage):
            wanted[axis] = wanted.get(axis, 0) + elements * software.gradient_bytes * times
        found: dict[str, int] = {}
        gathered: dict[str, int] = {}
        for each in whole_step(job, setup, software, stage=stage):
            if each.place == "gradients" and each.axis != "tp":
                assert each.collective == ("all_reduce" if zero == 0 else "reduce_scatter")
                found[each.axis] = found.get(each.axis, 0) + each.count * each.logical_bytes
            elif each.place == "parameters":
                assert each.collective == "all_gather"
                gathered[each.axis] = gathered.get(each.axis, 0) + each.count * each.logical_bytes
        assert found == wanted
        if zero < 3:
            once = {axis: size // times // software.gradient_bytes for axis, size in wanted.items() if zero}
            assert gathered == {axis: elements * software.parameter_bytes for axis, elements in once.items()}


def test_parameters_of_all_ranks_are_the_models() -> None:
    model = replace(SHAPE, layers=5, dense_layers=1, dense_width=8, shared_width=8, qkv_bias=True)
    whole = sum(n for _, n in stage_parameters(model, Setup(gpus=1), MEGATRON, 0))
    attention = (4 + 2 * 2) * 4 * 17 + 4 * 4 * 16
    layer = attention + 2 * 16
    moe = 8 * 16 + 3 * 8 * 8 * 16 + 3 * 8 * 16
    assert whole == 2 * 32 * 16 + 16 + 5 * layer + 3 * 8 * 16 + 4 * moe
    setup = Setup(gpus=8, tp=2, pp=2, ep=2, etp=2)
    stages = [stage_parameters(model, setup, MEGATRON, stage) for stage in range(2)]
    experts = sum(n for stage in stages for axis, n in stage if axis == "edp")
    assert experts * 4 == 4 * 3 * 8 * 8 * 16
    latent = replace(model, latent=LatentAttention(8, 4, 2, 2, 4), qkv_bias=False)
    both = [sum(n for _, n in stage_parameters(latent, Setup(gpus=2, tp=tp), COMMLAYER, 0)) for tp in (1, 2)]
    assert both[1] < both[0]


def test_messages_of_a_pipeline() -> None:
    """Every boundary is crossed once by each micro-batch in each direction."""
    model = replace(SHAPE, layers=8)
    job = Job(model=model, gpus=8, global_batch=16, sequence=16)
    for vpp in (1, 2):
        setup = Setup(gpus=8, pp=4, vpp=vpp, micro_batch=2)
        sent = [
            each
            for stage in range(4)
            for each in step_exchanges(job, setup, MEGATRON, stage=stage)
            if each.place == "boundary"
        ]
        assert {each.logical_bytes for each in sent} == {16 * 2 * 16 * BF16}
        assert sum(each.count for each in sent) == 2 * (4 * vpp - 1) * setup.micro_batches(job)


def test_capacity_and_imbalance() -> None:
    job = Job(model=SHAPE, gpus=4, global_batch=4, sequence=10, imbalance=1.3)
    setup = Setup(gpus=4, ep=4)
    assert dispatched_rows(job, setup) == 26  # 10 tokens of two choices
    assert dispatched_rows(job, Setup(gpus=4, etp=4)) == 20  # no rank has other experts than the others
    job = replace(job, imbalance=1.0)
    assert dispatched_rows(replace(job, capacity_factor=1.25), setup) == 8 * 4  # ceil(1.25 · 20 / 8)
    assert dispatched_rows(replace(job, capacity_factor=2.0), setup) == 8 * 5
    names = [each.name for each in layer_forward(replace(job, capacity_factor=2.0), setup, MEGATRON)]
    assert "counts" not in names  # rows are as many as all ranks know


def test_nobody_talks_to_himself() -> None:
    job = Job(model=SHAPE, gpus=1, global_batch=1, sequence=16)
    for software in (COMMLAYER, MEGATRON):
        assert whole_step(job, Setup(gpus=1), software) == ()


def test_what_cannot_be() -> None:
    job = Job(model=SHAPE, gpus=2, global_batch=2, sequence=16)
    with pytest.raises(UsageError, match="stage: expected one of 2, from 0, got 2"):
        step_exchanges(replace(job), Setup(gpus=2, pp=2), COMMLAYER, stage=2)
