"""The simulated step's predictions of measured mappings, from curves and computation that were measured without any step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from mappings_job import MODEL, RANKS, SOFTWARE, Case
from mappings_ranks import ComputeTimes

from commlayer.profiles.curve import Curve, prediction_error
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile, parse_profile
from commlayer.scheduler.mapping.cluster import Cluster, Gpu
from commlayer.scheduler.mapping.compute import CoreTiles, MeasuredCompute
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_work import layer_work
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import Software

__all__ = ["RankCompute", "Row", "cluster_of", "fitted", "layer_errors", "predict", "spearman"]

_WIDER = 2
"""The ratio of the run's FP32 elements to the BF16 ones that the counting of memory traffic is of."""


class RankCompute(MeasuredCompute):
    """The time of what one rank computes while all do. ``kernel_us``: of every kernel that memory bounds, before its first byte;
    here mostly what Python and autograd take."""

    def __init__(self, times: ComputeTimes, kernel_us: float, byte_us: float) -> None:
        super().__init__(times.products, memory_gbps=1.0)
        self.kernel_us, self.byte_us = kernel_us, byte_us
        self._cores = {False: _curve(times.core_forward), True: _curve(times.core_backward)}

    def attention_us(
        self, flops: float, precision: str = "bf16", *, backward: bool = False, tiles: CoreTiles | None = None
    ) -> float:
        return self._cores[backward].at(flops)

    def memory_us(self, nbytes: float, kernels: int = 1) -> float:
        return self.kernel_us + nbytes * self.byte_us if nbytes else 0.0


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    sizes = [round(flops) for flops, _ in points]
    return Curve.from_samples("copy", Resource.DEVICE, 1, sizes, [us for _, us in points])


def fitted(times: ComputeTimes) -> RankCompute:
    """``kernel_us`` and ``byte_us`` such that whole layers without communication come out best, by relative squares: two numbers,
    and none of them from a step that is predicted."""
    times = replace(times, products=_monotone(times.products))
    parts = [_layer_parts(times, index) for index in range(len(times.layers))]
    rows, wanted = [], []
    for layer, (fixed, kernels, nbytes) in zip(times.layers, parts, strict=True):
        whole = layer.forward_us + layer.backward_us
        rows.append([kernels / whole, nbytes / whole])
        wanted.append((whole - fixed) / whole)
    from scipy.optimize import nnls

    solution, _ = nnls(rows, wanted)
    return RankCompute(times, float(solution[0]), float(solution[1]))


def _monotone(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    curve = _curve(points)
    return list(zip(map(float, curve.bytes), curve.time_us, strict=True))


def _layer_parts(times: ComputeTimes, index: int) -> tuple[float, float, float]:
    """µs of products and attention in a layer alone, how many memory-bound kernels it counts, and their bytes."""
    plain = _layer_us(times, RankCompute(times, 0.0, 0.0), index)
    kernels = _layer_us(times, RankCompute(times, 1.0, 0.0), index) - plain
    return plain, kernels, _layer_us(times, RankCompute(times, 0.0, 1.0), index) - plain


def _layer_us(times: ComputeTimes, compute: RankCompute, index: int) -> float:
    layer = times.layers[index]
    model = replace(MODEL, experts=layer.experts, top_k=layer.top_k)
    job = Job(model=model, gpus=1, global_batch=layer.batch, sequence=layer.sequence, capacity_factor=1.0)
    total = layer_work(job, Setup(gpus=1, micro_batch=layer.batch), compute)
    return total.forward + total.backward


def layer_errors(times: ComputeTimes, compute: RankCompute) -> list[tuple[float, float]]:
    """(measured, said) µs of each layer alone."""
    return [
        (layer.forward_us + layer.backward_us, _layer_us(times, compute, index))
        for index, layer in enumerate(times.layers)
    ]


def cluster_of(curves: Mapping[str, str]) -> Cluster:
    """The emulated cluster, by the curves of every shape of group that was measured."""
    profiles: list[Profile] = [parse_profile(text, name) for name, text in curves.items()]
    profiles.sort(
        key=lambda profile: _ranks_of(profile)
    )  # a small group's own curves before those inside a larger one's
    gpu = Gpu(name="a share of a core", bf16_tflops=0.01, fp8_tflops=0.0, memory_bytes=64e9, memory_gbps=1.0)
    whole = max(profiles, key=_ranks_of)
    return Cluster(
        name="emulated 2x4",
        gpu=gpu,
        domain=RANKS,
        peaks=whole.peaks,
        source="make bench-mappings",
        measured=tuple(profiles),
    )


def _ranks_of(profile: Profile) -> int:
    nodes, _, each = profile.topology.partition("x")
    return int(nodes) * int(each)


@dataclass(frozen=True)
class Row:
    """One mapping, ms: the median of its steps, their first and third quartile, and what was predicted, with its parts."""

    name: str
    folded: bool
    measured_ms: float
    quartiles_ms: tuple[float, float]
    predicted_ms: float
    parts_ms: dict[str, float]

    @property
    def error(self) -> float:
        """The error of the predicted step time."""
        return prediction_error(self.predicted_ms, self.measured_ms)


def predict(
    cases: Sequence[Case],
    steps: Sequence[Sequence[float]],
    cluster: Cluster,
    compute: RankCompute,
    software: Software = SOFTWARE,
) -> list[Row]:
    """Every case; no optimizer, as in the steps."""
    rows = []
    for case, times in zip(cases, steps, strict=True):
        estimator = Estimator(case.job, cluster, software, compute=compute)
        estimate = estimator.estimate(case.setup, detail=False)
        parts = {name: us / 1e3 for name, us in estimate.parts.items() if name != "optimizer"}
        ordered = sorted(times)
        quarter = len(ordered) // 4
        rows.append(
            Row(
                case.name,
                case.is_folded,
                median(times) / 1e3,
                (ordered[quarter] / 1e3, ordered[-1 - quarter] / 1e3),
                sum(parts.values()),
                parts,
            )
        )
    return rows


def spearman(rows: Sequence[Row]) -> float:
    """Rank correlation of what was predicted and measured."""
    from scipy.stats import spearmanr

    return float(spearmanr([row.predicted_ms for row in rows], [row.measured_ms for row in rows]).statistic)


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [asdict(row) | {"error": row.error} for row in rows]
