"""Parameters counted from configurations, held against the models that transformers builds of them on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commlayer.readers.model_files import MODEL_TYPES, from_config
from commlayer.scheduler.mapping import parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the trainers' extra has transformers")

_NOT_THERE = {
    "deepseek": "its code is in its repository",
    "hunyuan": "its code is in its repository",
    "kimi_k2": "its code is DeepSeek-V3's",
    "llama4": "its text_config is llama4_text",
    "minimax_m1": "minimax in transformers",
    "minimax_text_01": "minimax in transformers",
}
"""Types that transformers has under another name, or not at all."""


@st.composite
def _attention(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 5))
    kv_heads = draw(st.sampled_from((1, 2, 4)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3)))
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 8)),
        "hidden_size": heads * 2 * draw(st.integers(1, 8)),
        "vocab_size": draw(st.integers(4, 99)),
        "intermediate_size": draw(st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _some_layers(draw: st.DrawFn, layers: int) -> list[int]:
    return sorted(draw(st.sets(st.integers(0, layers - 1))))


def _of_kind(draw: st.DrawFn, kind: str, base: dict[str, Any]) -> dict[str, Any]:
    """The fields that only this type has."""
    layers, has = base["num_hidden_layers"], st.booleans()
    experts, top_k = draw(st.integers(2, 6)), 2
    bias = {"attention_bias": draw(has)}
    width = {"moe_intermediate_size": draw(st.integers(1, 20))}
    local = {"num_local_experts": experts, "num_experts_per_tok": top_k}
    routed = {"n_routed_experts": experts, "num_experts_per_tok": top_k, "n_shared_experts": draw(st.integers(1, 2))}
    leading = width | routed | {"first_k_dense_replace": draw(st.integers(0, layers)), "n_group": 1, "topk_group": 1}
    sparse: dict[str, Any] = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "decoder_sparse_step": draw(st.integers(1, 3)),
    }
    sparse |= width | {"mlp_only_layers": _some_layers(draw, layers)}
    shared = {"shared_expert_intermediate_size": draw(st.integers(1, 20))}
    latent = {
        "q_lora_rank": draw(st.sampled_from((None, 4, 7))),
        "kv_lora_rank": draw(st.integers(1, 9)),
        "qk_nope_head_dim": draw(st.integers(1, 9)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
        "v_head_dim": draw(st.integers(1, 9)),
        "num_key_value_heads": base["num_attention_heads"],
    }
    linear = {
        "linear_num_key_heads": (heads := draw(st.integers(1, 3))),
        "linear_num_value_heads": heads * draw(st.integers(1, 2)),
        "linear_key_head_dim": draw(st.integers(1, 9)),
        "linear_value_head_dim": draw(st.integers(1, 9)),
        "linear_conv_kernel_dim": draw(st.integers(2, 4)),
    }
    types = ["full_attention" if draw(has) else "linear_attention" for _ in range(layers)]
    own: dict[str, dict[str, Any]] = {
        "llama": bias,
        "mistral": {"sliding_window": draw(st.sampled_from((None, 8)))},
        "qwen2": {"use_sliding_window": draw(has)},
        "qwen3": bias,
        "mixtral": local,
        "phimoe": local | bias | {"lm_head_bias": draw(has)},
        "olmoe": bias | {"num_experts": experts, "num_experts_per_tok": top_k},
        "gpt_oss": local | bias,
        "llama4_text": local
        | bias
        | {"intermediate_size_mlp": draw(st.integers(1, 40)), "interleave_moe_layer_step": draw(st.integers(1, 3))}
        | ({"moe_layers": _some_layers(draw, layers)} if draw(has) else {}),
        "minimax": local | {"layer_types": types},
        "minimax_m2": local,
        "qwen2_moe": sparse | shared | {"qkv_bias": draw(has)},
        "qwen3_moe": sparse | bias,
        "qwen3_next": sparse | shared | bias | linear | ({"layer_types": types} if draw(has) else {}),
        "deepseek_v2": leading | latent | bias,
        "deepseek_v3": leading | latent | bias,
        "glm4_moe": leading | bias | {"use_qk_norm": draw(has)},
        "dots1": leading | bias,
        "ernie4_5_moe": width
        | {
            "moe_num_experts": experts,
            "moe_k": top_k,
            "moe_num_shared_experts": draw(st.integers(0, 2)),
            "moe_layer_start_index": draw(st.integers(0, layers - 1)),
            "moe_layer_end_index": draw(st.sampled_from((-1, layers - 1))),
            "moe_layer_interval": draw(st.integers(1, 2)),
        },
        "hunyuan_v1_moe": bias | {"num_experts": experts, "moe_topk": top_k},
    }
    return own[kind]


_KINDS = tuple(kind for kind in MODEL_TYPES if kind not in _NOT_THERE)


@st.composite
def _configs(draw: st.DrawFn, kinds: tuple[str, ...] = _KINDS) -> dict[str, Any]:
    kind, base = draw(st.sampled_from(kinds)), draw(_attention())
    return {"model_type": kind} | base | _of_kind(draw, kind, base)


def _built(config: dict[str, Any]) -> int:
    fields = {name: value for name, value in config.items() if name != "model_type"}
    known = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(known)
    return sum(each.numel() for each in model.parameters())


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(_configs())
def test_counts_are_those_of_the_model_that_transformers_builds(config: dict[str, Any]) -> None:
    """Exactly, of every type that transformers has, whatever the sizes; nothing drawn here may be refused."""
    shape = from_config(config, "drawn", "drawn.json")
    assert parameters.count(shape).total == _built(config), config["model_type"]


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_type_is_counted(kind: str, data: st.DataObject) -> None:
    config = data.draw(_configs((kind,)))
    assert parameters.count(from_config(config, "drawn", "drawn.json")).total == _built(config)
