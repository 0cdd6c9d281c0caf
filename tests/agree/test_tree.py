"""The gather by a tree: what every rank hears, how many messages it takes, and what becomes of words that cannot be read."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from counting_store import most_messages
from hypothesis import given
from hypothesis import strategies as st

from commlayer.agree.messages import encode
from commlayer.agree.tree import FAN_OUT, Outgoing, _Bundle, branch_of, tree_exchange
from commlayer.profiles.errors import DisagreementError

Told = list[tuple[bytes, list[int]]]


class Fakes:
    """Ranks in this process: each runs its side of the exchange as far as the messages that have come allow."""

    def __init__(
        self, words: Sequence[bytes], spoil: Callable[[int, Outgoing], bytes | None] = lambda _, step: step.data
    ) -> None:
        self.size, self.spoil = len(words), spoil
        self.lines: dict[tuple[int, int], deque[bytes]] = {}
        self.sent, self.received, self.bytes_sent = Counter[int](), Counter[int](), Counter[int]()
        self.ends: list[Any] = [None] * self.size
        ranks = [10 * place for place in range(self.size)]
        steps = [tree_exchange(place, ranks, word) for place, word in enumerate(words)]
        waiting: dict[tuple[int, int], int] = {}
        ready: deque[tuple[int, bytes | None]] = deque((place, None) for place in range(self.size))
        while ready:
            place, answer = ready.popleft()
            while True:
                try:
                    step = steps[place].send(answer)
                except StopIteration as end:
                    self.ends[place] = end.value
                    break
                except DisagreementError as error:
                    self.ends[place] = error
                    break
                answer = None
                if isinstance(step, Outgoing):
                    self._send(place, step)
                    if (place, step.place) in waiting and self.lines.get((place, step.place)):
                        ready.append((waiting.pop((place, step.place)), self._take(place, step.place)))
                elif self.lines.get((step.place, place)):
                    answer = self._take(step.place, place)
                else:
                    waiting[step.place, place] = place
                    break
        self.stuck = sorted(waiting.values())

    def _send(self, place: int, step: Outgoing) -> None:
        self.sent[place] += 1
        self.bytes_sent[place] += len(step.data)
        message = self.spoil(place, step)
        if message is not None:
            self.lines.setdefault((place, step.place), deque()).append(message)

    def _take(self, source: int, place: int) -> bytes:
        self.received[place] += 1
        return self.lines[source, place].popleft()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64, 511, 512, 4096])
def test_every_rank_hears_all_and_exchanges_few_messages(size: int) -> None:
    words = [b"node %d" % (place // 8) for place in range(size)]
    fakes = Fakes(words)
    expected = [(b"node %d" % node, list(range(8 * node, min(8 * node + 8, size)))) for node in range(-(-size // 8))]
    assert all(end == expected for end in fakes.ends)
    assert not fakes.stuck
    for place in range(size):
        messages = fakes.sent[place] + fakes.received[place]
        assert messages <= most_messages(size)
        assert messages <= 2 * math.ceil(math.log2(max(size, 2))) + 2
    assert most_messages(1 << 20) == 2 * (FAN_OUT + 1)  # a constant in the end
    assert fakes.received.total() == fakes.sent.total() == 2 * (size - 1)


@pytest.mark.parametrize("size", [64, 4096])
def test_what_all_say_alike_is_as_short_for_many_ranks_as_for_few(size: int) -> None:
    fakes = Fakes([b"x" * 1000] * size)
    assert max(fakes.bytes_sent.values()) < (FAN_OUT + 1) * 1100
    assert fakes.ends[-1] == [(b"x" * 1000, list(range(size)))]


@given(st.lists(st.sampled_from([b"a", b"b", b"c", b""]), min_size=1, max_size=90))
def test_words_in_any_order_come_back_with_those_who_say_them(words: list[bytes]) -> None:
    fakes = Fakes(words)
    for end in fakes.ends:
        assert {place: word for word, places in end for place in places} == dict(enumerate(words))
        assert [places[0] for _, places in end] == sorted(words.index(word) for word in set(words))


@pytest.mark.parametrize("size", [1, 2, 7, 8, 100, 4096])
def test_children_share_out_the_ranks_below_their_parent(size: int) -> None:
    depth = dict[int, int]()
    for place in range(size):
        mine = branch_of(place, size)
        assert mine.span.start == place
        assert [below for child in mine.children for below in child] == list(mine.span)[1:]
        assert all(branch_of(child.start, size).parent == place for child in mine.children)
        depth[place] = depth[mine.parent] + 1 if place else 0
    assert max(depth.values()) <= math.log(max(size, 2), FAN_OUT) + 1


BROKEN: dict[str, bytes] = {
    "no message of ours": b"junk",
    "another message": encode(_Bundle((b"a",), ((1, 1, 0),)))[:-1],
    "words of nobody": encode(_Bundle((b"a",), ())),
    "an index beyond the words": encode(_Bundle((b"a",), ((21, 1, 1),))),
    "too many ranks": encode(_Bundle((b"a",), ((21, 10**9, 0),))),
    "no ranks": encode(_Bundle((b"a",), ((21, 0, 0),))),
    "ranks below": encode(_Bundle((b"a",), ((21, -1, 0),))),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_words_that_cannot_be_read_are_told_to_all_ranks_by_name(broken: str) -> None:
    """Place 21 (rank 210) speaks to its parent, which is not the root."""
    culprit = 21
    parent = branch_of(culprit, 64).parent
    assert parent > 0

    def spoil(place: int, step: Outgoing) -> bytes:
        return BROKEN[broken] if (place, step.place) == (culprit, parent) else step.data

    fakes = Fakes([b"a"] * 64, spoil)
    assert not fakes.stuck
    for end in fakes.ends:
        assert isinstance(end, DisagreementError)
        assert "what rank 210 says cannot be read" in str(end)


def test_a_parent_that_cannot_be_read_is_named_by_all_below_it() -> None:
    culprit = 1

    def spoil(place: int, step: Outgoing) -> bytes:
        return b"junk" if place == culprit and step.place > culprit else step.data

    fakes = Fakes([b"a"] * 64, spoil)
    below = branch_of(culprit, 64).span
    for place in range(64):
        if place in below and place != culprit:
            assert "what rank 10 says cannot be read" in str(fakes.ends[place])
        else:
            assert fakes.ends[place] == [(b"a", list(range(64)))]


def test_no_rank_ends_without_one_that_never_speaks() -> None:
    """Each then waits until its timeout, or until the failure detector knows of a death."""
    fakes = Fakes([b"a"] * 64, lambda place, step: None if place == 21 else step.data)
    assert fakes.stuck == list(range(64))
    assert fakes.ends == [None] * 64
