"""Pipeline layouts: which layers each chunk of a pipeline has, and where the model's ends are.

A layout is described as Megatron-Core's ``--pipeline-model-parallel-layout`` describes it, chunk by chunk, with bars between
them: ``E`` the embedding, ``t`` a layer, ``m`` a module of multi-token prediction, ``L`` the head and the loss; ``x*n`` and
``(…)*n`` repeat, commas mean nothing. ``Et*3|(tt|)*29m|L`` has the embedding and three layers in the first of 32
chunks, of which the last but one has the module alone, and the last the head alone. Each chunk is on the rank where the schedule
has it (:func:`~commlayer.scheduler.mapping.pipeline_schedule.chunks_of`).

Two words stand for layouts: ``even``, layers as equally as they go, and ``auto``, the one that an estimator finds to be the
fastest that fits (:mod:`commlayer.scheduler.mapping.layout_balance`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.pipeline_schedule import PipelineSchedule, chunks_of, is_dual, num_chunks

__all__ = [
    "AUTO_LAYOUT",
    "EVEN_LAYOUT",
    "Pipeline",
    "PipelineChunk",
    "canonical_layout",
    "ended",
    "even_chunks",
    "laid_chunks",
    "parse_layout",
    "written",
]

EVEN_LAYOUT = "even"
AUTO_LAYOUT = "auto"
_CHUNK = re.compile(r"(E?)(t*)(m*)(L?)\Z")
_REPEATED = (re.compile(r"\(([^()]*)\)\*(\d+)"), re.compile(r"([EtmL|])\*(\d+)"))
"""A group that is repeated, then a single letter."""
_MOST = 4096
"""The most letters of a layout, and the most repetitions of a group."""


class Pipeline(NamedTuple):
    """How a model's layers are cut into chunks and laid on ``pp`` ranks, each of which has ``vpp``
    interleaved ones."""

    pp: int
    vpp: int = 1
    schedule: PipelineSchedule = "1f1b"
    layout: str = EVEN_LAYOUT

    @property
    def num_chunks(self) -> int:
        return num_chunks(self.schedule, self.pp, self.vpp)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """List the chunks of a rank."""
        return chunks_of(self.schedule, self.pp, rank, self.vpp)

    @property
    def is_mixed(self) -> bool:
        """Whether a rank's chunks may be of any size in any order."""
        return is_dual(self.schedule) or self.layout != EVEN_LAYOUT


class PipelineChunk(NamedTuple):
    """The content of a chunk: how many layers, how many modules of multi-token prediction, and which ends of the model."""

    layers: int
    modules: int = 0
    has_embedding: bool = False
    has_head: bool = False


@lru_cache(maxsize=1 << 14)
def parse_layout(layout: str) -> tuple[PipelineChunk, ...]:
    """The chunks of a layout that is spelt out, in the order of the model.

    Raises:
        UsageError: a letter that is none; a chunk with nothing in it, or in another order than E, t, m, L; an embedding that is
            not first, or a head that is not last; layers behind a module, or modules in several chunks.
    """
    letters = re.sub(r"[\s,]", "", layout)  # without blanks and commas, and then without repetitions
    for pattern in _REPEATED:
        for _, number in pattern.findall(letters):
            if len(number) > 4 or int(number) > _MOST:
                raise UsageError(f"pipeline layout {layout!r}: expected at most {_MOST} repetitions, got {number}")
        letters = pattern.sub(lambda repeated: repeated[1] * int(repeated[2]), letters)
        if len(letters) > 4 * _MOST:
            raise UsageError(f"pipeline layout {layout!r}: expected at most {4 * _MOST} letters, got {len(letters)}")
    if not letters:
        raise UsageError(
            f"pipeline layout {layout!r}: expected even, auto, or chunks with bars between them, such as 'Ett|(tt|)*6tL'"
        )
    chunks = tuple(_chunk(layout, place, text) for place, text in enumerate(letters.split("|")))
    if why := next(_faults(chunks), ""):
        raise UsageError(f"pipeline layout {layout!r}: {why}")
    return chunks


def canonical_layout(layout: str) -> str:
    """One way of writing each layout; ``even`` and ``auto`` stay. Raises as :func:`parse_layout`."""
    return layout if layout in (EVEN_LAYOUT, AUTO_LAYOUT) else written(parse_layout(layout))


def written(chunks: Sequence[PipelineChunk]) -> str:
    """Describe chunks in Megatron-Core's grammar, equal ones in a row together: ``Ettt|(tttt|)*14tmL``."""
    runs = [(chunk, len(list(same))) for chunk, same in groupby(chunks)]
    parts = []
    for place, (chunk, count) in enumerate(runs):
        layers = "t" * chunk.layers if chunk.layers < 5 else f"t*{chunk.layers}"
        text = "E" * chunk.has_embedding + layers + "m" * chunk.modules + "L" * chunk.has_head
        is_last = place == len(runs) - 1
        if count == 1:
            parts.append(text + "|" * (not is_last))
        else:
            parts.append(f"({text}|)*{count - is_last}{text if is_last else ''}")
    return "".join(parts)


def even_chunks(layers: int, modules: int, num: int, *, is_relieved: bool) -> tuple[PipelineChunk, ...]:
    """Cut ``layers`` into ``num`` chunks as equally as they go, the larger ones first.

    ``is_relieved``: all layers that are missing for equal chunks are missing in the last one, which has the modules too, but that
    it keeps one.
    """
    last = layers // num
    others = num
    if is_relieved and num > 1:
        most = -(-layers // num)
        last, others = most - min(most * num - layers, most - 1), num - 1
    each, larger = divmod(layers - (last if others < num else 0), others)
    counts = [each + (chunk < larger) for chunk in range(others)] + [last] * (num - others)
    return ended(counts, modules)


def ended(counts: Sequence[int], modules: int) -> tuple[PipelineChunk, ...]:
    """Chunks of so many layers, the first with the embedding, the last with head and modules."""
    end = len(counts) - 1
    return tuple(
        PipelineChunk(count, modules * (place == end), place == 0, place == end) for place, count in enumerate(counts)
    )


def laid_chunks(layout: str, num: int, layers: int, modules: int, *, is_relieved: bool) -> tuple[PipelineChunk, ...]:
    """The ``num`` chunks of a model's layers by a layout, ``even`` or spelt out.

    Raises:
        UsageError: a layout of another number of chunks, layers or modules; or ``auto``, which only an estimator can resolve.
    """
    if layout == EVEN_LAYOUT:
        return even_chunks(layers, modules, num, is_relieved=is_relieved)
    if layout == AUTO_LAYOUT:
        raise UsageError("pipeline layout auto: expected one that is resolved: take Estimator.laid_out(setup)")
    chunks = parse_layout(layout)
    found = {
        "chunks (the ranks of the pipeline, times their chunks)": (len(chunks), num),
        "layers (t)": (sum(chunk.layers for chunk in chunks), layers),
        "modules of multi-token prediction (m)": (sum(chunk.modules for chunk in chunks), modules),
    }
    wrong = [f"it has {has} {what}, the mapping {wanted}" for what, (has, wanted) in found.items() if has != wanted]
    if wrong:
        instead = written(even_chunks(layers, modules, num, is_relieved=is_relieved)) if layers >= num else ""
        raise UsageError(
            f"pipeline layout {layout!r}: {'; '.join(wrong)}{f': the even one is {instead!r}' if instead else ''}"
        )
    return chunks


def _chunk(layout: str, place: int, text: str) -> PipelineChunk:
    if unknown := next((letter for letter in text if letter not in "EtmL"), ""):
        raise UsageError(
            f"pipeline layout {layout!r}: expected E (embedding), t (a layer), m (a module of multi-token prediction), L (head "
            f"and loss), | between chunks, and x*n or (…)*n, got {unknown!r} in chunk {place}"
        )
    if not text:
        raise UsageError(f"pipeline layout {layout!r}: chunk {place} has nothing in it: leave out a bar")
    order = _CHUNK.match(text)
    if order is None:
        raise UsageError(
            f"pipeline layout {layout!r}: expected E, t, m and L in this order in chunk {place}, got {text!r}"
        )
    return PipelineChunk(len(order[2]), len(order[3]), bool(order[1]), bool(order[4]))


def _faults(chunks: Sequence[PipelineChunk]) -> Iterator[str]:
    if [chunk.has_embedding for chunk in chunks] != [place == 0 for place in range(len(chunks))]:
        yield "expected the embedding E at the front of the first chunk, and nowhere else"
    if [chunk.has_head for chunk in chunks] != [place == len(chunks) - 1 for place in range(len(chunks))]:
        yield "expected the head L at the end of the last chunk, and nowhere else"
    places = [place for place, chunk in enumerate(chunks) if chunk.modules]
    if len(places) > 1:
        yield f"expected all modules m in one chunk, got them in {', '.join(map(str, places))}"
    if places and any(chunk.layers for chunk in chunks[places[0] + 1 :]):
        yield f"expected no layer t behind the modules m, which read what the last layer gives, got m in chunk {places[0]}"
