"""A transformer layer with a mixture of experts, on a folded mesh.

Activations are [rows, B, hidden]: this rank's rows of the sequence by
:func:`~examples.context_parallel.split_sequence` (zigzag over cp, then consecutive over tp) of its
data-parallel part of the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.parameter_marks import mark_replicated
from commlayer.scheduler.placement.spilling import Spilling
from examples.attention import ParallelAttention
from examples.context_parallel import positions, split_sequence
from examples.layer_wires import LaneWires
from examples.norm import RMSNorm
from examples.pass_parts import Parts, carrying

__all__ = ["MoETransformerLayer", "sequence_groups"]


def sequence_groups(mesh: FoldedMesh | None) -> tuple[GroupCommunicator, GroupCommunicator]:
    """The ranks that share a sequence, as layers take them: tp and cp."""
    if mesh is None:
        return GroupCommunicator(None, "tp"), GroupCommunicator(None, "cp")
    return GroupCommunicator(mesh.group("tp"), "tp"), GroupCommunicator(mesh.group("cp"), "cp")


class MoETransformerLayer(nn.Module):
    """A pre-norm transformer layer: ``y = x + attention(norm(x))``, then ``y + moe(norm(y))``, with RMSNorm.

    Weights are the same under every mapping for one seed, and so are, up to rounding, outputs and gradients, once these are
    summed (:func:`~commlayer.integrations.gradients.synchronise_gradients`). Choices that a capacity drops depend on the
    tokens that compete: under ``drop_scope="sequence"`` those of one data-parallel rank, under ``subsequence`` of one rank.

    Args:
        hidden: size of an activation.
        num_heads: query heads.
        num_kv_heads: key-value heads; None: as many.
        width: inner width of an expert.
        router: how tokens choose experts. Losses and the bias of loss-free balancing look at the tokens of the whole stage.
        mesh: the groups; None: everything is on this rank.
        attention: ``ulysses`` or ``tensor``, see :class:`~examples.attention.ParallelAttention`.
        shared_width, dispatch, chunks, weights_at, spare_slots, spilling: see
            :class:`~commlayer.integrations.moe.layer.MoELayer`.
        rope_base: base of rotary position embeddings; None: no rotation.
        seed: of all weights.
        wires: formats in which tokens and activations may travel; ``dp`` is not the layer's.

    Raises:
        UsageError: sizes that do not go together, or with the mesh.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int | None,
        width: int,
        router: RouterConfig,
        *,
        mesh: FoldedMesh | None = None,
        attention: Literal["ulysses", "tensor"] = "ulysses",
        shared_width: int = 0,
        dispatch: Literal["all_to_all", "all_gather", "two_level", "auto"] = "auto",
        chunks: int | Literal["auto"] = "auto",
        weights_at: Literal["combine", "experts"] = "combine",
        spare_slots: int | None = None,
        spilling: Spilling | str | None = None,
        rope_base: float | None = 10_000.0,
        seed: int = 0,
        wires: LaneWires | None = None,
    ) -> None:
        super().__init__()
        wires = LaneWires() if wires is None else wires
        self.tp, self.cp = sequence_groups(mesh)
        self.norm_1 = RMSNorm(hidden)
        self.attention = ParallelAttention(
            hidden,
            num_heads,
            num_kv_heads,
            tp=self.tp,
            cp=self.cp,
            kind=attention,
            rope_base=rope_base,
            generator=torch.Generator().manual_seed(4 * seed),
            wire=wires.tp,
            gradient_wire=wires.tp_gradient,
        )
        self.norm_2 = RMSNorm(hidden)
        self._places = mesh is not None and router.drop_scope == "sequence" and not router.is_dropless
        self.moe = MoELayer(
            hidden,
            width,
            router,
            mesh=mesh,
            shared_width=shared_width,
            dispatch=dispatch,
            chunks=chunks,
            weights_at=weights_at,
            spare_slots=spare_slots,
            spilling=spilling,
            sequence=None if mesh is None else GroupCommunicator(mesh.group("tp_cp"), "ep"),
            balance=None if mesh is None else GroupCommunicator(mesh.group("stage"), "dp"),  # of the gradients' group
            seed=4 * seed + 1,  # and the shared experts the one after
            wire=wires.ep,
        )
        # Every tp rank has these whole, and uses them on its own rows; so of the MoE layer's own.
        for norm in (self.norm_1, self.norm_2):
            mark_replicated(norm)

    def forward(self, x: torch.Tensor, seq_len: int | None = None, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layer on this rank's rows [rows, B, hidden]; the result has the same shape. Collective over the
        stage, also with no rows or an empty batch, or where all is padding.

        Args:
            seq_len: rows of the whole sequence. None: all ranks have equally many, which nobody checks.
            valid: [S, B] bool of the whole sequence, the same on all ranks that share it: True where a token is no padding;
                None: all are valid. No valid token attends to padding, and no expert works on it.

        Raises TensorError where ``x`` does not have this rank's rows, or ``valid`` not the sequence's.
        """
        x = x + self.attention(self.norm_1(x), seq_len, valid)
        y: torch.Tensor = x + self.moe(self.norm_2(x), self._positions(x, seq_len), self._mine(valid))
        return y

    def parts(
        self, x: torch.Tensor, seq_len: int | None = None, valid: torch.Tensor | None = None
    ) -> Parts[torch.Tensor]:
        """The parts of the layer's forward pass; see :meth:`commlayer.integrations.moe.layer.MoELayer.parts`."""
        x = x + self.attention(self.norm_1(x), seq_len, valid)
        moe = self.moe.parts(self.norm_2(x), self._positions(x, seq_len), self._mine(valid))
        mixed, (x,) = yield from carrying(moe, x)
        return x + mixed

    def scale_losses(self, *, step_tokens: int | torch.Tensor) -> None:
        """Make the router's losses add up to one mean over a step, where gradients are summed over the stage: each micro-batch's
        count by its share of ``step_tokens``, the number of valid tokens in the whole batch (at least 1).
        """
        router = self.moe.router
        router.step_tokens, router.loss_scale = (
            step_tokens,
            1.0 / (1 if router.balance is None else router.balance.size),
        )

    def _mine(self, valid: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's rows of a mask of the whole sequence."""
        return None if valid is None else split_sequence(valid, cp=self.cp, tp=self.tp)

    def _positions(self, x: torch.Tensor, seq_len: int | None) -> torch.Tensor | None:
        """Where each token lies among those that compete with it, where they do: ranks do not hold consecutive slices."""
        if not self._places:
            return None
        seq_len = x.shape[0] * self.tp.size * self.cp.size if seq_len is None else seq_len
        rows = positions(seq_len, cp=self.cp, tp=self.tp, device=x.device)
        return (rows.unsqueeze(1) * x.shape[1] + torch.arange(x.shape[1], device=x.device)).flatten()
