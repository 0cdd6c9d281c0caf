"""A model by its name or from a file: the config.json of a Hugging Face model, or a commlayer model in JSON.

A field that looks like a size and that no reader here understands is refused: a size that is silently wrong costs more than a
message. So is a bias or a norm of queries and keys that the type is not known to have. Fields that change no size are left alone:
token ids, dropout, initialisation, rotary embeddings, routing losses, quantisation, and the multi-token-prediction modules of
DeepSeek-V3, which are no part of the shape. Hunyuan-Large's keys and values that pairs of layers share count twice: below 0.1 %
of its parameters. The parameters of every type that transformers has are exactly those of its model (tests/readers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.known_names import closest, closest_or_all, is_path
from commlayer.profiles.printable import shortened
from commlayer.profiles.strict_json import parse_object
from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping.model import (
    MOST_LAYERS,
    MOST_OF_A_SIZE,
    AttentionWindow,
    LatentAttention,
    LinearAttention,
    ModelShape,
)

__all__ = ["FORMAT", "MODEL_TYPES", "from_config", "read_model", "resolve"]

#: Of our own files: ``{"format": "commlayer-model", "name": …, "layers": …}``, the fields of ModelShape.
FORMAT = "commlayer-model"

_SIZE_LIKE = re.compile(
    r"(^|_)(num|n|size|sizes|dim|dims|rank|ranks|layer|layers|expert|experts|freq|step|head|heads|topk|top_k|width)(_|$)"
)
_HAS_VECTORS = re.compile(r"(^|_)(bias|biases)(_|$)|qk_(layer)?norm")
_KEPT_APART = frozenset(("use_routing_bias",))  # what balances experts, and is no parameter
_LAYER_TYPES = frozenset(("full_attention", "sliding_attention", "chunked_attention", "linear_attention"))
# Of those that look like one; generation's and training's settings, which old files carry, among them.
_HARMLESS = frozenset(
    (
        "chunk_size_feed_forward",
        "encoder_no_repeat_ngram_size",
        "experts_per_token",
        "ep_size",
        "layer_norm_eps",
        "max_window_layers",
        "mtp_transformer_layers",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_mtp_modules",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "org_vocab_size",
        "rotary_dim",
        "top_k",
    )
)


def resolve(name_or_path: str) -> ModelShape:
    """A model of the catalog, or what a file (or the config.json of a folder) describes.

    Raises:
        UsageError: neither; or a file that cannot be read as one (:func:`read_model`).
    """
    if name_or_path in catalog.names():
        return catalog.load(name_or_path)
    if is_path(name_or_path):
        return read_model(name_or_path)
    raise UsageError(
        "model: expected the name of a known model or a file such as a Hugging Face config.json (or its folder), "
        f"got {shortened(name_or_path)!r}{closest_or_all(name_or_path, catalog.names())}"
    )


def read_model(path: str | Path) -> ModelShape:
    """The model that a file describes, or the config.json of a folder.

    Raises:
        UsageError: no such file, or one that is damaged, of an unknown kind, incomplete, or with a size that is not understood;
            names the file and the field.
    """
    file, typed = Path(path), str(path)  # a Path would be told without the ./ that somebody has typed
    if os.path.isdir(file):
        file /= "config.json"
        typed = str(file)
    try:
        data = read_file(file)
    except FileNotFoundError as error:
        hint = (
            "" if file.suffix == ".json" else closest(file.name, catalog.names())
        )  # the name of a repository of models, say
        raise UsageError(
            f"{shortened(typed)}: expected a model's JSON file, or a folder with a config.json, got no such file{hint}"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{shortened(str(file))}: expected a model's JSON file, or a folder with a config.json: {error.strerror}"
        ) from error
    content = parse_object(data, shortened(str(file)), "model's configuration")
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    if "format" in content:
        return _own(content, str(file))
    return from_config(content, name or "model", str(file))


def from_config(content: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The model of a Hugging Face configuration. ``where`` begins the messages of errors.

    Raises UsageError as :func:`read_model`.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        got = "but it is missing" if kind is None else f"got {shortened(repr(kind))}"
        raise UsageError(
            f"{where}: model_type: expected {', '.join(MODEL_TYPES)}, {got}. Another model can be described in a file "
            f'{{"format": "{FORMAT}", …}} with the fields of ModelShape'
        )
    part = content.get("text_config")
    if kind == "llama4" and isinstance(part, Mapping):
        content = {"tie_word_embeddings": content.get("tie_word_embeddings"), **part, "model_type": kind}
    config = _Config(content, where)
    shape = MODEL_TYPES[kind](config)
    config.refuse_unread()
    source = f"{where} ({kind})"
    try:
        return ModelShape(name=name, source=source, **shape)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _own(content: dict[str, Any], where: str) -> ModelShape:
    if content.pop("format") != FORMAT:
        raise UsageError(f"{where}: format: expected {FORMAT!r}")
    parts = {"latent": LatentAttention, "window": AttentionWindow, "linear": LinearAttention}
    records = [(content, ModelShape, ""), *((content.get(name), kind, f"{name}.") for name, kind in parts.items())]
    for record, kind, place in records:
        known = [field.name for field in fields(kind)]
        if isinstance(record, dict) and (unknown := sorted(set(record) - set(known))):
            raise UsageError(f"{where}: unknown field {place}{unknown[0]}: expected {', '.join(known)}")
    try:
        return msgspec.convert(content, ModelShape)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from error


class _Config:
    """A configuration that knows which of its fields were read."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content, self.where, self._read = content, where, {"model_type"}
        self.kind = content["model_type"]

    def whole(self, name: str, default: int | None = None, most: int = MOST_OF_A_SIZE) -> int:
        """A whole number of at most ``most``; of a list (one entry per layer) what all entries are. A missing one and null are
        the default."""
        value = self._value(name)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise UsageError(
                    f"{self.where}: {name}: expected one number for all layers, got different ones: {value}"
                )
            value = value[0]
        if value is None and default is not None:
            return default
        if value is None:
            raise UsageError(f"{self.where}: {name}: expected this field, but it is missing")
        if type(value) is not int or value < 0:
            raise UsageError(f"{self.where}: {name}: expected a whole number, got {value!r}")
        if value > most:
            raise UsageError(f"{self.where}: {name}: expected at most {most:,}, got {shortened(str(value))}")
        return value

    def number(self, name: str, default: int) -> int:
        """A whole number that may be negative."""
        value = self._value(name)
        if value is not None and type(value) is not int:
            raise UsageError(f"{self.where}: {name}: expected a whole number, got {value!r}")
        return default if value is None else value

    def layer_types(self, layers: int) -> list[str] | None:
        """The kind of each layer's attention, in transformers' words; None where it is missing."""
        value = self._value("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers or set(value) - _LAYER_TYPES:
            raise UsageError(
                f"{self.where}: layer_types: expected one of {', '.join(sorted(_LAYER_TYPES))} for each of {layers} layers, got "
                f"{shortened(str(value))}"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: {name}: expected true or false, got {value!r}")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, one for each layer; empty if it is missing."""
        value = self._value(name) or []
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise UsageError(f"{self.where}: {name}: expected a list of whole numbers, got {value!r}")
        return value

    def indices(self, name: str) -> set[int] | None:
        """A list of layers; None if it is missing."""
        value = self._value(name)
        if value is not None and (not isinstance(value, list) or any(type(each) is not int for each in value)):
            raise UsageError(f"{self.where}: {name}: expected a list of layers, got {value!r}")
        return None if value is None else set(value)

    def refuse_unread(self) -> None:
        """Refuse what looks like a size and was not read."""
        for name, value in self._content.items():
            values = value if isinstance(value, list) else [value]
            is_number = any(type(each) in (int, float) for each in values)
            if name not in self._read and name not in _HARMLESS and is_number and _SIZE_LIKE.search(name):
                raise UsageError(
                    f"{self.where}: {name}: this looks like a size, and a {self._content['model_type']} model is not known to "
                    "have it: remove it if it changes no size"
                )
            if value is True and name not in self._read and name not in _KEPT_APART and _HAS_VECTORS.search(name):
                raise UsageError(
                    f"{self.where}: {name}: a {self._content['model_type']} model is not known to have that: remove "
                    "it if it adds no parameters"
                )

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self._content.get(name)


def _common(config: _Config, width: str, *, names_head_dim: bool = False) -> dict[str, Any]:
    """The fields that all configurations have. ``width``: the field with an expert's. ``names_head_dim``: transformers has a
    default of its own for ``head_dim`` there, so that a file without it means another size than hidden_size /
    num_attention_heads."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", None if names_head_dim else 0) or config.whole("attention_head_dim", 0)
    if not head_dim and heads and hidden % heads:
        raise UsageError(
            f"{config.where}: head_dim: expected this field, as num_attention_heads={heads} does not divide hidden_size={hidden}"
        )
    return {
        "layers": config.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads"),
        "head_dim": head_dim or hidden // max(heads, 1),
        "width": config.whole(width),
        "vocabulary": config.whole("vocab_size"),
        "ties_embeddings": config.flag("tie_word_embeddings"),
        "vectors": 0,
    }


def _biases(config: _Config, found: dict[str, Any], *, output: bool = True, default: bool = False) -> dict[str, Any]:
    """With what ``attention_bias`` says of queries, keys and values, and of the output's projection."""
    has = config.flag("attention_bias", default)
    return found | {"qkv_bias": has, "vectors": found["vectors"] + (found["hidden"] if has and output else 0)}


def _head_norms(found: dict[str, Any]) -> dict[str, Any]:
    """With norms of queries and keys that all heads share."""
    return found | {"vectors": found["vectors"] + 2 * found["head_dim"]}


def _window(config: _Config, found: dict[str, Any], layers: Iterable[int], *, word: str = "sliding") -> dict[str, Any]:
    """With the window of attention in ``layers``, or in those that ``layer_types`` calls so, which goes before. A window that
    holds the longest sequence of the model is none."""
    count, types = len(list(layers)), config.layer_types(found["layers"])
    if types is not None:
        count = types.count(f"{word}_attention")
    tokens = config.whole("attention_chunk_size" if word == "chunked" else "sliding_window", 0)
    longest = config.whole("max_position_embeddings", 0)
    if not count or not tokens or 0 < longest <= tokens:
        return found
    return found | {"window": AttentionWindow(tokens, count, chunked=word == "chunked")}


def _placed(dense: list[int], width: int) -> dict[str, Any]:
    """The dense layers among others, by where they are."""
    leads = dense == list(range(len(dense)))
    return {
        "dense_layers": len(dense),
        "dense_width": width if dense else 0,
        "dense_at": () if leads else tuple(dense),
    }


def _dense(config: _Config, found: dict[str, Any]) -> dict[str, Any]:
    """A model without experts: every layer has an FFN of ``width``."""
    if config.flag("mlp_bias"):
        raise UsageError(f"{config.where}: mlp_bias: expected false: biases of dense FFNs are not supported")
    layers = list(range(found["layers"]))
    return found | {"experts": 1, "top_k": 1, "width": 1} | _placed(layers, found["width"])


def _llama(config: _Config) -> dict[str, Any]:
    return _dense(config, _biases(config, _common(config, "intermediate_size")))


def _mistral(config: _Config) -> dict[str, Any]:
    found = _common(config, "intermediate_size")
    return _dense(config, _window(config, found, range(found["layers"])))


def _qwen2_dense(config: _Config) -> dict[str, Any]:
    found = _common(config, "intermediate_size") | {"qkv_bias": True}
    return _dense(config, _later_windows(config, found))


def _qwen3_dense(config: _Config) -> dict[str, Any]:
    found = _head_norms(_biases(config, _common(config, "intermediate_size", names_head_dim=True)))
    return _dense(config, _later_windows(config, found))


def _later_windows(config: _Config, found: dict[str, Any]) -> dict[str, Any]:
    """Qwen's windows: from ``max_window_layers`` on, where ``use_sliding_window`` says so."""
    first = config.whole("max_window_layers", 28)
    is_used = config.flag("use_sliding_window")
    return _window(config, found, range(first, found["layers"])) if is_used else _without_window(config, found)


def _without_window(config: _Config, found: dict[str, Any]) -> dict[str, Any]:
    """No layer has a window, whatever ``sliding_window`` is; ``layer_types`` must not say otherwise."""
    for word in set(config.layer_types(found["layers"]) or ()) - {"full_attention"}:
        raise UsageError(f"{config.where}: layer_types: expected full_attention in every layer, got {word!r}")
    return found


def _mixtral(config: _Config, experts: str = "num_local_experts") -> dict[str, Any]:
    """Every layer has experts, and none is shared. ``experts``: the field with their number."""
    found = _common(config, "intermediate_size")
    found = _window(config, found, range(found["layers"]))
    return found | {"experts": config.whole(experts), "top_k": config.whole("num_experts_per_tok")}


def _phimoe(config: _Config) -> dict[str, Any]:
    """Its norms are LayerNorm, with biases."""
    found = _biases(config, _mixtral(config))
    hidden, vocabulary = found["hidden"], found["vocabulary"]
    head = vocabulary if config.flag("lm_head_bias") else 0
    return found | {"vectors": found["vectors"] + 2 * hidden, "end_vectors": hidden + head}


def _olmoe(config: _Config) -> dict[str, Any]:
    """The norms of queries and of keys go over all heads."""
    found = _biases(config, _mixtral(config, "num_experts"))
    hidden, heads = found["hidden"], found["heads"]
    return found | {"vectors": found["vectors"] + hidden + hidden // heads * found["kv_heads"]}


def _gpt_oss(config: _Config) -> dict[str, Any]:
    """Biases everywhere, a sink of each head, a window in every second layer, from the first."""
    found = _biases(config, _common(config, "intermediate_size", names_head_dim=True), default=True)
    found = _window(config, found, range(0, found["layers"], 2))
    experts = config.whole("num_local_experts")
    return found | {
        "experts": experts,
        "top_k": config.whole("num_experts_per_tok"),
        "vectors": found["vectors"] + found["heads"],
        "moe_vectors": experts,
        "expert_vectors": 2 * found["width"] + found["hidden"],
        "clamps": True,
    }


def _llama4(config: _Config) -> dict[str, Any]:
    """Experts in ``moe_layers``, or in every ``interleave_moe_layer_step``-th layer; chunked attention where positions are
    rotated; the shared expert is as wide as the others. The vision model of a whole configuration is no part of the shape."""
    found = _biases(config, _common(config, "intermediate_size", names_head_dim=True))
    layers, step = found["layers"], config.whole("interleave_moe_layer_step", 1)
    named = config.indices("moe_layers")
    sparse = set(range(step - 1, layers, step)) if named is None and step else named or set()
    interval = config.whole("no_rope_layer_interval", 4)
    rotates = config.numbers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    chunked = [layer for layer in range(layers) if rotates[layer : layer + 1] != [0]]
    found = _window(config, found, chunked, word="chunked")
    dense = [layer for layer in range(layers) if layer not in sparse]
    return (
        found
        | {
            "experts": config.whole("num_local_experts"),
            "top_k": config.whole("num_experts_per_tok", 1),
            "shared_width": found["width"],
        }
        | _placed(dense, config.whole("intermediate_size_mlp"))
    )


def _minimax(config: _Config) -> dict[str, Any]:
    """MiniMax-Text-01 and M1: most layers have lightning attention, by ``layer_types`` or ``attn_type_list`` (0)."""
    found = _mixtral(config)
    layers, listed = found["layers"], config.numbers("attn_type_list")
    types = config.layer_types(layers)
    if types is None and len(listed) != layers:
        raise UsageError(
            f"{config.where}: attn_type_list: expected a 0 or a 1 for each of {layers} layers, or layer_types"
        )
    linear = types.count("linear_attention") if types is not None else listed.count(0)
    config.whole("block_size", 0)
    if config.whole("shared_intermediate_size", 0):
        raise UsageError(
            f"{config.where}: shared_intermediate_size: expected 0: shared experts are not known of this model"
        )
    if "window" in found:
        raise UsageError(f"{config.where}: sliding_window: expected none beside linear attention")
    heads, size = found["heads"], found["head_dim"]
    return found | {"linear": LinearAttention("lightning", linear, heads, heads, size, size) if linear else None}


def _minimax_m2(config: _Config) -> dict[str, Any]:
    """Every layer has scores; norms of queries and of keys go over all heads."""
    found = _common(config, "intermediate_size", names_head_dim=True)
    if 0 in config.numbers("attn_type_list"):
        raise UsageError(f"{config.where}: attn_type_list: expected 1 in every layer")
    if config.whole("shared_intermediate_size", 0):
        raise UsageError(
            f"{config.where}: shared_intermediate_size: expected 0: shared experts are not known of this model"
        )
    norms = (found["heads"] + found["kv_heads"]) * found["head_dim"] if config.flag("use_qk_norm", True) else 0
    return found | {
        "experts": config.whole("num_local_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "vectors": norms,
    }


def _qwen(config: _Config, *, names_head_dim: bool = False) -> dict[str, Any]:
    """Layer i has experts where decoder_sparse_step divides i + 1 and mlp_only_layers does not name i."""
    found = _common(config, "moe_intermediate_size", names_head_dim=names_head_dim)
    layers, step = found["layers"], config.whole("decoder_sparse_step", 1)
    only = config.indices("mlp_only_layers") or set()
    dense = [layer for layer in range(layers) if layer in only or not step or (layer + 1) % step]
    return (
        found
        | {"experts": config.whole("num_experts"), "top_k": config.whole("num_experts_per_tok")}
        | _placed(dense, config.whole("intermediate_size", None if dense else 0))
    )


def _qwen2(config: _Config) -> dict[str, Any]:
    found = _qwen(config)
    first = config.whole("max_window_layers", 28)
    even = range(0, min(first, found["layers"]), 2)
    found = _window(config, found, even) if config.flag("use_sliding_window") else _without_window(config, found)
    return found | {
        "shared_width": config.whole("shared_expert_intermediate_size"),
        "moe_vectors": found["hidden"],
        "qkv_bias": config.flag("qkv_bias", True),
    }


def _qwen3(config: _Config) -> dict[str, Any]:
    found = _head_norms(_biases(config, _qwen(config)))
    every = range(found["layers"])
    return _window(config, found, every) if config.flag("use_sliding_window") else _without_window(config, found)


def _qwen3_next(config: _Config) -> dict[str, Any]:
    """Every ``full_attention_interval``-th layer has gated attention, the others a gated delta net."""
    found = _head_norms(_biases(config, _qwen(config, names_head_dim=True)))
    layers, interval = found["layers"], config.whole("full_attention_interval", 4)
    types = config.layer_types(layers)
    if types is None:
        types = ["full_attention" if interval and not (i + 1) % interval else "linear_attention" for i in range(layers)]
    linear = LinearAttention(
        kind="gated_delta",
        layers=types.count("linear_attention"),
        key_heads=config.whole("linear_num_key_heads"),
        value_heads=config.whole("linear_num_value_heads"),
        key_dim=config.whole("linear_key_head_dim"),
        value_dim=config.whole("linear_value_head_dim"),
        kernel=config.whole("linear_conv_kernel_dim"),
    )
    return found | {
        "gated_attention": True,
        "linear": linear if linear.layers else None,
        "shared_width": config.whole("shared_expert_intermediate_size"),
        "moe_vectors": found["hidden"],
    }


def _groups(config: _Config) -> dict[str, Any]:
    groups, limit = max(1, config.whole("n_group", 1)), config.whole("topk_group", 1)
    return {"router_groups": groups, "router_group_limit": limit if groups > 1 else 1}


def _leading(config: _Config) -> dict[str, Any]:
    """Layer i has experts from first_k_dense_replace on, where moe_layer_freq divides i."""
    found = _common(config, "moe_intermediate_size")
    layers, frequency = found["layers"], max(1, config.whole("moe_layer_freq", 1))
    first = config.whole("first_k_dense_replace")
    dense = [layer for layer in range(layers) if layer < first or layer % frequency]
    return (
        found
        | _groups(config)
        | {
            "experts": config.whole("n_routed_experts"),
            "top_k": config.whole("num_experts_per_tok"),
            "shared_width": config.whole("n_shared_experts", 0) * found["width"],
        }
        | _placed(dense, config.whole("intermediate_size"))
    )


def _deepseek(config: _Config) -> dict[str, Any]:
    return _biases(config, _leading(config))


def _deepseek_latent(config: _Config) -> dict[str, Any]:
    """DeepSeek-V2 and V3, and Kimi-K2. What transformers writes as head_dim and qk_head_dim follows from the other dimensions."""
    latent = LatentAttention(
        q_rank=config.whole("q_lora_rank", 0),
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
    )
    config.whole("qk_head_dim", 0)
    found = _leading(config)
    down = latent.q_rank + latent.kv_rank + latent.rope_dim  # the projections that may have a bias, beside the output's
    return found | {
        "latent": latent,
        "kv_heads": found["heads"],
        "head_dim": latent.value_dim,
        "vectors": down + found["hidden"] if config.flag("attention_bias") else 0,
    }


def _glm4(config: _Config) -> dict[str, Any]:
    """GLM-4.5: the output's projection has no bias."""
    found = _biases(config, _leading(config), output=False)
    return _head_norms(found) if config.flag("use_qk_norm") else found


def _dots1(config: _Config) -> dict[str, Any]:
    found = _head_norms(_biases(config, _leading(config)))
    return _window(config, found, range(config.whole("max_window_layers", 62), found["layers"]))


def _ernie(config: _Config) -> dict[str, Any]:
    """ERNIE 4.5: experts in every moe_layer_interval-th layer between two; the router's correction counts as a parameter."""
    found = _common(config, "moe_intermediate_size")
    if config.flag("use_bias"):
        raise UsageError(f"{config.where}: use_bias: expected false: biases of every projection are not supported")
    layers, experts = found["layers"], config.whole("moe_num_experts")
    first, last = config.whole("moe_layer_start_index", 1), config.number("moe_layer_end_index", -1)
    interval = max(1, config.whole("moe_layer_interval", 1))
    sparse = range(first, (layers if last < 0 else last + 1))
    dense = [layer for layer in range(layers) if layer not in sparse or (layer + 1) % interval]
    return (
        found
        | {
            "ties_embeddings": config.flag("tie_word_embeddings", True),
            "experts": experts,
            "top_k": config.whole("moe_k"),
            "shared_width": config.whole("moe_num_shared_experts", 0) * found["width"],
            "moe_vectors": experts,
        }
        | _placed(dense, config.whole("intermediate_size"))
    )


def _hunyuan(config: _Config) -> dict[str, Any]:
    """Hunyuan-Large and its successors, which name an expert's width apart and may begin with dense layers."""
    config.whole("cla_share_factor", 0)
    found = _biases(config, _common(config, "intermediate_size"))
    dense_width, count = found["width"], config.whole("moe_layer_num_skipped", 0)
    width = config.whole("moe_intermediate_size", 0) or dense_width
    if config.flag("use_qk_norm", config.kind == "hunyuan_v1_moe"):
        found = _head_norms(found)
    return (
        found
        | {
            "width": width,
            "experts": config.whole("num_experts"),
            "top_k": config.whole("moe_topk"),
            "shared_width": config.whole("num_shared_expert", int(config.kind == "hunyuan_v1_moe")) * width,
        }
        | _placed(list(range(count)), dense_width)
    )


#: By ``model_type``.
MODEL_TYPES: dict[Any, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2_dense,
    "qwen3": _qwen3_dense,
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "minimax": _minimax,
    "minimax_text_01": _minimax,
    "minimax_m1": _minimax,
    "minimax_m2": _minimax_m2,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "qwen3_next": _qwen3_next,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_latent,
    "deepseek_v3": _deepseek_latent,
    "kimi_k2": _deepseek_latent,
    "glm4_moe": _glm4,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie,
    "hunyuan": _hunyuan,
    "hunyuan_v1_moe": _hunyuan,
}
