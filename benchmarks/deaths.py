"""``make bench-deaths``: ranks killed at random moments of random jobs, and when and how the surviving ranks hear of it.

Each trial is a job of its own on an emulated cluster of 400 Mbit/s a node: a shape, a plan, a timeout, a way inside nodes,
with or without ``COMMLAYER_DEBUG=detail``, a group (all ranks, or some of them), and a victim (rank 0, which hosts the store,
as often as any other). The victim ends at a random moment by a signal that it does not handle, as by ``kill -9``, in one of
the phases of a job: while it joins (from the call of ``init_process_group`` on, so that rank 0 may die before its store is up),
while the ranks start, measure their links, make other groups, connect for their first planned call, try plans, have data in
flight, plan anew at appointments, or close their groups. In trials called "other lists" nobody is killed: the victim gives
``new_group`` another list than the others do. Every survivor calls collectives until one raises; where groups are closed it has
to come back, with an error or without. Counted are the seconds from the death to that, whether the error names the victim and
no other rank, and hangs; of other lists, the seconds from the victim's call, and whether the error says who gave which list.

A rank that dies before it has said where it listens is one that never came, which only the timeout tells: such trials have a
row of their own, and are not in the first row, nor are groups that are closed, where who comes back before the death has nothing
to name, nor other lists. ``--moments joining,"new group"`` keeps to some moments; ``--json FILE`` keeps every trial.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

import commlayer.auditing.watch  # before the fork, as the next ones: ranks then start in milliseconds
import commlayer.backend.new_groups
import commlayer.measure.calibrate
import commlayer.measure.link_times
import commlayer.measure.trials  # noqa: F401  likewise
from commlayer.auditing.watch_lead import LEAST_AHEAD, WatchLead
from commlayer.emulation import EmulatedCluster
from commlayer.emulation.outcomes import RankOutcome
from commlayer.failures import detector as detectors
from commlayer.failures.board import why_left
from commlayer.failures.detector import FailureDetector, leave_all
from commlayer.profiles.errors import BLAMING
from commlayer.scheduler.experience.experience import MEASURE, TRY

SHAPES = ((3, 2), (2, 2), (2, 4), (1, 4), (3, 1))
PLANS = ("auto", "none", "hierarchical", "flat_direct", "pipelined:3")
LATEST_S = {
    "joining": 0.1,
    "starting": 0.15,
    "probing": 1.5,
    "new group": 0.1,
    "other lists": 0.0,
    "connecting": 0.06,
    "trying": 0.3,
    "in flight": 0.6,
    "re-planning": 1.5,
    "closing": 0.03,
}
"""The moments, and how long after each begins a rank dies at the latest."""
_OF_GROUPS = ("joining", "new group", "other lists")
"""Moments in which groups are made: errors come within the timeout, which is a short one."""
_LATEST_CALL_S = 0.5
"""How much later than the first rank another one calls ``new_group``, at most, where lists differ."""
_NUM_GROUPS = 12
_SPARE_TIMEOUT_S = 2.0
"""How much later than its timeout an error may come on a machine that is shared."""
_OF_ALL = ("joining", "starting", "probing")
"""Moments of the whole job, before there are groups."""
_OF_PLANS = ("probing", "trying", "re-planning")
"""Moments that only a job has that measured its links."""
TIMEOUTS_S = (6.0, 60.0, 1800.0)
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "mixed")
SIZES = (1 << 10, 64 << 10, 1 << 20, 8 << 20)
CLOSED = "closed"
_SHOWN = 600
_SAID = 8
"""The byte, after the moment of death, that is 1 once a victim has said where it listens."""
_INTER = "400mbit"
_SPARE_S = 3.0
"""A rank that is in none of the groups stays for so long: it may host the store."""
_PATIENCE_S = 25.0
"""A survivor that has no error after so long counts as hung."""


@dataclass(frozen=True)
class Trial:
    """One job. ``delay_s``: from the beginning of the moment to the death. ``has_come``: whether the victim has said before where
    it listens."""

    seed: int
    shape: tuple[int, int]
    plan: str
    moment: str
    timeout_s: float
    verb: str
    num_bytes: int
    intra: str
    detail: bool
    part: bool
    victim: int
    delay_s: float
    has_come: bool = True

    @property
    def world_size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def met(self) -> str:
        """The moment, and whether it is one that only the timeout tells of."""
        return self.moment if self.has_come else f"{self.moment}, never came"

    @property
    def members(self) -> list[int]:
        """The ranks of the group that is used: all, or all but one that is not the victim."""
        spare = (self.victim + 1) % self.world_size
        return [rank for rank in range(self.world_size) if not (self.part and rank == spare)]


@dataclass(frozen=True)
class Survivor:
    """The view of one rank. ``after_s``: from the death to its error; None: it hung, or ended otherwise. ``joined_s``: from
    when it began to join the job to its error."""

    rank: int
    after_s: float | None
    is_named: bool
    kind: str
    text: str
    joined_s: float | None = None


def draw(seed: int, victims: str = "any", moments: Sequence[str] = tuple(LATEST_S)) -> Trial:
    """The trial of a seed."""
    pick = random.Random(seed)
    moment = pick.choices(moments, [1 if moment == "joining" else 5 for moment in moments])[0]
    shape = pick.choice([shape for shape in SHAPES if moment not in _OF_PLANS or min(shape) > 1])
    world_size = shape[0] * shape[1]
    return Trial(
        seed=seed,
        shape=shape,
        plan="auto" if moment in _OF_PLANS else pick.choice(PLANS),
        moment=moment,
        timeout_s=TIMEOUTS_S[0] if moment in _OF_GROUPS else pick.choice(TIMEOUTS_S),
        verb=pick.choice(VERBS),
        num_bytes=pick.choice(SIZES),
        intra=pick.choice(("auto", "gloo")),
        detail=pick.random() < 0.33,
        part=world_size > 3 and moment not in (*_OF_ALL, *_OF_GROUPS) and pick.random() < 0.25,
        victim=0 if victims == "first" or pick.random() < 0.2 else pick.randrange(world_size),
        delay_s=pick.uniform(0.0, LATEST_S[moment]),
    )


def environment(trial: Trial, cache: str) -> dict[str, str]:
    """The variables of a trial's ranks."""
    variables = {"COMMLAYER_INTRA": trial.intra, "COMMLAYER_CACHE": cache, "COMMLAYER_PROFILE": "auto"}
    if trial.plan == "none":
        variables["COMMLAYER_PROFILE"] = "none"
    elif trial.plan != "auto":
        variables |= {"COMMLAYER_PLAN": trial.plan, "COMMLAYER_PROFILE": "none"}
    if trial.moment == "probing":  # a cache with nothing in it
        variables["COMMLAYER_CACHE"] = tempfile.mkdtemp(dir=cache)
    if trial.moment == "trying":
        variables["COMMLAYER_TRIALS"] = "on"
    return variables | ({"COMMLAYER_DEBUG": "detail"} if trial.detail else {})


def call(verb: str, x: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """One collective; ``x`` [n·s], ``whole`` [n·s]."""
    size = dist.get_world_size(group)
    part = x[: x.numel() // size]
    if verb == "all_reduce":
        dist.all_reduce(x, group=group)
    elif verb == "all_gather":
        dist.all_gather_single(whole, part, group=group)
    elif verb == "reduce_scatter":
        dist.reduce_scatter_single(part, whole, group=group)
    elif verb == "all_to_all":
        dist.all_to_all_single(whole, x, group=group)
    else:
        dist.broadcast(x, dist.get_global_rank(group, 0) if group is not None else 0, group=group)


def die_soon(trial: Trial, moment_of_death: mmap.mmap) -> None:
    """On the victim: the moment has begun."""
    moment_of_death[:8] = struct.pack("d", time.monotonic() + trial.delay_s)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nobody handles it: the kernel ends the process
    signal.setitimer(signal.ITIMER_REAL, max(trial.delay_s, 1e-6))


def _die_while_joining(trial: Trial, moment_of_death: mmap.mmap) -> None:
    """On the victim, before it joins; it notes when it has said where it listens."""
    put = detectors._Cards.put

    def put_and_note(cards: Any) -> None:
        put(cards)
        moment_of_death[_SAID] = 1

    detectors._Cards.put = put_and_note  # type: ignore[method-assign, assignment]
    die_soon(trial, moment_of_death)


def _die_while_starting(trial: Trial, moment_of_death: mmap.mmap) -> None:
    """On the victim, once the job is joined."""
    join = FailureDetector.__init__

    def begin(detector: FailureDetector, *arguments: Any, **options: Any) -> None:
        join(detector, *arguments, **options)
        if detector.links is not None:
            die_soon(trial, moment_of_death)

    FailureDetector.__init__ = begin  # type: ignore[method-assign, assignment]


def _plan_anew_all_the_time() -> None:
    """Have the first rank make an appointment whenever there is none: to measure, to try plans, to measure, …"""

    def turn(lead: WatchLead, *_: float) -> None:
        kept = lead.appointments
        if not kept.is_open:
            purpose, value = ((MEASURE, 1.0), (TRY, 3e5))[kept._last % 2]
            kept.make(purpose, value, LEAST_AHEAD)

    WatchLead.turn = turn  # type: ignore[method-assign, assignment]


def job(trial: Trial, cache: str, moment_of_death: mmap.mmap) -> tuple[float | None, str, str, float]:
    """On every rank: (monotonic time of the error, its kind, its text, when the rank began to join)."""
    torch.set_num_threads(1)
    os.environ.update(environment(trial, cache))
    is_victim = int(os.environ["RANK"]) == trial.victim
    if is_victim and trial.moment in _OF_ALL:
        (_die_while_joining if trial.moment == "joining" else _die_while_starting)(trial, moment_of_death)
    if trial.moment == "re-planning":
        _plan_anew_all_the_time()
    began = time.monotonic()
    try:
        return *calls(trial, moment_of_death, is_victim=is_victim), began
    except RuntimeError as error:
        ended = time.monotonic()
        # As a program does that ends by it: ranks that are late hear why. A process of the emulated cluster ends without.
        leave_all(why_left(error), is_failure=True, is_consequence=isinstance(error, BLAMING))
        return ended, type(error).__name__, str(error), began


def lists_of(trial: Trial) -> dict[int, list[int]]:
    """The list that each rank gives ``new_group``, where lists differ: the victim's is another one."""
    pick, everyone = random.Random(trial.seed + 1), list(range(trial.world_size))
    others = [rank for rank in everyone if rank != trial.victim]
    usual = sorted({trial.victim, *pick.sample(others, pick.randint(1, len(others)))})
    kind = pick.choice(("halves", "without oneself", "without another", "alone"))
    if kind == "halves" and trial.world_size > 3:
        half = trial.world_size // 2
        return {rank: everyone[:half] if rank < half else everyone[half:] for rank in everyone}
    odd = [rank for rank in usual if rank != (trial.victim if kind == "without oneself" else usual[-1])]
    if kind == "alone" or not odd or odd == usual:
        odd = [trial.victim]
    return {rank: odd if rank == trial.victim else usual for rank in everyone}


def make_groups(trial: Trial, moment_of_death: mmap.mmap, *, is_victim: bool) -> None:
    """Where that is the moment: make group after group, in one of which the victim dies; or one of different lists."""
    if trial.moment not in ("new group", "other lists"):
        return
    everyone = list(range(trial.world_size))
    if trial.moment == "other lists":
        called_list = lists_of(trial)[dist.get_rank()]
        time.sleep(random.Random(trial.seed + 2 + dist.get_rank()).uniform(0.0, _LATEST_CALL_S))
        if is_victim:
            moment_of_death[:8] = struct.pack("d", time.monotonic())
        dist.new_group(called_list)
        return
    pick = random.Random(trial.seed + 1)
    dist.barrier()
    if is_victim:
        die_soon(trial, moment_of_death)
    for _ in range(_NUM_GROUPS):
        dist.new_group(sorted(pick.sample(everyone, pick.randint(2, len(everyone)))))


def calls(trial: Trial, moment_of_death: mmap.mmap, *, is_victim: bool) -> tuple[float | None, str, str]:
    """Make groups and call until something raises, or, where a group is to be closed, close it."""
    dist.init_process_group("commlayer", timeout=timedelta(seconds=trial.timeout_s))
    group = dist.new_group(trial.members) if trial.part else None
    make_groups(trial, moment_of_death, is_victim=is_victim)
    if dist.get_rank() not in trial.members:
        while (died := struct.unpack("d", moment_of_death[:8])[0]) == 0.0 or time.monotonic() < died + _SPARE_S:
            time.sleep(0.1)
        return None, "", "spare"
    verbs = VERBS[:-1] if trial.verb == "mixed" else (trial.verb,)
    elements = max(trial.num_bytes // 4 // len(trial.members), 1) * len(trial.members)
    x, whole = torch.ones(elements), torch.ones(elements)
    until = time.monotonic() + trial.delay_s + _PATIENCE_S
    if trial.moment in ("in flight", "re-planning", "closing"):
        for verb in verbs:
            call(verb, x, whole, group)
    if is_victim and trial.moment not in (*_OF_ALL, *_OF_GROUPS):
        die_soon(trial, moment_of_death)
    if trial.moment == "closing":
        dist.destroy_process_group()
        if is_victim:
            time.sleep(LATEST_S["closing"] + 1)
        return time.monotonic(), "", CLOSED
    while time.monotonic() < until:
        for verb in verbs:
            call(verb, x, whole, group)
    return None, "", "no error"


def run(trial: Trial, cluster: EmulatedCluster, cache: str) -> tuple[Trial, list[Survivor]]:
    """Run one trial; what became of every member but the victim. The trial says whether its victim came at all."""
    moment_of_death = mmap.mmap(-1, mmap.PAGESIZE)
    outcomes: list[RankOutcome] = cluster.run(
        job, trial, cache, moment_of_death, check=False, grace_s=_PATIENCE_S, timeout_s=_PATIENCE_S + 60
    )
    (died,) = struct.unpack("d", moment_of_death[:8])
    survivors = [
        _survivor(trial, outcome, died)
        for outcome in outcomes
        if outcome.rank in trial.members and (outcome.rank != trial.victim or trial.moment == "other lists")
    ]
    has_come = trial.moment != "joining" or bool(moment_of_death[_SAID])
    return replace(trial, has_come=has_come), survivors


def _survivor(trial: Trial, outcome: RankOutcome, died: float) -> Survivor:
    if outcome.failure is not None or outcome.value is None:
        return Survivor(outcome.rank, None, False, "", f"ended otherwise: {outcome.failure}")
    ended, kind, text, began = outcome.value
    if text == CLOSED:  # perhaps before the death
        return Survivor(outcome.rank, max(ended - died, 0.0), True, kind, text)
    if trial.moment == "other lists":
        lists = lists_of(trial)
        others = {str(each) for each in lists.values()}
        is_named = "called new_group with different lists" in text and all(f"with {each}" in text for each in others)
    else:
        is_named = named(text) == {trial.victim}
    after_s = None if ended is None else max(ended - died, 0.0)
    return Survivor(outcome.rank, after_s, is_named, kind, text, None if ended is None else ended - began)


def named(text: str) -> set[int]:
    """The ranks that an error blames: not the one that raises it, nor the one that has seen it."""
    blamed = re.sub(r"^rank \d+, [^:]*: ", "", text.split("; here:")[0])
    blamed = re.sub(r" \(seen by rank \d+\)|, and rank \d+ left because of it", "", blamed)
    return {int(rank) for ranks in re.findall(r"ranks? (\d+(?:, \d+)*)", blamed) for rank in ranks.split(", ")}


def report(found: Sequence[tuple[Trial, list[Survivor]]], console: Console) -> bool:
    """Print the tables; whether the targets are met."""
    table = Table(title="Seconds from a rank's death to every survivor's error")
    for column in ("trials", "", "survivors", "median", "90 %", "99 %", "largest", "named", "hung"):
        table.add_column(column, justify="left" if not column else "right")
    judged = [each for each in found if each[0].has_come and each[0].moment not in ("closing", "other lists")]
    groups: dict[str, list[tuple[Trial, list[Survivor]]]] = {"all": judged}
    is_met = True
    for name, of in (
        ("moment", lambda t: t.met),
        ("plan", lambda t: t.plan),
        ("debug", lambda t: "detail" if t.detail else "off"),
        ("victim", lambda t: "rank 0" if t.victim == 0 else "another"),
        ("inside", lambda t: t.intra),
        ("timeout", lambda t: f"{t.timeout_s:g} s"),
        ("shape", lambda t: f"{t.shape[0]}×{t.shape[1]}"),
    ):
        for trial, survivors in found if name == "moment" else judged:
            groups.setdefault(f"{name} {of(trial)}", []).append((trial, survivors))
    for name, rows in groups.items():
        everyone = [survivor for _, survivors in rows for survivor in survivors]
        if not everyone:
            continue
        times = sorted(s.after_s for s in everyone if s.after_s is not None)
        hung = sum(s.after_s is None for s in everyone)
        share_named = sum(s.is_named for s in everyone) / len(everyone)
        cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else [float("nan")] * 99
        shown = (median(times) if times else float("nan"), cuts[89], cuts[98], times[-1] if times else float("nan"))
        table.add_row(
            str(len(rows)), name, str(len(everyone)), *(f"{t:.2f}" for t in shown), f"{share_named:.1%}", str(hung)
        )
        if name == "all":
            is_met = bool(shown[0] <= 0.5 and shown[2] <= 3.0 and share_named >= 0.99)
    if judged:
        console.print("targets (median ≤ 0.5 s, 99 % ≤ 3 s, named ≥ 99 %): " + ("met" if is_met else "MISSED"))
    is_met &= not any(survivor.after_s is None for _, survivors in found for survivor in survivors)
    console.print(table)
    if any(trial.moment in _OF_GROUPS for trial, _ in found):
        is_met &= report_groups(found, console)
    console.print("all targets of these trials, and none hangs: " + ("met" if is_met else "MISSED"))
    return is_met


def _waited_s(trial: Trial, survivor: Survivor) -> float:
    """How long a survivor waited in vain: from the death, or from when it began to join, which may be later."""
    assert survivor.after_s is not None
    if trial.moment != "joining" or survivor.joined_s is None:
        return survivor.after_s
    return min(survivor.after_s, survivor.joined_s)


def report_groups(found: Sequence[tuple[Trial, list[Survivor]]], console: Console) -> bool:
    """Print how the trials ended in which groups were made; whether the targets are met."""
    is_met = True
    for moment in _OF_GROUPS:
        of_moment = [(trial, survivors) for trial, survivors in found if trial.moment == moment]
        if not of_moment:
            continue
        everyone = [survivor for _, survivors in of_moment for survivor in survivors]
        hung = sum(each.after_s is None for each in everyone)
        share_named = sum(each.is_named for each in everyone) / max(len(everyone), 1)
        late = sum(
            each.after_s is not None and _waited_s(trial, each) > trial.timeout_s + _SPARE_TIMEOUT_S
            for trial, survivors in of_moment
            for each in survivors
        )
        is_met &= not hung and not late and share_named >= 0.95
        console.print(
            f"{moment}: {len(of_moment)} trials, {len(everyone)} survivors: hung {hung}, cause named {share_named:.1%}, "
            f"later than the timeout and {_SPARE_TIMEOUT_S:g} s {late}"
        )
    console.print(
        "targets (none hangs, the cause named ≥ 95 %, at most the timeout): " + ("met" if is_met else "MISSED")
    )
    return is_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first trial's seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after so long")
    parser.add_argument("--only", default="", help="keep trials whose fields contain this, e.g. plan='hierarchical'")
    parser.add_argument("--moments", default=",".join(LATEST_S), help="the moments to draw from, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print every survivor that is late or names another")
    options = parser.parse_args()
    found: list[tuple[Trial, list[Survivor]]] = []
    moments = options.moments.split(",")
    if not set(moments) <= LATEST_S.keys():
        parser.error(f"--moments: expected some of {', '.join(LATEST_S)}, got {options.moments}")
    console = Console(width=110) if not Console().is_terminal else Console()
    trials = [
        trial for k in range(options.trials) if options.only in str(trial := draw(options.seed + k, moments=moments))
    ]
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as cache:
        clusters: dict[tuple[int, int], EmulatedCluster] = {}
        try:
            for trial in track(trials, "trials", console=console):
                if time.monotonic() > until:
                    break
                if trial.shape not in clusters:
                    clusters[trial.shape] = EmulatedCluster(*trial.shape, inter=_INTER)
                ran, survivors = run(trial, clusters[trial.shape], cache)
                found.append((ran, survivors))
                for s in survivors:
                    if options.verbose and (s.after_s is None or s.after_s > 3 or not s.is_named):
                        console.print(f"{trial}\n  {str(s)[:_SHOWN]}", highlight=False, soft_wrap=True, markup=False)
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(found)} of {len(trials)} trials")
        finally:
            for cluster in clusters.values():
                cluster.close()
    if options.json:
        rows = [{"trial": asdict(trial), "survivors": [asdict(s) for s in survivors]} for trial, survivors in found]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.exit(0 if found and report(found, console) else 1)


if __name__ == "__main__":
    main()
