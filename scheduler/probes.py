"""Plans that exercise one resource, or two side by side: what the profiler times to learn a cluster's curves."""

from __future__ import annotations

from dataclasses import replace

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Cut, Gather, Plan, Step, Strategy
from commlayer.scheduler.replicated import EXCHANGE_SLICES, GATHER, LOCAL_BLOCK
from commlayer.scheduler.strategies import flat
from commlayer.scheduler.traffic import Traffic

__all__ = ["copy_probe", "exchange_probe", "gather_probe", "one_call_probe", "side_by_side"]


def exchange_probe(num_bytes: int, group_size: int, link: Resource) -> Plan:
    """One all_to_all by messages, whose send buffer is about ``num_bytes`` (rounded up to what the group divides).

    Not a flat plan: a transport may run a small one of those as a call of the backend's own (see one_call_probe), which
    no step of another plan is.
    """
    traffic = one_call_probe(num_bytes, group_size, link).traffic
    return _plan(traffic, (EXCHANGE_SLICES.step(Cut(traffic)),), Gather.WHOLE)


def one_call_probe(num_bytes: int, group_size: int, link: Resource) -> Plan:
    """The flat plan of the same bytes: one call of the backend's own, where the transport has one for that size."""
    block = max(1, -(-num_bytes // group_size))
    return flat(Traffic(block * group_size, group_size, 1, link))


def gather_probe(num_bytes: int, group_size: int, replication: int, link: Resource) -> Plan:
    """One all_gather over ``replication`` ranks of about ``num_bytes`` in total, in place, as the plans do it."""
    traffic = _enclosing(num_bytes, group_size, replication, link)
    return _plan(traffic, (GATHER.step(Cut(traffic, gather=Gather.REMOTE)),))


def copy_probe(num_bytes: int, group_size: int, link: Resource) -> Plan:
    """One copy of ``num_bytes`` from the input to the output."""
    traffic = Traffic(max(1, num_bytes) * group_size, group_size, 1, link)
    return _plan(traffic, (LOCAL_BLOCK.step(Cut(traffic)),))


def side_by_side(
    num_bytes: int, group_size: int, replication: int, link: Resource, counts: dict[Resource, int]
) -> Plan:
    """Independent steps on several resources: ``counts`` says how many of each, so that all are busy equally long.

    The steps are those of a hierarchical plan for ``num_bytes``: an all_to_all of a slice, an all_gather of what crossed
    the wire, a copy of the local block.
    """
    traffic = _enclosing(num_bytes, group_size, replication, link)
    cut = Cut(traffic, gather=Gather.REMOTE)
    steps: list[Step] = []
    # Copies last: on the CPU they occupy the posting thread.
    for resource, leg in ((Resource.INTER, EXCHANGE_SLICES), (Resource.INTRA, GATHER), (Resource.DEVICE, LOCAL_BLOCK)):
        steps += [replace(leg.step(cut), resource=resource)] * counts.get(resource, 0)
    return _plan(traffic, tuple(steps))


def _enclosing(num_bytes: int, group_size: int, replication: int, link: Resource) -> Traffic:
    """The traffic whose remote blocks are about ``num_bytes`` together."""
    block = max(1, -(-num_bytes // max(1, group_size - 1)))
    return Traffic(block * group_size, group_size, replication, link)


def _plan(traffic: Traffic, steps: tuple[Step, ...], gather: Gather = Gather.REMOTE) -> Plan:
    return Plan(traffic, Strategy.HIERARCHICAL, 1, gather, steps)
