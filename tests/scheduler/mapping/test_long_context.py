"""Experts and context from 4K to 1M tokens: MoNTA's two expansions, and folding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters, memory
from commlayer.scheduler.mapping.expansion import (
    SEQUENCES,
    WAYS,
    cp_by_memory,
    cp_by_tokens,
    expansion,
    network_nodes,
    recommend,
)
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER

MIXTRAL = catalog.load("mixtral-8x22b")
EOS = clusters.load("h100-eos")


def test_the_paper_expands_horizontally_up_to_256k_and_vertically_from_there() -> None:
    """MoNTA, Cluster Expansion: horizontal for sequences "larger than 32K but smaller than 256K", vertical from cp ≥ ep = 8."""
    found = expansion(MIXTRAL, EOS, ep=8)
    assert tuple(row.sequence for row in found.rows) == SEQUENCES
    assert (SEQUENCES[0], SEQUENCES[-1]) == (4096, 1024 * 1024)
    by_rule = {row.sequence // 1024: row.by_rule for row in found.rows}
    assert [by_rule[k] for k in (64, 128)] == ["horizontal"] * 2
    assert [by_rule[k] for k in (256, 512, 1024)] == ["vertical"] * 3
    assert found.switch_at == 256 * 1024
    below = [row for row in found.rows if row.sequence <= 32 * 1024]
    for row in below:  # one node has the whole sequence: there is nothing to expand
        assert row.cp == 1
        assert row.layout("horizontal").network_nodes == row.layout("vertical").network_nodes == 8


def test_networks_are_as_large_as_the_paper_says() -> None:
    """cp · ep and max(cp, ep), in nodes of eight GPUs with tp = 8."""
    found = expansion(MIXTRAL, EOS, ep=8)
    sizes = {row.sequence // 1024: tuple(row.layout(way).network_nodes for way in WAYS) for row in found.rows}
    assert sizes[64] == (16, 8, 2)
    assert sizes[128] == (32, 8, 4)
    assert sizes[256] == (64, 8, 8)
    assert sizes[1024] == (256, 32, 32)


@given(
    cp=st.integers(0, 6).map(lambda n: 2**n), ep=st.integers(0, 6).map(lambda n: 2**n), tp=st.sampled_from([1, 2, 4, 8])
)
def test_no_way_needs_a_larger_network_than_horizontal(cp: int, ep: int, tp: int) -> None:
    wide, narrow, folded = (network_nodes(way, tp=tp, cp=cp, ep=ep, domain=8) for way in WAYS)
    assert folded <= narrow <= wide
    if tp == 8:
        assert (wide, narrow) == (cp * ep, max(cp, ep))


@pytest.mark.parametrize(("cp", "ep", "domain"), [(2, 8, 8), (4, 8, 8), (8, 8, 8), (32, 8, 8), (4, 16, 8), (4, 8, 72)])
def test_the_network_is_what_the_groups_of_the_setups_span(cp: int, ep: int, domain: int) -> None:
    """Nodes of the cp and ep groups together, from the ranks themselves."""
    tp = 8
    cluster = EOS.replace(domain=domain)
    for way in WAYS:
        setup = Setup(
            gpus=tp * cp * ep, tp=tp, cp=cp, ep=ep, etp=1 if way == "folded" else tp, folded=way != "horizontal"
        )
        reached = {0}
        for axis in ("tp", "cp", "ep"):
            for size, stride in setup.layout(axis):
                reached = (
                    {rank + index * stride for rank in reached for index in range(size)}
                    if way == "horizontal"
                    else (reached | {index * stride for index in range(size)})
                )
        if way != "horizontal":  # ep lies along cp: what is reached are the nodes of the longer of the two
            reached = {rank - rank % tp + each for rank in reached for each in range(tp)}
        nodes = {rank // cluster.domain for rank in reached}
        assert network_nodes(way, tp=tp, cp=cp, ep=ep, domain=domain) == len(nodes)


def test_a_small_network_forces_vertical() -> None:
    assert recommend(tp=8, cp=4, ep=8, domain=8)[0] == "horizontal"
    way, reason = recommend(tp=8, cp=4, ep=8, domain=8, joined_nodes=16)
    assert way == "vertical"
    assert "needs a network of 32 nodes, and it joins 16" in reason
    found = expansion(MIXTRAL, EOS, ep=8, joined_nodes=16)
    assert {row.by_rule for row in found.rows if row.sequence >= 128 * 1024} == {"vertical"}


@given(sequence=st.integers(1, 2**22), each=st.integers(1, 2**17))
def test_cp_by_tokens_is_the_least_power_of_two(sequence: int, each: int) -> None:
    cp = cp_by_tokens(sequence, each)
    assert cp & (cp - 1) == 0
    assert cp * each >= sequence
    assert cp == 1 or cp // 2 * each < sequence


def test_cp_by_memory_is_the_least_that_fits() -> None:
    limit = EOS.gpu.memory_bytes * 0.94
    given_ = {"tp": 8, "ep": 8, "pp": 8, "recompute": "full", "memory_limit": limit}
    needed = [cp_by_memory(MIXTRAL, sequence, **given_) for sequence in SEQUENCES]  # type: ignore[arg-type]
    assert needed == sorted(needed)
    assert needed[0] == 1
    assert needed[-1] > 1
    for sequence, cp in zip(SEQUENCES, needed, strict=True):
        for degree in {cp, max(1, cp // 2)}:
            setup = Setup(gpus=512 * degree, tp=8, cp=degree, pp=8, ep=8, etp=8, recompute="full", folded=False)
            job = Job(model=MIXTRAL, gpus=setup.gpus, global_batch=64, sequence=sequence)
            assert (memory.estimate(job, setup, software=COMMLAYER).total <= limit) == (degree == cp)


def test_cp_follows_from_memory_where_tokens_are_not_given() -> None:
    limit = EOS.gpu.memory_bytes * 0.94
    found = expansion(MIXTRAL, EOS, ep=8, pp=8, tokens_per_rank=None, memory_limit=limit, recompute="full")
    expected = [
        cp_by_memory(MIXTRAL, sequence, tp=8, ep=8, pp=8, recompute="full", memory_limit=limit)
        for sequence in SEQUENCES
    ]
    assert [row.cp for row in found.rows] == expected
    with pytest.raises(UsageError, match="fits with no cp"):
        expansion(MIXTRAL, EOS, ep=8, tokens_per_rank=None, memory_limit=5e9)


def test_all_ways_run_the_same_job_and_folding_keeps_experts_in_the_node() -> None:
    sequences = (64 * 1024, 256 * 1024)
    found = expansion(MIXTRAL, EOS, ep=8, pp=8, sequences=sequences, recompute="full", make=Estimator)
    for row in found.rows:
        estimates = [layout.estimate for layout in row.layouts]
        assert all(estimates), [layout.note for layout in row.layouts]
        steps = {layout.way: layout.estimate.step_us for layout in row.layouts if layout.estimate}
        assert row.fastest == min(steps, key=lambda way: steps[way])
        assert {layout.setup.gpus for layout in row.layouts} == {row.job.gpus}
        assert all(layout.gpus <= row.job.gpus for layout in row.layouts)
        reach = {layout.way: EOS.nodes_of(layout.setup.layout("ep")) for layout in row.layouts}
        assert len(reach["folded"]) == 1
        assert len(reach["horizontal"]) == len(reach["vertical"]) == 8
        assert row.fastest == "folded"  # experts' tokens stay on NVLink


def test_what_does_not_fit_says_so() -> None:
    found = expansion(MIXTRAL, EOS, ep=8, sequences=(64 * 1024,), recompute="none", make=Estimator)
    assert found.rows[0].fastest is None
    assert all("does not fit: " in layout.note for layout in found.rows[0].layouts)
    odd = expansion(replace(MIXTRAL, experts=9), EOS, ep=8, sequences=(64 * 1024,), make=Estimator)
    assert all("ep=8: expected a divisor" in layout.note for layout in odd.rows[0].layouts)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"sequences": ()}, "at least one sequence"),
        ({"sequences": (0,)}, r"sequences\[0\]: expected"),
        ({"tokens_per_rank": None}, "memory_limit from which cp follows"),
        ({"ep": 0}, "ep: expected"),
    ],
)
def test_bad_input_is_named(given_: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        expansion(MIXTRAL, EOS, **{"ep": 8, **given_})  # type: ignore[arg-type]
