"""The emulated cluster, as its user sees it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from commlayer.emulation.accelerators.device import Accelerator
from commlayer.emulation.accelerators.device_clock import DeviceReport
from commlayer.emulation.accelerators.starting import load_before_fork, read_reports
from commlayer.emulation.collect import RunResult, run_jobs
from commlayer.emulation.fabric import Fabric
from commlayer.emulation.forked_ranks import RankJob
from commlayer.emulation.jobs import ClusterLayout, make_jobs, pick_port
from commlayer.emulation.modes import Mode, checked_count, decide_mode, link_spec
from commlayer.emulation.outcomes import RankOutcome, exit_status, failed_error
from commlayer.emulation.protocol import KEEP, NO_SHAPING, Keep, delay_message, pair_message, shape_message
from commlayer.emulation.rank_process import masked_signals
from commlayer.emulation.rights import rights
from commlayer.profiles.errors import RightsError, UsageError
from commlayer.profiles.printable import warn

__all__ = ["EmulatedCluster"]

T = TypeVar("T")

_MAX_RANKS = 1_024


class EmulatedCluster:
    """Nodes as network namespaces with shaped links, ranks as forked processes; see
    docs/emulation.md.

    Ready when constructed; close it, or use it as a context manager. Everything in it is private to
    it: two clusters do not see each other, and nothing of it outlives this process.

    Attributes:
        accelerator: the device that each rank stands for; None: nothing of computation is emulated.
        scale: how many times slower everything runs than the cluster that it stands for.
        device_reports: what the ranks' accelerators did in the last run, by rank: of those that
            ended by themselves.
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int = 4,
        *,
        inter: str | None = None,
        intra: str | None = None,
        delay_us: float = 0.0,
        mode: Mode = "auto",
        compute: str | None = None,
        memory: str | None = None,
        scale: float = 1.0,
    ) -> None:
        """Build the network.

        Args:
            nodes: number of nodes.
            ranks_per_node: processes on each node.
            inter: rate of each node's network interface, each direction, such as ``400mbit``; None:
                unshaped.
            intra: rate of each node's loopback, which all its ranks share; None: unshaped.
            delay_us: one-way delay between nodes, in µs.
            mode: ``netns`` (namespaces, or an error), ``loopback`` (no namespaces, no shaping), or
                ``auto``: namespaces where the machine grants them, else loopback with a warning.
                COMMLAYER_EMULATION decides for ``auto``.
            compute: how fast the accelerator is that every rank stands for, such as ``4tflops``:
                products and attention last their FLOPs over it, without holding a core. None: ranks
                compute as fast as this machine does.
            memory: how fast that accelerator's memory is, such as ``3.35tbyte`` per second: all
                other operations last their bytes over it. None: they take no time of it.
            scale: by how many times everything is slowed down: the rates above are those of the
                cluster that this one stands for, and wires and accelerators run at a ``scale``-th
                of them, with so many times the delay.

        Raises:
            UsageError: an argument that cannot be.
            RightsError: the machine does not grant what was asked, and the mode forbids to do
            without.
        """
        self._closed = False
        self._owner = os.getpid()
        self._fabric: Fabric | None = None
        self.nodes = checked_count("nodes", nodes)
        self.ranks_per_node = checked_count("ranks_per_node", ranks_per_node)
        if self.world_size > _MAX_RANKS:
            raise UsageError(f"{nodes} x {ranks_per_node} ranks: one machine emulates at most {_MAX_RANKS}")
        self.accelerator = Accelerator.declared(compute, memory, scale)
        self.scale = 1.0 if self.accelerator is None else self.accelerator.scale
        self.device_reports: list[DeviceReport] = []
        spec = link_spec(inter, intra, delay_us, self.scale)
        self.mode: Literal["netns", "loopback"] = decide_mode(mode, spec)
        links = f"inter {inter or 'unshaped'}, intra {intra or 'unshaped'}, delay {delay_us:g} us"
        links += "" if self.scale == 1 else f", {self.scale:g} times slower"
        self._layout = ClusterLayout(nodes, ranks_per_node, self.mode, links, self.accelerator)
        self._line = threading.Lock()
        self._running = threading.Lock()
        self._num_runs = 0
        if self.mode == "netns":
            granted = rights()
            spec = replace(spec, delay_by=granted.delay if spec.delay_us else "none")
            with masked_signals():
                self._fabric = Fabric(nodes, spec, user_namespace=granted.user_namespace)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def shaped(self) -> bool:
        """Whether the links are the emulated ones; False on loopback, where times mean nothing."""
        return self.mode == "netns"

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout_s: float | None = ...,
        grace_s: float = ...,
        check: Literal[True] = ...,
    ) -> list[T]: ...

    @overload
    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = ..., grace_s: float = ..., check: bool
    ) -> list[RankOutcome]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = 120.0,
        grace_s: float = 5.0,
        check: bool = True,
    ) -> list[Any]:
        """Call ``fn(*args)`` in one forked process per rank; neither has to be picklable, what it
        returns has.

        Args:
            fn: called in every rank, with the environment that torchrun would give it.
            timeout_s: after so many seconds all ranks are killed; None: never.
            grace_s: how long the others may go on once a rank has failed, to notice it by
                themselves.
            check: False: return `RankOutcome` objects instead of raising for failed ranks.

        Returns:
            The return values by rank (or the outcomes).

        Raises:
            RanksFailedError: a rank raised, exited or was killed; names every one, with tracebacks.
            RanksTimedOutError: the time was up (also with ``check=False``); names the ranks and
            where they hung.
        """
        with self._reporting() as reports:
            result = self._run(self._jobs(call=partial(fn, *args), reports=reports), timeout_s, grace_s)
        if not check:
            return result.outcomes
        if result.failures:
            raise failed_error(result.outcomes, result.failures)
        return [outcome.value for outcome in result.outcomes]

    def command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        per_node: bool = False,
        grace_s: float = 5.0,
        check: bool = False,
        prefix: bool = False,
    ) -> int:
        """Run a program as every rank, or once per node (for torchrun itself, which finds its PET_
        variables set).

        Args:
            argv: the program and its arguments.
            timeout_s, grace_s: as in `run`.
            per_node: one process per node; RANK, LOCAL_RANK and WORLD_SIZE are left to it.
            check: raise `RanksFailedError` instead of returning a status.
            prefix: begin each line that a rank prints with its name, ``[rank 3]`` (``[node 1]``
                with ``per_node``), and keep the last lines of its stderr for the error. The program
                then writes to a pipe, not to a terminal.

        Returns:
            0, or the exit status of the first process that failed (128 + n if signal n killed it).

        Raises:
            UsageError: there is no such program.
            RanksFailedError, RanksTimedOutError: as in `run`.
        """
        if isinstance(argv, str) or not argv:
            raise UsageError(f"argv: expected a list such as ['python', 'train.py'], got {argv!r}")
        if shutil.which(argv[0]) is None:
            raise UsageError(f"no program {argv[0]!r} on the PATH: give its full path, or 'python' and a script")
        with self._reporting() as reports:
            jobs = self._jobs(argv=argv, per_node=per_node, prefix=prefix, reports=reports)
            try:
                result = self._run(jobs, timeout_s, grace_s)
            finally:
                for job in jobs:
                    if job.output is not None:
                        job.output.close()
        if result.failures and check:
            raise failed_error(result.outcomes, result.failures)
        return exit_status(result.failures)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[str]:
        """A folder for what the ranks' accelerators did, read at the end into ``device_reports``;
        "" where they have none."""
        self.device_reports = []
        if self.accelerator is None:
            yield ""
            return
        load_before_fork()
        with tempfile.TemporaryDirectory(prefix="commlayer-reports-") as folder:
            try:
                yield folder
            finally:
                self.device_reports = read_reports(folder)

    def shape(
        self, *, inter: str | Keep | None = KEEP, intra: str | Keep | None = KEEP, node: int | None = None
    ) -> None:
        """Change rates, also while ranks run (from another thread; a rank itself calls
        `request_shape`).

        Args:
            inter: new rate of the network interface, each direction; None: unshaped; left out: as
                it is.
            intra: the same for the loopback.
            node: the node whose links change; None: all.

        Raises:
            UsageError: not a rate, or no such node.
            RightsError: on loopback there is nothing to shape.
        """
        self._request(shape_message(inter, intra, node))

    def shape_pair(self, sender: int, receiver: int, rate: str | None, *, is_one_way: bool = False) -> None:
        """Change the rate between two nodes, as a bad cable or a shared uplink does: both cards go
        on as before to all others.

        What is sent there counts for the sender's card too. Runs that begin later measure a profile
        of their own: they find the pair in ``COMMLAYER_EMULATED_LINKS``.

        Args:
            sender, receiver: two nodes.
            rate: such as ``100mbit``; None: as fast as their cards.
            is_one_way: from the first to the second one only; else both ways, each at that rate.

        Raises:
            UsageError: not a rate, or no such nodes.
            RightsError: on loopback there is nothing to shape; or the kernel has no classes of
            traffic (sch_htb, cls_u32).
        """
        for a, b in [(sender, receiver)] if is_one_way else [(sender, receiver), (receiver, sender)]:
            self._request(pair_message(a, b, rate))
            self._layout = replace(self._layout, links=f"{self._layout.links}, {a}>{b} {rate or 'unshaped'}")

    def delay(self, delay_us: float) -> None:
        """Change the one-way delay between nodes, also while ranks run, of a cluster that was made
        with one.

        Raises:
            UsageError: not a delay, or the cluster has none.
            RightsError: on loopback there is nothing to delay.
        """
        self._request(delay_message(delay_us))

    def rates(self) -> list[dict[str, str]]:
        """The present rates by node: ``[{"inter": "400mbit", "intra": "unshaped"}, …]``."""
        rates: list[dict[str, str]] = self._request({"op": "rates"})["rates"]
        return rates

    def _request(self, message: dict[str, object]) -> dict[str, Any]:
        self._check_open()
        if self._fabric is None:
            raise RightsError(NO_SHAPING)
        with self._line:
            return self._fabric.request(message)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this emulated cluster is closed: make another")

    def _run(self, jobs: Sequence[RankJob], timeout_s: float | None, grace_s: float) -> RunResult:
        if not self._running.acquire(blocking=False):
            raise UsageError("this emulated cluster is running something already: wait for it, or make another")
        private_fds = [] if self._fabric is None else self._fabric.fds
        try:
            return run_jobs(jobs, timeout_s=timeout_s, grace_s=grace_s, private_fds=private_fds)
        finally:
            if self._fabric is not None:
                self._fabric.kill_strays()
            self._running.release()

    def _jobs(self, **what: Any) -> list[RankJob]:
        self._check_open()
        self._num_runs += 1
        spaces = [None] * self.nodes if self._fabric is None else self._fabric.spaces
        return make_jobs(self._layout, spaces, pick_port(self._layout, self._num_runs), **what)

    def close(self) -> None:
        """Kill what still runs, and give the network and every descriptor back. Harmless when
        repeated."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if self._fabric is not None:
            self._fabric.kill_strays()
            self._fabric.close()

    def __del__(self) -> None:
        if self._fabric is not None and not self._closed and os.getpid() == self._owner:
            warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
            self.close()

    def __enter__(self) -> EmulatedCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EmulatedCluster({self.nodes}x{self.ranks_per_node}, {self.mode})"
