"""MoNTA's choice among its three strategies, and for which interference it comes out of our prices.

MoNTA (figure 14) measures, with 4 chunks, hidden size 8192 and sequences of 4K to 256K on 2 nodes of 8 A800: O1 is chosen
up to 16K, O2 from 32K to 128K, O3 at 256K. Its equations say otherwise: by them O3 is never slower than O2, nor O2 than
O1 (table 8's numbers at 8K: 1.97, 2.12 and 2.45 ms). The paper names what they leave out: all_gather and the copy contend
for memory, each launch has a fixed latency, and hosts of different nodes are not aligned. This module finds the sizes of
these effects for which the prices of our plans choose as the paper does.

Volumes follow table 8: 256 MB at 8K, in proportion elsewhere. (b·s·h·BPE of equation 3, with b = 1 and BF16, is half of
that.) Efficiencies are those of the profile ``monta-a800-2x8``, which are known at 8, 32, 256 MB (all_to_all), 64, 256 MB
(all_gather), 64 MB (copy) and at 256K; between them log-log interpolation, below them the latency and slope of the
smallest, as for any profile.

    python benchmarks/papers_monta.py     prints the ranges; `make papers` draws them too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from papers_data import Check

from commlayer.profiles import catalog
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference, Profile
from commlayer.scheduler import Gather, Plan, Strategy, Traffic, build
from commlayer.scheduler.conflicts import Issue, PlannedCall, simulate
from commlayer.scheduler.price import durations_of

__all__ = [
    "CHUNKS",
    "CONSTANT",
    "MEASURED",
    "O1",
    "O2",
    "O3",
    "PAPER",
    "STATED",
    "TABLE_8",
    "TABLE_8_BYTES",
    "Contention",
    "checks",
    "edges",
    "is_papers",
    "launch_range",
    "plan_of",
    "rows_of",
    "selection",
    "table_8",
    "times_us",
    "volume",
]

CHUNKS, _TENSOR, _EXPERT = 4, 8, 2
TABLE_8_BYTES = 256_000_000
"""At a sequence of 8K."""
O1, O2, O3 = Strategy.HIERARCHICAL, Strategy.PIPELINED, Strategy.PIPELINED_COPY
PAPER = {4: O1, 8: O1, 16: O1, 32: O2, 64: O2, 128: O2, 256: O3}
"""The paper's choices, by the sequence in K tokens (figure 14)."""
MEASURED = {("O1", 8): 0.30, ("O3", 256): 0.253}
"""Time over the baseline's, read by the paper's text from figure 14."""
TABLE_8 = (
    ("baseline", Strategy.FLAT, "all_to_all", 256, 6.909),
    ("O1", O1, "all_to_all", 32, 1.012),
    ("O1", O1, "all_gather", 256, 1.443),
    ("O2, O3, each of 4 chunks", O3, "all_to_all", 8, 0.374),
    ("O2, O3, each of 4 chunks", O3, "all_gather", 64, 0.385),
    ("O2, O3, each of 4 chunks", O3, "copy", 64, 0.05),
)
"""Strategy, collective, MB (1e6 bytes), ms."""
_INTER, _INTRA, _DEVICE = Resource.INTER, Resource.INTRA, Resource.DEVICE


@dataclass(frozen=True, slots=True)
class Contention:
    """The contention that the equations leave out. Factors are slowdowns of the first while the second runs; 1 and 0.0: as the
    equations.

    ``launch_us``: what a step of a pipeline costs more that waits for a step of another resource, µs: the event, the
    kernel's start, and the host that is late. The pipelines have a stream for each resource (figure 15), so each chunk's
    all_gather pays it, and its copy in O3; in O2 the copy follows the all_gather on the same stream, and O1 is one
    stream.
    """

    gather_beside_copy: float = 1.0
    copy_beside_gather: float = 1.0
    launch_us: float = 0.0
    exchange_beside_gather: float = 1.0
    gather_beside_exchange: float = 1.0
    exchange_beside_copy: float = 1.0
    copy_beside_exchange: float = 1.0

    @property
    def loss(self) -> float:
        """The cost of hiding a copy behind an all_gather, over what the copy takes alone: g·(1 − 1/f). From 1 on it never
        pays.

        While a copy of d µs runs it takes g·d, in which the all_gather does the work of g·d/f.
        """
        return self.copy_beside_gather * (1 - 1 / self.gather_beside_copy)

    def on(self, profile: Profile) -> Profile:
        """``profile`` with the factors as its interference."""
        links = {"exchange": _INTER, "gather": _INTRA, "copy": _DEVICE}
        found = []
        for field in fields(self):
            one, _, other = field.name.partition("_beside_")
            if other:
                found.append(Interference(links[one], links[other], getattr(self, field.name)))
        return profile.replace(interference=found)


STATED = Contention(gather_beside_copy=1.75, copy_beside_gather=1.75, launch_us=250.0)
"""Well inside the range: all_gather and the copy beside each other take 1.75 times as long each, and a launch takes 250 µs."""
CONSTANT = Contention(
    exchange_beside_gather=2.2,
    gather_beside_exchange=1.25,
    exchange_beside_copy=2.0,
    copy_beside_exchange=2.0,
)
"""Slowdowns of all three resources and no launch cost: one of the few for which the choice is the paper's, too."""


def volume(sequence_k: int, at_8k: int = TABLE_8_BYTES) -> int:
    """Bytes of one all_to_all (MoNTA's I), of a sequence in K tokens."""
    return at_8k * sequence_k // 8


@lru_cache(maxsize=1024)
def plan_of(nbytes: int, strategy: Strategy) -> Plan:
    """The paper's own form: 4 chunks, the whole tensor gathered."""
    chunks = CHUNKS if strategy in (O2, O3) else 1
    return build(Traffic(nbytes, _EXPERT, _TENSOR), strategy, chunks, Gather.WHOLE)


@lru_cache(maxsize=4096)
def _alone(nbytes: int, strategy: Strategy) -> tuple[tuple[float, bool], ...]:
    """Each step's time by itself, µs, and whether it waits for a step of another resource."""
    plan = plan_of(nbytes, strategy)
    durations, _ = durations_of(plan, _profile())
    resources = [step.resource for step in plan.steps]
    return tuple(
        (us, plan.is_chunked and any(resources[earlier] is not step.resource for earlier in step.after))
        for us, step in zip(durations, plan.steps, strict=True)
    )


@lru_cache(maxsize=1)
def _profile() -> Profile:
    return catalog.load("monta-a800-2x8")


def table_8() -> list[tuple[str, str, float, float, float, float]]:
    """Table 8: strategy, collective, printed MB and ms; the bytes (MB) and ms of that step in our plan at 8K."""
    found = []
    for name, strategy, collective, megabytes, latency_ms in TABLE_8:
        plan = plan_of(TABLE_8_BYTES, strategy)
        index = next(index for index, step in enumerate(plan.steps) if step.op.value == collective)
        us, _ = _alone(TABLE_8_BYTES, strategy)[index]
        found.append((name, collective, float(megabytes), latency_ms, plan.steps[index].bytes / 1e6, us / 1e3))
    return found


def times_us(nbytes: int, contention: Contention) -> dict[Strategy, float]:
    """Predicted time of the baseline and the three strategies, µs."""
    profile = contention.on(_profile())
    found = {}
    for strategy in (Strategy.FLAT, O1, O2, O3):
        steps = _alone(nbytes, strategy)
        durations = tuple(us + contention.launch_us * waits for us, waits in steps)
        call = PlannedCall("exchange", plan_of(nbytes, strategy), durations_us=durations)
        found[strategy] = simulate([Issue(call)], profile).total_us
    return found


def selection(contention: Contention, at_8k: int = TABLE_8_BYTES) -> dict[int, Strategy]:
    """The fastest by sequence; the simplest of those that are equally fast."""
    found = {}
    for sequence in PAPER:
        times = times_us(volume(sequence, at_8k), contention)
        found[sequence] = min((O1, O2, O3), key=lambda strategy: times[strategy])
    return found


def is_papers(contention: Contention, at_8k: int = TABLE_8_BYTES) -> bool:
    """Whether every sequence is given the paper's strategy; the ones that decide are asked first."""
    for sequence in (16, 32, 128, 256, 8, 64, 4):
        times = times_us(volume(sequence, at_8k), contention)
        if any(times[other] <= times[PAPER[sequence]] for other in (O1, O2, O3) if other is not PAPER[sequence]):
            return False
    return True


def edges(holds: Callable[[float], bool], grid: Sequence[float]) -> tuple[float, float] | None:
    """Between which values ``holds`` is true, if that is one stretch: found on ``grid``, its ends by bisection."""
    inside = [value for value in grid if holds(value)]
    if not inside:
        return None
    ends = []
    for first, beyond in ((inside[0], _before(grid, inside[0])), (inside[-1], _before(grid[::-1], inside[-1]))):
        yes, no = first, beyond
        while no is not None and abs(yes - no) > 1e-3 * max(abs(yes), 1e-9):
            middle = (yes + no) / 2
            yes, no = (middle, no) if holds(middle) else (yes, middle)
        ends.append(yes)
    return ends[0], ends[1]


def _before(grid: Sequence[float], value: float) -> float | None:
    place = grid.index(value)
    return grid[place - 1] if place else None


def launch_range(slowdown: float, at_8k: int = TABLE_8_BYTES) -> tuple[float, float] | None:
    """The range of launch costs (µs) at which the choice is the paper's, where all_gather and copy slow each other by
    ``slowdown``."""
    grid = [40.0 + 20.0 * step for step in range(26)]
    return edges(lambda us: is_papers(Contention(slowdown, slowdown, us), at_8k), grid)


def rows_of(contention: Contention, at_8k: int = TABLE_8_BYTES) -> list[tuple[int, dict[Strategy, float], Strategy]]:
    """Sequence, times (µs), chosen."""
    chosen = selection(contention, at_8k)
    return [(sequence, times_us(volume(sequence, at_8k), contention), chosen[sequence]) for sequence in PAPER]


def checks() -> list[Check]:
    """The targets for MoNTA."""
    rows = table_8()
    wrong = [f"{row[0]} {row[1]}" for row in rows if row[4] != row[2] or abs(row[5] / row[3] - 1) > 0.007]
    ours = {f"{sequence}K": strategy for sequence, strategy in selection(STATED).items()}
    right = ours == {f"{sequence}K": strategy for sequence, strategy in PAPER.items()}
    return [
        Check("MoNTA's table 8 exactly, to its printed digits", not wrong, ", ".join(wrong) or f"{len(rows)} rows"),
        Check(
            "MoNTA's choice with the stated contention: O1 to 16K, O2 from 32K to 128K, O3 at 256K",
            right,
            ", ".join(f"{name} {strategy.value}" for name, strategy in ours.items()),
        ),
    ]


def main() -> None:
    names = {O1: "O1", O2: "O2", O3: "O3"}
    for what, contention in (("no contention", Contention()), ("stated", STATED)):
        print(f"{what}: {contention}, loss {contention.loss:.2f}")
        for sequence, times, chosen in rows_of(contention):
            over = "  ".join(f"{names[each]} {times[each] / times[Strategy.FLAT]:.3f}" for each in names)
            print(f"  {sequence:4d}K  {over}  of the baseline; {names[chosen]}, the paper {names[PAPER[sequence]]}")
    print("slowdown of both: launch costs (µs) for which all seven choices are the paper's")
    for at_8k in (TABLE_8_BYTES, 1 << 27):
        print(f" {at_8k / 1e6:.0f} MB at 8K")
        for percent in range(140, 200, 5):
            if (found := launch_range(percent / 100, at_8k)) is not None:
                print(f"  {percent / 100:.1f}: {found[0]:.0f} … {found[1]:.0f}")


if __name__ == "__main__":
    main()
