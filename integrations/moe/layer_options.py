"""The options of an MoE layer: what each may be, and which go together. What is refused is refused before the layer is made."""

from __future__ import annotations

from typing import Any

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.planning import slices_of
from commlayer.integrations.moe.routing_config import RouterConfig
from commlayer.profiles.errors import UsageError

__all__ = ["check_layer_options"]

_TYPES = {
    "router": (RouterConfig, "a RouterConfig, such as RouterConfig(num_experts=8, top_k=2)"),
    "mesh": (FoldedMesh, "a FoldedMesh, such as FoldedMesh({'ep': 2})"),
    "communicator": (Communicator, "a Communicator, such as Communicator(mesh.group('ep'), mesh.group('etp'))"),
    "sequence": (GroupCommunicator, "a GroupCommunicator, such as GroupCommunicator(mesh.group('tp_cp'), 'ep')"),
    "balance": (GroupCommunicator, "a GroupCommunicator, such as GroupCommunicator(mesh.group('stage'), 'dp')"),
}
_LEAST = {"hidden": 1, "width": 1, "shared_width": 0, "spare_slots": 0}
_OPTIONAL = ("mesh", "communicator", "sequence", "balance", "spare_slots")
_WORDS = {"weights_at": ("combine", "experts"), "tokens": ("sharded", "replicated")}
_OF_DISPATCHERS = {
    "dispatch": "auto",
    "chunks": "auto",
    "weights_at": "combine",
    "wire": None,
    "spare_slots": None,
    "spilling": None,
}
"""The options that a communicator's plans do not look at, and what each is where nobody gave it."""


def check_layer_options(**options: Any) -> None:
    """Check all options of a :class:`~commlayer.integrations.moe.layer.MoELayer`, by their names. Raises UsageError.

    What a dispatch over its groups cannot do, the dispatcher refuses.
    """
    for name, (kind, expected) in _TYPES.items():
        value = options[name]
        if not isinstance(value, kind) and not (value is None and name in _OPTIONAL):
            raise UsageError(f"{name} must be {expected}, got {value!r}")
    for name, least in _LEAST.items():
        value = options[name]
        if not (type(value) is int and value >= least) and not (value is None and name in _OPTIONAL):
            raise UsageError(f"{name} must be a whole number, {least} or more, got {value!r}")
    if type(options["seed"]) is not int:
        raise UsageError(f"seed must be a whole number, got {options['seed']!r}")
    for name, words in _WORDS.items():
        if options[name] not in words:
            raise UsageError(f"{name} must be {' or '.join(words)}, got {options[name]!r}")
    if options["communicator"] is not None:
        _check_with_communicator(options)
    if options["router"].pad_to_capacity:
        _check_padded(options)


def _check_padded(options: dict[str, Any]) -> None:
    if options["chunks"] != "auto" and len(slices_of(options["chunks"])) > 1:
        raise UsageError("rows padded to a capacity go in one chunk: leave chunks out")
    if options["spilling"] is not None:
        raise UsageError(
            "rows are padded to a capacity, so every rank has as many: there is nothing to spill; leave pad_to_capacity out, or "
            "spilling"
        )


def _check_with_communicator(options: dict[str, Any]) -> None:
    """Refuse what a communicator would not be used for, and what its plans would not look at."""
    if options["tokens"] != "replicated":
        raise UsageError(
            "a communicator moves tokens that the ranks of tp all hold: take tokens='replicated', or leave communicator out"
        )
    if not options["router"].pad_to_capacity:
        raise UsageError(
            "a communicator moves rows that are padded to a capacity: give the RouterConfig a capacity_factor and "
            "pad_to_capacity=True, or leave communicator out"
        )
    for name, default in _OF_DISPATCHERS.items():
        if options[name] != default:
            raise UsageError(
                f"a communicator's plans send rows to experts in order, as they are, and do not look at {name}: leave {name} "
                "out, or communicator"
            )
