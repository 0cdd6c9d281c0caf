"""Every way of moving one all_to_all, measured alternately in one run: candidates, torch's own, baselines.

Correctness first: before a way is timed its result is compared with torch.distributed's, byte for byte. Then all ways
run round after round, in a new order each round, so that what drifts on a noisy machine hits all of them alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

import torch
import torch.distributed as dist
from msgspec import structs

from commlayer.agree.messages import ControlMessage, Peers, from_first
from commlayer.communicator import Communicator
from commlayer.measure.prober import Prober
from commlayer.measure.profiler import run_environment
from commlayer.measure.results import BenchPoint, BenchResult, BenchRow
from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Decision
from commlayer.scheduler.group_strategies import candidates
from commlayer.scheduler.plan import Gather, Plan
from commlayer.scheduler.price import Timeline, price

__all__ = ["Baseline", "BenchOptions", "check_sizes", "nearest_size", "run_bench", "world_groups"]

_TORCH = "torch.distributed"
_MAX_ROUNDS = 31
_SIZE_BUDGET_US = 4e6
_MAX_PAIR_ROUNDS = 101
_PAIR_BUDGET_US = 2e6
_TRACED_RUNS = 7
"""The runs of a plan that are traced, of which one is drawn."""
_MAX_BATCH = 8
_BATCH_US = 30e3
_HIDDEN = 512  # of bf16: rows of 1 KiB
_ELEMENT_BYTES = 2


Baseline = Callable[[torch.Tensor, dist.ProcessGroup, dist.ProcessGroup], torch.Tensor]
"""Another way of moving the tokens: they, the ep group and the tp group in, the result out."""


class _Environment(ControlMessage, frozen=True):
    """The machine of a result, as rank 0 sees it."""

    values: dict[str, str]


@dataclass(frozen=True)
class BenchOptions:
    """Sizes in bytes a rank. ``gathers``: measure our own form of the plans, or MoNTA's too. ``baselines``: other ways to
    measure beside them, by name. ``trace_bytes``: those of the sizes whose chosen plan is traced for a picture."""

    sizes: Sequence[int]
    rounds: int = 5
    max_chunks: int = 32
    gathers: tuple[Gather, ...] = (Gather.REMOTE,)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    trace_bytes: Sequence[int] = ()
    timeout_s: float = 120.0


def world_groups(topology: Topology) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ep group (same place on every node) and tp group (all ranks of the node) of this rank. Collective."""
    node, local_rank = topology.node_of(dist.get_rank()), topology.local_rank_of(dist.get_rank())
    columns = list(zip(*topology.nodes, strict=True))
    ep_groups = [dist.new_group(list(column)) for column in columns]
    tp_groups = [dist.new_group(list(ranks)) for ranks in topology.nodes]
    return ep_groups[local_rank], tp_groups[node]


def nearest_size(size: int, blocks: int) -> int:
    """The size in bytes nearest to ``size`` that tokens in bf16 for ``blocks`` ranks fill."""
    unit = _ELEMENT_BYTES * blocks
    return max(1, (size + unit // 2) // unit) * unit


def check_sizes(sizes: Sequence[int], blocks: int) -> None:
    """Raises UsageError for a size that bf16 tokens for ``blocks`` ranks cannot fill."""
    for size in sizes:
        if size != (near := nearest_size(size, blocks)):
            raise UsageError(
                f"a rank's {size} bytes are no [{blocks}, tokens, hidden] of bf16: expected multiples of "
                f"{_ELEMENT_BYTES * blocks} bytes; the nearest is {near}"
            )


def run_bench(
    profile: Profile,
    topology: Topology,
    options: BenchOptions,
    *,
    is_emulated: bool,
    inter: str | None = None,
    intra: str | None = None,
    inter_gbps: float | None = None,
    links: Mapping[str, str] | None = None,
    on_point: Callable[[BenchResult], None] | None = None,
) -> tuple[BenchResult, list[tuple[str, Timeline, Timeline]]]:
    """Measure on all ranks of the world; every rank gets the result, and (title, predicted, measured) timelines.

    ``inter_gbps`` is the inter link's rate per rank, None where it is not known; ``links`` says more about the links in
    the result's environment. ``on_point`` is called after each size with the result so far.

    Raises UsageError for sizes that :func:`check_sizes` refuses, and what a Communicator raises. Bytes that differ from
    torch's are counted in the rows.
    """
    check_sizes(options.sizes, topology.num_nodes)
    environment = _Environment(
        run_environment() | dict(links or {})
    )  # hosts and dates differ between ranks, a result must not
    agreed = from_first(environment, _Environment, Peers.of(None), options.timeout_s, "to run the benchmark")
    result = BenchResult(
        topology=topology.shape,
        profile=profile.name,
        fingerprint=profile.fingerprint,
        is_emulated=is_emulated,
        inter=inter,
        intra=intra,
        environment=agreed.values,
        points=(),
    )
    groups = world_groups(topology)
    with (
        Prober(topology, options.timeout_s) as prober,
        Communicator(*groups, profile=profile, timeout_s=options.timeout_s) as communicator,
    ):
        for size in options.sizes:
            point = _measure_size(size, communicator, prober, groups, options, inter_gbps)
            result = structs.replace(result, points=(*result.points, point))
            if on_point is not None:
                on_point(result)
        timelines = [_traced(size, communicator, result) for size in options.trace_bytes]
        dist.barrier()
    return result, timelines


def _measure_size(
    size: int,
    communicator: Communicator,
    prober: Prober,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    options: BenchOptions,
    inter_gbps: float | None,
) -> BenchPoint:
    x = _tokens(size, communicator)
    decision = communicator.decide(size)
    plans = _plans(decision, communicator, options)
    ways: dict[str, Callable[[], torch.Tensor]] = {_TORCH: partial(_torch_flat, x, groups[0])}
    for name, plan in plans.items():
        # The chosen plan as users run it; another one has to be checked against the tensor at each call.
        ways[name] = partial(communicator.all_to_all, x, plan=None if plan == decision.plan else plan)
    ways |= {name: partial(move, x, *groups) for name, move in options.baselines.items()}
    expected, wrong = ways[_TORCH]().reshape(-1).view(torch.uint8), {}
    for name, way in ways.items():  # compared as bytes: a NaN is not equal to itself
        num_wrong = int((way().reshape(-1).view(torch.uint8) != expected).sum())
        wrong[name] = int(prober.ranks.maximum(num_wrong))
    times = _alternate(ways, prober, options.rounds, seed=size)
    chosen = decision.plan.name
    pair = _alternate_pair(chosen, ways, prober, len(times[_TORCH]), median(times[_TORCH]))
    rows = [
        _row(name, times, pair if name == chosen else [], wrong[name], plans.get(name), decision, communicator.profile)
        for name in ways
    ]
    wire_limit_us: float | None = None
    blocks = len(communicator.grid.ep_ranks)
    if inter_gbps is not None and blocks > 1:  # of one node nothing crosses a wire
        bytes_per_us = inter_gbps * len(communicator.grid.tp_ranks) * 1e3  # of a node
        wire_limit_us = size * (blocks - 1) / blocks / bytes_per_us
    return BenchPoint(
        logical_bytes=size,
        wire_limit_us=wire_limit_us,
        reason=decision.reason(),
        rows=tuple(rows),
    )


def _tokens(size: int, communicator: Communicator) -> torch.Tensor:
    """bf16 [e, C, H], the same on all ranks of a node, different between nodes; H is the largest that leaves no rest."""
    generator = torch.Generator().manual_seed(communicator.grid.ep_index)
    blocks = len(communicator.grid.ep_ranks)
    hidden = math.gcd(_HIDDEN, size // (_ELEMENT_BYTES * blocks))
    flat = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(torch.bfloat16)
    return flat.view(blocks, -1, hidden)


def _torch_flat(x: torch.Tensor, ep_group: dist.ProcessGroup) -> torch.Tensor:
    """torch.distributed's own all_to_all of the whole tensor."""
    output = torch.empty_like(x)
    dist.all_to_all_single(output, x, group=ep_group)
    return output


def _plans(decision: Decision, communicator: Communicator, options: BenchOptions) -> dict[str, Plan]:
    """The candidates by name; those of another form than the chooser's carry its name."""
    policy = communicator.policy
    own = policy.gather or Gather(communicator.profile.gather)
    plans: dict[str, Plan] = {}
    for gather in (own, *(g for g in options.gathers if g is not own)):
        for plan in candidates(decision.traffic, gather, policy.min_slice_bytes, options.max_chunks):
            plans.setdefault(plan.name if gather is own or plan.name == "flat" else f"{plan.name} {gather.value}", plan)
    plans.setdefault(decision.plan.name, decision.plan)
    return plans


def _alternate(
    ways: Mapping[str, Callable[[], torch.Tensor]], prober: Prober, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Times in µs by way; the order of a round is shuffled, the same on all ranks.

    Small messages are noisy and cheap: they get more rounds, until the time for one size is spent.
    """
    order = list(ways)
    shuffle = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in ways}
    while len(times[_TORCH]) < rounds or (
        len(times[_TORCH]) < _MAX_ROUNDS and sum(map(sum, times.values())) < _SIZE_BUDGET_US  # agreed numbers only
    ):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(prober.timed(ways[name]))
    return times


def _alternate_pair(
    chosen: str, ways: Mapping[str, Callable[[], torch.Tensor]], prober: Prober, rounds: int, about_us: float
) -> list[float]:
    """Ratios of more rounds, of the chosen plan and torch's own alone, after ``rounds`` common ones.

    Theirs is the ratio that is promised for every size, and a time of a few ms varies by half on a shared machine. So
    calls of ``about_us`` are timed several in a row, as nccl-tests does: how far apart ranks leave the barrier then
    hardly counts. Only the ratios are kept: beside times of other rounds these would flatter or harm the chosen plan
    against its rivals.
    """
    calls = max(1, min(_MAX_BATCH, int(_BATCH_US / about_us)))

    def batch(name: str) -> None:
        for _ in range(calls):
            ways[name]()

    ratios: list[float] = []
    spent_us = 0.0
    while rounds + len(ratios) < _MAX_PAIR_ROUNDS and spent_us < _PAIR_BUDGET_US:
        order = (chosen, _TORCH) if len(ratios) % 2 else (_TORCH, chosen)
        took = {name: prober.timed(partial(batch, name)) for name in order}
        spent_us += sum(took.values())
        ratios.append(took[chosen] / took[_TORCH])
    return ratios


def _row(
    name: str,
    times: Mapping[str, Sequence[float]],
    more_ratios: Sequence[float],
    wrong: int,
    plan: Plan | None,
    decision: Decision,
    profile: Profile,
) -> BenchRow:
    ratios = [own_us / theirs for own_us, theirs in zip(times[name], times[_TORCH], strict=True)] + [*more_ratios]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return BenchRow(
        name=name,
        kind="plan" if plan else "torch" if name == _TORCH else "baseline",
        p50_us=median(times[name]),
        min_us=min(times[name]),
        max_us=max(times[name]),
        ratio=median(ratios),
        ratio_low=low,
        ratio_high=high,
        num_wrong=wrong,
        rounds=len(times[name]),
        ratio_rounds=len(ratios),
        strategy=plan.strategy.value if plan else None,
        chunks=plan.chunks if plan else None,
        gather=plan.gather.value if plan else None,
        wire=str(plan.wire) if plan else None,
        predicted_us=price(plan, profile).total_us if plan else None,
        is_chosen=plan == decision.plan,
    )


def _traced(size: int, communicator: Communicator, result: BenchResult) -> tuple[str, Timeline, Timeline]:
    """Trace the chosen plan: its title, prediction, and of some runs the one that took most nearly as long as the median in
    ``result``."""
    x, decision, runs = _tokens(size, communicator), communicator.decide(size), []
    for _ in range(_TRACED_RUNS):
        dist.barrier()
        runs.append(communicator.trace(x, decision.plan))
    (chosen,) = (point.chosen for point in result.points if point.logical_bytes == size)
    measured = min(runs, key=lambda run: abs(run.total_us - chosen.p50_us))
    return f"{decision.plan.name}, {size / 2**20:g} MiB a rank", decision.timeline, measured
