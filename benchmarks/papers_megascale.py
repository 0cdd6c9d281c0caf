"""MegaScale-MoE, predicted: its parallelism against tensor parallelism, parameter synchronisation, and when tokens are
gathered.

Nothing is fitted here. Compute runs at the median of the four factors that were fitted to another paper's rows
(calibrated.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from papers_data import MEGASCALE_GAIN, MEGASCALE_MODELS, SYNCHRONISATION, Check

from commlayer.profiles.errors import PlanError
from commlayer.scheduler import Policy, Strategy, Traffic, choose
from commlayer.scheduler.decision import Decision
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.calibrated import FACTORS
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import ExchangeKind, Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON

__all__ = [
    "Gain",
    "Kind",
    "Synchronised",
    "checks",
    "dispatch_kinds",
    "gains",
    "inter_over_intra",
    "ratios",
    "synchronisation",
]

_CLUSTER, _GPUS, _BATCH, _SEQUENCE = "h800", 8, 32, 8192
_PLAIN = replace(MEGATRON, name="nothing hidden", overlaps_gradients=False, overlaps_parameters=False, host="unknown")
"""'To isolate the performance benefits of optimized parallelism, we disable other system optimizations' (section 6.2).
Its kernels are its own, and how many its host launches is not said."""
_TENSOR = Setup(gpus=_GPUS, tp=8, etp=8, exchange="all_gather")
_SEQUENCE_EXPERT = Setup(gpus=_GPUS, tp=8, ep=8, attention="ulysses")


@dataclass(frozen=True, slots=True)
class Gain:
    """SP+EP over TP+TP of a model. ``gain``: in MFU, less 1. ``layers``: as many as fit with both."""

    model: str
    layers: int
    tensor: StepEstimate
    sequence_expert: StepEstimate

    @property
    def gain(self) -> float:
        return self.sequence_expert.mfu / self.tensor.mfu - 1

    @property
    def factor(self) -> float:
        """The factor by which the gain of MFU, 1 + gain, lies outside of what the paper has for its six models; 1.0: inside."""
        low, high = (1 + each for each in MEGASCALE_GAIN)
        ratio = 1 + self.gain
        return ratio / high if ratio > high else ratio / low if ratio < low else 1.0


def gains() -> list[Gain]:
    """Figure 13: each model of table 2 on one node, with as many layers as both ways have memory for."""
    found = []
    for name in MEGASCALE_MODELS:
        whole = catalog.load("deepseekmoe-16b" if name == "deepseekmoe" else name)
        layers = next(count for count in range(whole.layers, 0, -1) if _fits(_cut(whole, count)))
        model = _cut(whole, layers)
        tensor = _estimator(model).estimate(_TENSOR)
        kinds: tuple[ExchangeKind, ...] = ("all_to_all", "all_gather")
        ways = [_estimator(model).estimate(replace(_SEQUENCE_EXPERT, exchange=kind)) for kind in kinds]
        found.append(Gain(name, layers, tensor, min(ways, key=lambda way: way.step_us)))
    return found


def _cut(model: ModelShape, layers: int) -> ModelShape:
    """Shorter. Table 2 has no shared experts, and experts in every layer."""
    return replace(model, layers=layers, dense_layers=0, dense_width=0, shared_width=0, published=0.0)


def _estimator(model: ModelShape) -> Estimator:
    job = Job(model=model, gpus=_GPUS, global_batch=_BATCH, sequence=_SEQUENCE, capacity_factor=1.0)
    return Estimator(job, clusters.load(_CLUSTER), _PLAIN, efficiency=_efficiency())


@cache
def _efficiency() -> float:
    return median(FACTORS.values())


def _fits(model: ModelShape) -> bool:
    estimator = _estimator(model)
    return all(estimator.memory(setup).total <= estimator.memory_limit for setup in (_TENSOR, _SEQUENCE_EXPERT))


@dataclass(frozen=True, slots=True)
class Kind:
    """Dispatch and combine of one layer with k experts a token, forward, µs (figure 7)."""

    top_k: int
    all_to_all_us: float
    all_gather_us: float


def dispatch_kinds(most: int = 10) -> list[Kind]:
    """Mixtral-8x7B's hidden size, one sequence of 8192 tokens, eight GPUs of one node, by the library's own calls."""
    pricer = _pricer()
    tokens = _SEQUENCE * catalog.load("mixtral-8x7b").hidden * 2
    gathered = pricer.us("all_gather", tokens, (8,)) + pricer.us("reduce_scatter", tokens, (8,))
    return [Kind(k, 2 * pricer.us("all_to_all_v", k * tokens / 8, (8,)), gathered) for k in range(1, most + 1)]


@cache
def _pricer() -> Pricer:
    return Pricer(clusters.load(_CLUSTER), (Strategy.FLAT,))


@dataclass(frozen=True, slots=True)
class Synchronised:
    """Gradients and parameters of one step over ``groups`` nodes of eight GPUs, µs: those of FFNs, and of attention two
    ways.

    ``hierarchical_us``: SP's by the four steps of appendix A.1 in chunks, as a plan of ours; ``plan``: its name.
    ``inter_over_intra``: equation 10.
    """

    megabytes: int
    groups: int
    ffn_us: float
    tensor_us: float
    sequence_us: float
    hierarchical_us: float
    plan: str
    inter_over_intra: float

    @property
    def difference(self) -> float:
        """SP's time over TP's, less 1, by the better way."""
        sequence = min(self.sequence_us, self.hierarchical_us)
        return (self.ffn_us + sequence) / (self.ffn_us + self.tensor_us) - 1


def synchronisation() -> list[Synchronised]:
    """Figure 14. ``attention parameter size on each GPU`` is read as that of SP, where each GPU has all of them; TP has
    an eighth.

    (Read as TP's, SP would have 3 to 12 GB of attention beside 10 GB of experts, and the published 0.3 % to 3.1 % could
    not come out: two bytes cross NVLink inside a node for each that crosses the network.) Bytes are those of one BF16
    number for a gradient and one for a parameter (section 5).
    """
    cluster, pricer = clusters.load(_CLUSTER), _pricer()
    peaks = cluster.peaks
    found = []
    for groups in (4, 8):
        across, everyone = (1,) * groups, (8,) * groups
        for megabytes in (384, 768, 1152, 1536):
            size = megabytes * 1e6
            plans = [_hierarchical(cluster, name, size, groups) for name in ("reduce_scatter", "all_gather")]
            found.append(
                Synchronised(
                    megabytes=megabytes,
                    groups=groups,
                    ffn_us=_both(pricer, 1e6 * 10_000, across),
                    tensor_us=_both(pricer, size / 8, across),
                    sequence_us=_both(pricer, size, everyone),
                    hierarchical_us=sum(plan.predicted_us for plan in plans),
                    plan=plans[0].plan.name,
                    inter_over_intra=inter_over_intra(8, groups, peaks.inter_gbps, peaks.intra_gbps),
                )
            )
    return found


def inter_over_intra(ranks: int, groups: int, inter_bandwidth: float, intra_bandwidth: float) -> float:
    """Equation 10: the time between ``groups`` nodes over the time inside them; bandwidths in one unit.

    Every rank of a node has all P parameters of the attention (SP, appendix A.1): it sends 2P/n (d-1)/d elements to other
    nodes and 2P (n-1)/n to the others of its node.
    """
    inter, intra = (groups - 1) / (ranks * groups), (ranks - 1) / ranks
    return inter / inter_bandwidth / (intra / intra_bandwidth)


def _both(pricer: Pricer, nbytes: float, nodes: tuple[int, ...]) -> float:
    return pricer.us("reduce_scatter", nbytes, nodes) + pricer.us("all_gather", nbytes, nodes)


def _hierarchical(cluster: Cluster, collective: str, nbytes: float, groups: int) -> Decision:
    """The best of the plans over nodes: appendix A.1's steps, whole or in chunks that hide each other."""
    nodes = (8,) * groups
    traffic = Traffic(round(nbytes), 8 * groups, collective=collective, nodes=nodes)
    policy = Policy(strategies=(Strategy.HIERARCHICAL, Strategy.PIPELINED), min_bytes=0)
    try:
        return choose(traffic, cluster.profile_of(nodes), policy)
    except PlanError as error:
        raise PlanError(f"appendix A.1's steps of {traffic}: {error}") from error


def ratios() -> list[tuple[str, float, float]]:
    """Equation 8 for the models of table 2: R inside a node of H800 (400 GB/s both directions) and over its network.

    R, the experts' products over dispatch and combine, is printed with bandwidth in elements/s and peak in multiply-adds/s. With
    BF16's 2 bytes and the 2 FLOPs of a multiply-add it is right in bytes and FLOPs too: 3/2 h_ffn · bandwidth/peak · n/(n-1).
    """
    cluster = clusters.load(_CLUSTER)
    of_many = _GPUS / (_GPUS - 1) / (cluster.gpu.bf16_tflops * 1e12)
    found = []
    for name in MEGASCALE_MODELS:
        model = catalog.load("deepseekmoe-16b" if name == "deepseekmoe" else name)
        inside, beyond = (
            1.5 * model.width * gbps * 1e9 * of_many for gbps in (cluster.peaks.intra_gbps, cluster.peaks.inter_gbps)
        )
        found.append((name, inside, beyond))
    return found


def checks(found: Sequence[Gain], kinds: Sequence[Kind], synchronised: Sequence[Synchronised]) -> list[Check]:
    """The targets for MegaScale-MoE."""
    low, high = min(each.gain for each in found), max(each.gain for each in found)
    apart = max(each.factor for each in found), min(each.factor for each in found)
    crossing = next((each.top_k for each in kinds if each.all_gather_us < each.all_to_all_us), 0)
    differences = [each.difference for each in synchronised]
    published = f"{MEGASCALE_GAIN[0]:.1%} to {MEGASCALE_GAIN[1]:.1%}"
    return [
        Check(
            "SP+EP over TP+TP gains for all six models, within a factor of 1.5 of the published range",
            low > 0 and apart[0] < 1.5 and apart[1] > 1 / 1.5,
            f"{low:.1%} to {high:.1%} (published {published}); 1 + gain is off by a factor of {apart[1]:.2f} to {apart[0]:.2f}",
        ),
        Check("tokens are gathered from k > 6 on eight GPUs (figure 7)", crossing == 7, f"faster from k = {crossing}"),
        Check(
            "parameter synchronisation of SP and TP attention within 5 % (figure 14)",
            all(abs(each) <= 0.05 for each in differences),
            f"{min(differences):.1%} to {max(differences):.1%} "
            f"(published {SYNCHRONISATION[0]:.1%} to {SYNCHRONISATION[1]:.1%})",
        ),
    ]
