"""Which compute efficiency a model gets: that of its family, of the same model under another name, or the median of all."""

from __future__ import annotations

from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping.compute import efficiency_of, typical_efficiency
from commlayer.scheduler.mapping.model import ModelShape

__all__ = ["efficiency_for"]


def _core(model: ModelShape) -> tuple[int, ...]:
    """What products and attention are large by; vocabularies are padded, and depth changes none of them."""
    sizes = (model.hidden, model.heads, model.kv_heads, model.head_dim)
    return (*sizes, model.experts, model.top_k, model.width, model.shared_width)


def efficiency_for(model: ModelShape) -> tuple[float, tuple[str, ...]]:
    """The factor on a GPU's declared rates, and what is to be said of it."""
    found = efficiency_of(model.family or model.name)
    if found is not None:
        return found, ()
    for name in catalog.names():  # the same model from a file has another name
        known = catalog.load(name)
        factor = efficiency_of(known.family or known.name)
        if factor is not None and _core(known) == _core(model):
            return factor, (f"compute runs at {factor:.2f} of the GPU's declared rates, as calibrated for {name}",)
    typical = typical_efficiency()
    note = (
        f"compute runs at {typical:.2f} of the GPU's declared rates, the median of the models that were calibrated: "
        f"{model.name} was not"
    )
    return typical, (note,)
