"""Who is in a group, and which member this rank is; and what a call's arguments are refused for, in
words that name both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commlayer.backend.tensors import reals
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.transport.call_memory import require_dense

__all__ = ["Members", "Noted", "Tensors"]

Tensors = Sequence[torch.Tensor]
Noted = tuple[torch.dtype | None, int, int, Any]
"""Arguments of a call as the ring keeps them: dtype, bytes that go and come (−1: no two ranks need
have them alike), splits."""


class Members:
    """The members of one group. ``rank``: this one's place; ``global_ranks[i]``: member i's rank in
    the job; ``far``: those on other nodes; ``describe()``: the group's description, which torch
    sets after it has made the group."""

    __slots__ = ("describe", "far", "global_ranks", "name", "rank", "size")

    def __init__(
        self,
        name: str,
        rank: int,
        global_ranks: Sequence[int],
        nodes: Sequence[Sequence[int]],
        describe: Callable[[], str],
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(global_ranks)
        self.global_ranks, self.describe = tuple(global_ranks), describe
        node_of = {member: index for index, members in enumerate(nodes) for member in members}
        self.far = [member for member in range(self.size) if node_of[member] != node_of[rank]]

    @property
    def who(self) -> str:
        """This rank and group, for messages."""
        desc = self.describe()
        desc = f" ({desc})" if desc and desc != "undefined" else ""
        return f"rank {self.global_ranks[self.rank]}, group {self.name}{desc}"

    def named(self, member: int) -> int:
        """The global rank of a member, for messages."""
        return self.global_ranks[member] if 0 <= member < self.size else member

    def some(self, verb: str, tensors: Any, *, may_be_sparse: bool = False) -> list[torch.Tensor]:
        """:func:`reals` of one tensor or several. Raises TensorError for none, and for sparse ones
        unless they may be."""
        dense = reals([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        if not dense:
            raise TensorError(f"{self.who}: {verb} of no tensors: expected at least one")
        if not may_be_sparse:
            for x in dense:
                require_dense(x)
        return dense

    def require_root(self, what: str, root: int) -> None:
        """Raises TensorError for a root that is no member."""
        if not 0 <= root < self.size:
            raise TensorError(f"{self.who}: {what} root {root}: expected a rank of the group, 0 to {self.size - 1}")

    def require_member(self, role: str, member: int) -> None:
        """Raises UsageError for a rank that is not there, which Gloo answers with a crash or a
        hang."""
        if not 0 <= member < self.size:
            raise UsageError(
                f"{self.who}: Invalid {role} rank {member}: expected a rank of the group, 0 to {self.size - 1}"
            )

    def require_one_list(self, verb: str, lists: Sequence[Tensors], singles: Tensors) -> None:
        """Raises TensorError unless there is one list of a tensor for each member, and one
        tensor."""
        if len(lists) != 1 or len(singles) != 1 or len(lists[0]) != self.size:
            raise TensorError(
                f"{self.who}: {verb} needs one list of {self.size} tensors and one tensor, got lists of "
                f"{[len(each) for each in lists]} and {len(singles)} tensors"
            )

    def require_as_many(self, verb: str, outputs: Tensors, inputs: Tensors) -> None:
        """Raises TensorError unless there is an output for each input."""
        if len(outputs) != len(inputs):
            raise TensorError(f"{self.who}: {verb} of {len(inputs)} tensors into {len(outputs)}: expected as many")

    def require_same_size(self, verb: str, one: torch.Tensor, many: Tensors) -> None:
        """Raises TensorError unless ``many`` hold as many elements as ``one``, of its dtype."""
        if any(x.numel() != one.numel() or x.dtype != one.dtype for x in many):
            raise TensorError(
                f"{self.who}: {verb} moves {one.numel()} elements of {one.dtype} for each rank, got tensors of "
                f"{[x.numel() for x in many]} elements, {sorted({str(x.dtype) for x in many})}"
            )
