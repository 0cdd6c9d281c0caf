"""The checks of lanes in ``commlayer doctor``: by what means higher traffic goes first here, and
which of them are not active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT, LANES
from commlayer.transport.foreign_variables import OFF, Verdict

__all__ = ["at_hand", "lane_lines"]

Line = tuple[Verdict, str, str, str]
"""The type of a line of the output: (mark, name, value, advice)."""

_ON_CUDA = (
    *("CUDA streams", "CUDA holds", "traffic class", "CTA limits"),
    *("launch order", "launch queues", "launch mode"),
)
_ORDER_SINCE = (2, 26)
_OF_ALL = ("NCCL_IB_TC", "NCCL_IB_SL")
"""NCCL's variables that give all communicators one traffic class, and one service level."""


def lane_lines(
    environment: Mapping[str, str],
    nccl_version: Sequence[int] | None,
    config_fields: Set[str],
    *,
    is_on: bool = True,
    share: float = 0.05,
) -> list[Line]:
    """Make one line for each means. Pure: what is at hand is passed in.

    ``nccl_version``: such as (2, 28, 9); None where there is no CUDA device or no NCCL.
    ``config_fields``: what this torch can set of NCCL's configuration. ``is_on``, ``share``: the
    settings.
    """
    order = " before ".join(
        " and ".join(lane for lane in LANES if LANES[lane] == level) for level in sorted(set(LANES.values()))
    )
    lines: list[Line] = [("ok", "order", order, "MoNTA's, EP ≪ PP ≪ CP ≪ DP; tp stays inside nodes")]
    if not is_on:
        advice = "no traffic goes before other traffic: unset COMMLAYER_LANES, or set it to on"
        lines.append(("warn", "lanes", "off", advice))
    else:
        what = f"chunk edges, {CHUNKS_IN_FLIGHT} chunks of a call in flight, a share of {share:.0%} kept"
        lines.append(("ok", "CPU (Gloo)", what, "lower lanes wait at the edges of their chunks, and not for ever"))
    if nccl_version is None:
        return [*lines, *(("ok", name, "not active: no CUDA here", "") for name in _ON_CUDA)]
    return [
        *lines,
        _streams(environment, is_on=is_on),
        _holds(environment, is_on=is_on),
        _traffic_class(environment, nccl_version, config_fields),
        _ctas(environment, nccl_version, config_fields, is_on=is_on),
        _launch_order(environment, nccl_version),
        _queues(environment),
        _mode(environment),
    ]


def _streams(environment: Mapping[str, str], *, is_on: bool) -> Line:
    from commlayer.transport.nccl import is_high_priority

    if _is_set(environment, "TORCH_NCCL_HIGH_PRIORITY"):
        advice = "TORCH_NCCL_HIGH_PRIORITY is set: unset it to tell lanes apart"
        return ("warn", "CUDA streams", "all of high priority", advice)
    if not is_on:
        return ("ok", "CUDA streams", "not active: lanes are off", "")
    high = ", ".join(lane for lane in LANES if is_high_priority(lane))
    advice = "two levels are all that torch gives NCCL; a kernel that runs is not stopped, so chunk edges do the rest"
    return ("ok", "CUDA streams", f"high priority for {high}", advice)


def _holds(environment: Mapping[str, str], *, is_on: bool) -> Line:
    from commlayer.devices.accelerator import why_no_holds

    name, why = "CUDA holds", why_no_holds("cuda", environment)
    if not is_on:
        return ("ok", name, "not active: lanes are off", "")
    if why:
        return ("warn", name, "not active", why)
    advice = "planned calls of lower lanes wait on the device while planned calls of higher ones are under way; the host does not"
    return ("ok", name, "chunk edges, one chunk of each communicator in flight", advice)


def _traffic_class(environment: Mapping[str, str], nccl_version: Sequence[int], config_fields: Set[str]) -> Line:
    name = "traffic class"
    if missing := _missing("traffic_class", nccl_version, config_fields):
        advice = "NCCL_IB_TC sets one class for all communicators"
        return ("ok", name, f"not active: {missing}", advice)
    if of_all := [f"{variable}={environment[variable]}" for variable in _OF_ALL if variable in environment]:
        value = f"one for all lanes: {', '.join(of_all)}"
        return ("ok", name, value, "unset it to give each lane a class of its own")
    return ("ok", name, "not active: none is set", "give lanes the classes that the fabric's operator has set up")


def _ctas(
    environment: Mapping[str, str],
    nccl_version: Sequence[int],
    config_fields: Set[str],
    *,
    is_on: bool,
) -> Line:
    from commlayer.transport.nccl import LOWER_LANE_CTAS, is_high_priority

    name = "CTA limits"
    missing = _missing("max_ctas", nccl_version, config_fields)
    if missing or not is_on:
        return ("ok", name, f"not active: {missing or 'lanes are off'}", "")
    lower = ", ".join(lane for lane in LANES if not is_high_priority(lane))
    for variable in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):  # the second is the first one's older name
        if variable in environment:
            what = (
                f"{variable}={environment[variable]} limits all lanes, whatever the {LOWER_LANE_CTAS} are for {lower}"
            )
            return ("warn", name, "overridden", f"{what}: unset it")
    return ("ok", name, f"{LOWER_LANE_CTAS} for {lower}", "so that a kernel of a higher lane finds room beside theirs")


def _launch_order(environment: Mapping[str, str], nccl_version: Sequence[int]) -> Line:
    name, is_set = "launch order", _is_set(environment, "NCCL_LAUNCH_ORDER_IMPLICIT")
    if is_set and tuple(nccl_version) < _ORDER_SINCE:
        value = f"not active: NCCL {_dotted(nccl_version)} has no NCCL_LAUNCH_ORDER_IMPLICIT (2.26 and later)"
        return ("warn", name, value, "unset it: lower lanes are not held where it is set")
    if is_set:
        advice = (
            "kernels of all communicators begin in the order of the program, so none goes before one that was launched earlier: "
            "unset NCCL_LAUNCH_ORDER_IMPLICIT where the device has room for two kernels of each planned group at a time"
        )
        return ("warn", name, "the program's (NCCL_LAUNCH_ORDER_IMPLICIT)", advice)
    advice = (
        "all ranks launch in the order of the program, and kernels begin when they can: the device needs room for two of each "
        "planned group at a time (NCCL_LAUNCH_ORDER_IMPLICIT=1 would make it one order, and lanes no difference)"
    )
    return ("ok", name, "the streams' own", advice)


def _queues(environment: Mapping[str, str]) -> Line:
    value = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value is not None and value.strip() == "1":
        advice = (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams in one queue, so that nothing goes before: unset it, or 8"
        )
        return ("warn", "launch queues", "1", advice)
    return ("ok", "launch queues", value or "CUDA's default, 8", "")


def _mode(environment: Mapping[str, str]) -> Line:
    mode = environment.get("NCCL_LAUNCH_MODE", "").strip().upper()
    if mode == "GROUP":
        advice = "NCCL launches kernels of a process's devices together (deprecated since 2.9): unset NCCL_LAUNCH_MODE"
        return ("warn", "launch mode", "GROUP", advice)
    return ("ok", "launch mode", mode or "NCCL's default, PARALLEL", "")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _missing(field: str, nccl_version: Sequence[int], config_fields: Set[str]) -> str:
    """Why a field of NCCL's configuration cannot be set; empty where it can."""
    from commlayer.transport.nccl import CONFIG_SINCE

    least = CONFIG_SINCE[field]
    if tuple(nccl_version) < least:
        return f"NCCL {_dotted(nccl_version)} cannot, {_dotted(least)} and later can"
    return "" if field in config_fields else "this torch was built without it"


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() not in ("", *OFF)


def at_hand(torch: Any) -> tuple[tuple[int, ...] | None, Set[str]]:
    """Return NCCL's version and the fields that this torch can set of it; (None, nothing) without
    CUDA."""
    from commlayer.transport.c10d import is_usable
    from commlayer.transport.nccl import config_fields

    if not is_usable():
        return None, frozenset()
    return tuple(torch.cuda.nccl.version()[:3]), config_fields()
