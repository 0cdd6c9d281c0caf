"""What COMMLAYER_DEBUG=detail says of ranks that do not come, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from commlayer.backend.signature import SignatureCheck
from commlayer.profiles.errors import CollectiveTimeoutError, TensorError


class Alone:
    """An inner group in which nobody else comes."""

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        return self

    def wait(self) -> None:
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def test_a_rank_whose_call_was_refused_there_has_not_called_nothing() -> None:
    store = HashStore()
    ranks = [SignatureCheck(Alone(), store, member, [4, 5, 6], "ep") for member in range(3)]
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
