"""Messages between ranks when groups are made, as typed data: nothing that arrives is ever run.

A message is a frozen :class:`ControlMessage`, declared beside the code that owns it, and travels as
msgpack in an envelope that names its type and its sender's version. It is read strictly: an
unknown, a missing or a wrong field is an error on all ranks alike, which names the rank whose words
could not be read. Rejected: pickle, as in torch's ``all_gather_object``; whoever reaches the job's
store would run commands on every rank.

On the wire: the lengths of all messages (int64), then the messages, padded to the longest. Bare
numbers (:func:`everyones_numbers`) travel as they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from commlayer.failures.waits import Board, is_timeout, wait
from commlayer.peer_words import LIMIT_BYTES, read_words, refusal
from commlayer.profiles.errors import BLAMING, CollectiveTimeoutError, DisagreementError, PeerError
from commlayer.profiles.printable import printable, shortened
from commlayer.version import __version__

__all__ = [
    "ControlMessage",
    "Peers",
    "Reason",
    "blaming",
    "check_alike",
    "decode",
    "encode",
    "everyones_numbers",
    "from_first",
    "gather_grid",
    "gather_messages",
    "require_alike",
    "until_after",
    "wait_for",
]

_MOST_SHOWN = 2000
"""Characters of a value that ranks hold differently: a policy has some hundreds, and differs
anywhere."""
_MOST_NAMED = 32
"""Ranks that differ from the first one and are named: of thousands, where the first one is the odd
one out, those are enough."""


class ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything that a rank may tell another. Its name is the message's kind on the
    wire."""


class Reason(ControlMessage, frozen=True):
    """Why a rank cannot take part, as data: an exception itself does not travel."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Reason:
        """The class and the message of ``error``; of a very long message the beginning."""
        return cls(type(error).__name__, str(error)[: LIMIT_BYTES // 16])

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: str
    kind: str
    content: msgspec.Raw


M = TypeVar("M", bound=ControlMessage)


@dataclass(frozen=True)
class Peers:
    """Ranks that exchange messages. ``group`` has c10d's verbs: a process group, or the backend of
    one.

    ``ranks``: global, in the group's order; this rank is ``ranks[place]``.
    """

    group: Any
    ranks: tuple[int, ...]
    place: int
    device: torch.device
    board: Board | None = None
    """Where failures of the ranks are known, if anywhere: then nobody waits for a dead one."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, board: Board | None = None) -> Peers:
        """The members of ``group``, of which this rank is one; None: all ranks of the job."""
        is_cuda = "nccl" in str(dist.get_backend(group))
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        verbs = group if group is not None else dist.group.WORLD
        return cls(verbs, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), device, board)

    @property
    def rank(self) -> int:
        """This rank, global."""
        return self.ranks[self.place]


def encode(value: ControlMessage) -> bytes:
    """``value`` as it travels."""
    content = msgspec.Raw(msgspec.msgpack.encode(value))
    return msgspec.msgpack.encode(_Envelope(__version__, type(value).__name__, content))


def decode(data: bytes, type_: type[M], who: str) -> M:
    """The ``type_`` in ``data``, which ``who`` ("rank 3") has sent.

    Raises DisagreementError for anything else: it names ``who`` and says why.
    """
    size = len(data)  # it was bounded when it was announced
    envelope: _Envelope = read_words(data, _Envelope, who, size, name=type_.__name__)
    if envelope.kind != type_.__name__:
        got = f"got a {shortened(envelope.kind, 40)!r}: it makes another call, or its commlayer is another"
        raise refusal(who, f"expected a {type_.__name__}, {got}", envelope.version)
    value: M = read_words(envelope.content, type_, who, size, envelope.version)
    return value


def gather_messages(value: M, type_: type[M], peers: Peers, timeout_s: float | None, purpose: str) -> list[M]:
    """``value`` of every one of ``peers``, in their order. Collective over them. ``purpose``: "to
    make a mesh".

    ``timeout_s`` None: for as long as the group's own timeout allows. Raises, on all ranks alike,
    DisagreementError for words that cannot be read as ``type_``, naming the rank; and
    CollectiveTimeoutError where not all come within ``timeout_s``, PeerError where one is gone.
    """
    message = _as_tensor(encode(value))
    until = until_after(timeout_s)
    with blaming(peers, timeout_s, purpose):
        lengths = _all_gather(peers, torch.tensor([message.numel()], dtype=torch.int64), until)
        sizes = [int(length) for length in lengths]
        for rank, size in zip(peers.ranks, sizes, strict=True):
            _check_size(size, rank)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: message.numel()] = message
        words = _all_gather(peers, padded, until)
    return [
        decode(word[:size].numpy().tobytes(), type_, f"rank {rank}")
        for rank, word, size in zip(peers.ranks, words, sizes, strict=True)
    ]


class _Row(ControlMessage, frozen=True):
    """A row's messages, as each of its ranks passes them on; or why one of them could not be
    read."""

    ranks: tuple[int, ...]
    words: tuple[bytes, ...]
    trouble: str | None = None


def gather_grid(
    value: M, type_: type[M], row: Peers | None, column: Peers, timeout_s: float, purpose: str
) -> list[list[tuple[int, M]]]:
    """(rank, ``value``) of every rank of a grid, row by row; ``row`` None: of this rank alone.
    Collective over the grid.

    Along the row, then along the column, along which travels also what could not be read in the
    row: a rank that raised after the first would leave the ranks of its column waiting. Raises as
    :func:`gather_messages`.
    """
    ranks = (column.rank,) if row is None else row.ranks
    try:
        here = [value] if row is None else gather_messages(value, type_, row, timeout_s, purpose)
        own_row = _Row(ranks, tuple(map(encode, here)))
    except DisagreementError as error:
        own_row = _Row(ranks, (), str(error))
    rows = gather_messages(own_row, _Row, column, timeout_s, purpose)
    for each in rows:
        if each.trouble is not None:
            raise DisagreementError(each.trouble)
    return [_opened(each, type_, teller) for teller, each in zip(column.ranks, rows, strict=True)]


def _opened(row: _Row, type_: type[M], teller: int) -> list[tuple[int, M]]:
    if teller not in row.ranks or len(row.ranks) != len(row.words) or len(set(row.ranks)) < len(row.ranks):
        why = f"expected the words of its row, got {len(row.words)} of ranks {list(row.ranks)}"
        raise refusal(f"rank {teller}", why)
    return [(rank, decode(word, type_, f"rank {rank}")) for rank, word in zip(row.ranks, row.words, strict=True)]


def from_first(value: M, type_: type[M], peers: Peers, timeout_s: float | None, purpose: str) -> M:
    """``value`` of the first of ``peers``, on all of them; that of the others is not looked at. As
    :func:`gather_messages`."""
    content = _as_tensor(encode(value))
    until = until_after(timeout_s)
    with blaming(peers, timeout_s, purpose):
        size = int(_broadcast(peers, torch.tensor([content.numel()], dtype=torch.int64), until))
        _check_size(size, peers.ranks[0])
        if peers.place != 0:
            content = torch.empty(size, dtype=torch.uint8)
        content = _broadcast(peers, content, until)
    return decode(content.numpy().tobytes(), type_, f"rank {peers.ranks[0]}")


def check_alike(everyones: Sequence[tuple[int, Mapping[str, str]]]) -> None:
    """Raise DisagreementError unless all ranks (rank, name → value) have the same values; it names
    ranks and values."""
    first_rank, first = everyones[0]
    for key in dict.fromkeys(name for _, values in everyones for name in values):
        others = [(rank, values.get(key)) for rank, values in everyones if values.get(key) != first.get(key)]
        if others:
            raise DisagreementError(
                f"ranks disagree on {key}: rank {first_rank} has {_shown(first.get(key))}, "
                + ", ".join(f"rank {rank} has {_shown(theirs)}" for rank, theirs in others[:_MOST_NAMED])
                + (f" and {len(others) - _MOST_NAMED} more ranks" if len(others) > _MOST_NAMED else "")
                + ": start all ranks with the same one"
            )


class _Values(ControlMessage, frozen=True):
    """The values, by name, that a rank must have like the others."""

    values: dict[str, str]


def require_alike(values: Mapping[str, str], group: dist.ProcessGroup, purpose: str) -> None:
    """Raise DisagreementError, on all ranks alike, unless all ranks of ``group`` have the same
    ``values``. Collective over it; as :func:`gather_messages` with its ``purpose``,
    :func:`check_alike`."""
    peers = Peers.of(group)
    everyones = gather_messages(_Values(dict(values)), _Values, peers, None, purpose)
    check_alike([(rank, each.values) for rank, each in zip(peers.ranks, everyones, strict=True)])


def _shown(value: str | None) -> str:
    return "nothing" if value is None else printable(shortened(value, _MOST_SHOWN))


def _check_size(size: int, rank: int) -> None:
    if not 0 < size <= LIMIT_BYTES:
        raise refusal(f"rank {rank}", f"expected 1 to {LIMIT_BYTES} bytes, it announces {size}")


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _all_gather(peers: Peers, message: torch.Tensor, until: float | None) -> list[torch.Tensor]:
    message = message.to(peers.device)
    parts = [torch.empty_like(message) for _ in peers.ranks]
    wait_for(peers.group.allgather([parts], [message]), until, peers.board)
    return [part.cpu() for part in parts]


def _broadcast(peers: Peers, value: torch.Tensor, until: float | None) -> torch.Tensor:
    value = value.to(peers.device)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    wait_for(peers.group.broadcast([value], options), until, peers.board)
    return value.cpu()


def until_after(timeout_s: float | None) -> float | None:
    """The moment, on the monotonic clock, at which ``timeout_s`` from now are over; None: never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def wait_for(work: dist.Work, until: float | None, board: Board | None) -> None:
    """Wait for ``work`` until that moment, or until ``board`` is broken. Raises RuntimeError."""
    if board is not None:
        wait(work, board, None if until is None else max(0.001, until - time.monotonic()))
    elif until is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))


@contextlib.contextmanager
def blaming(peers: Peers, timeout_s: float | None, purpose: str) -> Iterator[None]:
    """Turn what breaks inside into an error that says which ranks were waited for, and for what.

    What a group of the backend raises already names its group and who is to blame: that stays.
    """
    started = time.monotonic()
    try:
        yield
    except DisagreementError:
        raise
    except RuntimeError as error:
        who = f"rank {peers.rank}: ranks {list(peers.ranks)} did not all come {purpose}"
        if isinstance(error, BLAMING):
            raise type(error)(f"{who}: {error}") from error
        is_over = timeout_s is not None and time.monotonic() - started >= timeout_s
        if is_over or is_timeout(error):
            limit = "the group's timeout" if timeout_s is None else f"{timeout_s:g} s"
            raise CollectiveTimeoutError(
                f"{who} within {limit}: every one of them must call this, at the same time; look at the log of the one that "
                "did not"
            ) from error
        raise PeerError(f"{who}: one of them died or closed its connection; look at their logs") from error


def everyones_numbers(group: dist.ProcessGroup, numbers: Sequence[int], purpose: str) -> list[list[int]]:
    """Tell all ranks of ``group`` as many numbers as each of them tells, and return everybody's, in
    the group's order.

    Collective; ``purpose``: "to exchange counts".

    Raises CollectiveTimeoutError where a rank does not come, PeerError where one is gone; both name
    the ranks and the purpose.
    """
    own = torch.tensor(numbers, dtype=torch.int64)
    everyones = [torch.empty_like(own) for _ in range(group.size())]
    with blaming(Peers.of(group), None, purpose):
        dist.all_gather(everyones, own, group=group)
    return [each.tolist() for each in everyones]
