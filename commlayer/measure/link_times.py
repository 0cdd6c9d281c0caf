"""How long two nodes of a group take to send each other bytes, for all pairs of its nodes, between the group's calls."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch

from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.planned import PlannedGroup
from commlayer.measure.group_calls import largest, swap
from commlayer.profiles.pairs import Pair, pair_rounds
from commlayer.scheduler.experience.link_rates import LinkTimes

__all__ = ["MOST_ROUNDS", "REPEATS", "time_links"]

REPEATS = 3
"""How often each pair is timed; the shorter time counts, for others' work only adds to it."""
MOST_ROUNDS = 3
"""Rounds of pairs: in each of them every node meets one other, so this names a slow card among however many nodes."""
_WHAT = "the measurement of its links"
_TAG = (1 << 31) - 1 - (1 << 16)
"""A tag beyond those of programs, whose messages go over the same connections, and of their batches."""
_LEAST_PART = 0.01
"""The part of a pair's time that is certain at least, however long a thread of theirs waited for a processor."""


def time_links(planned: PlannedGroup | DevicePlans, num_bytes: int) -> LinkTimes:
    """Time, for pairs of the group's nodes, how long they take to send each other ``num_bytes`` at once, µs: equal on all ranks.

    As many members of each node as the emptiest one has send their part of it side by side. Collective over the group, between
    calls. Raises PeerError and CollectiveTimeoutError as a call does.
    """
    found = LinkTimes({}, {})
    with torch._C._InferenceMode(True):
        _on_host(planned).connect_own_calls()
        for pairs in pair_rounds(len(planned.nodes), MOST_ROUNDS):
            both = [_swapped(planned, pairs, num_bytes) for _ in range(REPEATS)]
            for index, pair in enumerate(pairs):
                found.taken_us[pair] = min(times[index] for times, _ in both)
                found.certain_us[pair] = min(
                    max(times[index] - waits[index], times[index] * _LEAST_PART) for times, waits in both
                )
    return found


def _on_host(planned: PlannedGroup | DevicePlans) -> PlannedGroup:
    """The group in which the ranks meet on the host."""
    return planned.group if isinstance(planned, DevicePlans) else planned


def _swapped(planned: PlannedGroup | DevicePlans, pairs: list[Pair], num_bytes: int) -> tuple[list[float], list[float]]:
    """Each pair's time in one round, µs, of its slowest member, and how long one of them waited for a processor at most."""
    places = min(map(len, planned.nodes))
    node, members = next((index, each) for index, each in enumerate(planned.nodes) if planned.rank in each)
    place = members.index(planned.rank)
    mine = next((index for index, pair in enumerate(pairs) if node in pair), None) if place < places else None
    times, waited, limit_s = [0.0] * len(pairs), [0.0] * len(pairs), planned.timeout_s
    host, part_bytes = _on_host(planned), max(1, num_bytes // places)
    largest(host, times, limit_s, _WHAT)  # all start together
    if mine is not None:
        peer = planned.nodes[sum(pairs[mine]) - node][place]
        waited_us = _waited_us()
        times[mine] = _swap_us(planned, peer, part_bytes)
        waited[mine] = max(0.0, _waited_us() - waited_us)
    found = largest(host, [*times, *waited], limit_s, _WHAT)
    return found[: len(pairs)], found[len(pairs) :]


def _swap_us(planned: PlannedGroup | DevicePlans, peer: int, num_bytes: int) -> float:
    begin = time.perf_counter()
    if isinstance(planned, DevicePlans):
        try:
            return planned.swap_us(peer, num_bytes)
        except RuntimeError as error:
            raise planned.explain(error, _WHAT, 0, time.perf_counter() - begin, planned.timeout_s) from error
    data, arrived = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    begin = time.perf_counter()
    swap(planned, peer, data, arrived, timeout_s=planned.timeout_s, what=_WHAT, tag=_TAG)
    return (time.perf_counter() - begin) * 1e6


def _waited_us() -> float:
    """How long threads of this process have been ready and waited for a processor, µs; 0.0 where the kernel does not tell."""
    waited_ns = 0
    with contextlib.suppress(OSError, IndexError, ValueError):  # also of a thread that has just ended
        for thread in Path("/proc/self/task").iterdir():
            waited_ns += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
    return waited_ns / 1e3
