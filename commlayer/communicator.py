"""The Communicator: collectives on process groups that a trainer already has, each moved by the
plan that the profile favours."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any, Literal, Protocol, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has it too, but not for type checkers
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.dlpack import from_dlpack

from commlayer.agree.discovery import Grid, Member, describe_self, form_grid, grid_key, versions
from commlayer.agree.messages import Reason
from commlayer.agree.signature_check import SignatureCheck
from commlayer.agree.signature_words import signature_words
from commlayer.calls.counters import GroupCounters
from commlayer.calls.instruments import inquiries
from commlayer.calls.ring import Call, Track, open_track
from commlayer.device_time import await_device
from commlayer.engine.grid_plans import GridPlans, Works
from commlayer.engine.lane_holds import Issued, lanes
from commlayer.engine.progress import ProgressQueue
from commlayer.engine.runner import Runner
from commlayer.failures.board import FailedStep, Failure, FailureBoard, own_client, why_left
from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.failures.endings import end_with_program
from commlayer.failures.forks import disown_in_child, inherited
from commlayer.failures.waits import keep
from commlayer.profiles.catalog import load_profile
from commlayer.profiles.errors import (
    ClusterError,
    CommlayerError,
    DisagreementError,
    ProfileNotFoundError,
    TensorError,
    UsageError,
)
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile, check_shape
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Decision, Planner, Policy
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline
from commlayer.settings import Settings
from commlayer.transfers import Pending, moved, needs_gradient
from commlayer.transport.c10d import device_type
from commlayer.transport.call_memory import as_bytes, plain
from commlayer.transport.connect import connect, gloo_of_grid, require_device_type

__all__ = ["Communicator", "State"]


class SupportsDLPack(Protocol):
    """An array that can lend its memory: CuPy's, NumPy's, JAX's, …, and torch's own tensors."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class State(Enum):
    OPEN = "open"
    BROKEN = "broken"  # a collective failed: what later calls would send could meet what the failed one left
    CLOSED = "closed"
    INHERITED = "inherited"  # by a forked child: it belongs to the parent


class Communicator:
    """Planned collectives over process groups.

    ``ep_group`` is the group of the all_to_all (expert parallel), ``tp_group`` the group whose
    ranks hold the same tokens (tensor parallel, inside one node), or None where nothing is
    replicated. Making one is collective: all ranks of the grid that the two groups span make it at
    the same time, with the same profile and policy (checked).

    ``profile`` is a Profile, a catalogue name or a path; None takes ``COMMLAYER_PROFILE``.
    ``timeout_s`` bounds every wait.
    ``lane``: the class of traffic; on ``ep`` other groups' gradients yield to it, on a lower one
    calls of CPU tensors are held at their beginning while a higher lane has issued work
    (docs/lanes.md). ``device``: the type of device whose tensors it moves, such as ``cuda``; None:
    that of the ep group's backend, of which ``commlayer``'s is the CPU.

    Raises ProfileNotFoundError without a profile, ProfileMismatchError for one of another cluster
    shape, GroupError where the groups do not form a grid of nodes × holders, UsageError for a lane
    or a device that does not exist, DisagreementError where ranks differ in profile, policy, device
    or version.
    """

    def __init__(
        self,
        ep_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None = None,
        *,
        profile: Profile | str | Path | None = None,
        policy: Policy | None = None,
        timeout_s: float | None = None,
        lane: str = "ep",
        device: str | None = None,
    ) -> None:
        self._level, self.lane = level_of(lane), lane
        self._own_detector: FailureDetector | None = None
        settings, failure = Settings(), None
        try:
            settings = Settings.from_environment()
            if timeout_s is not None and not 0 < timeout_s < math.inf:
                raise UsageError(
                    f"timeout_s: expected a positive, finite number of seconds, or None, got {timeout_s!r}"
                )
            if device is not None:
                require_device_type(device)
            self.profile = _find_profile(profile, settings)
            self._planner = Planner(self.profile, policy)
        except CommlayerError as error:  # the others must hear of it before it is raised, or they wait for this rank
            failure = error
        self._timeout_s = timeout_s if timeout_s is not None and failure is None else settings.timeout_s
        agreed: dict[str, str] = {}
        if failure is None:
            agreed = {
                "profile": f"{self.profile.name} ({self.profile.fingerprint})",
                "policy": str(self._planner.policy),
                "settings": str(replace(settings, profile=None, stats="0", cache=None)),
                **versions(),
                "device": device or "the ep group's",
            }
        reason = None if failure is None else Reason.of(failure)
        members = describe_self(ep_group, tp_group, agreed, self._timeout_s, reason)
        if failure is not None:
            raise failure
        declared = Topology.parse(settings.topology) if settings.topology else None
        self.grid: Grid = form_grid(members, dist.get_rank(), declared)
        self._ranks = tuple(rank for row in self.grid.ranks for rank in row)
        check_shape(self.profile, self.grid.topology)
        self._device_type = device or device_type(ep_group)
        self._is_on_lane = settings.lanes != "off" and self._device_type == "cpu"
        self._bytes_per_s = self.profile.peaks.of(self.grid.link) * 1e9
        self._board = self._watch(members)
        store = _get_default_store()
        self._runner = Runner(connect(self.grid, self._device_type, self._board, store, self._timeout_s))
        self._signatures = self._signature_check(store) if settings.debug == "detail" else None
        who = f"rank {dist.get_rank()}, Communicator of ranks {list(self.grid.ep_ranks)}"
        self._queue = ProgressQueue("commlayer", lambda: who)
        self._calls = 0
        self._failure: BaseException | None = None
        self.state = State.OPEN
        self._track = self._open_track(int(settings.ring) if self._device_type == "cpu" else 0)
        end_with_program(self)
        disown_in_child(self)
        self.plans_run: Counter[str] = Counter()
        counters = GroupCounters(grid_key(members), dist.get_rank(), sorted(member.rank for member in members))
        counters.describe = lambda: f"Communicator on lane {lane}"
        self._plans = GridPlans(self.grid, self._planner, self._runner, counters, self._timeout_s)

    def _open_track(self, size: int) -> Track:
        """Open the track of its calls in the ring of the process; of a device's the host does not
        see the end."""
        board, lane = self._board, self.lane
        board_ref, numbering = weakref.ref(board), board.detector.numbering
        name = f"Communicator on lane {lane}"
        track = open_track(size, board.key, board.key, self._ranks, lambda: name, lambda: lane, numbering)
        track.rank = dist.get_rank()
        track.is_broken = lambda: (watched := board_ref()) is None or watched.is_broken
        return track

    def _signature_check(self, store: Store) -> SignatureCheck:
        """Make the comparison of calls, over a group of all ranks of the grid. Collective."""
        ranks, board = self._ranks, self._board
        with board.connecting(ranks, "signatures", "signatures", self._timeout_s):
            gloo = gloo_of_grid("signatures", ranks, board, store, timedelta(seconds=self._timeout_s))
        own = PrefixStore(f"{board.key}/signatures/", store)
        return SignatureCheck(gloo, own, self.grid.member, ranks, "of a Communicator", board, self._explain)

    def _watch(self, members: Sequence[Member]) -> FailureBoard:
        """Where failures of the grid's ranks are known: by the job's detector, or one of the grid's
        own. Collective."""
        ranks, key = sorted(member.rank for member in members), grid_key(members)
        detector = job_detector(ranks)
        if detector is None:
            store = PrefixStore(f"{key}/detector/", own_client(_get_default_store()))
            detector = self._own_detector = FailureDetector(store, dist.get_rank(), ranks, self._timeout_s)
        board = FailureBoard(detector, key, dist.get_rank(), ranks)
        inquiry = None if self._own_detector is detector else inquiries().inquiry_of(detector)
        if inquiry is not None:  # where a wait lasts too long, all ranks of the job are asked who waits for whom
            board.on_timeout, board.diagnosed = inquiry.timed_out, inquiry.diagnosed
        return board

    @overload
    def all_to_all(
        self, x: SupportsDLPack, *, replicated: bool = ..., async_op: Literal[False] = ..., plan: Plan | None = ...
    ) -> torch.Tensor: ...

    @overload
    def all_to_all(
        self, x: SupportsDLPack, *, replicated: bool = ..., async_op: Literal[True], plan: Plan | None = ...
    ) -> Pending: ...

    def all_to_all(
        self, x: SupportsDLPack, *, replicated: bool = True, async_op: bool = False, plan: Plan | None = None
    ) -> torch.Tensor | Pending:
        """Block k of ``x`` goes to rank k of the ep group; the result holds block by block what the
        ranks sent here.

        ``x`` is [e·n, …]: its first dimension divides by the group size e. Any dtype, any layout;
        its bytes are moved, so the result is bit-equal to
        ``torch.distributed.all_to_all_single(out, x, group=ep_group)``, NaN payloads included.
        ``replicated``: every rank of the tp group holds the same ``x``, and the gradient of the
        result will be the same on them too (as behind Megatron's f/g pair); declare False
        otherwise, and the call is flat. ``async_op`` returns a Pending whose ``wait()`` gives the
        result; do not change ``x`` before. ``plan`` overrides the choice (benchmarks).

        ``x`` is a tensor, or any array with ``__dlpack__`` (CuPy's, NumPy's, …): its memory is read
        where it is, without a copy, and the result is a torch.Tensor on the same device
        (``cupy.from_dlpack`` takes it back).

        Differentiable: the backward pass is the same exchange of the gradient. All ranks of the
        grid call in the same order. Raises TensorError for a size that does not divide or an array
        that lends no memory, PeerError and CollectiveTimeoutError for a broken wait.
        """
        x = _as_tensor(x)
        self._check_tensor(x)
        works: Works | None = [] if async_op else None

        def forth(x: torch.Tensor) -> torch.Tensor:
            left_in = None if works else works  # under way the first time only: gradients of gradients come here again
            return self._exchange(x, replicated, plan, left_in, "all_to_all")

        def back(gradient: torch.Tensor) -> torch.Tensor:
            return self._exchange(gradient, replicated, plan, None, "all_to_all of gradients")

        # An even all_to_all is its own inverse: block k from here to there, block here from there.
        # So is its gradient. Where there is none, autograd's bookkeeping would cost more than a
        # small message.
        output = moved(x, forth, back) if needs_gradient(x) else forth(x)
        return output if works is None else Pending(output, works[0])

    def decide(self, num_bytes: int, *, replicated: bool = True) -> Decision:
        """The decision for a tensor of ``num_bytes`` bytes on each rank: plan, alternatives,
        reason. Talks to nobody."""
        return self._plans.decide(num_bytes, replicated)

    def trace(self, x: torch.Tensor, plan: Plan | None = None) -> Timeline:
        """Run one all_to_all of ``x`` and return its measured timeline, as this rank saw it. CPU
        only, for audits."""
        if self.state is not State.OPEN:
            raise self._unusable()
        self._check_tensor(x)
        if self._device_type != "cpu":
            raise TensorError("trace() watches host waits, which a device's plan has none of: use torch.profiler there")
        chosen = plan or self.decide(x.numel() * x.element_size()).plan
        source = as_bytes(x)
        self._plans.require(chosen, source.numel(), replicated=True)
        timelines: list[Timeline] = []

        def run() -> None:
            timelines.append(self._plans.trace(chosen, source))

        call = self._note(chosen, x, source, is_async=False)
        self._queue.run("trace", self._in_turn, (call, run))
        return timelines[0]

    @property
    def policy(self) -> Policy:
        """The policy: what the chooser may do."""
        return self._planner.policy

    def close(self) -> None:
        """Finish what is queued and let go of threads and connections. Collective; closing twice is
        allowed.

        Raises ClusterError where a rank does not come to close its own.
        """
        if self.state in (State.CLOSED, State.INHERITED):
            return
        self._queue.drain()
        was_open, self.state = self.state is State.OPEN, State.CLOSED
        try:
            if was_open and dist.is_initialized():
                self._runner.transport.close()
        finally:
            self._track.close()
            self._board.close()
            if self._signatures is not None and self._board.has_abandoned:
                keep(self._signatures.gloo)
            if self._own_detector is not None:
                self._own_detector.close("it closed its Communicator")

    def end(self, patience_s: float) -> None:
        """At the program's end, where nobody closed this: see
        :class:`commlayer.failures.endings.Ends`."""
        has_ended = self._queue.drain(patience_s) and (patience_s > 0 or not self._queue.is_running)
        if not has_ended:
            with contextlib.suppress(Exception):  # the program is over: nobody is left to be told
                self._runner.transport.abort("ended its program while a call was under way")

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`."""
        self._queue.disown()
        self.state = State.INHERITED

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.state is State.OPEN:
            self._break(error)  # the others are told now: closing would wait for them, and they for this rank
        self.close()

    def _exchange(
        self, x: torch.Tensor, replicated: bool, plan: Plan | None, works: Works | None, what: str
    ) -> torch.Tensor:
        """Exchange the blocks of ``x``. ``works``: where an asynchronous call leaves its work;
        None: return when it has ended.
        ``what``: the call in words, for signatures."""
        if self.state is not State.OPEN:
            raise self._unusable()
        await_device()
        x = plain(x)
        output = torch.empty_like(x)
        source, target = as_bytes(x), as_bytes(output)
        if plan is None:
            plan = self._plans.plan(source.numel(), replicated)
        else:
            self._plans.require(plan, source.numel(), replicated)
        call = self._note(plan, x, source, is_async=works is not None)
        if self._signatures is not None:
            words = signature_words(what, x, source.numel(), sizes=tuple(x.shape), plan=plan)
            try:
                self._signatures.compare(call.sequence, words, self._timeout_s)
                if replicated:
                    self._signatures.compare_replicas(call.sequence, words, self.grid.rows, source, self._timeout_s)
            except DisagreementError:  # on all ranks, and nothing was moved
                self._track.take_back(call)
                raise
            except ClusterError as error:  # a rank is gone, or does not come
                self._break(error)
                raise
        self.plans_run[plan.name] += 1
        if works is None or self._device_type == "cpu":
            self._issue(call, works, plan, source, target)
        else:  # there issuing is enqueueing on streams, so it is asynchronous as it is
            self._queue.run("all_to_all", self._in_turn, (call, self._plans.launch, plan, source, target, works))
        return output

    def _note(self, plan: Plan, x: torch.Tensor, source: torch.Tensor, *, is_async: bool) -> Call:
        """Note a call in the ring."""
        self._calls += 1
        num_bytes = source.numel()
        call = self._track.note("all_to_all", x.dtype, num_bytes, num_bytes, None, is_async)
        call.sequence, call.plan, call.logical_bytes = self._calls, plan, num_bytes
        return call

    def _issue(self, call: Call, works: Works | None, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run a call in its turn: now, or on the queue's thread; on a lane it is issued from now
        on."""
        run: Callable[..., object] = self._in_turn
        args: tuple[Any, ...] = (call, self._plans.run, plan, source, target)
        issued: Issued | None = None
        if self._is_on_lane:
            expected_s = source.numel() / self._bytes_per_s
            issued = lanes().enter(self._level, expected_s, crosses=self.grid.link is Resource.INTER)
            run, args = self._held, (issued, *args)
        try:
            if works is None:
                self._queue.run("all_to_all", run, args)
            else:
                work = self._queue.submit("all_to_all", None, run, args)
                work.call = call
                works.append(work)
        except BaseException:
            if issued is not None:  # perhaps not queued, and so never run
                lanes().leave(issued)
            raise

    def _held(self, issued: Issued, call: Call, task: Callable[..., object], *args: object) -> None:
        try:
            lanes().hold_whole(self._level, call.logical_bytes, self._bytes_per_s, crosses=issued.crosses)
            self._in_turn(call, task, *args)
        finally:
            lanes().leave(issued)

    def _in_turn(self, call: Call, task: Callable[..., object], *args: object) -> None:
        """Run ``task(*args)``, which is ``call``; after a failure this Communicator is broken and
        the others know."""
        if self.state is not State.OPEN:  # an earlier call of the queue may have failed meanwhile
            raise self._unusable()
        call.started_ns = now()
        try:
            task(*args)
            self._track.done = call.number
        except BaseException as error:
            call.error = type(error).__name__
            self._break(error)
            raise
        finally:
            call.ended_ns = now()

    def _explain(
        self, error: RuntimeError, collective: str, sequence: int, waited_s: float, timeout_s: float
    ) -> ClusterError:
        """The error to raise where ranks could not compare their calls. Tells the other ranks, and
        wakes them."""
        others = tuple(rank for rank in self._ranks if rank != self._board.rank)
        wait = FailedStep(self._board.rank, others, "of a Communicator", collective, "flat", collective, 0, sequence)
        return self._board.blame(wait, Failure(error, waited_s, timeout_s), self._runner.transport.abort)

    def _break(self, error: BaseException) -> None:
        """This rank cannot go on: wake the others, and say why where they cannot know."""
        if isinstance(error, UsageError):
            return  # found before a byte moved, and on all ranks alike
        self._failure = error
        self.state = State.BROKEN
        is_known = isinstance(error, ClusterError)
        self._runner.transport.abort(None if is_known else why_left(error))

    def _unusable(self) -> ClusterError:
        if self.state is State.CLOSED:
            return ClusterError("this Communicator is closed: make a new one on all ranks")
        if self.state is State.INHERITED:
            return ClusterError(inherited("a Communicator was called"))
        error = ClusterError(f"this Communicator is broken by an earlier failure ({self._failure}): restart the job")
        error.__cause__ = self._failure
        return error

    def _check_tensor(self, x: torch.Tensor) -> None:
        size = len(self.grid.ep_ranks)
        if x.dim() == 0 or x.shape[0] % size:
            raise TensorError(
                f"rank {dist.get_rank()}: all_to_all over the ep group of {size} ranks needs a first dimension that "
                f"{size} divides, got shape {list(x.shape)}: pad the tokens to a multiple of {size}"
            )
        if x.device.type != self._device_type:
            raise TensorError(
                f"rank {dist.get_rank()}: this Communicator moves {self._device_type} tensors, got one on {x.device}: move it "
                f"there, or make one with device={x.device.type!r}"
            )


def _as_tensor(x: SupportsDLPack) -> torch.Tensor:
    """``x``, or a tensor in the memory of an array. Raises TensorError for what lends none."""
    if isinstance(x, torch.Tensor):
        return x
    try:
        return from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TensorError(
            f"rank {dist.get_rank()}: expected a tensor, or an array that lends its memory by __dlpack__, got a "
            f"{type(x).__name__} that does not: {error}"
        ) from error


def _find_profile(profile: Profile | str | Path | None, settings: Settings) -> Profile:
    if isinstance(profile, Profile):
        return profile
    name = profile or settings.profile
    if name in (None, "auto", "none"):  # those two are for the backend, which can do without a profile
        asked = (
            f"profile {name!r} is for the backend, which measures by itself or plans nothing" if name else "no profile"
        )
        raise ProfileNotFoundError(
            f"{asked}: measure this cluster with `torchrun … commlayer measure -o cluster.json` and pass "
            "profile='cluster.json' (or set COMMLAYER_PROFILE); shipped ones are listed by `commlayer profiles list`"
        )
    return load_profile(str(name))
