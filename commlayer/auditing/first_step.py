"""The heaviest collective that stayed flat in a job's first step, and why: one line, when the first
optimizer has made its step.

Every trainer steps one of torch's optimizers, and torch tells whoever asks of all of them; a
trainer's own loop it tells nobody.

By broadcasts trainers give all ranks the same parameters before any step, with as many bytes as a
step has. No call says of itself whether it is of the start, so broadcasts are left out of the first
step, and looked at in the second, where none of the start are left: one that is the heaviest there
has a line of its own.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from commlayer.auditing.ledger import Ledger, StayedFlat, open_ledgers
from commlayer.profiles.counted import counted
from commlayer.profiles.printable import say
from commlayer.units import format_bytes

__all__ = ["tell_after_first_step"]

_HEAVY_BYTES = 1 << 20
"""The bytes of a collective in one step below which no plan of it would show in the step's time."""

_AT_START = "broadcast"
"""The collective that trainers call before any step too."""


class _FirstStep(NamedTuple):
    """The optimizer that stepped first, and what had stayed flat by then, by the ledger and the
    collective.

    A job may have several optimizers: its second step is over when the same one has stepped again.
    """

    optimizer: weakref.ref[Optimizer]
    moved: dict[tuple[Ledger, str], StayedFlat]


_hook: RemovableHandle | None = None
_first: _FirstStep | None = None
_is_over = False


def tell_after_first_step(*, is_new_job: bool = True) -> None:
    """Have the heaviest collective between nodes that stayed flat printed on stderr when an
    optimizer has made its first step.

    One more line comes after the second step, where the heaviest there is a broadcast. Both come
    once for each job of a process.

    ``is_new_job``: whether what has been told before was another job's.
    """
    global _hook, _first, _is_over
    if is_new_job:
        _first, _is_over = None, False
    if _hook is None:  # and never removed: torch goes through its hooks while it calls them
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    global _first, _is_over
    if _is_over:
        return
    if _first is None:
        _first = _FirstStep(weakref.ref(optimizer), _stayed_flat())
        _tell("first", {key: flat for key, flat in _first.moved.items() if flat.collective != _AT_START})
    elif _first.optimizer() in (optimizer, None):
        _is_over = True
        since = _stayed_flat()
        for key, before in _first.moved.items():
            if key in since:
                now = since[key]
                logical_bytes = now.logical_bytes - before.logical_bytes
                since[key] = now._replace(calls=now.calls - before.calls, logical_bytes=logical_bytes)
        _tell("second", since, only=_AT_START)


def _stayed_flat() -> dict[tuple[Ledger, str], StayedFlat]:
    """List what stayed flat between nodes by now, by its ledger and collective."""
    return {(ledger, flat.collective): flat for ledger in open_ledgers() for flat in ledger.stayed_flat()}


def _tell(step: str, moved: dict[tuple[Ledger, str], StayedFlat], only: str | None = None) -> None:
    """Print which collective moved the most bytes in a step, and why; nothing where none moved a
    mebibyte, or where it is not the ``only`` one that is left to tell."""
    (ledger, collective), flat = max(moved.items(), key=lambda each: each[1].logical_bytes, default=((None, ""), None))
    if flat is None or ledger is None or flat.logical_bytes < _HEAVY_BYTES or only not in (None, collective):
        return
    words = (
        f"in the {step} step {collective} {ledger.where} stayed flat ({counted(flat.calls, 'call')}, "
        f"{format_bytes(flat.logical_bytes)} in all): {flat.why}"
    )
    say(words)
