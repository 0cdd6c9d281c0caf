"""Prices of a group's collectives on a cluster: the decision that the run time would make, and its predicted time.

There is no second cost model here: candidates, prices and the choice are :func:`commlayer.scheduler.decision.choose`'s, on
the cluster's profile of the group. What is here is the memory of what was asked before, because a search asks a million
times for a few thousand different things.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from commlayer.profiles.errors import PlanError
from commlayer.scheduler.decision import Decision, Policy, choose
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.lanes import LanePolicy
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.plan import Plan, Span, Strategy
from commlayer.scheduler.price import price
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.traffic import Traffic, link_over

__all__ = ["Pricer"]

_MOST_DECISIONS = 4096
"""A decision keeps all its alternatives, some 20 KB: a search of 16,384 GPUs asks for 2,000, and forgets none of them."""
_MOST_IDENTITIES = 4096

_Times = dict[tuple[str, float, str], float]


class Pricer:
    """Prices collectives on one cluster. Not for several threads.

    Args:
        strategies: how they may move; ``(Strategy.FLAT,)`` is the backend alone.
        lanes: how finely traffic of a lower lane is cut (None: the default policy).
        min_bytes: traffic of fewer bytes stays flat.
    """

    def __init__(
        self,
        cluster: Cluster,
        strategies: Sequence[Strategy] = tuple(Strategy),
        lanes: LanePolicy | None = None,
        min_bytes: int = 0,
    ) -> None:
        self.cluster = cluster
        self.policy = Policy(strategies=tuple(strategies), lanes=lanes or LanePolicy(), min_bytes=min_bytes)
        self._decisions = Kept[tuple[str, int, tuple[int, ...], str], Decision](_MOST_DECISIONS)
        self._over = Kept[tuple[Span, int, tuple[int, ...]], tuple[Plan, float]](_MOST_DECISIONS)
        self._times: dict[tuple[int, ...], _Times] = {}
        # The same by the identity of nodes: hashing those of a thousand nodes takes longer than everything else. They are
        # kept beside, so that no other object gets that identity.
        self._by_identity: dict[int, tuple[tuple[int, ...], _Times]] = {}

    def us(self, collective: str, logical_bytes: float, nodes: tuple[int, ...], lane: str = "") -> float:
        """Predicted µs of one call; 0.0 for a group of one, or of no bytes.

        Args:
            collective: all_gather, all_reduce, all_to_all_v, broadcast, reduce_scatter, or ``send_recv``: ``logical_bytes``
                from a rank to another, on the link that two ranks on ``nodes`` have.
            logical_bytes: nccl-tests' S (:class:`~commlayer.scheduler.traffic.Traffic`).
            nodes: ranks of the group on each domain (``Cluster.nodes_of``).
            lane: others may go before it; "": none does.

        Raises:
            PlanError: nothing that the policy allows can be priced on this cluster.
        """
        known = self._by_identity.get(id(nodes))
        times = known[1] if known is not None else self._of(nodes)
        key = (collective, logical_bytes, lane)
        found = times.get(key)
        if found is None:
            found = times[key] = self._price(collective, logical_bytes, nodes, lane)
        return found

    def decide(self, collective: str, logical_bytes: float, nodes: tuple[int, ...], lane: str = "") -> Decision:
        """The decision for one call: plan, bottleneck, alternatives, reason. As :meth:`us`, but not for send_recv.

        A group of one moves nothing: its plan is flat, of no bytes.
        """
        size = math.ceil(logical_bytes) if sum(nodes) > 1 else 0
        key = (collective, size, nodes, lane)
        found = self._decisions.get(key)
        if found is None:
            decision = choose(Traffic.on_nodes(*key), self.cluster.profile_of(nodes), self.policy)
            found = self._decisions.add(key, decision)
        return found

    def over(self, span: Span, logical_bytes: int, nodes: tuple[int, ...]) -> tuple[Plan, float]:
        """The plan of an all_to_all_v over the rails, or inside the nodes, of a group on ``nodes``, and its time in µs."""
        found = self._over.get((span, logical_bytes, nodes))
        if found is None:
            plan = exchange_over(span, nodes, logical_bytes)
            timed = plan, price(plan, self.cluster.profile_of(nodes)).total_us
            found = self._over.add((span, logical_bytes, nodes), timed)
        return found

    def _of(self, nodes: tuple[int, ...]) -> _Times:
        times = self._times.setdefault(nodes, {})
        if len(self._by_identity) >= _MOST_IDENTITIES:
            self._by_identity.clear()
        self._by_identity[id(nodes)] = (nodes, times)
        return times

    def _price(self, collective: str, logical_bytes: float, nodes: tuple[int, ...], lane: str) -> float:
        if sum(nodes) == 1 or not logical_bytes:
            return 0.0
        profile = self.cluster.profile_of(nodes)
        if collective != "send_recv":
            traffic = Traffic.on_nodes(collective, math.ceil(logical_bytes), nodes, lane)
            return choose(traffic, profile, self.policy).predicted_us
        if sum(nodes) != 2:
            raise PlanError(f"send_recv: expected two ranks, nodes (2,) or (1, 1), got {nodes}")
        link = link_over(nodes)
        curve = profile.find("send_recv", link, 2)
        # Measured profiles have none. Two ranks that exchange S send S/2 each.
        return (
            curve.at(logical_bytes) if curve is not None else profile.curve("all_to_all", link, 2).at(2 * logical_bytes)
        )
