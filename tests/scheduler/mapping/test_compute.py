"""Compute times: a roofline with whole tiles, and measured machines."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping import compute as module
from commlayer.scheduler.mapping.cluster import Gpu
from commlayer.scheduler.mapping.compute import DEFAULT_FACTOR, GpuCompute, MeasuredCompute, efficiency_for
from commlayer.scheduler.mapping.hardware import GPUS

H100 = GpuCompute(GPUS["h100"])
FEW = settings(max_examples=60)
dims = st.integers(1, 1 << 15)


def tflops(rows: int, inner: int, columns: int, us: float) -> float:
    return 2 * rows * inner * columns / us / 1e6


@pytest.mark.parametrize(
    ("gpu", "precision", "shape", "published"),
    [  # ml-engineering's maximum achievable matmul FLOPS, at larger shapes, where no wave is left half empty
        ("h100", "bf16", (132 * 128, 16384, 16384), 794.5),
        ("h100", "fp8", (132 * 128, 16384, 16384), 1402.6),
        ("a100", "bf16", (108 * 128, 16384, 16384), 271.2),
        ("b200", "bf16", (148 * 128, 16384, 16384), 1745),
        ("gb200", "fp8", (148 * 128, 16384, 16384), 3615.6),
    ],
)
def test_large_products_reach_what_is_published(
    gpu: str, precision: str, shape: tuple[int, int, int], published: float
) -> None:
    assert tflops(*shape, GpuCompute(GPUS[gpu]).gemm_us(*shape, precision)) == pytest.approx(published, rel=0.01)


@FEW
@given(dims, dims, dims, st.integers(1, 256), st.sampled_from(["bf16", "fp8"]), st.integers(0, 3))
def test_a_larger_product_never_takes_less_time(
    rows: int, inner: int, columns: int, groups: int, precision: str, grown: int
) -> None:
    sizes = [rows, inner, columns, groups]
    sizes[grown] *= 2
    larger = H100.gemm_us(sizes[0], sizes[1], sizes[2], precision, sizes[3])
    assert H100.gemm_us(rows, inner, columns, precision, groups) <= larger


@FEW
@given(dims, dims, dims, st.integers(1, 64))
def test_nothing_is_faster_than_the_peak_or_the_memory(rows: int, inner: int, columns: int, groups: int) -> None:
    us = H100.gemm_us(rows, inner, columns, groups=groups)
    moved = 2 * groups * (rows * inner + inner * columns + rows * columns)
    assert us > groups * 2 * rows * inner * columns / (H100.gpu.bf16_tflops * 1e6)
    assert us > moved / (H100.gpu.memory_gbps * 1e3)


def test_small_experts_lose_to_large_ones() -> None:
    # 64 experts of 64 rows each against 8 of 512: the same FLOPs, but half of each tile is empty.
    fine, coarse = H100.gemm_us(64, 4096, 4096, groups=64), H100.gemm_us(512, 4096, 4096, groups=8)
    assert fine > 1.5 * coarse
    assert H100.gemm_us(1, 4096, 4096) == H100.gemm_us(100, 4096, 4096) < H100.gemm_us(129, 4096, 14336)


def test_few_rows_are_bound_by_reading_the_weights() -> None:
    us = H100.gemm_us(16, 8192, 8192 * 8)
    weights_us = 2 * 8192 * 8192 * 8 / (3350e3 * H100.gpu.memory)
    assert us == pytest.approx(weights_us, rel=0.02)


def test_the_factor_multiplies_rates_of_products_and_attention_only() -> None:
    half = GpuCompute(GPUS["h100"], 0.5)
    launch = H100.gpu.launch_us
    assert half.gemm_us(8192, 8192, 8192) - launch == pytest.approx(2 * (H100.gemm_us(8192, 8192, 8192) - launch))
    assert half.attention_us(1e12) - launch == pytest.approx(2 * (H100.attention_us(1e12) - launch))
    assert half.memory_us(1e9) == H100.memory_us(1e9)
    assert half.gemm_us(16, 8192, 8192 * 8) == H100.gemm_us(16, 8192, 8192 * 8)  # bound by memory
    assert DEFAULT_FACTOR == 1.0


def test_attention_reaches_what_is_published() -> None:
    # FlashAttention-3, figures 5 and 6: about 600 and 500 TFLOP/s without a mask, a tenth less with one.
    assert 1e12 / H100.attention_us(1e12) / 1e6 == pytest.approx(0.57 * 989.5, rel=0.01)
    assert 1e12 / H100.attention_us(1e12, backward=True) / 1e6 == pytest.approx(0.47 * 989.5, rel=0.01)
    assert H100.attention_us(1e12, "fp8") == H100.attention_us(1e12)


def test_nothing_takes_no_time() -> None:
    assert H100.gemm_us(0, 10, 10) == H100.attention_us(0) == H100.memory_us(0) == 0.0


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="precision: expected bf16 or fp8, got 'fp4'"):
        H100.gemm_us(1, 1, 1, "fp4")
    with pytest.raises(UsageError, match="precision fp8: A100 SXM 80GB has no such units; use bf16"):
        GpuCompute(GPUS["a100"]).gemm_us(1, 1, 1, "fp8")
    with pytest.raises(UsageError, match="expected sizes of at least 0"):
        H100.gemm_us(-1, 1, 1)
    with pytest.raises(UsageError, match="flops: expected at least 0"):
        H100.attention_us(-1)
    with pytest.raises(UsageError, match="nbytes: expected at least 0"):
        H100.memory_us(-1)
    with pytest.raises(UsageError, match="factor: expected a positive number, got 0"):
        GpuCompute(GPUS["h100"], 0)
    with pytest.raises(UsageError, match=r"gpu 'X', gemm: expected more than 0 and at most 1, got 1\.5"):
        Gpu(name="X", bf16_tflops=1, fp8_tflops=0, memory_bytes=1, memory_gbps=1, gemm=1.5)
    with pytest.raises(UsageError, match="gpu 'X', memory_gbps: expected a positive number, got 0"):
        Gpu(name="X", bf16_tflops=1, fp8_tflops=0, memory_bytes=1, memory_gbps=0)


def test_a_measured_machine_takes_the_time_of_its_points() -> None:
    measured = MeasuredCompute([(2e6, 10.0), (2e9, 4000.0)], memory_gbps=10)
    assert measured.gemm_us(100, 100, 100) == pytest.approx(10.0)
    assert measured.gemm_us(1000, 1000, 1000, groups=3) == pytest.approx(12000.0)
    assert 10 < measured.attention_us(1e8, backward=True) < 4000
    assert measured.memory_us(1e6) == pytest.approx(100.0)
    with pytest.raises(ProfileError, match="expected times that do not fall"):
        MeasuredCompute([(2e6, 10.0), (2e9, 4.0)], memory_gbps=10)
    with pytest.raises(UsageError, match="memory_gbps: expected a positive number"):
        MeasuredCompute([(2e6, 10.0)], memory_gbps=0)


def test_a_model_gets_its_own_calibrated_factor_its_twins_or_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FACTORS", {"mixtral-8x7b": 0.75, "one": 0.5, "another": 0.9})
    mixtral = catalog.load("mixtral-8x7b")
    assert efficiency_for(mixtral) == (0.75, ())
    factor, (note,) = efficiency_for(dataclasses.replace(mixtral, name="mine"))
    assert factor == 0.75
    assert note.endswith("as calibrated for mixtral-8x7b")
    factor, (note,) = efficiency_for(catalog.load("deepseek-v3"))
    assert factor == 0.75  # of three
    assert note.endswith("the median of the models that were calibrated: deepseek-v3 was not")
