"""The c10d backend ``commlayer``: ``torch.distributed.init_process_group("commlayer")``.

Every collective of a program runs on it as on Gloo (CPU tensors) and NCCL (CUDA tensors), and where planning
pays, by a plan. Nothing needs to be imported: torch finds this package by an entry point and registers the name.
``import commlayer.backend`` does the same where entry points are off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).

Programs that accept only names that they know (accelerate, the HF Trainer) get it under one of those:
``COMMLAYER_AS=gloo`` (or ``nccl``) makes ``init_process_group`` and ``new_group`` build this backend where that name is
asked for, also in ``cpu:gloo,cuda:nccl``, and where ``init_process_group`` is called without one. ``get_backend()`` then
says ``commlayer``. Rank 0 prints a line about it.

This module runs inside ``import torch``: it imports nothing but torch and torch.distributed, which are loaded by then, and
raises nothing. All else is imported when the first group is made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.backend.group import CommlayerGroup

__all__ = ["autoload"]


def _create(opts: Any, pg_options: Any) -> CommlayerGroup:
    from commlayer.backend.joining import GroupRequest, joining_group

    request = GroupRequest.of_torch(opts)
    with joining_group(request) as joined:
        with joined.loading():
            from commlayer.backend.new_groups import new_group
        return new_group(request, joined, pg_options)


def autoload() -> None:
    """Register the backend; what the entry point calls. Never raises: a warning says what went wrong."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001  import torch must not fail because commlayer is installed
        from commlayer.profiles.printable import warn  # this module is imported inside ``import torch``

        warn(f"the backend commlayer could not be registered: {type(error).__name__}: {error}", stacklevel=2)


def _register() -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return
    if "commlayer" not in dist.Backend.backend_list:
        # Whether there is a GPU is asked when a group is made: its driver, once asked, cannot be used by forked children.
        devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        dist.Backend.register_backend("commlayer", _create, extended_api=True, devices=devices)
    from commlayer.backend.patches import answer_to, teach_store

    teach_store()
    alias = os.environ.get("COMMLAYER_AS")
    if alias:
        answer_to(alias)


autoload()
