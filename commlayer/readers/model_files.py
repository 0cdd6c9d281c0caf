"""A model by its name or from a file: the config.json of a Hugging Face model, or a commlayer model in JSON.

A field that looks like a size and that no reader here understands is refused, by the name of the
mechanism that it asks for: a size that is silently wrong costs more than a message. So is a bias or
a norm of queries and keys that the type is not known to have. Where the nearest shape will do
(``approximate``), both are left out, and said to be.

Fields that change no size are left alone: token ids, dropout, initialisation, rotary embeddings,
routing losses, quantisation, and modules of multi-token prediction, which are no part of the shape.
Hunyuan-Large's keys and values that pairs of layers share count twice: below 0.1 % of its
parameters. The parameters of every type that transformers has are exactly those of its model
(tests/readers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
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
    AttentionIndexer,
    AttentionWindow,
    CompressedAttention,
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
_LAYER_TYPES = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "indexed_attention")
)
_COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention")
_MINIMAX_TYPES = ("full_attention", "minimax_m3_sparse")
_NEMOTRON_WORDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
_STEPS = ("time_step_min", "time_step_max", "time_step_limit", "time_step_floor")
# Of those that look like one; generation's and training's settings, which old files carry, among them.
_HARMLESS = frozenset(
    (
        "chunk_size_feed_forward",
        "encoder_no_repeat_ngram_size",
        "experts_per_token",
        "ep_size",
        "layer_norm_eps",
        "max_window_layers",
        "mtp_num_hidden_layers",
        "mtp_transformer_layers",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_logits_to_keep",
        "num_mtp_modules",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "org_vocab_size",
        "rotary_dim",
        "top_k",
    )
)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
"""The field names of the number of routed experts, of those of a token, and of experts that all tokens
pass through."""
_MECHANISMS = {
    "attention with an indexer": r"index|sparse_attention|lightning_attn|topk_blocks",
    "compressed attention": r"^compress_",
    "attention residuals": r"^attn_res",
    "hyper-connections": r"^hc_|hyper_connection",
    "linear attention": r"^linear_|_linear_|kda|delta",
    "state-space (Mamba) layers": r"mamba|ssm_|hybrid_override",
    "experts on a latent space": r"moe_latent|routed_expert_hidden",
    "hash-routed layers": r"hash",
    "latent attention": r"lora_rank|_nope_|latent",
    "windows of other heads": r"^swa_|attention_other",
    "queries of a low rank": r"share_q",
    "keys and values that layers share": r"kv_shared|cla_",
    "embeddings of n-grams": r"ngram|engram",
    "shared experts": r"shared?_(num_)?expert|n_shared|shared_intermediate",
    "windows": r"window|chunk_size",
    "experts": r"expert|moe",
}
"""Mechanisms by fields that ask for them, which a message names where a reader does not know the
field. The first that matches counts."""


def resolve(name_or_path: str, *, approximate: bool = False) -> ModelShape:
    """A model of the catalog, or what a file (or the config.json of a folder) describes.
    ``approximate``: as of :func:`from_config`.

    Raises:
        UsageError: neither; or a file that cannot be read as one (:func:`read_model`).
    """
    if name_or_path in catalog.names():
        return catalog.load(name_or_path)
    if is_path(name_or_path):
        return read_model(name_or_path, approximate=approximate)
    raise UsageError(
        "model: expected the name of a known model or a file such as a Hugging Face config.json (or its folder), "
        f"got {shortened(name_or_path)!r}{closest_or_all(name_or_path, catalog.names())}"
    )


def read_model(path: str | Path, *, approximate: bool = False) -> ModelShape:
    """The model that a file describes, or the config.json of a folder. ``approximate``: as of
    :func:`from_config`.

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
    return from_config(content, name or "model", str(file), approximate=approximate)


def from_config(content: Mapping[str, Any], name: str, where: str, *, approximate: bool = False) -> ModelShape:
    """The model of a Hugging Face configuration; of one with several parts, its text model.

    Args:
        where: begins the messages of errors.
        approximate: leave out what is not modelled, and take the nearest shape for an unknown type;
            ``approximates`` of the shape says what is left out.

    Raises UsageError as :func:`read_model`.
    """
    outer, part = content.get("model_type"), content.get("text_config")
    if isinstance(part, Mapping):
        inner = part.get("model_type")
        kind = inner if isinstance(inner, str) and inner in MODEL_TYPES else outer
        content = {"tie_word_embeddings": content.get("tie_word_embeddings"), **part, "model_type": kind}
    kind = content.get("model_type")
    config = _Config(content, where, approximate=approximate)
    if isinstance(kind, str) and kind in MODEL_TYPES:
        shape = MODEL_TYPES[kind](config)
    elif approximate:
        shape = _nearest(config)
    else:
        raise UsageError(_unknown_type(content, where))
    config.refuse_unread()
    source = f"{where} ({kind})"
    try:
        return ModelShape(
            name=name,
            source=source,
            approximates="; ".join(config.left_out),
            rotary_base=_constant(content, where, "rope_theta"),
            norm_epsilon=_constant(content, where, "rms_norm_eps"),
            **shape,
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _constant(content: Mapping[str, Any], where: str, field: str) -> float:
    """A number that changes no size; 0 where it is missing. transformers writes the rotary base also into rope_parameters."""
    parameters = content.get("rope_parameters")
    value = content.get(field, parameters.get(field) if isinstance(parameters, Mapping) else None)
    if value is None:
        return 0.0
    if type(value) not in (int, float):
        raise UsageError(f"{where}: {field}: expected a number, got {shortened(repr(value))}")
    return float(value)


def _unknown_type(content: Mapping[str, Any], where: str) -> str:
    """Say what the configuration of an unknown type asks for, and what to do."""
    kind = content.get("model_type")
    asked = dict.fromkeys(name for field, value in content.items() if value and (name := _mechanism(field)))
    got = "but it is missing" if kind is None else f"got {shortened(repr(kind))}"
    has = f", whose fields ask for {', '.join(asked)}" if asked else ""
    return (
        f"{where}: model_type: expected a type that is known, {got}{has}. --approximate plans the "
        "nearest shape and says what it leaves out; or describe the model in a file "
        f'{{"format": "{FORMAT}", …}} with the fields of ModelShape. Known are {", ".join(MODEL_TYPES)}'
    )


def _mechanism(field: str) -> str:
    """The mechanism that a field asks for; empty where none is known."""
    return next((name for name, pattern in _MECHANISMS.items() if re.search(pattern, field)), "")


def _own(content: dict[str, Any], where: str) -> ModelShape:
    if content.pop("format") != FORMAT:
        raise UsageError(f"{where}: format: expected {FORMAT!r}")
    parts = {
        "latent": LatentAttention,
        "window": AttentionWindow,
        "linear": LinearAttention,
        "indexer": AttentionIndexer,
        "compressed": CompressedAttention,
    }
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
    """A configuration that knows which of its fields were read.

    ``left_out``: what the shape leaves out, where that is asked for, and about how much it weighs.
    """

    def __init__(self, content: Mapping[str, Any], where: str, *, approximate: bool = False) -> None:
        self._content, self.where, self._read = content, where, {"model_type"}
        self.kind, self.approximate = content.get("model_type"), approximate
        self.left_out: list[str] = []
        self._sections: list[_Config] = []

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
        return self.words("layer_types", layers, _LAYER_TYPES)

    def words(self, name: str, layers: int, known: Iterable[str]) -> list[str] | None:
        """A word for each layer, one of ``known``; those of modules behind them are cut off. None
        where the field is missing."""
        value = self._value(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers or not set(map(str, value)) <= set(known):
            raise UsageError(
                f"{self.where}: {name}: expected one of {', '.join(sorted(known))} for each of {layers} layers, got "
                f"{shortened(str(value))}"
            )
        return value[:layers]

    def has(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return self._content.get(name) is not None

    def is_list(self, name: str) -> bool:
        """Whether a field is a list."""
        return isinstance(self._content.get(name), list)

    def either(self, *names: str) -> str:
        """The first of these fields that is there; if none is, all of them in words, which no field is called."""
        return next((name for name in names if self.has(name)), " or ".join(names))

    def section(self, name: str) -> _Config:
        """The fields of an object within; none where it is missing. Those that nobody reads are
        refused as others are."""
        value = self._value(name)
        if value is not None and not isinstance(value, Mapping):
            raise UsageError(f"{self.where}: {name}: expected an object, got {shortened(repr(value))}")
        section = _Config(
            {**(value or {}), "model_type": self.kind}, f"{self.where}: {name}", approximate=self.approximate
        )
        section.left_out = self.left_out
        self._sections.append(section)
        return section

    def passed_over(self, name: str) -> None:
        """Pass over a field that changes no size in this type."""
        self._read.add(name)

    def leave_out(self, name: str, mechanism: str, weight: str) -> None:
        """Leave out what a field asks for, where that may be; ``weight``: about how much it is.

        Raises UsageError where only the whole model is wanted.
        """
        self._read.add(name)
        if not self.approximate:
            raise UsageError(
                f"{self.where}: {name}: {mechanism} cannot be modelled ({weight}): --approximate plans the model without"
            )
        self.left_out.append(f"{mechanism} ({name}): {weight}")

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

    def listed(self, name: str) -> list[Any]:
        """A list; empty if it is missing."""
        value = self._value(name) or []
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {name}: expected a list, got {shortened(repr(value))}")
        return value

    def word(self, name: str) -> str:
        """A text; of a list its parts, joined by commas; empty if it is missing."""
        value = self._value(name)
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{self.where}: {name}: expected a text, got {shortened(repr(value))}")
        return value or ""

    def indices(self, name: str) -> set[int] | None:
        """A list of layers; None if it is missing."""
        value = self._value(name)
        if value is not None and (not isinstance(value, list) or any(type(each) is not int for each in value)):
            raise UsageError(f"{self.where}: {name}: expected a list of layers, got {value!r}")
        return None if value is None else set(value)

    def refuse_unread(self) -> None:
        """Refuse what looks like a size, or asks for more parameters, and was not read; or name it
        among what is left out."""
        for section in self._sections:
            section.refuse_unread()
        asked = {name: why for name, value in self._content.items() if (why := self._asks(name, value))}
        if not asked:
            return
        name, why = next(iter(asked.items()))
        if not self.approximate:
            raise UsageError(f"{self.where}: {name}: {why}, or plan without it by --approximate")
        named = dict.fromkeys(_mechanism(each) or each for each in asked)
        self.left_out.append(f"{', '.join(named)} (fields {', '.join(asked)}): nobody knows how much they weigh")

    def _asks(self, name: str, value: Any) -> str:
        """Why a field must not be passed over; empty where it may."""
        if name in self._read:
            return ""
        numbers = value if isinstance(value, list) else [value]
        is_size = any(type(each) in (int, float) for each in numbers) and _SIZE_LIKE.search(name)
        mechanism, unknown = _mechanism(name), f"a {self.kind} model is not known to have"
        if is_size and name not in _HARMLESS:
            what = f"this asks for {mechanism}, which" if mechanism else "this looks like a size, and"
            return f"{what} {unknown}{'' if mechanism else ' it'}: remove it if it changes no size"
        if value is True and name not in _KEPT_APART and _HAS_VECTORS.search(name):
            return f"{unknown} that: remove it if it adds no parameters"
        return ""

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self._content.get(name)


def _common(config: _Config, width: str, *, names_head_dim: bool = False) -> dict[str, Any]:
    """The fields that all configurations have. ``width``: the field with an expert's. ``names_head_dim``: transformers has a
    default of its own for ``head_dim`` there, so that a file without it means another size than hidden_size /
    num_attention_heads."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", None if names_head_dim else 0) or config.whole("attention_head_dim", 0)
    is_latent = config.has("kv_lora_rank")  # its heads have sizes of their own
    if not head_dim and heads and hidden % heads and not is_latent:
        raise UsageError(
            f"{config.where}: head_dim: expected this field, as num_attention_heads={heads} does not divide hidden_size={hidden}"
        )
    return {
        "layers": config.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole(config.either("num_key_value_heads", "num_attention_groups")),
        "head_dim": head_dim or hidden // max(heads, 1),
        "width": config.whole(width),
        "vocabulary": config.whole("vocab_size"),
        "ties_embeddings": config.flag("tie_word_embeddings"),
        "vectors": 0,
    }


def _biases(config: _Config, shape: dict[str, Any], *, output: bool = True, default: bool = False) -> dict[str, Any]:
    """With what ``attention_bias`` says of queries, keys and values, and of the output's projection."""
    has = config.flag("attention_bias", default)
    return shape | {"qkv_bias": has, "vectors": shape["vectors"] + (shape["hidden"] if has and output else 0)}


def _head_norms(shape: dict[str, Any]) -> dict[str, Any]:
    """With norms of queries and keys that all heads share."""
    return shape | {"vectors": shape["vectors"] + 2 * shape["head_dim"]}


def _window(config: _Config, shape: dict[str, Any], layers: Iterable[int], *, word: str = "sliding") -> dict[str, Any]:
    """With the window of attention in ``layers``, or in those that ``layer_types`` calls so, which goes before. A window that
    holds the longest sequence of the model is none."""
    count, types = len(list(layers)), config.layer_types(shape["layers"])
    if types is not None:
        count = types.count(f"{word}_attention")
    tokens = config.whole("attention_chunk_size" if word == "chunked" else "sliding_window", 0)
    longest = config.whole("max_position_embeddings", 0)
    if not count or not tokens or 0 < longest <= tokens:
        return shape
    return shape | {"window": AttentionWindow(tokens, count, chunked=word == "chunked")}


def _dense_layers(config: _Config, layers: int, otherwise: Iterable[int]) -> list[int]:
    """The layers with a dense FFN: as ``mlp_layer_types`` says, which goes before others, or as a list
    ``moe_layer_freq`` of one number for each layer; else ``otherwise``."""
    types = config.words("mlp_layer_types", layers, ("dense", "sparse"))
    if types is None and config.is_list("moe_layer_freq"):
        types = ["sparse" if each else "dense" for each in config.numbers("moe_layer_freq")[:layers]]
    if types is None:
        return list(otherwise)
    return [layer for layer, kind in enumerate(types) if kind == "dense"]


def _placed(dense: list[int], width: int) -> dict[str, Any]:
    """The dense layers among others, by where they are."""
    leads = dense == list(range(len(dense)))
    return {
        "dense_layers": len(dense),
        "dense_width": width if dense else 0,
        "dense_at": () if leads else tuple(dense),
    }


def _beside(config: _Config, dense: list[int], width: str = "intermediate_size") -> dict[str, Any]:
    """The dense layers, which have the width of that field where there are any."""
    return _placed(dense, config.whole(width, None if dense else 0))


def _routed(config: _Config, top_k: int | None = None) -> dict[str, Any]:
    """The number of experts, and of those of a token (``top_k`` where it is missing)."""
    return {"experts": config.whole(config.either(*_EXPERTS)), "top_k": config.whole(config.either(*_TOP_K), top_k)}


def _shared(config: _Config, width: int, default: int = 0) -> dict[str, Any]:
    """The width of the experts that all tokens pass through: so many of ``width``."""
    return {"shared_width": config.whole(config.either(*_SHARED), default) * width}


def _without_shared(config: _Config) -> None:
    if config.whole("shared_intermediate_size", 0):
        raise UsageError(
            f"{config.where}: shared_intermediate_size: expected 0: shared experts are not known of this model"
        )


def _types_of(config: _Config, layers: int, name: str, words: tuple[str, str]) -> list[str]:
    """The kind of each layer's attention: by ``layer_types``, or by a list ``name`` of a 0 or a 1 for each."""
    types, listed = config.layer_types(layers), config.numbers(name)[:layers]
    if types is None and len(listed) != layers:
        raise UsageError(f"{config.where}: {name}: expected a 0 or a 1 for each of {layers} layers, or layer_types")
    return [words[bool(each)] for each in listed] if types is None else types


def _dense(config: _Config, shape: dict[str, Any]) -> dict[str, Any]:
    """A model without experts: every layer has an FFN of ``width``."""
    if config.flag("mlp_bias"):
        raise UsageError(f"{config.where}: mlp_bias: expected false: biases of dense FFNs are not supported")
    layers = list(range(shape["layers"]))
    return shape | {"experts": 1, "top_k": 1, "width": 1} | _placed(layers, shape["width"])


def _llama(config: _Config) -> dict[str, Any]:
    return _dense(config, _biases(config, _common(config, "intermediate_size")))


def _mistral(config: _Config) -> dict[str, Any]:
    shape = _common(config, "intermediate_size")
    return _dense(config, _window(config, shape, range(shape["layers"])))


def _qwen2_dense(config: _Config) -> dict[str, Any]:
    shape = _common(config, "intermediate_size") | {"qkv_bias": True}
    return _dense(config, _later_windows(config, shape))


def _qwen3_dense(config: _Config) -> dict[str, Any]:
    shape = _head_norms(_biases(config, _common(config, "intermediate_size", names_head_dim=True)))
    return _dense(config, _later_windows(config, shape))


def _later_windows(config: _Config, shape: dict[str, Any]) -> dict[str, Any]:
    """Qwen's windows: from ``max_window_layers`` on, where ``use_sliding_window`` says so."""
    return _asked_window(config, shape, range(config.whole("max_window_layers", 28), shape["layers"]))


def _asked_window(config: _Config, shape: dict[str, Any], layers: Iterable[int]) -> dict[str, Any]:
    """With windows in ``layers`` where ``use_sliding_window`` says so; else no layer has one, whatever ``sliding_window`` is, and
    ``layer_types`` must not say otherwise."""
    if config.flag("use_sliding_window"):
        return _window(config, shape, layers)
    for word in set(config.layer_types(shape["layers"]) or ()) - {"full_attention"}:
        raise UsageError(f"{config.where}: layer_types: expected full_attention in every layer, got {word!r}")
    return shape


def _mixtral(config: _Config) -> dict[str, Any]:
    """Every layer has experts, and none is shared."""
    shape = _common(config, "intermediate_size")
    return _window(config, shape, range(shape["layers"])) | _routed(config)


def _phimoe(config: _Config) -> dict[str, Any]:
    """Its norms are LayerNorm, with biases."""
    shape = _biases(config, _mixtral(config))
    hidden, vocabulary = shape["hidden"], shape["vocabulary"]
    head = vocabulary if config.flag("lm_head_bias") else 0
    return shape | {"vectors": shape["vectors"] + 2 * hidden, "end_vectors": hidden + head}


def _olmoe(config: _Config) -> dict[str, Any]:
    """The norms of queries and of keys go over all heads."""
    shape = _biases(config, _mixtral(config))
    hidden, heads = shape["hidden"], shape["heads"]
    return shape | {"vectors": shape["vectors"] + hidden + hidden // heads * shape["kv_heads"]}


def _gpt_oss(config: _Config) -> dict[str, Any]:
    """Biases everywhere, a sink of each head, a window in every second layer, from the first."""
    shape = _biases(config, _common(config, "intermediate_size", names_head_dim=True), default=True)
    shape = _window(config, shape, range(0, shape["layers"], 2))
    shape |= _routed(config)
    return shape | {
        "vectors": shape["vectors"] + shape["heads"],
        "moe_vectors": shape["experts"],
        "expert_vectors": 2 * shape["width"] + shape["hidden"],
        "clamps": True,
    }


def _llama4(config: _Config) -> dict[str, Any]:
    """Experts in ``moe_layers``, or in every ``interleave_moe_layer_step``-th layer; chunked attention where positions are
    rotated; the shared expert is as wide as the others. The vision model of a whole configuration is no part of the shape."""
    shape = _biases(config, _common(config, "intermediate_size", names_head_dim=True))
    layers, step = shape["layers"], config.whole("interleave_moe_layer_step", 1)
    named = config.indices("moe_layers")
    sparse = set(range(step - 1, layers, step)) if named is None and step else named or set()
    interval = config.whole("no_rope_layer_interval", 4)
    rotates = config.numbers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    chunked = [layer for layer in range(layers) if rotates[layer : layer + 1] != [0]]
    shape = _window(config, shape, chunked, word="chunked")
    dense = [layer for layer in range(layers) if layer not in sparse]
    shape |= _routed(config, 1) | {"shared_width": shape["width"]}
    return shape | _placed(dense, config.whole("intermediate_size_mlp"))


def _minimax(config: _Config) -> dict[str, Any]:
    """MiniMax-Text-01 and M1: most layers have lightning attention, by ``layer_types`` or ``attn_type_list`` (0)."""
    shape = _mixtral(config)
    types = _types_of(config, shape["layers"], "attn_type_list", ("linear_attention", "full_attention"))
    linear = types.count("linear_attention")
    config.whole("block_size", 0)
    _without_shared(config)
    if "window" in shape:
        raise UsageError(f"{config.where}: sliding_window: expected none beside linear attention")
    heads, size = shape["heads"], shape["head_dim"]
    return shape | {"linear": LinearAttention("lightning", linear, heads, heads, size, size) if linear else None}


def _minimax_m2(config: _Config) -> dict[str, Any]:
    """Every layer has scores; norms of queries and of keys go over all heads."""
    shape = _common(config, "intermediate_size", names_head_dim=True)
    if 0 in config.numbers("attn_type_list"):
        raise UsageError(f"{config.where}: attn_type_list: expected 1 in every layer")
    _without_shared(config)
    norms = (shape["heads"] + shape["kv_heads"]) * shape["head_dim"] if config.flag("use_qk_norm", True) else 0
    return shape | _routed(config) | {"vectors": norms}


def _qwen(config: _Config, *, names_head_dim: bool = False) -> dict[str, Any]:
    """Layer i has experts where decoder_sparse_step divides i + 1 and mlp_only_layers does not name i."""
    shape = _common(config, "moe_intermediate_size", names_head_dim=names_head_dim)
    layers, step = shape["layers"], config.whole("decoder_sparse_step", 1)
    only = config.indices("mlp_only_layers") or set()
    dense = [layer for layer in range(layers) if layer in only or not step or (layer + 1) % step]
    return shape | _routed(config) | _beside(config, dense)


def _qwen2(config: _Config) -> dict[str, Any]:
    shape = _qwen(config)
    even = range(0, min(config.whole("max_window_layers", 28), shape["layers"]), 2)
    return _asked_window(config, shape, even) | {
        "shared_width": config.whole("shared_expert_intermediate_size"),
        "moe_vectors": shape["hidden"],
        "qkv_bias": config.flag("qkv_bias", True),
    }


def _qwen3(config: _Config) -> dict[str, Any]:
    shape = _head_norms(_biases(config, _qwen(config)))
    return _asked_window(config, shape, range(shape["layers"]))


def _qwen3_next(config: _Config) -> dict[str, Any]:
    """Every ``full_attention_interval``-th layer has gated attention, the others a gated delta net."""
    shape = _head_norms(_biases(config, _qwen(config, names_head_dim=True)))
    layers, interval = shape["layers"], config.whole("full_attention_interval", 4)
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
    return shape | {
        "gated_attention": True,
        "linear": linear if linear.layers else None,
        "shared_width": config.whole("shared_expert_intermediate_size"),
        "moe_vectors": shape["hidden"],
    }


def _groups(config: _Config) -> dict[str, Any]:
    groups = max(1, config.whole(config.either("n_group", "num_expert_group"), 1))
    limit = config.whole("topk_group", 1)
    return {"router_groups": groups, "router_group_limit": limit if groups > 1 else 1}


def _leading(config: _Config) -> dict[str, Any]:
    """Layer i has experts from first_k_dense_replace on, where moe_layer_freq divides i, or as
    mlp_layer_types says."""
    shape = _common(config, "moe_intermediate_size")
    layers = shape["layers"]
    is_optional = config.has("mlp_layer_types") or config.approximate
    first = config.whole("first_k_dense_replace", 0 if is_optional else None)
    frequency = 1 if config.is_list("moe_layer_freq") else max(1, config.whole("moe_layer_freq", 1))
    dense = _dense_layers(config, layers, (i for i in range(layers) if i < first or i % frequency))
    return shape | _groups(config) | _routed(config) | _shared(config, shape["width"]) | _beside(config, dense)


def _deepseek(config: _Config) -> dict[str, Any]:
    return _biases(config, _leading(config))


def _deepseek_latent(config: _Config) -> dict[str, Any]:
    """DeepSeek-V2 and V3, and Kimi-K2; with ``index_topk``, DeepSeek-V3.2 and GLM-5. What transformers
    writes as head_dim and qk_head_dim follows from the other dimensions."""
    latent = LatentAttention(
        q_rank=config.whole("q_lora_rank", 0),
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
    )
    config.whole("qk_head_dim", 0)
    shape = _leading(config)
    down = latent.q_rank + latent.kv_rank + latent.rope_dim  # the projections that may have a bias, beside the output's
    shape |= {
        "latent": latent,
        "kv_heads": shape["heads"],
        "head_dim": latent.value_dim,
        "vectors": down + shape["hidden"] if config.flag("attention_bias") else 0,
    }
    if config.has("index_topk"):
        shape["indexer"] = _indexer(config, shape["layers"])
    return shape


def _indexer(config: _Config, layers: int, number: int | None = None) -> AttentionIndexer:
    """The indexer of ``number`` of the layers (None: of all), which run it or take over what the
    layer before chose, as ``indexer_types`` says, a pattern, or a frequency (GLM-5.2)."""
    types = config.words("indexer_types", layers, ("full", "shared"))
    pattern, frequency = config.word("index_topk_pattern"), config.whole("index_topk_freq", 1)
    offset = config.whole("index_skip_topk_offset", 2)
    config.layer_types(layers)
    if types is None and pattern:
        types = ["full" if letter == "F" else "shared" for letter in pattern[:layers]]
    if types is None:
        behind = (max(layer - offset + 1, 0) for layer in range(layers))
        types = ["shared" if each % max(1, frequency) else "full" for each in behind]
    return AttentionIndexer(
        heads=config.whole("index_n_heads"),
        head_dim=config.whole("index_head_dim"),
        top_k=config.whole("index_topk"),
        layers=layers if number is None else number,
        scored_layers=types.count("full") if number is None else number,
        pool=config.whole("index_kpool", 1),
    )


def _streams(config: _Config, shape: dict[str, Any], *, head: bool) -> dict[str, Any]:
    """With hyper-connections; ``head``: with weights for the sum of the streams at the end."""
    streams, hidden = config.whole("hc_mult", 1), shape["hidden"]
    config.whole("hc_sinkhorn_iters", 0)
    end = streams * streams * hidden + streams + 1 if head and streams > 1 else 0
    return shape | {"streams": streams, "end_vectors": end}


def _deepseek_v4(config: _Config) -> dict[str, Any]:
    """Every layer has experts; the first of them route by hashes of tokens, with weights that are
    those of a router. Attention is compressed, by ``layer_types`` or ``compress_ratios``."""
    shape = _common(config, "moe_intermediate_size")
    layers, heads = shape["layers"], shape["heads"]
    config.words("mlp_layer_types", layers, ("hash_moe", "moe"))
    config.whole("num_hash_layers", 0)
    rates = config.section("compress_rates")
    sparse_rate = rates.whole("compressed_sparse_attention", 4)
    dense_rate = rates.whole("heavily_compressed_attention", 128)
    types = config.words("layer_types", layers, _COMPRESSED_TYPES)
    ratios = config.numbers("compress_ratios")[:layers]
    if types is not None:
        rate_of = dict(zip(_COMPRESSED_TYPES, (sparse_rate, dense_rate, 0), strict=True))
        ratios = [rate_of[each] for each in types]
    if len(ratios) != layers or set(ratios) - {0, sparse_rate, dense_rate}:
        raise UsageError(
            f"{config.where}: compress_ratios: expected 0, {sparse_rate} or {dense_rate} for each of {layers} layers, "
            f"got {shortened(str(ratios))}"
        )
    compressed = CompressedAttention(
        q_rank=config.whole("q_lora_rank"),
        rope_dim=config.whole("qk_rope_head_dim", 64),
        groups=config.whole("o_groups"),
        out_rank=config.whole("o_lora_rank"),
        window=config.whole("sliding_window"),
        sparse_layers=ratios.count(sparse_rate),
        sparse_rate=sparse_rate,
        dense_layers=ratios.count(dense_rate),
        dense_rate=dense_rate,
    )
    scorers, size, top_k = (config.whole(name) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    indexer = AttentionIndexer(scorers, size, top_k, compressed.sparse_layers, compressed.sparse_layers)
    shape |= _routed(config) | _shared(config, shape["width"], 1)
    shape |= {
        "clamps": config.has("swiglu_limit"),
        "vectors": heads,  # a sink of each
        "compressed": compressed,
        "indexer": indexer if compressed.sparse_layers else None,
    }
    return _streams(config, shape, head=True)


def _kimi_linear(config: _Config) -> dict[str, Any]:
    """Kimi Linear and Kimi-K3: layers of Kimi Delta Attention and of latent attention in turn; K3's
    have gates, and its experts a latent space."""
    shape = _deepseek_latent(config)
    hidden, latent = shape["hidden"], config.whole("routed_expert_hidden_size", 0)
    if block := config.whole("attn_res_block_size", 0):
        sources = shape["layers"] // block + 1
        config.leave_out(
            "attn_res_block_size",
            "attention over the outputs of earlier blocks of layers",
            f"below 0.01 % of the parameters; each layer reads up to {sources} hidden states twice, memory's time alone",
        )
    norm = latent if config.flag("latent_moe_use_norm") else 0
    return shape | {
        "linear": _kda(config, shape["layers"]),
        "gated_attention": config.flag("mla_use_output_gate"),
        "expert_hidden": latent if latent != hidden else 0,
        "moe_vectors": norm,
    }


def _kda(config: _Config, layers: int) -> LinearAttention | None:
    """Kimi Delta Attention, in the layers that ``layer_types`` or ``linear_attn_config`` names, from 1."""
    section = config.section("linear_attn_config")
    head = section.whole("head_dim", 0) or config.whole("linear_head_dim", 128)
    heads = section.whole("num_heads", 0) or config.whole("linear_num_heads")
    kernel = section.whole("short_conv_kernel_size", 0) or config.whole("linear_conv_kernel_dim", 4)
    named, _ = section.indices("kda_layers") or set(), section.indices("full_attn_layers")
    types = config.layer_types(layers)
    number = len(named) if types is None else types.count("linear_attention")
    if not number:
        return None
    full = section.flag("use_full_rank_gate")
    return LinearAttention("kda", number, heads, heads, head, head, kernel, full_rank_gate=full)


def _glm5_next(config: _Config) -> dict[str, Any]:
    """GLM-5.3: Kimi Delta Attention, and latent attention with an indexer over pooled keys; four
    residual streams."""
    shape = _deepseek_latent(config)
    linear = _kda(config, shape["layers"])
    softmax = shape["layers"] - (0 if linear is None else linear.layers)
    scored = config.words("indexer_types", shape["layers"], ("full", "shared")) or ["full"] * shape["layers"]
    types = config.layer_types(shape["layers"]) or []
    own = sum(one == "full" and kind != "linear_attention" for one, kind in zip(scored, types, strict=False))
    indexer = replace(shape["indexer"], layers=softmax, scored_layers=own or softmax)
    shape |= {"linear": linear, "indexer": indexer, "clamps": config.has("swiglu_limit")}
    return _streams(config, shape, head=False)


def _mimo(config: _Config) -> dict[str, Any]:
    """MiMo-V2: most layers have a window, with twice the key-value heads and sinks; values are
    narrower than keys. What an own field of windowed layers says must be the others' too."""
    shape = _common(config, "moe_intermediate_size", names_head_dim=True)
    layers, heads = shape["layers"], shape["heads"]
    types = _types_of(config, layers, "hybrid_layer_pattern", ("full_attention", "sliding_attention"))
    windowed = types.count("sliding_attention")
    value = config.whole("v_head_dim", shape["head_dim"])
    for name, size in (("swa_head_dim", shape["head_dim"]), ("swa_v_head_dim", value)):
        if config.whole(name, size) != size:
            raise UsageError(
                f"{config.where}: {name}: expected {size} as in other layers: heads of two sizes are not modelled"
            )
    own_heads = config.whole("swa_num_attention_heads", heads)
    window = AttentionWindow(
        tokens=config.whole("sliding_window"),
        layers=windowed,
        heads=own_heads,
        kv_heads=config.whole("swa_num_key_value_heads", 2 * shape["kv_heads"]),
        vectors=own_heads if config.flag("add_swa_attention_sink_bias", default=True) else 0,
    )
    config.whole("attention_chunk_size", 0)
    config.whole("sliding_window_size", 0)
    dense = _dense_layers(config, layers, [0])
    return (
        shape
        | _groups(config)
        | {
            "value_dim": value if value != shape["head_dim"] else 0,
            "qkv_bias": config.flag("attention_bias"),
            "vectors": heads if config.flag("add_full_attention_sink_bias") else 0,
            "window": window if windowed else None,
        }
        | _routed(config)
        | _shared(config, shape["width"])
        | _beside(config, dense)
    )


def _minimax_m3(config: _Config) -> dict[str, Any]:
    """MiniMax-M3: an indexer chooses blocks of keys in most layers; one shared expert."""
    shape = _head_norms(_common(config, "intermediate_size", names_head_dim=True))
    layers, sparse = shape["layers"], config.section("sparse_attention_config")
    for name in ("sparse_disable_index_value", "sparse_init_block", "sparse_local_block"):
        sparse.passed_over(name)
    types = config.words("layer_types", layers, _MINIMAX_TYPES)
    frequency = sparse.numbers("sparse_attention_freq")
    number = sum(map(bool, frequency)) if types is None else types.count(_MINIMAX_TYPES[1])
    numbers = {
        name: config.whole(name, 0) or sparse.whole(legacy, default)
        for name, legacy, default in (
            ("index_n_heads", "sparse_num_index_heads", 4),
            ("index_head_dim", "sparse_index_dim", 128),
            ("index_block_size", "sparse_block_size", 128),
            ("index_topk_blocks", "sparse_topk_blocks", 16),
        )
    }
    heads, size, block, blocks = numbers.values()
    config.whole("index_local_blocks", 1)
    indexer = AttentionIndexer(heads, size, block * blocks, number, number, weighs_heads=False)
    dense = _dense_layers(config, layers, ())
    return (
        shape
        | {
            "shared_width": config.whole("shared_intermediate_size") * max(1, config.whole("n_shared_experts", 1)),
            "indexer": indexer if number else None,
            "clamps": config.has("swiglu_limit"),
        }
        | _routed(config)
        | _beside(config, dense, "dense_intermediate_size")
    )


def _step3(config: _Config) -> dict[str, Any]:
    """Step-3, whose queries go through a low rank (arXiv:2507.19427), and Step-3.5 to 3.7, most of
    whose layers have windows with more heads, and all a gate of each head."""
    shape = _common(config, "moe_intermediate_size")
    layers, hidden, size = shape["layers"], shape["hidden"], shape["head_dim"]
    is_first = config.has("share_q_dim")
    own = 2 * size * (not is_first and config.flag("use_qk_norm", default=True))
    gates = hidden * (not is_first and config.flag("use_head_wise_attn_gate", default=True))
    named = [each.strip() for each in config.word("moe_layers_enum").split(",") if each.strip()]
    if not all(each.isascii() and each.isdigit() and len(each) < 6 for each in named):
        raise UsageError(f"{config.where}: moe_layers_enum: expected numbers of layers, got {named}")
    sparse = set(map(int, named)) or set(range(3, layers))
    dense = _dense_layers(config, layers, (layer for layer in range(layers) if layer not in sparse))
    shape |= {
        "query_rank": config.whole("share_q_dim", 0),
        "vectors": own + gates * shape["heads"],
        "shared_width": config.whole(config.either("share_expert_dim", "share_expert_dims")),
    }
    other = config.section("attention_other_setting")
    heads = other.whole("num_attention_heads", 0) or config.whole("num_sliding_attention_heads", shape["heads"])
    groups = other.whole("num_attention_groups", shape["kv_heads"])
    other.whole("head_dim", size)
    types = config.layer_types(layers) or []
    if number := types.count("sliding_attention"):
        shape["window"] = AttentionWindow(
            config.whole("sliding_window"), number, heads=heads, kv_heads=groups, vectors=own + gates * heads
        )
    return shape | _routed(config) | _beside(config, dense)


def _nemotron_h(config: _Config) -> dict[str, Any]:
    """Nemotron-H: blocks of one thing each, a state (Mamba-2), attention, experts or an FFN. A layer
    here is a block that mixes tokens with the experts or the FFN behind it, if there are any."""
    blocks, where = _nemotron_blocks(config), config.where
    mixing = [place for place, block in enumerate(blocks) if block in ("M", "*")]
    behind = [blocks[place + 1] if place + 1 < len(blocks) else "M" for place in mixing]
    bare = [layer for layer, block in enumerate(behind) if block in ("M", "*")]
    dense = [layer for layer, block in enumerate(behind) if block == "-"]
    if len(mixing) + len(behind) - len(bare) != len(blocks):
        raise UsageError(f"{where}: hybrid_override_pattern: expected every FFN behind a block that mixes tokens")
    if bare and dense:
        raise UsageError(
            f"{where}: hybrid_override_pattern: layers without an FFN beside layers with a dense one are not modelled"
        )
    config.whole("num_hidden_layers", len(blocks))
    heads, latent = config.whole("num_attention_heads"), config.whole("moe_latent_size", 0)
    groups = config.whole(config.either("n_groups", "mamba_n_groups"))
    kernel = config.whole(config.either("conv_kernel", "mamba_d_conv"))
    for name in ("expand", "mamba_expand", "chunk_size", "mamba_chunk_size", *_STEPS):
        config.passed_over(name)
    states = LinearAttention(
        kind="mamba2",
        layers=sum(blocks[place] == "M" for place in mixing),
        key_heads=groups,
        value_heads=config.whole("mamba_num_heads"),
        key_dim=config.whole(config.either("ssm_state_size", "mamba_d_state")),
        value_dim=config.whole("mamba_head_dim"),
        kernel=kernel,
    )
    width = config.whole("intermediate_size", 0)
    return (
        {
            "layers": len(mixing),
            "hidden": config.whole("hidden_size"),
            "heads": heads,
            "kv_heads": config.whole("num_key_value_heads", heads),
            "head_dim": config.whole(config.either("head_dim", "attention_head_dim")),
            "vocabulary": config.whole("vocab_size"),
            "ties_embeddings": config.flag("tie_word_embeddings"),
            "gated": False,
            "width": config.whole("moe_intermediate_size"),
            "expert_hidden": latent,
            "linear": states if states.layers else None,
            "without_ffn": bool(bare),
        }
        | _groups(config)
        | _routed(config)
        | _shared(config, config.whole("moe_shared_expert_intermediate_size", 0), 1)
        | _placed(bare or dense, width if dense else 0)
    )


def _nemotron_blocks(config: _Config) -> str:
    """The letter of each block: M, *, E or -."""
    pattern = config.word("hybrid_override_pattern")
    listed = config.listed(config.either("layers_block_type", "layer_types"))
    if not pattern:
        pattern = "".join(_NEMOTRON_WORDS.get(str(each), "?") for each in listed)
    if not pattern or set(pattern) - set("M*E-"):
        raise UsageError(
            f"{config.where}: hybrid_override_pattern: expected M, *, E or - for each block, or layers_block_type, "
            f"got {shortened(pattern)}"
        )
    return pattern


def _glm4(config: _Config) -> dict[str, Any]:
    """GLM-4.5: the output's projection has no bias."""
    shape = _biases(config, _leading(config), output=False)
    return _head_norms(shape) if config.flag("use_qk_norm") else shape


def _dots1(config: _Config) -> dict[str, Any]:
    shape = _head_norms(_biases(config, _leading(config)))
    return _window(config, shape, range(config.whole("max_window_layers", 62), shape["layers"]))


def _ernie(config: _Config) -> dict[str, Any]:
    """ERNIE 4.5: experts in every moe_layer_interval-th layer between two; the router's correction counts as a parameter."""
    shape = _common(config, "moe_intermediate_size")
    if config.flag("use_bias"):
        raise UsageError(f"{config.where}: use_bias: expected false: biases of every projection are not supported")
    layers = shape["layers"]
    first, last = config.whole("moe_layer_start_index", 1), config.number("moe_layer_end_index", -1)
    interval = max(1, config.whole("moe_layer_interval", 1))
    sparse = range(first, (layers if last < 0 else last + 1))
    dense = [layer for layer in range(layers) if layer not in sparse or (layer + 1) % interval]
    shape |= _routed(config) | _shared(config, shape["width"]) | _placed(dense, config.whole("intermediate_size"))
    return shape | {"ties_embeddings": config.flag("tie_word_embeddings", True), "moe_vectors": shape["experts"]}


def _hunyuan(config: _Config) -> dict[str, Any]:
    """Hunyuan-Large and its successors, which name an expert's width apart and may begin with dense layers."""
    config.whole("cla_share_factor", 0)
    shape = _biases(config, _common(config, "intermediate_size"))
    dense_width, count = shape["width"], config.whole("moe_layer_num_skipped", 0)
    width = config.whole("moe_intermediate_size", 0) or dense_width
    if config.flag("use_qk_norm", config.kind == "hunyuan_v1_moe"):
        shape = _head_norms(shape)
    shape |= {"width": width} | _shared(config, width, int(config.kind == "hunyuan_v1_moe"))
    return shape | _routed(config) | _placed(list(range(count)), dense_width)


def _nearest(config: _Config) -> dict[str, Any]:
    """The nearest shape of a type that is not known, by the fields that most types share: attention
    latent, or of grouped queries; experts from the first layers that are not dense on."""
    kind = repr(config.kind) if config.kind else "missing"
    config.left_out.append(f"what only the code of an unknown model_type says ({shortened(kind)}), such as norms")
    if any(map(config.has, _EXPERTS)):
        shape = _deepseek_latent(config) if config.has("kv_lora_rank") else _leading(config)
    else:
        shape = _dense(config, _common(config, "intermediate_size"))
    if config.has("linear_attn_config"):
        shape["linear"] = _kda(config, shape["layers"])
    return _streams(config, shape, head=False)


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
    "qwen3_5_moe": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_latent,
    "deepseek_v3": _deepseek_latent,
    "deepseek_v32": _deepseek_latent,
    "deepseek_v4": _deepseek_v4,
    "kimi_k2": _deepseek_latent,
    "kimi_linear": _kimi_linear,
    "kimi_k3": _kimi_linear,
    "glm_moe_dsa": _deepseek_latent,
    "glm5_next": _glm5_next,
    "glm5_next_text": _glm5_next,
    "mimo_v2": _mimo,
    "mimo_v2_flash": _mimo,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "nemotron_h": _nemotron_h,
    "step3_text": _step3,
    "step3_vl": _step3,
    "step3p5": _step3,
    "step3p7": _step3,
    "glm4_moe": _glm4,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie,
    "hunyuan": _hunyuan,
    "hunyuan_v1_moe": _hunyuan,
}
