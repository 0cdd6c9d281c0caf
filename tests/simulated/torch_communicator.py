"""Collectives of a simulated device that torch sees, with NCCL's order: what a group of the backend uses for its tensors.

A collective is enqueued on a stream of the communicator's own, behind what the caller's stream was given; the host goes on.
Waiting for its handle makes the stream that is current then wait, not the host. When the stream comes to it, its bytes go over
Gloo, in the order in which the program called, for no longer than the group's timeout.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    ReduceOptions,
    Store,
    Work,
)

from commlayer.failures.waits import keep
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError, TensorError, UsageError
from commlayer.transport.gloo_groups import gloo_in_order
from commlayer.transport.nccl import Nccl
from simulated.torch_simulator import TorchEvent, TorchSimulator, TorchStream

__all__ = ["TorchCommunicator", "make_communicator"]

Tensors = Sequence[torch.Tensor]
Steps = Callable[[], Iterator[Work]]
"""A collective on the bytes: starts Gloo's calls one after the other, each when the one before it has ended."""


def make_communicator(simulator: TorchSimulator) -> Callable[..., Nccl]:
    """Give the function that makes groups' communicators, for :func:`commlayer.transport.accelerators.register_accelerator`."""

    def make(store: Store, rank: int, global_ranks: Sequence[int], timeout: timedelta, name: str) -> Nccl:
        made: Any = TorchCommunicator(simulator, store, rank, global_ranks, timeout, name)
        return Nccl(made)

    return make


class EnqueuedWork(Work):
    """The handle of a collective. ``kept``: its tensors, until somebody has waited for it."""

    def __init__(self, told: TorchStream, label: str, end: TorchEvent, outputs: Any, kept: Any) -> None:
        super().__init__()
        self._told, self._label, self._end = told, label, end
        self._simulator = told.simulator
        self._outputs, self._kept = outputs, kept
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for it. The host does not, but for a barrier."""
        del timeout
        self._simulator.current.wait_event(self._end)
        self._kept = None
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._end.query()

    def is_success(self) -> bool:
        return self._end.query()

    def exception(self) -> Any:
        return None

    def result(self) -> Any:
        """The outputs. Their values are there where somebody has waited."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs, which is done when the collective is: C++, which waits for futures, cannot make a stream of
        this device wait, so whoever waits for this one waits on the host."""
        if self._future is None:
            future = self._future = torch.futures.Future()
            outputs = self._outputs
            self._told.wait_event(self._end)
            self._told.launch(f"callbacks of {self._label}", lambda: future.set_result(outputs))
        return self._future


class _BarrierWork(EnqueuedWork):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the host wait, as NCCL's barrier does."""
        super().wait(timeout)
        self._end.synchronize()
        return True


class _Awaited:
    """A message under way. Gloo's handle does not say whether it has come, so a thread waits for it."""

    def __init__(self, work: Work) -> None:
        self._work, self._is_over = work, threading.Event()
        self._error: BaseException | None = None
        self.is_completed = self._is_over.is_set
        threading.Thread(target=self._run, name="commlayer message", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._is_over.set()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class TorchCommunicator:
    """One group's communicator: torch's verbs, by their first names, on tensors of the device. Its ranks make it together."""

    def __init__(
        self,
        simulator: TorchSimulator,
        store: Store,
        rank: int,
        global_ranks: Sequence[int],
        timeout: timedelta,
        name: str,
    ) -> None:
        self._simulator, self._rank, self._size = simulator, rank, len(global_ranks)
        self._who = f"rank {global_ranks[rank]}, group {name} of {self._size} ranks on the simulated device"
        simulator.runner.who = f"rank {global_ranks[rank]}"
        self._gloo: Any = gloo_in_order(store, rank, self._size, timeout)
        self._messages: Any = dist.ProcessGroupGloo(PrefixStore("messages/", store), rank, self._size, timeout)
        self._stream = simulator.new_stream(f"the communicator of group {name}")
        self._told = simulator.new_stream(f"the futures of group {name}")
        self._number = 0
        self._is_over = self._is_torn = False
        self._block: list[tuple[str, Any, Any, Callable[[], Work]]] | None = None
        self._under_way: deque[EnqueuedWork] = deque()  # nobody need hold a handle: its tensors are held here

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)
        self._messages._set_default_timeout(timeout)

    def under_way(self) -> str:
        """The first call that has not run yet, in words; empty where all have. Does not wait."""
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        return self._under_way[0]._label if self._under_way else ""

    def shutdown(self) -> None:
        """Let go of connections, when what was called has ended."""
        if not self._is_over:
            with contextlib.suppress(ClusterError):  # whoever waited for the call has been told
                self._stream.synchronize()
            self._end()

    def abort(self) -> None:
        """Let go of connections at once. What is under way ends as it is, and the stream goes on to what comes behind it."""
        if not self._is_over:
            self._is_over = self._is_torn = True
            for gloo in (self._gloo, self._messages):  # freeing them would wait for what is under way
                keep(gloo)

    def _end(self) -> None:
        self._is_over = True
        self._gloo = self._messages = None

    # Launching

    def _launch(self, verb: str, ins: Any, outs: Any, steps: Steps, *, work: type[EnqueuedWork] = EnqueuedWork) -> Work:
        """Enqueue a collective that reads ``ins`` and writes ``outs``, tensors in lists."""
        if self._is_over:
            raise UsageError(f"{self._who}: {verb} after the group was destroyed")
        self._number += 1
        label = f"{self._who}: {verb}, call {self._number}"
        runner, current = self._simulator.runner, self._simulator.current
        self._stream.wait_event(current.record_event())
        runner.launch_steps(self._stream.queue, label, lambda: self._watched(label, steps()))
        made = work(self._told, label, self._stream.record_event(), outs, (ins, outs))
        self.under_way()  # lets go of what has run
        self._under_way.append(made)
        return made

    def _watched(self, label: str, works: Iterator[Work]) -> Iterator[Callable[[], bool]]:
        """Yields until Gloo's calls have ended. Raises ClusterError for what one of them raised."""
        try:
            for work in works if not self._is_torn else ():
                if work is not None:
                    yield partial(self._has_ended, work)
                    if self._is_torn:
                        return
                    work.wait()
        except RuntimeError as error:
            kind = CollectiveTimeoutError if "imed out" in str(error) else PeerError
            raise kind(f"{label}: {error}") from error

    def _has_ended(self, work: Work) -> bool:
        return self._is_torn or work.is_completed()

    def _bytes(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor with the same memory, 1-D uint8."""
        return self._host(verb, tensor).reshape(-1).view(torch.uint8)

    def _host(self, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise TensorError(f"{self._who}: {verb} expected a contiguous tensor, got strides {tensor.stride()}")
        return self._simulator.memory.alias(tensor)

    # Verbs

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        hosts = [self._bytes("broadcast", tensor) for tensor in tensors]
        root = opts.rootRank

        def steps() -> Iterator[Work]:
            for host in hosts:
                yield self._gloo.broadcast([host], _rooted(BroadcastOptions, root))

        return self._launch("broadcast", tensors, tensors, steps)

    def allreduce(self, tensors: Tensors, opts: Any) -> Work:
        return self._reduced("all_reduce", tensors, opts.reduceOp, None)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        return self._reduced("reduce", tensors, opts.reduceOp, opts.rootRank)

    def _reduced(self, verb: str, tensors: Tensors, op: Any, root: int | None) -> Work:
        hosts = [self._host(verb, tensor).view(-1) for tensor in tensors]
        finish = self._average(op)

        def steps() -> Iterator[Work]:
            for host in hosts:
                carried = host.to(torch.uint8) if host.dtype is torch.bool else host
                if root is None:
                    options: Any = AllreduceOptions()
                    options.reduceOp = _plain(op)
                    yield self._gloo.allreduce([carried], options)
                else:
                    options = _rooted(ReduceOptions, root)
                    options.reduceOp = _plain(op)
                    yield self._gloo.reduce([carried], options)
                if carried is not host:
                    host.copy_(carried)
                finish(host)

        return self._launch(verb, tensors, tensors, steps)

    def _average(self, op: Any) -> Callable[[torch.Tensor], object]:
        if op == ReduceOp.AVG:
            return lambda host: host.div_(self._size)
        if op == ReduceOp.PREMUL_SUM:
            raise TensorError(f"{self._who}: PREMUL_SUM is not simulated: multiply before a SUM")
        return lambda host: None

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        del opts
        parts = [[self._bytes("all_gather", tensor) for tensor in each] for each in outputs]
        mine = [self._bytes("all_gather", tensor) for tensor in inputs]

        def steps() -> Iterator[Work]:
            for places, own in zip(parts, mine, strict=True):
                places[self._rank].copy_(own)
                for root, place in enumerate(places):  # of any sizes, as NCCL's are
                    if place.numel():
                        yield self._gloo.broadcast([place], _rooted(BroadcastOptions, root))

        return self._launch("all_gather", inputs, outputs, steps)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        del opts
        wholes = [self._bytes("all_gather", tensor) for tensor in outputs]
        mine = [self._bytes("all_gather", tensor) for tensor in inputs]

        def steps() -> Iterator[Work]:
            for whole, own in zip(wholes, mine, strict=True):
                yield self._gloo._allgather_base(whole, own.clone(), AllgatherOptions())  # may lie in the whole

        return self._launch("all_gather", inputs, outputs, steps)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        lists = [list(self._host("reduce_scatter", tensor).view(-1).chunk(self._size)) for tensor in inputs]
        return self._scattered(outputs, inputs, lists, opts.reduceOp)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        lists = [[self._host("reduce_scatter", tensor).view(-1) for tensor in each] for each in inputs]
        return self._scattered(outputs, inputs, lists, opts.reduceOp)

    def _scattered(self, outputs: Tensors, inputs: Any, lists: Sequence[Tensors], op: Any) -> Work:
        hosts = [self._host("reduce_scatter", tensor).view(-1) for tensor in outputs]
        finish = self._average(op)

        def steps() -> Iterator[Work]:
            for host, parts in zip(hosts, lists, strict=True):
                whole = torch.cat(list(parts))  # one all_reduce: sums are rounded in one order on all ranks
                options: Any = AllreduceOptions()
                options.reduceOp = _plain(op)
                yield self._gloo.allreduce([whole], options)
                host.copy_(whole.split([part.numel() for part in parts])[self._rank])
                finish(host)

        return self._launch("reduce_scatter", inputs, outputs, steps)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, received: Any, sent: Any, opts: Any) -> Work:
        del opts
        place, own = self._bytes("all_to_all", output), self._bytes("all_to_all", input)
        splits = [_bytes_of(output, received, self._size), _bytes_of(input, sent, self._size)]

        def steps() -> Iterator[Work]:
            yield self._gloo.alltoall_base(place, own, *splits, AllToAllOptions())

        return self._launch("all_to_all", [input], [output], steps)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        del opts
        places = [self._bytes("all_to_all", tensor) for tensor in outputs]
        own = [self._bytes("all_to_all", tensor) for tensor in inputs]

        def steps() -> Iterator[Work]:
            whole = torch.cat([torch.empty(0, dtype=torch.uint8), *(torch.empty_like(place) for place in places)])
            received, sent = [place.numel() for place in places], [each.numel() for each in own]
            yield self._gloo.alltoall_base(whole, torch.cat(own), received, sent, AllToAllOptions())
            for place, part in zip(places, whole.split(received), strict=True):
                place.copy_(part)

        return self._launch("all_to_all", inputs, outputs, steps)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        root, own = opts.rootRank, self._bytes("gather", inputs[0])
        places = [self._bytes("gather", tensor) for tensor in outputs[0]] if outputs else []

        def steps() -> Iterator[Work]:
            if self._rank != root:
                yield self._send(own, root, 0)
                return
            for source, place in enumerate(places):
                if source == root:
                    place.copy_(own)
                else:
                    yield self._recv(place, source, 0)

        return self._launch("gather", inputs, outputs, steps)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        root, place = opts.rootRank, self._bytes("scatter", outputs[0])
        parts = [self._bytes("scatter", tensor) for tensor in inputs[0]] if inputs else []

        def steps() -> Iterator[Work]:
            if self._rank != root:
                yield self._recv(place, root, 0)
                return
            for target, part in enumerate(parts):
                if target == root:
                    place.copy_(part)
                else:
                    yield self._send(part, target, 0)

        return self._launch("scatter", inputs, outputs, steps)

    def send(self, tensors: Tensors, target: int, tag: int) -> Work:
        del tag  # NCCL has none: messages of two ranks meet in their order
        own = self._bytes("send", tensors[0])
        return self._message(f"send to {target}", tensors, [], lambda: self._send(own, target, 1))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        del tag
        place = self._bytes("recv", tensors[0])
        return self._message(f"recv from {source}", [], tensors, lambda: self._recv(place, source, 1))

    def _send(self, host: torch.Tensor, target: int, tag: int) -> Any:
        return _Awaited(self._messages.send([host], target, tag))

    def _recv(self, host: torch.Tensor, source: int, tag: int) -> Any:
        return _Awaited(self._messages.recv([host], source, tag))

    def _message(self, verb: str, ins: Any, outs: Any, start: Callable[[], Work]) -> Work:
        """Messages of one block are under way together, others one after the other, as NCCL's are."""
        if self._block is None:
            return self._launch(verb, ins, outs, lambda: iter([start()]))
        self._block.append((verb, ins, outs, start))
        return EnqueuedWork(self._told, verb, TorchEvent(), outs, (ins, outs))

    def barrier(self, opts: Any) -> Work:
        del opts
        token = torch.zeros(1, dtype=torch.uint8)

        def steps() -> Iterator[Work]:
            yield self._gloo.allreduce([token], AllreduceOptions())

        return self._launch("barrier", [], [], steps, work=_BarrierWork)

    # Coalescing

    def _start_coalescing(self) -> None:
        """Until :meth:`_end_coalescing`, messages wait for each other. Collectives are enqueued as they come."""
        self._block = []

    def _end_coalescing(self) -> Work:
        """Start the messages, and return a handle of them and of all collectives of the block."""
        block, self._block = self._block or [], None
        if not block:
            return EnqueuedWork(self._told, "a block of calls", self._stream.record_event(), [], list(self._under_way))
        verbs, ins, outs, starts = zip(*block, strict=True)

        def steps() -> Iterator[Work]:
            yield from [start() for start in starts]

        return self._launch(", ".join(verbs), ins, outs, steps)


def _bytes_of(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    if not splits:
        return [tensor.nbytes // size] * size
    row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return [rows * row for rows in splits]


def _rooted(options: Any, root: int) -> Any:
    made = options()
    made.rootRank = root
    return made


def _plain(op: Any) -> Any:
    return ReduceOp.SUM if op == ReduceOp.AVG else op
