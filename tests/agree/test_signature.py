"""The words of COMMLAYER_DEBUG=detail of ranks that do not come, without processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from commlayer.agree.signature_check import SignatureCheck
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, TensorError


class Alone:
    """An inner group in which nobody else comes."""

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def nobody_died(error: RuntimeError, *_: object) -> ClusterError:
    raise AssertionError("a timeout is not a death") from error


def test_a_rank_whose_call_was_refused_there_has_not_called_nothing() -> None:
    store = HashStore()
    detector = FailureDetector(None, 0, (0,), 0.0)

    def check(member: int) -> SignatureCheck:
        board = FailureBoard(detector, "ep", 4 + member, (4, 5, 6))
        return SignatureCheck(Alone(), store, member, [4, 5, 6], "ep", board, nobody_died)

    ranks = [check(member) for member in range(3)]
    with pytest.raises(CollectiveTimeoutError):
        ranks[2].compare(1, "barrier(0 bytes)", 1.0)
    ranks[1].refuse(2, "all_gather", TensorError("an output of 8 elements, got 7"))
    with pytest.raises(CollectiveTimeoutError) as caught:
        ranks[0].compare(2, "all_gather(32 bytes)", 1.0)
    text = str(caught.value)
    assert "rank 5 (its call #2 was refused there: all_gather: TensorError: an output of 8 elements, got 7)" in text
    assert "rank 6 (its last call was #1 barrier(0 bytes))" in text
    with pytest.raises(CollectiveTimeoutError):  # it makes the call after all
        ranks[1].compare(2, "all_gather(32 bytes)", 1.0)
    with pytest.raises(CollectiveTimeoutError) as caught:
        ranks[0].compare(2, "all_gather(32 bytes)", 1.0)
    assert "rank 5" not in str(caught.value)
