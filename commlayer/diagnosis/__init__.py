"""Who waits for whom: what every rank called, kept in a ring, merged into one graph over all
groups, said in words.

    from commlayer.diagnosis import explain

    diagnosis = explain(["/shared/dumps"])
    print(diagnosis.cause.words if diagnosis.cause else "nothing is wrong")

The name is loaded when first used, and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.diagnosis.explaining import explain

__all__ = ["explain"]

__getattr__, __dir__ = lazy_names(__name__)
