"""Self-calibration: the profile of the cluster that a job runs on, without anybody having asked for one.

``COMMLAYER_PROFILE``: a name or a path is taken as it is. ``none``: nothing is planned. ``auto``, which is the backend's default:
the profile that an earlier job measured on such a cluster (same kind of nodes, ranks, software; their names do not count), if a
check of some milliseconds finds that it still holds, else a probe of a few seconds, whose
cost is printed once and whose result is kept for the next job. Of jobs that measure at the same time the first one's is kept,
and each plans by its own. A cache that cannot be used costs a line and the next job's probe, nothing else. It is coarser than
``commlayer measure``: a few sizes a curve, no interference; so a simpler plan is preferred unless another is clearly faster.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from commlayer.agree.discovery import Identity, versions
from commlayer.agree.messages import ControlMessage, Reason
from commlayer.calls.group_life import stage
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import phase
from commlayer.measure import link_times
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.device_harness import DeviceLinks, device_links
from commlayer.measure.machines import Machine, describe_machine
from commlayer.measure.prober import Prober
from commlayer.measure.profiler import (
    HOSTS,
    UNFINISHED,
    SweepOptions,
    complete_profile,
    measure_cluster,
    node_hosts,
)
from commlayer.profiles.catalog import load_profile
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import CommlayerError, DisagreementError, ProfileError, TopologyError
from commlayer.profiles.files import read_file
from commlayer.profiles.printable import say, shortened
from commlayer.profiles.profile import Profile, check_shape, parse_profile
from commlayer.profiles.sweep import doubts
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience.link_rates import LinkTimes
from commlayer.scheduler.experience.start_check import why_stale
from commlayer.scheduler.probes import probes_of_calls
from commlayer.settings import Settings

__all__ = [
    "DEVICE_PROBE",
    "PROBE",
    "AllRanks",
    "as_probe",
    "cache_folder",
    "calibrated",
    "cluster_key",
    "device_profile",
    "planner_for",
    "times_of_links",
]

PROBE = SweepOptions(
    min_bytes=4096,
    max_bytes=3 << 20,
    factor=24,  # three sizes: 4 KiB, 96 KiB, and up to 2.25 MiB
    group_max_bytes=3 << 20,
    group_factor=24,
    interference_rounds=0,
    check=False,
    longest_us=4e4,
    is_probe=True,
    budget_s=2.5,
    deadline_s=2.5,
)
"""The sweep of a job that starts without a profile: about three seconds on an emulated 2×4 of two cores. On a busy machine it
takes no longer: curves for which there was no time are left to later jobs."""
DEVICE_PROBE = replace(PROBE, budget_s=2.0, deadline_s=2.0)
"""The sweep of a group on a device, before its first call that can be planned: with its communicators less than three seconds."""
_PROBE_ERROR = 0.25
"""The error of curves from one to three samples of three sizes. Not the curves' own hold-out errors: over so few sizes those
say how much a curve bends, not how wrong it is."""

_PROBE_FROM_BYTES = PROBE.min_bytes
"""The smallest size that a probe times: below it, flat. What it says of calls that are all latency is not much, but trials of
those cost little, and the fewest messages take a fifth to two fifths of the time of Gloo's own calls (benchmarks/README.md)."""

_PROBE_VERSION = 7
"""The version of what a probe says in its file: those that an earlier version has kept are measured again."""


class _Held(ControlMessage, frozen=True):
    """The answer of a rank that has looked under the profile's name: its fingerprint, or why there is none."""

    fingerprint: str = ""
    reason: Reason | None = None

    def __str__(self) -> str:
        return f"fingerprint {self.fingerprint}" if self.reason is None else str(self.reason)


class _Cached(ControlMessage, frozen=True):
    """The text of the profile that rank 0 has in its cache; None where it has none."""

    json: str | None


def planner_for(
    settings: Settings, topology: Topology, ranks: AllRanks, *, is_whole_job: bool, timeout_s: float
) -> Planner | None:
    """The planner of a job's groups; None where nothing is planned. Collective over ``ranks``, equal on all of them.

    ``timeout_s`` bounds every wait of a probe. ``is_whole_job`` False: ``ranks`` are a part of the job, so that a named profile
    describes more nodes than ``topology``. Raises ProfileNotFoundError, ProfileError, ProfileMismatchError for a named profile,
    DisagreementError where ranks hold different ones, and what measuring raises.
    """
    wanted = settings.profile or "auto"
    if wanted == "none" or ranks.size == 1 or (wanted == "auto" and settings.plan is not None):
        return None  # a plan that is forced on every call needs no prices
    if wanted != "auto":
        named = _named(wanted, topology if is_whole_job else None, ranks)
        if named.slow_links:  # which are known to be those of this job's nodes, or do not count
            why = (
                _moved(named, topology, ranks)
                if is_whole_job
                else "which of its nodes a part of a job is on is not known"
            )
            if why:
                _say(ranks, f"the slow links of profile {shortened(wanted)} are left out of account: {why}")
                named = named.replace(slow_links=())
        return Planner(named)
    profile = calibrated(settings, topology, ranks, timeout_s)
    return None if profile is None else Planner(profile)


def device_profile(
    settings: Settings,
    topology: Topology,
    ranks: AllRanks,
    *,
    device: torch.device,
    job: str,
    timeout_s: float,
) -> Profile | None:
    """The profile of the links of a device between ``ranks``, as of :func:`calibrated`. Collective."""
    with torch.inference_mode(False), torch.no_grad():  # whatever mode the program's call was made in
        return calibrated(settings, topology, ranks, timeout_s, device_links(device), job)


def times_of_links(planned: PlannedGroup | DevicePlans, num_bytes: int) -> LinkTimes:
    """See :func:`commlayer.measure.link_times.time_links`: those who make groups are handed this
    module."""
    return link_times.time_links(planned, num_bytes)


def as_probe(profile: Profile) -> Profile:
    """``profile``, stating how little it knows, so that whoever reads its file decides as the job that measured it."""
    held_out = 2 * _PROBE_ERROR  # of which a decision takes half
    curves = [msgspec.structs.replace(curve, holdout_error=held_out) for curve in profile.curves]
    return profile.replace(curves=curves, plan_from_bytes=_PROBE_FROM_BYTES)


def cache_folder(settings: Settings) -> Path:
    """Where measured profiles are kept: ``COMMLAYER_CACHE``, else ``commlayer`` in the user's cache folder."""
    if settings.cache:
        return Path(settings.cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commlayer"


def cluster_key(topology: Topology, machines: list[Machine], device_type: str, intra: str) -> str:
    """The key under which a profile is cached, of what must be equal for it to hold: which ranks share which nodes, of what
    kind these are, device, software, and ``intra``, the setting.

    The order of nodes and of a node's ranks does not matter, nor do names of hosts, which pods have another of in every job.
    """
    nodes = sorted((repr(machines[members[0]]), len(members)) for members in topology.nodes)
    links = os.environ.get("COMMLAYER_EMULATED_LINKS", "")
    content = repr((_PROBE_VERSION, nodes, device_type, intra, links, sorted(versions().items())))
    return f"{topology.shape}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _named(wanted: str, topology: Topology | None, ranks: AllRanks) -> Profile:
    profile, held = None, _Held()
    try:
        profile = load_profile(wanted)
        if topology is not None:
            check_shape(profile, topology)
        held = _Held(profile.fingerprint)
    except CommlayerError as error:
        held = _Held(reason=Reason.of(error))
        caught: CommlayerError = error
    # All ranks hear of it before one raises, or the others would wait for that one.
    everyones = ranks.gather(held, _Held)
    if held.reason is not None:
        raise caught
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise DisagreementError(
                f"ranks disagree on the profile {shortened(wanted)!r}: the first rank of the group has {everyones[0]}, its rank "
                f"{rank} {theirs}: put the same file on every node"
            )
    assert profile is not None
    return profile


def calibrated(
    settings: Settings,
    topology: Topology,
    ranks: AllRanks,
    timeout_s: float,
    links: DeviceLinks | None = None,
    job: str = "",
) -> Profile | None:
    """The profile of the links between ``ranks``, kept by an earlier job or measured now; None where there is nothing to measure.

    ``links``: those of a device; None: the CPU's. ``job``: the shape of the job of which ``ranks`` are a part, whose other parts
    measure at the same time. Collective, equal on all ranks. Raises what measuring raises.
    """
    machines = ranks.gather(describe_machine(settings), Machine)
    device_type = ranks.device_type
    if links is not None:
        names = sorted({each.text for each in ranks.gather(Identity(links.name), Identity)})
        device_type = f"{links.backend} {names} in {job}"
    key = cluster_key(topology, machines, device_type, settings.intra)
    entry = _cached(settings, key) if ranks.rank == 0 else _Entry(None)
    cached = ranks.from_first(_Cached(entry.text), _Cached).json
    if cached is not None:
        profile = parse_profile(cached, f"the cached profile {key}")
        off = _moved(profile, topology, ranks)
        if not off and links is None:
            off = why_stale(profile, ranks.size, ranks.time_all_reduce)
        elif not off:
            of_all_ranks = probes_of_calls("world", tuple(map(len, topology.nodes)))
            probe = next(each for each in of_all_ranks if each.key[0] == "all_reduce")
            with Prober(topology, timeout_s, ranks, links=links) as prober:
                off = why_stale(profile, ranks.size, lambda num_bytes: prober.runner(probe, num_bytes)())
        if not off:
            return _completed(profile, topology, ranks, timeout_s, entry, links)
        _say(ranks, f"the cached profile {entry.path} does not hold any more and is measured again: {off}")
    return _measured(topology, ranks, timeout_s, entry, links)


def _completed(
    profile: Profile,
    topology: Topology,
    ranks: AllRanks,
    timeout_s: float,
    entry: _Entry,
    links: DeviceLinks | None,
) -> Profile:
    """``profile`` with the curves for which the probe that measured it had no time. Collective."""
    left_out = profile.environment.get(UNFINISHED)
    if left_out is None:
        return profile
    began = time.perf_counter()
    options = replace(PROBE if links is None else DEVICE_PROBE, timeout_s=timeout_s)
    with phase("curves that the cached profile lacks were being measured"):
        completed = complete_profile(profile, options, topology=topology, ranks=ranks, links=links, as_kept=as_probe)
    if ranks.rank == 0:
        took_s, where = time.perf_counter() - began, _keep(completed, entry)
        say(
            f"the cached profile lacked {left_out} curves: measured them in {took_s:.1f} s, {where}."
            f"{_left_out(completed)}"
        )
    return completed


def _left_out(profile: Profile) -> str:
    """A sentence on the curves for which a probe had no time; empty where it had."""
    number = profile.environment.get(UNFINISHED)
    return "" if number is None else f" Time was up before {number} of its curves, which later jobs measure."


def _measured(
    topology: Topology, ranks: AllRanks, timeout_s: float, entry: _Entry, links: DeviceLinks | None
) -> Profile | None:
    """The profile of a probe, which rank 0 keeps as ``entry``; None where there is nothing to measure."""
    begin = time.perf_counter()
    try:
        with phase("the links were being measured"), stage("measuring links"):
            measured = measure_cluster(
                replace(PROBE if links is None else DEVICE_PROBE, timeout_s=timeout_s),
                name=f"probe-{topology.shape}{'' if links is None else f'-{links.device.type}'}",
                kind="emulated" if "COMMLAYER_EMULATED" in os.environ else "measured",
                source=f"measured when a {'job' if links is None else 'group'} started without a profile, one to three samples "
                "of a few sizes a curve",
                topology=topology,
                ranks=ranks,
                links=links,
            )
    except TopologyError as error:
        _say(ranks, f"{error}: nothing is planned")
        return None
    profile, took_s = as_probe(measured), time.perf_counter() - begin
    if ranks.rank == 0:
        what = "cluster" if links is None else f"group on {links.name}"
        why = (
            f"no profile of this {what} ({topology.shape}) yet: measured one" if entry.text is None else "measured one"
        )
        slow = ""
        for link in profile.slow_links:
            hosts = [topology.hostnames[node] for node in link.nodes] if topology.hostnames else []
            slow += f"{str(link).capitalize()} ({', '.join(hosts)}). " if hosts else f"{str(link).capitalize()}. "
        say(
            f"{why} in {took_s:.1f} s, {_keep(profile, entry)}.{_left_out(profile)} {_doubted(profile)}"
            f"{slow}`commlayer measure` makes a finer one; COMMLAYER_PROFILE names it, or is none",
        )
    return profile


def _moved(profile: Profile, topology: Topology, ranks: AllRanks) -> str:
    """Say that a profile's slow links are those of other nodes; empty where they are of these, or it has none. Collective."""
    if not profile.slow_links or profile.environment.get(HOSTS) == node_hosts(topology, ranks):
        return ""
    return "it knows which nodes' links are slow, and this job is on others"


def _doubted(probe: Profile) -> str:
    """A sentence on how little its curves rest on."""
    if not (few := doubts(probe.curves)):
        return ""
    return (
        f"It has too few times to know the error of {len(few)} of its {counted(len(probe.curves), 'curve')}, which is taken "
        f"to be {_PROBE_ERROR:.0%}. "
    )


@dataclass(frozen=True)
class _Entry:
    """A cluster's place in the cache. ``text``: of the sound profile there. ``path`` None: nothing can be kept."""

    path: Path | None
    text: str | None = None


def _cached(settings: Settings, key: str) -> _Entry:
    """Look into the cache. Raises nothing: the other ranks wait. A damaged profile is measured again: nothing is lost."""
    where = shortened(settings.cache or "")
    try:
        path = cache_folder(settings) / f"{key}.json"
        where = shortened(str(path))
        return _Entry(path, parse_profile(read_file(path), where).to_json())
    except FileNotFoundError:
        return _Entry(path)
    except CommlayerError as error:
        say(f"the cached profile cannot be used and is measured again: {error}")
        return _Entry(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        why = getattr(error, "strerror", None) or error
        say(
            f"the cache cannot be used, so what is measured here is not kept: {where}: {why}. Remove that, or name another "
            "folder in COMMLAYER_CACHE"
        )
        return _Entry(None)


def _keep(profile: Profile, entry: _Entry) -> str:
    """Put ``profile`` into the cache, in place of the one that was there, or if no other job has been faster; the words for
    it. Raises nothing."""
    path = entry.path
    if path is None:
        return "not kept"
    try:
        if entry.text is not None:
            profile.save(path, follow_links=False)
            return f"kept in {path}"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profile.save(path, new_only=True, follow_links=False)
        except FileExistsError:
            try:
                parse_profile(read_file(path), str(path))
            except ProfileError:
                profile.save(path, follow_links=False)  # the damaged one, of which we have said so
            else:
                return f"and left {path} as another job has kept it meanwhile"
        return f"kept in {path}"
    except (OSError, ProfileError) as error:
        return f"and could not keep it ({error}: COMMLAYER_CACHE names another folder)"


def _say(ranks: AllRanks, text: str) -> None:
    if ranks.rank == 0:
        say(text)
