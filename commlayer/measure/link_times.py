"""How long two nodes of a group take to send each other bytes, for all pairs of its nodes, between the group's calls."""

from __future__ import annotations

import time

import torch

from commlayer.engine.planned import PlannedGroup
from commlayer.measure.group_calls import largest, swap
from commlayer.profiles.pairs import Pair, pair_rounds

__all__ = ["MOST_ROUNDS", "REPEATS", "time_links"]

REPEATS = 3
"""How often each pair is timed; the shorter time counts, for others' work only adds to it."""
MOST_ROUNDS = 3
"""Rounds of pairs: in each of them every node meets one other, so this names a slow card among however many nodes."""
_WHAT = "the measurement of its links"
_TAG = (1 << 31) - 1 - (1 << 16)
"""A tag beyond those of programs, whose messages go over the same connections, and of their batches."""


def time_links(planned: PlannedGroup, num_bytes: int) -> dict[Pair, float]:
    """Time, for pairs of the group's nodes, how long they take to send each other ``num_bytes`` at once, µs: equal on all ranks.

    As many members of each node as the emptiest one has send their part of it side by side. Collective over the group, between
    calls. Raises PeerError and CollectiveTimeoutError as a call does.
    """
    found: dict[Pair, float] = {}
    with torch._C._InferenceMode(True):
        planned.connect_own_calls()
        for pairs in pair_rounds(len(planned.nodes), MOST_ROUNDS):
            times_us = [_swapped(planned, pairs, num_bytes) for _ in range(REPEATS)]
            for index, pair in enumerate(pairs):
                found[pair] = min(times[index] for times in times_us)
    return found


def _swapped(planned: PlannedGroup, pairs: list[Pair], num_bytes: int) -> list[float]:
    """Each pair's time in one round, µs: of its slowest member."""
    places = min(map(len, planned.nodes))
    node, members = next((index, each) for index, each in enumerate(planned.nodes) if planned.rank in each)
    place = members.index(planned.rank)
    mine = next((index for index, pair in enumerate(pairs) if node in pair), None) if place < places else None
    times, limit_s = [0.0] * len(pairs), planned.timeout_s
    data, arrived = (torch.zeros(max(1, num_bytes // places), dtype=torch.uint8) for _ in range(2))
    largest(planned, times, limit_s, _WHAT)  # all start together
    if mine is not None:
        peer = planned.nodes[sum(pairs[mine]) - node][place]
        begin = time.perf_counter()
        swap(planned, peer, data, arrived, timeout_s=limit_s, what=_WHAT, tag=_TAG)
        times[mine] = (time.perf_counter() - begin) * 1e6
    return largest(planned, times, limit_s, _WHAT)
