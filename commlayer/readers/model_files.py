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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
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
_KINDS = {bool: "true or false", dict: "an object", int: "a whole number", list: "a list", str: "a text"}
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
    where = str(file)
    if "format" not in content:
        return from_config(content, name or "model", where, approximate=approximate)
    if content.pop("format") != FORMAT:
        raise UsageError(f"{where}: format: expected {FORMAT!r}")
    parts = {
        "latent": LatentAttention,
        "window": AttentionWindow,
        "linear": LinearAttention,
        "indexer": AttentionIndexer,
        "compressed": CompressedAttention,
    }
    records = [(content, ModelShape, ""), *((content.get(part), kind, f"{part}.") for part, kind in parts.items())]
    for record, kind, place in records:
        known = [field.name for field in fields(kind)]
        if isinstance(record, dict) and (unknown := sorted(set(record) - set(known))):
            raise UsageError(f"{where}: unknown field {place}{unknown[0]}: expected {', '.join(known)}")
    try:
        return msgspec.convert(content, ModelShape)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from error


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
    parts = MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if parts is None and not approximate:
        asked = dict.fromkeys(name for field, value in content.items() if value and (name := _mechanism(field)))
        got = "but it is missing" if kind is None else f"got {shortened(repr(kind))}"
        has = f", whose fields ask for {', '.join(asked)}" if asked else ""
        raise UsageError(
            f"{where}: model_type: expected a type that is known, {got}{has}. --approximate plans the "
            "nearest shape and says what it leaves out; or describe the model in a file "
            f'{{"format": "{FORMAT}", …}} with the fields of ModelShape. Known are {", ".join(MODEL_TYPES)}'
        )
    for part in parts or _nearest(config):
        part(config)
    config.refuse_unread()
    source = f"{where} ({kind})"
    try:
        return ModelShape(
            name=name,
            source=source,
            approximates="; ".join(config.left_out),
            rotary_base=_constant(content, where, "rope_theta"),
            norm_epsilon=_constant(content, where, "rms_norm_eps"),
            **config.shape,
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


def _mechanism(field: str) -> str:
    """The mechanism that a field asks for; empty where none is known."""
    return next((name for name, pattern in _MECHANISMS.items() if re.search(pattern, field)), "")


class _Config:
    """A configuration that knows which of its fields were read, and the fields of the shape so far.

    ``left_out``: what the shape leaves out, where that is asked for, and about how much it weighs.
    """

    def __init__(self, content: Mapping[str, Any], where: str, *, approximate: bool = False) -> None:
        self.content, self.where, self.approximate = content, where, approximate
        self.kind, self.known = content.get("model_type"), {"model_type"}
        self.left_out: list[str] = []
        self.sections: list[_Config] = []
        self.shape: dict[str, Any] = {}

    def error(self, name: str, expected: str) -> UsageError:
        return UsageError(f"{self.where}: {name}: expected {expected}")

    def value(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of one of JSON's kinds. A missing one and null are the default."""
        self.known.add(name)
        value = self.content.get(name)
        if value is not None and type(value) is not kind:
            raise self.error(name, f"{_KINDS[kind]}, got {shortened(repr(value))}")
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, most: int = MOST_OF_A_SIZE) -> int:
        """A whole number of at most ``most``; of a list (one entry per layer) what all entries are. A missing one and null are
        the default."""
        self.known.add(name)
        value = self.content.get(name)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.error(name, f"one number for all layers, got different ones: {value}")
            value = value[0]
        if value is None and default is not None:
            return default
        if value is None:
            raise self.error(name, "this field, but it is missing")
        if type(value) is not int or value < 0:
            raise self.error(name, f"a whole number, got {value!r}")
        if value > most:
            raise self.error(name, f"at most {most:,}, got {shortened(str(value))}")
        return value

    def words(self, name: str, known: Iterable[str] = _LAYER_TYPES) -> list[str] | None:
        """A word for each layer of the shape, one of ``known`` (transformers' words for a layer's
        attention); those of modules behind them are cut off. None where the field is missing."""
        layers = self.shape["layers"]
        value: list[str] | None = self.value(name, list)
        if value is None:
            return None
        if len(value) < layers or not set(map(str, value)) <= set(known):
            choice = f"one of {', '.join(sorted(known))} for each of {layers} layers"
            raise self.error(name, f"{choice}, got {shortened(str(value))}")
        return value[:layers]

    def numbers(self, name: str, what: str = "whole numbers") -> list[int]:
        """A list of whole numbers, one for each layer or of layers; empty if it is missing."""
        self.known.add(name)
        value = self.content.get(name) or []
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise self.error(name, f"a list of {what}, got {value!r}")
        return value

    def has(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return self.content.get(name) is not None

    def either(self, *names: str) -> str:
        """The first of these fields that is there; if none is, all of them in words, which no field is called."""
        return next((name for name in names if self.has(name)), " or ".join(names))

    def section(self, name: str) -> _Config:
        """The fields of an object within; none where it is missing. Those that nobody reads are
        refused as others are."""
        content = {**self.value(name, dict, {}), "model_type": self.kind}
        section = _Config(content, f"{self.where}: {name}", approximate=self.approximate)
        section.left_out = self.left_out
        self.sections.append(section)
        return section

    def refuse_unread(self) -> None:
        """Refuse what looks like a size, or asks for more parameters, and was not read; or name it
        among what is left out."""
        for section in self.sections:
            section.refuse_unread()
        asked = {}
        for name, value in self.content.items():
            if name in self.known:
                continue
            numbers = value if isinstance(value, list) else [value]
            is_size = any(type(each) in (int, float) for each in numbers) and _SIZE_LIKE.search(name)
            mechanism, unknown = _mechanism(name), f"a {self.kind} model is not known to have"
            if is_size and name not in _HARMLESS:
                what = f"this asks for {mechanism}, which" if mechanism else "this looks like a size, and"
                asked[name] = f"{what} {unknown}{'' if mechanism else ' it'}: remove it if it changes no size"
            elif value is True and name not in _KEPT_APART and _HAS_VECTORS.search(name):
                asked[name] = f"{unknown} that: remove it if it adds no parameters"
        if not asked:
            return
        name, why = next(iter(asked.items()))
        if not self.approximate:
            raise UsageError(f"{self.where}: {name}: {why}, or plan without it by --approximate")
        named = dict.fromkeys(_mechanism(each) or each for each in asked)
        self.left_out.append(f"{', '.join(named)} (fields {', '.join(asked)}): nobody knows how much they weigh")


def _common(config: _Config, width: str, *, names_head_dim: bool = False) -> None:
    """The fields that all configurations have. ``width``: the field with an expert's. ``names_head_dim``: transformers has a
    default of its own for ``head_dim`` there, so that a file without it means another size than hidden_size /
    num_attention_heads."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", None if names_head_dim else 0) or config.whole("attention_head_dim", 0)
    is_latent = config.has("kv_lora_rank")  # its heads have sizes of their own
    if not head_dim and heads and hidden % heads and not is_latent:
        reason = f"num_attention_heads={heads} does not divide hidden_size={hidden}"
        raise config.error("head_dim", f"this field, as {reason}")
    config.shape |= {
        "layers": config.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.whole(config.either("num_key_value_heads", "num_attention_groups")),
        "head_dim": head_dim or hidden // max(heads, 1),
        "width": config.whole(width),
        "vocabulary": config.whole("vocab_size"),
        "ties_embeddings": config.value("tie_word_embeddings", bool, False),
        "vectors": 0,
    }


def _biases(config: _Config, *, asked: str = "attention_bias", default: bool = False, output: bool = True) -> None:
    """Biases of queries, keys and values, and of the output's projection, where the field ``asked``
    says so; all models of a type without such a field have them, or none (``default``)."""
    has = config.value(asked, bool, default) if asked else default
    config.shape["qkv_bias"] = has
    config.shape["vectors"] += config.shape["hidden"] if has and output else 0


def _head_norms(config: _Config, *, asked: str = "", default: bool = False) -> None:
    """Norms of queries and keys that all heads share, where the field ``asked`` says so; in every
    model of a type without such a field."""
    if not asked or config.value(asked, bool, default):
        config.shape["vectors"] += 2 * config.shape["head_dim"]


def _window(config: _Config, layers: Collection[int] | None = None, *, word: str = "sliding") -> None:
    """The window of attention in ``layers`` (None: in all), or in those that ``layer_types`` calls
    so, which goes before. A window that holds the longest sequence of the model is none."""
    count, types = config.shape["layers"] if layers is None else len(layers), config.words("layer_types")
    if types is not None:
        count = types.count(f"{word}_attention")
    tokens = config.whole("attention_chunk_size" if word == "chunked" else "sliding_window", 0)
    longest = config.whole("max_position_embeddings", 0)
    if count and tokens and not 0 < longest <= tokens:
        config.shape["window"] = AttentionWindow(tokens, count, chunked=word == "chunked")


def _asked_window(config: _Config, layers: Collection[int] | None = None) -> None:
    """Qwen's windows, where ``use_sliding_window`` says so; else no layer has one, whatever
    ``sliding_window`` is, and ``layer_types`` must not say otherwise."""
    if config.value("use_sliding_window", bool):
        _window(config, layers)
    else:
        for word in set(config.words("layer_types") or ()) - {"full_attention"}:
            raise config.error("layer_types", f"full_attention in every layer, got {word!r}")


def _some_windows(config: _Config, *, default: int = 28, is_early: bool = False, is_asked: bool = True) -> None:
    """Windows from ``max_window_layers`` on; ``is_early``: in every second layer before that.
    ``is_asked``: only where ``use_sliding_window`` says so."""
    layers, border = config.shape["layers"], config.whole("max_window_layers", default)
    windowed = range(0, min(border, layers), 2) if is_early else range(border, layers)
    (_asked_window if is_asked else _window)(config, windowed)


def _dense_layers(config: _Config, otherwise: Iterable[int]) -> list[int]:
    """The layers with a dense FFN: as ``mlp_layer_types`` says, which goes before others, or as a list
    ``moe_layer_freq`` of one number for each layer; else ``otherwise``."""
    types = config.words("mlp_layer_types", ("dense", "sparse"))
    if types is None and isinstance(config.content.get("moe_layer_freq"), list):
        frequency = config.numbers("moe_layer_freq")[: config.shape["layers"]]
        types = ["sparse" if each else "dense" for each in frequency]
    if types is None:
        return list(otherwise)
    return [layer for layer, kind in enumerate(types) if kind == "dense"]


def _put(config: _Config, dense: list[int], width: int | str = "intermediate_size") -> None:
    """Put dense layers among others. ``width``: theirs, or the field that has it where there are
    any."""
    if isinstance(width, str):
        width = config.whole(width, None if dense else 0)
    config.shape |= {
        "dense_layers": len(dense),
        "dense_width": width if dense else 0,
        "dense_at": () if dense == list(range(len(dense))) else tuple(dense),
    }


def _routed(config: _Config, top_k: int | None = None) -> None:
    """The number of experts, and of those of a token (``top_k`` where it is missing)."""
    config.shape["experts"] = config.whole(config.either(*_EXPERTS))
    config.shape["top_k"] = config.whole(config.either(*_TOP_K), top_k)


def _shared(config: _Config, width: int, default: int = 0) -> None:
    """The width of the experts that all tokens pass through: so many of ``width``."""
    config.shape["shared_width"] = config.whole(config.either(*_SHARED), default) * width


def _gated_shared(config: _Config) -> None:
    """One shared expert that has a gate."""
    config.shape["shared_width"] = config.whole("shared_expert_intermediate_size")
    config.shape["moe_vectors"] = config.shape["hidden"]


def _without_shared(config: _Config) -> None:
    if config.whole("shared_intermediate_size", 0):
        raise config.error("shared_intermediate_size", "0: shared experts are not known of this model")


def _types_of(config: _Config, name: str, words: tuple[str, str]) -> list[str]:
    """The kind of each layer's attention: by ``layer_types``, or by a list ``name`` of a 0 or a 1 for each."""
    layers = config.shape["layers"]
    types, listed = config.words("layer_types"), config.numbers(name)[:layers]
    if types is None and len(listed) != layers:
        raise config.error(name, f"a 0 or a 1 for each of {layers} layers, or layer_types")
    return [words[bool(each)] for each in listed] if types is None else types


def _dense(config: _Config) -> None:
    """A model without experts: every layer has an FFN of ``width``."""
    if config.value("mlp_bias", bool):
        raise config.error("mlp_bias", "false: biases of dense FFNs are not supported")
    _put(config, list(range(config.shape["layers"])), config.shape["width"])
    config.shape |= {"experts": 1, "top_k": 1, "width": 1}


def _phimoe(config: _Config) -> None:
    """Its norms are LayerNorm, with biases."""
    hidden = config.shape["hidden"]
    config.shape["vectors"] += 2 * hidden
    head = config.shape["vocabulary"] if config.value("lm_head_bias", bool) else 0
    config.shape["end_vectors"] = hidden + head


def _olmoe(config: _Config) -> None:
    """The norms of queries and of keys go over all heads."""
    shape = config.shape
    shape["vectors"] += shape["hidden"] + shape["hidden"] // shape["heads"] * shape["kv_heads"]


def _gpt_oss(config: _Config) -> None:
    """Biases everywhere, a sink of each head, a window in every second layer, from the first."""
    shape = config.shape
    _biases(config, default=True)
    _window(config, range(0, shape["layers"], 2))
    shape["vectors"] += shape["heads"]
    shape |= {"moe_vectors": shape["experts"], "expert_vectors": 2 * shape["width"] + shape["hidden"], "clamps": True}


def _llama4(config: _Config) -> None:
    """Experts in ``moe_layers``, or in every ``interleave_moe_layer_step``-th layer; chunked attention where positions are
    rotated; the shared expert is as wide as the others. The vision model of a whole configuration is no part of the shape."""
    layers, step = config.shape["layers"], config.whole("interleave_moe_layer_step", 1)
    sparse = set(config.numbers("moe_layers", "layers"))
    if not config.has("moe_layers") and step:
        sparse = set(range(step - 1, layers, step))
    interval = config.whole("no_rope_layer_interval", 4)
    rotates = config.numbers("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    _window(config, [layer for layer in range(layers) if rotates[layer : layer + 1] != [0]], word="chunked")
    _routed(config, 1)
    config.shape["shared_width"] = config.shape["width"]
    dense = [layer for layer in range(layers) if layer not in sparse]
    _put(config, dense, config.whole("intermediate_size_mlp"))


def _minimax(config: _Config) -> None:
    """MiniMax-Text-01 and M1: most layers have lightning attention, by ``layer_types`` or ``attn_type_list`` (0)."""
    types = _types_of(config, "attn_type_list", ("linear_attention", "full_attention"))
    config.known.add("block_size")
    _without_shared(config)
    if "window" in config.shape:
        raise config.error("sliding_window", "none beside linear attention")
    heads, size = config.shape["heads"], config.shape["head_dim"]
    if linear := types.count("linear_attention"):
        config.shape["linear"] = LinearAttention("lightning", linear, heads, heads, size, size)


def _minimax_m2(config: _Config) -> None:
    """Every layer has scores; norms of queries and of keys go over all heads."""
    if 0 in config.numbers("attn_type_list"):
        raise config.error("attn_type_list", "1 in every layer")
    _without_shared(config)
    if config.value("use_qk_norm", bool, True):
        config.shape["vectors"] = (config.shape["heads"] + config.shape["kv_heads"]) * config.shape["head_dim"]


def _sparse_steps(config: _Config) -> None:
    """Qwen's experts: in layer i where decoder_sparse_step divides i + 1 and mlp_only_layers does
    not name i."""
    layers, step = config.shape["layers"], config.whole("decoder_sparse_step", 1)
    only = config.numbers("mlp_only_layers", "layers")
    if any(not 0 <= layer < layers for layer in only):
        raise config.error("mlp_only_layers", f"numbers of layers from 0 to {layers - 1}, got {only!r}")
    _routed(config)
    _put(config, [layer for layer in range(layers) if layer in only or not step or (layer + 1) % step])


def _qwen3_next(config: _Config) -> None:
    """Every ``full_attention_interval``-th layer has gated attention, the others a gated delta net."""
    layers, interval = config.shape["layers"], config.whole("full_attention_interval", 4)
    types = config.words("layer_types")
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
    config.shape |= {"gated_attention": True, "linear": linear if linear.layers else None}


def _groups(config: _Config) -> None:
    groups = max(1, config.whole(config.either("n_group", "num_expert_group"), 1))
    limit = config.whole("topk_group", 1)
    config.shape |= {"router_groups": groups, "router_group_limit": limit if groups > 1 else 1}


def _leading(config: _Config) -> None:
    """Layer i has experts from first_k_dense_replace on, where moe_layer_freq divides i, or as
    mlp_layer_types says."""
    is_optional = config.has("mlp_layer_types") or config.approximate
    first = config.whole("first_k_dense_replace", 0 if is_optional else None)
    is_listed = isinstance(config.content.get("moe_layer_freq"), list)
    frequency = 1 if is_listed else max(1, config.whole("moe_layer_freq", 1))
    dense = _dense_layers(config, (i for i in range(config.shape["layers"]) if i < first or i % frequency))
    _groups(config)
    _routed(config)
    _shared(config, config.shape["width"])
    _put(config, dense)


def _latent(config: _Config) -> None:
    """DeepSeek-V2 and V3, and Kimi-K2; with ``index_topk``, DeepSeek-V3.2 and GLM-5. What transformers
    writes as head_dim and qk_head_dim follows from the other dimensions."""
    latent = LatentAttention(
        q_rank=config.whole("q_lora_rank", 0),
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
    )
    config.known.add("qk_head_dim")
    shape = config.shape
    down = latent.q_rank + latent.kv_rank + latent.rope_dim  # the projections that may have a bias, beside the output's
    shape |= {
        "latent": latent,
        "kv_heads": shape["heads"],
        "head_dim": latent.value_dim,
        "vectors": down + shape["hidden"] if config.value("attention_bias", bool) else 0,
    }
    if config.has("index_topk"):
        shape["indexer"] = _indexer(config)


def _indexer(config: _Config) -> AttentionIndexer:
    """The indexer of all layers, which run it or take over what the layer before chose, as
    ``indexer_types`` says, a pattern, or a frequency (GLM-5.2)."""
    layers, types = config.shape["layers"], config.words("indexer_types", ("full", "shared"))
    pattern, frequency = config.value("index_topk_pattern", str), config.whole("index_topk_freq", 1)
    offset = config.whole("index_skip_topk_offset", 2)
    config.words("layer_types")
    if types is None and pattern:
        types = ["full" if letter == "F" else "shared" for letter in pattern[:layers]]
    if types is None:
        behind = (max(layer - offset + 1, 0) for layer in range(layers))
        types = ["shared" if each % max(1, frequency) else "full" for each in behind]
    return AttentionIndexer(
        heads=config.whole("index_n_heads"),
        head_dim=config.whole("index_head_dim"),
        top_k=config.whole("index_topk"),
        layers=layers,
        scored_layers=types.count("full"),
        pool=config.whole("index_kpool", 1),
    )


def _streams(config: _Config, *, head: bool = False) -> None:
    """Hyper-connections; ``head``: with weights for the sum of the streams at the end."""
    streams, hidden = config.whole("hc_mult", 1), config.shape["hidden"]
    config.known.add("hc_sinkhorn_iters")
    end = streams * streams * hidden + streams + 1 if head and streams > 1 else 0
    config.shape |= {"streams": streams, "end_vectors": end}


def _deepseek_v4(config: _Config) -> None:
    """Every layer has experts; the first of them route by hashes of tokens, with weights that are
    those of a router. Attention is compressed, by ``layer_types`` or ``compress_ratios``."""
    layers = config.shape["layers"]
    config.words("mlp_layer_types", ("hash_moe", "moe"))
    config.known.add("num_hash_layers")
    rates = config.section("compress_rates")
    sparse_rate = rates.whole("compressed_sparse_attention", 4)
    dense_rate = rates.whole("heavily_compressed_attention", 128)
    types = config.words("layer_types", _COMPRESSED_TYPES)
    ratios = config.numbers("compress_ratios")[:layers]
    if types is not None:
        rate_of = dict(zip(_COMPRESSED_TYPES, (sparse_rate, dense_rate, 0), strict=True))
        ratios = [rate_of[each] for each in types]
    if len(ratios) != layers or set(ratios) - {0, sparse_rate, dense_rate}:
        each = f"0, {sparse_rate} or {dense_rate} for each of {layers} layers"
        raise config.error("compress_ratios", f"{each}, got {shortened(str(ratios))}")
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
    _routed(config)
    _shared(config, config.shape["width"], 1)
    config.shape |= {
        "clamps": config.has("swiglu_limit"),
        "vectors": config.shape["heads"],  # a sink of each
        "compressed": compressed,
        "indexer": indexer if compressed.sparse_layers else None,
    }
    _streams(config, head=True)


def _kimi_linear(config: _Config) -> None:
    """Kimi Linear and Kimi-K3: layers of Kimi Delta Attention and of latent attention in turn; K3's
    have gates, and its experts a latent space."""
    shape, name = config.shape, "attn_res_block_size"
    latent = config.whole("routed_expert_hidden_size", 0)
    if block := config.whole(name, 0):
        mechanism = "attention over the outputs of earlier blocks of layers"
        weight = (
            "below 0.01 % of the parameters; each layer reads up to "
            f"{shape['layers'] // block + 1} hidden states twice, memory's time alone"
        )
        if not config.approximate:
            without = "--approximate plans the model without"
            raise UsageError(f"{config.where}: {name}: {mechanism} cannot be modelled ({weight}): {without}")
        config.left_out.append(f"{mechanism} ({name}): {weight}")
    _kda(config)
    shape |= {
        "gated_attention": config.value("mla_use_output_gate", bool, False),
        "expert_hidden": latent if latent != shape["hidden"] else 0,
        "moe_vectors": latent if config.value("latent_moe_use_norm", bool) else 0,
    }


def _kda(config: _Config) -> None:
    """Kimi Delta Attention, in the layers that ``layer_types`` or ``linear_attn_config`` names, from 1."""
    section = config.section("linear_attn_config")
    head = section.whole("head_dim", 0) or config.whole("linear_head_dim", 128)
    heads = section.whole("num_heads", 0) or config.whole("linear_num_heads")
    kernel = section.whole("short_conv_kernel_size", 0) or config.whole("linear_conv_kernel_dim", 4)
    section.known.add("full_attn_layers")
    named, types = section.numbers("kda_layers", "layers"), config.words("layer_types")
    number = len(set(named)) if types is None else types.count("linear_attention")
    full = section.value("use_full_rank_gate", bool, False)
    if number:
        config.shape["linear"] = LinearAttention("kda", number, heads, heads, head, head, kernel, full_rank_gate=full)


def _glm5_next(config: _Config) -> None:
    """GLM-5.3: Kimi Delta Attention, and latent attention with an indexer over pooled keys; four
    residual streams."""
    _kda(config)
    shape, layers = config.shape, config.shape["layers"]
    softmax = layers - (shape["linear"].layers if "linear" in shape else 0)
    scored = config.words("indexer_types", ("full", "shared")) or ["full"] * layers
    types = config.words("layer_types") or []
    own = sum(one == "full" and kind != "linear_attention" for one, kind in zip(scored, types, strict=False))
    shape["indexer"] = replace(_indexer(config), layers=softmax, scored_layers=own or softmax)
    shape["clamps"] = config.has("swiglu_limit")


def _mimo(config: _Config) -> None:
    """MiMo-V2: most layers have a window, with twice the key-value heads and sinks; values are
    narrower than keys. What an own field of windowed layers says must be the others' too."""
    shape, heads = config.shape, config.shape["heads"]
    types = _types_of(config, "hybrid_layer_pattern", ("full_attention", "sliding_attention"))
    windowed = types.count("sliding_attention")
    value = config.whole("v_head_dim", shape["head_dim"])
    for name, size in (("swa_head_dim", shape["head_dim"]), ("swa_v_head_dim", value)):
        if config.whole(name, size) != size:
            raise config.error(name, f"{size} as in other layers: heads of two sizes are not modelled")
    own_heads = config.whole("swa_num_attention_heads", heads)
    window = AttentionWindow(
        tokens=config.whole("sliding_window"),
        layers=windowed,
        heads=own_heads,
        kv_heads=config.whole("swa_num_key_value_heads", 2 * shape["kv_heads"]),
        vectors=own_heads if config.value("add_swa_attention_sink_bias", bool, True) else 0,
    )
    config.known.update(("attention_chunk_size", "sliding_window_size"))
    shape |= {
        "value_dim": value if value != shape["head_dim"] else 0,
        "qkv_bias": config.value("attention_bias", bool, False),
        "vectors": heads if config.value("add_full_attention_sink_bias", bool) else 0,
        "window": window if windowed else None,
    }
    _shared(config, shape["width"])
    _put(config, _dense_layers(config, [0]))


def _minimax_m3(config: _Config) -> None:
    """MiniMax-M3: an indexer chooses blocks of keys in most layers; one shared expert."""
    sparse = config.section("sparse_attention_config")
    sparse.known.update(("sparse_disable_index_value", "sparse_init_block", "sparse_local_block"))
    types = config.words("layer_types", _MINIMAX_TYPES)
    frequency = sparse.numbers("sparse_attention_freq")
    number = sum(map(bool, frequency)) if types is None else types.count(_MINIMAX_TYPES[1])
    heads, size, block, blocks = (
        config.whole(name, 0) or sparse.whole(legacy, default)
        for name, legacy, default in (
            ("index_n_heads", "sparse_num_index_heads", 4),
            ("index_head_dim", "sparse_index_dim", 128),
            ("index_block_size", "sparse_block_size", 128),
            ("index_topk_blocks", "sparse_topk_blocks", 16),
        )
    )
    config.known.add("index_local_blocks")
    indexer = AttentionIndexer(heads, size, block * blocks, number, number, weighs_heads=False)
    config.shape |= {
        "shared_width": config.whole("shared_intermediate_size") * max(1, config.whole("n_shared_experts", 1)),
        "indexer": indexer if number else None,
        "clamps": config.has("swiglu_limit"),
    }
    _put(config, _dense_layers(config, ()), "dense_intermediate_size")


def _step3(config: _Config) -> None:
    """Step-3, whose queries go through a low rank (arXiv:2507.19427), and Step-3.5 to 3.7, most of
    whose layers have windows with more heads, and all a gate of each head."""
    shape, size = config.shape, config.shape["head_dim"]
    is_first, enum = config.has("share_q_dim"), "moe_layers_enum"
    own = 2 * size * (not is_first and config.value("use_qk_norm", bool, True))
    gates = shape["hidden"] * (not is_first and config.value("use_head_wise_attn_gate", bool, True))
    if isinstance(config.content.get(enum), list):
        sparse = config.numbers(enum)
    else:
        named = [each.strip() for each in config.value(enum, str, "").split(",") if each.strip()]
        if not all(each.isascii() and each.isdigit() and len(each) < 6 for each in named):
            raise config.error(enum, f"numbers of layers, got {named}")
        sparse = [int(each) for each in named]
    config.known.add(enum)
    layers = range(shape["layers"])
    dense = _dense_layers(config, [layer for layer in layers if layer not in (sparse or layers[3:])])
    shape |= {
        "query_rank": config.whole("share_q_dim", 0),
        "vectors": own + gates * shape["heads"],
        "shared_width": config.whole(config.either("share_expert_dim", "share_expert_dims")),
    }
    other = config.section("attention_other_setting")
    heads = other.whole("num_attention_heads", 0) or config.whole("num_sliding_attention_heads", shape["heads"])
    groups = other.whole("num_attention_groups", shape["kv_heads"])
    other.known.add("head_dim")
    types = config.words("layer_types") or []
    if number := types.count("sliding_attention"):
        shape["window"] = AttentionWindow(
            config.whole("sliding_window"), number, heads=heads, kv_heads=groups, vectors=own + gates * heads
        )
    _put(config, dense)


def _nemotron_h(config: _Config) -> None:
    """Nemotron-H: blocks of one thing each, a state (Mamba-2), attention, experts or an FFN. A layer
    here is a block that mixes tokens with the experts or the FFN behind it, if there are any."""
    field = "hybrid_override_pattern"
    listed = config.value(config.either("layers_block_type", "layer_types"), list, [])
    blocks = config.value(field, str) or "".join(_NEMOTRON_WORDS.get(str(each), "?") for each in listed)
    if not blocks or set(blocks) - set("M*E-"):
        letters = "M, *, E or - for each block, or layers_block_type"
        raise config.error(field, f"{letters}, got {shortened(blocks)}")
    mixing = [place for place, block in enumerate(blocks) if block in "M*"]
    behind = [(blocks + "M")[place + 1] for place in mixing]
    bare = [layer for layer, block in enumerate(behind) if block in "M*"]
    dense = [layer for layer, block in enumerate(behind) if block == "-"]
    if len(mixing) + len(behind) - len(bare) != len(blocks):
        raise config.error(field, "every FFN behind a block that mixes tokens")
    if bare and dense:
        raise UsageError(
            f"{config.where}: {field}: layers without an FFN beside layers with a dense one are not modelled"
        )
    config.known.update(("num_hidden_layers", "expand", "mamba_expand", "chunk_size", "mamba_chunk_size", *_STEPS))
    heads, width = config.whole("num_attention_heads"), config.whole("intermediate_size", 0)
    states = LinearAttention(
        kind="mamba2",
        layers=sum(blocks[place] == "M" for place in mixing),
        key_heads=config.whole(config.either("n_groups", "mamba_n_groups")),
        value_heads=config.whole("mamba_num_heads"),
        key_dim=config.whole(config.either("ssm_state_size", "mamba_d_state")),
        value_dim=config.whole("mamba_head_dim"),
        kernel=config.whole(config.either("conv_kernel", "mamba_d_conv")),
    )
    config.shape |= {
        "layers": len(mixing),
        "hidden": config.whole("hidden_size"),
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads", heads),
        "head_dim": config.whole(config.either("head_dim", "attention_head_dim")),
        "vocabulary": config.whole("vocab_size"),
        "ties_embeddings": config.value("tie_word_embeddings", bool, False),
        "gated": False,
        "width": config.whole("moe_intermediate_size"),
        "expert_hidden": config.whole("moe_latent_size", 0),
        "linear": states if states.layers else None,
        "without_ffn": bool(bare),
    }
    _shared(config, config.whole("moe_shared_expert_intermediate_size", 0), 1)
    _put(config, bare or dense, width if dense else 0)


def _ernie(config: _Config) -> None:
    """ERNIE 4.5: experts in every moe_layer_interval-th layer between two; the router's correction counts as a parameter."""
    if config.value("use_bias", bool):
        raise config.error("use_bias", "false: biases of every projection are not supported")
    shape, layers = config.shape, config.shape["layers"]
    first, last = config.whole("moe_layer_start_index", 1), config.value("moe_layer_end_index", int, -1)
    interval = max(1, config.whole("moe_layer_interval", 1))
    sparse = range(first, (layers if last < 0 else last + 1))
    dense = [layer for layer in range(layers) if layer not in sparse or (layer + 1) % interval]
    _shared(config, shape["width"])
    _put(config, dense, config.whole("intermediate_size"))
    shape |= {
        "ties_embeddings": config.value("tie_word_embeddings", bool, True),
        "moe_vectors": shape["experts"],
    }


def _hunyuan(config: _Config, *, is_later: bool) -> None:
    """Hunyuan-Large and its successors, which name an expert's width apart and may begin with dense layers."""
    config.known.add("cla_share_factor")
    dense_width = config.shape["width"]
    _put(config, list(range(config.whole("moe_layer_num_skipped", 0))), dense_width)
    config.shape["width"] = config.whole("moe_intermediate_size", 0) or dense_width
    _head_norms(config, asked="use_qk_norm", default=is_later)
    _shared(config, config.shape["width"], int(is_later))


_PLAIN = partial(_common, width="intermediate_size")
_PLAIN_HEADS = partial(_common, width="intermediate_size", names_head_dim=True)
_EXPERT = partial(_common, width="moe_intermediate_size")
_EXPERT_HEADS = partial(_common, width="moe_intermediate_size", names_head_dim=True)
_Parts = tuple[Callable[[_Config], None], ...]


def _nearest(config: _Config) -> _Parts:
    """The parts of the nearest shape of a type that is not known, by the fields that most types
    share: attention latent, or of grouped queries; experts from the first layers that are not dense
    on."""
    kind = repr(config.kind) if config.kind else "missing"
    config.left_out.append(f"what only the code of an unknown model_type says ({shortened(kind)}), such as norms")
    parts: _Parts = (_PLAIN, _dense)
    if any(map(config.has, _EXPERTS)):
        parts = (_EXPERT, _leading, *((_latent,) if config.has("kv_lora_rank") else ()))
    return (*parts, *((_kda,) if config.has("linear_attn_config") else ()), _streams)


_MIXTRAL = (_PLAIN, _window, _routed)
_LATENT = (_EXPERT, _leading, _latent)
_QWEN3_NEXT = (_EXPERT_HEADS, _sparse_steps, _biases, _head_norms, _qwen3_next, _gated_shared)
_GLM5_NEXT = (*_LATENT, _glm5_next, _streams)
_KIMI_LINEAR = (*_LATENT, _kimi_linear)
_MINIMAX = (*_MIXTRAL, _minimax)
_MINIMAX_M3 = (_PLAIN_HEADS, _head_norms, _routed, _minimax_m3)
_MIMO = (_EXPERT_HEADS, _groups, _routed, _mimo)
_STEP3 = (_EXPERT, _step3, _routed)
_LLAMA4 = (_PLAIN_HEADS, _biases, _llama4)

MODEL_TYPES: dict[Any, _Parts] = {
    "llama": (_PLAIN, _biases, _dense),
    "mistral": (_PLAIN, _window, _dense),
    "qwen2": (_PLAIN, partial(_biases, asked="", default=True, output=False), _some_windows, _dense),
    "qwen3": (_PLAIN_HEADS, _biases, _head_norms, _some_windows, _dense),
    "mixtral": _MIXTRAL,
    "phimoe": (*_MIXTRAL, _biases, _phimoe),
    "olmoe": (*_MIXTRAL, _biases, _olmoe),
    "gpt_oss": (_PLAIN_HEADS, _routed, _gpt_oss),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "minimax": _MINIMAX,
    "minimax_text_01": _MINIMAX,
    "minimax_m1": _MINIMAX,
    "minimax_m2": (_PLAIN_HEADS, _routed, _minimax_m2),
    "qwen2_moe": (
        _EXPERT,
        _sparse_steps,
        partial(_some_windows, is_early=True),
        partial(_biases, asked="qkv_bias", default=True, output=False),
        _gated_shared,
    ),
    "qwen3_moe": (_EXPERT, _sparse_steps, _biases, _head_norms, _asked_window),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "deepseek": (_EXPERT, _leading, _biases),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": (_EXPERT, _deepseek_v4),
    "kimi_k2": _LATENT,
    "kimi_linear": _KIMI_LINEAR,
    "kimi_k3": _KIMI_LINEAR,
    "glm_moe_dsa": _LATENT,
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
    "mimo_v2": _MIMO,
    "mimo_v2_flash": _MIMO,
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "nemotron_h": (_nemotron_h, _groups, _routed),
    "step3_text": _STEP3,
    "step3_vl": _STEP3,
    "step3p5": _STEP3,
    "step3p7": _STEP3,
    "glm4_moe": (
        _EXPERT,
        _leading,
        partial(_biases, output=False),
        partial(_head_norms, asked="use_qk_norm"),
    ),
    "dots1": (_EXPERT, _leading, _biases, _head_norms, partial(_some_windows, default=62, is_asked=False)),
    "ernie4_5_moe": (_EXPERT, _routed, _ernie),
    "hunyuan": (_PLAIN, _biases, _routed, partial(_hunyuan, is_later=False)),
    "hunyuan_v1_moe": (_PLAIN, _biases, _routed, partial(_hunyuan, is_later=True)),
}
"""The parts that give a shape its fields, one after the other, by ``model_type``."""
