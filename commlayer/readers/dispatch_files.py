"""Times of DeepEP's normal kernels from aiconfigurator's tables, as dispatch kernels that were measured.

Source: ai-dynamo/aiconfigurator 095f58a, aic-core's systems/data/*/comm/sglang/*/
wideep_deepep_normal_perf.parquet, and the collectors under collector/wideep/sglang. Of a row ``node_num``
counts full nodes, of 8 GPUs, or of 4 with a Grace (collect_deepep_normal.py); ``num_token`` those of a
rank; a time is of one call whose layout is known, the kernels' own (``transmit``) and what they wait
for counts (``notify``), by the best sizes of chunks. Rows that are dispatched are FP8 with scales, where
DeepEP was built for them (extract_data.py takes no others), and come home in BF16. The network between
nodes is not named.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import replace

import msgspec

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.links import Resource
from commlayer.profiles.strict_json import convert
from commlayer.readers.table_files import table_rows
from commlayer.scheduler.mapping.dispatch_kernels import DEEPEP, DispatchKernels
from commlayer.scheduler.mapping.dispatch_times import DispatchKey, DispatchTimes, MeasuredGroup

__all__ = ["read_dispatch_kernels"]

_GRACE = ("GB200", "GB300")
"""GPUs of which a node has four."""
_SCALED, _SCALE_BYTES = 128, 4
"""Elements of an FP8 row that share a scale, and its bytes (test_intranode.py, fp8_factor)."""


class _Row(msgspec.Struct):
    device: str
    kernel_source: str
    node_num: int
    hidden_size: int
    num_token: int
    num_topk: int
    num_experts: int
    dispatch_sms: int
    dispatch_transmit_us: float
    dispatch_notify_us: float
    combine_sms: int
    combine_transmit_us: float
    combine_notify_us: float


def read_dispatch_kernels(path: str | os.PathLike[str]) -> DispatchKernels:
    """DeepEP with the times of a table, of parquet or CSV, in place of its published rates.

    Raises:
        UsageError: no file, another table, or rows that cannot be.
    """
    where = os.fspath(path)
    try:
        data = read_file(path)
    except OSError as error:
        raise UsageError(f"{where}: cannot read times of a dispatcher: {error.strerror or error}") from error
    try:
        times = DispatchTimes(_curves(_rows(data, where), where), where)
    except ProfileError as error:
        raise UsageError(str(error)) from error
    return replace(
        DEEPEP,
        measured=times,
        assumed="the network is that of the table, which does not name it, and BF16 rows take as long to experts "
        "as home, since its dispatches are of FP8 rows",
        source=where,
    )


def _rows(data: bytes, where: str) -> list[_Row]:
    names, rows = table_rows(data, where, _Row.__struct_fields__)
    if "dispatch_avg_t_us" in names:
        raise ProfileError(
            f"{where}: these are times of DeepEP's low-latency kernels, which serve decoding; trainers call its normal "
            "kernels, so no step of a training has such calls: take the table wideep_deepep_normal_perf"
        )
    lacking = [name for name in _Row.__struct_fields__ if name not in names]
    if lacking:
        raise ProfileError(
            f"{where}: expected aiconfigurator's table wideep_deepep_normal_perf, got one without {', '.join(lacking)}"
        )
    table = convert(rows, list[_Row], f"{where}, as aiconfigurator's table", {}, strict=False)
    others = sorted({row.kernel_source for row in table if row.kernel_source != "deepep"})
    if others:
        raise ProfileError(f"{where}: expected times of deepep alone, got {', '.join(others)} too")
    if not table:
        raise ProfileError(f"{where}: expected times of deepep, got none")
    return table


def _curves(rows: list[_Row], where: str) -> dict[DispatchKey, Curve]:
    times: dict[DispatchKey, dict[int, float]] = defaultdict(dict)
    for row in rows:
        gpu = row.device.removeprefix("NVIDIA ").partition(" ")[0]
        ranks = 4 if gpu in _GRACE else 8
        group = MeasuredGroup(gpu, row.node_num, ranks, row.hidden_size, row.num_topk, row.num_experts)
        calls = (
            (DispatchKey(group, "dispatch", row.dispatch_sms), row.dispatch_transmit_us + row.dispatch_notify_us),
            (DispatchKey(group, "combine", row.combine_sms), row.combine_transmit_us + row.combine_notify_us),
        )
        for key, us in calls:
            known = times[key]
            known[row.num_token] = min(us, known.get(row.num_token, us))
    curves = {}
    for key, us_of_tokens in times.items():
        group, tokens = key.group, sorted(us_of_tokens)
        scales = -(-group.hidden // _SCALED) * _SCALE_BYTES
        row_bytes = group.hidden + scales if key.way == "dispatch" else 2 * group.hidden
        if unsound := [us for us in us_of_tokens.values() if not 0 < us < math.inf]:
            raise ProfileError(f"{where}: {key.way}: expected positive, finite times in µs, got {unsound[0]:g}")
        curves[key] = Curve.from_samples(
            "all_to_all_v",
            Resource.INTER if group.num_nodes > 1 else Resource.INTRA,
            group.num_nodes * group.ranks_per_node,
            # The bytes of rows at all ranks of their experts, each rank's own among them.
            [round(count * group.ranks_of_token * row_bytes) for count in tokens],
            [us_of_tokens[count] for count in tokens],
            source=where,
        )
    return curves
