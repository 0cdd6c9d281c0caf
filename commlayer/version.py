"""The version of commlayer: here and not in the package itself, whose names are imported from modules that need it."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
