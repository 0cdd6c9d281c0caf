"""Simulated devices of all ranks in one process, whose streams run what they were given in an order that a seed decides.

Nothing runs when it is launched: work waits in the queue of its stream, and whenever a program launches something, the machine
runs some of what is ready, on any stream of any rank, or nothing. One thread does it all, so a seed gives the same order again, a
thousand orders take seconds, and where nothing is ready and something is queued, that is a deadlock, known at once.

Rejected: a thread for each stream, which is how torch's openreg does it. What threads do depends on the machine's load, does not
come again, and a deadlock is a timeout there.
"""

from __future__ import annotations

import contextlib
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from commlayer.devices.device_contract import Stream, StreamEvent, TimedEvent
from commlayer.profiles.errors import CommlayerError, UsageError
from simulated.simulated_memory import SimulatedMemory

__all__ = [
    "Deadlock",
    "SimulatedDevice",
    "SimulatedEvent",
    "SimulatedMachine",
    "SimulatedProgram",
    "SimulatedStream",
    "StreamTask",
    "Watcher",
]

SimulatedProgram = Generator["SimulatedEvent | None", None, Any]
"""A rank's program. ``yield`` lets other ranks' programs go on; ``yield event`` is a wait of the host for the event."""

_EAGERNESS = (0.0, 0.3, 1.0, 4.0)
"""How many ready tasks run, on average, whenever a program launches one: a seed draws one of these for a machine."""
_LAZY_SHARES = (0.0, 0.2, 0.5)
"""How many of a machine's streams are lazy: they run when no other can, or rarely. A seed draws one of these."""
_LAZY_TURNS = 0.02
"""How often a lazy stream runs while others can."""
_IMPATIENCES = (0.0, 0.02, 1.0)
"""How likely, at each turn, a hold is over that others still make last. A seed draws one of these."""


class Deadlock(CommlayerError):
    """Nothing can run any more, and something is queued: streams or programs wait for each other."""


class SimulatedEvent:
    """A point in a stream's work."""

    __slots__ = ("is_past", "reached", "stream", "waiting")

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.is_past = False
        self.reached = 0
        self.waiting: list[SimulatedStream] = []

    def is_done(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        """Run until the event is done. Raises Deadlock where no program has launched yet what that takes: ``yield`` the event."""
        self.stream.device.machine.run_until(self.is_done)

    def elapsed_us(self, since: TimedEvent) -> float:
        """How many events of the machine were reached from ``since`` to here: it has no other time."""
        assert isinstance(since, SimulatedEvent)  # of a simulated device
        return float(self.reached - since.reached)


class StreamTask(ABC):
    """One piece of work of a stream. ``is_ready``: it may begin; ``run`` returns whether it has ended (else whoever ends it
    pops it)."""

    __slots__ = ()

    def is_ready(self, stream: SimulatedStream) -> bool:
        return True

    @abstractmethod
    def run(self, stream: SimulatedStream) -> bool:
        """Do it; whether it has ended."""

    def waits_in_words(self) -> str:
        return ""


class _Launched(StreamTask):
    __slots__ = ("work",)

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def run(self, stream: SimulatedStream) -> bool:
        watcher = stream.device.machine.watcher
        if watcher is None:
            self.work()
        else:
            watcher.ran(stream, self.work)
        stream.device.machine.look_at_held()
        return True


class _Recorded(StreamTask):
    __slots__ = ("event",)

    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event

    def run(self, stream: SimulatedStream) -> bool:
        machine = stream.device.machine
        machine.num_reached += 1
        self.event.is_past, self.event.reached = True, machine.num_reached
        if machine.watcher is not None:
            machine.watcher.recorded(self.event)
        for waiting in self.event.waiting:
            machine.look_at(waiting)
        self.event.waiting.clear()
        return True


class _Awaited(StreamTask):
    __slots__ = ("event",)

    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event

    def is_ready(self, stream: SimulatedStream) -> bool:
        if not self.event.is_past and stream not in self.event.waiting:
            self.event.waiting.append(stream)
        return self.event.is_past

    def run(self, stream: SimulatedStream) -> bool:
        watcher = stream.device.machine.watcher
        if watcher is not None:
            watcher.waited(stream, self.event)
        return True

    def waits_in_words(self) -> str:
        return f"an event of {self.event.stream}"


class _Hold(StreamTask):
    """Ready when none of the numbers is so large any more, or when its time is over, which is the machine's to say."""

    __slots__ = ("busy", "is_over", "least")

    def __init__(self, busy: torch.Tensor, least: int) -> None:
        self.busy, self.least = busy, least
        self.is_over = False

    def is_ready(self, stream: SimulatedStream) -> bool:
        if self.is_over or not bool((self.busy >= self.least).any()):
            return True
        if stream not in stream.device.machine.held:
            stream.device.machine.held.append(stream)
        return False

    def run(self, stream: SimulatedStream) -> bool:
        return True

    def waits_in_words(self) -> str:
        return "a hold to end"


class SimulatedStream:
    """A queue of tasks of one device."""

    def __init__(self, device: SimulatedDevice, name: str, number: int) -> None:
        self.device, self.name, self.number = device, name, number
        self.tasks: deque[StreamTask] = deque()
        machine = device.machine
        self.peers = machine.pools[machine.draw.random() < machine.lazy_share]
        """Those that are ready of the eager streams, or of the lazy ones."""
        self.place = -1  # among them; -1: not there

    def __str__(self) -> str:
        return f"rank {self.device.rank}'s stream {self.name}"

    def launch(self, work: Callable[[], object]) -> None:
        self.enqueue(_Launched(self.device.memory.unheld(work)))

    def record(self) -> SimulatedEvent:
        event = SimulatedEvent(self)
        self.enqueue(_Recorded(event))
        return event

    def record_time(self) -> SimulatedEvent:
        return self.record()

    def mark(self) -> SimulatedEvent:
        """Record an event, and run nothing meanwhile."""
        event = SimulatedEvent(self)
        self.put(_Recorded(event))
        return event

    def wait(self, event: StreamEvent) -> None:
        assert isinstance(event, SimulatedEvent)  # of a simulated device
        self.enqueue(_Awaited(event))

    def keep(self, tensor: torch.Tensor) -> None:
        self.device.memory.keep(tensor, self)

    def hold(self, busy: torch.Tensor, least: int, most_us: float) -> None:
        del most_us  # a machine has no time: how patient holds are says its seed
        self.enqueue(_Hold(self.device.memory.unheld(busy), least))

    def enqueue(self, task: StreamTask) -> None:
        """Put a task behind the others, and let the machine run some of what is ready."""
        self.device.memory.take_back()
        self.put(task)
        self.device.machine.run_some()

    def put(self, task: StreamTask) -> None:
        """Put a task behind the others, and run nothing."""
        self.tasks.append(task)
        self.device.machine.queued += 1
        if len(self.tasks) == 1:
            self.device.machine.look_at(self)


class Watcher:
    """Sees what a machine runs, in the order in which it does."""

    def ran(self, stream: SimulatedStream, work: Callable[[], object]) -> None:
        """Run ``work``, of ``stream``."""
        work()

    def moved(
        self, stream: SimulatedStream, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """``stream`` has read and written these tensors."""

    def began(self, stream: SimulatedStream, communicator: str, number: int) -> None:
        """``stream`` has begun an exchange of a communicator, with its number there."""

    def recorded(self, event: SimulatedEvent) -> None:
        """The event is done."""

    def waited(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """``stream`` runs what it is given from now on after ``event``."""


class SimulatedDevice:
    """The device of one rank. ``main`` is the stream that is current if nobody says another one. ``is_capturing``: see
    :class:`~commlayer.devices.device_contract.Device`; what is launched runs all the same."""

    is_capturing = False

    def __init__(self, machine: SimulatedMachine, rank: int) -> None:
        self.machine, self.rank = machine, rank
        self.memory = SimulatedMemory(lambda: self.current, machine.order)
        self._streams = 0
        self.main = self.new_stream("main")
        self._current = [self.main]

    @property
    def current(self) -> SimulatedStream:
        return self._current[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, SimulatedStream)
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def stream(self, *, is_high: bool) -> SimulatedStream:
        return self.new_stream("high" if is_high else "usual")

    def new_stream(self, name: str) -> SimulatedStream:
        """A stream that errors call by ``name`` and a number."""
        number, self._streams = self._streams, self._streams + 1
        stream = SimulatedStream(self, f"{name} ({number})", self.machine.next_number())
        self.machine.streams.append(stream)
        return stream

    def empty(self, num_bytes: int) -> torch.Tensor:
        return self.memory.empty(num_bytes)

    def synchronize(self) -> None:
        """Run until all streams of the device are empty. Raises Deadlock as :meth:`SimulatedEvent.synchronize`."""
        mine = [stream for stream in self.machine.streams if stream.device is self]
        self.machine.run_until(lambda: not any(stream.tasks for stream in mine))


def _require_whole(name: str, value: object, *, least: int | None = None) -> None:
    """Raise UsageError unless ``value`` is a whole number, of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise UsageError(
            f"{name}: expected a whole number{'' if least is None else f' of at least {least}'}, got {value!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class SimulatedMachine:
    """``size`` devices, one for each rank. ``seed`` decides the order of all that nothing else orders.

    ``eagerness``: how many ready tasks run, on average, when a program launches one; None: the seed says it. ``slots``: how many
    exchanges a device can have begun at the same time, as kernels that wait for their peers occupy a GPU; None: any number.
    ``impatience``: how likely, at each turn, a hold ends by itself while others could go on; None: the seed says it. Where
    nothing else can run a hold ends always. ``watcher`` sees what runs.

    Raises UsageError for a size or a number of slots below 1, a seed that is no whole number, and an eagerness that is no
    number of at least 0: None for a seed would draw another order each time.
    """

    def __init__(
        self,
        size: int,
        seed: int = 0,
        *,
        eagerness: float | None = None,
        slots: int | None = None,
        impatience: float | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        _require_whole("size (how many ranks)", size, least=1)
        _require_whole("seed", seed)
        if slots is not None:
            _require_whole("slots (how many exchanges at once, or None)", slots, least=1)
        if eagerness is not None and not (_is_number(eagerness) and 0 <= eagerness < math.inf):
            raise UsageError(f"eagerness: expected a number of at least 0, or None, got {eagerness!r}")
        self.draw = random.Random(seed)
        self._of_holds = random.Random(-1 - seed)  # of its own: machines without holds keep the orders that they had
        self._impatience = self._of_holds.choice(_IMPATIENCES) if impatience is None else impatience
        self.eagerness = self.draw.choice(_EAGERNESS) if eagerness is None else eagerness
        self.slots, self.watcher = slots, watcher
        self.num_reached = 0
        """How many events have been reached."""
        self.streams: list[SimulatedStream] = []
        self.movable: list[Callable[[], None]] = []
        """Messages whose two ends have both begun: each may go at any moment."""
        self.held: list[SimulatedStream] = []
        """Streams whose first task is a hold that others make last."""
        self.overdue = 0
        """How many holds have ended by themselves."""
        self.occupied = [0] * size
        self.communicators: list[Any] = []
        self.lazy_share = self.draw.choice(_LAZY_SHARES)
        self.pools: tuple[list[SimulatedStream], list[SimulatedStream]] = ([], [])
        """The streams that are ready: eager ones, and lazy ones."""
        self.queued = 0
        """Tasks of all streams that have not ended."""
        self._numbers = 0
        self._is_running = False
        self.devices = tuple(SimulatedDevice(self, rank) for rank in range(size))

    def next_number(self) -> int:
        """A number that no other stream or event of the machine has."""
        self._numbers += 1
        return self._numbers

    def order(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """The host has seen ``event`` done before it launches on ``stream`` what comes now."""
        if self.watcher is not None:
            self.watcher.waited(stream, event)

    # Running

    def look_at(self, stream: SimulatedStream) -> None:
        """Something has changed for the stream: see whether its first task may begin."""
        if stream.place < 0 and stream.tasks and stream.tasks[0].is_ready(stream):
            stream.place = len(stream.peers)
            stream.peers.append(stream)

    def look_at_held(self) -> None:
        """Memory has changed: see which holds are over."""
        if self.held:
            held, self.held = self.held, []
            for stream in held:
                self.look_at(stream)

    def ended(self, stream: SimulatedStream) -> None:
        """The stream's first task, which took more than one turn, has ended."""
        stream.tasks.popleft()
        self.queued -= 1
        self.look_at(stream)

    def run_some(self) -> None:
        """Run as many tasks as the seed says: none, some, or until nothing is ready."""
        if self.eagerness <= 0.0 or self._is_running:
            return
        go_on = self.eagerness / (1.0 + self.eagerness)  # a geometric distribution with that mean
        while self.draw.random() < go_on and self.step(hosts_go_on=True):
            pass

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run what is ready until ``is_done()``. Raises Deadlock where nothing is ready before."""
        while not is_done():
            if not self.step():
                raise Deadlock(self.explain("the host waits"))

    def step(self, *, hosts_go_on: bool = False) -> bool:
        """Run one task, or move one message, that is ready; False: there is none. ``hosts_go_on``: nor does a hold end for it."""
        eager, lazy = self.pools
        count = len(eager) + len(self.movable)
        is_stuck = not (count or lazy or hosts_go_on)
        if self.held and (is_stuck or self._of_holds.random() < self._impatience):
            self._end_hold()
            return True
        random = self.draw.random
        if lazy and (count == 0 or random() < _LAZY_TURNS):
            self._take(lazy[int(random() * len(lazy))])
        elif count == 0:
            return False
        else:
            chosen = int(random() * count)
            if chosen < len(eager):
                self._take(eager[chosen])
            else:
                self._move(chosen - len(eager))
        return True

    def _end_hold(self) -> None:
        stream = self.held.pop(self._of_holds.randrange(len(self.held)))
        hold = stream.tasks[0]
        assert isinstance(hold, _Hold)  # only these are held
        hold.is_over = True
        self.overdue += 1
        self.look_at(stream)

    def _move(self, index: int) -> None:
        self.movable[index], self.movable[-1] = self.movable[-1], self.movable[index]
        self.movable.pop()()

    def _take(self, stream: SimulatedStream) -> None:
        last = stream.peers.pop()
        if last is not stream:
            stream.peers[stream.place], last.place = last, stream.place
        stream.place = -1
        self._is_running = True
        try:
            is_over = stream.tasks[0].run(stream)
        finally:
            self._is_running = False
        if is_over:
            self.ended(stream)

    # Programs

    def run(self, programs: Sequence[SimulatedProgram]) -> list[Any]:
        """Run a program on each rank to its end, and all that they launched; returns what they returned, in the order of ranks.

        Raises Deadlock where nothing can go on, naming streams, communicators and ranks.
        """
        if len(programs) != len(self.devices):
            raise UsageError(f"expected {len(self.devices)} programs, one for each rank, got {len(programs)}")
        results: list[Any] = [None] * len(programs)
        hosts = dict(enumerate(programs))
        held: dict[int, SimulatedEvent] = {}
        while hosts:
            able = [rank for rank in hosts if rank not in held or held[rank].is_past]
            if not able:
                if not self.step():
                    raise Deadlock(self.explain(f"the programs of ranks {sorted(hosts)} wait"))
                continue
            rank = self.draw.choice(able)
            held.pop(rank, None)
            try:
                event = next(hosts[rank])
            except StopIteration as end:
                results[rank] = end.value
                del hosts[rank]
                continue
            if event is not None:
                held[rank] = event
        while self.queued:
            if not self.step():
                raise Deadlock(self.explain("all programs have ended"))
        return results

    def explain(self, hosts: str) -> str:
        """Say what is queued and what it waits for."""
        heads = [
            f"{stream} waits for {stream.tasks[0].waits_in_words()}"
            for stream in self.streams
            if stream.tasks and stream.tasks[0].waits_in_words()
        ]
        return "\n  ".join([f"deadlock: nothing can run any more; {hosts}", *heads])
