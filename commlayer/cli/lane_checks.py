"""The checks of lanes in ``commlayer doctor``: by what means higher traffic goes first here, and which
variables undo that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT, LANES
from commlayer.transport.foreign_variables import OFF, Verdict

__all__ = ["at_hand", "lane_lines"]

Line = tuple[Verdict, str, str, str]
"""The type of a line of the output: (mark, name, value, advice)."""

_UNDOING = {
    "TORCH_NCCL_HIGH_PRIORITY": "all of NCCL's streams have high priority: unset it to tell lanes apart",
    "NCCL_MAX_CTAS": "limits the thread blocks of all lanes alike: unset it",
    "NCCL_MAX_NCHANNELS": "limits the thread blocks of all lanes alike: unset it",
    "NCCL_IB_TC": "one traffic class for all lanes: unset it to give each lane its own",
    "NCCL_IB_SL": "one service level for all lanes: unset it to give each lane a class of its own",
}
"""Variables that go before what a lane sets. Those that keep streams from being held are named by
:func:`commlayer.devices.accelerator.why_no_holds`."""


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
        return [*lines, ("warn", "lanes", "off", advice)]
    what = f"chunk edges, {CHUNKS_IN_FLIGHT} chunks of a call in flight, a share of {share:.0%} kept"
    lines.append(("ok", "CPU (Gloo)", what, "lower lanes wait at the edges of their chunks, and not for ever"))
    if nccl_version is None:
        return [*lines, ("ok", "CUDA", "not active: no CUDA here", "")]
    from commlayer.devices.accelerator import why_no_holds
    from commlayer.transport.nccl import CONFIG_SINCE, LOWER_LANE_CTAS, is_high_priority

    high = ", ".join(lane for lane in LANES if is_high_priority(lane))
    lower = ", ".join(lane for lane in LANES if not is_high_priority(lane))
    advice = "a kernel that runs is not stopped: chunk edges do the rest"
    lines.append(("ok", "CUDA streams", f"high priority for {high}", advice))
    if why := why_no_holds("cuda", environment):
        lines.append(("warn", "CUDA holds", "not active", why))
    else:
        advice = "planned calls of lower lanes wait on the device while higher ones are under way; the host does not"
        lines.append(("ok", "CUDA holds", "chunk edges, one chunk of each communicator in flight", advice))
    by_field = {
        "traffic_class": ("traffic class", "that of a lane to which the program gives one"),
        "max_ctas": ("CTA limits", f"{LOWER_LANE_CTAS} for {lower}"),
    }
    for field, (name, value) in by_field.items():
        missing = "" if field in config_fields else "this torch was built without it"
        if tuple(nccl_version) < CONFIG_SINCE[field]:
            present, needed = (".".join(map(str, version)) for version in (nccl_version, CONFIG_SINCE[field]))
            missing = f"NCCL {present} cannot, {needed} and later can"
        lines.append(("ok", name, f"not active: {missing}" if missing else value, ""))
    undoing = [name for name in _UNDOING if environment.get(name, "").strip().lower() not in ("", *OFF)]
    return [*lines, *(("warn", name, environment[name], _UNDOING[name]) for name in undoing)]


def at_hand(torch: Any) -> tuple[tuple[int, ...] | None, Set[str]]:
    """Return NCCL's version and the fields that this torch can set of it; (None, nothing) without
    CUDA."""
    from commlayer.transport.c10d import is_usable
    from commlayer.transport.nccl import config_fields

    if not is_usable():
        return None, frozenset()
    return tuple(torch.cuda.nccl.version()[:3]), config_fields()
