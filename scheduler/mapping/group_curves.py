"""The curves of a group of a declared cluster: how long each collective takes, from the bytes that each link carries.

n ranks on m domains of l ranks each, S bytes (as nccl-tests counts them), every GPU with a card of its own:

- *Rings* (all_gather, reduce_scatter; all_reduce twice; broadcast): the library runs as many rings as there are cards, and
  each leaves a domain once. Into a domain come S·(m−1)/m bytes, by l cards: S·(m−1)/(m·l) each. Inside, S·(n−1)/n over
  NVLink of each GPU, in the same pipeline. So the call takes the longer of the two, and the hops: n−1, of which m−1 between
  domains (NCCL's own model of a ring, `src/graph/tuning.cc`). An all_reduce may go over trees instead, with 2·log2(m) hops
  between domains at 0.9 of the rate (same source).
- *Messages* (all_to_all, all_to_all_v, steps of plans): each rank sends S·(n−l)/n over its card and S·(l−1)/n over NVLink,
  at the same time; the longer of the two. The efficiency is that of all bytes that the rank sends over the link, because
  the library has many messages under way at once; what a message costs by itself is added for each. PXN, by which NCCL
  lets a rail's GPU forward the messages of its node, leaves the bytes of each card as they are, so nothing changes.

Domains with different numbers of ranks: the fewest cards of any domain carry what comes in, and the largest share that any
rank has to send counts. The stages of plans between domains say by their sizes what that is (``Cut.over_rails``); here is
added what their messages cost, of which the l ranks of the emptiest domain get (n−l)/l each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Peaks, Resource
from commlayer.scheduler.mapping.declared_links import Link, Points

__all__ = ["SIZES", "curves_of_group"]

SIZES = tuple(1 << power for power in range(10, 34))
"""Bytes, 1 KiB to 8 GiB."""

_STEPS = ("all_gather", "all_to_all")
"""The collectives that plans call between their ranks; both by messages."""
_TREE_RATE = 0.9
"""The part of a ring's rate that a tree has, by NCCL's tuning model."""

_MEMORY_TRAFFIC = {
    "copy": 1.0,  # reads S, writes S: what the device's peak counts as S
    "reduce": 1.5,  # reads the sum so far and S, writes the sum
    "encode_bf16": 0.75,  # of FP32: reads S, writes S/2
    "encode_int8": 0.75,  # of BF16: reads S, writes S/2
    "encode_fp8_e4m3": 0.75,  # of BF16: reads S, writes S/2
    "encode_fp8_e5m2": 0.75,
    "decode_bf16": 1.25,  # reads S/2 and the FP32 sum, writes that
    "decode_int8": 0.75,
    "decode_fp8_e4m3": 0.75,  # reads S/2, writes S
    "decode_fp8_e5m2": 0.75,
}
"""Bytes that go through memory, in halves of what a copy of S moves (2·S)."""


class Declared(Protocol):
    """A declared cluster, as far as it is asked: its links and their peaks, and ``kept``, where what many groups share is
    computed once."""

    @property
    def peaks(self) -> Peaks: ...
    @property
    def kept(self) -> dict[Any, Any]: ...

    def link(self, link: Resource, /) -> Link: ...


@dataclass(frozen=True)
class _Shape:
    """The shape on which a group's times depend: ranks, domains, the fewest and the most ranks on one of them."""

    ranks: int
    domains: int
    fewest: int
    most: int

    @property
    def link(self) -> Resource:
        return Resource.INTER if self.domains > 1 else Resource.INTRA

    @property
    def ring_shares(self) -> tuple[float, float]:
        """The parts of S that one rank sends over its card and over NVLink in one turn of a ring."""
        inter = (self.ranks - self.fewest) / (self.ranks * self.fewest)
        return inter, (self.ranks - 1) / self.ranks if self.most > 1 else 0.0


class _Line:
    """µs over the bytes that one rank sends over one link, for one kind of call: ``ring`` or ``messages``."""

    def __init__(self, cluster: Declared, link: Resource, kind: str) -> None:
        declared, peak_gbps = cluster.link(link), cluster.peaks.of(link)
        points: Points = getattr(declared, kind)
        self._at = Curve.from_efficiency("send", link, 2, points, declared.gbps).at
        self._same_time = declared.gbps / peak_gbps  # times the bytes: for so many the measured link takes as long
        self._us_per_byte = 1 / (peak_gbps * 1e3)
        self._latency_us = declared.latency_us

    def us(self, nbytes: float) -> float:
        """0 for no bytes; never faster than the peak."""
        if nbytes <= 0:
            return 0.0
        return max(self._latency_us, nbytes * self._us_per_byte, self._at(nbytes * self._same_time))


def _line(cluster: Declared, link: Resource, kind: str) -> _Line:
    found: _Line | None = cluster.kept.get((link, kind))
    if found is None:
        found = cluster.kept[link, kind] = _Line(cluster, link, kind)
    return found


class _Times:
    """µs of each collective of one shape, for every size of ``SIZES``."""

    def __init__(self, cluster: Declared, shape: _Shape) -> None:
        self.cluster, self.shape = cluster, shape

    def _sampled(self, kind: str, inter: float, intra: float, beyond_us: float = 0.0) -> list[float]:
        """Where each rank sends ``inter``·S over its card and ``intra``·S over NVLink, beside each other."""
        across, inside = _line(self.cluster, Resource.INTER, kind).us, _line(self.cluster, Resource.INTRA, kind).us
        intra /= self.cluster.link(Resource.INTRA).used_by(self.shape.most)
        return [max(across(size * inter), inside(size * intra)) + beyond_us for size in SIZES]

    def _beyond(self, inter: int, intra: int, cost: str) -> float:
        """µs of the hops (or messages) that the measured groups did not have."""
        total = 0.0
        for link, count in ((Resource.INTER, inter), (Resource.INTRA, intra)):
            declared = self.cluster.link(link)
            total += max(0, count - declared.measured_hops) * float(getattr(declared, cost))
        return total

    def ring(self, turns: int = 1) -> list[float]:
        """all_gather or reduce_scatter; all_reduce is two turns."""
        shape, (inter, intra) = self.shape, self.shape.ring_shares
        hops = self._beyond(turns * (shape.domains - 1), turns * (shape.ranks - shape.domains), "hop_us")
        return self._sampled("ring", turns * inter, turns * intra, hops)

    def all_reduce(self) -> list[float]:
        """Over rings, or over trees where those are faster."""
        shape, (inter, intra) = self.shape, self.shape.ring_shares
        rings = self.ring(turns=2)
        if shape.domains == 1:
            return rings
        hops = self._beyond(2 * math.ceil(math.log2(shape.domains)), 2 * (shape.most - 1), "hop_us")
        trees = self._sampled("ring", 2 * inter / _TREE_RATE, 2 * intra / _TREE_RATE, hops)
        return list(map(min, rings, trees))

    def broadcast(self) -> list[float]:
        """A chain through all ranks, in the same pipeline: every domain takes S in, and NVLink passes S on."""
        shape = self.shape
        hops = self._beyond(shape.domains - 1, shape.ranks - shape.domains, "hop_us")
        inter = 1 / shape.fewest if shape.domains > 1 else 0.0
        return self._sampled("ring", inter, 1.0 if shape.most > 1 else 0.0, hops)

    def messages(self) -> list[float]:
        """Each rank to each other: all_to_all of any kind, and an all_gather whose ranks send their block to each other."""
        shape = self.shape
        beyond = self._beyond(shape.ranks - shape.fewest, shape.most - 1, "message_us")
        inter = (shape.ranks - shape.fewest) / shape.ranks
        return self._sampled("messages", inter, (shape.most - 1) / shape.ranks, beyond)

    def between(self) -> list[float]:
        """A plan's stage between domains, by the size that its steps have."""
        shape = self.shape
        others = (shape.ranks - shape.fewest) / shape.fewest  # of each rank of the emptiest domain; even: domains - 1
        beyond = self._beyond(math.ceil(others), 0, "message_us")
        return self._sampled("messages", (shape.domains - 1) / shape.domains, 0.0, beyond)

    def inside(self) -> list[float]:
        """The times of a plan's stage inside the fullest domain."""
        most = self.shape.most
        return self._sampled("messages", 0.0, (most - 1) / most, self._beyond(0, most - 1, "message_us"))

    def send(self) -> list[float]:
        """The time of a message from one rank to another."""
        crosses = self.shape.domains > 1
        return self._sampled("messages", float(crosses), float(not crosses))


def curves_of_group(cluster: Declared, nodes: tuple[int, ...]) -> tuple[Curve, ...]:
    """Every curve that plans of a group on ``nodes`` look up (:func:`commlayer.scheduler.price.curve_of`).

    Curves of the stages (ranks of one domain, one rank of each) are the same for many groups, and kept by the cluster.
    """
    whole = _Shape(sum(nodes), len(nodes), min(nodes), max(nodes))
    kept: dict[Any, tuple[Curve, ...]] = cluster.kept
    if "device" not in kept:
        us = _line(cluster, Resource.DEVICE, "ring").us
        kept["device"] = tuple(
            Curve(name, Resource.DEVICE, 1, SIZES, tuple(us(size * part) for size in SIZES), source="declared")
            for name, part in _MEMORY_TRAFFIC.items()
        )
    curves = [*kept["device"]]
    if whole.ranks == 1:
        return tuple(curves)
    times = _Times(cluster, whole)
    turn = times.ring()
    curves += [_curve(name, whole, turn) for name in ("all_gather_single", "reduce_scatter_single")]
    curves.append(_curve("all_reduce", whole, times.all_reduce()))
    curves.append(_curve("broadcast", whole, times.broadcast()))
    exchange = times.messages()
    curves += [_curve(name, whole, exchange) for name in ("all_to_all_v", *_STEPS)]
    if whole.domains > 1 and whole.most > 1:
        across, inside = _Shape(whole.domains, whole.domains, 1, 1), _Shape(whole.most, 1, whole.most, whole.most)
        # Among even groups the first depends on the domains alone, and the second always on the fullest alone.
        by = across if whole.fewest == whole.most else whole
        if ("between", by) not in kept:
            between = _Times(cluster, by).between()
            kept["between", by] = tuple(_curve(name, across, between) for name in _STEPS)
        if ("inside", inside) not in kept:
            within = _Times(cluster, inside).inside()
            kept["inside", inside] = tuple(_curve(name, inside, within) for name in _STEPS)
        curves += kept["between", by] + kept["inside", inside]
    if whole.ranks == 2:
        curves.append(_curve("send_recv", whole, times.send()))
    return tuple(curves)


def _curve(collective: str, shape: _Shape, times: list[float]) -> Curve:
    # Each is non-decreasing but for the last bit of its roundings.
    return Curve(collective, shape.link, shape.ranks, SIZES, tuple(accumulate(times, max)), source="declared")
