"""Pipeline layouts: how they are written, what each rank then has, and which one is found to be the fastest that fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters, memory, parameters
from commlayer.scheduler.mapping.exports import export
from commlayer.scheduler.mapping.exports_megatron import megatron
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layout_balance import LayerTimes, balanced, least_slowest_us, owners
from commlayer.scheduler.mapping.pipeline_layout import Pipeline, canonical_layout, ended, parse_layout, written
from commlayer.scheduler.mapping.pipeline_schedule import (
    SCHEDULES,
    PipelineSchedule,
    chunks_of,
    in_flight_by_chunk,
    in_flight_chunks,
    unfit,
)
from commlayer.scheduler.mapping.search import search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON
from commlayer.scheduler.mapping.space import Space, setups

V3 = replace(catalog.load("deepseek-v3"), mtp_layers=1)

# How they are written


@pytest.mark.parametrize(
    ("layout", "counts", "modules"),
    [
        ("Ettt|(tt|)*29,m|L", [3, *[2] * 29, 0, 0], 30),  # the example of Megatron-LM's own help
        ("Et|(tt|)*30mL", [1, *[2] * 30, 0], 31),
        ("Et*4|(tttt|)*14tmL", [4, *[4] * 14, 1], 15),
        ("Et*3|(tt|)*4ttt|m|L", [3, 2, 2, 2, 2, 3, 0, 0], 6),
        (" E | t*2 | L ", [0, 2, 0], None),
    ],
)
def test_a_layout_is_read_as_megatron_reads_it(layout: str, counts: list[int], modules: int | None) -> None:
    chunks = parse_layout(layout)
    assert [chunk.layers for chunk in chunks] == counts
    assert [place for place, chunk in enumerate(chunks) if chunk.modules] == ([] if modules is None else [modules])
    assert parse_layout(written(chunks)) == chunks
    assert canonical_layout(written(chunks)) == written(chunks)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=40), st.integers(0, 2))
def test_what_is_written_is_read_again(counts: list[int], modules: int) -> None:
    chunks = ended(counts, modules)
    assert parse_layout(written(chunks)) == chunks


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("", "expected even, auto, or chunks with bars"),
        ("Etx|tL", "got 'x' in chunk 0"),
        ("Et||tL", "chunk 1 has nothing in it"),
        ("tE|tL", "in this order in chunk 0, got 'tE'"),
        ("tt|tL", "expected the embedding E at the front of the first chunk"),
        ("Et|EtL", "expected the embedding E at the front of the first chunk"),
        ("EtL|t", "expected the head L at the end of the last chunk"),
        ("Etm|tL", "no layer t behind the modules m"),
        ("Et|m|mL", r"all modules m in one chunk, got them in 1, 2"),
        ("Et*99999|L", "at most 4096 repetitions, got 99999"),
        ("Et(t*4000|)*4000L", "letters"),
    ],
)
def test_what_is_no_layout_is_refused(layout: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_layout(layout)


def test_a_layout_goes_with_its_mapping_and_its_model() -> None:
    with pytest.raises(UsageError, match=r"it has 3 chunks, but pp=2 with 1f1b makes 2"):
        Setup(gpus=8, pp=2, pipeline_layout="Et|t|L")
    assert Setup(gpus=8, pp=2, pipeline_layout="E t, t*2 | L").pipeline_layout == "Ettt|L"
    setup = Setup(gpus=64, pp=4, ep=16, pipeline_layout="Et*20|(t*20|)*2L")
    with pytest.raises(
        UsageError, match=r"it has 60 layers \(t\), the mapping 61.*the even one is 'Et\*16\|\(t\*16\|\)\*2t\*13mL'"
    ):
        parameters.check(V3, setup)
    with pytest.raises(UsageError, match=r"Estimator\.laid_out"):
        parameters.stages(V3, Pipeline(4, layout="auto"))


# What each rank has


def test_ranks_have_the_layers_and_the_ends_that_the_layout_gives_them() -> None:
    setup = Setup(gpus=256, pp=8, vpp=4, ep=32, pipeline_layout="Ettt|(tt|)*29m|L")
    assert [sum(parameters.layers_of(V3, setup, stage)) for stage in range(8)] == [9, 8, 8, 8, 8, 8, 7, 6]
    ends = [parameters.ends_at(V3, setup, stage) for stage in range(8)]
    assert [each.modules for each in ends] == [False] * 6 + [True, False]
    assert [each.head for each in ends] == [False] * 7 + [True]
    stages = parameters.stages(V3, setup.pipeline)
    assert sum(stage.alike for stage in stages) == 8
    assert sum(stage.alike * stage.layers for stage in stages) == 62
    elements = [
        sum(number for _, number in parameters.stage_parameters(V3, setup, MEGATRON, stage)) for stage in range(8)
    ]
    joint = replace(setup, pipeline_layout="Ettt|(tt|)*28t|t|mL")
    others = [
        sum(number for _, number in parameters.stage_parameters(V3, joint, MEGATRON, stage)) for stage in range(8)
    ]
    assert sum(elements) == sum(others)  # both have a copy of the embedding beside the module
    assert others[7] - elements[7] > V3.vocabulary * V3.hidden


@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 4), st.integers(1, 40))
def test_chunks_keep_together_what_their_rank_keeps(
    schedule: PipelineSchedule, pp: int, vpp: int, micro_batches: int
) -> None:
    if unfit(schedule, pp, vpp, micro_batches) or (vpp > 1 and micro_batches % pp):
        return
    for rank in range(pp):
        each = in_flight_by_chunk(schedule, pp, rank, micro_batches, vpp)
        assert len(each) == len(chunks_of(schedule, pp, rank, vpp))
        assert sum(each) == in_flight_chunks(schedule, pp, rank, micro_batches, vpp)


def test_dualpipe_keeps_most_in_the_chunks_at_the_front() -> None:
    """Both ends lie on one rank: sixteen micro-batches are in its first chunk, and one is in its last."""
    assert in_flight_by_chunk("dualpipe", 16, 0, 240, 1) == (16, 1)
    assert in_flight_by_chunk("dualpipe", 16, 15, 240, 1) == (1, 16)
    assert in_flight_by_chunk("dualpipev", 8, 0, 240, 1) == (16, 1)
    assert in_flight_by_chunk("1f1b", 4, 0, 240, 3) == (7, 4, 4)
    job = Job(model=V3, gpus=2048, global_batch=15360, sequence=4096)
    setup = Setup(gpus=2048, pp=16, ep=64, schedule="dualpipe", pipeline_layout="Et*5|(tttt|)*14mL")
    late = replace(setup, pipeline_layout="Ettt|(tttt|)*14ttmL")
    left, later = (memory.rooms(job, each, 0.0)[0] for each in (setup, late))
    assert later.left - left.left == pytest.approx(2 * 15 * left.kept)  # 15 micro-batches fewer keep two layers


def test_the_fullest_of_ranks_with_as_many_layers_is_found() -> None:
    """The last of them is, where their second chunks have more layers: DualPipe's V keeps most micro-batches there."""
    job = Job(model=replace(V3, layers=32, mtp_layers=0), gpus=64, global_batch=1024, sequence=4096)
    setup = Setup(gpus=64, pp=8, ep=8, schedule="dualpipev", pipeline_layout="Et|(t|)*7(ttt|)*7tttL")
    needed = [-room.left for room in memory.rooms(job, setup, 0.0)]
    assert needed.index(max(needed)) == 7
    assert memory.estimate(job, setup).total == max(needed)


# The fastest that fits


def slowest_us(
    counts: tuple[int, ...], kinds: list[bool], own: tuple[tuple[int, ...], ...], times: LayerTimes
) -> float:
    """The obvious way: layer by layer."""
    works, layers = [0.0] * len(counts), iter(kinds)
    for chunk, count in enumerate(counts):
        for _ in range(count):
            works[chunk] += times.sparse_us if next(layers) else times.dense_us
    works[-1] += times.head_us + times.modules_us
    return max(sum(works[chunk] for chunk in chunks) for chunks in own)


@given(
    st.integers(2, 9),
    st.sampled_from([("1f1b", 2, 1), ("1f1b", 4, 1), ("1f1b", 2, 2), ("dualpipe", 4, 1), ("dualpipev", 2, 1)]),
    st.floats(0.0, 4.0),
)
def test_the_balanced_layout_of_equal_layers_is_the_best_of_all(
    layers: int, pipeline: tuple[PipelineSchedule, int, int], head_us: float
) -> None:
    schedule, pp, vpp = pipeline
    own, times = owners(schedule, pp, vpp), LayerTimes(1.0, 0.5, head_us)
    kinds, num = [True] * layers, max(max(chunks) for chunks in own) + 1
    every = [
        counts
        for counts in itertools.product(range(layers + 1), repeat=num)
        if sum(counts) == layers and all(counts[:-1])
    ]
    found = balanced(tuple(kinds), 0, schedule, pp, vpp, times)
    if not every:
        assert found is None
        return
    assert found is not None
    best = min(slowest_us(counts, kinds, own, times) for counts in every)
    assert slowest_us(tuple(chunk.layers for chunk in found), kinds, own, times) == pytest.approx(best)
    assert least_slowest_us(layers, len(own), 1.0, head_us) <= best * (1 + 1e-9)
    if len(own) > 1 and vpp == 1 and schedule == "1f1b" and layers > 2 * pp + 8:
        assert least_slowest_us(layers, len(own), 1.0, head_us) == pytest.approx(best)


@given(st.integers(1, 60), st.integers(1, 9), st.floats(0.0, 5.0))
def test_the_least_of_the_slowest_is_that_of_whole_layers(layers: int, ranks: int, head_us: float) -> None:
    best = min(
        max(-(-(layers - last) // (ranks - 1)) if ranks > 1 else 0.0, last + head_us)
        for last in (range(layers + 1) if ranks > 1 else [layers])
    )
    assert least_slowest_us(layers, ranks, 1.0, head_us) == pytest.approx(best)


def test_layers_go_where_there_is_room() -> None:
    times = LayerTimes(1.0, 1.0, 2.0)
    assert balanced((True,) * 12, 0, "1f1b", 4, 1, times) == ended([4, 4, 3, 1], 0)
    assert balanced((True,) * 12, 0, "1f1b", 4, 1, times, (2, 3, 9, 9)) == ended([2, 3, 5, 2], 0)
    assert balanced((True,) * 12, 0, "1f1b", 4, 1, times, (2, 3, 3, 3)) is None
    assert balanced((True,) * 2, 0, "1f1b", 4, 1, times) is None
    # three layers at the front take a quarter of the time: two more go there, one after the other
    assert balanced((False,) * 3 + (True,) * 8, 0, "1f1b", 4, 1, LayerTimes(1.0, 0.25, 0.0)) == ended([5, 2, 2, 2], 0)


def test_the_planner_takes_another_layout_where_it_is_faster_or_the_even_one_does_not_fit() -> None:
    job = Job(model=replace(catalog.load("deepseek-v3"), layers=13), gpus=128, global_batch=512, sequence=4096)
    estimator = Estimator(job, clusters.load("h100-eos"), MEGATRON)
    setup = Setup(gpus=128, pp=4, ep=32, micro_batch=1, recompute="megascale", pipeline_layout="auto")
    even = replace(setup, pipeline_layout="even")
    found, is_fastest = estimator.laid_out(setup, 1e15)
    assert is_fastest
    assert found.pipeline_layout not in ("even", "auto")
    assert estimator.estimate(found).step_us < estimator.estimate(even).step_us
    assert estimator.estimate(setup).setup == estimator.laid_out(setup, estimator.memory_limit).setup
    limit = estimator.memory(found).total * 0.97
    squeezed, is_fastest = estimator.laid_out(setup, limit)
    assert not is_fastest
    assert estimator.memory(squeezed).total <= limit
    assert estimator.laid_out(setup, 1e9) == (even, False)  # nothing fits
    assert estimator.laid_out(replace(setup, pp=1, ep=64), 1e9).setup.pipeline_layout == "even"
    alone = estimator.laid_out(replace(setup, pp=2, vpp=7, ep=64), 1e15).setup.pipeline_layout
    assert alone == "Et|(t|)*12L"  # 14 chunks of 13 layers: the head has its own
    with pytest.raises(UsageError, match=r"13 layers do not fill pp=16"):
        estimator.laid_out(replace(setup, pp=16, ep=8), 1e15)


def test_a_search_has_one_layout_or_the_best_of_each_mapping() -> None:
    job = Job(model=replace(catalog.load("deepseek-v3"), layers=13), gpus=128, global_batch=512, sequence=4096)
    space = Space(pp=(4,), ep=(32,), tp=(1,), cp=(1,), etp=(1,), micro_batch=(1,), recompute=("megascale",))
    estimator = Estimator(job, clusters.load("h100-eos"), MEGATRON)
    spelt = "Etttt|(tttt|)*2tL"
    named = replace(space, pipeline_layout=spelt)
    assert {setup.pipeline.num_chunks for setup in setups(job, estimator.cluster, named)} == {4}
    assert {each.setup.pipeline_layout for each in search(job, estimator, named).ranked} == {spelt}
    with pytest.raises(UsageError, match=r"a layout of 5 chunks is for pipelines with pp · vpp .* = 5"):
        search(job, estimator, replace(space, pipeline_layout="Ettt|(ttt|)*3tL"))
    with pytest.raises(UsageError, match=r"it has 12 layers \(t\), the mapping 13"):
        search(job, estimator, replace(space, pipeline_layout="Ettt|(tttt|)*2tL"))
    even = search(job, estimator, replace(space, pipeline_layout="even")).best
    best = search(job, estimator, space).best
    assert best.step_us < even.step_us
    assert best.setup.pipeline_layout in str(best.setup)


def test_a_trainer_gets_the_layout_or_refuses_it() -> None:
    job = Job(model=V3, gpus=256, global_batch=1024, sequence=4096)
    setup = Setup(gpus=256, pp=8, vpp=4, ep=32, pipeline_layout="Et*3|(tt|)*29m|L")
    flags = megatron(job, setup)
    assert flags[flags.index("--pipeline-model-parallel-layout") + 1] == "Ettt|(tt|)*29m|L"
    plain = replace(job, model=catalog.load("mixtral-8x7b"))
    laid = Setup(gpus=256, pp=2, ep=8, pipeline_layout="Et*17|t*15L")
    for trainer in ("torchtitan", "deepspeed"):
        with pytest.raises(UsageError, match=r"Et\*17\|t\*15L: choose the pipeline layout even"):
            export(trainer, plain, laid)
