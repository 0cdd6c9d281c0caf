"""Micro-batches through the stages of a pipeline: activations one way, their gradients back.

The schedule is GPipe's: all micro-batches forward, then all backward. Rejected: 1F1B, which keeps fewer activations, but sends
both ways at once: without buffers (NCCL) two neighbours then wait for each other unless every pair of messages is batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from commlayer.collectives import GroupCommunicator
from commlayer.profiles.errors import UsageError

__all__ = ["run_pipeline"]


def run_pipeline(
    stage: Callable[[int, torch.Tensor | None], torch.Tensor],
    pp: GroupCommunicator,
    shapes: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor]:
    """Forward and backward pass of every micro-batch. Collective over ``pp``, whose ranks are the stages, in order.

    Args:
        stage: what this rank does with micro-batch m: ``stage(m, x)`` gets the activations of the stage before (None on the
            first, which has its own input) and returns its own; on the last stage it returns a loss, a scalar.
        pp: the stages.
        shapes: of the activations of each micro-batch, the same between all stages.
        dtype: of the activations.
        device: of the activations.

    Returns:
        The losses on the last stage, detached; nothing elsewhere. Gradients are added to those of the parameters.

    Raises:
        UsageError: no micro-batches.
        TensorError, PeerError, CollectiveTimeoutError: as the stage and messages do.
    """
    if not shapes:
        raise UsageError("run_pipeline() needs at least one micro-batch: pass its activations' shape")
    ends = _Ends(pp, dtype, device)
    inputs: list[torch.Tensor | None] = []
    outputs: list[torch.Tensor | None] = []
    losses = []
    # One stage alone need not keep the activations of all micro-batches.
    ahead = 0 if pp.size == 1 else len(shapes)
    for step in range(len(shapes) + ahead):
        if step < len(shapes):
            x = ends.receive(shapes[step], -1)
            inputs.append(None if x is None else x.requires_grad_())
            outputs.append(stage(step, inputs[step]))
            ends.send(outputs[step], 1)
        if step >= ahead:
            m = step - ahead
            x, y = inputs[m], outputs[m]
            assert y is not None  # it went forward before
            torch.autograd.backward(y, ends.receive(shapes[m], 1))
            ends.send(None if x is None else x.grad, -1)
            if pp.rank == pp.size - 1:
                losses.append(y.detach())
            inputs[m] = outputs[m] = None
    ends.finish()
    return losses


class _Ends:
    """The messages to and from both neighbours. Messages without elements are not sent: both sides know the shapes."""

    def __init__(self, pp: GroupCommunicator, dtype: torch.dtype, device: torch.device | str) -> None:
        self._pp, self._dtype, self._device = pp, dtype, device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # with what must stay until it has gone

    def _neighbour(self, step: int) -> int | None:
        rank = self._pp.rank + step
        return rank if 0 <= rank < self._pp.size else None

    def receive(self, shape: Sequence[int], step: int) -> torch.Tensor | None:
        """From the next stage (``step`` 1) or the one before (−1); None where there is none."""
        source = self._neighbour(step)
        if source is None:
            return None
        x = torch.empty(*shape, dtype=self._dtype, device=self._device)
        if x.numel():
            dist.recv(x, group=self._pp.group, group_src=source)
        return x

    def send(self, x: torch.Tensor | None, step: int) -> None:
        destination = self._neighbour(step)
        if destination is None or x is None or not x.numel():
            return
        x = x.detach().contiguous()
        work = dist.isend(x, group=self._pp.group, group_dst=destination)
        if work is not None:
            self._sent.append((work, x))

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
