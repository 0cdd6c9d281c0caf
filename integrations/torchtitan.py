"""torchtitan with our token dispatcher, by its own override: no file of it changes.

    COMMLAYER_AS=nccl torchrun … -m torchtitan.train … \
      --override.imports commlayer.integrations.torchtitan.token_dispatcher

``COMMLAYER_AS`` (gloo, or nccl) has its groups made by the backend ``commlayer``; the override puts
:class:`TitanTokens` where the configuration has ``AllToAllTokenDispatcher``. torchtitan 0.3 is
loaded when it is there: without it this module has no override, and imports.

What torchtitan expects of a dispatcher (its ``models/common/token_dispatcher.py``): ``dispatch``
brings rows sorted by expert, and how many each local expert has; ``combine`` brings their outputs
back, each times its score. ``wire_meshes`` comes once for each layer, with the mesh of expert
parallelism, or None.

Shapes: T tokens of this rank, K choices of each, N = T·K, R rows that this rank's experts receive,
H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from commlayer.integrations.groups import expert_communicator, planned_from, say_first
from commlayer.integrations.moe.choice_rows import moves_choices, return_choices, send_choices
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.handle import DispatchHandle
from commlayer.profiles.errors import UsageError

__all__ = ["SentTokens", "TitanTokens"]


@dataclass(frozen=True, eq=False)
class SentTokens:
    """The tokens that a dispatch has sent, for their combine. ``token_of_row`` [N] and ``scores``
    [N] are of rows of choices, sorted by expert; where choices have no rows of their own
    ``weights`` [T, K] are those of all."""

    handle: DispatchHandle
    token_of_row: torch.Tensor | None
    scores: torch.Tensor | None
    weights: torch.Tensor


class TitanTokens:
    """Dispatch and combine of one layer over torchtitan's group of expert parallelism.

    Args:
        num_experts: of all ranks; the group divides it.
        group: of backend ``commlayer``.
        kind, wire: as for :class:`~commlayer.integrations.TokenDispatcher`.

    Raises:
        GroupError: the group is another backend's.
        UsageError: the group does not divide the experts.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, *, kind: str = "auto", wire: str | None = None
    ) -> None:
        communicator = expert_communicator(
            group,
            "torchtitan's group of expert parallelism",
            f"start the job with COMMLAYER_AS={dist.get_backend(group)}, so that it is made by commlayer",
        )
        if num_experts % group.size():
            raise UsageError(f"{num_experts} experts over EP {group.size()}: torchtitan wants as many on each rank")
        self.tokens = TokenDispatcher(num_experts, ep=communicator, kind=kind, wire=wire, used_by="torchtitan")

    def dispatch(
        self, x: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, SentTokens]:
        """Send ``x`` [T, H] to the ``experts`` [T, K] of its choices: rows [R, H] by expert, how
        many each has, and what the combine needs. ``scores`` [T, K] are applied there.
        Collective."""
        tokens, top_k = self.tokens, experts.shape[1]
        handle = tokens.prepare(experts.to(torch.int64), like=x, weights=scores)
        decision, group = tokens.decision, tokens.grid.all
        assert decision is not None  # of the call that was just prepared
        say_first(
            "torchtitan",
            lambda: f"torchtitan's tokens go over {group.size} ranks by {decision.name}, planned {planned_from(group)}",
        )
        if moves_choices(handle):
            order = torch.argsort(experts.reshape(-1), stable=True)
            token_of_row = order // top_k
            rows = send_choices(x[token_of_row], handle)
            expert_rows = handle.chunks[0].expert_rows
            sent = SentTokens(handle, token_of_row, scores.reshape(-1)[order], scores)
        else:
            rows, expert_rows = tokens.dispatch(x, handle)
            sent = SentTokens(handle, None, None, scores)
        return rows, torch.tensor(expert_rows, dtype=torch.int64, device=x.device), sent

    def combine(self, outputs: torch.Tensor, sent: SentTokens, x: torch.Tensor) -> torch.Tensor:
        """Bring the experts' ``outputs`` [R, H] back: each choice times its score, summed for each
        token of ``x``: [T, H]. Collective."""
        if sent.token_of_row is None or sent.scores is None:
            return self.tokens.combine(outputs, sent.handle, sent.weights)
        back = return_choices(outputs, sent.handle)
        scored = (back.to(torch.float32) * sent.scores.reshape(-1, 1)).to(back.dtype)
        index = sent.token_of_row.reshape(-1, 1).expand(-1, x.shape[-1])
        # torchtitan's sum of rows for each token, in its order.
        scatter_add: Any = import_module("torchtitan.ops.scatter_add")
        summed: torch.Tensor = scatter_add.deterministic_scatter_add(torch.zeros_like(x), index, scored)
        return summed


def _register() -> Any:
    """Make the dispatcher's class, of torchtitan's, and register its override; returns the
    override's function."""
    try:
        titan: Any = import_module("torchtitan.models.common.token_dispatcher")
        overrides: Any = import_module("torchtitan.config.override")
        stock: Any = titan.AllToAllTokenDispatcher
        stock_config: Any = stock.Config
    except (ImportError, AttributeError) as error:
        raise UsageError(f"commlayer's override needs torchtitan 0.3, and another is installed: {error}") from error

    class CommlayerTokenDispatcher(stock):  # type: ignore[misc]  # torchtitan's, of which nothing is known here
        """The dispatcher of an MoE layer: :class:`TitanTokens` where experts are on several ranks,
        torchtitan's own elsewhere."""

        @dataclass(kw_only=True, slots=True)
        class Config(stock_config):  # type: ignore[misc]
            """The stock configuration, and ``kind`` and ``wire`` of :class:`TitanTokens`."""

            kind: str = "auto"
            wire: str | None = None

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._kind, self._wire = config.kind, config.wire
            self._tokens: TitanTokens | None = None

        def wire_meshes(self, *, ep_mesh: Any) -> None:
            """Take the mesh of expert parallelism; None: all experts are here."""
            super().wire_meshes(ep_mesh=ep_mesh)
            if ep_mesh is None:
                self._tokens = None
            else:
                self._tokens = TitanTokens(self.num_experts, ep_mesh.get_group(), kind=self._kind, wire=self._wire)

        def dispatch(self, x: Any, scores: Any, experts: Any, counts: Any) -> Any:
            """Send tokens to their experts; ``counts`` of this rank's choices are not needed."""
            if self._tokens is None:
                return super().dispatch(x, scores, experts, counts)
            if import_module("spmd_types").is_type_checking():
                raise UsageError(
                    "debug.spmd_typechecking follows a tensor through torchtitan's own exchanges, and not "
                    "through commlayer's: leave it off, or the override out"
                )
            return self._tokens.dispatch(x, scores, experts)

        def combine(self, outputs: Any, metadata: Any, x: Any) -> Any:
            """Bring the experts' outputs back."""
            return (
                super().combine(outputs, metadata, x)
                if self._tokens is None
                else self._tokens.combine(outputs, metadata, x)
            )

    def token_dispatcher(cfg: Any, *, kind: str = "auto", wire: str | None = None) -> Any:
        return overrides.derive(cfg, CommlayerTokenDispatcher.Config, kind=kind, wire=wire)

    # torchtitan finds an override by the name and module of its function. Exactly this
    # configuration: one that is derived from it pads rows for quantised experts, which ours does
    # not.
    registered: Any = overrides.override(
        target=stock_config, exact=True, description="Tokens by commlayer's dispatcher."
    )(token_dispatcher)
    return registered


if find_spec("torchtitan") is not None:
    token_dispatcher = _register()
    """The override: torchtitan's configuration of a dispatcher becomes ours."""
