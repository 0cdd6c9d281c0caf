"""Text to train on: sentences of a small grammar, or any file, as bytes. The same for one seed, everywhere."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from commlayer.profiles.errors import UsageError

__all__ = ["VOCABULARY", "Corpus", "grammar_text"]

VOCABULARY = 256
"""Tokens are bytes."""

_WORDS = {
    "noun": ("router", "expert", "token", "rank", "node", "link", "gradient", "tensor", "stage", "kernel"),
    "adjective": ("small", "slow", "idle", "even", "local", "sparse", "hidden", "busy"),
    "verb": ("sends", "gathers", "chooses", "scatters", "weighs", "follows", "reads"),
    "adverb": ("twice", "quickly", "again", "late", "in order"),
}


def grammar_text(num_bytes: int, seed: int = 0) -> str:
    """ASCII sentences of a small grammar with relative clauses and lists, at least ``num_bytes`` of them."""
    draw = random.Random(seed)
    pieces: list[str] = []
    size = 0
    while size < num_bytes:
        sentence = _sentence(draw)
        pieces.append(sentence[0].upper() + sentence[1:] + ".\n")
        size += len(pieces[-1])
    return "".join(pieces)


def _sentence(draw: random.Random) -> str:
    words = [_phrase(draw, depth=2), draw.choice(_WORDS["verb"]), _phrase(draw, depth=1)]
    if draw.random() < 0.3:
        words.append(draw.choice(_WORDS["adverb"]))
    sentence = " ".join(words)
    return f"{sentence}, and {_sentence(draw)}" if draw.random() < 0.15 else sentence


def _phrase(draw: random.Random, depth: int) -> str:
    noun = draw.choice(_WORDS["noun"])
    words = [draw.choice(("the", "the", "every"))]
    if draw.random() < 0.4:
        words.append(draw.choice(_WORDS["adjective"]))
    words.append(noun)
    if depth and draw.random() < 0.25:
        words += ["that", "the", draw.choice(_WORDS["noun"]), draw.choice(_WORDS["verb"])]
    return " ".join(words)


class Corpus:
    """A text, and batches of it.

    Args:
        text: of which windows are drawn.
        seed: of the windows.

    Raises:
        UsageError: no text.
    """

    def __init__(self, text: bytes, seed: int = 0) -> None:
        if len(text) < 2:
            raise UsageError(f"a text to train on needs 2 bytes or more, got {len(text)}")
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._seed = seed

    @classmethod
    def of(cls, path: Path | None, seed: int = 0) -> Corpus:
        """A file; None: 64 KiB of :func:`grammar_text`, the same for every ``seed``, which draws the windows."""
        return cls(grammar_text(1 << 16).encode() if path is None else path.read_bytes(), seed)

    def batch(self, step: int, sequence: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the ones that follow them, [sequence, batch] each: whole, the same on every rank."""
        if len(self.tokens) <= sequence:
            raise UsageError(
                f"a text of {len(self.tokens)} bytes has no windows of {sequence} + 1: shorten the sequence"
            )
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - sequence, (batch,), generator=generator)
        windows = self.tokens[starts + torch.arange(sequence + 1).unsqueeze(1)]
        return windows[:-1], windows[1:]
