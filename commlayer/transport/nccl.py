"""The inner NCCL group for CUDA tensors.

Written from torch's source; tests/gpu runs it on a machine with CUDA, which CI is not. No test
shows what it must get right where torch splits NCCL communicators: with
``init_process_group(device_id=…)`` ranks outside a new group take part in the split, so members
must split too, not connect anew.

What a lane means to NCCL: torch gives a group one bit of stream priority, so that there are two
levels; a traffic class, which is what a fabric's switches act on; and a limit of the thread blocks
(CTAs) that a kernel of a lower lane may keep while a higher one wants to start, because a kernel
that runs is not pre-empted. Chunk edges do the rest (:mod:`commlayer.scheduler.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, Work
from torch.distributed import distributed_c10d as c10d

from commlayer.calls.group_life import INNER_NAME
from commlayer.devices.device_contract import Addressed, Received
from commlayer.failures.waits import within
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.lanes import LANES, level_of
from commlayer.transport.c10d import start_sequence, verb_of

__all__ = [
    "CONFIG_SINCE",
    "LOWER_LANE_CTAS",
    "Inner",
    "InnerMessenger",
    "Nccl",
    "apply_lane",
    "config_fields",
    "connect_now",
    "is_high_priority",
    "like_options",
    "make_nccl",
    "nccl_lane_options",
    "use_lane",
]

CONFIG_SINCE = {"max_ctas": (2, 17), "traffic_class": (2, 26)}
"""The NCCL that first has each field of ncclConfig_t, by the name that torch gives it.

From src/nccl.h.in of NCCL's tags: maxCTAs is in 2.17.1, trafficClass in 2.26.2 and not in 2.25.1.
torch has ``traffic_class`` where it was built with 2.26 or later (NCCL_HAS_QOS in its
NCCLUtils.hpp; torch 2.13 wants at least 2.23). In NCCL's documentation NCCL_IB_TC, NCCL_IB_SL and
NCCL_MAX_CTAS go before these fields.
"""
LOWER_LANE_CTAS = 16
"""Half of NCCL's own limit of 32. Not measured. Rejected: the policies of CTAs (2.27 and later), of
which the thrifty one asks for registered buffers and the other for copy engines, and ``min_ctas``,
which would keep more from computation, not less."""
_UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT, a field that nobody has set."""
_HIGH_LEVELS = 2
_LOOK_S = 0.002


class Inner(Protocol):
    """An inner backend, whose verbs torch's annotations lack."""

    def __getattr__(self, verb: str) -> Callable[..., Work]: ...


@dataclass(frozen=True)
class Nccl:
    """The inner group of a group. ``options``: of the group, where they are ours to change; None
    where the user gave some."""

    backend: Inner
    options: Any = None
    verbs: Any = None
    """The verbs of c10d by all their names, of which a backend by itself has some; None:
    ``backend`` has all."""

    def own(self, name: str, *args: Any) -> Work:
        """Call the verb ``name``: the backend's, or where that has not the name, that of the process
        group around it."""
        verb = getattr(self.backend, name, None)
        work: Work = (verb_of(self.verbs or self.backend, name) if verb is None else verb)(*args)
        return work

    def under_way_after(self, patience_s: float) -> str:
        """Wait so long for the calls that it was given; what has not run by then in words, empty:
        all have.

        NCCL's are waited for on a thread, which ends when they do, or when the communicator is
        broken off.
        """
        if self.verbs is None:  # a registered device's, which can be asked
            until, asked = monotonic() + patience_s, self.backend.under_way
            while (words := asked()) and monotonic() < until:
                sleep(_LOOK_S)
            return str(words)
        try:
            within(patience_s, self.verbs._wait_for_pending_works)
        except TimeoutError:
            return "calls of NCCL's own"
        return ""


def is_high_priority(lane: str) -> bool:
    """Whether a lane's kernels run on streams of high priority: ep, tp and pp do, cp and dp and
    what has no lane do not.

    Raises UsageError for a lane that does not exist.
    """
    return bool(lane) and level_of(lane) < _HIGH_LEVELS


def nccl_lane_options(
    lane: str, nccl_version: Sequence[int], *, traffic_classes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """List what a group of ``lane`` sets, with an NCCL of ``nccl_version``, such as (2, 28, 9):
    names and values.

    ``is_high_priority_stream`` (0 or 1) is a field of torch's options, ``max_ctas`` and
    ``traffic_class`` are of their ``config``. ``traffic_classes``: a class for each lane that has
    one, at least 0; what a number means is the operator's of the fabric to say (a service level on
    InfiniBand, a type of service on RoCE), so without this nothing is set. Empty for no lane.

    Raises UsageError for a lane that does not exist, here or in ``traffic_classes``, and for a
    class below 0.
    """
    classes = dict(traffic_classes or {})
    for name, number in classes.items():
        if name not in LANES or not isinstance(number, int) or number < 0:
            raise UsageError(
                f"traffic_classes: expected lanes ({', '.join(LANES)}) with numbers of at least 0, got {name!r}: {number!r}"
            )
    if not lane:
        return {}
    wanted: dict[str, int] = {"is_high_priority_stream": int(is_high_priority(lane))}
    if not is_high_priority(lane):
        wanted["max_ctas"] = LOWER_LANE_CTAS
    if lane in classes:
        wanted["traffic_class"] = classes[lane]
    return {name: value for name, value in wanted.items() if tuple(nccl_version) >= CONFIG_SINCE.get(name, ())}


def config_fields() -> frozenset[str]:
    """The fields of NCCL's configuration that this torch can set; empty where it was built without
    NCCL."""
    if not dist.is_nccl_available():
        return frozenset()
    config = dist.ProcessGroupNCCL.Options().config
    return frozenset(name for name in dir(config) if not name.startswith("_"))


def apply_lane(
    options: Any, lane: str, nccl_version: Sequence[int], *, traffic_classes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Write :func:`nccl_lane_options` into ``options`` (torch's, of NCCL), and return what was
    written.

    What torch's ``config`` lacks is left out; what an earlier lane has set is unset.
    """
    wanted = nccl_lane_options(lane, nccl_version, traffic_classes=traffic_classes)
    options.is_high_priority_stream = bool(wanted.get("is_high_priority_stream", 0))
    for name in CONFIG_SINCE:
        if hasattr(options.config, name):
            setattr(options.config, name, wanted.get(name, _UNDEFINED))
        else:
            wanted.pop(name, None)
    return wanted


def use_lane(nccl: Nccl, lane: str, *, traffic_classes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Give a group that was made without a lane its lane, before its first call: NCCL connects
    then, and reads the options then.

    Returns what was set: nothing where the user gave options, who knows better. Without effect on a
    group that is connected, as one is from the start with ``init_process_group(device_id=…)``. The
    same on all ranks.
    """
    if nccl.options is None:
        return {}
    return apply_lane(nccl.options, lane, torch.cuda.nccl.version(), traffic_classes=traffic_classes)


def make_nccl(
    store: Store,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta,
    name: str,
    options: Any,
    *,
    is_default: bool,
    is_split: bool = True,
    lane: str = "",
    traffic_classes: Mapping[str, int] | None = None,
) -> Nccl:
    """The inner group, as torch itself makes one for the backend nccl. It connects at its first
    call.

    ``is_split`` False: by a communicator of its own, in whose making ranks outside the group have
    no part.

    ``options``: the user's, which no lane changes; anything else means none. ``lane`` and
    ``traffic_classes``: see :func:`nccl_lane_options`, which says what is raised too.
    """
    is_given = isinstance(options, dist.ProcessGroupNCCL.Options)
    if not is_given:
        options = dist.ProcessGroupNCCL.Options()
        if lane:
            apply_lane(options, lane, torch.cuda.nccl.version(), traffic_classes=traffic_classes)
    options._timeout = timeout
    source = None
    if is_split and not is_default:
        default = c10d._get_default_group()
        source = c10d._get_split_source(default) if default.bound_device_id else None
    if source is not None:
        options.split_from = source
        options.split_color = c10d._process_group_color(list(global_ranks))
    options.global_ranks_in_group = [] if is_default else list(global_ranks)
    options.group_name = name
    backend = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, len(global_ranks), options)
    made: Any = backend
    start_sequence(made)
    # A backend lacks the verbs of one tensor (``all_gather_single``) and coalesced ones.
    process_group: Any = dist.ProcessGroup  # its annotations lack this form
    around = process_group(rank, len(global_ranks))
    around._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, made)
    around._set_group_desc(INNER_NAME)
    return Nccl(made, None if is_given else options, around)


def like_options(options: Any) -> Any:
    """Options as the user's of a group, for another communicator of its members; None where the
    user gave none."""
    if not dist.is_nccl_available() or not isinstance(options, dist.ProcessGroupNCCL.Options):
        return None
    made = dist.ProcessGroupNCCL.Options()
    made.is_high_priority_stream, made.config = options.is_high_priority_stream, options.config
    return made


def connect_now(nccl: Nccl, device: torch.device) -> None:
    """Connect on ``device``, with all members: at its first message, for which not all of them
    come, a member would wait for the others for ever, and ranks that use two communicators in
    another order for each other."""
    backend: Any = nccl.backend
    with torch.cuda.device(device):  # of this thread
        backend.eager_connect_single_device(device)


class InnerMessenger:
    """A communicator of an inner backend (``dist.ProcessGroupNCCL``), whose works make streams
    wait, not the host.

    ``close`` ends it where that is not its own ``shutdown``.

    Its messages are posted without a process group around it: torch's batched messages need a
    registered one, which all ranks of the job would have to make in the same order.
    """

    def __init__(self, inner: Nccl, close: Callable[[], object] | None = None) -> None:
        self.backend: Any = inner.backend
        self._close: Callable[[], object] = close or self.backend.shutdown
        self._verbs: Any = inner.verbs or inner.backend

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Received:
        backend = self.backend
        backend._start_coalescing()
        for member, tensor in receives:
            backend.recv([tensor], member, 0)
        for member, tensor in sends:
            backend.send([tensor], member, 0)
        return backend._end_coalescing()  # type: ignore[no-any-return]

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Received:
        return verb_of(self._verbs, "all_gather_single")(whole, mine, AllgatherOptions())  # type: ignore[no-any-return]

    def abort(self) -> None:
        self.backend.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self.backend._set_default_timeout(timeout)

    def close(self) -> None:
        self._close()
