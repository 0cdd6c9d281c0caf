"""``commlayer models``: the models that are known by name, without one of them at hand."""

from __future__ import annotations

from typing import Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import json_option
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table
from commlayer.scheduler.mapping import catalog, parameters
from commlayer.scheduler.mapping.model import ModelShape, mechanisms

__all__ = ["models_command"]


@click.command("models", cls=Command)
@json_option
def models_command(as_json: bool) -> None:
    """List the models that --model takes by name.

    *active*: the parameters that one token passes through, the embedding among them, and without
    it, as some publishers count. Layers are those that mix tokens. Another model is read from its
    Hugging Face config.json.
    """
    models = [catalog.load(name) for name in catalog.names()]
    if as_json:
        print_json([_summary(model) for model in models])
        return
    rows = [
        [
            each["name"],
            f"{each['parameters'] / 1e9:,.4g}",
            f"{each['active_parameters'] / 1e9:.4g}",
            f"{each['active_without_embedding'] / 1e9:.4g}",
            str(each["layers"]),
            each["attention"],
            each["expert_words"],
            each["source"].split(";", 1)[0],
        ]
        for each in map(_summary, models)
    ]
    columns = ["name", ">total B", ">active B", ">no embedding", ">layers", "~attention", "experts", "~source"]
    print_table(columns, rows, spare=(7, 3))
    if without := [model for model in models if model.approximates]:
        echo()
        for model in without:
            echo_sentence(f"{model.name} is planned without {model.approximates}")


def _summary(model: ModelShape) -> dict[str, Any]:
    sizes = parameters.count(model)
    return {
        "name": model.name,
        "parameters": sizes.total,
        "active_parameters": sizes.active,
        "active_without_embedding": sizes.active - sizes.embedding,
        "published_parameters": model.published or None,
        "layers": model.layers,
        "attention": _attention(model),
        "expert_words": _experts(model),
        "experts": model.experts,
        "top_k": model.top_k,
        "mechanisms": mechanisms(model),
        "left_out": model.approximates or None,
        "source": model.source,
    }


def _attention(model: ModelShape) -> str:
    """Each kind of attention, with the layers that have it where these are not all."""
    softmax = model.softmax_layers
    name = "latent" if model.latent is not None else "grouped" if model.kv_heads < model.heads else "multi-head"
    if model.compressed is not None:
        name = f"compressed {model.compressed.sparse_layers} + {model.compressed.dense_layers}"
    elif model.indexer is not None:
        name += f", {model.indexer.layers} indexed"
    elif model.window is not None:
        name += f", {model.window.layers} in windows"
    states = [] if model.linear is None else [f"{model.linear.kind} {model.linear.layers}"]
    return " + ".join([f"{name} {softmax}" if states else name, *states])


def _experts(model: ModelShape) -> str:
    """The experts that a token takes, of how many."""
    if not model.moe_layers:
        return "none"
    shared = " + shared" if model.shared_width else ""
    return f"{model.top_k} of {model.experts}{shared}"
