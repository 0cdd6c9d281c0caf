"""``COMMLAYER_DEBUG=detail`` (or torch's ``TORCH_DISTRIBUTED_DEBUG=DETAIL``): compare every
collective across ranks before it moves a byte.

It costs two small exchanges a call, over an inner group of its own, and a write to the store. It
finds what otherwise ends in a timeout or in wrong numbers: ranks that call different collectives,
or with other sizes, dtypes, roots, operations; and tokens (or gradients) that were declared
replicated and are not.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import AllgatherOptions, Store

from commlayer.failures.board import FailureBoard, own_client
from commlayer.failures.store_answers import store_silent
from commlayer.failures.waits import bounded, is_timeout, wait, within
from commlayer.peer_words import read_number, read_text
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, DisagreementError, PeerError

__all__ = ["SignatureCheck"]

_STORE_PATIENCE_S = 2.0
_DIGEST, _WIDTH = 32, 1024
"""Bytes of a message: the digest of the whole signature, then as much of its text as fits."""


class SignatureCheck:
    """Compares the calls of one group. ``gloo``: an inner group that nothing else uses; ``store``:
    the group's own; ``explain``: tells the others of a broken wait and says who is to blame
    (PlannedGroup.explain)."""

    def __init__(
        self,
        gloo: Any,
        store: Store,
        rank: int,
        global_ranks: Sequence[int],
        group: str,
        board: FailureBoard,
        explain: Callable[[RuntimeError, str, int, float, float], ClusterError],
    ) -> None:
        self.gloo, self._store, self._rank, self._group = gloo, store, rank, group
        self._board, self._explain = board, explain
        self._global_ranks = tuple(global_ranks)
        self._key = "commlayer/debug/"

    def compare(self, sequence: int, call: str, timeout_s: float) -> None:
        """Return when all ranks are about to make this ``call``.

        Raises, on every rank, DisagreementError for ranks with different calls;
        CollectiveTimeoutError where a rank does not come within ``timeout_s``, naming it and its
        last call; PeerError where one is gone.
        """
        text = f"#{sequence} {call}".encode()
        message = torch.zeros(_WIDTH, dtype=torch.uint8)
        content = hashlib.sha256(text).digest() + text[: _WIDTH - _DIGEST]
        message[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._note(sequence, call, timeout_s)
        gathered = self._gather(message, sequence, call, timeout_s)
        first = gathered[0]
        for member, theirs in enumerate(gathered):
            if not torch.equal(theirs[:_DIGEST], first[:_DIGEST]):
                raise DisagreementError(
                    f"group {self._group}: rank {self._global_ranks[0]} calls {_text(first)}, but rank "
                    f"{self._global_ranks[member]} calls {_text(theirs)}: all ranks of a group must make the same calls in the "
                    "same order (nothing was moved)"
                )

    def _note(self, sequence: int, call: str, timeout_s: float) -> None:
        """Write down, for those who may wait in vain, which call this rank has come to. Bounded:
        the store's host may be stopped, or somebody else wait in the same client."""
        try:
            noted = partial(self._store.set, f"{self._key}{self._rank}", f"{sequence} {call}")
            bounded(noted, self._board, timeout_s, "the job's store")
        except TimeoutError as error:
            raise store_silent(self._me(sequence, call), timeout_s) from error
        except RuntimeError as error:  # the rank that hosts the store is gone
            self._blame(error, sequence, call, timeout_s)

    def _me(self, sequence: int, call: str) -> str:
        return f"rank {self._global_ranks[self._rank]}, group {self._group}, call #{sequence} {call}"

    def refuse(self, sequence: int, call: str, why: Exception) -> None:
        """Note for the others that this rank does not make its ``call``: nothing of it was
        compared, and nothing moved."""
        key, words = f"{self._key}refused/{self._rank}", f"{sequence} {call}: {type(why).__name__}: {why}"
        # The store may be gone, or silent: the caller's own mistake matters more.
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(_STORE_PATIENCE_S, partial(self._store.set, key, words))

    def compare_splits(
        self, sequence: int, sent: Sequence[int], expected: Sequence[int], unit: str, timeout_s: float
    ) -> None:
        """All ranks agree that they call an all_to_all: check that what each sends is what its peer
        expects."""
        own_counts = torch.tensor([*sent, *expected], dtype=torch.int64)
        size = len(self._global_ranks)
        gathered = (
            self._gather(own_counts.view(torch.uint8), sequence, "all_to_all", timeout_s).view(torch.int64).tolist()
        )
        for source in range(size):
            for target in range(size):
                num_sent, num_expected = gathered[source][target], gathered[target][size + source]
                if num_sent != num_expected:
                    raise DisagreementError(
                        f"group {self._group}, all_to_all #{sequence}: rank {self._global_ranks[source]} sends {num_sent} {unit} "
                        f"to rank {self._global_ranks[target]}, which expects {num_expected}: the input splits of one rank must "
                        "be the output splits of the other (nothing was moved)"
                    )

    def compare_replicas(
        self, sequence: int, call: str, holders: Sequence[Sequence[int]], data: torch.Tensor, timeout_s: float
    ) -> None:
        """All ranks agree on their ``call``: check that the members of each of ``holders`` bring
        the same ``data``, 1-D uint8.

        Raises DisagreementError, on every rank, where two of them do not.
        """
        checksum = torch.tensor([_checksum(data)], dtype=torch.int64)
        gathered = self._gather(checksum.view(torch.uint8), sequence, call, timeout_s)
        checksums = gathered.view(torch.int64).flatten().tolist()
        for first, *others in holders:
            for other in others:
                if checksums[other] != checksums[first]:
                    raise DisagreementError(
                        f"group {self._group}: the tensor of call #{sequence} {call} was declared replicated over the tp group, "
                        f"but ranks {self._global_ranks[first]} and {self._global_ranks[other]} hold different bytes "
                        f"(checksums {checksums[first]} and {checksums[other]}): reduce it over the tp group first, or "
                        "call with replicated=False"
                    )

    def _gather(self, message: torch.Tensor, sequence: int, call: str, timeout_s: float) -> torch.Tensor:
        """[bytes] of every rank as [n, bytes]."""
        gathered = torch.empty(len(self._global_ranks), message.numel(), dtype=torch.uint8)
        opts = AllgatherOptions()
        opts.timeout = timedelta(seconds=timeout_s)
        try:
            wait(self.gloo._allgather_base(gathered.view(-1), message, opts), self._board)
        except RuntimeError as error:
            self._blame(error, sequence, call, timeout_s)
        return gathered

    def _blame(self, error: RuntimeError, sequence: int, call: str, timeout_s: float) -> NoReturn:
        me = self._me(sequence, call)
        if not is_timeout(error):
            explained = self._explain(error, f"comparison of {call}", sequence, 0.0, timeout_s)
            raise PeerError(f"{explained}. Before {me}. Gloo's own message: {error}") from error
        late: list[str] = []
        with contextlib.suppress(TimeoutError, RuntimeError):  # the store is out of reach, or gone with its rank
            late = within(_STORE_PATIENCE_S, lambda: self._late(own_client(self._store), sequence))
        who = ", ".join(late) or "some rank"
        raise CollectiveTimeoutError(
            f"{me}: {who} did not come within {timeout_s:g} s: look at the log of each. Gloo's own message: {error}"
        ) from error

    def _late(self, store: Store, sequence: int) -> list[str]:
        """The members that have not made call ``sequence``, each with its last one, or with why it
        could not make that call."""
        late: list[str] = []
        for member, rank in enumerate(self._global_ranks):
            last, refused = (_read(store, f"{self._key}{name}{member}") for name in ("", "refused/"))
            if last is not None and last[0] >= sequence:
                continue
            words = "has called nothing yet" if last is None else f"its last call was #{last[0]} {last[1]}"
            if refused is not None and refused[0] == sequence:
                words = f"its call #{sequence} was refused there: {refused[1]}"
            late.append(f"rank {rank} ({words})")
        return late


def _read(store: Store, key: str) -> tuple[int, str] | None:
    """The words under that key: the number of a call, and text."""
    if not store.check([key]):
        return None
    number, _, text = store.get(key).partition(b" ")
    try:
        return read_number(number, f"the rank that wrote {key}"), read_text(text)
    except DisagreementError:
        return -1, "unknown: what it says of its calls cannot be read"


def _checksum(data: torch.Tensor) -> int:
    weights = torch.arange(1, data.numel() + 1, dtype=torch.int64) % 65_521  # order matters, not only the sum
    return int((data.cpu().to(torch.int64) * weights).sum())


def _text(message: torch.Tensor) -> str:
    return bytes(message[_DIGEST:].tolist()).rstrip(b"\0").decode(errors="replace")
