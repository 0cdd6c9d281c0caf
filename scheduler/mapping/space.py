"""Every valid way to do a job on a cluster.

Rules, all of them arithmetic (the brute force of the tests asks :class:`~commlayer.scheduler.mapping.job.Setup` instead):

- tp·cp·pp and etp·ep·pp divide the GPUs; dp·micro_batch divides the global batch.
- tp divides the heads; it divides the key-value heads or is a multiple of them (each is then kept tp / kv_heads times;
  Megatron-LM itself asks for the first, Megatron-Bridge allows both). Latent attention (MLA) has no such heads: only the
  first rule holds. Where it is tensor parallelism (not ulysses) it divides the widths of dense FFNs and of what all tokens
  share as well.
- tp and etp stay inside NVLink domains, unless ``within_domain`` is False: they divide the domain, or all GPUs are in one.
- cp·tp divides the sequence (sequence parallelism), and 2·cp·tp does where cp > 1: every rank has one early and one late
  block of each sequence, so that causal attention is as long on all (Megatron's zigzag).
- Linear attention: cp is 1, and tp divides its key heads.
- ep divides the experts, etp an expert's width.
- pp·vpp is at most the number of layers: no chunk is empty. vpp > 1 only with pp > 1, and where pp divides the micro-batches
  (Megatron's interleaved schedule). Unless the space names ``vpp``, the chunks must be nearly equal: fewer than pp layers are
  missing until all are full (Megatron wants none missing, or a layout that puts embedding and loss into the gaps).
- Unfolded: etp = tp, and ep divides dp, or the part of it that dp has no room for divides cp. Where folding changes no group
  (etp = tp, and ep takes nothing of dp, or all of cp: so with cp = 1 or ep = 1) the setup counts once, as unfolded where the
  space has that.
- A layout that is spelt out only with the pipelines that have as many chunks. Else each mapping has one layout.
- What changes nothing is not counted twice: exchange with ep = etp = 1, ulysses with tp = 1. The first that the space names
  is taken.
- A schedule only where it goes with pp, vpp and the micro-batches (:func:`~commlayer.scheduler.mapping.pipeline_schedule.unfit`),
  nothing that is recomputed as a whole and, in a pipeline, ZeRO up to 1; 1f1b-overlap only where there is an exchange by
  all_to_all to hide.
- Activations are offloaded as Megatron-Core takes it (:mod:`commlayer.scheduler.mapping.offloading`).
- a recipe of FP8 only where the GPU has it (mapping/precisions.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import groupby, product
from typing import NamedTuple, get_args

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.divisors import divisors
from commlayer.scheduler.mapping.job import Attention, ExchangeKind, Job, Precision, Setup
from commlayer.scheduler.mapping.model import split_by_tp
from commlayer.scheduler.mapping.offloading import KEPT, Offload, canonical_offload, unfit_offload
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT, EVEN_LAYOUT, canonical_layout, parse_layout
from commlayer.scheduler.mapping.pipeline_schedule import SCHEDULES, PipelineSchedule, merges, num_chunks, unfit
from commlayer.scheduler.mapping.precisions import why_not
from commlayer.scheduler.mapping.recomputation import (
    RECOMPUTE,
    Recompute,
    canonical,
    recompute_order,
    recomputes_less,
    unfit_recomputation,
)
from commlayer.scheduler.mapping.software import COMMLAYER, Software

__all__ = [
    "Family",
    "Space",
    "by_chunks",
    "families",
    "is_within",
    "recompute_chains",
    "recompute_ways",
    "setups",
    "simplicity",
]

_DEGREES = ("tp", "cp", "ep", "etp", "pp", "vpp", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The space that the search chooses from: the allowed values of each field of a Setup; None: every valid one.

    ``recompute`` None: the ways that the software runs. ``pipeline_layout`` is one for all: ``auto``, which gives each mapping
    the layout that is the fastest of those that fit, ``even``, or one that is spelt out, for the pipelines of as many chunks.
    ``within_domain``: tp and etp stay inside NVLink domains.

    Raises:
        UsageError: an empty choice, a value out of its range, or a layout that is none.
    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    vpp: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = (1, 2, 4, 8)
    recompute: tuple[Recompute, ...] | None = None
    precision: tuple[Precision, ...] = ("bf16",)
    exchange: tuple[ExchangeKind, ...] = ("all_to_all", "all_gather")
    attention: tuple[Attention, ...] = ("tensor",)
    zero: tuple[int, ...] = (1,)
    folded: tuple[bool, ...] = (True, False)
    schedule: tuple[PipelineSchedule, ...] = ("1f1b",)
    offload: tuple[Offload, ...] = (KEPT,)
    pipeline_layout: str = AUTO_LAYOUT
    within_domain: bool = True

    def __str__(self) -> str:
        """Name what is narrowed, such as ``tp 1 or 2, zero 3``; "every choice" where nothing is."""
        narrowed = (field for field in fields(self) if getattr(self, field.name) != field.default)
        words = [f"{field.name} {_or(getattr(self, field.name))}" for field in narrowed]
        return ", ".join(words) or "every choice"

    def __post_init__(self) -> None:
        for name in _DEGREES:
            values = getattr(self, name)
            if values is not None and (not values or any(type(value) is not int or value < 1 for value in values)):
                raise UsageError(
                    f"{name}: expected whole numbers of at least 1, or None for every valid one, got {values!r}"
                )
        allowed: dict[str, tuple[object, ...]] = {
            "precision": get_args(Precision),
            "exchange": get_args(ExchangeKind),
            "attention": get_args(Attention),
            "zero": (0, 1, 2, 3),
            "folded": (True, False),
            "schedule": SCHEDULES,
        }
        if self.recompute is not None:
            if not self.recompute:
                raise UsageError(f"recompute: expected some of {', '.join(RECOMPUTE)}, or modules, got ()")
            object.__setattr__(self, "recompute", tuple(dict.fromkeys(map(canonical, self.recompute))))
        if not self.offload:
            raise UsageError(f"offload: expected {KEPT}, or modules, got {self.offload!r}")
        object.__setattr__(self, "offload", tuple(map(canonical_offload, self.offload)))
        object.__setattr__(self, "pipeline_layout", canonical_layout(self.pipeline_layout))
        for name, known in allowed.items():
            values = getattr(self, name)
            if not values or any(value not in known for value in values):
                raise UsageError(f"{name}: expected some of {', '.join(map(str, known))}, got {values!r}")

    def recompute_by(self, software: Software) -> tuple[Recompute, ...]:
        """The ways of recomputation to choose from: those that were asked for, else those that ``software`` runs."""
        return software.recomputes if self.recompute is None else self.recompute


def _or(values: object) -> str:
    return " or ".join(map(str, values)) if isinstance(values, tuple) else "any" if values is None else str(values)


class Family(NamedTuple):
    """Setups that differ only in ``recompute``, ``exchange`` and ``zero``: their forward passes compute the same on the same
    ranks. Recomputation is ordered from the least to the most."""

    gpus: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    vpp: int
    micro_batch: int
    precision: Precision
    attention: Attention
    folded: bool
    schedule: PipelineSchedule
    pipeline_layout: str
    offload: Offload
    recompute: tuple[Recompute, ...]
    exchange: tuple[ExchangeKind, ...]
    zero: tuple[int, ...]

    @property
    def is_shorter_interleaved(self) -> bool:
        """Whether no bound of its step, up to level 1, is shorter with fewer chunks on each rank."""
        return self.schedule == "1f1b" and self.pipeline_layout == AUTO_LAYOUT

    @property
    def size(self) -> int:
        """How many setups."""
        return len(self.recompute) * len(self.exchange) * len(self.zero)

    def by_exchange(self) -> Iterator[Family]:
        """The families that have one exchange each."""
        return (self._replace(exchange=(each,)) for each in self.exchange)

    def lead(self) -> Setup:
        """The one with the least recomputation and the highest ZeRO stage: none of them computes less."""
        return self._setup(self.recompute[0], self.exchange[0], max(self.zero))

    def members(self) -> Iterator[Setup]:
        """All of them."""
        for words in product(self.recompute, self.exchange, self.zero):
            yield self._setup(*words)

    def _setup(self, recompute: Recompute, exchange: ExchangeKind, zero: int) -> Setup:
        """Without Setup's own checks, which took most of the time: :func:`families` keeps the same rules, as tests show."""
        setup = object.__new__(Setup)
        own = (self.gpus, self.tp, self.cp, self.pp, self.ep, self.etp, self.vpp, self.micro_batch)
        words = (recompute, self.precision, exchange, self.attention, zero, self.folded, self.schedule)
        for put, value in zip(_PUT, (*own, *words, self.offload, self.pipeline_layout), strict=True):
            put(setup, value)
        return setup


def by_chunks(found: Iterable[Family]) -> Iterator[tuple[Family, ...]]:
    """Neighbours among families that differ only in their chunks, together, the most chunks last: no
    bound up to level 1 is shorter than the last one's."""
    place = Family._fields.index("vpp")

    def others(family: Family) -> tuple[object, ...]:
        return family[:place] + family[place + 1 :] if family.is_shorter_interleaved else family

    return (tuple(same) for _, same in groupby(found, others))


_PUT = tuple(getattr(Setup, field.name).__set__ for field in fields(Setup))
"""How each slot of a Setup is filled, in the order of its fields."""


def setups(job: Job, cluster: Cluster, space: Space | None = None, software: Software = COMMLAYER) -> Iterator[Setup]:
    """All valid setups of ``job`` on ``cluster`` in ``space``, each once."""
    for family in families(job, cluster, space or Space(), software):
        yield from family.members()


def simplicity(setup: Setup) -> tuple[object, ...]:
    """Orders setups that are equally fast: fewer degrees in use, less recomputation, smaller degrees, then by name."""
    degrees = (setup.tp, setup.cp, setup.pp, setup.ep, setup.etp, setup.vpp)
    return (
        sum(degree > 1 for degree in degrees),
        recompute_order(setup.recompute),
        math.prod(degrees),
        str(setup),
    )


def families(job: Job, cluster: Cluster, space: Space, software: Software = COMMLAYER) -> Iterator[Family]:
    """The valid setups by family."""
    ways = [
        (offload, chain)
        for offload in dict.fromkeys(space.offload)
        for chain in recompute_chains(space.recompute_by(software), offload)
    ]
    model, gpu = job.model, cluster.gpu
    precisions = tuple(word for word in dict.fromkeys(space.precision) if not why_not(word, gpu))
    fit = {
        (schedule, precision): [
            (offload, recompute_ways(schedule, words))
            for offload, chain in ways
            if (words := [w for w in chain if not unfit_recomputation(model, gpu, w, precision, merges(schedule))])
        ]
        for schedule, precision in product(dict.fromkeys(space.schedule), precisions)
    }
    exchanges, attentions = tuple(dict.fromkeys(space.exchange)), tuple(dict.fromkeys(space.attention))
    zeros = tuple(dict.fromkeys(space.zero))
    for pp, tp, cp, dp, batches in _attention_sides(job, cluster, space):
        attention = attentions[:1]
        if tp > 1:  # ulysses splits no widths
            divides = model.shared_width % tp == 0 and model.dense_width % tp == 0
            attention = tuple(kind for kind in attentions if divides or kind == "ulysses")
        for etp, ep, folded in _expert_sides(job, cluster, space, (pp, tp, cp, dp)):
            for (vpp, micro_batch, schedule), precision, kind in product(batches, precisions, attention):
                sent = exchanges if ep * etp > 1 else exchanges[:1]
                if schedule == "1f1b-overlap":  # which hides an exchange by all_to_all
                    sent = tuple(word for word in sent if word != "all_gather" and ep > 1)
                stages = zeros
                if pp > 1 and merges(schedule):  # gradients are summed once a step
                    stages = tuple(stage for stage in zeros if stage < 2)
                layout = EVEN_LAYOUT if pp == 1 and space.pipeline_layout == AUTO_LAYOUT else space.pipeline_layout
                own = (job.gpus, tp, cp, pp, ep, etp, vpp, micro_batch, precision, kind, folded, schedule, layout)
                for offload, recompute in fit[schedule, precision]:
                    if recompute and sent and stages:
                        yield Family(*own, offload, recompute, sent, stages)


def recompute_chains(words: Iterable[Recompute], offload: Offload = KEPT) -> list[tuple[Recompute, ...]]:
    """Ways of recomputation in chains of which each takes no less time than the one before
    (:func:`~commlayer.scheduler.mapping.recomputation.recomputes_less`). Beside ``offload`` each that goes with it is by
    itself: what is computed again need not cross."""
    every = sorted(set(words), key=recompute_order)
    if offload != KEPT:
        return [(word,) for word in every if not unfit_offload(offload, word)]
    chains: list[list[Recompute]] = []
    for word in every:
        less = next((chain for chain in chains if recomputes_less(chain[-1], word)), None)
        if less is None:
            chains.append(less := [])
        less.append(word)
    return [tuple(chain) for chain in chains]


def recompute_ways(schedule: PipelineSchedule, words: Iterable[Recompute]) -> tuple[Recompute, ...]:
    """Keep the ways of recomputation that go with a schedule: merged layers are not computed again as a whole."""
    return tuple(word for word in words if word != "full" or not merges(schedule))


def _attention_sides(
    job: Job, cluster: Cluster, space: Space
) -> Iterator[tuple[int, int, int, int, list[tuple[int, int, PipelineSchedule]]]]:
    """pp, tp, cp, dp, and every (vpp, micro_batch, schedule) that goes with them."""
    model = job.model
    uneven = {tp for tp in divisors(job.gpus) if any(number % tp for _, number in split_by_tp(model))}
    for pp in _divisors(job.gpus, space.pp, _most_chunks(job, space)):
        stage = job.gpus // pp
        for tp in _divisors(stage, space.tp, model.heads):
            # latent attention has keys and values for every head, others a part or a multiple of tp
            divides = model.latent is not None or model.kv_heads % tp == 0 or tp % model.kv_heads == 0
            if not divides or tp in uneven or not is_within(tp, job, cluster, space):
                continue
            for cp in _divisors(stage // tp, space.cp, job.sequence):
                if cp > 1 and model.needs_whole_sequences:
                    continue
                dp = stage // tp // cp
                if job.sequence % (cp * tp * (2 if cp > 1 else 1)) or job.global_batch % dp:
                    continue
                batches = list(_batches(job, space, pp, dp))
                if batches:
                    yield pp, tp, cp, dp, batches


def _batches(job: Job, space: Space, pp: int, dp: int) -> Iterator[tuple[int, int, PipelineSchedule]]:
    each, schedules = job.global_batch // dp, tuple(dict.fromkeys(space.schedule))
    most = _most_chunks(job, space)
    is_spelt = space.pipeline_layout not in (AUTO_LAYOUT, EVEN_LAYOUT)
    for micro_batch in _divisors(each, space.micro_batch, each):
        count = each // micro_batch
        for vpp, schedule in product(_chunks(most, pp, count, space.vpp), schedules):
            chunks = num_chunks(schedule, pp, vpp)
            is_fit = schedule == "1f1b" or (not unfit(schedule, pp, vpp, count) and chunks <= most)
            if is_fit and (not is_spelt or chunks == most):
                yield vpp, micro_batch, schedule


def _most_chunks(job: Job, space: Space) -> int:
    """The largest number of chunks: as many as there are layers, or as a layout has that is spelt out."""
    return (
        job.model.layers
        if space.pipeline_layout in (AUTO_LAYOUT, EVEN_LAYOUT)
        else len(parse_layout(space.pipeline_layout))
    )


def _chunks(layers: int, pp: int, micro_batches: int, allowed: tuple[int, ...] | None) -> list[int]:
    """Valid numbers of chunks of layers per pipeline rank."""
    if pp == 1 or micro_batches % pp:
        return [1] if (allowed is None or 1 in allowed) else []
    most = layers // pp
    if allowed is not None:
        return [vpp for vpp in sorted(set(allowed)) if vpp <= most]
    return [vpp for vpp in range(1, most + 1) if vpp == 1 or -layers % (pp * vpp) < pp]


def _expert_sides(
    job: Job, cluster: Cluster, space: Space, attention: tuple[int, int, int, int]
) -> Iterator[tuple[int, int, bool]]:
    """etp, ep and whether it is folded."""
    pp, tp, cp, dp = attention
    for etp in _divisors(job.gpus // pp, space.etp, job.model.width):
        if job.model.width % etp or not is_within(etp, job, cluster, space):
            continue
        for ep in _divisors(job.gpus // pp // etp, space.ep, job.model.experts):
            if job.model.experts % ep:
                continue
            beyond = math.gcd(ep, dp)
            within = ep // beyond
            unfolded = False in space.folded and etp == tp and cp % within == 0
            if unfolded:
                yield etp, ep, False
            if True in space.folded and not (unfolded and (beyond == 1 or within == cp)):
                yield etp, ep, True


def is_within(degree: int, job: Job, cluster: Cluster, space: Space) -> bool:
    """Whether groups of ``degree`` ranks are where ``space`` wants them: inside NVLink domains, unless it lets them leave."""
    return not space.within_domain or cluster.domain % degree == 0 or job.gpus <= cluster.domain


def _divisors(number: int, allowed: tuple[int, ...] | None, most: int) -> list[int]:
    """The divisors of ``number`` up to ``most``, of those allowed, ascending."""
    if allowed is not None:
        return [value for value in sorted(set(allowed)) if value <= most and number % value == 0]
    return [value for value in divisors(number) if value <= most]
