"""The models of the papers that commlayer follows, and those that came after them (models.json): :class:`ModelShape` by name."""

from __future__ import annotations

from functools import cache

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.known_names import closest_or_all
from commlayer.profiles.shipped import shipped_data
from commlayer.scheduler.mapping.model import ModelShape

__all__ = ["load", "names"]


class _Models(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[ModelShape, ...]


@cache
def _models() -> dict[str, ModelShape]:
    """The models by name: read once."""
    shipped = shipped_data("commlayer.scheduler.mapping", "models.json", _Models, "list of models")
    return {model.name: model for model in shipped.models}


def names() -> list[str]:
    """Every model of the catalog."""
    return list(_models())


def load(name: str) -> ModelShape:
    """Look a model up by its name. Raises UsageError for one that the catalog lacks, with those that it has."""
    models = _models()
    if name not in models:
        raise UsageError(f"model: expected the name of a known model, got {name!r}{closest_or_all(name, models)}")
    return models[name]
