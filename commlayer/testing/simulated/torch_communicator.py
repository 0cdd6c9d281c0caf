"""Collectives of a simulated device that torch sees, with NCCL's order: what a group of the backend uses for its tensors.

A collective is enqueued on a stream of the communicator's own, behind what the caller's stream was given; the host goes on.
Waiting for its handle makes the stream that is current then wait, not the host. When the stream comes to it, its bytes go over
Gloo, in the order in which the program called, for no longer than the group's timeout.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
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

from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError, TensorError, UsageError
from commlayer.testing.simulated.torch_device import TorchEvent, TorchSimulator, TorchStream
from commlayer.transport.gloo_groups import gloo_in_order
from commlayer.transport.nccl import Nccl

__all__ = ["TorchCommunicator", "make_communicator"]

Tensors = Sequence[torch.Tensor]
Steps = Callable[[], Iterator[Work]]
"""A collective on the bytes: starts Gloo's calls one after the other, each when the one before it has ended."""


def make_communicator(simulator: TorchSimulator) -> Callable[..., Nccl]:
    """What :func:`commlayer.transport.accelerators.register_accelerator` takes."""

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


class _Waited(Work):
    """Messages of Gloo's, which do not say that they have ended unless somebody waits for them: a thread does."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._wait, name="commlayer simulated messages", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises RuntimeError, Gloo's."""
        del timeout
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True


class _BarrierWork(EnqueuedWork):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the host wait, as NCCL's barrier does."""
        super().wait(timeout)
        self._end.synchronize()
        return True


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
        self._timeout = timeout
        self._stream = simulator.new_stream(f"the communicator of group {name}")
        self._told = simulator.new_stream(f"the futures of group {name}")
        self._number = 0
        self._num_messages: defaultdict[tuple[bool, int], int] = defaultdict(int)
        self._together: list[tuple[bool, Tensors, int, Tensors]] | None = None
        self._is_over = False
        self._under_way: deque[EnqueuedWork] = deque()  # nobody need hold a handle: its tensors are held here

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Let go of connections, when what was called has ended."""
        if not self._is_over:
            with contextlib.suppress(ClusterError):  # whoever waited for the call has been told
                self._stream.synchronize()
            self._end()

    def abort(self) -> None:
        """Let go of connections at once."""
        self._end()

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
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(made)
        return made

    def _watched(self, label: str, works: Iterator[Work]) -> Iterator[Callable[[], bool]]:
        """Yields until Gloo's calls have ended. Raises ClusterError for what one of them raised."""
        try:
            for work in works:
                if work is not None:
                    yield work.is_completed
                    work.wait()
        except RuntimeError as error:
            kind = CollectiveTimeoutError if "imed out" in str(error) else PeerError
            raise kind(f"{label}: {error}") from error

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
                yield _Waited([self._messages.send([own], root, self._numbered(True, root))])
                return
            for source, place in enumerate(places):
                if source == root:
                    place.copy_(own)
                else:
                    yield _Waited([self._messages.recv([place], source, self._numbered(False, source))])

        return self._launch("gather", inputs, outputs, steps)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        root, place = opts.rootRank, self._bytes("scatter", outputs[0])
        parts = [self._bytes("scatter", tensor) for tensor in inputs[0]] if inputs else []

        def steps() -> Iterator[Work]:
            if self._rank != root:
                yield _Waited([self._messages.recv([place], root, self._numbered(False, root))])
                return
            for target, part in enumerate(parts):
                if target == root:
                    place.copy_(part)
                else:
                    yield _Waited([self._messages.send([part], target, self._numbered(True, target))])

        return self._launch("scatter", inputs, outputs, steps)

    def send(self, tensors: Tensors, target: int, tag: int) -> Work | None:
        del tag  # messages of two ranks meet in the order in which both ends name them
        return self._message(True, tensors, target)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work | None:
        del tag
        return self._message(False, tensors, source)

    def _message(self, is_sent: bool, tensors: Tensors, peer: int) -> Work | None:
        """A message; none yet in a block of calls, whose messages go together at its end."""
        hosts = [self._bytes("send" if is_sent else "recv", tensor) for tensor in tensors]
        if self._together is not None:
            self._together.append((is_sent, hosts, peer, tensors))
            return None
        return self._exchanged([(is_sent, hosts, peer, tensors)])

    def _exchanged(self, messages: Sequence[tuple[bool, Tensors, int, Tensors]]) -> Work:
        ends = [(is_sent, host, peer) for is_sent, hosts, peer, _ in messages for host in hosts]
        numbered = [(is_sent, host, peer, self._numbered(is_sent, peer)) for is_sent, host, peer in ends]

        def steps() -> Iterator[Work]:
            """All are under way before one is waited for; receives first."""
            works = [self._messages.recv([host], peer, nth) for is_sent, host, peer, nth in numbered if not is_sent]
            works += [self._messages.send([host], peer, nth) for is_sent, host, peer, nth in numbered if is_sent]
            yield _Waited(works)

        verb = "messages" if len(messages) > 1 else ("send" if messages[0][0] else "recv")
        words = ", ".join(f"{'to' if is_sent else 'from'} {peer}" for is_sent, _, peer, _ in messages)
        sent = [each for is_sent, _, _, tensors in messages if is_sent for each in tensors]
        received = [each for is_sent, _, _, tensors in messages if not is_sent for each in tensors]
        return self._launch(f"{verb} {words}", sent, received, steps)

    def _numbered(self, is_sent: bool, peer: int) -> int:
        """How many messages have gone this way before: Gloo's tag."""
        number = self._num_messages[is_sent, peer]
        self._num_messages[is_sent, peer] += 1
        return number

    def barrier(self, opts: Any) -> Work:
        del opts
        token = torch.zeros(1, dtype=torch.uint8)

        def steps() -> Iterator[Work]:
            yield self._gloo.allreduce([token], AllreduceOptions())

        return self._launch("barrier", [], [], steps, work=_BarrierWork)

    # Coalescing

    def _start_coalescing(self) -> None:
        """Until :meth:`_end_coalescing`, messages are collected, to be under way together; collectives are enqueued at once."""
        self._together = []

    def _end_coalescing(self) -> Work:
        """A handle of all calls of the block, which run in order: the end of the last is the end of all."""
        messages, self._together = self._together, None
        if messages:
            return self._exchanged(messages)
        return EnqueuedWork(self._told, "a block of calls", self._stream.record_event(), [], list(self._under_way))


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
