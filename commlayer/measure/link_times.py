"""How long two nodes of a group take to send each other bytes, for all pairs of its nodes, between
the group's calls."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch

from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import woken
from commlayer.measure.harness import HostGroup
from commlayer.profiles.links import Resource
from commlayer.profiles.pairs import Pair, pair_rounds
from commlayer.scheduler.experience.link_rates import LinkTimes

__all__ = ["MOST_ROUNDS", "REPEATS", "time_links"]

REPEATS = 3
"""How often each pair is timed; the shorter time counts, for others' work only adds to it."""
MOST_ROUNDS = 3
"""Rounds of pairs: in each of them every node meets one other, so this names a slow card among
however many nodes."""
_WHAT = "the measurement of its links"
_TAG = (1 << 31) - 1 - (1 << 16)
"""A tag beyond those of programs, whose messages go over the same connections, and of their
batches."""
_LEAST_PART = 0.01
"""The part of a pair's time that is certain at least, however long a thread of theirs waited for a
processor."""
_LOOK_S = 0.0002


def time_links(
    planned: PlannedGroup | DevicePlans,
    num_bytes: int,
    most_rounds: int = MOST_ROUNDS,
    repeats: int = REPEATS,
) -> LinkTimes:
    """Time how long pairs of the group's nodes take to send each other ``num_bytes`` at once, µs.

    As many members of each node as the emptiest one has send their part of it side by side. The
    result is equal on all ranks. Collective over the group, between calls. Raises PeerError and
    CollectiveTimeoutError as a call does.
    """
    links = LinkTimes({}, {})
    with torch._C._InferenceMode(True):
        host = HostGroup(planned.group if isinstance(planned, DevicePlans) else planned, planned.timeout_s)
        for pairs in pair_rounds(len(planned.nodes), most_rounds):
            both = [_swapped(planned, host, pairs, num_bytes) for _ in range(repeats)]
            for index, pair in enumerate(pairs):
                links.taken_us[pair] = min(times[index] for times, _ in both)
                links.certain_us[pair] = min(
                    max(times[index] - waits[index], times[index] * _LEAST_PART) for times, waits in both
                )
    return links


def _swapped(
    planned: PlannedGroup | DevicePlans, host: HostGroup, pairs: list[Pair], num_bytes: int
) -> tuple[list[float], list[float]]:
    """Have the pairs of one round swap bytes, and agree on times, µs, of each pair's slowest
    member.

    ``host``: the group in which the ranks meet on the host. Returns how long each pair took, and
    how long one of its members waited for a processor at most.
    """
    width = min(map(len, planned.nodes))
    node, members = next((index, each) for index, each in enumerate(planned.nodes) if planned.rank in each)
    local_rank = members.index(planned.rank)
    index = next((index for index, pair in enumerate(pairs) if node in pair), None) if local_rank < width else None
    times, waited = [0.0] * len(pairs), [0.0] * len(pairs)
    host.largest(times, _WHAT)  # all start together
    if index is not None:
        peer = planned.nodes[sum(pairs[index]) - node][local_rank]
        waited_us = _waited_us()
        sent_bytes, began = max(1, num_bytes // width), time.monotonic()
        if not isinstance(planned, DevicePlans):
            times[index] = host.swap_us(peer, sent_bytes, _TAG, _WHAT)
        else:
            try:
                times[index] = _swap_on_device_us(planned, peer, sent_bytes)
            except RuntimeError as error:
                raise planned.explain(error, _WHAT, 0, time.monotonic() - began, planned.timeout_s) from error
        waited[index] = max(0.0, _waited_us() - waited_us)
    largest = host.largest([*times, *waited], _WHAT)
    return largest[: len(pairs)], largest[len(pairs) :]


def _swap_on_device_us(planned: DevicePlans, peer: int, num_bytes: int) -> float:
    """Send ``peer``, on another node, so many bytes while as many come from it, and return how long
    that took, µs.

    The host waits. Raises RuntimeError where the group fails meanwhile, or the timeout passes.
    """
    connections, board = planned.connections, planned.board
    stream, device = connections.transport.streams[Resource.INTER], connections.device
    with device.on(stream):
        data, arrived = device.empty(num_bytes), device.empty(num_bytes)
        began = stream.record_time()
        connections.messengers[-1].messenger.exchange([(peer, data)], [(peer, arrived)]).wait()
        ended = stream.record_time()
    until = time.monotonic() + planned.timeout_s
    while not ended.is_done():
        if board.is_broken:
            raise woken()
        if time.monotonic() > until:
            raise RuntimeError(f"Timed out waiting for a message of rank {planned.global_ranks[peer]}")
        time.sleep(_LOOK_S)
    return ended.elapsed_us(began)


def _waited_us() -> float:
    """How long threads of this process have been ready and waited for a processor, µs; 0.0 where
    the kernel does not tell."""
    waited_ns = 0
    with contextlib.suppress(OSError, IndexError, ValueError):  # also of a thread that has just ended
        for thread in Path("/proc/self/task").iterdir():
            waited_ns += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
    return waited_ns / 1e3
