"""The rows that the three papers print, row by row, and what each row leaves open.

Sources: "MoE Parallel Folding" (Liu et al. 2025, arXiv:2504.14960), "MegaScale-MoE" (Jin et al. 2025, arXiv:2505.11432),
"MoNTA" (Guo et al. 2024, arXiv:2411.00662). Numbers are as printed; where the scan shifted columns or labels the row says
so.

Nothing here is ours: what we assume is in :data:`ASSUMPTIONS`, each with where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "AFTERWARDS",
    "ASSUMPTIONS",
    "CALIBRATION",
    "FP8_TFLOPS",
    "MEGASCALE_GAIN",
    "MEGASCALE_MODELS",
    "METHODS",
    "PEAK_TFLOPS",
    "SYNCHRONISATION",
    "TABLE_1",
    "TABLE_3",
    "TABLE_4",
    "TABLE_5",
    "VPP",
    "Check",
    "Method",
    "Row",
]

Quality = Literal["printed", "assigned", "misprint"]
Method = Literal["FSDP", "FSDP+EP", "TP+EP+DP", "MCore", "folded"]
METHODS: tuple[Method, ...] = ("FSDP", "FSDP+EP", "TP+EP+DP", "MCore", "folded")
"""In the order in which table 1 lists them."""

PEAK_TFLOPS = 989.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published measurement. ``mfu`` None: out of memory.

    ``etp`` 0: that of attention's TP, which everything but folding has. ``quality``: ``printed``; ``assigned``, where the
    scan scrambled the labels and values were given back to their rows by order, by their GPU counts and by table 3;
    ``misprint``, where the scan's number of GPUs cannot be (see the document).
    """

    table: str
    model: str
    gpus: int
    method: Method
    tp: int
    ep: int
    pp: int = 1
    cp: int = 1
    etp: int = 0
    global_batch: int = 256
    sequence: int = 4096
    precision: Literal["bf16", "fp8"] = "bf16"
    mfu: float | None = None
    quality: Quality = "printed"

    @property
    def name(self) -> str:
        """The row's name, such as ``table 3 / mixtral-8x22b / folded / 128``."""
        long = f" / {self.sequence // 1024}K" if self.sequence != 4096 else ""
        fp8 = " / fp8" if self.precision == "fp8" else ""
        return f"{self.table} / {self.model} / {self.method} / {self.gpus}{long}{fp8}"

    @property
    def is_calibration(self) -> bool:
        """Whether a compute efficiency was fitted to it."""
        return self in CALIBRATION


@dataclass(frozen=True, slots=True)
class Check:
    """Something that a reproduction must show. ``details``: what fails, or what was seen."""

    name: str
    holds: bool
    details: str


_MIXTRAL, _QWEN, _FINE, _LLAMA = "mixtral-8x22b", "qwen2-57b-a14b", "mixtral-8x22b-g8t8", "llama3-8x70b"

# Table 3 (appendix 6.4) with table 1: global batch 256, sequence 4096, BF16, capacity factor 1. Llama3's columns are
# shifted in the scan; FSDP's EP is blank for Mixtral-8x22B.
TABLE_3: tuple[Row, ...] = (
    Row(table="table 3", model=_MIXTRAL, gpus=128, method="FSDP", tp=8, ep=1, mfu=0.043),
    Row(table="table 3", model=_MIXTRAL, gpus=128, method="FSDP+EP", tp=2, ep=8, mfu=0.234),
    Row(table="table 3", model=_MIXTRAL, gpus=128, method="TP+EP+DP", tp=4, ep=8, mfu=0.366),
    Row(table="table 3", model=_MIXTRAL, gpus=128, method="MCore", tp=2, ep=4, pp=8, mfu=0.463),
    Row(table="table 3", model=_MIXTRAL, gpus=128, method="folded", tp=2, ep=8, pp=8, etp=1, mfu=0.493),
    Row(table="table 3", model=_QWEN, gpus=64, method="FSDP", tp=2, ep=1, mfu=0.099),
    Row(table="table 3", model=_QWEN, gpus=64, method="FSDP+EP", tp=1, ep=8, mfu=0.254),
    Row(table="table 3", model=_QWEN, gpus=64, method="TP+EP+DP", tp=4, ep=4, mfu=0.231),
    Row(table="table 3", model=_QWEN, gpus=64, method="MCore", tp=2, ep=4, pp=4, mfu=0.353),
    Row(table="table 3", model=_QWEN, gpus=64, method="folded", tp=2, ep=4, pp=4, etp=1, mfu=0.390),
    Row(table="table 3", model=_FINE, gpus=128, method="FSDP", tp=8, ep=1, mfu=0.022),
    Row(table="table 3", model=_FINE, gpus=128, method="FSDP+EP", tp=4, ep=8, mfu=0.090),
    Row(table="table 3", model=_FINE, gpus=128, method="TP+EP+DP", tp=8, ep=8, mfu=0.087),
    Row(table="table 3", model=_FINE, gpus=128, method="MCore", tp=2, ep=8, pp=8, mfu=0.171),
    Row(table="table 3", model=_FINE, gpus=128, method="folded", tp=4, ep=8, pp=8, etp=1, mfu=0.288),
    Row(table="table 3", model=_LLAMA, gpus=256, method="FSDP", tp=8, cp=8, ep=1, mfu=None),
    Row(table="table 3", model=_LLAMA, gpus=256, method="FSDP+EP", tp=8, ep=8, mfu=0.196),
    Row(table="table 3", model=_LLAMA, gpus=256, method="TP+EP+DP", tp=8, ep=8, mfu=None),
    Row(table="table 3", model=_LLAMA, gpus=256, method="MCore", tp=8, ep=4, pp=8, mfu=0.388),
    Row(table="table 3", model=_LLAMA, gpus=256, method="folded", tp=8, ep=8, pp=16, etp=1, mfu=0.416),
)

CALIBRATION: tuple[Row, ...] = tuple(row for row in TABLE_3 if row.method == "MCore")
"""The only rows that anything is fitted to: one number for each model."""

TABLE_1 = {(row.model, row.method): row.mfu for row in TABLE_3}


def _scaled(
    model: str,
    method: Method,
    found: dict[int, float],
    quality: Quality,
    global_batch: int = 1024,
) -> list[Row]:
    """Rows of table 4: the mapping of table 3, other numbers of GPUs."""
    base = next(row for row in TABLE_3 if (row.model, row.method) == (model, method))
    return [
        Row(
            table="table 4",
            model=model,
            gpus=gpus,
            method=method,
            tp=base.tp,
            ep=base.ep,
            pp=base.pp,
            cp=base.cp,
            etp=base.etp,
            global_batch=global_batch,
            mfu=mfu,
            quality=quality,
        )
        for gpus, mfu in found.items()
    ]


# Table 4: global batch 1024, mappings of table 3. The first block of the scan is whole; from its last rows on, labels and
# values have slipped against each other. Two values of Llama3's are in the text ("from 43.7% to 41.5%"); the scan puts
# the first at 128 GPUs, where states alone take 65 GB of each, while MCore's row of the same block begins at 256.
TABLE_4: tuple[Row, ...] = (
    *_scaled(_MIXTRAL, "MCore", {128: 0.494, 256: 0.480, 512: 0.455, 1024: 0.423}, "printed"),
    *_scaled(_MIXTRAL, "folded", {128: 0.522, 256: 0.507, 512: 0.489, 1024: 0.449}, "printed"),
    *_scaled(_MIXTRAL, "FSDP+EP", {128: 0.239, 256: 0.255, 512: 0.244, 1024: 0.238}, "printed"),
    *_scaled(_LLAMA, "folded", {256: 0.437, 1024: 0.415}, "printed"),
    *_scaled(_LLAMA, "folded", {128: 0.437}, "misprint"),
    *_scaled(_MIXTRAL, "TP+EP+DP", {128: 0.404, 256: 0.391, 512: 0.360, 1024: 0.362}, "assigned"),
    *_scaled(_QWEN, "MCore", {64: 0.362, 128: 0.360, 256: 0.348, 512: 0.325, 1024: 0.298}, "assigned"),
    *_scaled(_QWEN, "folded", {64: 0.399, 128: 0.397, 256: 0.381, 512: 0.366, 1024: 0.334}, "assigned"),
    *_scaled(_QWEN, "FSDP+EP", {64: 0.263, 128: 0.256, 256: 0.234, 512: 0.228, 1024: 0.216}, "assigned"),
    *_scaled(_QWEN, "TP+EP+DP", {64: 0.224, 128: 0.209, 256: 0.198, 512: 0.197, 1024: 0.179}, "assigned"),
    *_scaled(_FINE, "MCore", {128: 0.198, 256: 0.184, 512: 0.163, 1024: 0.134}, "assigned"),
    *_scaled(_FINE, "folded", {128: 0.300, 256: 0.293, 512: 0.267, 1024: 0.255}, "assigned"),
    *_scaled(_FINE, "FSDP+EP", {128: 0.090, 256: 0.085, 512: 0.089, 1024: 0.086}, "assigned"),
    *_scaled(_FINE, "TP+EP+DP", {128: 0.086, 256: 0.085, 512: 0.085, 1024: 0.081}, "assigned"),
    *_scaled(_LLAMA, "MCore", {256: 0.401, 512: 0.395, 1024: 0.391}, "assigned"),
    *_scaled(_LLAMA, "folded", {512: 0.427}, "assigned"),
    *_scaled(_LLAMA, "FSDP+EP", {256: 0.189, 512: 0.173, 1024: 0.171}, "assigned"),
)


def _long(
    method: Method, gpus: int, degrees: tuple[int, int, int], sequence_k: int, global_batch: int, mfu: float
) -> Row:
    cp, tp, ep = degrees
    return Row(
        table="table 5",
        model=_MIXTRAL,
        gpus=gpus,
        method=method,
        tp=tp,
        ep=ep,
        pp=8,
        cp=cp,
        etp=1 if method == "folded" else 0,
        global_batch=global_batch,
        sequence=sequence_k * 1024,
        mfu=mfu,
    )


# Table 5. Its Qwen2 rows repeat Mixtral's in the scan and are left out; the text gives Qwen2 from 38.7 % at 16K to 35.9 %
# at 128K, without mappings.
TABLE_5: tuple[Row, ...] = (
    _long("MCore", 128, (4, 2, 4), 16, 1024, 0.453),
    _long("MCore", 256, (8, 2, 4), 32, 512, 0.432),
    _long("MCore", 512, (16, 2, 4), 64, 256, 0.426),
    _long("MCore", 1024, (16, 4, 8), 128, 128, 0.382),
    _long("folded", 128, (4, 2, 8), 16, 1024, 0.476),
    _long("folded", 256, (8, 2, 8), 32, 512, 0.451),
    _long("folded", 512, (8, 4, 8), 64, 256, 0.445),
    _long("folded", 1024, (8, 8, 8), 128, 128, 0.429),
)

FP8_TFLOPS = {("MCore", "bf16"): 458.3, ("folded", "bf16"): 487.7, ("MCore", "fp8"): 575.1, ("folded", "fp8"): 631.7}
"""Table 2: Mixtral-8x22B on 128 GPUs."""

VPP = {(_MIXTRAL, 8): 7, (_FINE, 8): 7, (_QWEN, 4): 7, (_LLAMA, 8): 10, (_LLAMA, 16): 5}
"""Chunks of layers of each pipeline rank, by model and PP: one layer each."""

ASSUMPTIONS = (
    (
        "Interleaved pipeline, one layer a chunk (VPP 7; Llama3-8x70B: 10 at PP 8, 5 at PP 16)",
        "not printed. The same group's published benchmark configurations (Megatron-MoE-ModelZoo, runtime_configs/benchmarking/"
        "runtime.conf) run Mixtral-8x22B with TP2 PP8 EP8 VPP7 and Qwen2-57B-A14B with TP2 PP4 EP4 VPP7, both with "
        "micro-batches of "
        "1 and a global batch of 256: table 3's rows. Table 4 agrees: over Mixtral's rows 1/MFU grows by about 3 "
        "micro-batches for "
        "each micro-batch fewer, bubble and everything else that a step pays once together; 1F1B without chunks has 7 in "
        "its bubble alone.",
    ),
    ("Micro-batches of one sequence", "the same configurations; nothing else is printed."),
    (
        "Recomputation: the least (none, megascale, full) that fits in memory",
        "not printed; the same configurations have none for the two models.",
    ),
    (
        "MFU counts causal attention by half",
        "not printed. Megatron-LM counted the whole matrix until 2025-03-06 (commit 8873b55d6a), half of it since. Table "
        "5 tells which: "
        "from 4K to 128K the time that a token takes more would mean that attention ran at 20 % of the peak if the whole "
        "matrix was "
        "counted, and at 38 % if half was, which is what kernels of that time reach (forward and backward together).",
    ),
    (
        "FSDP: ZeRO-3 with nothing hidden. FSDP+EP: ZeRO-3 with weights prefetched. Both sum gradients in FP32 "
        "for every micro-batch. TP+EP+DP: ZeRO-1, no pipeline",
        "section 4.2: FSDP's communication 'cannot be effectively overlapped', FSDP+EP's 'cannot be fully overlapped'; ZeRO-1 in "
        "place of ZeRO-3.",
    ),
    ("Even routing, capacity factor 1", "section 4.2."),
)

AFTERWARDS = (
    (
        "The product of a weight's gradient also reads and writes the FP32 sum that it adds to (8 bytes a weight)",
        "without it Llama3-8x70B folded was predicted 16 % too high: its experts are large, and their rows few.",
    ),
    (
        "FP8: what goes into a product is cast in memory; head and router stay in BF16",
        "without it table 2's FP8 rows were predicted 14 to 19 % too high.",
    ),
    (
        "FSDP+EP prefetches weights and sums gradients when nothing else runs",
        "with nothing hidden its rows were predicted 8 to 30 % too low; *bounds* show both ends.",
    ),
    (
        "Unfolded expert groups reach into cp where dp has no room",
        "table 5's MCore mappings have EP 4 with DP 2, and could not be laid out otherwise.",
    ),
    (
        "Only those sends between stages count that lie on the longest chain of tasks",
        "a measured pipeline on the emulated cluster was faster than predicted (benchmarks/README.md); here it moves "
        "little.",
    ),
)
"""The changes that were put into the model after its first predictions were seen. The four factors were fitted again with it."""

MEGASCALE_MODELS = ("internal-352b", "mixtral-8x7b", "mixtral-8x22b", "hunyuan-large", "phi-3.5-moe", "deepseekmoe")
"""Table 2 of MegaScale-MoE; its sequence length is 8192 (section 6.1)."""

MEGASCALE_GAIN = (0.149, 0.329)
"""SP+EP over TP+TP in MFU, the least and the most of six models (section 6.2, figure 13): one node of eight H800, global
batch 32."""

SYNCHRONISATION = (0.003, 0.031)
"""Figure 14: by how much SP's parameter synchronisation takes longer than TP's: 4 and 8 data-parallel groups of eight
GPUs, 384 to 1536 MB of attention parameters on each GPU, 10 GB of FFN parameters."""
