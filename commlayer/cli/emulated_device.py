"""The words of ``commlayer emulate`` on emulated accelerators: which device ranks stand for, and
whether this machine kept up."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlayer.emulation import Accelerator, DeviceReport

from commlayer.profiles.counted import counted

__all__ = ["describe_computation", "describe_device"]

_LATE_SHARE = 0.05
"""Where lateness adds so much to a rank's operations, a larger scale is suggested."""
_FULL_CORES = 0.8


def describe_device(accelerator: Accelerator | None) -> str:
    """Say, behind the description of the links, which device the ranks stand for."""
    if accelerator is None:
        return ""
    scale = accelerator.scale
    slower = "" if scale == 1 else f"; accelerators and wires run {scale:g} times slower than that (time dilation)"
    return f"; each rank {accelerator}{slower}; NOT a measurement of one"


def describe_computation(
    accelerator: Accelerator, reports: Sequence[DeviceReport], num_ranks: int, took_s: float
) -> str:
    """Say what the accelerators did, by rank, what was late, and what to do about it."""
    scale = accelerator.scale
    lines = [f"took {took_s:.2f} s" + ("" if scale == 1 else f", {_time(took_s / scale)} of the cluster's time")]
    if len(reports) < num_ranks:
        lines.append(
            f"{len(reports)} of {counted(num_ranks, 'rank')} report an emulated accelerator: the others loaded no "
            "torch, or did not end by themselves"
        )
    lines += [_line(report, scale) for report in reports]
    worst = max(reports, key=lambda report: report.slowness, default=None)
    if worst is not None and worst.slowness > 1 + _LATE_SHARE:
        lines.append(
            f"LATE: on this machine operations take up to {worst.slowness:.2f} times as long as declared (rank {worst.rank}): "
            f"--scale {_enough(scale * worst.slowness)} gives them time"
        )
    longest_s = max((report.wall_s for report in reports), default=0.0)
    all_cores_s = longest_s * len(os.sched_getaffinity(0))
    cores = sum(report.cpu_s for report in reports) / all_cores_s if longest_s > 0 else 0.0
    if cores > _FULL_CORES:
        lines.append(
            f"the ranks used {cores:.0%} of this machine's cores: what waits for a core is not emulated. --scale "
            f"{_enough(scale * cores / (_FULL_CORES / 2))} halves that"
        )
    return "\n".join(lines)


def _line(report: DeviceReport, scale: float) -> str:
    share = report.late / report.operations if report.operations else 0.0
    late = f"{share:.1%} of them late, by {_time(report.late_s)} in all" if report.late else "none late"
    busy = _time(report.busy_s) + ("" if scale == 1 else f" ({_time(report.busy_s / scale)} of the cluster's time)")
    return (
        f"rank {report.rank}: {report.operations} operations, {report.flops:.3g} FLOPs, busy for {busy} of "
        f"{_time(report.wall_s)}; {late}; {_time(report.cpu_s)} of a core"
    )


def _enough(scale: float) -> str:
    """A little more than ``scale``, in two digits."""
    unit = 10 ** (math.floor(math.log10(scale)) - 1)
    return f"{math.ceil(1.1 * scale / unit) * unit:g}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
