"""Where streams can be held back, and why not where they cannot (:meth:`commlayer.devices.device_contract.Stream.hold`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

__all__ = ["why_no_holds"]

_NO = ("", "0", "false", "no", "off")


def why_no_holds(device_type: str, environment: Mapping[str, str]) -> str:
    """Say why no stream of such a device may be held back, and what to do; empty where it may. Pure.

    A hold must stop nothing but its own stream. Where kernels of all streams begin in the order in which the host launched them,
    what is launched behind a hold would wait for it too, even the calls for whose sake it holds.
    """
    if device_type == "simulated":
        return ""
    if device_type != "cuda":
        return f"streams are held on CUDA and on the simulated device, and nothing is known that would hold one on {device_type}"
    if environment.get("NCCL_LAUNCH_ORDER_IMPLICIT", "").strip().lower() not in _NO:
        return "NCCL_LAUNCH_ORDER_IMPLICIT has kernels begin in the order of the program, so none goes before: unset it"
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams in one queue, so that nothing goes before: unset it"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, whose kernel holds a stream: pip install 'triton>=3.2'"
    return ""
