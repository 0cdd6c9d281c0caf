"""A gather by a tree: every rank learns what all ranks say, and none exchanges more than O(log n)
messages.

Ranks pass what they hear up to their parent, each different word once with the ranks that say it,
and the root's bundle comes down the same way. A job's ranks mostly say the same, so that a bundle
is short however many they are. A subtree is a run of neighbouring ranks: most of its messages stay
on a node, and who says what is a few runs of ranks.

A Gloo group finds its members through a store, in which each rank sets its address and asks for
those of all others: n waits and n gets a rank. Where the same ranks have one group already, the
addresses of the next one go round in it by the tree (:class:`GatheredStore`), and the job's store,
which one process serves to all ranks, is not asked at all.

Rejected: an all_gather, in which every rank receives n messages one after the other (Gloo's is a
ring); and keys in the job's store, which one process serves to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

from commlayer.agree.messages import (
    ControlMessage,
    Peers,
    blaming,
    check_alike,
    decode,
    encode,
    until_after,
    wait_for,
)
from commlayer.failures.waits import Watched
from commlayer.peer_words import LIMIT_BYTES, refusal
from commlayer.profiles.errors import DisagreementError

__all__ = ["FAN_OUT", "Awaited", "Branch", "GatheredStore", "Outgoing", "branch_of", "gather_by_tree", "tree_exchange"]

FAN_OUT = 2
"""Children of a rank. More would save levels, of which 4,096 ranks have twelve, and cost bytes: a
rank hands down all that is said once for each child."""
_TAG = 0
_PARTING_S = 5.0
"""How long a rank that has heard of trouble waits for those to whom it passes that on."""

M = TypeVar("M", bound=ControlMessage)


class Branch(NamedTuple):
    """A rank's place in the tree: its parent (-1: it is the root), and the run of places below each
    of its children, of which the first is the child."""

    parent: int
    span: range
    children: tuple[range, ...]


class Outgoing(NamedTuple):
    """A message that goes to the rank at ``place``."""

    place: int
    data: bytes


class Awaited(NamedTuple):
    """A message that is awaited from the rank at ``place``, which speaks for ``num_ranks``."""

    place: int
    num_ranks: int


class _Bundle(ControlMessage, frozen=True):
    """The words of a run of ranks: each different one once, and runs (first place, how many, which
    word) in their order.

    ``trouble``: why a rank's words could not be read; then there is nothing else.
    """

    words: tuple[bytes, ...] = ()
    runs: tuple[tuple[int, int, int], ...] = ()
    trouble: str | None = None


def branch_of(place: int, size: int) -> Branch:
    """Find the parent and the children of ``place`` among ``size`` ranks."""
    parent, span = -1, range(size)
    while True:
        children = _parts(range(span.start + 1, span.stop))
        if place == span.start:
            return Branch(parent, span, children)
        parent, span = span.start, next(part for part in children if place in part)


def _parts(span: range) -> tuple[range, ...]:
    num = min(FAN_OUT, len(span))
    cuts = [span.start + len(span) * part // num for part in range(num + 1)] if num else []
    return tuple(range(start, stop) for start, stop in zip(cuts, cuts[1:]))  # noqa: B905, RUF007  one shorter by design


_RanksOfWords = list[tuple[bytes, list[int]]]
_Steps = Generator[Outgoing | Awaited, bytes | None, _RanksOfWords]


def tree_exchange(place: int, ranks: Sequence[int], words: bytes) -> _Steps:
    """Gather the words of all ``ranks``, as the messages that the rank at ``place`` sends and
    awaits.

    Yields :class:`Outgoing` and :class:`Awaited`; to the latter the message is sent back in.
    Returns each different word with the places that say it, the first of them ascending. Raises
    DisagreementError, on all ranks alike, naming the rank whose message cannot be read.
    """
    branch = branch_of(place, len(ranks))
    bundles = [_Bundle((words,), ((place, 1, 0),))]
    for child in branch.children:
        message = yield Awaited(child.start, len(child))
        bundles.append(_opened(message, child, ranks))
    bundle = _merged(bundles)
    if branch.parent >= 0:
        yield Outgoing(branch.parent, encode(bundle))
        message = yield Awaited(branch.parent, len(ranks))
        bundle = _opened(message, range(len(ranks)), ranks, branch.parent)
    answer = encode(bundle)
    for child in branch.children:
        yield Outgoing(child.start, answer)
    if bundle.trouble is not None:
        raise DisagreementError(bundle.trouble)
    values: _RanksOfWords = [(each, []) for each in bundle.words]
    for first, count, index in bundle.runs:
        values[index][1].extend(range(first, first + count))
    return values


def _opened(message: bytes | None, span: range, ranks: Sequence[int], teller: int | None = None) -> _Bundle:
    """The bundle of the ranks at ``span`` that ``teller`` (its first, if not given) has sent; in
    its place, what is wrong."""
    who = f"rank {ranks[span.start if teller is None else teller]}"
    try:
        bundle = decode(message or b"", _Bundle, who)
        if bundle.trouble is None and not _is_sound(bundle, span):
            raise refusal(
                who, f"expected the words of {len(span)} ranks, each once, got {len(bundle.runs)} runs of them"
            )
    except DisagreementError as error:
        return _Bundle(trouble=str(error))
    return bundle


def _is_sound(bundle: _Bundle, span: range) -> bool:
    at = span.start
    for first, count, index in bundle.runs:
        if first != at or not 0 < count <= span.stop - at or not 0 <= index < len(bundle.words):
            return False
        at += count
    return at == span.stop


def _merged(bundles: Sequence[_Bundle]) -> _Bundle:
    """One bundle of several, whose places follow each other."""
    for bundle in bundles:
        if bundle.trouble is not None:
            return _Bundle(trouble=bundle.trouble)
    index_of: dict[bytes, int] = {}
    runs: list[tuple[int, int, int]] = []
    for bundle in bundles:
        for first, count, which in bundle.runs:
            index = index_of.setdefault(bundle.words[which], len(index_of))
            if runs and runs[-1][2] == index:
                first, count = runs[-1][0], runs.pop()[1] + count
            runs.append((first, count, index))
    return _Bundle(tuple(index_of), tuple(runs))


def gather_by_tree(value: M, type_: type[M], peers: Peers, timeout_s: float | None, purpose: str) -> list[M]:
    """``value`` of every one of ``peers``, in their order; what several say alike is one object.
    Collective over them.

    ``peers.group`` has the messages of Gloo (``send``, ``recv``). ``timeout_s``, ``purpose`` and
    what is raised are as of :func:`commlayer.agree.messages.gather_messages`; but where the group
    is :class:`commlayer.failures.waits.Watched`, a wait that breaks raises RuntimeError, for the
    board's :meth:`~commlayer.failures.board.FailureBoard.connecting` to explain.
    """
    wait = partial(wait_for, until=until_after(timeout_s), board=peers.board)
    # Whoever watches has a board, which knows better which rank it was.
    is_watched = isinstance(peers.group, Watched)
    with contextlib.nullcontext() if is_watched else blaming(peers, timeout_s, purpose):
        runs = _run(tree_exchange(peers.place, peers.ranks, encode(value)), peers, wait)
    values: dict[int, M] = {}
    for word, places in runs:
        values |= dict.fromkeys(places, decode(word, type_, f"rank {peers.ranks[places[0]]}"))
    return [values[index] for index in range(len(peers.ranks))]


_Wait = Callable[[dist.Work], None]


def _run(steps: _Steps, peers: Peers, wait: _Wait) -> _RanksOfWords:
    sent: list[tuple[dist.Work, torch.Tensor]] = []  # Gloo reads the memory until the message has gone
    answer: bytes | None = None
    try:
        while True:
            step = steps.send(answer)
            answer = None
            if isinstance(step, Outgoing):
                sent += _send(peers, step)
            else:
                answer = _receive(peers, step, wait)
    except StopIteration as end:
        result: _RanksOfWords = end.value
        _settle(sent, wait)
        return result
    except DisagreementError:
        with contextlib.suppress(RuntimeError):  # whoever cannot speak perhaps does not listen either
            _settle(sent, partial(wait_for, until=until_after(_PARTING_S), board=peers.board))
        raise


def _settle(sent: Sequence[tuple[dist.Work, torch.Tensor]], wait: _Wait) -> None:
    for work, _ in sent:
        wait(work)


def _send(peers: Peers, step: Outgoing) -> list[tuple[dist.Work, torch.Tensor]]:
    content = torch.frombuffer(bytearray(step.data), dtype=torch.uint8)
    parts = torch.tensor([content.numel()], dtype=torch.int64), content
    return [(peers.group.send([part], step.place, _TAG), part) for part in parts]


def _receive(peers: Peers, step: Awaited, wait: _Wait) -> bytes:
    """The message; in the place of one whose length cannot be, a bundle that says so, which all
    ranks get to hear."""
    length = torch.zeros(1, dtype=torch.int64)
    wait(peers.group.recv([length], step.place, _TAG))
    size, limit = int(length), LIMIT_BYTES * step.num_ranks
    if not 0 < size <= limit:
        why = f"expected 1 to {limit} bytes for {step.num_ranks} ranks, it announces {size}"
        return encode(_Bundle(trouble=str(refusal(f"rank {peers.ranks[step.place]}", why))))
    content = torch.empty(size, dtype=torch.uint8)
    wait(peers.group.recv([content], step.place, _TAG))
    return content.numpy().tobytes()


class _Entry(ControlMessage, frozen=True):
    key: str
    value: bytes
    note: dict[str, str]


class GatheredStore(Store):
    """The store of ``peers``, which are connected already, and all of whom call :meth:`set` equally often; whatever they set is
    there when it returns.

    It is for making one group: whoever makes it keeps this object alive meanwhile, since C++ does
    not. ``note``: what this rank tells beside, by name: see :meth:`check_notes`.
    """

    def __init__(self, peers: Peers, timeout_s: float, purpose: str, note: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._peers, self._timeout_s, self._purpose = peers, timeout_s, purpose
        self._entries: dict[str, bytes] = {}
        self._note = dict(note or {})
        self._notes: list[dict[str, str]] = []

    def set(self, key: str, value: bytes | str) -> None:
        """Tell all ranks ``value``, and hear theirs. Collective; raises as
        :func:`commlayer.agree.tree.gather_by_tree`."""
        own_entry = _Entry(key, value.encode() if isinstance(value, str) else bytes(value), self._note)
        entries = gather_by_tree(own_entry, _Entry, self._peers, self._timeout_s, self._purpose)
        self._entries |= {entry.key: entry.value for entry in entries}
        self._notes = [entry.note for entry in entries]

    def check_notes(self) -> None:
        """Raise DisagreementError, on all ranks alike, where they told different notes; it names
        ranks and values."""
        if self._notes:
            check_alike(list(zip(self._peers.ranks, self._notes, strict=True)))

    def get(self, key: str) -> bytes:
        """The value of a key that some rank has set. Raises KeyError for another one."""
        return self._entries[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` have been set."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raise KeyError unless all of ``keys`` have been set: none of them would come by
        waiting."""
        for key in keys:
            self.get(key)
