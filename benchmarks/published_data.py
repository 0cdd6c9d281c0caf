"""Published training runs beyond the papers': what each row says, what it leaves open, and which rows are held back.

The rows lie in published_rows.json, as their sources print them; what we assume stands in each, with why. Of a
configuration that a source published again with every release, the latest without a regression that it names counts, and the
others stay beside it.

A row belongs to one of four groups, three of them by nothing but its key: ``named`` (its task named it, everybody saw it),
``open`` or ``held`` (SHA-256 of the key, modulo 3), or ``later`` (added after the held rows were predicted). Held rows are
predicted once, when the model is frozen.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["BLIND", "Published", "load"]

PATH = Path(__file__).parent / "published_rows.json"
BLIND = Path(__file__).parent / "published_blind.json"
"""Rows that nothing is made of: no interval and no constant, only a test of both."""

Unit = Literal["tokens/s/GPU", "TFLOP/s/GPU", "step s"]
Group = Literal["named", "open", "held", "later"]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One published measurement of a training step.

    ``overlap``: of the exchange with experts: none, 1f1b (another micro-batch's computation, as Megatron-Core), dualpipe,
    operators (chunks in and between operators). ``recompute``: Megatron's modules, or full, or megascale. ``offload``:
    Megatron's modules whose inputs are in the host's memory. ``balance``: forced (the router is made even) or natural.
    ``capacity``: where tokens are dropped, the factor. ``graph``: what CUDA graphs hold.
    ``layout``: of layers on the pipeline's chunks, where the source's configuration has another than the even one.
    ``gradients``: the format in which they are summed (grad_reduce_in_fp32). ``also``: the same configuration in other releases.
    ``fitted``: the constant that was set by it: no interval is made of such a row.
    ``assumed``: what the source leaves open, and what was taken why. ``cannot``: why the planner cannot express it. ``doubt``:
    what the source itself says against a comparison.
    """

    key: str
    source: str
    place: str
    model: str
    system: str
    gpus: int
    global_batch: int
    published: float
    unit: Unit = "tokens/s/GPU"
    sequence: int = 4096
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    layout: str = "even"
    ep: int = 1
    etp: int = 1
    precision: Literal["bf16", "fp8", "blockwise", "mxfp8", "nvfp4"] = "bf16"
    dispatcher: Literal["nccl", "deepep", "hybridep"] = "nccl"
    overlap: Literal["none", "1f1b", "dualpipe", "operators"] = "none"
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    zero: int = 1
    mtp: int = 0
    balance: Literal["forced", "natural"] = "forced"
    capacity: float | None = None
    graph: str = "none"
    gradients: Literal["fp32", "bf16"] = "fp32"
    software: Literal["megatron", "fsdp2", "megascale"] = "megatron"
    also: tuple[tuple[str, float], ...] = ()
    assumed: dict[str, str] = {}
    named: bool = False
    later: bool = False
    fitted: str = ""
    cannot: str = ""
    doubt: str = ""

    def __post_init__(self) -> None:
        if self.published <= 0 or min(self.gpus, self.global_batch, self.sequence, self.micro_batch) < 1:
            raise ValueError(f"{self.key}: expected positive numbers")
        if self.gpus % (self.tp * self.cp * self.pp) or self.gpus % (self.etp * self.ep * self.pp):
            raise ValueError(f"{self.key}: its degrees do not divide {self.gpus} GPUs")

    @property
    def project(self) -> str:
        """The project or paper of its source, without the table: what shares errors (validity.py)."""
        return self.source.partition(",")[0].partition(" (")[0]

    @property
    def release(self) -> tuple[str, str]:
        """Its table: the source, and the release of its software where the key names one."""
        return self.source, self.key.partition("/")[0]

    @property
    def group(self) -> Group:
        """Which part of the rows it belongs to."""
        if self.named:
            return "named"
        if self.later:
            return "later"
        number = int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16)
        return "held" if number % 3 == 2 else "open"


def load(path: Path = PATH) -> tuple[Published, ...]:
    """Read all rows of a file. Raises ValueError, msgspec.ValidationError: a row that cannot be, or a key that stands twice."""
    rows = msgspec.json.decode(path.read_bytes(), type=tuple[Published, ...])
    keys = [row.key for row in rows]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ValueError(f"keys stand twice: {', '.join(sorted(twice))}")
    return rows
