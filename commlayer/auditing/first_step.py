"""The heaviest collective that stayed flat in a job's first step, and why: one line, when the first optimizer has made its step.

Every trainer steps one of torch's optimizers, and torch tells whoever asks of all of them; a trainer's own loop it tells nobody.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from commlayer.auditing.ledger import Ledger, StayedFlat, open_ledgers
from commlayer.profiles.counted import counted
from commlayer.profiles.printable import printable
from commlayer.units import format_bytes

__all__ = ["heaviest_flat", "tell_after_first_step"]

_HEAVY_BYTES = 1 << 20
"""The bytes of a collective in one step below which no plan of it would show in the step's time."""

_AT_START = "broadcast"
"""The collective by which trainers give all ranks the same parameters, before any step: with as many bytes as a step has."""

_hook: RemovableHandle | None = None
_is_told = False


def tell_after_first_step(*, is_new_job: bool = True) -> None:
    """Have :func:`heaviest_flat` printed on stderr when an optimizer has made its first step; once for each job of a process.

    ``is_new_job``: whether what has been told before was another job's.
    """
    global _hook, _is_told
    _is_told = _is_told and not is_new_job
    if _hook is None:  # and never removed: torch goes through its hooks while it calls them
        _hook = register_optimizer_step_post_hook(_tell)


def _tell(*_: Any) -> None:
    global _is_told
    if _is_told:
        return
    _is_told = True
    words = heaviest_flat()
    if words:
        print(f"commlayer: {printable(words, keep='')}", file=sys.stderr, flush=True)


def heaviest_flat() -> str:
    """Say which collective between nodes moved the most bytes by now in the backend's own calls, and why; "" where none moved
    a mebibyte. Broadcasts are left out: they are of a job's start."""
    every = [(flat, ledger) for ledger in open_ledgers() for flat in ledger.stayed_flat()]
    found = [(flat, ledger) for flat, ledger in every if flat.collective != _AT_START]
    flat, ledger = max(found, key=lambda each: each[0].logical_bytes, default=(None, None))
    if flat is None or ledger is None or flat.logical_bytes < _HEAVY_BYTES:
        return ""
    return _words(flat, ledger)


def _words(flat: StayedFlat, ledger: Ledger) -> str:
    return (
        f"in the first step {flat.collective} {ledger.where} stayed flat ({counted(flat.calls, 'call')}, "
        f"{format_bytes(flat.logical_bytes)} in all): {flat.why}"
    )
