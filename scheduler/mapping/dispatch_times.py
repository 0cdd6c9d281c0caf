"""Measured times of a library's dispatches and combines, in place of rates
(:mod:`commlayer.scheduler.mapping.dispatch_kernels`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import DispatchError
from commlayer.scheduler.rails import distinct_nodes

__all__ = ["DispatchKey", "DispatchTimes", "MeasuredGroup"]


class MeasuredGroup(NamedTuple):
    """A group and the rows that it was measured with: ``hidden`` elements each, of tokens that go to
    ``top_k`` of ``experts``."""

    gpu: str
    num_nodes: int
    ranks_per_node: int
    hidden: int
    top_k: int
    experts: int

    @property
    def nodes_of_token(self) -> float:
        """On how many nodes a token has an expert: as in DeepEP's tests, which choose on four at most."""
        return self._parts(self.num_nodes)

    @property
    def ranks_of_token(self) -> float:
        return self._parts(self.num_nodes * self.ranks_per_node)

    def _parts(self, parts: int) -> float:
        return distinct_nodes(self.experts, parts, self.top_k, self.num_nodes, min(self.num_nodes, _MOST_NODES))


_MOST_NODES = 4
"""Nodes on which DeepEP's test between nodes lets a token have experts (num_topk_groups, by default)."""
_WORDS = {
    "gpu": "on {}",
    "ranks_per_node": "of groups with {} ranks on a node",
    "num_nodes": "of groups on {} of its nodes",
    "hidden": "of rows of {} elements",
    "experts": "of {} experts",
    "top_k": "of top-{}",
}
"""The fields by which a group is looked up, in this order, each with its words in a message."""
_Way = Literal["dispatch", "combine"]


class DispatchKey(NamedTuple):
    """A call: of FP8 rows to experts (``dispatch``) or of BF16 rows home (``combine``), whose kernels
    hold so many multiprocessors."""

    group: MeasuredGroup
    way: _Way
    multiprocessors: int


@dataclass(frozen=True, eq=False)
class DispatchTimes:
    """The times of calls, by bytes that a rank's tokens are at all ranks of their experts."""

    curves: Mapping[DispatchKey, Curve]
    source: str

    def curve(self, key: DispatchKey) -> Curve:
        """The times of one call. Raises DispatchError where nobody measured it, naming what was measured."""
        curve = self.curves.get(key)
        if curve is not None:
            return curve
        group = key.group
        like = {each.group for each in self.curves}
        for name, words in _WORDS.items():
            have = sorted({getattr(each, name) for each in like})
            like = {each for each in like if getattr(each, name) == getattr(group, name)}
            if not like:
                lacking, listed = words.format(getattr(group, name)), words.format(", ".join(map(str, have)))
                raise DispatchError(f"{self.source} has no times {lacking}, only {listed}")
        have = sorted({each.multiprocessors for each in self.curves if each.group == group})
        raise DispatchError(
            f"{self.source} has no times of kernels that hold {key.multiprocessors} multiprocessors, only "
            f"{', '.join(map(str, have))}"
        )
