"""Profiles that running jobs have learnt, and merging them into another one. Pure.

Nothing is written over: a job offers a profile beside the one that it was given. Its environment
says from which one it was learnt, where and when; :func:`merge_learnt` makes a third one of the
two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import NamedTuple

from commlayer.profiles.errors import ProfileError, ProfileMismatchError
from commlayer.profiles.links import Peaks, Resource, SlowLink
from commlayer.profiles.profile import Profile

__all__ = ["Learning", "MergedProfile", "learnt_profile", "merge_learnt"]

_FROM, _FABRIC, _NODES, _WHERE, _WHEN = (f"learnt.{name}" for name in ("from", "fabric_rate", "nodes", "by", "at"))
"""Names in the environment of a profile that a job has learnt."""


@dataclass(frozen=True)
class Learning:
    """The rates that a job has measured: against which profile (its fingerprint ``base``), by which
    group, at which Unix time.

    ``fabric_rate``: the rate of links between nodes, as a fraction of that profile's.
    ``node_rates``: of the card of each of these nodes, as a fraction of the usual one's.
    """

    base: str
    where: str
    time_s: float
    fabric_rate: float = 1.0
    node_rates: Mapping[int, float] = field(default_factory=dict)


class MergedProfile(NamedTuple):
    """A merged profile, the curves that were taken over, and notes for its user."""

    profile: Profile
    curves: tuple[str, ...]
    notes: tuple[str, ...]


def learnt_profile(now: Profile, learning: Learning) -> Profile:
    """Return the profile ``now``, by which a job plans, with the cards of ``learning`` and where
    all that comes from."""
    kept = [link for link in now.slow_links if not (len(link.nodes) == 1 and link.nodes[0] in learning.node_rates)]
    cards = [SlowLink((node,), rate) for node, rate in sorted(learning.node_rates.items()) if rate < 1.0]
    about = {
        _FROM: learning.base,
        _FABRIC: repr(learning.fabric_rate),
        _NODES: ",".join(map(str, sorted(learning.node_rates))),
        _WHERE: learning.where,
        _WHEN: datetime.fromtimestamp(learning.time_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    source = f"{now.source}; {_said(learning)}" if learning.node_rates else now.source
    return now.replace(slow_links=cards + kept, source=source, environment={**now.environment, **about})


def _said(learning: Learning) -> str:
    cards = ", ".join(f"node {node} {rate:.0%}" for node, rate in sorted(learning.node_rates.items()))
    return f"nodes' cards, of the usual rate, as measured in a running job: {cards}"


def merge_learnt(base: Profile, learnt: Profile) -> MergedProfile:
    """Return ``base`` with the curves, peak and slow links that a running job has learnt in place
    of its own.

    Raises: ProfileError: ``learnt`` is no profile that a job has learnt, or says so in a damaged
    way. ProfileMismatchError: a profile of another cluster's shape.
    """
    fabric_rate, nodes = _learning_of(learnt)
    if learnt.topology != base.topology:
        raise ProfileMismatchError(
            f"expected two profiles of one cluster, got {base.name!r} of shape {base.topology} and {learnt.name!r} of shape "
            f"{learnt.topology}: what was learnt on other nodes says nothing about these"
        )
    curves = {curve.key: curve for curve in base.curves}
    taken: dict[tuple[str, str, int], str] = {}
    if fabric_rate != 1.0:
        for curve in learnt.curves:
            if curve.link is Resource.INTER and curve.basis == "derived" and curves.get(curve.key) != curve:
                curves[curve.key] = curve
                taken[curve.key] = f"{curve.collective} {curve.link} {curve.group_size}"
    peaks = base.peaks
    if fabric_rate != 1.0:
        peaks = Peaks(learnt.peaks.inter_gbps, peaks.intra_gbps, peaks.device_gbps)
    links = list(base.slow_links)
    if nodes:
        links = [link for link in links if not (len(link.nodes) == 1 and link.nodes[0] in nodes)]
        links += [link for link in learnt.slow_links if len(link.nodes) == 1 and link.nodes[0] in nodes]
    about = {name: learnt.environment[name] for name in (_FROM, _FABRIC, _NODES, _WHERE, _WHEN)}
    profile = base.replace(
        source=f"{base.source}; links between nodes as a running job has learnt them ({about[_WHERE]}, {about[_WHEN]}; "
        f"{learnt.name}, {learnt.fingerprint})",
        peaks=peaks,
        curves=curves.values(),
        slow_links=links,
        environment={**base.environment, **about},
    )
    return MergedProfile(profile, tuple(taken.values()), tuple(_notes(base, learnt)))


def _notes(base: Profile, learnt: Profile) -> list[str]:
    if learnt.environment[_FROM] == base.fingerprint:
        return []
    return [
        f"{learnt.name} was learnt by a job that planned by another profile ({learnt.environment[_FROM]}) than {base.name} "
        f"({base.fingerprint}): its curves replace those of {base.name} all the same"
    ]


def _learning_of(learnt: Profile) -> tuple[float, set[int]]:
    """The rate of the fabric, and the nodes whose cards were compared."""
    missing = [name for name in (_FROM, _FABRIC, _NODES, _WHERE, _WHEN) if name not in learnt.environment]
    if missing:
        raise ProfileError(
            f"{learnt.name}: field environment: expected a profile that a running job has learnt, but {missing[0]} is missing. "
            "Jobs write them into the folder COMMLAYER_AUDIT, as learnt-….json"
        )
    rate, nodes = learnt.environment[_FABRIC], learnt.environment[_NODES]
    try:
        found = float(rate), {int(node) for node in nodes.split(",") if node}
    except ValueError as error:
        raise ProfileError(f"{learnt.name}: field environment: expected numbers, got {rate!r} and {nodes!r}") from error
    if not 0 < found[0] < math.inf:
        raise ProfileError(f"{learnt.name}: field environment.{_FABRIC}: expected a positive rate, got {rate!r}")
    return found
