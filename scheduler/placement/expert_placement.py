"""A placement: which expert's copy lies in which slot of which rank; the moves from one to another.

As other programs take it (EPLB's), it is three arrays: ``phy2log``, the expert of each slot; ``log2phy``, the slots of each
expert, padded with −1; ``logcnt``, how many those are. Slots are numbered rank after rank, all ranks having as many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from commlayer.profiles.errors import UsageError

__all__ = ["Array", "ExpertMove", "ExpertPlacement"]

Array = Any
"""A numpy array, whose types are not loaded here."""


class ExpertMove(NamedTuple):
    """One copy of an expert that is sent, with its optimizer's state: every copy is stepped where it lies.
    ``is_replica``: its home is another rank."""

    expert: int
    source: int
    target: int
    is_replica: bool


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """The experts of one layer on the slots of ranks.

    ``slots`` [ranks, slots of a rank]: the expert in each; −1: an empty slot, of which there are only some where memory for
    replicas is left over. ``owners`` [experts]: the rank that shall be an expert's home, where it holds the expert;
    else, and where nobody is named, the first rank that does. The home is the copy of which there are others.

    Attributes:
        num_ranks: how many ranks there are.
        phy2log: the expert of each slot, [slots of all ranks].
        logcnt: the number of copies of each expert, [experts].
        held: the expert and the rank of every copy.
        copies: how often each expert lies on each rank, [experts, ranks].

    Raises UsageError: an expert that lies nowhere, or twice on one rank.
    """

    slots: Array
    num_experts: int
    owners: Array = None
    num_ranks: int = field(init=False)
    phy2log: Array = field(init=False)
    logcnt: Array = field(init=False)
    held: tuple[Array, Array] = field(init=False)
    copies: Array = field(init=False)

    def __post_init__(self) -> None:
        import numpy as np

        slots = np.asarray(self.slots, dtype=np.int64)
        if slots.ndim != 2 or not slots.size or slots.max() >= self.num_experts or slots.min() < -1:
            raise UsageError(
                f"a placement of {self.num_experts} experts: expected slots [ranks, slots] with −1 or an expert, "
                f"got {slots.tolist()!r:.200}"
            )
        num_ranks, flat = len(slots), slots.reshape(-1)
        ranks, columns = np.nonzero(slots >= 0)
        held = slots[ranks, columns], ranks
        copies = np.bincount(held[0] * num_ranks + ranks, minlength=self.num_experts * num_ranks)
        computed = {
            "slots": slots,
            "num_ranks": num_ranks,
            "phy2log": flat,
            "logcnt": np.bincount(held[0], minlength=self.num_experts),
            "held": held,
            "copies": copies.reshape(self.num_experts, num_ranks),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)
        if (missing := np.flatnonzero(self.logcnt == 0)).size:
            raise UsageError(f"a placement: expected every expert on some rank, got none for {missing[:8].tolist()}")
        if self.copies.max() > 1:
            expert, rank = np.argwhere(self.copies > 1)[0]
            raise UsageError(
                f"a placement: expected an expert once on a rank, got expert {expert} several times on rank {rank}"
            )

    @classmethod
    def in_order(cls, num_experts: int, num_ranks: int, spare: int = 0) -> ExpertPlacement:
        """Lay experts out in order, as many on each rank (the first ones one more where they do not divide), with ``spare`` empty
        slots on each."""
        import numpy as np

        if not 1 <= num_ranks <= num_experts or spare < 0:
            raise UsageError(f"expected 1 to {num_experts} ranks and no negative spare, got {num_ranks} and {spare}")
        parts = np.array_split(np.arange(num_experts), num_ranks)
        slots = np.full((num_ranks, len(parts[0]) + spare), -1)
        for rank, part in enumerate(parts):
            slots[rank, : len(part)] = part
        return cls(slots, num_experts)

    @cached_property
    def log2phy(self) -> Array:
        """The slots of each expert, home first, padded with −1, [experts, most copies]."""
        import numpy as np

        slots_of = np.full((self.num_experts, int(self.logcnt.max())), -1)
        held = np.flatnonzero(self.phy2log >= 0)
        held = held[np.argsort(self.phy2log[held], kind="stable")]
        experts = self.phy2log[held]
        first = np.concatenate([[0], np.cumsum(self.logcnt)[:-1]])
        slots_of[experts, np.arange(len(held)) - first[experts]] = held
        return slots_of

    @cached_property
    def homes(self) -> Array:
        """The rank of each expert's home, [experts]."""
        import numpy as np

        first = self.copies.argmax(1)
        if self.owners is None:
            return first
        return np.where(self.copies[np.arange(self.num_experts), self.owners] > 0, self.owners, first)

    def owned_as(self, other: ExpertPlacement) -> ExpertPlacement:
        """Return this placement with the homes of ``other`` wherever they still hold the expert."""
        return replace(self, owners=other.homes)

    @property
    def has_replicas(self) -> bool:
        return bool((self.logcnt > 1).any())

    def even_shares(self) -> Array:
        """The part of each expert's rows that each rank computes where copies share them evenly, [experts, ranks]."""
        shares: Array = self.copies / self.logcnt[:, None]
        return shares

    def settled_from(self, other: ExpertPlacement) -> ExpertPlacement:
        """Return this placement with every expert that stays on a rank in the slot where it lies in ``other``, whose homes stay
        too as far as they hold their experts: nothing moves within a rank.

        Raises UsageError for a placement of other experts, ranks or numbers of slots.
        """
        import numpy as np

        if (other.num_experts, other.slots.shape) != (self.num_experts, self.slots.shape):
            raise UsageError(
                f"expected a placement of {other.num_experts} experts on ranks and slots {list(other.slots.shape)} as "
                f"before, got {self.num_experts} on {list(self.slots.shape)}"
            )
        slots = np.full_like(self.slots, -1)
        for rank, (own, theirs) in enumerate(zip(self.slots, other.slots, strict=True)):
            stays = (theirs >= 0) & np.isin(theirs, own)
            slots[rank, stays] = theirs[stays]
            comes = own[(own >= 0) & ~np.isin(own, theirs)]
            slots[rank, np.flatnonzero(~stays)[: len(comes)]] = comes
        return ExpertPlacement(slots, self.num_experts, other.homes)

    def moves_from(self, other: ExpertPlacement, node_of: Array | None = None) -> tuple[ExpertMove, ...]:
        """List what must be sent to come here from ``other``, by expert: each from a rank of the same node where one has the
        expert (``node_of`` each rank), else from the old home.

        Raises UsageError for a placement of other experts or ranks.
        """
        moved = self.sent_from(other, node_of)
        rows = sorted(zip(*(part.tolist() for part in moved), strict=True), key=lambda row: (row[0], row[3], row[2]))
        return tuple(ExpertMove(*row) for row in rows)

    def sent_from(self, other: ExpertPlacement, node_of: Array | None = None) -> tuple[Array, Array, Array, Array]:
        """Find what :meth:`moves_from` lists, as arrays: experts, sources, targets, and whether each is a replica."""
        import numpy as np

        if (other.num_experts, other.num_ranks) != (self.num_experts, self.num_ranks):
            raise UsageError(
                f"moves: expected {self.num_experts} experts on {self.num_ranks} ranks as here, got {other.num_experts} on "
                f"{other.num_ranks}"
            )
        experts, targets = self.held
        is_new = other.copies[experts, targets] == 0
        experts, targets = experts[is_new], targets[is_new]
        sources = other.homes[experts]
        if node_of is not None and len(experts):
            near = (other.copies[experts] > 0) & (node_of[None] == node_of[targets][:, None])
            sources = np.where(near.any(1), near.argmax(1), sources)
        return experts, sources, targets, self.homes[experts] != targets
