"""A profile: what the links of one cluster can do, in one versioned JSON file.

Reading is strict, because a plan is only as good as its profile and every rank must hold the same one: what is damaged,
foreign, newer or edited is refused with the file, the field and the reason.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final, Literal

import msgspec

from commlayer.profiles.curve import Curve, median
from commlayer.profiles.errors import PlanError, ProfileError, ProfileMismatchError, ProfileNotFoundError
from commlayer.profiles.files import read_file, write_file
from commlayer.profiles.links import Peaks, Resource, SlowLink
from commlayer.profiles.printable import shortened
from commlayer.profiles.strict_json import convert, parse_object, pretty, require_field
from commlayer.profiles.topology import Topology

__all__ = [
    "MEASURED_ON",
    "PROFILE_FORMAT",
    "VERSION",
    "Interference",
    "Profile",
    "check_shape",
    "parse_profile",
    "read_profile",
]

PROFILE_FORMAT: Final = "commlayer-profile"
MEASURED_ON: Final = "device"
"""The entry of a profile's environment that names the device whose links were measured; of the CPU's there is none."""
VERSION: Final = 1

_ALLOWED = {
    "kind": "measured, emulated, published or paper",
    "gather": "whole or remote",
    "link": "inter, intra or device",
    "resource": "inter, intra, device or compute",
    "other": "inter, intra, device or compute",
}


class Interference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """While ``resource`` works beside ``other``, it takes ``slowdown`` (at least 1) times as long.

    One direction only: what ``other`` suffers is an entry of its own.
    """

    resource: Resource
    other: Resource
    slowdown: float

    def __post_init__(self) -> None:
        if not 1 <= self.slowdown < math.inf:
            raise ProfileError(f"slowdown: expected a finite factor of at least 1, got {self.slowdown}")
        if self.resource == self.other:
            raise ProfileError(f"other: expected another resource than {self.resource}, which does one step at a time")
        normal = {
            "resource": Resource(self.resource),
            "other": Resource(self.other),
            "slowdown": float(self.slowdown),
        }
        for name, value in normal.items():
            msgspec.structs.force_setattr(self, name, value)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A cluster's profile: what its links can do. Make one with ``create`` or ``read_profile``; both see to the fingerprint.

    Attributes:
        name: for people; also the file name in the catalogue.
        kind: "measured" on hardware, "emulated" on shaped virtual links, "published" peaks, or from a "paper".
        source: where the numbers come from, and what they are not.
        topology: the shape, as ``Topology.shape``.
        peaks: peak rates, per rank and direction.
        gather: what the all_gather stage of the described software moves: "whole" = the whole tensor (MoNTA eq. 9),
            "remote" = only the blocks that crossed the wire (commlayer's executor; the local block is a device copy).
        plan_from_bytes: traffic of fewer bytes stays flat, because the curves say too little there; 0 (and not in the file):
            they are as good there as elsewhere.
        curves: at most one per (collective, link, group_size).
        interference: slowdowns of pairs of resources; a pair that is not listed does not interfere.
        slow_links: cards, and ways between two nodes, that are slower than the cluster's others.
        environment: versions, host, date and so on, by name.
        fingerprint: "sha256:…" over everything else. Also the hash of the object, so that profiles can key a cache.

    Raises:
        ProfileError: a value that breaks one of these rules; the message names the field.
    """

    format: Literal["commlayer-profile"] = PROFILE_FORMAT
    version: Literal[1] = VERSION
    name: str
    kind: Literal["measured", "emulated", "published", "paper"]
    source: str
    topology: str
    peaks: Peaks
    gather: Literal["whole", "remote"]
    plan_from_bytes: int = 0
    curves: tuple[Curve, ...]
    interference: tuple[Interference, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    environment: dict[str, str] = {}
    fingerprint: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ProfileError("name: expected a name, got an empty one")
        shape = Topology.parse(self.topology).shape
        if shape != self.topology:
            raise ProfileError(f"topology: expected the shortest spelling {shape!r}, got {self.topology!r}")
        if self.plan_from_bytes < 0:
            raise ProfileError(f"plan_from_bytes: expected a size of at least 0, got {self.plan_from_bytes}")
        _refuse_twins("curves", [curve.key for curve in self.curves])
        _refuse_twins("slow_links", [tuple(sorted(link.nodes)) for link in self.slow_links])
        num_nodes = Topology.parse(self.topology).num_nodes
        if any(node >= num_nodes for link in self.slow_links for node in link.nodes):
            raise ProfileError(f"slow_links: expected nodes below {num_nodes}, got {self.slow_links}")
        _refuse_twins("interference", [(entry.resource, entry.other) for entry in self.interference])

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @classmethod
    def create(
        cls,
        *,
        name: str,
        kind: str,
        source: str,
        topology: Topology | str,
        peaks: Peaks,
        gather: str,
        curves: Iterable[Curve],
        interference: Iterable[Interference] = (),
        slow_links: Iterable[SlowLink] = (),
        environment: Mapping[str, str] | None = None,
        plan_from_bytes: int = 0,
    ) -> Profile:
        """Build a profile and compute its fingerprint.

        Raises:
            ProfileError: a field of the wrong type or value; it names the field.
            TopologyError: a malformed topology.
        """
        shape = (topology if isinstance(topology, Topology) else Topology.parse(topology)).shape
        fields = {
            "name": name,
            "kind": kind,
            "source": source,
            "topology": shape,
            "peaks": peaks,
            "gather": gather,
            "plan_from_bytes": plan_from_bytes,
            "curves": tuple(curves),
            "interference": tuple(interference),
            "slow_links": tuple(slow_links),
            "environment": dict(environment or {}),
            "fingerprint": "",
        }
        draft = _convert(msgspec.to_builtins(fields), f"profile {name!r}")
        return msgspec.structs.replace(draft, fingerprint=_fingerprint(draft))

    def replace(self, **changes: Any) -> Profile:
        """A copy with other fields (as for ``create``) and its own fingerprint."""
        fields = {
            key: getattr(self, key) for key in self.__struct_fields__ if key not in ("format", "version", "fingerprint")
        }
        return Profile.create(**{**fields, **changes})

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, int], Curve]:
        return {curve.key: curve for curve in self.curves}

    @cached_property
    def _slowdowns(self) -> dict[tuple[str, str], float]:
        return {(entry.resource, entry.other): entry.slowdown for entry in self.interference}

    def curve(self, collective: str, link: Resource, group_size: int) -> Curve:
        """The curve of ``collective`` on ``link`` in a group of ``group_size`` ranks (1 for a copy).

        Raises:
            PlanError: the profile has none; the message says what it has and what can be measured.
        """
        curve = self.find(collective, link, group_size)
        if curve is None:
            raise PlanError(self._missing(collective, link, group_size))
        return curve

    def find(self, collective: str, link: Resource, group_size: int) -> Curve | None:
        """Return the curve as :meth:`curve` does, but None where the profile has none."""
        return self._by_key.get((collective, link, group_size))

    def _missing(self, collective: str, link: str, group_size: int) -> str:
        sizes = sorted(
            curve.group_size for curve in self.curves if (curve.collective, curve.link) == (collective, link)
        )
        if sizes:
            there = f"it has {collective} on {Resource(link)} for group size {', '.join(map(str, sizes))}"
        else:
            kinds = sorted({f"{curve.collective} on {curve.link}" for curve in self.curves})
            there = f"it has {', '.join(kinds) or 'no curves at all'}"
        topology = Topology.parse(self.topology)
        nodes, ranks = topology.num_nodes, max(map(len, topology.nodes))
        measurable = {("device", 1), *([("intra", ranks)] if ranks > 1 else []), *([("intra", 2)] if ranks > 2 else [])}
        measurable |= {("inter", topology.world_size), ("inter", nodes)} if nodes > 1 else set()
        if topology.world_size > 1 and (link, group_size) in measurable:
            advice = "Measure it on that cluster with `commlayer measure`, or plan with those"
        else:
            advice = (
                "Plan with those: `commlayer measure` measures all ranks, whole nodes, one rank of every node and two ranks of a "
                "node; those of other groups follow from them (`commlayer plan --group`)"
            )
        return (
            f"profile {self.name!r} ({self.topology}): expected a curve of {collective} on {link} for group size "
            f"{group_size}, got none; {there}. {advice}"
        )

    @property
    def measured_on(self) -> str:
        """The device whose links were measured, for people; empty where that is not said, as by published ones."""
        backend = self.environment.get("backend", "")
        return self.environment.get(MEASURED_ON) or {"gloo": "the CPU", "nccl": "CUDA devices"}.get(backend, "")

    @cached_property
    def node_rates(self) -> tuple[float, ...]:
        """The rate of each node's card, as a fraction of the usual one; empty where all are alike."""
        slow = {link.nodes[0]: link.rate for link in self.slow_links if len(link.nodes) == 1}
        return tuple(slow.get(node, 1.0) for node in range(Topology.parse(self.topology).num_nodes)) if slow else ()

    @cached_property
    def slow_pairs(self) -> tuple[tuple[int, int, float], ...]:
        """Two nodes each, the first one first, and the rate of the way between them, as a fraction of the usual one."""
        pairs = (link for link in self.slow_links if len(link.nodes) == 2)
        return tuple(sorted((min(link.nodes), max(link.nodes), link.rate) for link in pairs))

    def slowdown(self, resource: Resource, other: Resource) -> float:
        """Return how many times as long ``resource`` takes while ``other`` is busy; 1.0 where nothing is stored."""
        return self._slowdowns.get((resource, other), 1.0)

    @cached_property
    def error(self) -> float:
        """The median of the curves' hold-out errors, as a fraction; 0.0 when no curve states one."""
        errors = [curve.holdout_error for curve in self.curves if curve.holdout_error is not None]
        return median(errors) if errors else 0.0

    def to_json(self) -> str:
        """The file's text: one line per value, arrays in one line, a newline at the end."""
        return pretty(_content(self)) + "\n"

    def save(self, path: str | os.PathLike[str], *, new_only: bool = False, follow_links: bool = True) -> None:
        """Write the file in one step: a reader sees the old file or the new one, never a half, whoever else writes it.

        Args:
            new_only: refuse where there is a file of that name already: of several who write, the first one wins.
            follow_links: where ``path`` is a symbolic link, write what it points to; else the link is replaced.

        Raises:
            ProfileError: a fingerprint that does not belong to the content (made by other means than ``create``).
            OSError: the file system refuses. FileExistsError: ``new_only``, and there is a file.
        """
        _check_fingerprint(self, str(path))
        write_file(path, self.to_json(), new_only=new_only, follow_links=follow_links)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read and check one profile file. Never waits: a FIFO or a device is refused.

    Raises:
        ProfileNotFoundError: no such file.
        ProfileError: a file that cannot be read, or is no sound profile of this version: names file, field and reason.
    """
    where = shortened(os.fspath(path))
    try:
        data = read_file(path)
    except FileNotFoundError as error:
        raise ProfileNotFoundError(
            f"{where}: expected a profile, got no such file. `commlayer profiles list` shows those shipped"
        ) from error
    except OSError as error:
        raise ProfileError(f"{where}: cannot read the profile: {error.strerror or error}") from error
    return parse_profile(data, where)


def parse_profile(data: bytes | str, where: str) -> Profile:
    """Check the text of a profile; ``where`` (a path, say) begins every message.

    Raises:
        ProfileError: text that is not a sound profile of this version: names the field and the reason.
    """
    content = parse_object(data, where)
    require_field(content, "format", PROFILE_FORMAT, where, ": this is not a commlayer profile", ProfileError)
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ProfileError(
            f"{where}: field version: expected at most {VERSION}, got {shortened(str(version))}: a newer commlayer wrote this "
            "profile. Upgrade commlayer, or measure again with this one"
        )
    require_field(content, "version", VERSION, where, refused=ProfileError)
    profile = _convert(content, where)
    _check_fingerprint(profile, where)
    return profile


def check_shape(profile: Profile, topology: Topology) -> None:
    """Refuse a profile of another cluster shape.

    Raises:
        ProfileMismatchError: names both shapes.
    """
    if profile.topology != topology.shape:
        raise ProfileMismatchError(
            f"expected a profile of this cluster's shape {topology.shape}, got {profile.name!r} of shape "
            f"{profile.topology}. Measure this cluster with `commlayer measure`, or choose a profile of its shape "
            "(`commlayer profiles list`)"
        )


def _convert(content: Any, where: str) -> Profile:
    return convert(content, Profile, where, _ALLOWED)


def _refuse_twins(field: str, keys: list[Any]) -> None:
    for i, key in enumerate(keys):
        if key in keys[:i]:
            name = " ".join(map(str, key))
            raise ProfileError(f"{field}[{i}]: expected {name} once, got it again after {field}[{keys.index(key)}]")


def _content(profile: Profile) -> dict[str, Any]:
    """The content of the file. Profiles without what came later are as they were before there were such fields."""
    content: dict[str, Any] = msgspec.to_builtins(profile)
    for later in ("plan_from_bytes", "slow_links"):
        if not content[later]:
            del content[later]
    return content


def _fingerprint(profile: Profile) -> str:
    import hashlib  # lazy: it loads OpenSSL, and what plans on no file needs none

    content = _content(profile)
    del content["fingerprint"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _check_fingerprint(profile: Profile, where: str) -> None:
    expected = _fingerprint(profile)
    if profile.fingerprint != expected:
        raise ProfileError(
            f"{where}: field fingerprint: damaged or edited: expected {expected}, got {shortened(profile.fingerprint)}. Restore "
            "the file, measure again, or make an edited copy with Profile.replace"
        )
