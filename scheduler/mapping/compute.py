"""How long a GPU computes: matrix products, fused attention, and kernels that only move data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping.calibrated import FACTORS
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.precisions import recipe_of

__all__ = ["DEFAULT_FACTOR", "TILE", "CoreTiles", "GpuCompute", "MeasuredCompute", "efficiency_for"]

TILE = 128
"""Rows and columns of the result that one multiprocessor computes at a time: CUTLASS's and cuBLAS's common tile."""

DEFAULT_FACTOR = 1.0
"""The factor that public benchmarks reach, as declared in :class:`Gpu`."""

_ACCUMULATED_BYTES = 8
"""The bytes of an element of an FP32 sum: read and written."""
_UNEVEN_TILES = 0.5
"""The tiles of rows that a group loses on average where its rows are as routing has them, not a multiple of a tile."""


class CoreTiles(NamedTuple):
    """Attention in tiles of 128 × 128: ``queries``, of all heads, and ``met``: tiles of keys that these meet, all in all."""

    queries: float
    met: float


class GpuCompute:
    """µs of what one GPU computes.

    A matrix product takes the longer of two times, and a launch: its FLOPs at the declared part of the peak, rounded up to
    whole tiles and whole waves of tiles over the multiprocessors, each tile with what it costs beyond its products; and its bytes
    at the declared part of the memory's rate.

    ``factor`` multiplies the rate of matrix products and of attention, and of nothing else.

    Raises UsageError for a factor that is not positive.
    """

    def __init__(self, gpu: Gpu, factor: float = DEFAULT_FACTOR) -> None:
        if not 0 < factor < math.inf:
            raise UsageError(f"efficiency: expected a positive number, got {factor!r}")
        self.gpu = gpu
        self.factor = factor

    def gemm_us(
        self,
        rows: float,
        inner: float,
        columns: float,
        precision: str = "bf16",
        groups: int = 1,
        *,
        accumulates: bool = False,
        uneven: bool = False,
    ) -> float:
        """``groups`` products [rows, inner] × [inner, columns] in one launch (experts: a group each, with ``rows`` tokens).

        ``rows`` may be a mean; ``uneven``: it is, and the groups' own rows are as routing has them, so that each fills its last
        tile by half on average. 0 where there is nothing to multiply. ``accumulates``: the result is added to one in FP32
        (Megatron's gradient_accumulation_fusion), which is read and written behind a tile's products: nothing hides that where
        a multiprocessor has one tile at a time. Raises UsageError for a negative size, an unknown precision, or one that the GPU
        does not have (:func:`~commlayer.scheduler.mapping.precisions.recipe_of`).
        """
        if min(rows, inner, columns, groups) < 0:
            raise UsageError(
                f"expected sizes of at least 0, got rows={rows}, inner={inner}, columns={columns}, groups={groups}"
            )
        peak, element = self._peak(precision)
        if not rows * inner * columns * groups:
            return 0.0
        gpu = self.gpu
        high = max(rows / TILE + _UNEVEN_TILES, 1.0) if uneven else math.ceil(rows / TILE)
        waves = math.ceil(high * math.ceil(columns / TILE) * groups / gpu.multiprocessors)
        tile_us = 2.0 * TILE * TILE * inner * gpu.multiprocessors / (peak * 1e6) + gpu.tile_us
        # operands in `precision`, the result in BF16, unless it is added to a sum
        moved = groups * (element * inner * (rows + columns) + (0 if accumulates else 2 * rows * columns))
        rate = gpu.memory_gbps * gpu.memory * 1e3
        added = groups * _ACCUMULATED_BYTES * rows * columns / rate if accumulates else 0.0
        return max(waves * tile_us / self.factor, moved / rate) + added + gpu.launch_us

    def attention_us(
        self, flops: float, precision: str = "bf16", *, backward: bool = False, tiles: CoreTiles | None = None
    ) -> float:
        """Fused attention of ``flops`` (a causal mask counted by half), in BF16 whatever the precision of products.

        ``flops`` of the backward pass are its own: 2.5 times the forward pass's in FlashAttention's count. ``tiles``: of heads of
        at most 64 elements, by which these are timed where the GPU's are known: with a short window most of their time is none
        of the products'. Raises UsageError for an unknown precision or a negative number.
        """
        self._peak(precision)
        if flops < 0:
            raise UsageError(f"flops: expected at least 0, got {flops!r}")
        if not flops:
            return 0.0
        narrow = self.gpu.narrow_attention
        if tiles is not None and narrow is not None:
            start_us, met_us = narrow[2:] if backward else narrow[:2]
            work_us = tiles.queries * start_us + tiles.met * met_us
            return work_us / self.gpu.multiprocessors / self.factor + self.gpu.launch_us
        part = self.gpu.attention_backward if backward else self.gpu.attention
        return flops / (self.gpu.bf16_tflops * part * self.factor * 1e6) + self.gpu.launch_us

    def memory_us(self, nbytes: float, kernels: int = 1) -> float:
        """Kernels, one after another, that read and write ``nbytes`` together. Raises UsageError for a negative number."""
        if nbytes < 0:
            raise UsageError(f"nbytes: expected at least 0, got {nbytes!r}")
        if not nbytes:
            return 0.0
        return nbytes / (self.gpu.memory_gbps * self.gpu.memory * 1e3) + kernels * self.gpu.launch_us

    def launched_us(self, launches: int, *, waits: bool) -> float:
        """The time that the GPU waits for its host, which launches so many kernels; ``waits``: it waits for the GPU between
        them."""
        return launches * (self.gpu.waited_launch_us if waits else self.gpu.exposed_launch_us)

    def busy_us(self, calls: int) -> float:
        """The time for which a host that waits for the GPU is busy with so many calls that launch kernels."""
        return calls * self.gpu.call_launch_us

    def _peak(self, precision: str) -> tuple[float, float]:
        """TFLOP/s that large products reach, and the bytes of an operand's element."""
        recipe = recipe_of(precision, self.gpu)
        if recipe is None:
            return self.gpu.bf16_tflops * self.gpu.gemm, 2
        return self.gpu.fp8_tflops * self.gpu.gemm_fp8 * recipe.rate, recipe.copy_bytes()

    def cast_us(self, elements: float, precision: str, groups: int = 1) -> float:
        """The time of casting what goes into products of ``groups``: a kernel for each, but where the recipe casts all in one.
        0 in BF16. Raises as :meth:`gemm_us`."""
        recipe = recipe_of(precision, self.gpu)
        if recipe is None:
            return 0.0
        return self.memory_us(recipe.cast_bytes(self.gpu) * elements, 1 if recipe.casts_together else groups)

    def cast_bytes(self, precision: str) -> float:
        """The bytes that are moved to cast an element for its products: 0 in BF16. Raises as :meth:`gemm_us`."""
        recipe = recipe_of(precision, self.gpu)
        return 0.0 if recipe is None else recipe.cast_bytes(self.gpu)


class MeasuredCompute:
    """Compute times, as :class:`GpuCompute`, of a machine whose products were timed: (FLOPs, µs) of one product each.

    Between points the logarithm of time is linear in that of FLOPs; beyond them, a latency and a rate (as a profile's
    curves). Attention is looked up by its FLOPs too. Precision makes no difference.

    Raises UsageError for points that are no increasing FLOPs with times that do not fall, or a memory rate that is not positive.
    """

    def __init__(self, points: Sequence[tuple[float, float]], memory_gbps: float) -> None:
        if not 0 < memory_gbps < math.inf:
            raise UsageError(f"memory_gbps: expected a positive number of 1e9 bytes/s, got {memory_gbps!r}")
        self.memory_gbps = memory_gbps
        ordered = sorted(points)
        # A profile's curve, of FLOPs in place of bytes: the same rules between the points and beyond them.
        self._curve = Curve(
            "copy", Resource.DEVICE, 1, tuple(round(flops) for flops, _ in ordered), tuple(us for _, us in ordered)
        )

    def gemm_us(
        self,
        rows: float,
        inner: float,
        columns: float,
        precision: str = "bf16",
        groups: int = 1,
        *,
        accumulates: bool = False,
        uneven: bool = False,
    ) -> float:
        """``groups`` products one after the other. What adding to a sum costs is in the times, or it is not."""
        return groups * self._curve.at(2.0 * rows * inner * columns)

    def attention_us(
        self, flops: float, precision: str = "bf16", *, backward: bool = False, tiles: CoreTiles | None = None
    ) -> float:
        """Time attention as one product of so many FLOPs."""
        return self._curve.at(flops)

    def cast_us(self, elements: float, precision: str, groups: int = 1) -> float:
        """Nothing: precision makes no difference to what was measured."""
        return 0.0

    def cast_bytes(self, precision: str) -> float:
        """Nothing, as :meth:`cast_us`."""
        return 0.0

    def launched_us(self, launches: int, *, waits: bool) -> float:
        """Nothing: launches are in the times of products."""
        return 0.0

    def busy_us(self, calls: int) -> float:
        """Nothing, as :meth:`launched_us`."""
        return 0.0

    def memory_us(self, nbytes: float, kernels: int = 1) -> float:
        """At the memory's rate."""
        return nbytes / (self.memory_gbps * 1e3)


def efficiency_for(model: ModelShape) -> tuple[float, tuple[str, ...]]:
    """The factor on a GPU's declared rates that ``model`` gets, and notes on where it comes from: that of its family, of the same
    model under another name, or the median of all that were calibrated.

    Large products in a benchmark reach more than those of a model in training, whichever it is.
    """
    found = FACTORS.get(model.family or model.name)
    if found is not None:
        return found, ()
    for name in catalog.names():  # the same model from a file has another name
        known = catalog.load(name)
        factor = FACTORS.get(known.family or known.name)
        if factor is not None and _core(known) == _core(model):
            return factor, (f"compute runs at {factor:.2f} of the GPU's declared rates, as calibrated for {name}",)
    typical = median(FACTORS.values())
    note = (
        f"compute runs at {typical:.2f} of the GPU's declared rates, the median of the models that were calibrated: "
        f"{model.name} was not"
    )
    return typical, (note,)


def _core(model: ModelShape) -> tuple[int, ...]:
    """The sizes by which products and attention are large; vocabularies are padded, and depth changes none of them."""
    sizes = (model.hidden, model.heads, model.kv_heads, model.head_dim)
    return (*sizes, model.experts, model.top_k, model.width, model.shared_width)
