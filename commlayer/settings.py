"""The settings, each of which has an environment variable ``COMMLAYER_<NAME>`` and a field here.
Nothing is read at import.

An unknown ``COMMLAYER_`` variable is an error: a misspelt setting that is silently ignored costs
its user a day.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from sys import float_info
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from commlayer.profiles.errors import SettingsError, UsageError
from commlayer.scheduler.lanes import LANES
from commlayer.scheduler.named_plans import AUTO, plan_words
from commlayer.scheduler.wire import WireFormat, parse_wire

__all__ = ["MOST_CONNECTIONS", "Settings"]

_PREFIX = "COMMLAYER_"
_EMULATED = ("EMULATED", "EMULATED_LINKS", "EMULATED_COMPUTE", "EMULATED_REPORTS")
"""Set by the emulated cluster in the environment of its ranks; not settings."""
MOST_CONNECTIONS = 32
"""Connections from a rank to another one, at most: what many more would add is descriptors."""
_FOLDER = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z"
_NAMES = {"as_backend": "AS"}
"""Variables that are not simply their field in capitals."""

# Ranges of fields. The description is what a message says that the variable must be.
_POSITIVE = Meta(gt=0, le=float_info.max, description="a positive number of seconds")
_WAIT = Meta(ge=0, le=float_info.max, description="a number of seconds, 0 for never")
_SHARE = Meta(gt=0, le=1, description="a number, more than 0 and at most 1")
_RING = Meta(ge=0, le=1 << 20, description=f"a number of calls, 0 to {1 << 20}")
_CONNECTIONS = Meta(
    ge=1,
    le=MOST_CONNECTIONS,
    description=f"a whole number from 1 to {MOST_CONNECTIONS}, or unset for one",
)
_SHADOW = Meta(
    ge=1,
    le=1_000_000_000,
    description="a whole number from 1 (every planned call runs flat too) to 1000000000, or unset",
)
_REPLICA = Meta(
    pattern=_FOLDER,
    description="the name of a folder, in 100 letters, digits, dots, dashes and underscores "
    "at most, the first a letter or digit",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a process, which the environment gives.

    Attributes:
        profile: a profile's name in the catalogue, or a path to its JSON file; for the backend also
            ``auto`` (its default: the cached profile of this cluster, else a probe) and ``none``
            (nothing is planned).
        topology: the topology, declared instead of discovered: ``2x4`` is two nodes of four ranks.
        timeout_s: the longest wait in one collective of a Communicator, seconds (the backend's
            groups have torch's own).
        debug: ``off``, or ``detail`` to compare every call across ranks before it moves a byte.
        emulation: ``auto``, ``netns`` or ``loopback``.
        plan: one plan for every call of the backend to which it applies, such as ``hierarchical``
            or ``pipelined:4`` (tests, comparisons); ``tried``: plans take turns in the first calls
            of a group; ``auto``, which is None here: the profile decides.
        reduction: ``native``, or ``ordered`` for FP32 sums in rank order.
        intra: how CPU ranks of one node send to each other: through ``shared`` memory, by ``gloo``,
            or ``auto``: shared memory where they have it, except on an emulated cluster whose
            inside is shaped.
        connections: over how many connections the parts of a large message go from a rank to one on
            another node, where a plan sends it (docs/plans.md); None: one, or as many as a group's
            first calls find to be fastest (``plan`` ``tried``).
        stats: ``1`` prints :func:`commlayer.stats` and :func:`commlayer.audit` at exit.
        as_backend: (``COMMLAYER_AS``) ``gloo`` or ``nccl``, the name under which trainers get this
            backend that accept only names they know.
        cache: the folder of measured profiles.
        wire: formats in which a lane's tensors may cross the links where the program does not say
            it, such as ``dp=bf16,tp=fp8_e4m3`` (docs/compression.md).
        lanes: ``auto`` cuts the calls of groups that the program has put on a lane, ``on`` also
            those of groups that are only described as one's, ``off``: no traffic goes before other
            traffic (docs/lanes.md).
        lane_share: the share of the link that a lower lane keeps while higher ones have work
            without end.
        trials: ``auto`` runs the plans that contend for a group's call, in its first calls and for
            0.3 s as predicted, where the profile's error is too large to tell which is the fastest;
            ``on``: however small it is; ``off``: the profile decides.
        replan: ``on`` has ranks time their links when calls have become slower or faster, and plan
            by what they find, while the job runs; ``audit`` says so and leaves plans as they are;
            ``off``: nobody compares (docs/replanning.md).
        audit: the folder into which every rank writes what its calls were promised to take and
            took, for ``commlayer audit``, every half a minute and at exit (docs/audit.md).
        shadow: of how many planned calls of each group one runs flat too, and is compared
            (docs/shadow.md); None: none.
        trace: the folder into which every rank writes what it did and when, for ``commlayer trace``
            and Perfetto (docs/tracing.md).
        routing: the folder into which one rank of each expert group writes how many tokens its
            layers' experts got, at exit, for ``commlayer routing`` (docs/placement.md).
        ring: how many of its last calls each rank remembers, for who asks what a job that hangs
            waits for; 0: none (docs/diagnose.md).
        long_wait_s: after how many seconds in one call of the backend a rank that waits prints for
            whom (60); 0: never (docs/diagnose.md).
        replica: the name of the replica that this job is, where several write into the same
            folders: each then has a folder of that name there, and what is printed at exit names
            it. Where torchft's ``REPLICA_GROUP_ID`` is set and this is not, ``replica-`` and that.
        diagnose_dir: the folder into which ranks write what they remember, when a call times out or
            on SIGUSR1; without it, one of the job's own in the machine's folder of temporary files.
    """

    profile: str | None = None
    topology: str | None = None
    timeout_s: Annotated[float, _POSITIVE] = 300.0
    debug: Literal["off", "detail"] = "off"
    emulation: Literal["auto", "netns", "loopback"] = "auto"
    plan: str | None = None
    reduction: Literal["native", "ordered"] = "native"
    intra: Literal["auto", "gloo", "shared"] = "auto"
    connections: Annotated[int, _CONNECTIONS] | None = None
    stats: Literal["0", "1"] = "0"
    as_backend: Literal["gloo", "nccl"] | None = None
    cache: str | None = None
    wire: str | None = None
    lanes: Literal["auto", "on", "off"] = "auto"
    lane_share: Annotated[float, _SHARE] = 0.05
    trials: Literal["auto", "on", "off"] = "auto"
    replan: Literal["on", "off", "audit"] = "on"
    audit: str | None = None
    shadow: Annotated[int, _SHADOW] | None = None
    trace: str | None = None
    routing: str | None = None
    ring: Annotated[int, _RING] = 1024
    long_wait_s: Annotated[float, _WAIT] = 60.0
    diagnose_dir: str | None = None
    replica: Annotated[str, _REPLICA] | None = None

    def __post_init__(self) -> None:
        for name, (kind, expected) in _KINDS.items():
            if (value := getattr(self, name)) is None:
                continue
            try:
                object.__setattr__(self, name, msgspec.convert(_number(value, kind), kind, strict=False))
            except msgspec.ValidationError:
                message = f"{_variable(name)} must be {expected}, got {value!r}"
                raise SettingsError(message) from None
        if not self.plan:  # a variable that is set to nothing says nothing
            object.__setattr__(self, "plan", None)
        else:
            words = plan_words(self.plan)
            object.__setattr__(self, "plan", None if words == AUTO else words)
        self.wires()

    def in_replica(self, folder: str | None) -> str | None:
        """Return where this job's files go, of those that go to ``folder``: a folder of its
        replica's name, if it has one."""
        return folder if folder is None or self.replica is None else str(Path(folder) / self.replica)

    def wires(self) -> dict[str, tuple[WireFormat, ...]]:
        """Return the formats that ``wire`` allows each lane that it names. Raises SettingsError for
        what names none."""
        formats: dict[str, tuple[WireFormat, ...]] = {}
        for entry in (self.wire or "").split(","):
            lane, sign, text = (word.strip() for word in entry.partition("="))
            if not lane and not sign:
                continue
            if lane not in LANES or not sign or lane in formats:
                raise SettingsError(
                    "COMMLAYER_WIRE must be lane=format, several separated by commas, each lane once, such as "
                    f"dp=bf16,ep=fp8_e4m3; lanes: {', '.join(LANES)}; got {entry.strip()!r}"
                )
            try:
                formats[lane] = parse_wire(text)
            except UsageError as error:
                raise SettingsError(f"COMMLAYER_WIRE, lane {lane}: {error}") from error
        return formats

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables ``COMMLAYER_*``. Raises SettingsError for an unknown variable or a
        malformed value."""
        environment = os.environ if environment is None else environment
        known = {_variable(field.name).removeprefix(_PREFIX): field.name for field in fields(cls)}
        values: dict[str, str] = {}
        for variable, value in environment.items():
            name = variable.removeprefix(_PREFIX)
            if name in (variable, *_EMULATED):
                continue
            if name not in known:
                close = get_close_matches(name, known, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {_PREFIX}{close[0]}?" if close else f"known: {', '.join(_PREFIX + k for k in known)}"
                )
                raise SettingsError(f"unknown variable {variable}; {hint}")
            values[known[name]] = value
        torchfts = environment.get("REPLICA_GROUP_ID")
        if torchfts is not None and re.match(_FOLDER, f"replica-{torchfts}"):
            values.setdefault("replica", f"replica-{torchfts}")
        return cls(**values)  # type: ignore[arg-type]  # the names were checked above


def _variable(name: str) -> str:
    return _PREFIX + _NAMES.get(name, name.upper())


def _number(value: object, kind: Any) -> object:
    """The number in a text where ``kind`` is one's, such as ``.05`` or ``008``, which msgspec does
    not read; other values as they are, digits of other scripts too."""
    if not isinstance(value, str) or not value.isascii() or not {int, float}.intersection(get_args(kind)):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return value if not isfinite(number) else int(number) if number.is_integer() else number


def _kind(hint: Any) -> tuple[Any, str] | None:
    """Return the type that a field's values are checked against, without None, and that type in
    words.

    None where any text will do.
    """
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            return part, next(str(each.description) for each in part.__metadata__)
        if get_origin(part) is Literal:
            return part, f"one of {', '.join(get_args(part))}"
    return None


_KINDS = {
    name: kind
    for name, hint in get_type_hints(Settings, include_extras=True).items()
    if (kind := _kind(hint)) is not None
}
