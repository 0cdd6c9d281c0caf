"""A model by its name or from a file: the config.json of a Hugging Face model, or a commlayer model in JSON.

A field that looks like a size and that no reader here understands is refused: a size that is silently wrong costs more than a
message. Fields that change no size are left alone: token ids, dropout, initialisation, rotary embeddings, routing losses and
groups, window sizes of attention (FLOPs are counted without windows), quantisation, and the multi-token-prediction modules of
DeepSeek-V3, which are no part of the shape. So are biases other than those of queries, keys and values, and Hunyuan's keys and
values that pairs of layers share: both below 0.1 % of the parameters.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.printable import shortened
from commlayer.scheduler.mapping.catalog import MODELS
from commlayer.scheduler.mapping.model import AttentionWindow, LatentAttention, LinearAttention, ModelShape

__all__ = ["FORMAT", "MODEL_TYPES", "from_config", "read_model", "resolve"]

#: Of our own files: ``{"format": "commlayer-model", "name": …, "layers": …}``, the fields of ModelShape.
FORMAT = "commlayer-model"

_SIZE_LIKE = re.compile(
    r"(^|_)(num|n|size|sizes|dim|dims|rank|ranks|layer|layers|expert|experts|freq|step|head|heads|topk|top_k|width)(_|$)"
)
# Of those that look like one; generation's and training's settings, which old files carry, among them.
_HARMLESS = frozenset(
    (
        "chunk_size_feed_forward",
        "encoder_no_repeat_ngram_size",
        "ep_size",
        "layer_norm_eps",
        "max_window_layers",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "org_vocab_size",
        "top_k",
    )
)


def resolve(name_or_path: str) -> ModelShape:
    """A model of the catalog, or what a file (or the config.json of a folder) describes.

    Raises:
        UsageError: neither; or a file that cannot be read as one (:func:`read_model`).
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    if not os.path.exists(name_or_path):
        close = difflib.get_close_matches(name_or_path.lower(), MODELS, n=1, cutoff=0.5)
        hint = f". Did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"model: expected one of {', '.join(MODELS)}, or a file such as a Hugging Face config.json (or its folder), "
            f"got {shortened(name_or_path)!r}, which is neither{hint}"
        )
    return read_model(name_or_path)


def read_model(path: str | Path) -> ModelShape:
    """The model that a file describes, or the config.json of a folder.

    Raises:
        UsageError: no such file, or one that is damaged, of an unknown kind, incomplete, or with a size that is not understood;
            names the file and the field.
    """
    file = Path(path)
    if os.path.isdir(file):
        file /= "config.json"
    try:
        text = read_file(file).decode("utf-8")
    except OSError as error:
        raise UsageError(
            f"{file}: expected a model's JSON file, or a folder with a config.json: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: expected UTF-8 text, got byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from error
    content = _parse(text, str(file))
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    if "format" in content:
        return _own(content, str(file))
    return from_config(content, name or "model", str(file))


def from_config(content: Mapping[str, Any], name: str, where: str) -> ModelShape:
    """The model of a Hugging Face configuration. ``where`` begins the messages of errors.

    Raises UsageError as :func:`read_model`.
    """
    kind = content.get("model_type")
    if kind not in MODEL_TYPES:
        raise UsageError(
            f"{where}: model_type: expected {', '.join(MODEL_TYPES)}, got {kind!r}. Another model can be described in a file "
            f'{{"format": "{FORMAT}", …}} with the fields of ModelShape'
        )
    config = _Config(content, where)
    shape = MODEL_TYPES[kind](config)
    config.refuse_unread()
    source = f"{where} ({kind})"
    try:
        return ModelShape(name=name, source=source, **shape)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _parse(text: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
            raise UsageError(f"{where}: field {twice}: expected it once in its object, got it again")
        return found

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UsageError(
            f"{where}: {place}: expected JSON, got a damaged text ({error.msg}): fetch the file again"
        ) from error
    except RecursionError as error:
        raise UsageError(f"{where}: expected a model's configuration, got JSON nested too deep") from error
    except ValueError as error:
        raise UsageError(f"{where}: expected a model's configuration, got a number that is none ({error})") from error
    if not isinstance(content, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(content).__name__}")
    return content


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

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; of a list (one entry per layer) what all entries are. A missing one and null are the default."""
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
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.where}: {name}: expected true or false, got {value!r}")
        return value

    def indices(self, name: str) -> set[int]:
        """A list of layers; none if it is missing."""
        value = self._value(name) or []
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise UsageError(f"{self.where}: {name}: expected a list of layers, got {value!r}")
        return set(value)

    def leading(self, dense: list[int], layers: int, because: str) -> int:
        """How many layers are dense, where these are the first ones."""
        if dense != list(range(len(dense))):
            shown = ", ".join(map(str, dense[:6])) + (", …" if len(dense) > 6 else "")
            raise UsageError(
                f"{self.where}: {because}: expected dense layers only before all layers with experts, got layers {shown} of "
                f"{layers}: models with dense layers in between are not supported"
            )
        return len(dense)

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

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self._content.get(name)


def _common(config: _Config, width: str) -> dict[str, Any]:
    """The fields that all configurations have. ``width``: the field with an expert's."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", 0) or config.whole("attention_head_dim", 0)
    if not head_dim and heads and hidden % heads:
        raise UsageError(
            f"{config.where}: head_dim: expected this field, as num_attention_heads={heads} does not divide hidden_size={hidden}"
        )
    return {
        "layers": config.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads"),
        "head_dim": head_dim or hidden // max(heads, 1),
        "width": config.whole(width),
        "vocabulary": config.whole("vocab_size"),
        "ties_embeddings": config.flag("tie_word_embeddings"),
        "qkv_bias": config.flag("attention_bias"),
    }


def _mixtral(config: _Config, experts: str = "num_local_experts") -> dict[str, Any]:
    """Also phimoe and olmoe: every layer has experts, and none is shared. ``experts``: the field with their number."""
    found = _common(config, "intermediate_size")
    return found | {"experts": config.whole(experts), "top_k": config.whole("num_experts_per_tok")}


def _qwen(config: _Config) -> dict[str, Any]:
    """Layer i has experts where decoder_sparse_step divides i + 1 and mlp_only_layers does not name i."""
    found = _common(config, "moe_intermediate_size")
    layers, step = found["layers"], max(1, config.whole("decoder_sparse_step", 1))
    only = config.indices("mlp_only_layers")
    dense = [layer for layer in range(layers) if layer in only or (layer + 1) % step]
    width = config.whole("intermediate_size", 0)
    count = config.leading(dense, layers, f"decoder_sparse_step={step}, mlp_only_layers={sorted(only)}")
    return found | {
        "experts": config.whole("num_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "dense_layers": count,
        "dense_width": width if count else 0,
    }


def _qwen2(config: _Config) -> dict[str, Any]:
    return _qwen(config) | {
        "shared_width": config.whole("shared_expert_intermediate_size"),
        "qkv_bias": config.flag("qkv_bias", True),
    }


def _deepseek(config: _Config) -> dict[str, Any]:
    """Layer i has experts from first_k_dense_replace on, where moe_layer_freq divides i."""
    found = _common(config, "moe_intermediate_size")
    layers, frequency = found["layers"], max(1, config.whole("moe_layer_freq", 1))
    first = config.whole("first_k_dense_replace")
    dense = [layer for layer in range(layers) if layer < first or layer % frequency]
    width = config.whole("intermediate_size")
    count = config.leading(dense, layers, f"moe_layer_freq={frequency}, first_k_dense_replace={first}")
    groups = config.whole("n_group", 1)
    return found | {
        "router_groups": max(1, groups),
        "router_group_limit": config.whole("topk_group", 1) if groups > 1 else 1,
        "experts": config.whole("n_routed_experts"),
        "top_k": config.whole("num_experts_per_tok"),
        "shared_width": config.whole("n_shared_experts", 0) * found["width"],
        "dense_layers": count,
        "dense_width": width if count else 0,
    }


def _deepseek_latent(config: _Config) -> dict[str, Any]:
    """DeepSeek-V2 and V3. What transformers writes as head_dim and qk_head_dim follows from the other dimensions."""
    latent = LatentAttention(
        q_rank=config.whole("q_lora_rank", 0),
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
    )
    config.whole("qk_head_dim", 0)
    found = _deepseek(config)
    return found | {"latent": latent, "kv_heads": found["heads"], "head_dim": latent.value_dim}


def _hunyuan(config: _Config) -> dict[str, Any]:
    """Hunyuan-Large and its successors, which name an expert's width apart and may begin with dense layers."""
    config.whole("cla_share_factor", 0)
    found = _common(config, "intermediate_size")
    dense_width, count = found["width"], config.whole("moe_layer_num_skipped", 0)
    width = config.whole("moe_intermediate_size", 0) or dense_width
    return found | {
        "width": width,
        "experts": config.whole("num_experts"),
        "top_k": config.whole("moe_topk"),
        "shared_width": config.whole("num_shared_expert", 0) * width,
        "dense_layers": count,
        "dense_width": dense_width if count else 0,
    }


#: By ``model_type``.
MODEL_TYPES: dict[Any, Callable[[_Config], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "phimoe": _mixtral,
    "olmoe": partial(_mixtral, experts="num_experts"),
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_latent,
    "deepseek_v3": _deepseek_latent,
    "hunyuan": _hunyuan,
    "hunyuan_v1_moe": _hunyuan,
}
