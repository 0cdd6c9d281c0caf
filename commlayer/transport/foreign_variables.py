"""The environment variables of torch, Gloo, NCCL and CUDA that change what commlayer stands on, and what it decided about each.

None of them is inherited by accident: one that is *used* has its effect, one that is *overridden* has none on groups of
commlayer, and one that is *refused* makes the first group fail with an error that says what to do. ``docs/launching.md`` has the
same table, and tests compare it with this one, and this one with the variables that the installed torch reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from commlayer.profiles.errors import SettingsError

__all__ = ["OFF", "VARIABLES", "Choice", "Variable", "Verdict", "refuse_variables", "variable_findings"]

Verdict = Literal["ok", "warn", "bad"]
"""The verdict on what was found: fine, works but, does not work."""
Choice = Literal["used", "overridden", "refused"]

_ON = ("1", "true", "yes", "y", "t", "on")
OFF = ("0", "false", "no", "n", "f", "off")


class Variable(NamedTuple):
    """A variable, and what it does to a job on commlayer.

    ``when``: the values, in small letters, that ``doctor`` warns of, and that are refused where ``choice`` says so; None for any
    value. ``otherwise``: what holds at those values, where that is not ``does``. ``but``: the values that are not refused,
    where all others are.
    """

    does: str
    when: tuple[str, ...] | None = ()
    otherwise: str = ""
    choice: Choice = "used"
    but: tuple[str, ...] = ()

    def is_notable(self, value: str) -> bool:
        """Whether ``value`` is one that ``doctor`` warns of, or that is refused."""
        setting = value.strip().lower()
        return setting not in self.but if self.but else self.when is None or setting in self.when


VARIABLES: dict[str, Variable] = {
    # Gloo: all that CPU tensors travel on.
    "GLOO_SOCKET_IFNAME": Variable("the interfaces of Gloo, and the address that other ranks are told"),
    "GLOO_DEVICE_TRANSPORT": Variable(
        "Gloo's transport: only TCP, which is the default. Broken waits are ended on TCP only, and shared memory and the failure "
        "detector would not be encrypted by TCP_TLS",
        choice="refused",
        but=("", "tcp"),
    ),
    "GLOO_DISABLE_CONNECTION_RETRIES": Variable(
        "Gloo does not try again to connect: a busy machine may fail to make a group"
    ),
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": Variable("how Gloo numbers the addresses of a rank: of no consequence here"),
    "GLOO_ENABLE_STORE_V2_API": Variable(
        "how Gloo asks a store for addresses: of no consequence here, where a store of one's own has only the older way"
    ),
    "GLOO_LOG_LEVEL": Variable("what Gloo prints"),
    "TORCH_GLOO_LAZY_INIT": Variable(
        "Gloo would connect at the first message, which then waits beyond every timeout: groups of commlayer connect when they "
        "are made",
        _ON,
        choice="overridden",
    ),
    # torch.distributed itself.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": Variable(
        "torch does not look for backends: the program has to import commlayer.backend", ("0",)
    ),
    "TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK": Variable("which rank torch.compile works on: of no consequence here"),
    "TORCH_DISTRIBUTED_DEBUG": Variable(
        "DETAIL: calls are compared across ranks, as COMMLAYER_DEBUG=detail does", ("detail",)
    ),
    "TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P": Variable(
        "torch's pipeline schedules make a group of two ranks for each edge (torch 2.15); nothing here has been tried with it",
        _ON,
    ),
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS": Variable(
        "torch makes every group by torchcomms, where that is installed, and asks no backend of this name: unset it",
        _ON,
    ),
    "TORCH_DIST_INIT_BARRIER": Variable(
        "1: torch waits for all ranks in the job's store when a group has been made", ("1",)
    ),
    "TORCH_DIST_NAN_CHECK": Variable(
        "torch would look for NaN in what each call sends (torch 2.15): its hook is C++'s, which sees no call of this backend",
        _ON,
        choice="overridden",
    ),
    "TORCH_DIST_USE_NCCL2": Variable(
        "which of torch's groups the name nccl stands for (torch 2.14 and later): inner groups of NCCL are ProcessGroupNCCL",
        _ON,
        choice="overridden",
    ),
    "TORCHELASTIC_USE_AGENT_STORE": Variable(
        "True: torchrun hosts the job's store, not rank 0, which errors about it say"
    ),
    "USE_LIBUV": Variable("how torch's store is served: of no consequence here"),
    "TORCH_CPP_LOG_LEVEL": Variable("what torch's C++ prints"),
    "OMP_NUM_THREADS": Variable("threads of each rank's CPU copies; torchrun sets 1"),
    # Groups of NCCL: torch's own switches.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Variable("a rank that dies leaves the others hanging", OFF),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Variable("torch keeps tensors alive until the wait, without recording streams"),
    "TORCH_NCCL_BCAST_UNIQUEID": Variable("how ranks of NCCL find each other: of no consequence here"),
    "TORCH_NCCL_BLOCKING_WAIT": Variable("wait() blocks the host: stages that are posted after it do not overlap", _ON),
    "TORCH_NCCL_COORD_CHECK_MILSEC": Variable("how often NCCL's watchdog looks for the timeouts of other ranks"),
    "TORCH_NCCL_CUDA_EVENT_CACHE": Variable("torch uses CUDA events of NCCL's calls again"),
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": Variable(
        "a pipe: who writes into it has torch's flight recorder write its calls of NCCL; commlayer answers SIGUSR1"
    ),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": Variable(
        "where torch's flight recorder writes; commlayer's ring is written elsewhere"
    ),
    "TORCH_NCCL_DESYNC_DEBUG": Variable("torch says which ranks of an NCCL group have come how far, at its timeout"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": Variable("torch's flight recorder writes at a timeout of NCCL's"),
    "TORCH_NCCL_ENABLE_MONITORING": Variable("torch ends the process when NCCL's watchdog is stuck", OFF),
    "TORCH_NCCL_ENABLE_TIMING": Variable("torch times NCCL's calls by events, which costs each some microseconds"),
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": Variable("torch's flight recorder writes when NCCL's watchdog fails"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Variable("how long NCCL's watchdog may be stuck before torch ends the process"),
    "TORCH_NCCL_HIGH_PRIORITY": Variable("all NCCL streams are of high priority: no lane is above another", _ON),
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": Variable("what torch prints when a process ends with NCCL groups"),
    "TORCH_NCCL_NAN_CHECK": Variable(
        "torch looks for NaN in the tensors of NCCL's own calls; planned ones are not looked at", _ON
    ),
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": Variable(
        "the seconds that NCCL may take to connect where TORCH_NCCL_USE_COMM_NONBLOCKING is 1"
    ),
    "TORCH_NCCL_PROPAGATE_ERROR": Variable(
        "ranks tell each other of errors of NCCL's; commlayer's detector does so anyway"
    ),
    "TORCH_NCCL_RANKS_PER_ROOT": Variable("how many ranks find each other by one root of NCCL's"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": Variable("torch raises CUDA errors of NCCL's watchdog", OFF),
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": Variable("what torch warns of"),
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": Variable(
        "torch ends the process at a timeout of NCCL's, also where TORCH_NCCL_RETHROW_CUDA_ERRORS is 0 (torch 2.15)"
    ),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Variable("the older name of TORCH_FR_BUFFER_SIZE"),
    "TORCH_NCCL_TRACE_CPP_STACK": Variable("the older name of TORCH_FR_CPP_STACK"),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": Variable(
        "NCCL connects without blocking; nothing here has been tried with it", _ON
    ),
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": Variable("torch registers the memory of CUDA tensors with NCCL"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": Variable(
        "how long torch waits for its flight recorder before it ends the process"
    ),
    "TORCH_FR_BUFFER_SIZE": Variable(
        "how many calls of NCCL torch's flight recorder keeps; commlayer's is COMMLAYER_RING"
    ),
    "TORCH_FR_CPP_STACK": Variable("torch's flight recorder keeps stacks of C++"),
    "TORCH_FR_DUMP_ON_TIMEOUT": Variable("the newer name of TORCH_NCCL_DUMP_ON_TIMEOUT"),
    "TORCH_FR_DUMP_DYNAMIC_FILE_NAME": Variable("how torch's flight recorder names its files"),
    "TORCH_FR_DUMP_TEMP_FILE": Variable("where torch's flight recorder writes; commlayer's ring is written elsewhere"),
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": Variable("the newer name of TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"),
    "NCCL_ASYNC_ERROR_HANDLING": Variable("the older name of TORCH_NCCL_ASYNC_ERROR_HANDLING", OFF),
    "NCCL_BLOCKING_WAIT": Variable("the older name of TORCH_NCCL_BLOCKING_WAIT", _ON),
    "NCCL_DESYNC_DEBUG": Variable("the older name of TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": Variable("the older name of TORCH_NCCL_ENABLE_TIMING"),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": Variable(
        "the older name of TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    ),
    # NCCL and CUDA: what changes times, or what runs beside what.
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "1 serialises the launches of all streams and undoes the overlap of our stages: unset it, or set 8 or more",
        ("1",),
    ),
    "CUDA_LAUNCH_BLOCKING": Variable("every launch waits for its kernel: nothing overlaps. Only for debugging", _ON),
    "CUDA_VISIBLE_DEVICES": Variable("the GPUs that torch sees"),
    "NCCL_LAUNCH_ORDER_IMPLICIT": Variable(
        "several communicators of one device are launched in the program's order (NCCL 2.26 and later)",
        OFF,
        "several communicators of one device must be issued in one order on all ranks by the program itself",
    ),
    "NCCL_PXN_DISABLE": Variable(
        "NCCL no longer gathers messages of a node on one rail: flat is slower than it need be, and our gain over it "
        "flatters. Measure with PXN on too",
        _ON,
    ),
    "NCCL_MULTI_RANK_GPU_ENABLE": Variable("ranks share a GPU: for correctness only, times are time-slicing", _ON),
    "NCCL_HOSTID": Variable("ranks pose as nodes of their own: times are not those of a network", None),
    "NCCL_P2P_DISABLE": Variable(
        "no direct GPU to GPU transfers inside a node: the intra stage goes through host memory", _ON
    ),
    "NCCL_SHM_DISABLE": Variable("no shared memory inside a node: the intra stage may go over the network", _ON),
    "NCCL_IB_DISABLE": Variable("InfiniBand is off: nodes talk over sockets", _ON),
    "NCCL_ALGO": Variable("fixes NCCL's algorithms: a profile holds only for runs with the same value", None),
    "NCCL_PROTO": Variable("fixes NCCL's protocols: a profile holds only for runs with the same value", None),
    "NCCL_MAX_CTAS": Variable(
        "limits the blocks of NCCL kernels: a profile holds only for runs with the same value", None
    ),
    "NCCL_MIN_CTAS": Variable(
        "sets the blocks of NCCL kernels: a profile holds only for runs with the same value", None
    ),
    "NCCL_CTA_POLICY": Variable(
        "sets how NCCL chooses its blocks: a profile holds only for runs with the same value", None
    ),
    "NCCL_IB_TC": Variable("the InfiniBand traffic class of NCCL's communicators that do not set one"),
    "NCCL_IB_SL": Variable("the InfiniBand service level of NCCL's communicators"),
    "NCCL_SOCKET_IFNAME": Variable("the interfaces that NCCL uses for sockets"),
}
_FAMILIES = ("TORCH_NCCL_", "TORCH_GLOO_", "GLOO_")


def refuse_variables(environment: Mapping[str, str]) -> None:
    """Raises SettingsError for a variable that is set to what commlayer cannot run with."""
    for name, variable in VARIABLES.items():
        value = environment.get(name)
        if value is not None and variable.choice == "refused" and variable.is_notable(value):
            wanted = " or ".join(each.upper() for each in variable.but if each)
            raise SettingsError(f"{name} must be {wanted}, or unset, got {value!r}: {variable.does}")


def variable_findings(environment: Mapping[str, str]) -> list[tuple[Verdict, str, str, str]]:
    """List (mark, name, value, effect) of each variable that is set; one line saying so where none is."""
    findings: list[tuple[Verdict, str, str, str]] = []
    for name, value in sorted(environment.items()):
        variable = VARIABLES.get(name)
        if variable is None:
            if name.startswith(_FAMILIES):
                findings.append(("ok", name, value, "read by torch; no bearing on plans is known"))
            continue
        if variable.is_notable(value):
            mark: Verdict = "bad" if variable.choice == "refused" else "warn"
            words = variable.otherwise or variable.does
            findings.append((mark, name, value, words if variable.choice == "used" else f"{variable.choice}: {words}"))
        else:
            is_told = variable.choice == "used" and (not variable.when or variable.otherwise)
            findings.append(("ok", name, value, variable.does if is_told else "as by default"))
    return findings or [("ok", "none set", f"of {len(VARIABLES)} that matter", "")]
