"""GPUs as they are declared: data sheets, and what public benchmarks reach of them, each with its source.

Nothing here was measured by us, and nothing but the exposed part of a host's launches was fitted to a training throughput.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.declared_links import check_number

__all__ = [
    "GPUS",
    "Architecture",
    "AttentionTiles",
    "Gpu",
]

Architecture = Literal["ampere", "hopper", "blackwell", "rubin", "cdna"]
"""The generation, which decides what formats its tensor cores multiply and how operands lie."""


class AttentionTiles(NamedTuple):
    """The times of one multiprocessor for fused attention in tiles of 128, µs: for each tile of queries of a head, whatever it
    meets, and for each tile of keys that it meets; backward likewise."""

    start_us: float
    met_us: float
    start_backward_us: float
    met_backward_us: float


_EXPOSED_LAUNCH_US, _WAITED_LAUNCH_US = 12.0, 25.0
"""Set by hand, with :data:`_GRACE_LAUNCHES`, by the error over the runs of Megatron-Core in benchmarks/published_rows.json, which
do not settle them: docs/published.md says what fits take."""
_CALL_LAUNCH_US = 110.0
"""Set by hand near the least of published runs whose hosts wait: of Megatron-Core's on x86 in benchmarks/published_rows.json
one takes at most 105 for a call (Qwen3-235B on 256 B200) and the next one 111, AWS's of Kimi-K2 and DeepSeek-V3, a sequence a
micro-batch, 121 to 125."""
_GRACE_LAUNCHES = 1.5
"""A Grace's launches over those of x86. For one nn.Linear they are 2.75 (37.08 and 13.48 µs: NVIDIA/TransformerEngine#2053)."""


_GRACE_CALLS = 1.2
"""The same for calls of a host that waits: gpt-oss-120b's run on 64 GB200 with micro-batches of 1 takes 136 µs for a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: its peaks, and what public benchmarks reach of them (fractions).

    Attributes:
        bf16_tflops, fp8_tflops: dense peaks (fp8 0: it has none).
        memory_bytes: of which a training job can use nearly all. memory_gbps: reads and writes together, 1e9 B/s.
        architecture: its generation.
        multiprocessors: that do a tile of a matrix product each.
        gemm, gemm_fp8: of the peak, by large matrix products back to back, so within the power that the GPU may draw, without
            what tiles and waves lose. FP8: with one scale for a tensor.
        tile_us: of a multiprocessor for each tile beyond its products: the pipeline fills, and the result is written.
        attention, attention_backward: of the BF16 peak, by fused causal attention, FLOPs counted as causal.
        narrow_attention: of heads of at most 64 elements, which leave the tensor cores waiting for exponentials; None: as wide
            ones.
        memory: of memory_gbps, by kernels that only move data.
        launch_us: of each kernel that nothing hides.
        exposed_launch_us, waited_launch_us: the part of a kernel's launch by the host for which the GPU waits; the latter where
            the host waits for the GPU in every layer (mapping/host_launches.py).
        call_launch_us: the least time of each call by which such a host launches kernels, whatever the GPU computes.
        host_gbps: between the GPU's memory and its host's, 1e9 B/s, as copies reach in the slower direction.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float
    memory_bytes: float
    memory_gbps: float
    architecture: Architecture = "hopper"
    multiprocessors: int = 132
    gemm: float = 0.77
    gemm_fp8: float = 0.71
    tile_us: float = 0.0
    attention: float = 0.58
    attention_backward: float = 0.46
    narrow_attention: AttentionTiles | None = None
    memory: float = 0.80
    launch_us: float = 3.0
    exposed_launch_us: float = _EXPOSED_LAUNCH_US
    waited_launch_us: float = _WAITED_LAUNCH_US
    call_launch_us: float = _CALL_LAUNCH_US
    host_gbps: float = 53.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(Architecture):
            expected = ", ".join(get_args(Architecture))
            raise UsageError(f"gpu {self.name!r}, architecture: expected {expected}, got {self.architecture!r}")
        for name in ("bf16_tflops", "memory_bytes", "memory_gbps", "multiprocessors", "host_gbps"):
            check_number(f"gpu {self.name!r}, {name}", getattr(self, name), 0, math.inf)
        for name in ("gemm", "gemm_fp8", "attention", "attention_backward", "memory"):
            check_number(f"gpu {self.name!r}, {name}", getattr(self, name), 0, 1)
        for name in ("fp8_tflops", "launch_us", "tile_us", "exposed_launch_us", "waited_launch_us", "call_launch_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"gpu {self.name!r}, {name}: expected at least 0, got {getattr(self, name)!r}")

    def with_host(self, slower: float) -> Gpu:
        """The same GPU with a host whose launches take so many times as long."""
        return replace(
            self,
            exposed_launch_us=self.exposed_launch_us * slower,
            waited_launch_us=self.waited_launch_us * slower,
            call_launch_us=self.call_launch_us * slower,
        )

    def most_mfu(self, precision: str) -> float:
        """The largest MFU of products in ``precision``: MFU counts by the peak of BF16, which FP8's exceeds."""
        return 1.0 if precision == "bf16" else max(1.0, self.fp8_tflops / self.bf16_tflops)


_GIB = 1 << 30

_DENSE = (
    "large products: vLLM#23280, cuBLAS on an H100 SXM, [8192 and 16384, 7168] × [7168, 2112] in BF16: 666 and 703 TFLOP/s, "
    "0.77 of the peak by whole tiles and waves"
)
_DEEPGEMM = (
    "FP8: DeepGEMM's table on H800 (README of 2025-03-14; 4096 rows, inner sizes 512 to 16384: 751 to 1426 TFLOP/s), which "
    "0.711 of the peak and 1 µs a tile have within 15 %"
)
_ATTENTION = (
    "attention: FlashAttention-3 (arXiv:2407.08608, figures 5 and 6, head dim 128, 4K to 16K tokens): cuDNN 600 and "
    "FA-3 640 TFLOP/s forward, 500 and 550 backward, without a mask, of 989; a causal mask costs about a tenth of that"
)
_NARROW_HOPPER = AttentionTiles(5.9, 0.71, 19.1, 1.83)
_NARROW = (
    "heads of 64: NVIDIA's cudnn-frontend, benchmark/sdpa_benchmark_training/results (gpt_oss, cuDNN 9.19 of 2026-02 and 9.22 of "
    "2026-04, BF16): start and tile are the lines through the times of {}"
)
_MEMORY = "memory 0.80: MoNTA table 8 (a copy of 64 MB); ml-engineering's p2pBandwidthLatencyTest has 0.75 (H100), 0.78 (A100)"
_PCIE5 = (
    "host: PCIe 5.0 ×16, 64 GB/s by its data sheet; copies on H100 reach 52.8 GB/s to the host (nvbandwidth#24) and 55.6 from it "
    "(NVIDIA's blog on nvbandwidth), of which the slower counts"
)


def _hopper(
    name: str,
    memory_gib: float,
    memory_gbps: float,
    *,
    bf16: float = 989.5,
    multiprocessors: int = 132,
    narrow: AttentionTiles | None = _NARROW_HOPPER,
) -> Gpu:
    heads = _NARROW.format("an H200 with a window of 1,024 at 2K, 4K and 8K tokens")
    return Gpu(
        name=name,
        bf16_tflops=bf16,
        fp8_tflops=2 * bf16,
        memory_bytes=memory_gib * _GIB,
        memory_gbps=memory_gbps,
        architecture="hopper",
        multiprocessors=multiprocessors,
        gemm=0.773,
        gemm_fp8=0.711,
        tile_us=1.0,
        attention=0.57,
        attention_backward=0.47,
        narrow_attention=narrow,
        source=f"NVIDIA's data sheet; {_DENSE}; {_DEEPGEMM}; {_ATTENTION}; {heads}; {_MEMORY}; {_PCIE5}",
    )


def _ampere(name: str) -> Gpu:
    return Gpu(
        name=name,
        bf16_tflops=312,
        fp8_tflops=0,
        memory_bytes=80 * _GIB,
        memory_gbps=2039,
        architecture="ampere",
        multiprocessors=108,
        gemm=0.869,
        attention=0.60,
        attention_backward=0.53,
        host_gbps=25.0,
        source="NVIDIA's data sheet; large products: maximum achievable matmul FLOPS of ml-engineering (stas00), 0.869; "
        "attention: FlashAttention-2 (arXiv:2307.08691) says 50 to 73 % of an A100's peak; "
        f"{_MEMORY}; host: PCIe 4.0 ×16, 32 GB/s by its data sheet, of which copies are assumed to reach 25",
    )


_BLACKWELL = (
    "large products: Transformer Engine's GEMM profiling page, B300, hidden 4096, 15872 tokens, pre-quantized: BF16 1,463, FP8 "
    "2,814 TFLOP/s over forward, dgrad and wgrad (BF16 1,503 with quantization timed; vLLM#19566 has 1,513 on B200), which are "
    "what its power allows: single short products reach 1,769 (ml-engineering); no dependence on the inner size is seen in that "
    "table (an accumulator is filled while another is written), so tile_us is 0; attention: flash-attention#2280, B200, "
    "FlashAttention-4, head dim 128, causal, 8K tokens: 1,418 forward and 1,118 backward of 2,250; memory 0.75: a copy on B200 "
    "moves 6,000 GB/s (newmind.ai), torchao's MXFP8 casts 4,900"
)


_NARROW_BLACKWELL = AttentionTiles(2.54, 0.604, 5.23, 1.517)
_NARROW_ULTRA = AttentionTiles(2.70, 0.449, 4.83, 1.493)
_NARROW_HEADS = _NARROW.format(
    "8K tokens with windows of 128 and of 1,024, on GB200 and GB300. Without a window they give 794 and 895 TFLOP/s forward at "
    "4K and 8K tokens on GB200, where flash-attention#2605 has 708 to 1,011 and 797 to 1,169 in four runs of its own kernel"
)
_ULTRA_ATTENTION = 1646 / 2250, 1195 / 2250
_ULTRA = (
    "Ultra's attention: the same results, causal, 4K tokens, heads of 128 (llama3.1) and of 192 and 128 (dsv3), on GB300: 1,703 "
    "and 1,590 TFLOP/s forward, 1,248 and 1,143 backward, where GB200 has 1,408, 1,406, 1,148 and 1,057"
)


def _blackwell(
    name: str,
    bf16: float,
    memory_gib: float,
    *,
    gemm: float = 0.667,
    gemm_fp8: float = 0.63,
    host_gbps: float = 53.0,
    source: str = "",
    ultra: bool = False,
    launches: float = 1.0,
) -> Gpu:
    """``ultra``: Blackwell Ultra, whose units for exponentials are twice as fast. ``launches``: how much longer its host takes
    for a launch than an x86 host."""
    attention, backward = _ULTRA_ATTENTION if ultra else (0.63, 0.50)
    return Gpu(
        name=name,
        bf16_tflops=bf16,
        fp8_tflops=2 * bf16,
        memory_bytes=memory_gib * _GIB,
        memory_gbps=8000,
        architecture="blackwell",
        multiprocessors=148,
        gemm=gemm,
        gemm_fp8=gemm_fp8,
        attention=attention * 2250 / bf16,
        attention_backward=backward * 2250 / bf16,
        narrow_attention=_NARROW_ULTRA if ultra else _NARROW_BLACKWELL,
        memory=0.75,
        exposed_launch_us=_EXPOSED_LAUNCH_US * launches,
        waited_launch_us=_WAITED_LAUNCH_US * launches,
        call_launch_us=_CALL_LAUNCH_US * min(launches, _GRACE_CALLS),
        host_gbps=host_gbps,
        source=f"NVIDIA's data sheet; {_BLACKWELL}; {_NARROW_HEADS}; {f'{_ULTRA}; ' if ultra else ''}{source or _PCIE5}",
    )


_GRACE = (
    "beyond a B200's: ml-engineering's maximum achievable matmul FLOPS has 1,822 in BF16 and 3,616 in FP8 where a B200 has 1,745 "
    "and 3,433, and large products are assumed to be as much faster; host: NVLink-C2C, 450 GB/s a "
    "direction for the two GPUs of a Grace by the data sheet; copies on a GH200 reach 346 of 450 GB/s from it and 15 % less "
    "to it (NVIDIA/nvbandwidth#23), and the slower part of a GB200's is taken"
)
_GRACE_BF16 = 0.667 * 2250 / 2500 * 1822 / 1745
_GRACE_FP8 = 0.63 * 2250 / 2500 * 3615.6 / 3432.5

_INSTINCT = (
    "attention: AITER's kernels on MI355X, causal, heads of 128, 4K and 8K tokens: 1,069 and 1,173 TFLOP/s forward, 877 and "
    "1,034 backward (HazyResearch/HipKittens, analysis/attn, commit f09e968); memory 0.80 and the host's launches: assumed, as "
    "an NVIDIA GPU's; multiprocessors: compute units"
)


def _instinct(
    name: str,
    bf16: float,
    memory_gib: float,
    memory_gbps: float,
    units: int,
    source: str,
    *,
    gemm: float,
    gemm_fp8: float,
    attention: float,
    attention_backward: float,
) -> Gpu:
    return Gpu(
        name=name,
        bf16_tflops=bf16,
        fp8_tflops=2 * bf16,
        memory_bytes=memory_gib * _GIB,
        memory_gbps=memory_gbps,
        architecture="cdna",
        multiprocessors=units,
        memory=0.80,
        source=f"AMD's data sheet; {source}; {_INSTINCT}; {_PCIE5}",
        gemm=gemm,
        gemm_fp8=gemm_fp8,
        attention=attention,
        attention_backward=attention_backward,
    )


GPUS: dict[str, Gpu] = {
    "a100": _ampere("A100 SXM 80GB"),
    "a800": _ampere("A800 SXM 80GB"),
    "b200": _blackwell("B200 SXM", 2250, 180),
    "b300": _blackwell("B300 SXM", 2250, 268, ultra=True),
    "gb200": _blackwell(
        "GB200",
        2500,
        186,
        gemm=_GRACE_BF16,
        gemm_fp8=_GRACE_FP8,
        host_gbps=150.0,
        source=_GRACE,
        launches=_GRACE_LAUNCHES,
    ),
    # Its BF16 and FP8 are a GB200's by the data sheet; nobody has published its products.
    "gb300": _blackwell(
        "GB300",
        2500,
        268,
        gemm=_GRACE_BF16,
        gemm_fp8=_GRACE_FP8,
        host_gbps=150.0,
        source=f"{_GRACE}; products as GB200",
        ultra=True,
        launches=_GRACE_LAUNCHES,
    ),
    "h100": _hopper("H100 SXM 80GB", 80, 3350),
    "h200": _hopper("H200 SXM", 141, 4800),
    # MegaScale-MoE, table 4: 148 TFLOP/s, 96 GB, 4 TB/s; that fewer multiprocessors reach the same fraction is assumed. Its
    # tensor cores are so slow that narrow heads wait for nothing else (flash-attention#1310: as fast as wide ones).
    "h20": _hopper("H20", 96, 4000, bf16=148, multiprocessors=78, narrow=None),
    "h800": _hopper("H800 SXM 80GB", 80, 3350),
    "mi300x": _instinct(
        "MI300X",
        1307.4,
        191.7,
        5300,
        304,
        "products: ml-engineering's maximum achievable matmul FLOPS has 668 in BF16; FP8's part of the peak is assumed to be the "
        "same, and attention to be as much slower than an MI355X's as products are",
        gemm=0.511,
        gemm_fp8=0.511,
        attention=0.445 * 0.511 / 0.622,
        attention_backward=0.38 * 0.511 / 0.622,
    ),
    "mi355x": _instinct(
        "MI355X",
        2516.6,
        288,
        8000,
        256,
        "products: ml-engineering's maximum achievable matmul FLOPS has 1,565 in BF16; hipBLASLt has 3,233 in FP8 (HipKittens, "
        "analysis/fp8_gemm, 8,192 each way)",
        gemm=0.622,
        gemm_fp8=0.642,
        attention=0.445,
        attention_backward=0.38,
    ),
    "vr200": Gpu(
        name="Rubin",
        bf16_tflops=4000,
        fp8_tflops=17500,
        memory_bytes=288 * _GIB,
        memory_gbps=22000,
        architecture="rubin",
        multiprocessors=224,
        gemm=_GRACE_BF16,
        gemm_fp8=_GRACE_FP8,
        attention=_ULTRA_ATTENTION[0] * 2250 / 4000,
        attention_backward=_ULTRA_ATTENTION[1] * 2250 / 4000,
        memory=0.75,
        exposed_launch_us=_EXPOSED_LAUNCH_US * _GRACE_LAUNCHES,
        waited_launch_us=_WAITED_LAUNCH_US * _GRACE_LAUNCHES,
        call_launch_us=_CALL_LAUNCH_US * _GRACE_CALLS,
        host_gbps=300.0,
        source="peaks: NVIDIA's preliminary figures (Vera Rubin NVL72's page, as ml-engineering quotes it on 2026-08-22); 224 "
        "multiprocessors: NVIDIA's technical blog on the Rubin platform, not verified; everything that calls and products "
        "reach of them is assumed: products and launches as on GB300, attention no faster than there, twice its link to the host",
    ),
}
"""The known GPUs, by the name that a cluster file may use."""
