"""The streams, events and memory of one process's simulated device, as torch's programs ask for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import torch

from commlayer.profiles.errors import UsageError
from simulated.torch_memory import TorchMemory
from simulated.torch_operators import Operators
from simulated.torch_streams import QueueMark, QueueRunner, StreamDelays, StreamQueue

__all__ = ["TorchEvent", "TorchSimulator", "TorchStream", "find_simulator", "make_simulator", "require_simulator"]

_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)


class TorchSimulator:
    """The device of this process: its streams, its memory, its operators."""

    def __init__(self, delays: StreamDelays, memory_bytes: int, timeout_s: float) -> None:
        self.runner = QueueRunner(delays, timeout_s)
        self.memory = TorchMemory(memory_bytes, self.runner)
        self.queues: list[StreamQueue] = [self.runner.queue("default stream")]
        self.default = TorchStream(self, 0)
        self._here = threading.local()
        self.operators = Operators(self.memory, self.runner, lambda: self.current.queue)
        self.operators.register(lambda stream: self.queues[stream.stream_id])

    @property
    def current(self) -> TorchStream:
        """The stream on which this thread launches."""
        stream: TorchStream = getattr(self._here, "stream", self.default)
        return stream

    def use(self, stream: TorchStream) -> None:
        """Launch this thread's work on ``stream`` from now on."""
        self._here.stream = stream

    def new_stream(self, name: str = "") -> TorchStream:
        """A stream of its own; ``name``: for messages."""
        number = len(self.queues)
        self.queues.append(self.runner.queue(name or f"stream {number}"))
        return TorchStream(self, number)

    def synchronize(self) -> None:
        """Make the host wait until all streams have run what was launched on them."""
        for mark in [self.runner.record(queue) for queue in self.queues]:
            self.runner.until(mark, "to wait for the device")

    def reseed(self, delays: StreamDelays) -> None:
        """Delay streams by other draws from now on."""
        self.synchronize()
        self.runner.reseed(delays)


class TorchEvent:
    """A point in a stream's work, as ``torch.cuda.Event`` is one."""

    def __init__(
        self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, **other: Any
    ) -> None:
        del device, blocking, other
        self._simulator = require_simulator()
        self._is_timed = enable_timing
        self._mark = QueueMark(is_done=True)

    def record(self, stream: TorchStream | None = None) -> TorchEvent:
        """Set it behind all that was launched on ``stream`` (the current one) so far."""
        self._mark = self._simulator.runner.record((stream or self._simulator.current).queue)
        return self

    def wait(self, stream: TorchStream | None = None) -> None:
        """Make ``stream`` (the current one) wait for it. The host does not."""
        self._simulator.runner.wait_for((stream or self._simulator.current).queue, self._mark)

    def query(self) -> bool:
        """Whether it was reached. Raises what the device's work raised, after which nothing is reached any more."""
        return self._simulator.runner.has_reached(self._mark)

    def synchronize(self) -> None:
        """Make the host wait for it."""
        self._simulator.runner.until(self._mark, "to wait for an event")

    def elapsed_time(self, end: TorchEvent) -> float:
        """The time from here to ``end``, ms. Raises UsageError where one of them was not reached, or was made without
        ``enable_timing``."""
        for event in (self, end):
            if not event._is_timed or not event._mark.reached_s:
                raise UsageError("expected two events made with enable_timing=True that were recorded and reached")
        return (end._mark.reached_s - self._mark.reached_s) * 1e3


class TorchStream(torch.Stream):
    """A queue of work, as ``torch.cuda.Stream`` is one."""

    simulator: TorchSimulator
    queue: StreamQueue
    _before: list[TorchStream]

    def __new__(cls, simulator: Any = None, number: int | None = None, **other: Any) -> TorchStream:
        """``TorchStream()`` and ``TorchStream(device, priority=…)`` make a stream of this process's device."""
        del other
        if not isinstance(simulator, TorchSimulator) or number is None:
            return require_simulator().new_stream()
        made: Any = super().__new__(cls, stream_id=number, device_index=0, device_type=_TYPE)
        made.simulator, made.queue, made._before = simulator, simulator.queues[number], []
        return made  # type: ignore[no-any-return]

    def launch(self, label: str, work: Callable[[], object]) -> None:
        """Run ``work`` behind what it was given before; ``label``: for messages."""
        self.simulator.runner.launch(self.queue, label, work)

    def hold(self, busy: torch.Tensor, least: int, most_us: float) -> None:
        """See :meth:`commlayer.devices.device_contract.Stream.hold`."""
        numbers = self.simulator.memory.alias(busy).numpy()

        def steps() -> Iterator[Callable[[], bool]]:
            due_s = monotonic() + most_us / 1e6
            yield lambda: monotonic() >= due_s or not bool((numbers >= least).any())

        self.simulator.runner.launch_steps(self.queue, "a hold", steps)

    def wait_event(self, event: Any) -> None:
        """Make it wait for ``event``. The host does not."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make it wait for all that ``stream`` was given so far. The host does not."""
        self.simulator.runner.wait_for(self.queue, self.simulator.runner.record(stream.queue))

    def record_event(self, event: Any = None) -> Any:
        """The point behind all that it was given so far."""
        return (event or TorchEvent()).record(self)

    def query(self) -> bool:
        """Whether all that it was given has run."""
        return not self.queue.pieces

    def synchronize(self) -> None:
        """Make the host wait for it."""
        self.simulator.runner.until(self.simulator.runner.record(self.queue), "to wait for a stream")

    def __enter__(self) -> TorchStream:
        self._before.append(self.simulator.current)
        self.simulator.use(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self.simulator.use(self._before.pop())


_made: list[TorchSimulator] = []


def find_simulator() -> TorchSimulator | None:
    """The device of this process, if it was made."""
    return _made[0] if _made else None


def require_simulator() -> TorchSimulator:
    """The device of this process. Raises UsageError where it was not made."""
    if not _made:
        raise UsageError(
            "expected the simulated device to be registered: call simulated.torch_device.simulated_device first"
        )
    return _made[0]


def make_simulator(delays: StreamDelays, memory_bytes: int, timeout_s: float) -> TorchSimulator:
    """Make the device of this process, once."""
    _made.append(TorchSimulator(delays, memory_bytes, timeout_s))
    return _made[0]
