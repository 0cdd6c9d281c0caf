"""The heaviest collective that stayed flat in a job's first step, and why: one line, when the first
optimizer has made its step.

Every trainer steps one of torch's optimizers, and torch tells whoever asks of all of them; a
trainer's own loop it tells nobody. By broadcasts trainers give all ranks the same parameters before
any step, and no call says of itself whether it is one of these, so broadcasts are left out.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from commlayer.auditing.ledger import open_ledgers
from commlayer.profiles.counted import counted
from commlayer.profiles.printable import say
from commlayer.units import format_bytes

__all__ = ["tell_after_first_step"]

_HEAVY_BYTES = 1 << 20
"""The bytes of a collective in one step below which no plan of it would show in the step's time."""
_AT_START = "broadcast"
"""The collective that trainers call before any step too."""

_hook: RemovableHandle | None = None
_is_over = False


def tell_after_first_step(*, is_new_job: bool = True) -> None:
    """Have the heaviest collective between nodes that stayed flat printed on stderr when an
    optimizer has made its first step, once for each job of a process.

    ``is_new_job``: whether what has been told before was another job's.
    """
    global _hook, _is_over
    if is_new_job:
        _is_over = False
    if _hook is None:  # and never removed: torch goes through its hooks while it calls them
        _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    """Print which collective moved the most bytes, and why; nothing where none moved a mebibyte."""
    global _is_over
    if _is_over:
        return
    _is_over = True
    stayed = [flat for ledger in open_ledgers() for flat in ledger.stayed_flat()]
    heavy = [each for each in stayed if each.collective != _AT_START and each.logical_bytes >= _HEAVY_BYTES]
    if heavy:
        flat = max(heavy, key=lambda each: each.logical_bytes)
        say(
            f"in the first step {flat.collective} {flat.where} stayed flat ({counted(flat.calls, 'call')}, "
            f"{format_bytes(flat.logical_bytes)} in all): {flat.why}"
        )
