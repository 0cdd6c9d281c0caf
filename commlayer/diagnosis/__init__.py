"""Who waits for whom: what every rank called, kept in a ring, merged into one graph over all
groups, said in words.

    from commlayer.diagnosis import explain, in_words

    print(in_words(explain(["/shared/dumps"])))

The names are loaded when first used, and need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.diagnosis.diagnosis_words import in_words
    from commlayer.diagnosis.explaining import explain

__all__ = ["explain", "in_words"]

__getattr__, __dir__ = lazy_names(__name__)
