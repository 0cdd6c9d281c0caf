"""Stacks of programs, as ``py-spy dump`` and Python's ``faulthandler`` write them: where the
program of a rank is.

The rank is in the file's name (``stack_rank_3.txt``), or in a line such as ``rank 3`` or
``[rank3]`` just above its stacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from commlayer.diagnosis.call_logs import Site
from commlayer.diagnosis.diagnosis_words import ranks_words
from commlayer.diagnosis.findings import Diagnosis, Missing
from commlayer.diagnosis.recorder_dumps import rank_in_name
from commlayer.profiles.printable import printable, shortened

__all__ = ["ProgramPlace", "has_stacks", "read_stacks", "with_places"]

_MARKS = (b"(most recent call first):", b"\nThread ")
_MOST_PLACES = 8
_MOST_FRAMES = 1000
_THREAD = re.compile(r"(?:^|\s)(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]{1,20}(?P<rest> .{0,200})?$")
_PY_SPY_REST = re.compile(r" \((?:active|idle)[\w+]{0,20}\)(?:: \"(?P<name>.{0,100})\")?$")
_FAULT_REST = re.compile(r"(?: \[(?P<name>.{0,100})\])? \(most recent call first\):$")
_MOST_IN_LINE = 2000
_MOST_BETWEEN = 3
"""Lines between one that names a rank and the rank's stacks."""
_IN_FILE = re.compile(r"\", line (\d{1,9}) in (.{1,200})$")
_RANK = re.compile(r"\brank[ =:_-]{0,2}(\d{1,7})\b|\[rank(\d{1,7})\]", re.IGNORECASE)
_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python3\.|^(?:<|torch/|multiprocessing/|threading\.py|queue\.py|selectors\.py)"
)
_IN_CALL = re.compile(r"torch/distributed/|commlayer/backend/")


@dataclass(frozen=True)
class ProgramPlace:
    """The place of a rank's program. ``site``: the innermost place that is the program's own;
    ``inside``: the innermost of all; ``is_in_call``: it is within a call of torch's distributed
    package."""

    rank: int
    site: Site
    inside: Site
    is_in_call: bool

    def __str__(self) -> str:
        return str(self.site) if self.site == self.inside else f"{self.site}, in {self.inside}"


def has_stacks(data: bytes) -> bool:
    """Tell whether a text looks as if it had stacks."""
    return any(mark in b"\n" + data for mark in _MARKS)


def read_stacks(name: str, data: bytes) -> list[ProgramPlace]:
    """Read where the programs of ranks are, from a text of the file ``name``; those whose rank is
    not told are left out."""
    rank_of_file = rank_in_name(name)
    places: dict[int, ProgramPlace] = {}
    best: dict[int, int] = {}
    for above, thread, frames in _threads(data.decode("utf-8", "replace").splitlines()):
        rank = above if rank_of_file is None else rank_of_file
        if rank is None or not frames:
            continue
        score = 2 if thread == "MainThread" else int(frames[-1].function == "<module>")
        if score >= best.get(rank, 0):  # faulthandler writes the main thread last
            best[rank], places[rank] = score, _place(rank, frames)
    return list(places.values())


def _threads(lines: Sequence[str]) -> Iterator[tuple[int | None, str, list[Site]]]:
    """The threads in a text: the rank that is named just above the stacks, the thread's name and
    its frames, innermost first."""
    above: int | None = None
    name, frames, is_inside, lines_since = "", list[Site](), False, 0
    for line in map(str.rstrip, lines):
        head = _THREAD.search(line[-400:])
        rest = head and (_PY_SPY_REST.match(head["rest"] or "") or _FAULT_REST.match(head["rest"] or ""))
        site = _site(line[:_MOST_IN_LINE]) if is_inside else None
        if rest or not line.strip():
            if frames:
                yield above, name, frames
            name, frames, is_inside = (rest["name"] or "" if rest else ""), [], bool(rest)
        elif site is not None and len(frames) < _MOST_FRAMES:
            frames.append(site)
        if not is_inside and line.strip():
            named, lines_since = _RANK.search(line[:400]), lines_since + 1
            if named:
                above, lines_since = int(named[1] or named[2]), 0
            elif lines_since > _MOST_BETWEEN:
                above = None  # a line of a job's log, which may be any rank's
    if frames:
        yield above, name, frames


def _site(line: str) -> Site | None:
    """The place in a line of a stack: ``File "train.py", line 41 in step``, or ``step
    (train.py:41)``."""
    before, _, rest = line.partition('File "')
    match = _IN_FILE.search(rest)
    if match:
        return _shown(rest[: match.start()], match[1], match[2])
    name, _, place = line.removesuffix(")").rpartition(" (")
    file, _, number = place.rpartition(":")
    if line.endswith(")") and before[:1] == " " and name.strip() and file and re.fullmatch(r"[0-9]{1,9}", number):
        return _shown(file, number, name.strip())
    return None


def _shown(file: str, line: str, function: str) -> Site:
    """The place, its texts fit to be shown."""
    return Site(printable(file, keep=""), int(line), printable(function, keep=""))


def _place(rank: int, frames: Sequence[Site]) -> ProgramPlace:
    own = next((site for site in frames if not _LIBRARY.search(site.file)), frames[0])
    before = frames[: frames.index(own)]
    return ProgramPlace(rank, own, frames[0], any(_IN_CALL.search(site.file) for site in before))


def with_places(diagnosis: Diagnosis, places: Iterable[ProgramPlace]) -> Diagnosis:
    """Return the diagnosis with where programs are: of the ranks that others wait for, and as a
    remark of all."""
    of_rank = {place.rank: place for place in places}

    def placed(missing: Missing) -> Missing:
        place = of_rank.get(missing.call.rank)
        if missing.at is not None or place is None or missing.why not in ("late", "silent"):
            return missing
        if place.is_in_call:
            doubt = "its program is in a call that was not recorded"
            return msgspec.structs.replace(missing, doubt=doubt, certainty="unknown")
        return msgspec.structs.replace(missing, at=place.site)

    return msgspec.structs.replace(
        diagnosis,
        findings=tuple(placed(each) if isinstance(each, Missing) else each for each in diagnosis.findings),
        waits=tuple(map(placed, diagnosis.waits)),
        remarks=(*diagnosis.remarks, *_remarks(of_rank)),
    )


def _remarks(of_rank: dict[int, ProgramPlace]) -> list[str]:
    """Say where the programs are, the places of few ranks first: they differ from the others."""
    alike: dict[str, list[int]] = {}
    for rank, place in sorted(of_rank.items()):
        alike.setdefault(str(place), []).append(rank)
    by_size = sorted(alike.items(), key=lambda each: len(each[1]))
    return [
        f"{ranks_words(ranks)}: the program{'s are' if len(ranks) > 1 else ' is'} at {shortened(words, 400)}"
        for words, ranks in by_size[:_MOST_PLACES]
    ]
