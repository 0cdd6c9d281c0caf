"""Environment variables that change what torch, NCCL and CUDA do with our plans, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["OFF", "Effect", "Verdict", "variable_findings"]

Verdict = Literal["ok", "warn", "bad"]
"""The verdict on what was found: fine, works but, does not work."""


class Effect(NamedTuple):
    """The effect of a variable: ``when`` are the values for which it is worth a warning, None for any value."""

    does: str
    when: tuple[str, ...] | None = ()
    otherwise: str = ""


_ON = ("1", "true", "yes", "y", "t", "on")
OFF = ("0", "false", "no", "n", "f", "off")

_EFFECTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": Effect(
        "serialises the launches of all streams and undoes the overlap of our stages: unset it, or set 8 or more",
        ("1",),
    ),
    "CUDA_LAUNCH_BLOCKING": Effect("every launch waits for its kernel: nothing overlaps. Only for debugging", _ON),
    "CUDA_VISIBLE_DEVICES": Effect("the GPUs that torch sees"),
    "NCCL_LAUNCH_ORDER_IMPLICIT": Effect(
        "several communicators of one device are launched in the program's order (NCCL 2.26 and later)",
        OFF,
        "several communicators of one device must be issued in one order on all ranks by the program itself",
    ),
    "NCCL_PXN_DISABLE": Effect(
        "NCCL no longer gathers messages of a node on one rail: flat is slower than it need be, and our gain over it "
        "flatters. Measure with PXN on too",
        _ON,
    ),
    "NCCL_MULTI_RANK_GPU_ENABLE": Effect("ranks share a GPU: for correctness only, times are time-slicing", _ON),
    "NCCL_HOSTID": Effect("ranks pose as nodes of their own: times are not those of a network", None),
    "NCCL_P2P_DISABLE": Effect(
        "no direct GPU to GPU transfers inside a node: the intra stage goes through host memory", _ON
    ),
    "NCCL_SHM_DISABLE": Effect("no shared memory inside a node: the intra stage may go over the network", _ON),
    "NCCL_IB_DISABLE": Effect("InfiniBand is off: nodes talk over sockets", _ON),
    "NCCL_ALGO": Effect("fixes NCCL's algorithms: a profile holds only for runs with the same value", None),
    "NCCL_PROTO": Effect("fixes NCCL's protocols: a profile holds only for runs with the same value", None),
    "NCCL_MAX_CTAS": Effect(
        "limits the blocks of NCCL kernels: a profile holds only for runs with the same value", None
    ),
    "NCCL_MIN_CTAS": Effect("sets the blocks of NCCL kernels: a profile holds only for runs with the same value", None),
    "NCCL_CTA_POLICY": Effect(
        "sets how NCCL chooses its blocks: a profile holds only for runs with the same value", None
    ),
    "NCCL_IB_TC": Effect("the InfiniBand traffic class of NCCL's communicators that do not set one"),
    "NCCL_IB_SL": Effect("the InfiniBand service level of NCCL's communicators"),
    "NCCL_SOCKET_IFNAME": Effect("the interfaces that NCCL uses for sockets"),
    "GLOO_SOCKET_IFNAME": Effect("the interface that Gloo uses"),
    "OMP_NUM_THREADS": Effect("threads of each rank's CPU copies; torchrun sets 1"),
    "TORCH_NCCL_BLOCKING_WAIT": Effect("wait() blocks the host: stages that are posted after it do not overlap", _ON),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Effect("a rank that dies leaves the others hanging", OFF),
    "TORCH_NCCL_HIGH_PRIORITY": Effect("all NCCL streams are of high priority: no lane is above another", _ON),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Effect("torch keeps tensors alive until the wait, without recording streams"),
}
_FAMILY = "TORCH_NCCL_"


def variable_findings(environment: Mapping[str, str]) -> list[tuple[Verdict, str, str, str]]:
    """List (mark, name, value, effect) of each variable that is set; one line saying so where none is."""
    found: list[tuple[Verdict, str, str, str]] = []
    for name, value in sorted(environment.items()):
        effect = _EFFECTS.get(name)
        if effect is None:
            if name.startswith(_FAMILY):
                found.append(("ok", name, value, "read by torch; no bearing on plans is known"))
            continue
        is_bad = effect.when is None or value.strip().lower() in effect.when
        words = (
            (effect.otherwise or effect.does) if is_bad else effect.does if not effect.when or effect.otherwise else ""
        )
        found.append(("warn" if is_bad else "ok", name, value, words or "as by default"))
    return found or [("ok", "none set", f"of {len(_EFFECTS)} that matter", "")]
