"""Times of NCCL that others have measured, as a profile: nccl-tests' text and ``-J`` JSON, NCCL Inspector's JSON, and the
tables of aiconfigurator.

Sizes become nccl-tests' S in all of them. Inspector counts what one rank sends in an all_gather, and what one receives of a
reduce_scatter, so these are multiplied by the ranks. Every rank of a call is in its files with the time of its own kernel, which
waits for who comes last: the shortest of a call counts, and of the calls of one size the median.

Sources: nccl-tests 2.18, src/util.cu (the columns, and version 3 of the JSON); NCCL 2.30, plugins/profiler/inspector (v4.0);
ai-dynamo/aiconfigurator, aic-core's systems/data/*/comm/nccl/*/nccl_perf.parquet (sizes in elements of S, times in ms, one node).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from commlayer.profiles.curve import Curve, median
from commlayer.profiles.errors import ProfileError
from commlayer.profiles.files import read_file
from commlayer.profiles.links import COLLECTIVES, Peaks, Resource, bus_factor
from commlayer.profiles.profile import Profile
from commlayer.profiles.strict_json import convert
from commlayer.profiles.topology import Topology, shape_text
from commlayer.readers.table_files import PARQUET, table_rows

__all__ = ["NcclRun", "nccl_profile", "nccl_tests_json", "read_nccl_runs"]

_TESTS = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single",),
    "reduce_scatter": ("reduce_scatter_single",),
    "broadcast": ("broadcast",),
    "sendrecv": ("send_recv",),
    "alltoall": ("all_to_all", "all_to_all_single", "all_to_all_v"),
    "alltoallv": ("all_to_all_v",),
    "gather": ("gather",),
    "scatter": ("scatter",),
}
"""nccl-tests' programs, and the curves that their times are: NCCL's all_to_all is messages, even or not."""
_INSPECTED = {
    "AllReduce": ("all_reduce", False),
    "AllGather": ("all_gather", True),
    "ReduceScatter": ("reduce_scatter", True),
    "Broadcast": ("broadcast", False),
}
"""Inspector's names: those of nccl-tests, and whether its size is a rank's part of S."""
_DEVICE = re.compile(r"#\s+Rank\s+\d+ Group\s+(\d+) Pid\s+\d+ on\s+(\S+) device")
_STARTING = re.compile(r"# Collective test starting:\s+(\S+)")
_ELEMENT_BYTES = {"half": 2, "bfloat16": 2, "float": 4, "int8": 1}
_MARK = "commlayer "
"""The beginning of the name of an experiment that :func:`nccl_tests_json` wrote; the curve's key follows."""
_Kind = Literal["measured", "emulated", "published", "paper"]
_KINDS = get_args(_Kind)
_SIDE, _BOTH = 4, 11
"""Columns of a time, its two rates and its errors; and the fewest words of a line that has them out of place and in place, behind
size, count and type. Between, redop and root stand, or not: versions differ, and all_to_all had neither."""
_LAUNCHER = re.compile(r"^\s*(?:\[\d+,\d+\]<stdout>:|\d+: )")
"""The beginning of a line as mpirun (--tag-output) and srun (--label) write it."""


class _TestsTime(msgspec.Struct):
    time: float | None = None
    cpu_time: float = 0.0


class _TestsResult(msgspec.Struct):
    size: int
    out_of_place: _TestsTime | None = None
    in_place: _TestsTime | None = None
    experiment_name: str | None = None


class _TestsDevice(msgspec.Struct):
    hostname: str
    group: int = 0


class _TestsFile(msgspec.Struct):
    """The part of nccl-tests' JSON that is read; ``profile_kind``, ``holdout_error``: of a curve that was written so."""

    results: list[_TestsResult]
    devices: list[_TestsDevice] | None = None
    args: list[str] | None = None
    holdout_error: float | None = None
    profile_kind: _Kind = "measured"


class _TabledTime(msgspec.Struct):
    """A row of aiconfigurator's table: ``message_size`` elements of ``nccl_dtype``, ``latency`` in ms."""

    nccl_dtype: str
    num_gpus: int
    message_size: int
    op_name: str
    latency: float


class _InspectedHeader(msgspec.Struct):
    id: str | int
    n_ranks: int
    nnodes: int


class _InspectedCall(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: float


class _InspectedEntry(msgspec.Struct):
    """The part of an entry of NCCL Inspector that is read; ``coll_perf`` None: of a message."""

    header: _InspectedHeader
    coll_perf: _InspectedCall | None = None


@dataclass(frozen=True, slots=True)
class NcclRun:
    """The times of one collective in one group.

    Attributes:
        collective: nccl-tests' name without ``_perf``. key, holdout_error: of the profile's curve that was written as a run.
        nodes: ranks on each node. times_us: by S in bytes, of one call.
        kind: of the profile whose curve was written as a run; of what a tool measured, ``measured``.
        source: the file, and what wrote it.
    """

    collective: str
    nodes: tuple[int, ...]
    times_us: Mapping[int, float]
    source: str
    key: tuple[str, str, int] | None = None
    holdout_error: float | None = None
    kind: str = "measured"


def read_nccl_runs(
    path: str | os.PathLike[str], collective: str = "", nodes: tuple[int, ...] = ()
) -> tuple[list[NcclRun], list[str]]:
    """Read what one file has, and say what it has that is left out.

    Args:
        collective, nodes: in place of what the file says; texts of nccl-tests before 2.17 do not say which collective it was.

    Raises:
        ProfileError: no file, or none of the four kinds; a collective or nodes that are not known; no times; a table where
            pyarrow is not installed.
    """
    where = os.fspath(path)
    try:
        data = read_file(path)
    except OSError as error:
        raise ProfileError(f"{where}: cannot read times of NCCL: {error.strerror or error}") from error
    if data.startswith(PARQUET):
        return _of_table(data, where, collective, nodes)
    return _of_words(data, where, collective, nodes)


def _of_words(data: bytes, where: str, collective: str, nodes: tuple[int, ...]) -> tuple[list[NcclRun], list[str]]:
    """The runs of a file of text or JSON."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{where}: expected UTF-8 text with times of NCCL, got other bytes at {error.start}"
        ) from error
    if collective and collective not in _TESTS:
        raise ProfileError(f"collective: expected one of {', '.join(_TESTS)}, got {collective!r}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = _objects(text, where) if text.lstrip().startswith("{") else None
    # Nobody can mean the names of NCCL Inspector otherwise, nor a profile's curves as
    # nccl_tests_json writes them.
    says_itself = content is not None
    if collective and isinstance(content, dict) and "results" in content:
        results = [result for result in content["results"] or () if isinstance(result, dict)]
        says_itself = any(_key(str(result.get("experiment_name"))) for result in results)
    if collective and says_itself:
        raise ProfileError(
            f"collective: {where} says itself of which one its times are, got {collective} in its place: leave it out"
        )
    if content is None:
        runs, left_out = [_of_text(text, where, collective, nodes)], list[str]()
    elif isinstance(content, dict) and "results" in content:
        runs, left_out = _of_json(content, where, collective, nodes)
    else:
        runs, left_out = _of_inspector(content if isinstance(content, list) else [content], where)
        runs = [replace(run, nodes=nodes or run.nodes) for run in runs]
    if not any(run.times_us for run in runs):
        raise ProfileError(f"{where}: expected times of nccl-tests (text or -J) or of NCCL Inspector, got none")
    return runs, left_out


def _objects(text: str, where: str) -> list[Any]:
    """The objects of a file that has one a line; of the last line a part may be missing, as a job that was killed leaves it."""
    entries, lines = [], [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict):
            entries.append(entry)
        elif number < len(lines):
            raise ProfileError(f"{where}: line {number}: expected one JSON object a line, got {line[:60]!r}")
    return entries


def _of_text(text: str, where: str, collective: str, nodes: tuple[int, ...]) -> NcclRun:
    times: dict[int, float] = {}
    hosts: list[str] = []
    program = ""
    for line in (_LAUNCHER.sub("", each) for each in text.splitlines()):
        if device := _DEVICE.match(line):
            hosts += [device[2]] if device[1] == "0" else []
        elif starting := _STARTING.match(line):
            program = starting[1]
        elif not line.lstrip().startswith("#") and (row := _row(line)):
            times[row[0]] = row[1]
    source = f"nccl-tests' text {os.path.basename(where)}"
    return NcclRun(collective or _program(program, where), nodes or _nodes(hosts, where), times, source)


def _row(line: str) -> tuple[int, float] | None:
    """Size and time of a line of the table, in place where there is nothing else."""
    words = line.split()
    try:
        size, time_us = int(words[0]), float(words[-2 * _SIDE if len(words) >= _BOTH else -_SIDE])
    except (IndexError, ValueError):
        return None
    return (size, time_us) if size > 0 and time_us > 0 else None


def _of_json(
    content: Mapping[str, Any], where: str, collective: str, nodes: tuple[int, ...]
) -> tuple[list[NcclRun], list[str]]:
    file = convert(content, _TestsFile, f"{where}, as nccl-tests' JSON", {"profile_kind": ", ".join(_KINDS)})
    devices = file.devices or []
    hosts = [device.hostname for device in devices if device.group == 0]
    all_hosts = [device.hostname for device in devices]
    program = os.path.basename((file.args or [""])[0])
    groups: dict[str, dict[int, float]] = defaultdict(dict)
    for result in file.results:
        measured = result.out_of_place or result.in_place or _TestsTime()
        time_us = measured.cpu_time if measured.time is None else measured.time
        if result.size > 0 and 0 < time_us < math.inf:
            groups[result.experiment_name or ""][result.size] = time_us
    source, runs = f"nccl-tests' JSON {os.path.basename(where)}", []
    for name, times in groups.items():
        key = _key(name)
        test = key[0] if key else collective or _program(program, where)
        cluster = nodes or _nodes(all_hosts if key else hosts, where)  # a curve's key says of how many of them it is
        runs.append(NcclRun(test, cluster, times, source, key, file.holdout_error, file.profile_kind))
    return runs, []


def _key(name: str) -> tuple[str, str, int] | None:
    words = name.removeprefix(_MARK).split() if name.startswith(_MARK) else []
    if len(words) == 3 and words[0] in COLLECTIVES and words[1] in _LINKS and words[2].isdecimal():
        return words[0], words[1], int(words[2])
    return None


_LINKS = ("inter", "intra", "device")


def _of_inspector(content: Sequence[Any], where: str) -> tuple[list[NcclRun], list[str]]:
    calls: dict[tuple[str, tuple[int, ...], int], dict[tuple[str, int], float]] = defaultdict(dict)
    left_out: Counter[str] = Counter()
    for number, each in enumerate(content, start=1):
        if isinstance(each, dict) and "coll_perf" not in each:
            left_out["messages (p2p_perf), of which an all_to_all cannot be put together"] += 1
            continue
        entry = convert(each, _InspectedEntry, f"{where}, as NCCL Inspector's entry {number}", {})
        header, call = entry.header, entry.coll_perf
        if call is None or call.coll not in _INSPECTED:
            left_out["entries without a call" if call is None else call.coll] += 1
            continue
        ranks, num_nodes = header.n_ranks, header.nnodes
        collective, is_part = _INSPECTED[call.coll]
        size = call.coll_msg_size_bytes * (ranks if is_part else 1)
        one, time_us = (str(header.id), call.coll_sn), call.coll_exec_time_us
        if ranks < 2 or num_nodes < 1 or ranks % num_nodes or size < 1 or not 0 < time_us < math.inf:
            left_out["calls of one rank, of uneven nodes, or without a size or a time"] += 1
            continue
        known = calls[collective, (ranks // num_nodes,) * num_nodes, size]
        known[one] = min(time_us, known.get(one, time_us))
    times: dict[tuple[str, tuple[int, ...]], dict[int, float]] = defaultdict(dict)
    for (collective, nodes, size), known in calls.items():
        times[collective, nodes][size] = median(list(known.values()))
    source = f"NCCL Inspector's {os.path.basename(where)}"
    runs = [NcclRun(collective, nodes, sizes, source) for (collective, nodes), sizes in times.items()]
    return runs, [f"{count} {what}" for what, count in left_out.items()]


def _of_table(data: bytes, where: str, collective: str, nodes: tuple[int, ...]) -> tuple[list[NcclRun], list[str]]:
    """The runs of aiconfigurator's table of NCCL, each inside one node."""
    if collective or nodes:
        raise ProfileError(f"{where}: a table says itself of what its times are: leave --collective and --topology out")
    times: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    left_out: Counter[str] = Counter()
    names, rows = table_rows(data, where, _TabledTime.__struct_fields__)
    if "dispatch_transmit_us" in names:
        raise ProfileError(
            f"{where}: these are times of DeepEP, which are no collective's: give the table to --dispatcher"
        )
    for row in convert(rows, list[_TabledTime], f"{where}, as aiconfigurator's table", {}):
        size, time_us = row.message_size * _ELEMENT_BYTES.get(row.nccl_dtype, 0), row.latency * 1e3
        if row.op_name not in _TESTS or row.num_gpus < 2 or size < 1 or not 0 < time_us < math.inf:
            left_out["rows of another operation or format, or without a size or a time"] += 1
            continue
        known = times[row.op_name, row.num_gpus]
        known[size] = min(time_us, known.get(size, time_us))
    if not times:
        raise ProfileError(f"{where}: expected times of {', '.join(_TESTS)}, got none")
    source = f"aiconfigurator's table {where}"
    runs = [NcclRun(name, (ranks,), sizes, source) for (name, ranks), sizes in times.items()]
    return runs, [f"{count} {what}" for what, count in left_out.items()]


def _program(program: str, where: str) -> str:
    name = os.path.basename(program).removesuffix("_perf")
    if name not in _TESTS:
        raise ProfileError(
            f"{where}: expected times of one of {', '.join(_TESTS)}, got {name or 'a file that does not say of what'}: name it "
            "with --collective"
        )
    return name


def _nodes(hosts: Sequence[str], where: str) -> tuple[int, ...]:
    if not hosts:
        raise ProfileError(
            f"{where}: the file does not say which ranks were on which hosts: name them with --topology, as 2x8"
        )
    return tuple(sorted(Counter(hosts).values(), reverse=True))


def nccl_profile(runs: Iterable[NcclRun], *, name: str, base: Profile | None = None, source: str = "") -> Profile:
    """Make a profile of what was read. Where several runs have times of one size, the shortest counts: NCCL's best algorithm.

    Args:
        base: a profile of the same cluster, whose other curves and whose peaks stay. Without one, peaks are the highest bus
            bandwidths, and memory is taken to be as fast as the fastest link.
        source: in place of the list of files.

    Raises:
        ProfileError: nothing that a curve can be made of; runs of another cluster than the base's.
    """
    runs = list(runs)
    shape = (
        Topology.parse(base.topology).shape
        if base
        else shape_text(max((run.nodes for run in runs), key=sum, default=(1,)))
    )
    world = tuple(sorted((len(node) for node in Topology.parse(shape).nodes), reverse=True))
    times: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    behind: dict[tuple[str, str, int], list[NcclRun]] = defaultdict(list)
    for run in runs:
        if len(run.nodes) > len(world) or any(have > most for have, most in zip(run.nodes, world, strict=False)):
            raise ProfileError(
                f"{run.source}: ranks {shape_text(run.nodes)} do not fit a cluster of {shape}: import them by themselves, or "
                "with a base of their shape"
            )
        link, ranks = "inter" if len(run.nodes) > 1 else "intra", sum(run.nodes)
        for key in [run.key] if run.key else [(name, link, ranks) for name in _TESTS[run.collective]]:
            behind[key].append(run)
            for size, time_us in run.times_us.items():
                times[key][size] = min(time_us, times[key].get(size, time_us))
    curves = {key: _curve(key, sizes, behind[key]) for key, sizes in times.items() if sizes}
    if not curves:
        raise ProfileError("expected times of a collective that plans are priced by, got none")
    known = {(curve.collective, str(curve.link), curve.group_size): curve for curve in base.curves} if base else {}
    kind = next((run.kind for run in runs if run.kind != "measured"), "measured")
    origin = "times of NCCL" if kind == "measured" else f"times that are {kind}, NOT measured on hardware,"
    said = source or f"{origin} from {', '.join(dict.fromkeys(run.source for run in runs))}"
    if base:
        said += f"; all else from {base.name}: {base.source}"
    fields: dict[str, Any] = {"name": name, "kind": kind, "source": said, "curves": (known | curves).values()}
    if base:
        return base.replace(**fields, environment={**base.environment, "backend": "nccl"})
    best: dict[str, float] = {}
    for curve in curves.values():
        factor = bus_factor(curve.collective, curve.group_size)
        rate = max(size * factor / time_us / 1e3 for size, time_us in zip(curve.bytes, curve.time_us, strict=True))
        best[str(curve.link)] = max(rate, best.get(str(curve.link), 0.0))
    fastest, environment = max(best.values()), {"backend": "nccl"}
    peaks = Peaks(*(best.get(link, fastest) for link in _LINKS))
    return Profile.create(**fields, topology=shape, peaks=peaks, gather="remote", environment=environment)


def _curve(key: tuple[str, str, int], sizes: Mapping[int, float], runs: Sequence[NcclRun]) -> Curve:
    """A curve of what was measured; one that a profile had is as it was there."""
    collective, link, ranks = key
    in_order, source = sorted(sizes), ", ".join(dict.fromkeys(run.source for run in runs))
    times = [sizes[size] for size in in_order]
    if all(run.key for run in runs):
        error = runs[0].holdout_error
        return Curve(
            collective, Resource(link), ranks, tuple(in_order), tuple(times), holdout_error=error, source=source
        )
    return Curve.from_samples(collective, Resource(link), ranks, in_order, times, source=source)


def nccl_tests_json(profile: Profile) -> dict[str, str]:
    """Write a profile's curves as nccl-tests writes its results with ``-J``: a file's name, and its text, for each curve.

    Bandwidths follow from sizes and times. :func:`read_nccl_runs` knows the curve again by the experiment's name, so that a
    profile of what was read has the same times.
    """
    nodes = Topology.parse(profile.topology).nodes
    places = [(node, local, rank) for node, ranks in enumerate(nodes) for local, rank in enumerate(ranks)]
    texts = {}
    for curve in profile.curves:
        factor = bus_factor(curve.collective, curve.group_size)
        name = f"{curve.collective}_{curve.link}_{curve.group_size}"
        devices: list[dict[str, Any]] = []
        for node, local_rank, rank in places:
            # All ranks of the cluster are in some group: neighbours inside a node, as many ranks
            # of each node between them, one rank in itself.
            group = 0 if curve.group_size == len(places) else local_rank // max(1, curve.group_size // len(nodes))
            if curve.link is Resource.DEVICE:
                group = rank
            elif curve.link is Resource.INTRA:
                group = node * -(-max(map(len, nodes)) // curve.group_size) + local_rank // curve.group_size
            about = {"pid": 0, "hostname": f"node{node}", "device": local_rank, "device_hex": "", "device_info": ""}
            devices.append({"rank": rank, "group": group, **about})
        results = [
            {
                "size": size,
                "count": size,
                "type": "uint8",
                "redop": "none",
                "root": "-1",
                "out_of_place": {
                    "time": time_us,
                    "alg_bw": size / time_us / 1e3,
                    "bus_bw": size * factor / time_us / 1e3,
                    "nwrong": None,
                },
                "in_place": None,
                "actual_iterations": 1,
                "experiment_name": f"{_MARK}{curve.collective} {curve.link} {curve.group_size}",
            }
            for size, time_us in zip(curve.bytes, curve.time_us, strict=True)
        ]
        content = {
            "version": 3,
            "args": [f"commlayer_{curve.collective}"],
            "env": [],
            "nccl_version": 0,
            "devices": devices,
            "results": results,
            "holdout_error": curve.holdout_error,
            "profile_kind": profile.kind,
        }
        texts[f"{name}.json"] = json.dumps(content, indent=1) + "\n"
    return texts
