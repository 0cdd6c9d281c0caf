"""The job of ``make bench-mappings``: one small MoE model, and the mappings that it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import common  # noqa: F401  finds examples/

from commlayer.integrations.moe.router import RouterConfig
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.software import COMMLAYER
from commlayer.scheduler.plan import Strategy
from examples.language_model import ModelConfig

__all__ = ["BATCH", "CASES", "GPUS", "MODEL", "NODES", "OVERLAPPED", "SEQUENCE", "SOFTWARE", "Case", "shapes_of"]

NODES, RANKS = 2, 4
GPUS = NODES * RANKS
SEQUENCE, BATCH = 256, 16
MODEL = ModelShape(
    name="small MoE model",
    layers=4,
    hidden=128,
    heads=8,
    kv_heads=4,
    head_dim=16,
    experts=8,
    top_k=2,
    width=256,
    vocabulary=256,
)
SOFTWARE = replace(
    COMMLAYER,
    name="commlayer, every call flat, nothing overlapped, FP32",
    strategies=(Strategy.FLAT,),
    overlaps_gradients=False,
    hides_dispatch=False,
    lanes=False,
    activation_bytes=4,
    parameter_bytes=4,
    bucket_bytes=1 << 40,  # one sum for each axis
)
"""The software as the steps below run (:func:`Case.config` and the settings of the ranks)."""
BUCKET_BYTES = 256 << 10
OVERLAPPED = replace(
    SOFTWARE,
    name="commlayer, every call flat, gradients beside the backward pass, FP32",
    overlaps_gradients=True,
    puts_off_weights=True,
    bucket_bytes=BUCKET_BYTES,
)
"""The same with what overlaps, on accelerators that compute beside the wires. Calls are on lanes in the steps; flat ones are not
cut for it, so a lane can hold them before they begin and nowhere else, and no curve says what a part of one takes: the model
has them share the link."""


@dataclass(frozen=True)
class Case:
    """A mapping, and how it is run. Rows are padded to a capacity of 1.0: what is sent does not depend on the router.
    ``overlaps``: gradients are summed beside the backward pass, and calls are on lanes."""

    degrees: dict[str, Any]  # whole numbers
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    overlaps: bool = False

    @property
    def job(self) -> Job:
        return Job(model=MODEL, gpus=GPUS, global_batch=BATCH, sequence=SEQUENCE, capacity_factor=1.0)

    @property
    def setup(self) -> Setup:
        plain = Setup(gpus=GPUS, zero=0, **self.degrees, **self.options)
        return replace(plain, micro_batch=BATCH // plain.dp // self.micro_batches)

    @property
    def name(self) -> str:
        """The case's name, such as ``TP2 EP4 ETP2, tensor``."""
        words = " ".join(f"{axis.upper()}{size}" for axis, size in self.degrees.items()) or f"DP{GPUS}"
        kind = f", {self.setup.attention}" if self.degrees.get("tp", 1) > 1 else ""
        return words + kind + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")

    @property
    def is_folded(self) -> bool:
        """Whether no mapping of before folding is the same: etp = tp, and ep a part of dp."""
        setup = self.setup
        return setup.etp != setup.tp or setup.dp % setup.ep != 0

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            router=RouterConfig(
                num_experts=MODEL.experts, top_k=MODEL.top_k, capacity_factor=1.0, pad_to_capacity=True
            ),
            vocabulary=MODEL.vocabulary,
            hidden=MODEL.hidden,
            num_layers=MODEL.layers,
            num_heads=MODEL.heads,
            num_kv_heads=MODEL.kv_heads,
            width=MODEL.width,
            attention=self.setup.attention,
            dispatch="all_to_all",
            schedule="1f1b",
            overlap_gradients=self.overlaps,
            bucket_bytes=BUCKET_BYTES,
        )


CASES = [
    Case({"pp": 2, "ep": 4}, micro_batches=4),
    Case({"pp": 2, "tp": 2, "ep": 4}, {"attention": "tensor"}, micro_batches=4),
    Case({"ep": 4}),
    Case({"tp": 4, "ep": 4}, {"attention": "tensor"}),
    Case({"ep": 8}),
    Case({"etp": 4}),
    Case({"ep": 2}),
    Case({}),
    Case({"tp": 4, "ep": 2, "etp": 4}, {"attention": "tensor"}),
    Case({"tp": 8, "ep": 8}, {"attention": "ulysses"}),
    Case({"cp": 8, "ep": 8}),
    Case({"tp": 8, "ep": 8}, {"attention": "tensor"}),
    Case({"tp": 2, "ep": 8}, {"attention": "tensor"}),
    Case({"tp": 2, "ep": 8}, {"attention": "ulysses"}),
    Case({"tp": 2, "ep": 4, "etp": 2}, {"attention": "tensor"}),
    Case({"cp": 4, "ep": 4}),
]
"""Folded and not; experts spread over both nodes, and inside each; tensor, context and pipeline parallelism; expert shards."""


def shapes_of(cases: Sequence[Case]) -> dict[str, list[tuple[int, ...]]]:
    """A partition of the ranks for each shape of group that the cases' axes have, by its shape's name."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for case in cases:
        mapping = FoldedMapping(GPUS, **case.degrees)
        for axis in ("tp", "cp", "pp", "ep", "etp", "edp", "dp_cp", "etp_ep", "stage", "world"):
            groups = mapping.groups(axis)
            nodes = {rank // RANKS for rank in groups[0]}
            if len(groups[0]) > 1:
                found.setdefault(f"{len(nodes)}x{len(groups[0]) // len(nodes)}", groups)
    return found
