"""The models of the papers that commlayer follows, and two that came after them."""

from __future__ import annotations

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.model import LatentAttention, ModelShape

__all__ = ["MODELS", "load", "names"]

_MEGASCALE = "MegaScale-MoE (arXiv:2505.11432), table 2"
_FOLDING = "MoE Parallel Folding (arXiv:2504.14960), section 4.1"

_ENTRIES = (
    ModelShape(
        name="mixtral-8x7b",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        experts=8,
        top_k=2,
        width=14336,
        vocabulary=32000,
        published=46.7e9,
        source="config.json of mistralai/Mixtral-8x7B-v0.1; size: Mistral AI, Mixtral of experts",
    ),
    ModelShape(
        name="mixtral-8x22b",
        layers=56,
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        experts=8,
        top_k=2,
        width=16384,
        vocabulary=32000,
        published=141e9,
        source="config.json of mistral-community/Mixtral-8x22B-v0.1; size: Mistral AI, Cheaper, better, faster, stronger",
    ),
    ModelShape(
        name="mixtral-8x22b-g8t8",
        layers=56,
        hidden=6144,
        heads=48,
        kv_heads=8,
        head_dim=128,
        experts=64,
        top_k=8,
        width=2048,
        vocabulary=32000,
        source=f"{_FOLDING}: Mixtral-8x22B, experts an eighth as wide and eight times as many; size: nobody published it",
    ),
    ModelShape(
        name="llama3-8x70b",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        experts=8,
        top_k=2,
        width=28672,
        vocabulary=128256,
        source=f"{_FOLDING}: Llama-3-70B upcycled to 8 experts; its shape: config.json of meta-llama/Meta-Llama-3-70B; "
        "top-2 is assumed, as Mixtral's; size: nobody published it",
    ),
    ModelShape(
        name="qwen2-57b-a14b",
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        experts=64,
        top_k=8,
        width=2560,
        vocabulary=151936,
        shared_width=20480,
        qkv_bias=True,
        published=57e9,
        source="config.json of Qwen/Qwen2-57B-A14B; size: its model card",
    ),
    ModelShape(
        name="internal-352b",
        layers=60,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        experts=32,
        top_k=3,
        width=14336,
        vocabulary=65536,
        shared_width=14336,
        published=352e9,
        source=f"{_MEGASCALE} and section 6.1; the shared expert is deduced, the paper names none: without it 341e9 parameters, "
        "and its MFU on 240 and 1440 GPUs (32.48 %, 27.89 %) comes out as 25.2 % and 21.7 %, with it as 32.48 % and 27.92 %",
    ),
    ModelShape(
        name="hunyuan-large",
        layers=64,
        hidden=6400,
        heads=80,
        kv_heads=8,
        head_dim=80,
        experts=16,
        top_k=1,
        width=18304,
        vocabulary=128512,
        shared_width=18304,
        ties_embeddings=True,
        published=389e9,
        source="config.json of tencent/Tencent-Hunyuan-Large (Hunyuan-A50B-Pretrain); size: arXiv:2411.02265. "
        "Pairs of its layers share keys and values, which is left out: 0.07 % of the parameters",
    ),
    ModelShape(
        name="phi-3.5-moe",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        experts=16,
        top_k=2,
        width=6400,
        vocabulary=32064,
        qkv_bias=True,
        published=41.9e9,
        source="config.json of microsoft/Phi-3.5-MoE-instruct; size: its model card",
    ),
    ModelShape(
        name="deepseekmoe-16b",
        layers=28,
        hidden=2048,
        heads=16,
        kv_heads=16,
        head_dim=128,
        experts=64,
        top_k=6,
        width=1408,
        vocabulary=102400,
        shared_width=2 * 1408,
        dense_layers=1,
        dense_width=10944,
        published=16.4e9,
        source="config.json of deepseek-ai/deepseek-moe-16b-base; size: arXiv:2401.06066",
    ),
    ModelShape(
        name="deepseek-v3",
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_dim=128,
        experts=256,
        top_k=8,
        width=2048,
        vocabulary=129280,
        shared_width=2048,
        dense_layers=3,
        dense_width=18432,
        latent=LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        published=671e9,
        source="config.json of deepseek-ai/DeepSeek-V3, without the multi-token-prediction module; size: arXiv:2412.19437",
    ),
    ModelShape(
        name="qwen3-235b-a22b",
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        width=1536,
        vocabulary=151936,
        published=235e9,
        source="config.json of Qwen/Qwen3-235B-A22B; size: arXiv:2505.09388",
    ),
)

#: By name.
MODELS = {entry.name: entry for entry in _ENTRIES}


def names() -> list[str]:
    """Every model of the catalog."""
    return list(MODELS)


def load(name: str) -> ModelShape:
    """By name. Raises UsageError for one that the catalog lacks, with those that it has."""
    if name not in MODELS:
        raise UsageError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
