"""The ways of tokens to their experts by a library's kernels: a token crosses once to each node that holds any of its experts,
and is passed on inside it, over NVLink, to each rank that holds any.

Rows cross the network and are passed on at the same time, so a call takes the longer of the two (:meth:`TokenRoutes.us`). On how
many nodes and ranks a token has experts is expected, all choices being as likely
(:func:`~commlayer.scheduler.rails.distinct_nodes`), within a router's limit of groups where the model has one, or as popular as
was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commlayer.profiles.errors import DispatchError
from commlayer.profiles.links import Resource
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.declared_links import FABRICS
from commlayer.scheduler.mapping.dispatch_kernels import DispatchKernels
from commlayer.scheduler.mapping.dispatch_levels import parts_of_token
from commlayer.scheduler.mapping.dispatch_times import DispatchKey, MeasuredGroup
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.mapping.step_collectives import StepCollective, rows_of_rank

__all__ = ["TokenRoutes"]


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    """The ways of the tokens of one micro-batch on one rank of an EP group that lies evenly on nodes.

    ``num_nodes``, ``ranks_per_node``: of the group. ``nodes``, ``ranks``: on how many of either a token has an expert, as
    expected; of the busiest rank, where routing is uneven. ``row_bytes``: of a token that comes home, ``out_bytes`` of one, or of
    a gradient, on its way to the experts. ``routed``: elements of a row, experts of a token, and experts.
    """

    kernels: DispatchKernels
    num_nodes: int
    ranks_per_node: int
    tokens: int
    nodes: float
    ranks: float
    row_bytes: int
    out_bytes: int
    routed: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def of(
        cls, kernels: DispatchKernels, job: Job, setup: Setup, shape: tuple[int, ...], software: Software
    ) -> TokenRoutes | None:
        """The ways of a setup whose EP group lies as ``shape`` on nodes; None where such kernels do not dispatch."""
        model, count = job.model, len(shape)
        is_flat_kind = setup.exchange == "all_to_all" and setup.etp == 1 and job.capacity_factor is None
        if not is_flat_kind or setup.ep == 1 or len(set(shape)) > 1 or model.experts % setup.ep:
            return None
        nodes, ranks = (
            min(parts, parts_of_token(job, parts) * min(job.imbalance, setup.ep)) for parts in (count, setup.ep)
        )
        tokens = rows_of_rank(job, setup) * setup.micro_batch
        home, out = (software.row_bytes(model.routed_hidden, to_experts=way) for way in (False, True))
        routed = model.routed_hidden, model.top_k, model.experts
        return cls(kernels, count, shape[0], tokens, nodes, ranks, home, out, routed)

    @property
    def sent_rows(self) -> float:
        """Rows that a rank's tokens are at the ranks of their experts, each once a rank, its own included."""
        return self.tokens * self.ranks

    @property
    def network_rows(self) -> float:
        """Rows that cross a rank's card: a token once for each node but its own."""
        return self.tokens * self.nodes * (self.num_nodes - 1) / self.num_nodes

    def us(self, cluster: Cluster, *, to_experts: bool = False) -> float:
        """The time of one call, µs: the longer of its two ways, with the latencies of the links that it uses.

        Raises PlanError for a measured cluster, whose curves are of other calls, where the kernels were
        not measured; DispatchError for a call that a table of times does not have.
        """
        row_bytes = self.out_bytes if to_experts else self.row_bytes
        if self.kernels.measured is not None:  # of so many tokens that their rows are as many
            gpu = cluster.gpu.name.partition(" ")[0]
            group = MeasuredGroup(gpu, self.num_nodes, self.ranks_per_node, *self.routed)
            way: Literal["dispatch", "combine"] = "dispatch" if row_bytes < self.row_bytes else "combine"
            key = DispatchKey(group, way, self.kernels.multiprocessors(self.num_nodes))
            curve, ranks = self.kernels.measured.curve(key), self.ranks
            if self.num_nodes > 1:  # of nodes or of ranks, whichever a token has more of than the table's
                ranks = max(ranks, group.ranks_of_token * self.nodes / group.nodes_of_token)
            return curve.at(self.tokens * ranks * row_bytes)
        longest, latency_us = 0.0, 0.0
        # what comes over the rail goes to each other rank of the node
        inside_rows = self.sent_rows * (self.ranks_per_node - 1) / self.ranks_per_node
        inside = cluster.link(Resource.INTRA).used_by(self.ranks_per_node)
        ways = (
            (Resource.INTER, self.network_rows, self.kernels.network),
            (Resource.INTRA, inside_rows, inside * self.kernels.inside_of(cluster.gpu.architecture)),
        )
        for resource, rows, reached in ways:
            if rows:
                size = self.kernels.sent_bytes(row_bytes, crosses=resource is Resource.INTER)
                latency_us += cluster.link(resource).latency_us
                longest = max(longest, rows * size / (reached * cluster.peaks.of(resource) * 1e3))
        return longest + latency_us

    def call_us(self, exchange: StepCollective, cluster: Cluster) -> float:
        """The time of an exchange that these kernels take, µs.

        Raises PlanError for a measured cluster; DispatchError between nodes whose network has no RDMA, and where a thread of the
        host has to post for kernels that no published rate says so of.
        """
        fabric = FABRICS.get(cluster.fabric)
        if self.num_nodes > 1 and fabric is not None and not fabric.has_rdma:
            raise DispatchError(
                f"{self.kernels.name} needs RDMA between nodes, which {cluster.name} has not ({fabric.words}): take another "
                "dispatcher, or experts inside a node"
            )
        if self.kernels.measured is not None and self.are_posted(cluster):
            raise DispatchError(
                f"{self.kernels.measured.source} does not name its network: {cluster.name} has {FABRICS[cluster.fabric].words}, "
                "where a thread of the host posts what crosses; take experts inside a node, or --dispatcher "
                f"{self.kernels.name} by its published rates"
            )
        prepared_us = self.kernels.prepare_us if exchange.name.partition("_")[::2] == ("dispatch", "") else 0.0
        to_experts = _goes_to_experts(exchange)
        us = self.us(cluster, to_experts=to_experts)
        if self.are_posted(cluster):
            ranks = self.num_nodes * self.ranks_per_node
            post_us = self.kernels.post_us(self.network_rows, ranks, cluster.gpu.architecture, to_experts=to_experts)
            # The barriers around a call go the same way (DeepEP, internode.cu: notify_dispatch has three, cached_notify two).
            latency_us = cluster.link(Resource.INTER).latency_us
            us = max(us, post_us + latency_us) + (3 if prepared_us else 2) * latency_us
        return us + prepared_us

    def are_posted(self, cluster: Cluster) -> bool:
        """Whether a thread of the host posts what goes to other nodes."""
        fabric = FABRICS.get(cluster.fabric)
        return self.num_nodes > 1 and fabric is not None and fabric.by_host

    def replaced(self, exchanges: tuple[StepCollective, ...]) -> tuple[StepCollective, ...]:
        """Put these kernels' rows in place of the flat ones to the experts and back; weights travel with them."""
        return tuple(
            each.renamed("", logical_bytes=round(self.sent_rows * self.bytes_of(each))) if self.takes(each) else each
            for each in exchanges
            if not each.name.startswith("dispatch_weights")
        )

    def bytes_of(self, exchange: StepCollective) -> int:
        """Bytes of a row in a call."""
        return self.out_bytes if _goes_to_experts(exchange) else self.row_bytes

    def takes(self, exchange: StepCollective) -> bool:
        """Whether an exchange goes by these kernels."""
        is_rows = exchange.name.partition("_")[0] in ("dispatch", "combine")
        return is_rows and exchange.axis == "ep" and exchange.collective == "all_to_all_v"

    def note(self) -> str:
        """The way of tokens in words, for people to read."""
        others, ranks = self.num_nodes - 1, self.num_nodes * self.ranks_per_node
        across = (
            f"crosses to {self.nodes * others / self.num_nodes:.2g} of {others} other nodes, and " if others else ""
        )
        held = self.kernels.multiprocessors(self.num_nodes)
        return (
            f"{self.kernels.name}: a token {across}goes to {self.ranks:.2g} of {ranks} ranks; its kernels hold {held} "
            "multiprocessors, which what is computed beside them lacks"
            + (f"; times of its calls by {self.kernels.measured.source}" if self.kernels.measured else "")
            + (f"; assumed: {self.kernels.assumed}" if self.kernels.assumed else "")
        )


def _goes_to_experts(exchange: StepCollective) -> bool:
    """Tokens by dispatch, and gradients by combine's way back."""
    kind, _, suffix = exchange.name.partition("_")
    return (kind == "dispatch") is not suffix.startswith("gradient")
