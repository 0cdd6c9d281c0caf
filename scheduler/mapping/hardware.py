"""GPUs and links as they are declared: data sheets, and what public benchmarks reach of them, each with its source.

Nothing here was measured by us, and nothing but the exposed part of a host's launches was fitted to a training throughput. An
efficiency is bytes that one rank sends over the link in one call → fraction of the peak, at the peak of the hardware that was
measured; see :class:`Link` for how it is carried over to a faster or a slower link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from commlayer.profiles.errors import UsageError

__all__ = [
    "A800_MONTA_NETWORK",
    "A800_MONTA_NVLINK",
    "EFA",
    "FABRICS",
    "GPUS",
    "MEMORY",
    "MONTA_MEMORY",
    "NETWORK",
    "NVLINK",
    "NVLINK5",
    "SCALE_UP",
    "XGMI",
    "Architecture",
    "AttentionTiles",
    "Gpu",
    "Link",
    "NetworkKind",
    "Points",
]

Architecture = Literal["ampere", "hopper", "blackwell", "rubin", "cdna"]
"""The generation, which decides what formats its tensor cores multiply and how operands lie."""
Points = tuple[tuple[float, float], ...]
"""(bytes, fraction of the peak), by increasing bytes."""


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
_GRACE_LAUNCHES = 1.5
"""A Grace's launches over those of x86. For one nn.Linear they are 2.75 (37.08 and 13.48 µs: NVIDIA/TransformerEngine#2053)."""


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
    host_gbps: float = 53.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(Architecture):
            expected = ", ".join(get_args(Architecture))
            raise UsageError(f"gpu {self.name!r}, architecture: expected {expected}, got {self.architecture!r}")
        for name in ("bf16_tflops", "memory_bytes", "memory_gbps", "multiprocessors", "host_gbps"):
            _check(f"gpu {self.name!r}, {name}", getattr(self, name), 0, math.inf)
        for name in ("gemm", "gemm_fp8", "attention", "attention_backward", "memory"):
            _check(f"gpu {self.name!r}, {name}", getattr(self, name), 0, 1)
        for name in ("fp8_tflops", "launch_us", "tile_us", "exposed_launch_us", "waited_launch_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"gpu {self.name!r}, {name}: expected at least 0, got {getattr(self, name)!r}")

    def most_mfu(self, precision: str) -> float:
        """The largest MFU of products in ``precision``: MFU counts by the peak of BF16, which FP8's exceeds."""
        return 1.0 if precision == "bf16" else max(1.0, self.fp8_tflops / self.bf16_tflops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The parts of a link's peak that calls reach.

    The argument of ``ring`` and ``messages`` is what one rank sends over this link in the whole call, in bytes; the fraction
    is of ``gbps``, with all latencies of the group that was measured. Beyond the points: a latency and a bandwidth, fitted
    to the nearest (as :class:`~commlayer.profiles.curve.Curve`). A link that is k times as fast as ``gbps`` takes for k
    times the bytes the same time: exact for a latency and a bandwidth, and a faster link does not shorten the latency.

    Attributes:
        gbps: the peak of the link that was measured, GB/s.
        ring: of the backend's own calls, whose ranks pass blocks on (all_gather, reduce_scatter, all_reduce, broadcast).
        messages: where each rank sends to each other (all_to_all, steps of plans, send and receive).
        latency_us: the least time of a call over this link.
        hop_us: of each hop of a ring or a tree beyond ``measured_hops``.
        message_us: of each message of a rank beyond ``measured_hops``.
        measured_hops: hops and messages of a rank in the group that the points were measured on (8 ranks: 7).
        mesh: GPUs of which each has a link of its own to each other one, so that a group of fewer has a part of ``gbps``; 0: a
            switch, through which any two have all of it.

    Raises:
        UsageError: fractions that are not in (0, 1], sizes that do not increase, a time that falls with bytes.
    """

    ring: Points
    messages: Points
    gbps: float
    latency_us: float
    hop_us: float = 0.0
    message_us: float = 0.0
    measured_hops: int = 1
    mesh: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("ring", "messages"):
            _check_points(name, getattr(self, name))
        _check("gbps", self.gbps, 0, math.inf)
        for name in ("latency_us", "hop_us", "message_us", "measured_hops", "mesh"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: expected at least 0, got {getattr(self, name)!r}")

    def used_by(self, ranks: int) -> float:
        """The part of the peak that a group of so many ranks can use."""
        return min(1.0, (ranks - 1) / (self.mesh - 1)) if self.mesh > 1 and ranks > 1 else 1.0


def _check(what: str, value: float, least: float, most: float) -> None:
    """Above ``least``, and at most ``most`` (below infinity)."""
    if not (least < value <= most and value < math.inf):
        expected = "a positive number" if most == math.inf else f"more than {least:g} and at most {most:g}"
        raise UsageError(f"{what}: expected {expected}, got {value!r}")


def _check_points(name: str, points: Points) -> None:
    if not points:
        raise UsageError(f"{name}: expected at least one point (bytes, fraction of the peak), got none")
    for index, (size, fraction) in enumerate(points):
        if not 1 <= size < math.inf:
            raise UsageError(f"{name}[{index}]: expected a size of at least 1 byte, got {size!r}")
        _check(f"{name}[{index}]", fraction, 0, 1)
    for index, ((before, slow), (after, fast)) in enumerate(pairwise(points)):
        if after <= before:
            raise UsageError(f"{name}[{index + 1}]: expected sizes that increase, got {after:g} after {before:g}")
        if after / fast < before / slow:
            raise UsageError(
                f"{name}[{index + 1}]: expected that more bytes take no less time, got {fast:g} of the peak at {after:g} bytes "
                f"after {slow:g} at {before:g}"
            )


_MIB = 1 << 20
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
        host_gbps=300.0,
        source="peaks: NVIDIA's preliminary figures (Vera Rubin NVL72's page, as ml-engineering quotes it on 2026-08-22); 224 "
        "multiprocessors: NVIDIA's technical blog on the Rubin platform, not verified; everything that calls and products "
        "reach of them is assumed: products and launches as on GB300, attention no faster than there, twice its link to the host",
    ),
}
"""The known GPUs, by the name that a cluster file may use."""


def _scaled(points: Points, factor: float) -> Points:
    return tuple((size, fraction * factor) for size, fraction in points)


def _capped(points: Points, most: float) -> Points:
    return tuple((size, min(fraction, most)) for size, fraction in points)


_NETWORK_RING: Points = (
    # NVIDIA/nccl-tests#232: two nodes, one H100 and so one 400 Gb/s card each at work: bus bandwidth of an all_reduce of S
    # bytes, of which each card carries S: 18.5, 27.2, 36.2, 39.9 and 41.3 GB/s of 50.
    (2.0 * _MIB, 0.37),
    (4.0 * _MIB, 0.54),
    (8.0 * _MIB, 0.72),
    (16.0 * _MIB, 0.80),
    (32.0 * _MIB, 0.83),
    # NVIDIA/nccl-tests#290, a maintainer of NCCL: 46 to 48 GB/s per 400 Gb/s card over a ring, at large sizes.
    (1.0 * _GIB, 0.94),
)
NETWORK = Link(
    ring=_NETWORK_RING,
    # NVIDIA, GTC 2025, session S72583, slide "All-to-all Communication Bandwidth": bus bandwidth 48 GB/s of 32 GPUs on four
    # DGX H100, of which 24/31 cross a card: 37.2 GB/s, 0.744 of its peak, at large sizes. MoNTA has 0.741 for another
    # generation (table 8). Smaller sizes: by as much below the ring as large ones are (0.744 / 0.94), which is our
    # assumption; it gives 0.43 at 4 MiB and 0.63 at 16 MiB, and MoNTA's table 8 has 0.427 and 0.633.
    messages=_scaled(_NETWORK_RING, 0.744 / 0.94),
    gbps=50.0,
    latency_us=17.0,  # NVIDIA/nccl-tests#293: an all_reduce of 8 bytes between two nodes, 17 µs
    hop_us=4.0,  # NCCL src/graph/tuning.cc, hwLat, network, ring, LL128
    message_us=1.0,  # assumed: the order of magnitude of posting one send and one receive
    measured_hops=1,
    source="NVIDIA/nccl-tests#232, #290, #293; NVIDIA GTC 2025 S72583; NCCL's tuning.cc; a message's cost is assumed",
)
"""InfiniBand or RoCE, a card for each GPU."""

_EFA_RING: Points = (
    # aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests/README.md (commit 0162aac, read 2026-11-28): an
    # all_reduce of 4 MiB to 16 GiB over two p5.48xlarge, 8 H100 and 400 GB/s of EFA each: 168.6, 298.1, 601.5, 1468, 4608,
    # 17286 and 66132 µs. Of S bytes each GPU's card sends S/8. At large sizes NVLink may be what the call waits for.
    (0.5 * _MIB, 0.062),
    (2.0 * _MIB, 0.141),
    (8.0 * _MIB, 0.279),
    (32.0 * _MIB, 0.457),
    (128.0 * _MIB, 0.583),
    (512.0 * _MIB, 0.621),
    (2.0 * _GIB, 0.649),
)
EFA = Link(
    ring=_EFA_RING,
    messages=(
        # Small calls: half the time of the all_reduce above, which crosses twice, one after the other: assumed.
        (0.5 * _MIB, 0.124),
        (2.0 * _MIB, 0.282),
        # awslabs/awsome-distributed-ai, micro-benchmarks/expert-parallelism/ep-backend-comparison (commit 95b939c, read
        # 2026-11-28), nccl-tests' alltoall of 64 MiB: bus bandwidth 104.9 GB/s of 16 ranks on two p6-b300 (33.6 MB a card of 100
        # GB/s, so half of that here), 45.1 and 40.4 of 32 and 64 ranks on four and eight p5.48xlarge (50.3 and 58.7 MB a card),
        # less a microsecond for each message. At large sizes 53.9 and 51.1, of which 24/31 and 56/63 cross: 0.835 and 0.908.
        (16.8e6, 0.567),
        (50.3e6, 0.710),
        (58.7e6, 0.743),
        (4.0 * _GIB, 0.871),
    ),
    gbps=50.0,
    latency_us=69.0,
    hop_us=16.0,
    message_us=1.0,
    measured_hops=1,
    source="AWS's awsome-distributed-training, nccl-tests of all_reduce on two p5.48xlarge; all_to_all: its "
    "ep-backend-comparison, p5.48xlarge and p6-b300; a hop's time by the ratio of latencies (69 to 17 µs): assumed",
)
"""AWS's Elastic Fabric Adapter under NCCL, by libfabric."""


_TCP_GBPS, _TCP_REACHED, _TCP_US = 12.5, 0.6, 46.0
_TCP_RING: Points = tuple(
    (size * _MIB, size * _MIB / (_TCP_US * _TCP_GBPS * 1e3 + size * _MIB / _TCP_REACHED))
    for size in (1.0, 16.0, 1024.0)
)
TCP = Link(
    # NVIDIA/nccl#209: NCCL by sockets does not reliably reach more than 60 % of the wire's speed at 32 Gb/s, also at large sizes;
    # NVIDIA/nccl-tests#82: a broadcast of 8 bytes, 46 µs. A line of both.
    ring=_TCP_RING,
    messages=_scaled(_TCP_RING, 0.744 / 0.94),
    gbps=_TCP_GBPS,
    latency_us=_TCP_US,
    hop_us=_TCP_US,
    message_us=1.0,
    source="NVIDIA/nccl#209 and NVIDIA/nccl-tests#82; sizes between by a latency and a bandwidth, messages by as much below "
    "rings as on InfiniBand, and a hop as long as a small call: assumed",
)
"""NCCL over sockets, without RDMA."""


class NetworkKind(NamedTuple):
    """A kind of network between domains.

    ``link``: what calls reach of it. ``words``: for people to read. ``by_host``: a thread of the host posts what a library's
    kernels send, as no GPU can ring such a card itself. ``has_rdma``: cards write into the memory of another node's
    GPUs, which a library's kernels need.
    """

    link: Link
    words: str
    by_host: bool = False
    has_rdma: bool = True


FABRICS = {
    "infiniband": NetworkKind(NETWORK, "InfiniBand"),
    "roce": NetworkKind(
        NETWORK, "Ethernet with RDMA; curves as of InfiniBand, which public tables do not tell from it"
    ),
    "efa": NetworkKind(EFA, "AWS's Elastic Fabric Adapter", by_host=True),
    "tcp": NetworkKind(TCP, "Ethernet without RDMA, by sockets", has_rdma=False),
}
"""The known fabrics, by the names that --fabric and a cluster file have."""

_NVLINK_RING: Points = (
    # ml-engineering (stas00), network, all_reduce of 1 to 32 MiB on 8 H200: bus bandwidth 39.9, 64.5, 107, 156, 220 and 276
    # GB/s of 450; each GPU sends 1.75·S. (Its two turns have twice the hops of an all_gather: a little too slow for one.)
    (1.75 * _MIB, 0.089),
    (3.5 * _MIB, 0.143),
    (7.0 * _MIB, 0.238),
    (14.0 * _MIB, 0.346),
    (28.0 * _MIB, 0.489),
    (56.0 * _MIB, 0.613),
    # Above, that all_reduce sums in the switch (NVLS), which no all_gather does. MoNTA, table 8, all_gather over 8 A800 of
    # 64 and 256 MB: 0.726 and 0.776 of 200 GB/s; the same fractions for 450/200 times the bytes.
    (126e6, 0.726),
    (504e6, 0.776),
    # ml-engineering, 8 H200, 16 GiB over rings: all_gather 361.4, reduce_scatter 362.9, all_reduce 367.2 GB/s of 450.
    (14.0 * _GIB, 0.803),
)
NVLINK = Link(
    ring=_NVLINK_RING,
    # The same slide of NVIDIA's: 320 GB/s on 8 H100 (0.711), 210 on 8 A100 (0.70), 640 on 8 B200 (0.711) at large sizes.
    # Smaller ones as for the network: by as much below the ring. DeepEP's own kernels: 153 to 158 of an H800's 200 GB/s.
    messages=_scaled(_NVLINK_RING, 0.711 / 0.803),
    gbps=450.0,
    latency_us=12.0,  # deepseek-ai/DeepEP#303: an all_reduce of 4 bytes on 8 H20, 12.5 µs
    hop_us=1.9,  # NCCL src/graph/tuning.cc, hwLat, NVLink, ring, LL128
    message_us=0.3,  # assumed
    measured_hops=7,
    source="ml-engineering (stas00), network; MoNTA table 8; NVIDIA GTC 2025 S72583; NCCL's tuning.cc; a message's cost is "
    "assumed",
)
"""NVLink 3 and 4 through switches."""

NVLINK5 = Link(
    # ml-engineering, 8 B200, 8 GiB over rings: 682 GB/s of 900 (0.758). The slide's NVL72 bar: 680 without sums in the switch.
    ring=_capped(NVLINK.ring, 0.758),
    messages=_capped(NVLINK.messages, 0.711),
    gbps=450.0,
    latency_us=NVLINK.latency_us,
    hop_us=NVLINK.hop_us,
    message_us=NVLINK.message_us,
    measured_hops=7,
    source=f"{NVLINK.source}; its curve as of NVLink 4 up to 0.758, which 8 B200 reach",
)
"""NVLink 5: B200, and GB200's racks of 72 (NVIDIA's slide has 640 GB/s for all_to_all there too)."""

_XGMI_REACHED = 0.698
XGMI = Link(
    # ml-engineering (stas00), network: an all_reduce of 4 GiB on 8 MI300X: bus bandwidth 312.9 GB/s of 448, on two 47.7 of 64.
    ring=_capped(NVLINK.ring, _XGMI_REACHED),
    messages=_capped(NVLINK.messages, _XGMI_REACHED * 0.711 / 0.803),
    gbps=448.0,
    latency_us=NVLINK.latency_us,
    hop_us=NVLINK.hop_us,
    message_us=NVLINK.message_us,
    measured_hops=7,
    mesh=8,
    source="ml-engineering (stas00), network: all_reduce on MI300X at 4 GiB; smaller calls, latencies and all_to_all beside "
    "rings as on NVLink: assumed, as no table of RCCL's was found",
)
"""AMD's Infinity Fabric: each of eight GPUs has a link to each other one."""

SCALE_UP = {"nvlink": NVLINK, "nvlink5": NVLINK5, "xgmi": XGMI}
"""The links inside a domain, by the names that clusters.json has."""

_MONTA_ALL_TO_ALL: Points = ((4e6, 0.427), (16e6, 0.633), (128e6, 0.741))
A800_MONTA_NETWORK = Link(
    # Table 8: all_to_all over two nodes of 8, 32 and 256 MB, of which half cross. Nothing else is published: rings alike.
    ring=_MONTA_ALL_TO_ALL,
    messages=_MONTA_ALL_TO_ALL,
    gbps=25.0,
    latency_us=0.0,
    source="MoNTA table 8, all_to_all; its latency is in its points; rings, hops and messages beyond are not published",
)
# Table 8: all_gather over 8 ranks of 64 and 256 MB, of which each sends 7/8; 8192 MB as its text reads figure 13.
_MONTA_ALL_GATHER: Points = ((56e6, 0.726), (224e6, 0.776), (7168e6, 0.803))
A800_MONTA_NVLINK = Link(
    ring=_MONTA_ALL_GATHER,
    messages=_MONTA_ALL_GATHER,
    gbps=200.0,
    latency_us=0.0,
    measured_hops=7,
    source="MoNTA table 8 and figure 13, all_gather; its latency is in its points",
)
MONTA_MEMORY = Link(
    ring=((64e6, 0.80),), messages=((64e6, 0.80),), gbps=1600.0, latency_us=0.0, source="MoNTA table 8, copy of 64 MB"
)

_COPIES: Points = ((1.0 * _MIB, 0.17), (64e6, 0.80))
MEMORY = Link(
    # 64 MB: MoNTA table 8. 1 MiB: a kernel of 4 µs, which is our assumption.
    ring=_COPIES,
    messages=_COPIES,
    gbps=1675.0,
    latency_us=3.0,
    source="MoNTA table 8 at 64 MB; small copies take a kernel's launch, assumed 3 to 4 µs",
)
"""Copies and sums in a GPU's memory; the peak is half of what the memory reads and writes."""
