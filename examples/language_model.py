"""A language model of :class:`~examples.block.MoETransformerLayer`, on any mapping,
with one training step.

Weights, losses and gradients are the same under every mapping, up to rounding, where nothing is
dropped. With a balance loss and several micro-batches they depend on dp: docs/moe_training.md says
why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.gradients import synchronise_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.parameter_marks import mark_replicated
from commlayer.integrations.shares import even_rows
from commlayer.integrations.wire_choice import WireChoice
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.placement.spilling import Spilling
from examples.block import MoETransformerLayer, sequence_groups
from examples.buckets import BUCKET_BYTES, GradientBuckets
from examples.context_parallel import split_sequence
from examples.layer_wires import LaneWires
from examples.linear import ReplicatedLinear
from examples.norm import RMSNorm
from examples.pass_parts import Parts
from examples.pipeline_schedules import Schedule, run_overlapped_pipeline, run_pipeline

__all__ = ["MoELanguageModel", "ModelConfig"]

_NO_LABEL = -100
"""The label of a token whose loss does not count: torch's own default, and what transformers'
collators write."""
_SEEDS = 1_009
"""Between the seeds of two models: layers take consecutive ones."""
_BUCKETS: WeakKeyDictionary[MoELanguageModel, GradientBuckets] = WeakKeyDictionary()
"""Not an attribute of the model: a copy of it, such as an average of weights, has parameters of its
own."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, which is independent of its mapping. Fields that are not explained here
    are those of the layer.

    Attributes:
        vocabulary: how many tokens there are; 256: bytes.
        num_layers: in the whole model.
        seed: of all weights.
        wires: formats in which tokens, activations and gradients may travel.
        schedule: in which order micro-batches go through a pipeline, see
            :mod:`~examples.pipeline_schedules`.
        overlap_gradients: sum gradients in buckets, beside the backward pass
            (:class:`~examples.buckets.GradientBuckets`); else all after it.
        overlap_micro_batches: two go through a stage at a time, so that tokens of one travel while
            the other is computed
            (:func:`~examples.pipeline_schedules.run_overlapped_pipeline`); ``chunks``
            ``auto`` is one then. Make the mesh with ``separate=("etp_ep",)``, or the counts of one
            queue behind the tokens of the other.
        bucket_bytes: the largest size of a bucket.
    """

    router: RouterConfig
    vocabulary: int = 256
    hidden: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int | None = None
    width: int = 128
    shared_width: int = 0
    attention: Literal["ulysses", "tensor"] = "ulysses"
    dispatch: Literal["all_to_all", "all_gather", "two_level", "auto"] = "auto"
    chunks: int | Literal["auto"] = "auto"
    spare_slots: int | None = None
    spilling: Spilling | str | None = None
    rope_base: float | None = 10_000.0
    seed: int = 0
    wires: LaneWires | None = None
    schedule: Schedule = "gpipe"
    overlap_gradients: bool = True
    overlap_micro_batches: bool = False
    bucket_bytes: int = BUCKET_BYTES

    def layer(self, index: int, mesh: FoldedMesh | None) -> MoETransformerLayer:
        """The layer of this index, from 0."""
        return MoETransformerLayer(
            self.hidden,
            self.num_heads,
            self.num_kv_heads,
            self.width,
            self.router,
            mesh=mesh,
            attention=self.attention,
            shared_width=self.shared_width,
            dispatch=self.dispatch,
            chunks=1 if self.overlap_micro_batches and self.chunks == "auto" else self.chunks,
            spare_slots=self.spare_slots,
            spilling=self.spilling,
            rope_base=self.rope_base,
            seed=self.seed * _SEEDS + index + 1,
            wires=self.wires,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _MicroBatch:
    """A micro-batch on one rank: its rows of ``tokens`` and ``labels`` [rows, B]; ``valid`` [S, B]
    of the whole sequences, None without padding. ``num_labels``: that count in the whole step, by
    which the loss is divided."""

    tokens: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor | None
    num_labels: torch.Tensor


class MoELanguageModel(nn.Module):
    """A language model of embedding, MoE layers, norm and (untied) head. In a pipeline, a rank has
    the layers of its stage, the first stage the embedding, and the last one norm and head.

    Args:
        config: the model.
        mesh: the groups; None: everything is on this rank.

    Attributes:
        layers: by their index in the whole model, as text: parameters have the same names under
            every mapping.

    Raises:
        UsageError: fewer layers than stages, or sizes that do not go together.
    """

    def __init__(self, config: ModelConfig, mesh: FoldedMesh | None = None) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.tp, self.cp = sequence_groups(mesh)
        self.pp = GroupCommunicator(None if mesh is None else mesh.group("pp"), "pp")
        if config.num_layers < self.pp.size:
            raise UsageError(
                f"{config.num_layers} layers over pp={self.pp.size}: some stages would have none; use pp="
                f"{config.num_layers} or less"
            )
        self.is_first, self.is_last = self.pp.rank == 0, self.pp.rank == self.pp.size - 1
        generator = torch.Generator().manual_seed(config.seed)
        scale = config.hidden**-0.5  # of every stage, so that the head is drawn from the same state everywhere
        embedding = torch.randn(config.vocabulary, config.hidden, generator=generator) * scale
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=False) if self.is_first else None
        sizes = even_rows(config.num_layers, self.pp.size)
        first = sum(sizes[: self.pp.rank])
        here = range(first, first + sizes[self.pp.rank])
        self.layers = nn.ModuleDict({str(index): config.layer(index, mesh) for index in here})
        for index, layer in zip(here, self._layers(), strict=True):
            if (record := layer.moe.dispatcher.record) is not None:
                record.name = f"layer {index}"  # of the whole model, not of this stage
        self.norm = RMSNorm(config.hidden) if self.is_last else None
        self.head = (
            ReplicatedLinear(config.hidden, config.vocabulary, tp=self.tp, generator=generator)
            if self.is_last
            else None
        )
        for part in (self.embedding, self.norm):
            if part is not None:
                mark_replicated(part)

    def forward(self, x: torch.Tensor, seq_len: int | None = None, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Run this pipeline stage: tokens [rows, B] (first stage) or activations [rows, B, hidden]
        → activations, or (last stage) logits [rows, B, vocabulary]. Rows are this rank's;
        ``seq_len`` and ``valid`` as in the layer. Collective over the stage.
        """
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, seq_len, valid)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def parts(
        self, x: torch.Tensor, seq_len: int | None = None, valid: torch.Tensor | None = None
    ) -> Parts[torch.Tensor]:
        """The parts of :meth:`forward`, for passes that go in turns
        (:mod:`examples.pass_parts`)."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self._layers():
            x = yield from layer.parts(x, seq_len, valid)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def split(self, batch: torch.Tensor) -> torch.Tensor:
        """Take this rank's part [rows, B/dp] of a whole batch [S, B] of tokens or labels. Parts are
        as even as can be; some may be empty. Sends nothing.
        """
        return split_sequence(self._columns(batch), cp=self.cp, tp=self.tp)

    def _columns(self, batch: torch.Tensor) -> torch.Tensor:
        """The sequences [S, B/dp] of a whole batch that this rank works on, with others."""
        dp, rank = (1, 0) if self.mesh is None else (self.mesh.size("dp"), self.mesh.rank("dp"))
        columns: torch.Tensor = batch.split(even_rows(batch.shape[1], dp), dim=1)[rank]
        return columns

    def train_step(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        *,
        valid: torch.Tensor | None = None,
        num_micro_batches: int = 1,
    ) -> torch.Tensor:
        """Run forward pass, backward pass and gradients of a whole batch; return the mean loss over
        its labels, on all ranks alike: the sum over all of them, whichever ranks and micro-batches
        have them, divided by their number.

        Gradients are added to those that are there, and then summed over ranks: call ``zero_grad``
        before. They are views of buckets that the next step uses again. A step that raises leaves
        none; where it raised on some ranks alone, the others may return with NaN in gradients that
        are shared with these.

        Args:
            tokens: [S, B] int64, the same on all ranks.
            labels: [S, B] int64: the token that follows each; −100 where it counts for nothing,
                such as in a prompt.
            valid: [S, B] bool, the same on all ranks: True where a token is no padding; None: all
                are valid. Padding may have any token and any label, which are not looked at. No
                valid token attends to it, no expert works on it, and no loss counts it.
            num_micro_batches: in how many parts each rank's part of the batch goes through the
                pipeline.

        Raises:
            TensorError: shapes that are none. UsageError: no micro-batches. Others as collectives
                do.
        """
        if tokens.dim() != 2 or tokens.shape != labels.shape or not tokens.numel():
            raise TensorError(
                f"expected tokens and labels of one shape [S, B], not empty; got {list(tokens.shape)} and {list(labels.shape)}"
            )
        if valid is not None and (valid.dtype != torch.bool or valid.shape != tokens.shape):
            raise TensorError(
                f"expected valid, True where a token is no padding, as torch.bool of shape {list(tokens.shape)}; got "
                f"{valid.dtype} of shape {list(valid.shape)}"
            )
        if num_micro_batches < 1:
            raise UsageError(f"num_micro_batches must be 1 or more, got {num_micro_batches}")
        wire = None if self.config.wires is None else self.config.wires.dp
        buckets = self._gradient_buckets(wire) if self.config.overlap_gradients else None
        how: dict[str, Any] = {"device": tokens.device, "schedule": self.config.schedule, "gradients": buckets}
        how["dtype"] = next(self.parameters()).dtype
        try:
            if self.config.overlap_micro_batches:
                parts, shapes = self.pipeline_parts(tokens, labels, num_micro_batches, valid)
                losses = run_overlapped_pipeline(parts, self.pp, shapes, **how)
            else:
                stage, shapes = self.pipeline_stage(tokens, labels, num_micro_batches, valid)
                losses = run_pipeline(stage, self.pp, shapes, **how)
        except BaseException:
            if buckets is not None:
                buckets.reset()
            raise
        if buckets is None:
            synchronise_gradients(self, self.mesh, wire)
        else:
            buckets.finish()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=tokens.device)
        loss = loss.to(torch.promote_types(how["dtype"], torch.float32))  # on all stages alike
        if self.mesh is None:
            return loss
        # On the first lane: the step waits for this number alone, and its group may be that of the
        # experts.
        return GroupCommunicator(self.mesh.group("world"), "ep").all_reduce(loss)

    def pipeline_stage(
        self, tokens: torch.Tensor, labels: torch.Tensor, num_micro_batches: int, valid: torch.Tensor | None = None
    ) -> tuple[Callable[[int, torch.Tensor | None], torch.Tensor], list[tuple[int, int, int]]]:
        """Return this rank's stage of a step, and the shape of each micro-batch's activations, as
        :func:`~examples.pipeline_schedules.run_pipeline` takes both. Arguments as of
        :meth:`train_step`.
        """
        batches, shapes = self._micro_batches(tokens, labels, num_micro_batches, valid)

        def stage(m: int, x: torch.Tensor | None) -> torch.Tensor:
            batch = batches[m]
            return self._ended(batch, self(batch.tokens if x is None else x, tokens.shape[0], batch.valid))

        return stage, shapes

    def pipeline_parts(
        self, tokens: torch.Tensor, labels: torch.Tensor, num_micro_batches: int, valid: torch.Tensor | None = None
    ) -> tuple[Callable[[int, torch.Tensor | None], Parts[torch.Tensor]], list[tuple[int, int, int]]]:
        """The same in parts, as
        :func:`~examples.pipeline_schedules.run_overlapped_pipeline` takes both."""
        batches, shapes = self._micro_batches(tokens, labels, num_micro_batches, valid)

        def stage(m: int, x: torch.Tensor | None) -> Parts[torch.Tensor]:
            batch = batches[m]
            y = yield from self.parts(batch.tokens if x is None else x, tokens.shape[0], batch.valid)
            return self._ended(batch, y)

        return stage, shapes

    def _micro_batches(
        self, tokens: torch.Tensor, labels: torch.Tensor, num_micro_batches: int, valid: torch.Tensor | None
    ) -> tuple[list[_MicroBatch], list[tuple[int, int, int]]]:
        """The micro-batches of a step, and the shapes of activations between stages."""
        if valid is not None:
            tokens, labels = tokens.masked_fill(~valid, 0), labels.masked_fill(~valid, _NO_LABEL)
        step_tokens = tokens.numel() if valid is None else valid.sum().clamp(min=1)
        for layer in self._layers():
            layer.scale_losses(step_tokens=step_tokens)
        num_labels = (labels != _NO_LABEL).sum().clamp(min=1)
        own, targets = self.split(tokens), self.split(labels)
        sizes = even_rows(own.shape[1], num_micro_batches)
        masks = [None] * len(sizes) if valid is None else self._columns(valid).split(sizes, dim=1)
        parts = zip(own.split(sizes, dim=1), targets.split(sizes, dim=1), masks, strict=True)
        batches = [_MicroBatch(*part, num_labels) for part in parts]
        return batches, [(*batch.tokens.shape, self.config.hidden) for batch in batches]

    def _ended(self, batch: _MicroBatch, y: torch.Tensor) -> torch.Tensor:
        """Return a stage's result, made of its layers' output ``y``: on the last stage its part of
        the loss."""
        if not self.is_last:
            return y
        targets = batch.labels.flatten()
        return F.cross_entropy(y.flatten(0, 1), targets, ignore_index=_NO_LABEL, reduction="sum") / batch.num_labels

    def _gradient_buckets(self, wire: WireChoice) -> GradientBuckets:
        """The buckets of the last step, unless parameters were replaced or frozen since, or the
        configuration was."""
        buckets, bucket_bytes = _BUCKETS.get(self), self.config.bucket_bytes
        if buckets is None or not buckets.fit(self, bucket_bytes=bucket_bytes, wire=wire):
            if buckets is not None:
                buckets.close()
            buckets = GradientBuckets(self, self.mesh, bucket_bytes=bucket_bytes, wire=wire)
            _BUCKETS[self] = buckets
        return buckets

    def _layers(self) -> list[MoETransformerLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, MoETransformerLayer)]
