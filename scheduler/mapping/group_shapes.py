"""How the groups of an axis lie on domains, and which of them is the slowest: pure arithmetic on layouts.

All groups of an axis are the one that holds rank 0, shifted. Where the domain is no multiple of what they span, shifts differ:
on racks of 72, of eight groups of 64 neighbours only the first is inside one rack. An exchange ends when its slowest group
ends, so that one is what an axis costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from commlayer.profiles.errors import UsageError

__all__ = ["GroupLayout", "Shape", "slowest", "worst_shape"]

GroupLayout = tuple[tuple[int, int], ...]
"""(size, stride) of each part of a group."""
Shape = tuple[int, ...]
"""Ranks of a group on each domain, in order of the domains."""


def worst_shape(layout: GroupLayout, domain: int, ranks: int = 0) -> Shape:
    """The shape of the slowest group among all that ``layout`` has in a job.

    Args:
        layout: of the group that holds rank 0. The first ranks of the others are those at place 0 of every part
            (:meth:`~commlayer.scheduler.mapping.folded.FoldedMapping.groups`).
        ranks: GPUs of the job; 0: of a job without end. A rest that does not fill the layout's period (size times stride of its
            outermost part) has no group.

    Raises:
        UsageError: a size or a stride below 1, parts that overlap or do not nest, fewer ranks than the group needs.
    """
    parts = _parts(layout)
    needed = 1 + sum((size - 1) * stride for size, stride in parts)
    if ranks and ranks < needed:
        raise UsageError(f"ranks: expected 0 (any number) or at least the {needed} that {layout} reaches, got {ranks}")
    # The first ranks of groups, modulo the domain: one for each shape, and perhaps several of the same. A rank is a number of
    # mixed radix, whose digits are the parts and what lies between them; at first ranks those of the parts are 0. All ranks of a
    # group are multiples of ``step`` from its first, as domains are: shifts below it change nothing.
    step = math.gcd(domain, *(stride for _, stride in parts))
    firsts, below = {0}, step
    for size, stride in parts:
        firsts = _shifted(firsts, stride // below, below, domain)
        below = size * stride
    firsts = _shifted(firsts, max(1, ranks // below) if ranks else domain, below, domain)
    return slowest(_shape(parts, first, domain) for first in firsts)


def slowest(shapes: Iterable[Shape]) -> Shape:
    """Find, of shapes of as many ranks each, the one that keeps a call the longest, without asking what it costs.

    One that leaves its domain goes before one that does not. Then the fewest ranks on the emptiest domain: a rank there has
    the most to send to other domains, (n-l)/n of an exchange, and those l cards together carry all that a ring or a two-level
    plan brings into their domain, (n-l)/(n·l) each. The network being the slowest link, that orders the time of every
    collective of large calls. Among equals: more domains (hops), a fuller domain (messages inside it), and then the order of
    the domains, which changes no price.
    """
    return min(shapes, key=lambda nodes: (len(nodes) == 1, min(nodes), -len(nodes), -max(nodes), nodes))


def _parts(layout: GroupLayout) -> GroupLayout:
    """Innermost first, without parts of one rank; neighbours that continue each other are one part."""
    if any(size < 1 or stride < 1 for size, stride in layout):
        raise UsageError(f"layout: expected sizes and strides of at least 1, got {layout}")
    parts: list[tuple[int, int]] = []
    for size, stride in sorted((part for part in layout if part[0] > 1), key=lambda part: part[1]):
        inner, below = parts[-1] if parts else (1, 1)
        if stride % (inner * below):
            raise UsageError(
                f"layout: expected each stride to be a multiple of what lies inside it, {inner} x {below} = {inner * below}, "
                f"got {stride} in {layout}"
            )
        if parts and stride == inner * below:
            parts[-1] = (inner * size, below)
        else:
            parts.append((size, stride))
    return tuple(parts)


def _shifted(found: set[int], count: int, stride: int, domain: int) -> set[int]:
    different = min(count, domain // math.gcd(domain, stride))
    return {(first + index * stride) % domain for index in range(different) for first in found}


def _shape(parts: GroupLayout, first: int, domain: int) -> Shape:
    if not parts:
        return (1,)
    if len(parts) == 1:
        size, stride = parts[0]
        if stride >= domain:  # a domain for each of them
            return (1,) * size
        last = (first + (size - 1) * stride) // domain
        before = [0, *(-(-(index * domain - first) // stride) for index in range(1, last + 1)), size]
        return tuple(after - until for until, after in pairwise(before))
    ranks = [first]
    for size, stride in parts:
        ranks = [rank + index * stride for index in range(size) for rank in ranks]
    counts: dict[int, int] = {}
    for rank in sorted(ranks):
        counts[rank // domain] = counts.get(rank // domain, 0) + 1
    return tuple(counts.values())
