"""Clocks of ranks made comparable: what to add to a rank's ``time.perf_counter_ns`` to get rank
0's.

Nobody leaves an all-gather before everybody has entered it. So with a stamp taken by each rank
before, and one after it:

    my stamp before + my offset  ≤  rank 0's stamp after
    rank 0's stamp before        ≤  my stamp after + my offset

Each all-gather bounds the offset from both sides, and the tightest bounds of several are kept; the
estimate is their middle and its error half their distance. That is NTP's filter by the least round
trip, but taken for each direction by itself; and what it says of its error is a bound, not a guess,
while the clocks do not drift (20 ppm is 1 µs in 50 ms).

Ranks that run on one kernel read one clock: they need no correction to each other, and the stamps
of all of them bound the one offset of their machine. Rejected: wall clocks that an NTP daemon
keeps, which differ by milliseconds and jump.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

__all__ = ["ClockReading", "Stamps", "clock_identity", "clock_offset_ns", "exchange_clocks", "to_job_ns"]

_ROUNDS = 16
Stamps = tuple[int, int, int, int]
"""The clock stamps of one all_gather, in ns: rank 0's before and after, this rank's before and
after."""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A rank's clock against rank 0's at one moment.

    ``at_ns``: the moment on the rank's own clock. ``offset_ns``: to be added to the rank's clock.
    ``error_ns``: the offset is wrong by no more; −1: not known, the clocks were never compared.
    ``origin_ns``: a moment on rank 0's clock, the same on all ranks: where times are to begin.
    """

    at_ns: int
    offset_ns: int
    error_ns: int
    origin_ns: int


def clock_offset_ns(samples: Sequence[Stamps]) -> tuple[int, int]:
    """Compute the offset that makes this clock rank 0's, and the bound of its error, ns. Raises
    ValueError without samples."""
    if not samples:
        raise ValueError("expected the stamps of one all-gather at least, got none")
    least = max(before_0 - after for before_0, _, _, after in samples)
    most = min(after_0 - before for _, after_0, before, _ in samples)
    return (least + most) // 2, (abs(most - least) + 1) // 2


def exchange_clocks(
    gather: Callable[[int], list[int]],
    rank: int,
    *,
    rounds: int = _ROUNDS,
    clock: Callable[[], int] = time.perf_counter_ns,
    identity: int | None = None,
) -> ClockReading:
    """Compare this rank's clock with rank 0's. Collective; takes ``rounds`` + 2 all-gathers.

    Args:
        gather: gathers an integer below 2^63 from every rank of the job, in rank order: nobody may
            leave it before everybody has entered it, which is so of any all-gather.
        rounds: all-gathers that are timed; the same on all ranks.
        clock: ns. identity: equal on ranks that read the same clock.  [that of the running kernel]

    Raises what ``gather`` raises.
    """
    identities = gather(clock_identity() if identity is None else identity)
    # Each round sends the stamp of the end of the one before, which is also the beginning of this
    # one.
    gather(0)  # the first one waits for those who come late to the exchange
    stamps = [clock()]
    everyone: list[list[int]] = []
    for _ in range(rounds + 1):
        everyone.append(gather(stamps[-1]))
        stamps.append(clock())
    origin_ns = everyone[0][0]
    if identities[rank] == identities[0]:
        return ClockReading(stamps[-1], 0, 0, origin_ns)
    same_kernel = [other for other, kind in enumerate(identities) if kind == identities[rank]]
    zeros = [other for other, kind in enumerate(identities) if kind == identities[0]]
    samples = [
        (before[zero], after[zero], before[me], after[me])
        for before, after in pairwise(everyone)
        for zero in zeros
        for me in same_kernel
    ]
    return ClockReading(stamps[-1], *clock_offset_ns(samples), origin_ns)


def to_job_ns(readings: Sequence[ClockReading]) -> Callable[[int], int]:
    """Return a function that turns a rank's stamps into ns since the job's origin, by its readings.
    Between two readings, and beyond the last, the clock is taken to drift evenly. Without readings
    stamps stay as they are.
    """
    if not readings:
        return lambda ns: ns
    first, last = readings[0], readings[-1]
    span_ns = last.at_ns - first.at_ns
    if span_ns <= 0 or last.offset_ns == first.offset_ns:
        return lambda ns: ns + first.offset_ns - first.origin_ns
    drift_ns = last.offset_ns - first.offset_ns
    return lambda ns: ns + first.offset_ns + (ns - first.at_ns) * drift_ns // span_ns - first.origin_ns


def clock_identity() -> int:
    """Return a number that is equal for all processes of this machine that read one clock, below
    2^63; where that cannot be known, unique.
    """
    try:
        if "CLOCK_MONOTONIC" not in time.get_clock_info("perf_counter").implementation:
            return secrets.randbits(63)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/time")  # a time namespace shifts the clock
    except OSError:
        return secrets.randbits(63)
    return int.from_bytes(blake2b(f"{boot}{space}".encode(), digest_size=8).digest(), "big") >> 1
