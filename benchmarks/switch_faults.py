"""``make bench-switch-faults``: faults at every stage of a switch of plans, in small jobs of real processes.

Each trial is a job on an emulated cluster whose ranks switch plans again and again, at appointments (docs/replanning.md): every
measurement of their links finds them other than the last one. At one point of one appointment a fault befalls one rank: it is
killed as by ``kill -9``, stopped for a while or for ever (SIGSTOP), is slow on the thread that came there, or the store is
killed, which is a process of its own here as under torchrun. The points are those of announcing, acknowledging and committing a
switch, of the call before which it takes place, and of the calls after it, before and behind each request to the store.

Counted are hangs (a rank that comes back neither with results nor with an error), calls for which two ranks had plans of
different switches, or different plans (every rank writes down, in memory that outlives it, by which plan it makes each call),
results with a wrong bit, and, where ranks were only slow or stopped for a while, errors. There have to be none of any. A trial's
seed says all about it but the times. ``--json FILE`` keeps every trial.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, but not for type checkers

import commlayer.auditing.watch as watching  # before the fork, as the next ones: ranks then start in milliseconds
import commlayer.backend.new_groups
import commlayer.measure.calibrate
import commlayer.measure.link_times as link_times
import commlayer.measure.trials  # noqa: F401  likewise
from commlayer.agree.appointments import Appointment, Appointments
from commlayer.auditing.ledger import Ledger
from commlayer.auditing.link_checks import LinkChecks
from commlayer.auditing.watch import GroupWatch
from commlayer.auditing.watch_lead import WatchLead
from commlayer.backend.running import Calls
from commlayer.emulation import EmulatedCluster
from commlayer.measure.harness import HostGroup
from commlayer.scheduler.experience.experience import CONFIRM, MEASURE, TRY
from commlayer.scheduler.experience.link_rates import LinkRates, LinkTimes, card_gbps

SHAPES = ((2, 2), (3, 1), (2, 1), (3, 2))
FAULTS = {"killed": 6, "stopped": 2, "stopped for a while": 5, "slow": 4, "store lost": 4}
"""The faults that befall a rank, or the store, and how often beside the others."""
STAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "announce": {
        "leader": ("before it announces", "when it has announced"),
        "member": ("before it hears of it", "when it has heard of it"),
    },
    "acknowledge": {
        "leader": ("before it counts answers", "when it has counted answers"),
        "member": ("before it answers", "when it has answered"),
    },
    "commit": {
        "leader": ("before it decides", "when it has decided"),
        "member": ("before it reads the decision", "when it has read the decision"),
    },
    "edge": {"any": ("at the call", "while links are timed", "when links were timed")},
    "after": {"any": ("when plans are new", "at the first call by new plans", "in the first call by new plans")},
}
ENDING_FAULTS = ("killed", "stopped")
SHORT_S, LONG_S = 3.0, 30.0
"""The timeout of a job in which a rank stops for ever, and of the others."""
_INTER = "400mbit"
_SLOW_S = (0.02, 3.0)
_PATIENCE_S, _TURN_S = 1.0, 0.02
"""The patience of the watch, but shorter: ranks that are slow or stopped for a while come both earlier and later than that. No
turn of the watch is longer than that either, because appointments here are as near as two calls: a watch that rests for its cost
on a busy machine would be late for every one of them."""
_HANG_S = 40.0
_MOST_CALLS, _CALLS_AFTER, _VOTE_EVERY = 1500, 24, 6
_SIZES = (4 << 10, 256 << 10)
_SLOW_RATE = 0.25
_PAUSE_S = 0.002


@dataclass(frozen=True)
class Trial:
    """One job. ``appointment``: at which one the fault strikes; ``seconds``: how long a rank is slow, or stopped for a while."""

    seed: int
    shape: tuple[int, int]
    fault: str
    stage: str
    point: str
    victim: int
    appointment: int
    seconds: float
    trials: str
    is_one_card: bool

    @property
    def timeout_s(self) -> float:
        return SHORT_S if self.fault == "stopped" else LONG_S


@dataclass
class Found:
    """The outcome of a trial; ``ranks``: what each said, or None where the fault ended it."""

    trial: Trial
    is_struck: bool = False
    switches: int = 0
    hung: list[int] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    named: int = 0
    wall_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether it is as it must be: survivors of a rank that is gone have an error, and of one that came back none."""
        has_errors = bool(self.errors)
        is_explained = self.trial.fault == "store lost" or has_errors == (self.trial.fault in ENDING_FAULTS)
        return not (self.hung or self.mixed or self.wrong) and (is_explained or not self.is_struck)


def draw(seed: int) -> Trial:
    """The trial of a seed; stages follow each other, so that each is as frequent as the others."""
    pick = random.Random(seed)
    stage = list(STAGES)[seed % len(STAGES)]
    shape = pick.choice(SHAPES)
    victim = 0 if pick.random() < 0.4 else pick.randrange(1, shape[0] * shape[1])
    points = STAGES[stage].get("any") or STAGES[stage]["member" if victim else "leader"]
    return Trial(
        seed=seed,
        shape=shape,
        fault=pick.choices(list(FAULTS), list(FAULTS.values()))[0],
        stage=stage,
        point=pick.choice(points),
        victim=victim,
        appointment=pick.randrange(1, 5),
        seconds=pick.uniform(*_SLOW_S),
        trials=pick.choice(("off", "off", "auto")),
        is_one_card=shape[0] > 2 and pick.random() < 0.5,
    )


class Notes:
    """Memory that all processes of a trial share, and that outlives each of them."""

    _STRUCK, _VICTIM, _RESUME, _STORE, _ENDED, _RECORDS = 0, 8, 16, 24, 64, 4096

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._memory = mmap.mmap(-1, self._RECORDS + 2 * _MOST_CALLS * world_size)

    def _put(self, place: int, value: float) -> None:
        self._memory[place : place + 8] = struct.pack("d", value)

    def _read(self, place: int) -> float:
        value: float = struct.unpack_from("d", self._memory, place)[0]
        return value

    def strike(self) -> None:
        self._put(self._STRUCK, time.monotonic())

    @property
    def struck_s(self) -> float:
        return self._read(self._STRUCK)

    def stop_me(self, resume_s: float) -> None:
        """Stop this process, until somebody has it go on."""
        self._put(self._RESUME, resume_s)
        self._put(self._VICTIM, os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    @property
    def stopped(self) -> tuple[int, float]:
        """The process that is stopped, 0 for none, and when it is to go on, 0.0 for never."""
        return int(self._read(self._VICTIM)), self._read(self._RESUME)

    def keep_store(self, pid: int) -> None:
        self._put(self._STORE, pid)

    def kill_store(self) -> None:
        pid = int(self._read(self._STORE))
        if pid:
            self._put(self._STORE, 0)
            with suppress(ProcessLookupError):  # the cluster ends what its ranks leave behind
                os.kill(pid, signal.SIGKILL)

    def end(self, rank: int) -> None:
        self._memory[self._ENDED + rank] = 1

    @property
    def num_ended(self) -> int:
        return sum(self._memory[self._ENDED : self._ENDED + self.world_size])

    def record(self, rank: int, call: int, generation: int, plan: str) -> None:
        """Note by which plan a rank makes a call, and after how many switches."""
        if call < _MOST_CALLS:
            place = self._RECORDS + 2 * (rank * _MOST_CALLS + call)
            self._memory[place : place + 2] = bytes((generation % 255 + 1, zlib.crc32(plan.encode()) % 255 + 1))

    def records(self, call: int) -> list[bytes]:
        """Return what the ranks that came to a call have noted."""
        places = [self._RECORDS + 2 * (rank * _MOST_CALLS + call) for rank in range(self.world_size)]
        found = [bytes(self._memory[place : place + 2]) for place in places]
        return [each for each in found if each != b"\0\0"]


class Struck:
    """The fault of one trial, on one of its ranks: :meth:`at` is called at every point of a switch."""

    def __init__(self, trial: Trial, notes: Notes, rank: int) -> None:
        self.trial, self.notes, self.rank = trial, notes, rank
        self.number = 0  # of the latest appointment
        self._is_due = rank == trial.victim

    def at(self, point: str) -> None:
        if not self._is_due or point != self.trial.point or self.number < self.trial.appointment:
            return
        self._is_due = False
        self.notes.strike()
        fault = self.trial.fault
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "store lost":
            self.notes.kill_store()
        elif fault == "slow":
            time.sleep(self.trial.seconds)
        else:
            self.notes.stop_me(0.0 if fault == "stopped" else time.monotonic() + self.trial.seconds)


class WatchedStore:
    """The store of appointments, with a fault before or behind a request."""

    def __init__(self, store: Any, struck: Struck) -> None:
        self._store, self._struck = store, struck

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str | bytes) -> None:
        kind, _, number = key.partition("/")
        if kind not in ("appointment", "decision"):
            self._store.set(key, value)
            return
        self._struck.number = int(number)
        self._struck.at("before it announces" if kind == "appointment" else "before it decides")
        self._store.set(key, value)
        self._struck.at("when it has announced" if kind == "appointment" else "when it has decided")

    def get(self, key: str) -> bytes:
        kind, _, number = key.partition("/")
        self._struck.number = max(self._struck.number, int(number))
        what = "hears of it" if kind == "appointment" else "reads the decision"
        self._struck.at(f"before it {what}")
        value: bytes = self._store.get(key)
        self._struck.at("when it has heard of it" if kind == "appointment" else "when it has read the decision")
        return value

    def add(self, key: str, amount: int) -> int:
        self._struck.at("before it answers" if amount else "before it counts answers")
        value: int = self._store.add(key, amount)
        self._struck.at("when it has answered" if amount else "when it has counted answers")
        return value


def install(struck: Struck) -> None:
    """In a rank: appointments one after another, links that are other each time, and points at which faults strike."""
    watching._TURN_S = watching._LONGEST_TURN_S = _TURN_S
    replace(WatchLead, "turn", lambda _: lambda lead, now_s, *_: appoint(lead, random.Random(now_s)))
    _watch_store(struck)
    _watch_edge(struck)
    _change_links(struck)
    _watch_calls(struck)


def replace(owner: Any, name: str, by: Callable[[Any], Callable[..., Any]]) -> None:
    """Put another function in the place of one, which it is made of."""
    setattr(owner, name, by(getattr(owner, name)))


def _watch_store(struck: Struck) -> None:
    stores: dict[int, WatchedStore] = {}

    def watched(asked: Any) -> Any:
        return lambda watch: stores.setdefault(id(watch), WatchedStore(asked(watch), struck))

    replace(watching.GroupWatch, "_asked", watched)


def _watch_edge(struck: Struck) -> None:
    """Faults at the call of an appointment."""

    def coming(next_call: Any) -> Any:
        def come(appointments: Appointments) -> Appointment | None:
            due = appointments._open
            if due is not None and appointments.calls + 1 >= due.appointment.call:
                struck.at("at the call")
            kept: Appointment | None = next_call(appointments)
            return kept

        return come

    def swapping(swap: Any) -> Any:
        def swapped(*args: Any, **how: Any) -> Any:
            struck.at("while links are timed")
            return swap(*args, **how)

        return swapped

    replace(Appointments, "next_call", coming)
    replace(HostGroup, "swap_us", swapping)


def _change_links(struck: Struck) -> None:
    """Have each measurement find links other than they were, and a fault when they were timed."""
    rates = [1.0]

    def measuring(measure: Any) -> Any:
        def measure_other(checks: Any, slowdown: float, **how: bool) -> None:
            if not how.get("is_second"):  # that confirms the one before it
                links = checks._planned.choices.experience.links
                rates[:] = [_SLOW_RATE if links == LinkRates(1.0, ()) else 1.0]
            measure(checks, slowdown, **how)

        return measure_other

    def timing(timed: Any) -> Any:
        def times(planned: Any, num_bytes: int) -> LinkTimes:
            usual_us, last = (
                num_bytes / (card_gbps(planned.choices.agreed.prices.job_planner.profile) * 1e3),
                len(planned.nodes) - 1,
            )
            pairs = timed(planned, 4096).taken_us
            struck.at("when links were timed")
            found = {
                pair: usual_us / (1.0 if struck.trial.is_one_card and last not in pair else rates[-1]) for pair in pairs
            }
            return LinkTimes(found, dict(found))

        return times

    replace(LinkChecks, "measure", measuring)
    replace(link_times, "time_links", timing)


def _watch_calls(struck: Struck) -> None:
    """Faults once plans are new, and by which plan each call is made."""

    def planning(plan_anew: Any) -> Any:
        def planned_anew(calls: Calls, choices: Any) -> None:
            plan_anew(calls, choices)
            struck.at("when plans are new")

        return planned_anew

    def looking(look: Any) -> Any:
        def looked(calls: Calls, *args: Any, **how: Any) -> Any:
            ledger, watch = calls.instruments.find(Ledger), calls.instruments.find(GroupWatch)
            if ledger is None or watch is None:
                return look(calls, *args, **how)
            number, generation = watch.appointments.calls, ledger.generation
            if generation:
                struck.at("at the first call by new plans")
            plan = look(calls, *args, **how)
            struck.notes.record(struck.rank, number, generation, plan.name if plan else "flat")
            if generation:
                struck.at("in the first call by new plans")
            return plan

        return looked

    replace(Calls, "plan_anew", planning)
    replace(Calls, "look", looking)


def appoint(lead: WatchLead, pick: random.Random) -> None:
    """On the first rank: make an appointment wherever there is none."""
    kept = lead.appointments
    if not kept.is_open:
        purpose = TRY if pick.random() < 0.2 else MEASURE
        if lead._planned.choices.experience.suspected is not None:
            purpose = CONFIRM
        kept.make(purpose, 3e4 if purpose == TRY else 1.0, pick.randrange(2, 12), _PATIENCE_S)


def host_store(notes: Notes) -> None:
    """In the first rank, before it has threads: have a process of its own host the store, as torchrun's agent does."""
    pid = os.fork()
    if pid:
        notes.keep_store(pid)
        return
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
        time.sleep(3 * _HANG_S)  # somebody kills it before
        del store
    finally:
        os._exit(0)


def job(trial: Trial, cache: str, notes: Notes) -> dict[str, Any]:
    """On every rank: calls, until some time after the fault, or until one raises."""
    torch.set_num_threads(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # every rank of every job says what has befallen it
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    rank = int(os.environ["RANK"])
    os.environ.update(
        {
            "COMMLAYER_CACHE": cache,
            "COMMLAYER_DIAGNOSE_DIR": cache,
            "COMMLAYER_PROFILE": "auto",
            "COMMLAYER_REPLAN": "on",
            "COMMLAYER_TRIALS": trial.trials,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    )
    if rank == 0:
        host_store(notes)
    install(Struck(trial, notes, rank))
    found: dict[str, Any] = {"wrong": [], "calls": 0, "switches": 0, "error": ""}
    try:
        dist.init_process_group("commlayer", timeout=timedelta(seconds=trial.timeout_s))
        calls(notes, found)
    except RuntimeError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    notes.end(rank)
    return found


def calls(notes: Notes, found: dict[str, Any]) -> None:
    """Mixed collectives whose results are held against what they must be, byte by byte; all ranks stop after the same one."""
    group: Any = dist.group.WORLD
    since = 0
    for number in range(_MOST_CALLS):
        is_right = checked_call(number)
        found["calls"] = number + 1
        found["switches"] = group.instruments.find(Ledger).generation
        if not is_right:
            found["wrong"].append(number)
        since += notes.struck_s > 0
        if number % _VOTE_EVERY == 0:
            vote = torch.tensor([float(since >= _CALLS_AFTER)])
            dist.all_reduce(vote, op=dist.ReduceOp.MAX)
            if vote.item():
                return
        time.sleep(_PAUSE_S)


def checked_call(number: int) -> bool:
    """Whether one collective moves or sums whole numbers, which are exact by any plan, as it must."""
    n, rank = dist.get_world_size(), dist.get_rank()
    count = _SIZES[number % len(_SIZES)] // 4 // n
    mine = torch.arange(float(count * n)).add_(number).remainder_(64)
    if number % 3 == 0:
        x = mine + rank
        dist.all_reduce(x)
        return torch.equal(x, mine * n + n * (n - 1) // 2)
    if number % 3 == 1:
        whole = torch.empty(count * n)
        dist.all_gather_single(whole, mine[rank * count : (rank + 1) * count].clone())
        return torch.equal(whole, mine)
    block = torch.empty(count)
    dist.reduce_scatter_single(block, mine + rank)
    return torch.equal(block, mine[rank * count : (rank + 1) * count] * n + n * (n - 1) // 2)


@contextmanager
def resuming(trial: Trial, notes: Notes) -> Iterator[None]:
    """Have who was stopped for a while go on when it is time, and end who was stopped for ever once all others have come back."""
    is_over = threading.Event()

    def resume() -> None:
        begin, resumed = time.monotonic(), 0
        while not is_over.wait(0.01):
            pid, at_s = notes.stopped
            if not pid or pid == resumed:
                continue
            if at_s and time.monotonic() >= at_s:
                os.kill(pid, signal.SIGCONT)
                resumed = pid
            elif not at_s and (notes.num_ended == notes.world_size - 1 or time.monotonic() > begin + _HANG_S):
                os.kill(pid, signal.SIGKILL)
                resumed = pid

    thread = threading.Thread(target=resume, name=f"trial {trial.seed}")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        notes.kill_store()


def run(trial: Trial, cluster: EmulatedCluster, cache: str) -> Found:
    """Run one trial."""
    notes, begin = Notes(cluster.world_size), time.monotonic()
    with resuming(trial, notes):
        outcomes = cluster.run(job, trial, cache, notes, check=False, grace_s=_HANG_S, timeout_s=2 * _HANG_S)
    found = Found(trial, is_struck=notes.struck_s > 0)
    is_ended = found.is_struck and trial.fault in ENDING_FAULTS
    for outcome in outcomes:
        if is_ended and outcome.rank == trial.victim:
            continue
        if outcome.value is None:
            found.hung.append(outcome.rank)
            found.errors[outcome.rank] = outcome.failure.describe() if outcome.failure else ""
            continue
        found.wrong += outcome.value["wrong"]
        found.switches = max(found.switches, outcome.value["switches"])
        if outcome.value["error"]:
            found.errors[outcome.rank] = outcome.value["error"]
            found.named += f"rank {trial.victim}" in outcome.value["error"]
    found.mixed = [call for call in range(_MOST_CALLS) if len(set(notes.records(call))) > 1]
    found.wall_s = time.monotonic() - begin
    return found


def report(found: list[Found], console: Console) -> bool:
    """Print the table; whether the targets are met."""
    table = Table(title="Faults at the stages of a switch")
    for column in ("", "trials", "struck", "switches", "hung", "mixed plans", "wrong bits", "good", "named"):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, list[Found]] = {"all": found}
    for each in found:
        for name in (each.trial.fault, each.trial.stage, "×".join(map(str, each.trial.shape))):
            rows.setdefault(name, []).append(each)
    for name in [
        "all",
        *(name for name in (*FAULTS, *STAGES) if name in rows),
        *(name for name in rows if "×" in name),
    ]:
        sums: Counter[str] = Counter()
        for each in rows[name]:
            sums.update(struck=int(each.is_struck), switches=each.switches, hung=len(each.hung), mixed=len(each.mixed))
            sums.update(wrong=len(each.wrong), good=int(each.is_good))
            if each.trial.fault in ENDING_FAULTS:
                sums.update(named=each.named, errors=len(each.errors))
        named = f"{sums['named']} of {sums['errors']}" if sums["errors"] else ""
        counts = [str(sums[key]) for key in ("struck", "switches", "hung", "mixed", "wrong", "good")]
        table.add_row(name, str(len(rows[name])), *counts, named)
    console.print(table)
    is_met = all(each.is_good for each in found)
    console.print(
        "targets (no hang, no mixed plans, all bits right, no needless error): " + ("met" if is_met else "MISSED")
    )
    return is_met


def run_all(trials: list[Trial], seconds: float, console: Console) -> list[Found]:
    """Run trials until the time is over; those that are not as they must be are printed."""
    found: list[Found] = []
    until, clusters = time.monotonic() + seconds, dict[tuple[int, int], EmulatedCluster]()
    with tempfile.TemporaryDirectory() as cache:
        try:
            for trial in track(trials, "trials", console=console):
                if time.monotonic() > until:
                    break
                if trial.shape not in clusters:
                    clusters[trial.shape] = EmulatedCluster(*trial.shape, inter=_INTER)
                found.append(run(trial, clusters[trial.shape], cache))
                if not found[-1].is_good:
                    console.print(str(found[-1]), highlight=False, soft_wrap=True, markup=False)
        finally:
            for cluster in clusters.values():
                cluster.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first trial's seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after so long")
    parser.add_argument("--only", default="", help="keep trials whose fields contain this, e.g. stage='commit'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial there, too")
    options = parser.parse_args()
    console = Console(width=110) if not Console().is_terminal else Console()
    trials = [trial for k in range(options.trials) if options.only in str(trial := draw(options.seed + k))]
    found = run_all(trials, options.seconds, console)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if found and report(found, console) else 1)


if __name__ == "__main__":
    main()
