"""The contract of a device: work is launched on streams, events are recorded on them, and streams wait for events.

That is all that running a plan asks of a device. The host launches and goes on; what a stream was given runs in order, and
nothing else orders the work of two streams but events. CUDA is a device that does this (:mod:`commlayer.devices.accelerator`),
and so is what any machine has (tests/simulated), which shows what becomes of a plan where an order is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Protocol

import torch

__all__ = ["Addressed", "Device", "Messenger", "Received", "Stream", "StreamEvent", "TimedEvent"]

Addressed = tuple[int, torch.Tensor]
"""A member of a messenger's group, by its rank there, and the 1-D uint8 [bytes] that go to it or come from it."""


class StreamEvent(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether all that was launched before it has run. Does not wait."""

    def synchronize(self) -> None:
        """Make the host wait for it."""


class TimedEvent(StreamEvent, Protocol):
    """A point in a stream's work, of which the device knows when it was reached."""

    def elapsed_us(self, since: TimedEvent) -> float:
        """The time from ``since`` to here, µs, by the device's clock. Both have been reached."""


class Stream(Protocol):
    """A queue of work, which runs in the order in which it was launched."""

    def launch(self, work: Callable[[], object]) -> None:
        """Run ``work`` behind what was launched before. It calls operators of torch, and does not wait."""

    def record(self) -> StreamEvent:
        """The point behind all that was launched so far."""

    def record_time(self) -> TimedEvent:
        """The same, of which the device knows when it was reached: that costs it more."""

    def wait(self, event: StreamEvent) -> None:
        """Let nothing that is launched from now on run before ``event`` is done. The host does not wait."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Have the memory of ``tensor``, once it is freed, not handed on before what was launched here until then has run."""

    def hold(self, busy: torch.Tensor, least: int, most_us: float) -> None:
        """Let nothing that is launched from now on run while a number in ``busy``, 1-D uint8 of the device, is ``least`` or more,
        but for ``most_us`` at most: it ends by itself, whatever becomes of the numbers. The host does not wait.

        Other streams write the numbers meanwhile, so nothing may depend on what is read. It delays, and orders nothing.
        """


class Device(Protocol):
    """A device and its streams."""

    @property
    def current(self) -> Stream:
        """The stream on which the caller's own work is launched now."""

    @property
    def is_capturing(self) -> bool:
        """Whether what the current stream is given is captured in a graph, to be run later, as often as somebody asks for it."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make ``stream`` the current one inside a with block."""

    def stream(self, *, is_high: bool) -> Stream:
        """A new stream, of high or usual priority."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, of the current stream's: 1-D uint8 [num_bytes]."""

    def synchronize(self) -> None:
        """Make the host wait until all streams have run what was launched on them."""


class Received(Protocol):
    """Messages that have been enqueued."""

    def wait(self) -> object:
        """Make the current stream wait for them. The host does not wait."""


class Messenger(Protocol):
    """One rank's end of a communicator on a device, with NCCL's order: what it is given runs one after the other.

    It is connected when it is made, by all ranks together: for its first message not all of them may come. All ranks give it
    messages in one order. Messages between two ranks have no tags: they meet in the order in which both ends
    name them.
    """

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Received:
        """Enqueue messages that are under way together, behind the current stream's work."""

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Received:
        """Enqueue an all_gather of equal parts, 1-D [bytes], in the order of ranks; ``mine`` may lie in ``whole``."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of its messages."""

    def abort(self) -> None:
        """Break its connections, so that nobody waits for this rank."""

    def close(self) -> None:
        """Let go of them. Collective."""
