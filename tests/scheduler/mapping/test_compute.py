"""Compute times: a roofline with whole tiles, and measured machines."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping import compute as module
from commlayer.scheduler.mapping.cluster import Gpu
from commlayer.scheduler.mapping.compute import (
    DEFAULT_FACTOR,
    TILE,
    CoreTiles,
    GpuCompute,
    MeasuredCompute,
    efficiency_for,
)
from commlayer.scheduler.mapping.hardware import GPUS
from commlayer.scheduler.mapping.model import AttentionWindow, ModelShape, mean_tiles
from commlayer.scheduler.mapping.precisions import RECIPES, recipe_of

H100 = GpuCompute(GPUS["h100"])
FEW = settings(max_examples=60)
dims = st.integers(1, 1 << 15)


def tflops(rows: int, inner: int, columns: int, us: float) -> float:
    return 2 * rows * inner * columns / us / 1e6


@pytest.mark.parametrize(
    ("gpu", "precision", "shape", "groups", "published", "within"),
    [
        # vLLM#23280: cuBLAS on an H100
        ("h100", "bf16", (8192, 7168, 2112), 1, 666, 0.02),
        ("h100", "bf16", (16384, 7168, 2112), 1, 703, 0.02),
        # DeepGEMM's tables on H800: dense products, and groups with as many rows each
        ("h800", "fp8-deepgemm", (4096, 7168, 2112), 1, 1009, 0.05),
        ("h800", "fp8-deepgemm", (4096, 1536, 24576), 1, 1125, 0.05),
        ("h800", "fp8-deepgemm", (4096, 512, 32768), 1, 751, 0.12),
        ("h800", "fp8-deepgemm", (4096, 16384, 7168), 1, 1426, 0.07),
        ("h800", "fp8-deepgemm", (4096, 7168, 4096), 1, 1265, 0.05),
        ("h800", "fp8-deepgemm", (4096, 2048, 7168), 1, 1168, 0.05),
        ("h800", "fp8-deepgemm", (8192, 7168, 4096), 4, 1346, 0.05),
        ("h800", "fp8-deepgemm", (4096, 2048, 7168), 8, 1214, 0.05),
        # ml-engineering's maximum achievable matmul FLOPS
        ("a100", "bf16", (108 * 128, 16384, 16384), 1, 271.2, 0.01),
    ],
)
def test_products_reach_what_is_published(
    gpu: str, precision: str, shape: tuple[int, int, int], groups: int, published: float, within: float
) -> None:
    us = GpuCompute(GPUS[gpu]).gemm_us(*shape, precision, groups)
    assert groups * tflops(*shape, us) == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("precision", "with_casts", "published"),
    [  # Transformer Engine's GEMM profiling page, B300: ms of a layer's twelve products
        ("bf16", False, 13.102),
        ("fp8-current", False, 6.812),
        ("fp8-mxfp8", False, 7.161),
        ("fp8-delayed", True, 7.802),
        ("fp8-current", True, 9.147),
        ("fp8-mxfp8", True, 8.984),
    ],
)
def test_a_layer_on_blackwell_takes_what_is_published(precision: str, with_casts: bool, published: float) -> None:
    """With casts the page times each product by itself, which casts every operand twice: ours, once, are below it."""
    compute, rows, us = GpuCompute(GPUS["b300"]), 15872, 0.0
    for columns, inner in ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384)):
        for shape in ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns)):
            us += compute.gemm_us(*shape, precision)
        for elements in (rows * inner, rows * columns, inner * columns):
            us += compute.memory_us(with_casts * compute.cast_bytes(precision) * elements)
    assert us / 1e3 == pytest.approx(published, rel=0.14 if with_casts else 0.02)


def _narrow(model: ModelShape, sequence: int, batch: int) -> CoreTiles:
    queries = model.heads * batch * sequence / TILE
    return CoreTiles(queries, queries * mean_tiles(model, sequence, TILE))


def _heads(number: int, window: int) -> ModelShape:
    one = catalog.load("gpt-oss-120b")
    seen = None if not window else AttentionWindow(window, one.layers)
    return dataclasses.replace(one, heads=number, kv_heads=number, window=seen)


@pytest.mark.parametrize(
    ("gpu", "heads", "window", "sequence", "forward_ms", "backward_ms"),
    [  # cudnn-frontend's results, two sequences each, but for the lengths that the constants go through
        ("gb200", 128, 128, 16384, 0.822, 1.818),
        ("gb200", 128, 128, 4096, 0.210, 0.465),
        ("gb200", 64, 1024, 16384, 0.853, 2.024),
        ("gb200", 64, 1024, 4096, 0.209, 0.487),
        ("gb300", 128, 128, 16384, 0.790, 1.712),
        ("gb300", 64, 1024, 2048, 0.089, 0.221),
        ("h200", 64, 1024, 16384, 1.499, 4.392),
        ("h200", 64, 1024, 32768, 3.021, 9.045),
    ],
)
def test_attention_of_narrow_heads_takes_what_is_published(
    gpu: str, heads: int, window: int, sequence: int, forward_ms: float, backward_ms: float
) -> None:
    compute, tiles = GpuCompute(GPUS[gpu]), _narrow(_heads(heads, window), sequence, 2)
    assert compute.attention_us(1.0, tiles=tiles) == pytest.approx(1e3 * forward_ms, rel=0.08)
    assert compute.attention_us(1.0, backward=True, tiles=tiles) == pytest.approx(1e3 * backward_ms, rel=0.08)


@pytest.mark.parametrize(("batch", "sequence", "slowest", "fastest"), [(8, 4096, 708, 1011), (4, 8192, 797, 1169)])
def test_narrow_heads_without_a_window_are_as_fast_as_other_kernels(
    batch: int, sequence: int, slowest: float, fastest: float
) -> None:
    """FlashAttention's own on B200 (flash-attention#2605), whose heads of 64 are 32."""
    flops = 2.0 * batch * 32 * sequence * sequence * 64
    us = GpuCompute(GPUS["b200"]).attention_us(flops, tiles=_narrow(_heads(32, 0), sequence, batch))
    assert slowest < flops / us / 1e6 < fastest


@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_tiles_of_keys_are_those_that_a_mask_leaves(tiles: int, window: int, is_chunked: bool) -> None:
    """Every pair of queries and keys is tried."""
    size = 4
    if is_chunked and tiles % window:
        window = tiles
    model = dataclasses.replace(_heads(8, 0), window=AttentionWindow(window * size, 36, is_chunked))
    met = set()
    for query in range(tiles * size):
        for key in range(query + 1):
            near = query // (window * size) == key // (window * size) if is_chunked else query - key < window * size
            if near:
                met.add((query // size, key // size))
    assert mean_tiles(model, tiles * size, size) == pytest.approx(len(met) / tiles)


def test_wide_heads_and_other_gpus_have_no_tiles() -> None:
    tiles = CoreTiles(1e6, 1e6)
    for name in ("h20", "a100"):
        assert GpuCompute(GPUS[name]).attention_us(1e12, tiles=tiles) == GpuCompute(GPUS[name]).attention_us(1e12)


def test_groups_of_a_recipe_that_casts_each_by_itself_take_a_kernel_each() -> None:
    launch = H100.gpu.launch_us
    assert H100.cast_us(1e6, "fp8-current", 16) - H100.cast_us(1e6, "fp8-current") == pytest.approx(15 * launch)
    assert H100.cast_us(1e6, "fp8-delayed", 16) == H100.cast_us(1e6, "fp8-delayed")
    assert H100.cast_us(1e6, "bf16", 16) == H100.cast_us(0, "fp8-current", 16) == 0.0


def test_groups_of_random_rows_lose_half_a_tile_each() -> None:
    """The tiles of groups whose rows are drawn are counted, against the declared mean."""
    random = Random(7)
    for mean in (300, 1000, 5000):
        tiles = [-(-round(random.uniform(0.7, 1.3) * mean) // TILE) for _ in range(20000)]
        even, uneven = (H100.gemm_us(mean, 8192, 132 * 128, groups=64, uneven=is_uneven) for is_uneven in (False, True))
        assert uneven / even == pytest.approx(sum(tiles) / len(tiles) / -(-mean // TILE), rel=0.03)
    assert H100.gemm_us(1, 4096, 4096, groups=8, uneven=True) == H100.gemm_us(1, 4096, 4096, groups=8)


@pytest.mark.parametrize(
    ("gpu", "precision", "message"),
    [
        ("a100", "fp8", "A100 SXM 80GB has no FP8 units; use bf16"),
        ("a100", "fp8-mxfp8", "A100 SXM 80GB has no FP8 units"),
        ("h100", "fp8-mxfp8", "use fp8-delayed, fp8-current, fp8-blockwise, fp8-deepgemm or bf16"),
        ("b200", "fp8-blockwise", "use fp8-delayed, fp8-current, fp8-mxfp8 or bf16"),
        ("b200", "fp4", "expected one of bf16, fp8, fp8-delayed"),
    ],
)
def test_what_a_gpu_does_not_have_is_refused_with_what_it_has(gpu: str, precision: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_of(precision, GPUS[gpu])


def test_the_word_fp8_means_the_usual_recipe_of_the_gpu() -> None:
    found = [recipe_of("fp8", GPUS[gpu]) for gpu in ("h100", "b200")]
    assert [recipe.name for recipe in found if recipe] == ["fp8-delayed", "fp8-mxfp8"]
    # Hopper has a transposed copy of every operand; Blackwell's blocks are scaled by direction.
    assert [recipe.cast_bytes(GPUS[gpu]) for recipe, gpu in zip(found, ("h100", "b200"), strict=True) if recipe] == [
        2 + 2 * 1,
        2 + 2 * (1 + 1 / 32),
    ]
    assert RECIPES["fp8-delayed"].cast_bytes(GPUS["b200"]) == 2 + 1
    assert RECIPES["fp8-current"].cast_bytes(GPUS["h100"]) == 4 + 2


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
    with pytest.raises(UsageError, match=r"precision: expected one of bf16, fp8, .* got 'fp4'"):
        H100.gemm_us(1, 1, 1, "fp4")
    with pytest.raises(UsageError, match="precision fp8: A100 SXM 80GB has no FP8 units; use bf16"):
        GpuCompute(GPUS["a100"]).gemm_us(1, 1, 1, "fp8")
    with pytest.raises(UsageError, match="expected sizes of at least 0"):
        H100.gemm_us(-1, 1, 1)
    with pytest.raises(UsageError, match="flops: expected at least 0"):
        H100.attention_us(-1)
    with pytest.raises(UsageError, match="nbytes: expected at least 0"):
        H100.memory_us(-1)
    with pytest.raises(UsageError, match="efficiency: expected a positive number, got 0"):
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
