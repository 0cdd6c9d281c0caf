"""The models of the papers that commlayer follows, and those that came after them: :class:`ModelShape` by their names."""

from __future__ import annotations

from typing import Any

from commlayer.profiles.errors import UsageError
from commlayer.profiles.known_names import closest_or_all
from commlayer.scheduler.mapping.model import AttentionWindow, LatentAttention, LinearAttention, ModelShape

__all__ = ["MODELS", "load", "names"]

_MEGASCALE = "MegaScale-MoE (arXiv:2505.11432), table 2"
_FOLDING = "MoE Parallel Folding (arXiv:2504.14960), section 4.1"

_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "top_k", "width", "vocabulary")
_SHAPES: dict[str, tuple[Any, ...]] = {
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 8, 2, 14336, 32000),
    "mixtral-8x22b": (56, 6144, 48, 8, 128, 8, 2, 16384, 32000),
    "mixtral-8x22b-g8t8": (56, 6144, 48, 8, 128, 64, 8, 2048, 32000),
    "llama3-8x70b": (80, 8192, 64, 8, 128, 8, 2, 28672, 128256),
    "qwen2-57b-a14b": (28, 3584, 28, 4, 128, 64, 8, 2560, 151936),
    "internal-352b": (60, 4096, 32, 8, 128, 32, 3, 14336, 65536),
    "hunyuan-large": (64, 6400, 80, 8, 80, 16, 1, 18304, 128512),
    "phi-3.5-moe": (32, 4096, 32, 8, 128, 16, 2, 6400, 32064),
    "deepseekmoe-16b": (28, 2048, 16, 16, 128, 64, 6, 1408, 102400),
    "deepseek-v3": (61, 7168, 128, 128, 128, 256, 8, 2048, 129280),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 128, 8, 1536, 151936),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 128, 8, 768, 151936),
    "qwen3-next-80b-a3b": (48, 2048, 16, 2, 256, 512, 10, 512, 151936),
    "deepseek-v2": (60, 5120, 128, 128, 128, 160, 6, 1536, 102400),
    "deepseek-v2-lite": (27, 2048, 16, 16, 128, 64, 6, 1408, 102400),
    "moonlight-16b-a3b": (27, 2048, 16, 16, 128, 64, 6, 1408, 163840),
    "kimi-k2": (61, 7168, 64, 64, 128, 384, 8, 2048, 163840),
    "glm-4.5": (92, 5120, 96, 8, 128, 160, 8, 1536, 151552),
    "glm-4.5-air": (46, 4096, 96, 8, 128, 128, 8, 1408, 151552),
    "gpt-oss-20b": (24, 2880, 64, 8, 64, 32, 4, 2880, 201088),
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 128, 4, 2880, 201088),
    "llama4-scout": (48, 5120, 40, 8, 128, 16, 1, 8192, 202048),
    "llama4-maverick": (48, 5120, 40, 8, 128, 128, 1, 8192, 202048),
    "minimax-text-01": (80, 6144, 64, 8, 128, 32, 2, 9216, 200064),
    "minimax-m2": (62, 3072, 48, 8, 128, 256, 8, 1536, 200064),
}
_LATENT = LatentAttention(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_LATENT_DIRECT = LatentAttention(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_GPT_OSS = {"qkv_bias": True, "vectors": 64 + 2880, "expert_vectors": 3 * 2880, "clamps": True}

_MORE: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "published": 46.7e9,
        "source": "config.json of mistralai/Mixtral-8x7B-v0.1; size: Mistral AI, Mixtral of experts",
    },
    "mixtral-8x22b": {
        "published": 141e9,
        "source": "config.json of mistral-community/Mixtral-8x22B-v0.1; size: Mistral AI, Cheaper, better, faster, stronger",
    },
    "mixtral-8x22b-g8t8": {
        "source": f"{_FOLDING}: Mixtral-8x22B, experts an eighth as wide and eight times as many; size: nobody published it",
    },
    "llama3-8x70b": {
        "source": f"{_FOLDING}: Llama-3-70B upcycled to 8 experts; its shape: config.json of meta-llama/Meta-Llama-3-70B; "
        "top-2 is assumed, as Mixtral's; size: nobody published it",
    },
    "qwen2-57b-a14b": {
        "shared_width": 20480,
        "moe_vectors": 3584,
        "qkv_bias": True,
        "published": 57e9,
        "source": "config.json of Qwen/Qwen2-57B-A14B; size: its model card",
    },
    "internal-352b": {
        "shared_width": 14336,
        "published": 352e9,
        "source": f"{_MEGASCALE} and section 6.1; the shared expert is deduced, the paper names none: without it 341e9 "
        "parameters, and its MFU on 240 and 1440 GPUs (32.48 %, 27.89 %) comes out as 25.2 % and 21.7 %, with it as 32.48 % and "
        "27.92 %",
    },
    "hunyuan-large": {
        "shared_width": 18304,
        "ties_embeddings": True,
        "vectors": 2 * 80,
        "published": 389e9,
        "source": "config.json of tencent/Tencent-Hunyuan-Large (Hunyuan-A50B-Pretrain); size: arXiv:2411.02265. "
        "Pairs of its layers share keys and values, which is left out: 0.07 % of the parameters",
    },
    "phi-3.5-moe": {
        "qkv_bias": True,
        "vectors": 3 * 4096,
        "end_vectors": 4096 + 32064,
        "published": 41.9e9,
        "source": "config.json of microsoft/Phi-3.5-MoE-instruct; size: its model card",
    },
    "deepseekmoe-16b": {
        "shared_width": 2 * 1408,
        "dense_layers": 1,
        "dense_width": 10944,
        "published": 16.4e9,
        "source": "config.json of deepseek-ai/deepseek-moe-16b-base; size: arXiv:2401.06066",
    },
    "deepseek-v3": {
        "router_groups": 8,
        "router_group_limit": 4,
        "shared_width": 2048,
        "dense_layers": 3,
        "dense_width": 18432,
        "latent": _LATENT,
        "published": 671e9,
        "source": "config.json of deepseek-ai/DeepSeek-V3, without the multi-token-prediction module; size: arXiv:2412.19437",
    },
    "qwen3-235b-a22b": {
        "vectors": 2 * 128,
        "published": 235e9,
        "source": "config.json of Qwen/Qwen3-235B-A22B; size: arXiv:2505.09388",
    },
    "qwen3-30b-a3b": {
        "vectors": 2 * 128,
        "published": 30.5e9,
        "source": "config.json of Qwen/Qwen3-30B-A3B; size: its model card",
    },
    "qwen3-next-80b-a3b": {
        "shared_width": 512,
        "gated_attention": True,
        "linear": LinearAttention("gated_delta", 36, 16, 32, 128, 128, 4),
        "vectors": 2 * 256,
        "moe_vectors": 2048,
        "published": 80e9,
        "source": "config.json of Qwen/Qwen3-Next-80B-A3B-Instruct, without multi-token prediction; size: its model card",
    },
    "deepseek-v2": {
        "router_groups": 8,
        "router_group_limit": 3,
        "shared_width": 2 * 1536,
        "dense_layers": 1,
        "dense_width": 12288,
        "latent": _LATENT,
        "published": 236e9,
        "source": "config.json of deepseek-ai/DeepSeek-V2; size: arXiv:2405.04434",
    },
    "deepseek-v2-lite": {
        "shared_width": 2 * 1408,
        "dense_layers": 1,
        "dense_width": 10944,
        "latent": _LATENT_DIRECT,
        "published": 15.7e9,
        "source": "config.json of deepseek-ai/DeepSeek-V2-Lite; size: arXiv:2405.04434, appendix B",
    },
    "moonlight-16b-a3b": {
        "shared_width": 2 * 1408,
        "dense_layers": 1,
        "dense_width": 11264,
        "latent": _LATENT_DIRECT,
        "published": 16e9,
        "source": "config.json of moonshotai/Moonlight-16B-A3B; size: its model card",
    },
    "kimi-k2": {
        "shared_width": 2048,
        "dense_layers": 1,
        "dense_width": 18432,
        "latent": _LATENT,
        "published": 1.04e12,
        "source": "config.json of moonshotai/Kimi-K2-Base; size: arXiv:2507.20534",
    },
    "glm-4.5": {
        "shared_width": 1536,
        "dense_layers": 3,
        "dense_width": 12288,
        "qkv_bias": True,
        "vectors": 2 * 128,
        "published": 355e9,
        "source": "config.json of zai-org/GLM-4.5, without multi-token prediction; size: arXiv:2508.06471",
    },
    "glm-4.5-air": {
        "shared_width": 1408,
        "dense_layers": 1,
        "dense_width": 10944,
        "qkv_bias": True,
        "published": 106e9,
        "source": "config.json of zai-org/GLM-4.5-Air, without multi-token prediction; size: arXiv:2508.06471",
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        "moe_vectors": 32,
        "window": AttentionWindow(128, 12),
        "published": 20.91e9,
        "source": "config.json of openai/gpt-oss-20b; size: arXiv:2508.10925, table 1",
    },
    "gpt-oss-120b": {
        **_GPT_OSS,
        "moe_vectors": 128,
        "window": AttentionWindow(128, 18),
        "published": 116.83e9,
        "source": "config.json of openai/gpt-oss-120b; size: arXiv:2508.10925, table 1",
    },
    "llama4-scout": {
        "shared_width": 8192,
        "window": AttentionWindow(8192, 36, chunked=True),
        "published": 109e9,
        "source": "text_config of meta-llama/Llama-4-Scout-17B-16E; size: its model card, which counts the vision model too",
    },
    "llama4-maverick": {
        "shared_width": 8192,
        "dense_layers": 24,
        "dense_at": tuple(range(0, 48, 2)),
        "dense_width": 16384,
        "window": AttentionWindow(8192, 36, chunked=True),
        "published": 400e9,
        "source": "text_config of meta-llama/Llama-4-Maverick-17B-128E; size: its model card, which counts the vision model too",
    },
    "minimax-text-01": {
        "linear": LinearAttention("lightning", 70, 64, 64, 128, 128),
        "published": 456e9,
        "source": "config.json of MiniMaxAI/MiniMax-Text-01; size: arXiv:2501.08313",
    },
    "minimax-m2": {
        "vectors": (48 + 8) * 128,
        "published": 230e9,
        "source": "config.json of MiniMaxAI/MiniMax-M2; size: its model card",
    },
}
"""Further fields of a model beside the columns, and where its numbers come from."""

#: By name.
MODELS = {
    name: ModelShape(name=name, **dict(zip(_COLUMNS, sizes, strict=True)), **_MORE[name])
    for name, sizes in _SHAPES.items()
}


def names() -> list[str]:
    """Every model of the catalog."""
    return list(MODELS)


def load(name: str) -> ModelShape:
    """Look a model up by its name. Raises UsageError for one that the catalog lacks, with those that it has."""
    if name not in MODELS:
        raise UsageError(f"model: expected the name of a known model, got {name!r}{closest_or_all(name, MODELS)}")
    return MODELS[name]
