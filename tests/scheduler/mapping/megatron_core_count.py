"""Counts the parameters that Megatron-Core's GPTModel has by its flags: a program, for it makes the only process group of its
process. Lists of flags come as JSON on stdin; a line PARAMETERS has, for each, the number or an error in words.

The model lies on the meta device, with the layers that need neither Transformer Engine nor apex, and unsharded.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention

_NAMES = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit", "norm_epsilon": "layernorm_epsilon"}
"""Flags whose field of the configuration has another name."""
_UNSHARDED = (
    "recompute",
    "offload",
    "cuda_graph",
    "sequence_parallel",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
)
"""How flags begin that change no parameter, and ask for what this machine may lack."""


class _Core(torch.nn.Module):
    """The core of attention, which has no parameters; latent attention's is one of Transformer Engine's."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def values_of(flags: list[str]) -> dict[str, Any]:
    """The values of flags, by the names of the configuration's fields."""
    words: dict[str, list[str]] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            words[_NAMES.get(name, name)] = []
        else:
            words[_NAMES.get(name, name)].append(word)
    return {name: _value(given) for name, given in words.items()}


def _value(words: list[str]) -> Any:
    if not words:
        return True
    if words[0].startswith("(["):  # of --moe-layer-freq, which Megatron-LM evaluates too
        return eval(words[0], {"__builtins__": {}})
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(words[0])
    return words[0]


def parameters(flags: list[str]) -> int:
    """Count the parameters of the model that the flags describe."""
    given = values_of(flags)
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    own = {name: value for name, value in given.items() if name in fields}
    own = {name: value for name, value in own.items() if not name.startswith(_UNSHARDED) and "parallel" not in name}
    if kind is MLATransformerConfig:
        own.setdefault("q_lora_rank", None)  # what Megatron-LM's arguments say without the flag; 512 is the class's own
    config = kind(
        **own,
        add_bias_linear=not given.get("disable_bias_linear", False),
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
    )
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in layers.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = _Core
    with torch.device("meta"):
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=given["vocab_size"],
            max_sequence_length=given["max_position_embeddings"],
            share_embeddings_and_output_weights=not given.get("untie_embeddings_and_output_weights", False),
            position_embedding_type=given["position_embedding_type"],
            rotary_base=given.get("rotary_base", 10000),
        )
    return sum(each.numel() for each in model.parameters())


def counted(flags: list[str]) -> int | str:
    """The same, or in words why Megatron-Core cannot make the model."""
    try:
        return parameters(flags)
    except Exception as error:  # noqa: BLE001  it is what the test looks at
        return f"{type(error).__name__}: {error}"


def main() -> None:
    with tempfile.NamedTemporaryFile() as store:
        multi_latent_attention.HAVE_TE = False  # it looks for the package, and not for what it takes from it
        # Latent attention asks by this where its angles are to be, and takes a device as well as a number.
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        counts = [counted(flags) for flags in json.load(sys.stdin)]
        sys.stdout.write(f"PARAMETERS {json.dumps(counts)}\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
