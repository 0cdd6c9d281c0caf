"""Recipes of low precision: in what format matrix products run, what is cast for them, and what of it is kept.

A recipe's products are those of linear layers: forward, for the input's gradient, and for the weight's. Embedding, router, head
and the attention's core stay in BF16 (DeepSeek-V3's report, section 3.3; Transformer Engine's autocast). Each operand is read in
BF16 and written in FP8, once for every direction in which a product runs along it: forward along rows, for the weight's gradient
along columns. Hopper's tensor cores take FP8 along rows only, so columns are a transposed copy; Blackwell's take both, but where
blocks are scaled the two directions are different numbers, and so two copies all the same.

Source of what exists where, and of copies: Transformer Engine's documentation, "Low precision training".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.hardware import Architecture, Gpu

__all__ = ["PRECISIONS", "RECIPES", "Precision", "Recipe", "recipe_of", "why_not"]

Precision = Literal["bf16", "fp8", "fp8-delayed", "fp8-current", "fp8-blockwise", "fp8-deepgemm", "fp8-mxfp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way of multiplying in FP8.

    Attributes:
        architectures: the GPUs that have it, and how many copies of an operand each needs for both directions.
        reads: how often an operand is read in BF16 to be cast: twice where its largest element is sought first.
        scale_bytes: of the scales, per element of a copy.
        rate: of the GPU's FP8 products with one scale for a tensor (``Gpu.gemm_fp8``).
        output_bytes: of an element that attention gives, where one copy serves its backward pass and the projection behind it;
            0: it is kept in BF16 for the one, and cast for the other.
        casts_together: whether one kernel casts the rows of all groups of a grouped product; else each group's has its own
            (Transformer Engine 2.10, csrc/extensions/cast.cpp, multi_tensor_quantize_impl).
        remakes: whether a cast may be made again for the backward pass; not where scales follow from a history.
        megatron: the name that Megatron-LM's --fp8-recipe has for it; empty: it has none.
    """

    name: str
    architectures: dict[Architecture, int]
    reads: int = 1
    scale_bytes: float = 0.0
    rate: float = 1.0
    output_bytes: float = 0.0
    casts_together: bool = False
    remakes: bool = True
    megatron: str = ""

    def copies(self, gpu: Gpu) -> int:
        """How many FP8 copies of an operand there are on ``gpu``."""
        return self.architectures[gpu.architecture]

    def copy_bytes(self) -> float:
        """The bytes of an element of one copy, with its part of the scales."""
        return 1 + self.scale_bytes

    def cast_bytes(self, gpu: Gpu) -> float:
        """The bytes that are read and written to cast one element for both directions."""
        return 2 * self.reads + self.copies(gpu) * self.copy_bytes()


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="fp8-delayed",
            architectures={"hopper": 2, "blackwell": 1, "rubin": 1, "cdna": 2},
            casts_together=True,
            remakes=False,
            megatron="delayed",
        ),
        Recipe(
            name="fp8-current",
            architectures={"hopper": 2, "blackwell": 1, "rubin": 1, "cdna": 2},
            reads=2,
            megatron="tensorwise",
        ),
        # Blocks of 1×128 (activations) and 128×128 (weights), an FP32 scale each. Rate: Transformer Engine's GEMM profiling
        # page, H200 NVL: 22.9 ms a layer with its casts, where one scale for a tensor takes 16.8 ms without and 20.3 ms with
        # them: less such casts, but for their second read, 20.0 ms are left.
        Recipe(name="fp8-blockwise", architectures={"hopper": 2}, scale_bytes=4 / 128, rate=0.84, megatron="blockwise"),
        # The same format by DeepSeek's own kernels, whose published table Gpu.gemm_fp8 of Hopper is. Attention's output is kept
        # once, in E5M6 with scales (DeepSeek-V3, arXiv:2412.19437, section 3.3.3): 12 bits.
        Recipe(
            name="fp8-deepgemm",
            architectures={"hopper": 2},
            scale_bytes=4 / 128,
            output_bytes=1.5 + 4 / 128,
            casts_together=True,
        ),
        # Blocks of 32 with a scale of a byte. Rate: the same page, B300, pre-quantized: 7.16 ms a layer against 6.81 ms.
        Recipe(
            name="fp8-mxfp8",
            architectures={"blackwell": 2, "rubin": 2},
            scale_bytes=1 / 32,
            rate=0.951,
            megatron="mxfp8",
        ),
    )
}
"""The known recipes by name. NVFP4 is not here: how its products and casts compare is published for one dense model only."""
_DEFAULTS: dict[Architecture, str] = {
    "hopper": "fp8-delayed",
    "blackwell": "fp8-mxfp8",
    "rubin": "fp8-mxfp8",
    "cdna": "fp8-delayed",
}
"""The recipe that the word fp8 means: Transformer Engine's own default (recipe.get_default_fp8_recipe). Rubin's is assumed to be
Blackwell's, and AMD's GPUs to have Hopper's, with its transposed copies."""


def recipe_of(precision: str, gpu: Gpu) -> Recipe | None:
    """The recipe that ``precision`` means on ``gpu``; None: BF16.

    Raises UsageError for an unknown word, and for what the GPU does not have, with what it has.
    """
    if precision == "bf16":
        return None
    if reason := why_not(precision, gpu):
        raise UsageError(reason)
    return RECIPES[_DEFAULTS[gpu.architecture] if precision == "fp8" else precision]


def why_not(precision: str, gpu: Gpu) -> str:
    """Why ``gpu`` cannot multiply in ``precision``; empty where it can. Raises UsageError for an unknown word."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    if precision == "bf16":
        return ""
    if not gpu.fp8_tflops or gpu.architecture not in _DEFAULTS:
        return f"precision {precision}: {gpu.name} has no FP8 units; use bf16"
    if precision == "fp8" or gpu.architecture in RECIPES[precision].architectures:
        return ""
    known = [name for name, recipe in RECIPES.items() if gpu.architecture in recipe.architectures]
    return f"precision {precision}: {gpu.name} does not have it; use {', '.join(known)} or bf16"
