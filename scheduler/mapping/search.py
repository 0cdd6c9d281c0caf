"""The best setups of a job on a cluster: an exhaustive search that looks closely only at what may win.

Best first, with bounds (A*; Land and Doig's branch and bound). A heap holds what may still be the fastest, by a time below
which it cannot be: first families of setups (:class:`~commlayer.scheduler.mapping.space.Family`) by their compute and bubble;
then, for each exchange, by what their layers send too; then the setups of a family by closer bounds, those that fit in memory;
then setups by their estimate. What comes out with an
estimate is final: everything else takes at least as long. A setup that recomputes more is asked for only where the same with
less does not fit, or is final (but with ZeRO 3). So the answer is that of a brute force whenever the estimator keeps its word
(:class:`Estimates`). Ties go to the simpler setup.

Rejected: a beam, or descent from neighbour to neighbour. Both miss mappings that need several degrees changed at once (TP for
EP at another PP), and cannot say that they did not.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import DispatchError, InternalError, UsageError
from commlayer.scheduler.mapping import memory
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layout_balance import LaidOut
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.offloading import KEPT, unfit_offload
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT, EVEN_LAYOUT, parse_layout
from commlayer.scheduler.mapping.pipeline_schedule import SCHEDULES, merges, unfit
from commlayer.scheduler.mapping.precisions import why_not
from commlayer.scheduler.mapping.recomputation import RECOMPUTE, Recompute, recompute_order, unfit_recomputation
from commlayer.scheduler.mapping.result import Memory, StepEstimate, describe_memory
from commlayer.scheduler.mapping.software import COMMLAYER, Software
from commlayer.scheduler.mapping.space import (
    Family,
    Space,
    by_chunks,
    families,
    is_within,
    recompute_chains,
    recompute_ways,
    setups,
    simplicity,
)

__all__ = [
    "CLOSEST",
    "MOST_GPUS",
    "SAME",
    "Estimates",
    "Fit",
    "MappingKind",
    "SearchResult",
    "check_margin",
    "renames",
    "search",
    "smallest_fit",
]

CLOSEST = 4
"""The last level of bounds."""
MOST_GPUS = 65_536
"""Up to here :func:`smallest_fit` looks."""
SAME = 0.01
"""The part by which two names of one mapping may differ in time: far less than any estimate's error."""
_MOST_VARIANTS = 4
_MOST_KINDS = 3
_ROUNDING = 1e-9
"""The part by which a bound may exceed an estimate, as its sums are rounded in another order."""

Progress = Callable[[int, int], None]


class Estimates(Protocol):
    """The interface of an estimator to the search (:class:`commlayer.scheduler.mapping.simulate.Estimator` is one).

    No bound exceeds what it is a bound of; and with ZeRO up to 2 and nothing offloaded recomputing more makes no step shorter
    (with 3 it can: gathers of weights hide behind it; and what is computed again need not come back from the host).
    ``memory_limit``: bytes that a GPU has for a job, what the driver and fragments take set aside.
    """

    @property
    def job(self) -> Job: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def software(self) -> Software: ...
    @property
    def memory_limit(self) -> float: ...

    def memory(self, setup: Setup, /) -> Memory:
        """The memory of the fullest GPU."""
        ...

    def laid_out(self, setup: Setup, limit: float, /) -> LaidOut:
        """The setup with the pipeline layout that it gets for ``limit`` bytes of memory, where it says ``auto``."""
        ...

    def bound_us(self, setup: Setup, level: int, /) -> float:
        """Bound the step's time from below. Level 0: also that of every setup that has another exchange, recomputes more or
        shards less by ZeRO, and is else the same. Levels 1 and 2: that of every one that recomputes more or shards less. Up to
        here, with the pipeline layout ``auto``, of every layout; and with it up to level 1, in 1F1B, that of every one with fewer
        chunks. Levels 3 to :data:`CLOSEST`: that of ``setup``. Each is closer and slower to find (or the same again)."""
        ...

    def estimate(self, setup: Setup, /, *, detail: bool = True) -> StepEstimate:
        """All of it; without ``detail`` what takes long and changes no time may be missing."""
        ...


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        cluster, software: names.
        ranked: the best, fastest first; never empty.
        best_unfolded, best_folded: the best with ``folded`` False and True; None where none fits or the space has none.
        kinds: the fastest of up to three kinds, the best's first: which of them wins depends on what estimates know least of.
            Empty where fewer than three mappings were asked for.
        num_valid: setups in the space. num_checked: whose memory was counted, for the others cannot be among the best.
            num_fitting: of these. num_estimated: whose step was estimated.
        seconds: that the search took.
        variants: by a setup of ``ranked``, those that only rename an axis of it, where the search was asked for distinct ones.
        margin: the part of each GPU's memory limit that was left free.
        top: how many were asked for; ``ranked`` has fewer only where no others fit.
    """

    job: Job
    cluster: str
    software: str
    ranked: tuple[StepEstimate, ...]
    best_unfolded: StepEstimate | None
    best_folded: StepEstimate | None
    num_valid: int
    num_checked: int
    num_fitting: int
    num_estimated: int
    seconds: float
    variants: Mapping[Setup, tuple[Setup, ...]] = field(default_factory=dict)
    margin: float = 0.0
    top: int = 10
    kinds: Mapping[MappingKind, StepEstimate] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[StepEstimate, ...]:
        """The mappings to show, as many as were asked for: those of different kinds first, then the others by their time."""
        first = {each.setup: each for each in self.kinds.values()}
        return (*first.values(), *(each for each in self.ranked if each.setup not in first))[: self.top]

    @property
    def best(self) -> StepEstimate:
        return self.ranked[0]

    @property
    def equal(self) -> tuple[int, ...]:
        """The numbers, from 1, of those ``shown`` that are equal within what is known: the best, which comes first, and
        those whose intervals meet its own."""
        high = self.best.interval_us[1]
        return tuple(
            number for number, each in enumerate(self.shown, start=1) if number == 1 or each.interval_us[0] < high
        )


def search(
    job: Job,
    estimator: Estimates,
    space: Space | None = None,
    *,
    top: int = 10,
    distinct: bool = False,
    margin: float = 0.0,
    progress: Progress | None = None,
) -> SearchResult:
    """The ``top`` fastest setups that fit, and the best of the unfolded and of the folded.

    Args:
        distinct: setups that only rename an axis of a faster one (:func:`renames`) are its ``variants``, and not ranked.
        margin: the part of ``estimator.memory_limit`` that stays free, from 0 to below 1.
        progress: called with what has been looked at so far and of how many, both in setups.

    Raises:
        UsageError: no setup of the space is valid; or none fits, with the smallest number of GPUs that would do.
    """
    if type(top) is not int or top < 1:
        raise UsageError(f"top: expected a whole number of at least 1, got {top!r}")
    if estimator.job != job:
        raise UsageError("the estimator is of another job: make it of the job that is searched")
    check_margin(margin)
    space = space or Space()
    began = time.perf_counter()
    frontier = _Frontier(estimator, space, progress, estimator.memory_limit * (1 - margin))
    with _without_collecting():
        frontier.fill(families(job, estimator.cluster, space, estimator.software), top)
        if not frontier.num_valid:
            raise UsageError(_nothing_valid(estimator, space))
        ranked, variants = _distinct(frontier, top) if distinct else (list(frontier.take(top)), {})
        if not ranked and frontier.refused and not frontier.lightest:
            raise UsageError(frontier.refused)
        if not ranked and frontier.lightest:
            raise UsageError(_nothing_fits(estimator, space, frontier.lightest, margin))
        if progress:  # the ranking is whole, also where fewer fit
            progress(frontier.num_valid + top, frontier.num_valid + top)
        kinds = _of_kinds(frontier, ranked, estimator.cluster) if top >= _MOST_KINDS else {}
        unfolded = frontier.best_of(lambda setup: not setup.folded, ranked)
        folded = frontier.best_of(lambda setup: setup.folded, ranked)
    every = (*ranked, *kinds.values(), *filter(None, (unfolded, folded)))
    estimates = {each.setup: estimator.estimate(each.setup) for each in every}  # in detail
    if frontier.refused:
        why = f"mappings were passed over: {frontier.refused}"
        estimates = {setup: replace(each, notes=(*each.notes, why)) for setup, each in estimates.items()}
    return SearchResult(
        job=job,
        cluster=estimator.cluster.name,
        software=estimator.software.name,
        ranked=tuple(estimates[each.setup] for each in ranked),
        best_unfolded=estimates[unfolded.setup] if unfolded else None,
        best_folded=estimates[folded.setup] if folded else None,
        num_valid=frontier.num_valid,
        num_checked=frontier.num_checked,
        num_fitting=frontier.num_fitting,
        num_estimated=frontier.num_estimated,
        seconds=time.perf_counter() - began,
        variants=variants,
        margin=margin,
        top=top,
        kinds={kind: estimates[each.setup] for kind, each in kinds.items()},
    )


class MappingKind(NamedTuple):
    """The kind of a mapping: how many pipeline stages it has, and whether its experts lie on several NVLink domains."""

    stages: int
    is_across: bool

    def __str__(self) -> str:
        where = "across" if self.is_across else "inside"
        return f"{counted(self.stages, 'pipeline stage')}, experts {where} NVLink domains"


def _kind_of(setup: Setup, cluster: Cluster) -> MappingKind:
    return MappingKind(setup.pp, len(cluster.nodes_of(setup.layout("etp_ep"), setup.gpus)) > 1)


def _of_kinds(frontier: _Frontier, ranked: list[StepEstimate], cluster: Cluster) -> dict[MappingKind, StepEstimate]:
    """The fastest of each kind, none of which only renames an axis of another."""
    kinds: dict[MappingKind, StepEstimate] = {}
    seen: set[MappingKind] = set()
    while len(kinds) < _MOST_KINDS:
        one = frontier.best_of(lambda setup: _kind_of(setup, cluster) not in seen, ranked)
        if one is None:
            break
        kind = _kind_of(one.setup, cluster)
        seen.add(kind)
        if not any(renames(one, other) for other in kinds.values()):
            kinds[kind] = one
    return kinds


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Leave Python's collector of circles off: a search keeps hundreds of thousands of objects, none of them in a circle, and it
    went through them time and again, for a tenth of the search's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # All are old at once: else the collector goes through them now, as through new ones.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def check_margin(margin: float) -> None:
    """Raises UsageError where ``margin`` is no part of a memory, or all of it."""
    if not 0 <= margin < 1:
        raise UsageError(f"margin: expected a part of the memory from 0 to below 1, got {margin!r}")


def renames(one: StepEstimate, other: StepEstimate) -> bool:
    """Whether two setups only name an axis in another way, and take the same time within :data:`SAME`.

    So do the same degrees folded and unfolded, where experts' groups are laid out in another order; and contexts that are split
    over more ranks with so many times larger micro-batches: each rank has as many tokens, of parts of more sequences.
    """
    return abs(one.step_us / other.step_us - 1) <= SAME and _renamed(one.setup) == _renamed(other.setup)


def _renamed(setup: Setup) -> tuple[Setup, float]:
    plain = replace(setup, cp=1, micro_batch=1, folded=True, pipeline_layout=EVEN_LAYOUT)
    return plain, setup.cp / setup.micro_batch


def _distinct(frontier: _Frontier, top: int) -> tuple[list[StepEstimate], dict[Setup, tuple[Setup, ...]]]:
    """The ``top`` fastest that do not rename each other, and what renames them among the ``_MOST_VARIANTS`` · ``top`` fastest."""
    ranked: list[StepEstimate] = []
    variants: dict[Setup, tuple[Setup, ...]] = {}
    for each in frontier.take(_MOST_VARIANTS * top):
        known = next((faster for faster in ranked if renames(each, faster)), None)
        if known is not None:
            variants[known.setup] = (*variants.get(known.setup, ()), each.setup)
            continue
        ranked.append(each)
        if len(ranked) == top:
            break
    return ranked, variants


class _Entry(NamedTuple):
    """On the heap. ``stage``: the level of the bound that ``time_us`` is, or beyond all of them for an estimate. At one time
    what is not yet estimated comes first: it may turn out to be simpler. No two have the same ``tie`` at one stage, so that
    comparing ends there. ``setup``: one of the item's setups, whose degrees all but vpp are those of all of them."""

    time_us: float
    stage: int
    tie: tuple[Any, ...]
    item: tuple[Family, ...] | Setup | StepEstimate
    setup: Setup


class _Frontier:
    """The candidates that may still be the fastest."""

    def __init__(self, estimator: Estimates, space: Space, progress: Progress | None, limit: float) -> None:
        self._estimator, self._progress = estimator, progress
        self._heap: list[_Entry] = []
        self._order = itertools.count()
        self._limit = limit
        self._is_open = space.pipeline_layout == AUTO_LAYOUT
        self._asked: set[Setup] = set()
        """Setups of which more recomputation was asked for, where their fastest layout does not fit before they were final."""
        chains = recompute_chains(space.recompute_by(estimator.software))
        self._after = {word: chain[place + 1 :] for chain in chains for place, word in enumerate(chain)}
        self._is_unfit = cache(partial(unfit_recomputation, estimator.job.model, estimator.cluster.gpu))
        self.num_valid = self.num_checked = self.num_fitting = self.num_estimated = 0
        self.lightest: tuple[Memory, Setup] | None = None
        self.refused = ""
        """Why the dispatcher cannot send the tokens of some mappings, which are passed over."""

    def fill(self, families: Iterable[Family], top: int) -> None:
        """Put every family on the heap, by its bound."""
        every = list(by_chunks(families))
        self.num_valid = sum(family.size for alike in every for family in alike)
        bounded = 0
        for index, alike in enumerate(every):
            lead = alike[-1].lead()
            bound = self._estimator.bound_us(lead, 0)
            self._heap.append(_Entry(bound, 0, (next(self._order),), alike, lead))
            bounded += sum(family.size for family in alike)
            if self._progress and (index % 1024 == 0 or index + 1 == len(every)):
                self._progress(bounded, self.num_valid + top)
        heapq.heapify(self._heap)

    def take(self, top: int) -> Iterator[StepEstimate]:
        """The next fastest, up to ``top``."""
        taken = 0
        while taken < top and self._heap:
            entry = heapq.heappop(self._heap)
            if not isinstance(entry.item, StepEstimate):
                self._look_closer(entry.time_us, entry.stage, entry.item)
                continue
            taken += 1
            if self._progress:
                self._progress(self.num_valid + taken, self.num_valid + top)
            # It is final, so the same with more recomputation comes into question.
            setup, time_us = entry.setup, entry.time_us
            if self._is_open and setup.pp > 1:
                setup, time_us = replace(setup, pipeline_layout=AUTO_LAYOUT), time_us * (1 - SAME)
            if setup not in self._asked:
                self._asked.add(setup)
                self._recompute_more(time_us, setup)
            yield entry.item

    def best_of(self, is_one: Callable[[Setup], bool], ranked: Iterable[StepEstimate]) -> StepEstimate | None:
        """The fastest of one kind: of ``ranked``, or else of what is left of that kind."""
        known = next((entry for entry in ranked if is_one(entry.setup)), None)
        if known is not None:
            return known
        everything, self._heap, self._progress = self._heap, [], None
        others: list[_Entry] = []
        for entry in everything:
            (self._heap if is_one(entry.setup) else others).append(entry)
        heapq.heapify(self._heap)
        best = next(self.take(1), None)  # which goes back: it may be the fastest of another kind too
        self._heap += others if best is None else [*others, _final(best)]
        heapq.heapify(self._heap)
        return best

    def _put_back(self, bound_us: float, alike: tuple[Family, ...], level: int) -> None:
        """With a bound that knows what its layers send: most families are never opened."""
        lead = alike[-1].lead()
        try:
            bound = max(bound_us, self._estimator.bound_us(lead, level))
        except DispatchError as error:
            self.refused = str(error)
            return
        heapq.heappush(self._heap, _Entry(bound, level, (next(self._order),), alike, lead))

    def _look_closer(self, bound_us: float, stage: int, item: tuple[Family, ...] | Setup) -> None:
        """Put what is not estimated back, with a closer bound or in its parts."""
        if isinstance(item, Setup):
            if stage < CLOSEST:
                self._push(bound_us, item, stage + 1)
            else:
                self._estimate(bound_us, item)
        elif stage == 0:
            for alike in zip(*(family.by_exchange() for family in item), strict=True):
                self._put_back(bound_us, alike, 1)
        elif stage == 1:
            for family in item:
                self._put_back(bound_us, (family,), 2)
        else:
            (family,) = item
            for setup in family.members():
                if setup.recompute == family.recompute[0] or _is_by_itself(setup):
                    self._admit(bound_us, setup)

    def _admit(self, bound_us: float, setup: Setup) -> None:
        """With its layout, where it fits; else, or where a faster layout does not, the same with more recomputation too."""
        laid, is_fastest = self._estimator.laid_out(setup, self._limit)
        needed = self._estimator.memory(laid)
        self.num_checked += 1
        if self.lightest is None or needed.total < self.lightest[0].total:
            self.lightest = needed, laid
        fits = needed.total <= self._limit
        if fits:
            self.num_fitting += 1
            self._push(bound_us, laid, 3)
        if not fits or not is_fastest:
            self._asked.add(setup)
            self._recompute_more(bound_us, setup)

    def _push(self, bound_us: float, setup: Setup, level: int) -> None:
        bound = max(bound_us, self._estimator.bound_us(setup, level))
        heapq.heappush(self._heap, _Entry(bound, level, (next(self._order),), setup, setup))

    def _recompute_more(self, bound_us: float, setup: Setup) -> None:
        """The same with more recomputation, which takes at least ``bound_us`` as well: nobody asks for it before."""
        if _is_by_itself(setup):
            return
        for word in recompute_ways(setup.schedule, self._after[setup.recompute]):
            if not self._is_unfit(word, setup.precision, merges(setup.schedule)):
                self._admit(bound_us, replace(setup, recompute=word))
                break

    def _estimate(self, bound_us: float, setup: Setup) -> None:
        estimate = self._estimator.estimate(setup, detail=False)
        self.num_estimated += 1
        if estimate.step_us < bound_us * (1 - _ROUNDING):
            raise InternalError(
                f"the bound of {setup} is {bound_us} µs, above its estimate of {estimate.step_us} µs: a search by such bounds "
                "may miss the best; please report it"
            )
        heapq.heappush(self._heap, _final(estimate))


def _final(estimate: StepEstimate) -> _Entry:
    return _Entry(estimate.step_us, CLOSEST + 1, simplicity(estimate.setup), estimate, estimate.setup)


def _is_by_itself(setup: Setup) -> bool:
    """Recomputation may make it shorter (:class:`Estimates`)."""
    return setup.zero == 3 or setup.offload != KEPT


def _nothing_valid(estimator: Estimates, space: Space) -> str:
    job, cluster = estimator.job, estimator.cluster
    why = "; ".join(_impossible(job, cluster, space, space.recompute_by(estimator.software))) or (
        "the data-parallel degree must divide the batch, tp·cp·pp and etp·ep·pp the GPUs; try another number of GPUs or "
        "sequences, or allow more degrees"
    )
    return (
        f"no mapping of {job.model.name} onto {counted(job.gpus, 'GPU')} of {cluster.name} is valid with "
        f"global_batch={job.global_batch}, sequence={job.sequence} ({space}): {why}"
    )


def _impossible(job: Job, cluster: Cluster, space: Space, recompute: tuple[Recompute, ...]) -> Iterator[str]:
    """The choices that no mapping can have, whatever the others are."""
    model, gpu = job.model, cluster.gpu
    refused = [why_not(word, gpu) for word in dict.fromkeys(space.precision)]
    if all(refused):
        yield "; ".join(refused)
    yield from _impossible_degrees(job, cluster, space)
    yield from _unfit_activations(model, gpu, space, recompute)
    chunks_of_ranks = space.vpp or ((1,) if space.pp == (1,) else ())
    if space.pp and chunks_of_ranks:
        pairs = [unfit(*each) for each in itertools.product(space.schedule, space.pp, chunks_of_ranks)]
        if all(pairs):
            yield f"schedule {_or(space.schedule)}: {pairs[0]}"
    if space.pp and min(space.pp) > 1 and min(space.zero) > 1 and all(map(merges, space.schedule)):
        yield f"schedule {_or(space.schedule)} sums gradients once a step in a pipeline: allow zero 0 or 1"
    if space.pipeline_layout not in (AUTO_LAYOUT, EVEN_LAYOUT):
        chunks = len(parse_layout(space.pipeline_layout))
        yield (
            f"a layout of {counted(chunks, 'chunk')} is for pipelines with pp · vpp (dualpipev: 2 · pp) = {chunks}: change it, "
            "or the GPUs"
        )
    if space.pp and min(space.pp) > model.layers:
        yield f"pp {_or(space.pp)}: expected at most as many stages as layers of {model.name}, {model.layers}"


def _impossible_degrees(job: Job, cluster: Cluster, space: Space) -> Iterator[str]:
    """The degrees that no mapping can have."""
    model = job.model
    divided = {
        "tp": (f"heads of {model.name}", model.heads),
        "cp": ("sequence", job.sequence),
        "ep": (f"experts of {model.name}", model.experts),
        "etp": (f"width of an expert of {model.name}", model.width),
    }
    for axis in ("tp", "cp", "ep", "etp", "pp"):
        values = getattr(space, axis) or ()
        name, number = divided.get(axis, ("", 0))
        if values and all(number % value for value in values):
            yield f"{axis} {_or(values)}: expected a divisor of the {name}, {number}"
        elif values and all(job.gpus % value for value in values):
            yield f"{axis} {_or(values)}: expected a divisor of the GPUs, {job.gpus}"
        elif values and axis in ("tp", "etp") and not any(is_within(each, job, cluster, space) for each in values):
            yield (
                f"{axis} {_or(values)}: expected a divisor of the GPUs on NVLink, {cluster.domain}, or a space that leaves "
                "NVLink domains (--across-domains)"
            )
    if space.cp and min(space.cp) > 1 and model.needs_whole_sequences:
        kind = "linear" if model.linear is not None else "compressed"
        yield f"cp {_or(space.cp)}: {model.name} has layers of {kind} attention, which are planned without it: take cp 1"


def _unfit_activations(model: ModelShape, gpu: Gpu, space: Space, recompute: tuple[Recompute, ...]) -> Iterator[str]:
    there = [word for word in space.precision if not why_not(word, gpu)]
    ways = itertools.product(recompute, there, map(merges, space.schedule))
    unfit_ways = [unfit_recomputation(model, gpu, *way) for way in ways]
    if unfit_ways and all(unfit_ways):
        yield f"recompute {_or(recompute)}: {unfit_ways[0]}"
    if not any(recompute_ways(schedule, recompute) for schedule in space.schedule):
        yield f"schedule {_or(space.schedule)} computes no layer again as a whole: allow recompute none or megascale"
    refused = [unfit_offload(*each) for each in itertools.product(space.offload, recompute)]
    if all(refused):
        yield f"offload {_or(space.offload)}: {refused[0]}"


def _or(values: tuple[object, ...]) -> str:
    return " or ".join(map(str, values))


def _nothing_fits(estimator: Estimates, space: Space, lightest: tuple[Memory, Setup], margin: float) -> str:
    """Say what is in the way, and what would do."""
    job, (needed, setup) = estimator.job, lightest
    limit = estimator.memory_limit * (1 - margin)
    message = (
        f"{job.model.name} fits in no mapping on {counted(job.gpus, 'GPU')} of {estimator.cluster.name}: the least needs "
        f"{needed.total / 1e9:.1f} GB of {limit / 1e9:.1f} GB on a GPU ({setup}; {describe_memory(needed)})"
    )
    fit = smallest_fit(job, estimator.cluster, space, memory_limit=limit, software=estimator.software)
    if fit is None:
        return f"{message}. Nor does it on any number up to {MOST_GPUS}: allow recomputation, a higher ZeRO stage or more degrees"
    return (
        f"{message}. {counted(fit.gpus, 'GPU')} would do: {fit.setup} takes {fit.memory.total / 1e9:.1f} GB "
        f"({describe_memory(fit.memory)})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fewest GPUs on which a job fits, and the setup that takes the least memory there."""

    gpus: int
    setup: Setup
    memory: Memory


def smallest_fit(
    job: Job,
    cluster: Cluster,
    space: Space | None = None,
    *,
    memory_limit: float,
    software: Software = COMMLAYER,
    most_gpus: int = MOST_GPUS,
) -> Fit | None:
    """The smallest number of GPUs on which ``job`` fits in memory, whatever its own is; None where not even ``most_gpus`` do.

    Looked at are the divisors of the domain, then 1, 2, 3, 4, 6, 8, 12 … domains (powers of two, and those times 1.5): what
    clusters come in. ``memory_limit``: bytes that a GPU has for a job.
    """
    space = space or Space()
    schedule = min(space.schedule, key=SCHEDULES.index)  # merged tasks take more memory, or copies
    ways = space.recompute_by(software)
    recompute = recompute_ways(schedule, ways) or ways
    most = max(recompute, key=recompute_order)  # of sets of modules nobody knows which takes less
    lean = replace(  # without what never takes less memory than the rest
        space,
        micro_batch=space.micro_batch if space.micro_batch and 1 not in space.micro_batch else (1,),
        vpp=space.vpp or ((1, 2) if schedule == "1f1b-overlap" else (1,)),
        pipeline_layout=EVEN_LAYOUT if space.pipeline_layout == AUTO_LAYOUT else space.pipeline_layout,
        schedule=(schedule,),
        recompute=(most,) if most in RECOMPUTE[1:] and set(space.offload) == {KEPT} else recompute,
        zero=(max(space.zero),),
    )
    for gpus in _sizes(cluster.domain, most_gpus):
        asked = replace(job, gpus=gpus)
        sizes = (
            (memory.estimate(asked, setup, software=software, gpu=cluster.gpu), setup)
            for setup in setups(asked, cluster, lean)
        )
        least = min(sizes, key=lambda fit: (fit[0].total, simplicity(fit[1])), default=None)
        if least is not None and least[0].total <= memory_limit:
            return Fit(gpus=gpus, setup=least[1], memory=least[0])
    return None


def _sizes(domain: int, most: int) -> Iterator[int]:
    """Numbers of GPUs that clusters come in, ascending."""
    yield from (gpus for gpus in range(1, domain) if domain % gpus == 0 and gpus <= most)
    domains = 1
    while domains * domain <= most:
        yield domains * domain
        if domains > 1 and domains * domain * 3 // 2 <= most:
            yield domains * domain * 3 // 2
        domains *= 2
