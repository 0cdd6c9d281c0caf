"""Collectives in a wire format, flat: all is encoded, one call of the group moves the bytes, all is decoded.

For tensors on a device, whose kernels encode faster than any chunk could hide. It is also the plain form that the plans on the
CPU are held against. Calls are made when asked for; what is left, decoding, is done by whoever waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from commlayer.failures.waits import NO_TIMEOUT
from commlayer.profiles.errors import NonFiniteError
from commlayer.scheduler.group_moves import even_blocks
from commlayer.transport.c10d import all_gather_single
from commlayer.wire.codecs import Codec

__all__ = ["FlatEncoded", "require_finite"]


class _Finishing(dist.Work):
    """A call under way, with what is to be done with its bytes."""

    def __init__(self, work: Any, finish: Callable[[], None], result: torch.Tensor) -> None:
        super().__init__()
        self._work, self._finish, self._result = work, finish, result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self._work is not None:
            self._work.wait(timeout) if timeout else self._work.wait()
            self._finish()
            self._work = None
        return True

    def is_completed(self) -> bool:
        return self._work is None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completed when this returns: decoding needs a stream, and a thread."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._result])
        return future


def require_finite(group: dist.ProcessGroup, codec: Codec, x: torch.Tensor) -> None:
    """Check, where NaN and infinity are not passed on, that no rank has any: none may refuse alone, with the others in the call.
    So all hear of it, and the host waits. Raises NonFiniteError on every rank."""
    if codec.non_finite != "raise" or not codec.wire.format.is_scaled:
        return
    wrong = int(x.numel() - x.isfinite().sum())
    everyones = torch.tensor([wrong], dtype=torch.int64)
    dist.all_reduce(everyones, group=group)
    if int(everyones):
        raise NonFiniteError(
            f"rank {dist.get_rank()}: {int(everyones)} values that were to be sent in {codec.wire} are NaN or "
            f"infinite, {wrong} of them here: look for where they come from, or allow them with non_finite='pass'"
        )


class FlatEncoded:
    """The collectives of ``group``, whose rows one codec encodes. Sizes in ``blocks`` and ``splits`` are bytes of the tensor."""

    def __init__(self, group: dist.ProcessGroup, codec: Codec) -> None:
        self._group, self._codec = group, codec
        self._width = codec.wire.row_elements
        self._row_bytes = self._width * codec.dtype.itemsize

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, blocks: Sequence[int]) -> dist.Work:
        require_finite(self._group, self._codec, x)
        rank, n = self._group.rank(), self._group.size()
        sent = self._encoded(x, blocks)
        sizes = [self._padded(block) for block in blocks]
        arrived = torch.empty(n * sizes[rank], dtype=torch.uint8, device=x.device)
        work = dist.all_to_all_single(arrived, sent, [sizes[rank]] * n, sizes, group=self._group, async_op=True)

        def finish() -> None:
            total = torch.zeros(self._rows(out).shape, dtype=torch.float32, device=x.device)
            for message in arrived.split([sizes[rank]] * n):
                self._codec.add(message[: self._wire_bytes(blocks[rank])], total)
            self._rows(out).copy_(total)

        return _Finishing(work, finish, out)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, blocks: Sequence[int]) -> dist.Work:
        require_finite(self._group, self._codec, x)
        widest = max(self._padded(block) for block in blocks)
        sent = torch.zeros(widest, dtype=torch.uint8, device=x.device)
        self._codec.encode(self._rows(x), sent[: self._wire_bytes(x.nbytes)])
        arrived = torch.empty(len(blocks) * widest, dtype=torch.uint8, device=x.device)
        work = all_gather_single(arrived, sent, group=self._group, async_op=True)
        return _Finishing(work, lambda: self._decode(arrived.split([widest] * len(blocks)), out, blocks), out)

    def all_reduce(self, x: torch.Tensor) -> dist.Work:
        blocks = even_blocks(x.nbytes, self._group.size(), max(1, self._codec.wire.row_multiple) * self._row_bytes)
        part = x.new_empty(blocks[self._group.rank()] // x.element_size())
        self.reduce_scatter(part, x, blocks).wait()
        return self.all_gather(x, part, blocks)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, splits: tuple[Sequence[int], Sequence[int]]) -> dist.Work:
        require_finite(self._group, self._codec, x)
        sent = self._encoded(x, splits[0])
        sizes = [[self._padded(block) for block in blocks] for blocks in splits]
        arrived = torch.empty(sum(sizes[1]), dtype=torch.uint8, device=x.device)
        work = dist.all_to_all_single(arrived, sent, sizes[1], sizes[0], group=self._group, async_op=True)
        return _Finishing(work, lambda: self._decode(arrived.split(sizes[1]), out, splits[1]), out)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self._width)

    def _wire_bytes(self, native_bytes: int) -> int:
        return self._codec.wire_bytes(native_bytes // self._row_bytes)

    def _padded(self, native_bytes: int) -> int:
        """Messages lie behind each other, and begin where scales may."""
        return -(-self._wire_bytes(native_bytes) // 4) * 4

    def _encoded(self, x: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """One message for each block of ``x``, one behind the other."""
        sizes = [self._padded(block) for block in blocks]
        sent = torch.empty(sum(sizes), dtype=torch.uint8, device=x.device)
        parts = self._rows(x).split([block // self._row_bytes for block in blocks])
        for part, message, block in zip(parts, sent.split(sizes), blocks, strict=True):
            self._codec.encode(part, message[: self._wire_bytes(block)])
        return sent

    def _decode(self, messages: Any, out: torch.Tensor, blocks: Sequence[int]) -> None:
        parts = self._rows(out).split([block // self._row_bytes for block in blocks])
        for message, part, block in zip(messages, parts, blocks, strict=True):
            self._codec.decode(cast("torch.Tensor", message)[: self._wire_bytes(block)], part)
