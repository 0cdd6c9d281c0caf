"""CUDA tensors over NCCL: one stream for each resource and lane, events between them, no host wait.

Written for, and to be judged on, a machine with a GPU (``make test-gpu``); without one those tests skip and say so.

An all_gather whose slices are equal is NCCL's own, in place, one per block (NVLS and the copy engines serve it); unequal
slices and the all_to_all are grouped point-to-point messages, so that no bytes are padded and nothing is packed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Moves, Region
from commlayer.scheduler.plan import Op, Plan
from commlayer.transport.contract import Buffers, Call, Channel, Coder, Reducer, Whole
from commlayer.transport.nccl import is_high_priority

__all__ = ["NcclScript", "NcclTransport", "stream_priorities"]

_HIGH, _NORMAL = -1, 0
"""CUDA has more levels on some devices; NCCL's kernels, which run on streams of torch's groups, have these two."""


def stream_priorities(lane: str = "") -> dict[Resource, int]:
    """The priority of the stream of each resource: -1 for the lanes ep, tp and pp, 0 for cp and dp.

    Without a lane INTER alone is high: what it sends is what the other stages wait for. In a lower lane it is not, or its stages
    would go before those of a higher one. A priority decides which waiting work begins first; it stops no kernel that runs.

    Raises UsageError for a lane that does not exist.
    """
    inter = _HIGH if not lane or is_high_priority(lane) else _NORMAL
    others = _HIGH if is_high_priority(lane) else _NORMAL
    return {Resource.INTER: inter, Resource.INTRA: others, Resource.DEVICE: others}


class NcclScript(NamedTuple):
    """A plan, and the moves of this rank in each of its steps."""

    plan: Plan
    steps: tuple[Moves, ...]


class NcclTransport:
    """Process groups with the NCCL backend, and one CUDA stream for each resource, of the priority of ``lane``.

    The streams are ours, so that the caller's stream never waits for a stage that it does not need. A transport is of one lane:
    what is on another has streams of its own. ``channels`` should be groups whose options are of the lane too
    (:func:`commlayer.transport.nccl.apply_lane`): it is on their streams that NCCL's kernels run.
    """

    def __init__(self, channels: Mapping[Op, Channel], device: torch.device, lane: str = "") -> None:
        self.channels = channels
        self.device = device
        self.lane = lane
        self.ended: list[torch.cuda.Event] = []  # of the steps of the latest call
        self.streams = {
            resource: torch.cuda.Stream(device, priority=priority)
            for resource, priority in stream_priorities(lane).items()
        }

    def compile(self, plan: Plan, steps: Sequence[Moves]) -> NcclScript:
        """Nothing is to be found out: NCCL takes messages as they are."""
        return NcclScript(plan, tuple(steps))

    def start(
        self,
        script: NcclScript,
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
        mark: int = 0,
    ) -> Call:
        if reduce is not None or coder is not None:
            raise InternalError(f"{script.plan.name}: sums and wire formats of plans run on the CPU only")
        del mark  # NCCL's messages have no head
        del timeout_s  # NCCL's watchdog has the group's own timeout; there is no host wait here to bound
        return _NcclCall(self, script.plan, script.steps, buffers)

    def whole(self, plan: Plan, timeout_s: float) -> Whole | None:
        del plan, timeout_s  # posting a step does not wait for it here: there is nothing to save
        return None

    def abort(self, why: str | None = None) -> None:
        del why  # a torn communicator tells its peers that, and nothing else
        for channel in self.channels.values():
            channel.group.abort()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for channel in self.channels.values():
            dist.destroy_process_group(channel.group)
        self.channels = {}


class _NcclCall:
    def __init__(self, transport: NcclTransport, plan: Plan, steps: Sequence[Moves], buffers: Buffers) -> None:
        self._transport, self._plan, self.steps, self._buffers = transport, plan, steps, buffers
        self._ended = [torch.cuda.Event() for _ in steps]
        ready = torch.cuda.current_stream(transport.device).record_event()
        for stream in transport.streams.values():
            stream.wait_event(ready)
            for event in transport.ended:  # all calls share the staging memory, whichever stream they come from
                stream.wait_event(event)
            for buffer in buffers.values():
                buffer.tensor.record_stream(
                    stream
                )  # the allocator must not hand the memory on while a stage still uses it
        transport.ended = self._ended

    def require(self, earlier: int, index: int) -> None:
        self._stream(index).wait_event(self._ended[earlier])

    def post(self, index: int) -> None:
        step = self.steps[index]
        stream = self._stream(index)
        with torch.cuda.stream(stream):
            for work in self._communicate(index, step):
                work.wait()  # makes this stream wait, not the host
            for copy in step.copies:
                self._view(copy.target).copy_(self._view(copy.source), non_blocking=True)
            self._ended[index].record(stream)

    def finish(self) -> None:
        current = torch.cuda.current_stream(self._transport.device)
        for event in self._ended:
            current.wait_event(event)

    def _communicate(self, index: int, step: Moves) -> list[dist.Work]:
        if not step.sends and not step.receives:
            return []
        op = self._plan.steps[index].op
        channel = self._transport.channels[op]
        if op is Op.ALL_GATHER:
            spans = self._equal_slices(step, channel)
            if spans is not None:
                return self._gather(channel, spans)
        messages = [
            dist.P2POp(dist.irecv, self._view(m.region), channel.peers[m.peer][0], channel.group) for m in step.receives
        ] + [dist.P2POp(dist.isend, self._view(m.region), channel.peers[m.peer][0], channel.group) for m in step.sends]
        return list(dist.batch_isend_irecv(messages))

    def _equal_slices(self, step: Moves, channel: Channel) -> list[tuple[Region, Region]] | None:
        """(my slice, the whole) for each contiguous run of equal slices, or None where slices differ in size."""
        size = channel.group.size()
        by_tag: dict[int, list[Region]] = {}
        mine: dict[int, Region] = {m.tag: m.region for m in step.sends}
        for m in step.receives:
            by_tag.setdefault(m.tag, [mine[m.tag]] if m.tag in mine else []).append(m.region)
        spans = []
        for tag, regions in by_tag.items():
            first, last = min(r.start for r in regions), max(r.stop for r in regions)
            if len(regions) != size or any(r.size != regions[0].size for r in regions):
                return None
            if last - first != regions[0].size * size or not channel.is_in_order:
                return None
            spans.append((mine[tag], Region(mine[tag].buffer, first, last)))
        return spans

    def _gather(self, channel: Channel, spans: list[tuple[Region, Region]]) -> list[dist.Work]:
        works = []
        for mine, whole in spans:
            work = dist.all_gather_into_tensor(self._view(whole), self._view(mine), group=channel.group, async_op=True)
            if work is not None:
                works.append(work)
        return works

    def _stream(self, index: int) -> torch.cuda.Stream:
        return self._transport.streams[self._plan.steps[index].resource]

    def _view(self, region: Region) -> torch.Tensor:
        return self._buffers[region.buffer].part(region.start, region.stop)
