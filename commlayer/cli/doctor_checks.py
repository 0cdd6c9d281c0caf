"""The checks of ``commlayer doctor``. Each returns findings and never raises for what it finds."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from commlayer import __version__
from commlayer.cli.cache_checks import cache_lines
from commlayer.profiles.errors import CommlayerError, SettingsError
from commlayer.settings import Settings
from commlayer.transport.foreign_variables import Verdict, variable_findings

__all__ = ["Finding", "all_findings"]

_Lines: TypeAlias = list[tuple[Verdict, str, str, str]]
"""The findings of a section: mark, name, value and advice."""


class Finding(msgspec.Struct, frozen=True):
    """One line: ``mark`` is "ok", "warn" (works, but) or "bad" (does not work); ``advice`` says
    what to do or why."""

    section: str
    mark: Verdict
    name: str
    value: str
    advice: str


def all_findings() -> list[Finding]:
    """Everything that is known about this machine; imports torch."""
    from commlayer.cli.interfaces import gloo_address, interfaces

    choice = gloo_address()
    mark: Verdict = "bad" if choice.is_wrong else "warn" if choice.advice else "ok"
    sections = {
        "Versions": _versions(),
        "torch.distributed and GPUs": _torch(),
        "Network": [
            *(("ok", f"interface {each.name}", each.describe(), "") for each in interfaces()),
            (mark, "gloo would use", choice.describe(), choice.advice),
        ],
        "Emulated cluster": _emulation(),
    }
    settings, is_sound = Settings(), True
    try:
        settings = Settings.from_environment()
        sections["Settings"] = _settings(settings)
    except SettingsError as error:
        is_sound, advice = False, "correct or unset it: every command and rank refuses it"
        sections["Settings"] = [("bad", "COMMLAYER_*", str(error), advice)]
    sections["Lanes"] = _lanes(settings)
    sections["Environment variables"] = variable_findings(os.environ)
    if is_sound:
        sections["What would be chosen"] = _choice(settings)
        sections["Cached profiles"] = cache_lines(settings)
    return [Finding(section, *line) for section, lines in sections.items() for line in lines]


_CORE = ("torch", "numpy", "scipy", "click", "rich", "msgspec")
_MINIMUM = re.compile(r"\s*([\w.-]+)\s*>=\s*([\w.]+)\s*")
_EXTRAS = {
    "pyroute2": (("pyroute2",), "the emulated cluster needs it: pip install 'pyroute2>=0.8'"),
    "matplotlib": (("matplotlib",), "figures need it: pip install 'matplotlib>=3.8'"),
    "cupy": (("cupy-cuda13x", "cupy-cuda12x", "cupy"), "only for CUDA: pip install cupy-cuda12x, or cupy-cuda13x"),
}


def _installed(*names: str) -> str | None:
    for name in names:
        for distribution in metadata.distributions(name=name):
            return distribution.version
    return None


def _versions() -> _Lines:
    kernel = f"{platform.system()} {platform.release()}, {platform.machine()}"
    lines: _Lines = [
        ("ok", "commlayer", __version__, ""),
        ("ok" if sys.version_info >= (3, 10) else "bad", "python", platform.python_version(), ""),
        ("ok", "kernel", kernel, ""),
    ]
    try:
        requirements = metadata.requires("commlayer") or []
    except metadata.PackageNotFoundError:  # run from a folder of sources
        requirements = []
    # The least versions that this installation asks for, extras aside.
    matches = [_MINIMUM.fullmatch(requirement) for requirement in requirements]
    minimums = {match[1].lower(): match[2] for match in matches if match is not None}
    for name in _CORE:
        version, least = _installed(name), minimums.get(name)
        wanted = f"{name}>={least}" if least else name
        if version is None:
            lines.append(("bad", name, "not installed", f"pip install '{wanted}'"))
        elif least is not None and _numbers(version) < _numbers(least):
            lines.append(("bad", name, version, f"too old: pip install '{wanted}'"))
        else:
            lines.append(("ok", name, version, ""))
    for name, (packages, advice) in _EXTRAS.items():
        version = _installed(*packages)
        mark: Verdict = "ok" if version or name == "cupy" else "warn"
        lines.append((mark, name, version or "not installed", "" if version else advice))
    return lines


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _torch() -> _Lines:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001  a broken torch raises anything; that is a finding
        return [("bad", "import torch", f"{type(error).__name__}: {error}", "reinstall torch")]
    if not dist.is_available():
        return [("bad", "torch.distributed", "not built in", "install a torch with distributed support")]
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available", bool)()]
    usable = "gloo" in backends or "nccl" in backends
    advice = "" if usable else "commlayer runs over gloo (CPU) or nccl (CUDA): install a torch with one of them"
    lines: _Lines = [("ok" if usable else "bad", "backends", ", ".join(backends) or "none", advice), *_devices(torch)]
    if "nccl" in backends:
        version = torch.cuda.nccl.version()
        is_old, advice = version < (2, 26), "what it does for lanes is said below"
        if is_old:
            advice = "before 2.26 nothing keeps several communicators of one device in one order: only the program does"
        lines.append(("warn" if is_old else "ok", "NCCL", ".".join(map(str, version)), advice))
    return lines


def _devices(torch: Any) -> _Lines:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [
            ("ok", f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}", "")
            for index, gpu in enumerate(properties)
        ]
    if torch.version.cuda is None:
        why = "this torch is built without CUDA"
    elif (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        why = f"none is visible with CUDA_VISIBLE_DEVICES={visible!r}"
    else:
        why = "no GPU, or no driver for this torch"
    return [("warn", "GPU", f"no CUDA device: {why}", "ranks move CPU tensors over gloo, which needs none")]


def _emulation() -> _Lines:
    from commlayer.emulation import rights

    granted = rights()
    nodes = "granted" + (" by a user namespace" if granted.user_namespace else "") if granted.netns else "not granted"
    delays = {"netem": "by the kernel (sch_netem)", "relay": "by a relay process (the kernel has no sch_netem)"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _first_line("/sys/fs/cgroup/cpu.max").split()  # what the control group grants, where it says so
    quota = int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else cores
    usable = min(cores, quota)
    fallback = f"{granted.reason}. Without it ranks run on loopback, unshaped" if granted.reason else ""
    shared = "all ranks share it: their copies slow each other down, which the measured profile contains"
    rates, delay = granted.shaping, granted.delay
    return [
        ("ok" if granted.netns else "warn", "network namespaces", nodes, fallback),
        ("ok" if rates else "warn", "rates", "token bucket (sch_tbf)" if rates else "cannot be shaped", ""),
        ("ok" if delay != "none" else "warn", "delays", delays.get(delay, "cannot be made"), ""),
        ("ok", "default qdisc", _first_line("/proc/sys/net/core/default_qdisc") or "not known", ""),
        ("ok" if usable >= 2 else "warn", "CPU", f"{usable:g} of {os.cpu_count()} cores", shared),
    ]


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except OSError:  # another kernel, or a container that hides it
        return ""


def _settings(settings: Settings) -> _Lines:
    default, lines = Settings(), _Lines()
    for name in Settings.__dataclass_fields__:
        value = getattr(settings, name)
        origin = "default" if value == getattr(default, name) else f"from COMMLAYER_{name.upper()}"
        lines.append(("ok", name, "not set" if value is None else str(value), origin))
    return lines


def _lanes(settings: Settings) -> _Lines:
    from commlayer.cli.lane_checks import at_hand, lane_lines

    try:
        import torch

        version, fields = at_hand(torch)
    except Exception:  # noqa: BLE001  _torch has said what is wrong
        version, fields = None, frozenset[str]()
    return lane_lines(os.environ, version, fields, is_on=settings.lanes != "off", share=settings.lane_share)


_SAMPLE_BYTES = 16 * 2**20
"""The size for which ``doctor`` says what would be chosen."""


def _choice(settings: Settings) -> _Lines:
    """Which profile a Communicator would take here, and what it would choose."""
    from commlayer.cli.traffic_options import traffic_for
    from commlayer.profiles import catalog
    from commlayer.scheduler.decision import choose
    from commlayer.units import format_bytes

    name, what = settings.profile, f"{format_bytes(_SAMPLE_BYTES)} a rank"
    if not name:
        advice = (
            "measure this cluster: torchrun … commlayer measure -o cluster.json (or commlayer measure --emulate 2x4), then "
            "set COMMLAYER_PROFILE=cluster.json or pass profile=. Without one a Communicator refuses to guess"
        )
        return [("warn", "profile", "none set", advice)]
    if name in _NOT_PROFILES:
        return [("ok", "profile", name, f"{_NOT_PROFILES[name]}; a Communicator wants a profile's name")]
    try:
        profile = catalog.load_profile(name)
    except CommlayerError as error:
        return [("bad", "profile", name, str(error))]
    doubt = _DOUBTS.get(profile.kind, "")
    where = f", measured on {profile.measured_on}" if profile.measured_on else ""
    about = f"{profile.name}: {profile.kind}, {profile.topology}{where}"
    lines: _Lines = [("warn" if doubt else "ok", "profile", about, doubt)]
    lines += [("warn", "slow link", str(each), _CARD if len(each.nodes) == 1 else _WAY) for each in profile.slow_links]
    try:
        decision = choose(traffic_for(profile, _SAMPLE_BYTES), profile)
        lines.append(("ok", what, decision.plan.name, decision.reason()))
    except CommlayerError as error:  # an uneven cluster, a curve that is missing
        lines.append(("warn", what, "nothing", str(error)))
    return lines


_NOT_PROFILES = {
    "auto": "the backend takes the profile that it has kept of this cluster, or measures one when a job first starts",
    "none": "the backend plans nothing, and every call is the flat one",
}
"""The words that COMMLAYER_PROFILE can say besides a profile's name or path."""
_CARD = "look at its card, cable and driver, or leave it out; all_reduces over three nodes or more spare it meanwhile"
_WAY = (
    "look at the cables and switches between them; on four nodes or more all_reduce, all_gather and reduce_scatter go round the "
    "nodes in an order that avoids it meanwhile, where that is faster and there is such an order"
)
_DOUBTS = {
    "published": "from published peaks, not measured: plans are only as good",
    "paper": "from a paper's cluster, not measured here",
    "emulated": "of emulated links: not for a real cluster",
}
