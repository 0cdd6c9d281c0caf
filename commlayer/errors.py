"""The public name of the error tree; the tree itself is drawn and defined in :mod:`commlayer.profiles.errors`."""

from __future__ import annotations

from commlayer.profiles.errors import *  # noqa: F403
from commlayer.profiles.errors import __all__ as __all__
