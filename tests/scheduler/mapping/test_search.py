"""Every valid setup, the best of them, and why; against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import GroupError, InternalError, UsageError
from commlayer.scheduler.mapping import catalog, clusters, memory, parameters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.explain import compare_estimates, explain, why_more_than_in_proportion
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layout_balance import LaidOut
from commlayer.scheduler.mapping.model import AttentionWindow, LatentAttention, ModelShape
from commlayer.scheduler.mapping.pipeline_schedule import SCHEDULES, PipelineSchedule
from commlayer.scheduler.mapping.recomputation import RECOMPUTE
from commlayer.scheduler.mapping.result import Memory, StepEstimate
from commlayer.scheduler.mapping.search import CLOSEST, MappingKind, renames, search, smallest_fit
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software, with_dispatcher
from commlayer.scheduler.mapping.space import Space, families, recompute_chains, setups, simplicity
from commlayer.scheduler.mapping.validity import assess, checked_rows

NODE = clusters.load("h100-eos").replace(name="four", domain=4)
SMALL = ModelShape(
    name="small",
    layers=6,
    hidden=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    experts=4,
    top_k=2,
    width=128,
    vocabulary=512,
    shared_width=64,
)
LATENT = replace(
    SMALL,
    name="latent",
    kv_heads=8,
    latent=LatentAttention(q_rank=64, kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32),
)


def job_of(gpus: int, *, model: ModelShape = SMALL, batch: int = 16, sequence: int = 256) -> Job:
    return Job(model=model, gpus=gpus, global_batch=batch, sequence=sequence)


class Fake:
    """Bounds and times drawn from a seed, such that no bound exceeds what it stands for."""

    software: Software = COMMLAYER

    def __init__(self, job: Job, cluster: Cluster, seed: int, *, coarse: bool = False, fits: float = 0.7) -> None:
        self.job, self.cluster, self.seed, self.coarse, self.fits = job, cluster, seed, coarse, fits
        self.memory_limit = 1.0
        self.estimated: list[Setup] = []
        self._known: dict[tuple[object, ...], float] = {}

    def _least(self, *key: object) -> float:
        return self._known[key] if key in self._known else self._known.setdefault(key, self._draw(*key))

    def _draw(self, *key: object) -> float:
        drawn = random.Random(f"{self.seed} {key}").random()
        return round(drawn * 4) / 4 if self.coarse else drawn  # coarse: many are equal

    def _times(self, setup: Setup) -> list[float]:
        """The bounds, level by level, and the step."""
        setup = replace(setup, pipeline_layout="even")
        family = replace(setup, recompute="none", exchange="all_to_all", zero=3)
        if setup.schedule == "1f1b":
            family = replace(family, vpp=1)
        least = replace(setup, recompute="none")
        times = [100 + self._least("family", family)]
        for level in (1, 2):
            times.append(times[-1] + self._least("dispatch", level, replace(family, exchange=setup.exchange)))
        for level in range(3, CLOSEST + 2):
            times.append(times[-1] + self._least(level, least))
        words = RECOMPUTE
        steps = words[1 : words.index(setup.recompute) + 1]
        more = sum(self._least("more", replace(setup, recompute=word)) for word in steps)
        if setup.zero == 3:  # recomputation may help: gathers hide behind it
            more = random.Random(f"{self.seed} zero {setup}").uniform(0, 0.1)
            return [*times[:3], *(time + more for time in times[3:])]  # the first three stand for the whole family
        return [time + more for time in times]

    def memory(self, setup: Setup) -> Memory:
        used = 0.5 if self._least("memory", replace(setup, pipeline_layout="even")) <= self.fits else 1.5
        return Memory(weights=used, gradients=0, optimizer=0, activations=0, buffers=0)

    def laid_out(self, setup: Setup, limit: float) -> LaidOut:
        return LaidOut(replace(setup, pipeline_layout="even"), True)

    def bound_us(self, setup: Setup, level: int) -> float:
        return self._times(setup)[level]

    def estimate(self, setup: Setup, *, detail: bool = True) -> StepEstimate:
        setup = replace(setup, pipeline_layout="even")
        self.estimated.append(setup)
        return estimate_of(self.job, setup, self._times(setup)[-1], memory=self.memory(setup), limit=self.memory_limit)


def estimate_of(
    job: Job,
    setup: Setup,
    step_us: float,
    *,
    parts: dict[str, float] | None = None,
    exposed: dict[str, float] | None = None,
    memory: Memory | None = None,
    limit: float = 80e9,
) -> StepEstimate:
    return StepEstimate(
        job=job,
        setup=setup,
        cluster="four",
        software="commlayer",
        step_us=step_us,
        mfu=0.4,
        tflops=400.0,
        memory=memory or Memory(weights=10e9, gradients=20e9, optimizer=5e9, activations=25e9, buffers=1e9),
        memory_limit=limit,
        parts=parts or {"experts": step_us},
        exposed_us=exposed or {},
        traffics=(),
        bubble=0.0,
        bottleneck="compute",
    )


# Space


def by_setup_itself(job: Job, cluster: Cluster, space: Space) -> set[Setup]:
    """Every combination of numbers up to the number of GPUs that Setup, the model and the batch accept."""
    degrees = range(1, job.gpus + 1)
    found = set()
    for tp, cp, pp, ep, etp, vpp, micro_batch in itertools.product(
        degrees, degrees, degrees, range(1, 5), degrees, range(1, 7), (1, 2, 4, 8)
    ):
        if (job.gpus % (tp * cp * pp) or job.gpus % (etp * ep * pp)) or (pp == 1 and vpp > 1):
            continue  # Setup refuses the first two as well (test_folded), but takes its time to say why
        for folded in (True, False):
            try:
                setup = Setup(
                    gpus=job.gpus, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, micro_batch=micro_batch, folded=folded
                )
                parameters.check(job.model, setup)
                batches = setup.micro_batches(job)
            except (GroupError, UsageError):
                continue
            if vpp > 1 and batches % pp:
                continue
            if job.sequence % (cp * tp * (2 if cp > 1 else 1)):
                continue
            if job.gpus > cluster.domain and (cluster.domain % tp or cluster.domain % etp):
                continue
            found.add(setup)
    return found


def ranks(setup: Setup) -> tuple[frozenset[int], ...]:
    """The groups of rank 0: two setups with the same are the same."""
    found = []
    for axis in ("ep", "edp", "etp_ep", "etp"):
        group = [0]
        for size, stride in setup.layout(axis):
            group = [rank + index * stride for index in range(size) for rank in group]
        found.append(frozenset(group))
    return tuple(found)


@pytest.mark.parametrize("gpus", [1, 4, 6, 8])
@pytest.mark.parametrize("model", [SMALL, LATENT])
def test_setups_are_those_that_setup_itself_accepts(gpus: int, model: ModelShape) -> None:
    job = job_of(gpus, model=model, batch=24, sequence=96)
    space = Space(recompute=("none",), exchange=("all_to_all",), vpp=tuple(range(1, 7)), pipeline_layout="even")
    got = list(setups(job, NODE, space))
    assert len(got) == len(set(got))
    expected = by_setup_itself(job, NODE, space)
    assert set(got) <= expected
    for setup in expected - set(got):  # left out only because the other kind has the same groups
        assert setup.folded
        assert ranks(setup) == ranks(replace(setup, folded=False))
        assert replace(setup, folded=False) in got
    for setup in got:
        assert setup == replace(setup)  # made without Setup's own checks, it passes them
        if setup.folded and setup.etp == setup.tp and replace(setup, folded=False) in expected:
            assert ranks(setup) != ranks(replace(setup, folded=False))


def test_words_are_combined_and_nothing_is_counted_twice() -> None:
    assert Space(recompute=("selective", "core_attn", "none")).recompute == ("core_attn", "none")
    job = job_of(8)
    plain = Space(recompute=("none",), exchange=("all_to_all",))
    every = replace(
        plain, recompute=("full", "none"), exchange=("all_to_all", "all_gather"), attention=("tensor", "ulysses")
    )
    one = list(setups(job, NODE, plain))
    expected = sum(2 * (2 if each.ep * each.etp > 1 else 1) * (2 if each.tp > 1 else 1) for each in one)
    got = list(setups(job, NODE, every))
    assert len(got) == len(set(got)) == expected
    assert sum(family.size for family in families(job, NODE, every)) == expected


def test_fp8_needs_a_gpu_that_has_it() -> None:
    job = job_of(8)
    space = Space(precision=("bf16", "fp8"))
    without = NODE.replace(gpu=replace(NODE.gpu, fp8_tflops=0.0))
    assert {setup.precision for setup in setups(job, NODE, space)} == {"bf16", "fp8"}
    assert {setup.precision for setup in setups(job, without, space)} == {"bf16"}


def test_a_space_is_open_to_what_the_software_recomputes() -> None:
    job = job_of(8)
    for software in (COMMLAYER, MEGATRON):
        tried = {setup.recompute for setup in setups(job, NODE, software=software)}
        assert tried == set(software.recomputes)
        result = search(job, Estimator(job, NODE, software), top=1)
        assert result.num_valid == sum(1 for _ in setups(job, NODE, software=software))
    assert {setup.recompute for setup in setups(job, NODE, Space(recompute=("full",)))} == {"full"}


def test_tensor_parallelism_leaves_the_domain_only_where_it_may() -> None:
    job = job_of(16)
    assert max(setup.tp for setup in setups(job, NODE)) == 4
    lifted = list(setups(job, NODE, Space(within_domain=False)))
    assert max(setup.tp for setup in lifted) == 8
    assert max(setup.etp for setup in lifted) == 16


def test_interleaved_chunks_are_nearly_equal_unless_named() -> None:
    job = job_of(2, batch=8)  # 6 layers, pp=2: of 2 · vpp chunks, 2 and 6 divide; 4 of 2 layers would lack 2
    assert {setup.vpp for setup in setups(job, NODE, Space(pp=(2,)))} == {1, 3}
    assert {setup.vpp for setup in setups(job, NODE, Space(pp=(2,), vpp=(1, 2, 3, 4)))} == {1, 2, 3}


def test_a_thousand_nodes_are_enumerated_quickly_enough_to_count() -> None:
    job = Job(model=catalog.load("mixtral-8x22b"), gpus=8192, global_batch=4096, sequence=4096)
    counted = sum(family.size for family in families(job, clusters.load("h100-eos"), Space()))
    assert counted > 100_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": ()}, "tp: expected whole numbers"),
        ({"pp": (0,)}, "pp: expected whole numbers"),
        ({"recompute": ("some",)}, "recompute: expected none, megascale, full, or some of core_attn"),
        ({"zero": (4,)}, "zero: expected some of 0, 1, 2, 3"),
        ({"folded": ()}, "folded: expected some of"),
    ],
)
def test_a_space_says_what_is_wrong(change: dict[str, tuple[object, ...]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Space(**change)  # type: ignore[arg-type]


# Search


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
    fits=st.sampled_from([0.02, 0.5, 1.0]),
    gpus=st.sampled_from([2, 4, 8]),
)
def test_the_search_finds_what_brute_force_finds(seed: int, coarse: bool, fits: float, gpus: int) -> None:
    job = job_of(gpus)
    space = Space(micro_batch=(1, 2), zero=(1, 3))
    fake = Fake(job, NODE, seed, coarse=coarse, fits=fits)
    every = [fake.estimate(setup) for setup in setups(job, NODE, space) if fake.memory(setup).total <= 1]
    every.sort(key=lambda found: (found.step_us, simplicity(found.setup)))
    fake.estimated.clear()
    if not every:
        return
    result = search(job, fake, space, top=5)
    assert [found.setup for found in result.ranked] == [found.setup for found in every[:5]]
    for folded, best in ((True, result.best_folded), (False, result.best_unfolded)):
        expected = next((found.setup for found in every if found.setup.folded is folded), None)
        assert (best and best.setup) == expected
    assert result.num_valid == sum(1 for _ in setups(job, NODE, space))
    assert result.num_estimated <= len(every)
    assert len(set(fake.estimated)) == result.num_estimated
    assert result.num_fitting <= result.num_checked <= result.num_valid


def test_the_search_estimates_few_of_many() -> None:
    job = job_of(8)
    fake = Fake(job, NODE, seed=1)
    result = search(job, fake, top=3)
    assert result.num_valid > 1000
    assert result.num_estimated < result.num_valid / 10


class Flat(Fake):
    def _times(self, setup: Setup) -> list[float]:
        return [1.0] * (CLOSEST + 2)


def test_distinct_mappings_do_not_rename_an_axis_of_each_other() -> None:
    job = job_of(8)
    few = Space(tp=(1,), pp=(1,), etp=(1,), recompute=("none",), exchange=("all_to_all",))
    every = search(job, Flat(job, NODE, seed=0, fits=1.0), few, top=40)
    result = search(job, Flat(job, NODE, seed=0, fits=1.0), few, top=6, distinct=True)
    assert len(result.ranked) == 6
    for one, other in itertools.combinations(result.ranked, 2):
        assert not renames(one, other)
    known = [setup for same in result.variants.values() for setup in same]
    assert known
    assert set(known) <= {each.setup for each in every.ranked}
    assert not set(known) & {each.setup for each in result.ranked}


def test_what_only_renames_an_axis() -> None:
    job = job_of(8)
    one = estimate_of(job, Setup(gpus=8, cp=2, ep=2, micro_batch=2), 1000.0)
    same = (
        replace(one.setup, folded=False),
        replace(one.setup, cp=4, micro_batch=4),
        replace(one.setup, cp=1, micro_batch=1),
    )
    assert all(renames(one, estimate_of(job, setup, 1005.0)) for setup in same)
    assert not renames(one, estimate_of(job, same[0], 1020.0))  # not of the same time
    others = (replace(one.setup, cp=4), replace(one.setup, micro_batch=4), replace(one.setup, tp=2, cp=1))
    assert not any(renames(one, estimate_of(job, setup, 1000.0)) for setup in others)


def test_a_margin_of_the_memory_stays_free() -> None:
    job = job_of(4)
    result = search(job, Flat(job, NODE, seed=0, fits=1.0), margin=0.5)  # each takes half of the limit
    assert result.margin == 0.5
    with pytest.raises(UsageError, match="fits in no mapping"):
        search(job, Flat(job, NODE, seed=0, fits=1.0), margin=0.51)
    with pytest.raises(UsageError, match="margin: expected a part"):
        search(job, Flat(job, NODE, seed=0, fits=1.0), margin=1.0)


def test_the_best_is_equal_to_those_whose_intervals_meet_its_own() -> None:
    job = job_of(4)
    close = replace(assess(checked_rows()[0].kind), low=-0.05, high=0.05)
    ranked = [
        replace(estimate_of(job, Setup(gpus=4, ep=ep), us), validity=close)
        for ep, us in ((1, 1000.0), (2, 1050.0), (4, 1200.0))
    ]
    result = replace(search(job, Flat(job, NODE, seed=0, fits=1.0)), ranked=tuple(ranked))
    result = replace(result, kinds={})
    assert result.equal == (1, 2)
    assert any(
        line.startswith("Within what is known number 1 is no faster than number 2 of these 3")
        for line in explain(result)
    )
    kinds = {MappingKind(1, False): ranked[0], MappingKind(2, False): ranked[2]}
    assert replace(result, kinds=kinds).equal == (1, 3)  # the fastest of each kind is shown first


def test_a_bound_above_its_estimate_is_our_own_bug() -> None:
    class Wrong(Fake):
        def bound_us(self, setup: Setup, level: int) -> float:
            return super().bound_us(setup, level) + (50 if level == CLOSEST else 0)

    job = job_of(4)
    with pytest.raises(InternalError, match="above its estimate"):
        search(job, Wrong(job, NODE, seed=3))


def test_equal_times_go_to_the_simpler_setup() -> None:
    job = job_of(4)
    result = search(job, Flat(job, NODE, seed=0, fits=1.0), top=3)
    assert result.best.setup == Setup(gpus=4, folded=False)
    assert [simplicity(found.setup) for found in result.ranked] == sorted(
        simplicity(found.setup) for found in result.ranked
    )


def test_progress_ends_where_it_said() -> None:
    seen: list[tuple[int, int]] = []
    job = job_of(4)
    search(job, Fake(job, NODE, seed=5), top=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_search_refuses_what_it_cannot_do() -> None:
    job = job_of(4)
    with pytest.raises(UsageError, match="top: expected"):
        search(job, Fake(job, NODE, seed=0), top=0)
    with pytest.raises(UsageError, match="another job"):
        search(job_of(8), Fake(job, NODE, seed=0))
    with pytest.raises(UsageError, match="no mapping of small onto 4 GPUs of four is valid"):
        search(job, Fake(job, NODE, seed=0), Space(tp=(3,)))


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (Space(precision=("fp8",)), "A100 SXM 80GB has no FP8 units; use bf16"),
        (Space(tp=(3, 5)), "tp 3 or 5: expected a divisor of the heads of small, 8"),
        (Space(cp=(3,)), "cp 3: expected a divisor of the sequence, 256"),
        (Space(ep=(16,)), "ep 16: expected a divisor of the experts of small, 4"),
        (Space(etp=(3,)), "etp 3: expected a divisor of the width of an expert of small, 128"),
        (Space(pp=(3,)), "pp 3: expected a divisor of the GPUs, 4"),
        (Space(tp=(8,)), "tp 8: expected a divisor of the GPUs, 4"),
        (
            Space(pp=(8,)),
            "pp 8: expected a divisor of the GPUs, 4; pp 8: expected at most as many stages as layers of small, 6",
        ),
        (Space(schedule=("dualpipe",), recompute=("full",)), "dualpipe computes no layer again as a whole"),
        (
            Space(schedule=("dualpipe",), pp=(2,), zero=(2, 3)),
            "sums gradients once a step in a pipeline: allow zero 0 or 1",
        ),
        (Space(schedule=("1f1b-overlap",), pp=(2, 4), vpp=(1,)), "1f1b-overlap: expected vpp of at least 2 with pp=2"),
        (Space(schedule=("dualpipe",), pp=(1,)), "schedule dualpipe: expected a pipeline, got pp=1"),
        (Space(recompute=("mla_up_proj", "mlp")), "recompute mla_up_proj or mlp: mla_up_proj is of latent attention"),
        (Space(tp=(4,), cp=(4,)), "the data-parallel degree must divide the batch"),
    ],
)
def test_nothing_is_valid_and_why(space: Space, reason: str) -> None:
    job, cluster = job_of(4), NODE.replace(gpu=clusters.load("a100").gpu)
    with pytest.raises(UsageError) as refused:
        search(job, Fake(job, cluster, seed=0), space)
    assert reason in str(refused.value)


def test_tp_beyond_a_domain_and_cp_of_linear_attention_are_the_reason() -> None:
    with pytest.raises(UsageError, match="tp 8: expected a divisor of the GPUs on NVLink, 4, or a space that leaves"):
        search(job_of(8), Fake(job_of(8), NODE, seed=0), Space(tp=(8,)))
    job = Job(model=catalog.load("qwen3-next-80b-a3b"), gpus=8, global_batch=8, sequence=4096)
    with pytest.raises(UsageError, match="has layers of linear attention, which are planned without it: take cp 1"):
        search(job, Fake(job, NODE, seed=0), Space(cp=(2,)))


def test_ways_of_recomputation_stand_in_chains_of_which_each_takes_longer() -> None:
    offered = ("full", "moe_act+layernorm", "none")
    assert recompute_chains(offered) == [("none", "moe_act+layernorm", "full")]
    every = ("none", "moe_act", "mlp", "moe_act+layernorm", "megascale", "full")
    assert recompute_chains(every) == [("none", "moe_act+layernorm", "full"), ("mlp",), ("moe_act",), ("megascale",)]


@pytest.mark.parametrize(
    ("software", "schedule", "more"),
    [
        (COMMLAYER, ("1f1b",), {}),
        (MEGATRON, ("1f1b",), {}),
        (MEGATRON, ("1f1b",), {"dense_layers": 2, "dense_at": (0, 2), "window": AttentionWindow(512, 2)}),
        (with_dispatcher(MEGATRON, "deepep"), SCHEDULES[::-1], {}),
    ],
)
def test_the_real_estimator_is_searched_as_by_brute_force(
    software: Software, schedule: tuple[PipelineSchedule, ...], more: dict[str, Any]
) -> None:
    model = replace(catalog.load("mixtral-8x7b"), layers=4, dense_width=14336, **more)
    job = Job(model=model, gpus=8, global_batch=16 * len(schedule), sequence=2048)
    space = Space(
        micro_batch=(2,),
        vpp=(1, 2),
        recompute=("none", "moe_act+layernorm", "full"),
        tp=(1, 2),
        cp=(1, 2),
        ep=(4,),
        etp=(1,),
        pp=(1, 2),
        zero=(1, 3),
        schedule=schedule,
    )
    cluster = clusters.load("h100-eos").replace(domain=4)
    estimator = Estimator(job, cluster, software)
    every = []
    for setup in setups(job, cluster, space):
        if estimator.memory(setup).total <= estimator.memory_limit:
            found = estimator.estimate(setup, detail=False)
            for level in range(CLOSEST + 1):
                assert estimator.bound_us(setup, level) <= found.step_us * (1 + 1e-9), (level, setup)
            less = replace(setup, recompute="none")
            if setup.zero < 3 and setup.recompute == "full":
                modules = estimator.estimate(replace(setup, recompute="moe_act+layernorm"), detail=False)
                assert modules.step_us <= found.step_us
            if setup.zero < 3 and less != setup:
                assert estimator.estimate(less, detail=False).step_us <= found.step_us
            most = 3 if setup.schedule == "1f1b" or setup.pp == 1 else 1
            lead = replace(less, exchange="all_to_all", zero=most)
            assert estimator.bound_us(lead, 0) <= found.step_us * (1 + 1e-9), setup
            for level in (1, 2):
                of_family = estimator.bound_us(replace(lead, exchange=setup.exchange), level)
                assert of_family <= found.step_us * (1 + 1e-9), (level, setup)
            if setup.schedule == "1f1b" and setup.pp > 1:
                interleaved = replace(lead, exchange=setup.exchange, vpp=2)
                for level in (0, 1):
                    assert estimator.bound_us(interleaved, level) <= found.step_us * (1 + 1e-9), (level, setup)
            every.append(found)
    assert {found.setup.schedule for found in every} == set(schedule)
    every.sort(key=lambda found: (found.step_us, simplicity(found.setup)))
    result = search(job, estimator, space, top=5)
    assert [found.step_us for found in result.ranked] == pytest.approx([found.step_us for found in every[:5]])
    for folded, best in ((True, result.best_folded), (False, result.best_unfolded)):
        expected = next((found.step_us for found in every if found.setup.folded is folded), None)
        assert (best and best.step_us) == pytest.approx(expected)


# What fits


class Counted(Fake):
    """With the memory that is really needed."""

    def memory(self, setup: Setup) -> Memory:
        return memory.estimate(self.job, setup, software=self.software)


def test_what_fits_nowhere_says_how_many_gpus_would_do() -> None:
    job = Job(model=catalog.load("mixtral-8x22b"), gpus=8, global_batch=256, sequence=4096)
    cluster = clusters.load("h100-eos")
    fake = Counted(job, cluster, seed=0)
    fake.memory_limit = 75e9
    with pytest.raises(
        UsageError, match=r"mixtral-8x22b fits in no mapping on 8 GPUs of h100-eos: .* GPUs would do: TP"
    ) as error:
        search(job, fake, Space(vpp=(1,), micro_batch=(1,)))
    fit = smallest_fit(job, cluster, memory_limit=75e9)
    assert fit is not None
    assert f"{fit.gpus} GPUs would do" in str(error.value)
    assert fit.memory.total <= 75e9
    larger = replace(job, gpus=fit.gpus)
    assert memory.estimate(larger, fit.setup, software=COMMLAYER) == fit.memory
    fewer = replace(job, gpus=fit.gpus // 2)
    assert all(
        memory.estimate(fewer, setup, software=COMMLAYER).total > 75e9
        for setup in setups(fewer, cluster, Space(micro_batch=(1,), pipeline_layout="even"))
    )


def test_the_smallest_fit_is_the_same_with_every_choice_left_open() -> None:
    """A mapping that smallest_fit leaves out never takes less memory."""
    job = Job(model=replace(catalog.load("mixtral-8x7b"), layers=8), gpus=1, global_batch=32, sequence=4096)
    cluster = clusters.load("h100-eos")
    fit = smallest_fit(job, cluster, memory_limit=30e9)
    assert fit is not None
    asked = replace(job, gpus=fit.gpus)
    even = Space(pipeline_layout="even")
    least = min(memory.estimate(asked, setup, software=COMMLAYER).total for setup in setups(asked, cluster, even))
    assert fit.memory.total == pytest.approx(least)


def test_the_smallest_fit_is_by_the_modules_that_keep_least() -> None:
    job = Job(model=replace(catalog.load("mixtral-8x7b"), layers=8), gpus=1, global_batch=32, sequence=4096)
    space = Space(recompute=("moe", "moe_act"), micro_batch=(1,), pipeline_layout="even")
    cluster = clusters.load("h100-eos")
    fit = smallest_fit(job, cluster, space, memory_limit=30e9)
    assert fit is not None
    asked = replace(job, gpus=fit.gpus)
    least = min(memory.estimate(asked, setup, software=COMMLAYER).total for setup in setups(asked, cluster, space))
    assert fit.setup.recompute == "moe"
    assert fit.memory.total == pytest.approx(least)


def test_some_models_fit_nowhere() -> None:
    job = Job(model=catalog.load("deepseek-v3"), gpus=8, global_batch=8, sequence=4096)
    assert smallest_fit(job, clusters.load("h100-eos"), Space(pp=(1,), ep=(1,)), memory_limit=1e9, most_gpus=64) is None


# Why


def test_an_explanation_names_what_saves_and_what_costs() -> None:
    job = job_of(8)
    fast = estimate_of(
        job,
        Setup(gpus=8, tp=2),
        100_000.0,
        parts={"experts": 60_000.0, "tp": 10_000.0, "dispatch": 30_000.0},
        exposed={"tp": 10_000.0, "ep": 30_000.0},
    )
    slow = estimate_of(
        job, Setup(gpus=8, tp=4), 125_000.0, parts={"experts": 60_000.0, "tp": 45_000.0, "dispatch": 20_000.0}
    )
    said = compare_estimates(fast, slow)
    assert (
        "20.0% (25 ms) faster: with TP2 instead of TP4 a step spends less: 35 ms on tp exchanges; and more: 10 ms on sending"
        in said
    )
    result = replace(search(job, Fake(job, NODE, seed=0)), ranked=(fast, slow), best_unfolded=None, best_folded=fast)
    lines = explain(result)
    assert any("No unfolded mapping" in line for line in lines)
    assert any("40 ms of communication (40.0%) is hidden by nothing: ep 30 ms and tp 10 ms" in line for line in lines)
    assert any("61.0 of 80.0 GB in use (activations 25.0, gradients 20.0" in line for line in lines)


@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_every_result_can_be_explained(seed: int) -> None:
    job = job_of(4)
    lines = explain(search(job, Fake(job, NODE, seed, coarse=True), top=2))
    assert len(lines) == 5
    assert all(line.endswith(".") for line in lines)


def test_who_asks_for_the_fastest_alone_is_not_told_that_nothing_else_fits() -> None:
    job = job_of(4)
    alone = search(job, Fake(job, NODE, seed=0), top=1)
    assert alone.num_valid > 1
    assert "Of a runner-up nothing is known: only the fastest was asked for." in explain(alone)
    assert "There is no runner-up: nothing else fits." in explain(replace(alone, top=2))


def test_equal_setups_are_said_to_be_equal() -> None:
    job = job_of(4)
    one, other = (estimate_of(job, Setup(gpus=4, micro_batch=size), 100.0) for size in (1, 2))
    assert (
        "it is as fast, and simpler: micro-batches of 1 instead of 2; no part of the step differs"
        in compare_estimates(one, other)
    )


def test_the_first_answers_are_of_different_kinds() -> None:
    job = job_of(8)
    estimator = Fake(job, NODE, seed=11)
    result = search(job, estimator, top=4)
    every = sorted((estimator.estimate(setup) for setup in setups(job, NODE)), key=lambda each: each.step_us)
    fitting = [each for each in every if each.fits]

    def kind(setup: Setup) -> tuple[int, bool]:
        return setup.pp, len(NODE.nodes_of(setup.layout("etp_ep"), setup.gpus)) > 1

    fastest: dict[tuple[int, bool], StepEstimate] = {}
    for each in fitting:
        fastest.setdefault(kind(each.setup), each)
    assert [tuple(one) for one in result.kinds] == list(fastest)[:3]
    assert [each.step_us for each in result.kinds.values()] == [each.step_us for each in fastest.values()][:3]
    assert [kind(each.setup) for each in result.shown[:3]] == list(fastest)[:3]
    assert len(result.shown) == 4
    assert explain(result)[1].startswith(f"Against the best with {list(result.kinds)[1]}, ")


def test_a_comparison_is_of_the_whole_step() -> None:
    job = job_of(8)
    parts, slower = {"head": 80_000.0, "experts": 20_000.0}, {"experts": 100_001.0}
    mean = {"experts": 60_000.0, "head": 40_000.0}, {"experts": 60_000.0, "head": 40_001.0}
    fast, slow = (
        replace(estimate_of(job, Setup(gpus=8, tp=tp), sum(own.values()), parts=own), mean_parts=whole)
        for tp, own, whole in ((2, parts, mean[0]), (4, slower, mean[1]))
    )
    assert "it is as fast to 0.1%: TP2 instead of TP4; no part of the step differs by 0.1%" in compare_estimates(
        fast, slow
    )


def test_more_gpus_that_are_more_than_in_proportion_faster_say_why() -> None:
    few = estimate_of(job_of(8), Setup(gpus=8, recompute="full"), 100_000.0, parts={"experts": 9e4, "recompute": 1e4})
    many = estimate_of(job_of(16), Setup(gpus=16), 45_000.0, parts={"experts": 45_000.0})
    said = why_more_than_in_proportion(few, many)
    assert said.startswith("more than the 2 times that the GPUs are, as a token takes less of a GPU's time: ")
    assert "µs on recomputation, with none instead of full recomputation" in said
    assert not why_more_than_in_proportion(few, replace(many, step_us=50_000.0))
