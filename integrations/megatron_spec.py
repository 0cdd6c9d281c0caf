"""The spec for Megatron-LM's ``--spec``: its GPT layers as the configuration asks for them, with our dispatcher where they have
experts.

    COMMLAYER_AS=nccl torchrun … pretrain_gpt.py … --spec commlayer.integrations.megatron_spec planned_layer_spec

Megatron imports the name, and takes what it finds there for the spec of every layer; nothing is called with the configuration
before a layer is made. So the layer asks for its own parts then, of Megatron's own list of specs: dense or with experts, by its
number.

Without Megatron-Core this module has no spec, and imports.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from commlayer.integrations.megatron_moe import check_config, plan_megatron_moe
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import UsageError

__all__: list[str] = []

_GPT = "megatron.core.models.gpt.gpt_layer_specs"
_LAYER = "megatron.core.transformer.transformer_layer"
_IMPLEMENTATIONS = ("local", "transformer_engine")


def _check_layers(config: Any) -> None:
    """Raises UsageError for a model whose layers are not those of Megatron's list of GPT layers, or have no experts."""
    if config.num_moe_experts is None:
        raise UsageError(f"{who()}planned_layer_spec is for models with experts (--num-experts): leave --spec out")
    check_config(config)
    wanted = {
        "transformer_impl": _IMPLEMENTATIONS,
        "heterogeneous_block_specs": (False,),
        "experimental_attention_variant": (None,),
    }
    for name, values in wanted.items():
        got = getattr(config, name, values[0])
        if got not in values:
            raise UsageError(
                f"{who()}Megatron-Core's {name} is {got!r}: planned_layer_spec makes layers with "
                f"{' or '.join(map(repr, values))}; call plan_megatron_moe() in the model_provider instead"
            )


def _planned_layers() -> Any:
    """Make the spec of a layer that finds its parts by its configuration, with our dispatcher."""
    spec: Any = import_module("megatron.core.transformer.spec_utils").ModuleSpec
    stock: Any = import_module(_LAYER).TransformerLayer

    class ConfiguredLayer(stock):  # type: ignore[misc]  # Megatron's, of which nothing is known here
        """Megatron-Core's layer, made of what its configuration asks for."""

        def __init__(
            self,
            config: Any,
            submodules: Any = None,
            layer_number: int = 1,
            pg_collection: Any = None,
            vp_stage: int | None = None,
            **options: Any,
        ) -> None:
            if submodules is None:
                _check_layers(config)
                specs = import_module(_GPT).get_gpt_decoder_layer_specs(
                    config,
                    use_transformer_engine=config.transformer_impl == "transformer_engine",
                    normalization=config.normalization,
                    qk_l2_norm=config.qk_l2_norm,
                )
                stage = None
                if pg_collection is not None:
                    stage = import_module("megatron.core.utils").get_pg_rank(pg_collection.pp)
                offset = import_module(_LAYER).get_transformer_layer_offset(config, vp_stage, stage)
                submodules = specs[offset + layer_number - 1].submodules  # layers count from 1, in each stage
            super().__init__(
                config, submodules, layer_number, pg_collection=pg_collection, vp_stage=vp_stage, **options
            )

    return plan_megatron_moe(spec(module=ConfiguredLayer))


if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
    planned_layer_spec = _planned_layers()
    """The spec of every layer."""
