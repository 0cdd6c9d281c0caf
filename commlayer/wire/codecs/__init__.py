"""Codecs, which turn rows into fewer bytes and back: the wire formats that :mod:`commlayer.scheduler.wire` describes.
See docs/codecs.md.
"""

from __future__ import annotations

from commlayer.wire.codecs.codec import Codec

__all__ = ["Codec"]
