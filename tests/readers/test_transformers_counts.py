"""Parameters counted from configurations, held against the models that transformers builds of them on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commlayer.readers.model_files import MODEL_TYPES, from_config
from commlayer.scheduler.mapping import catalog, parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the trainers' extra has transformers")

_NOT_THERE = {
    "deepseek": "its code is in its repository",
    "hunyuan": "its code is in its repository",
    "kimi_k2": "its code is DeepSeek-V3's",
    "llama4": "its text_config is llama4_text",
    "minimax_m1": "minimax in transformers",
    "minimax_text_01": "minimax in transformers",
    "mimo_v2": "its code is MiMo-V2-Flash's",
    "kimi_k3": "its code is in its repository",
    "step3_text": "its code is in its repository",
    "step3_vl": "its code is in its repository",
    "qwen3_5_moe": "its text model is qwen3_5_moe_text",
    "minimax_m3_vl": "its text model is minimax_m3_vl_text",
    "glm5_next": "its text model is glm5_next_text",
}
"""Types that transformers has under another name, or not at all."""
_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "pad_token_id": None,
}
_INDEX = {"index_n_heads": 3, "index_head_dim": 10, "index_topk": 7}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
}
_KDA = {"linear_num_heads": 3, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
_HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention", "full_attention"]
_ROUTED = {"n_routed_experts": 6, "n_shared_experts": 1, "intermediate_size": 24}
_LEADING = _ROUTED | {"first_k_dense_replace": 1}
_KIMI: dict[str, Any] = _LATENT | _KDA | {"num_local_experts": 6, "n_shared_experts": 1, "intermediate_size": 24}
_KIMI |= {"first_k_dense_replace": 1, "layer_types": _HYBRID}
_MAMBA = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 10,
    "n_groups": 2,
    "conv_kernel": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_shared_expert_intermediate_size": 14,
    **_ROUTED,
}
_ONE_BY_ONE: list[tuple[str, dict[str, Any]]] = [
    (
        "deepseek_v4",
        _INDEX
        | {"num_key_value_heads": 1, "head_dim": 128, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 5, "hc_mult": 3}
        | {"n_routed_experts": 6, "n_shared_experts": 1, "sliding_window": 8, "num_hash_layers": 1}
        | {"compress_ratios": [0, 128, 4, 128, 4]},
    ),
    ("kimi_linear", _KIMI),
    ("kimi_linear", _KIMI | {"q_lora_rank": None}),
    (
        "mimo_v2_flash",
        _ROUTED
        | {"num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 8, "n_shared_experts": None, "sliding_window": 8}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 4]},
    ),
    (
        "minimax_m3_vl_text",
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 6, "num_local_experts": 6, "index_n_heads": 3}
        | {"dense_intermediate_size": 24, "shared_intermediate_size": 7, "index_head_dim": 10}
        | {
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 4],
            "mlp_layer_types": ["dense", *["sparse"] * 4],
        },
    ),
    ("nemotron_h", _MAMBA | {"hybrid_override_pattern": "MEM*EME"}),
    ("nemotron_h", _MAMBA | {"hybrid_override_pattern": "M-*E", "moe_latent_size": 20}),
    ("glm_moe_dsa", _LATENT | _INDEX | _LEADING | {"index_topk_freq": 2}),
    ("deepseek_v32", _LATENT | _INDEX | _LEADING | {"n_group": 1, "topk_group": 1, "attention_bias": True}),
]
"""Types whose layers differ from one another, or have parts that only a few sizes go with."""
_TEXT_MODELS = [
    ("glm5_next", "Glm5NextText", _LATENT | _INDEX | _KDA | _ROUTED | {"qk_rope_head_dim": 0, "index_kpool": 7}),
    (
        "step3p7",
        "Step3p7Text",
        {"n_routed_experts": 6, "intermediate_size": 24}
        | {"num_key_value_heads": 2, "head_dim": 16, "share_expert_dim": 7, "sliding_window": 8}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]}
        | {"attention_other_setting": {"num_attention_heads": 6}, "pad_token_id": 1},
    ),
]
"""Types that transformers has no head for: their text models, with one beside."""


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
        "qwen3_5_moe_text": width
        | {"num_experts": experts, "num_experts_per_tok": top_k, "layer_types": types}
        | shared
        | bias
        | linear,
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


_ALONE = {kind for kind, _ in _ONE_BY_ONE} | {"glm5_next_text", "step3p5", "step3p7"}
_KINDS = tuple(kind for kind in MODEL_TYPES if kind not in _NOT_THERE and kind not in _ALONE)


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


@pytest.mark.parametrize(("kind", "sizes"), _ONE_BY_ONE)
def test_layers_that_differ_are_counted(kind: str, sizes: dict[str, Any]) -> None:
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = {"model_type": kind} | _SIZES | sizes
    for name in {"nemotron_h": ["num_hidden_layers"], "minimax_m3_vl_text": ["moe_intermediate_size"]}.get(kind, []):
        del config[name]
    assert parameters.count(from_config(config, "small", "small.json")).total == _built(config)


@pytest.mark.parametrize(("package", "name", "sizes"), _TEXT_MODELS)
def test_text_models_within_others_are_counted(package: str, name: str, sizes: dict[str, Any]) -> None:
    """The configuration as transformers writes it, with every field that it has a default for."""
    where = f"transformers.models.{package}"
    configuration = pytest.importorskip(f"{where}.configuration_{package}", reason=f"transformers has no {package}")
    modeling = pytest.importorskip(f"{where}.modeling_{package}")
    known = getattr(configuration, f"{name}Config")(**(_SIZES | sizes))
    with torch.device("meta"):
        model = getattr(modeling, f"{name}Model")(known)
    built = sum(each.numel() for each in model.parameters()) + 99 * 64
    assert parameters.count(from_config(known.to_dict(), "small", "small.json")).total == built


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deepseek-v3.2", "deepseek_v32"),
        ("glm-5", "glm_moe_dsa"),
        ("kimi-linear-48b-a3b", "kimi_linear"),
        ("mimo-v2-flash", "mimo_v2_flash"),
        ("qwen3.5-35b-a3b", "qwen3_5_moe_text"),
    ],
)
def test_the_catalogue_has_what_transformers_takes_for_published(name: str, kind: str) -> None:
    """Their configurations' defaults are those of the checkpoints that they name."""
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    fields = transformers.AutoConfig.for_model(kind).to_dict()
    shape = from_config(fields, name, "defaults.json")
    ours = catalog.load(name)
    # The catalogue has the base and the epsilon of a checkpoint's own configuration, and 0 where nobody has read it.
    base, epsilon = shape.rotary_base and ours.rotary_base, shape.norm_epsilon and ours.norm_epsilon
    same = replace(shape, rotary_base=base, norm_epsilon=epsilon, source=ours.source, published=ours.published)
    assert same == ours
    assert ours.rotary_base in (0, shape.rotary_base)
    assert ours.norm_epsilon in (0, shape.norm_epsilon)
    assert parameters.count(ours).total == _built({"model_type": kind})
