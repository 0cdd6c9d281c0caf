"""A transformer layer with a mixture of experts computes the same on every mapping as on one process: values and gradients.

The reference is the layer on one process (``mesh=None``), which is itself held against the definition, written out. With pp
there are as many layers as stages. Errors are the largest difference over the largest magnitude in the reference's whole
tensor: sums in another order make small elements of a tensor as wrong as large ones. The data's seed is one under which no
whole tensor cancels to almost nothing (the gradient of a router that saw a single token may); that what remains is
rounding, FP64 shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from reference_moe import reference_moe
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.gradients import gradient_axes, synchronise_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.shares import even_rows
from commlayer.profiles.errors import UsageError
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from examples.attention import apply_rope
from examples.block import MoETransformerLayer, sequence_groups
from examples.context_parallel import split_sequence
from examples.pipeline_schedules import run_pipeline

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
HIDDEN, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 12


@dataclass(frozen=True)
class Case:
    """A mapping, and the layer and batch that it shall not change. ``experts`` over EP 3 do not divide; nor do ``batch``
    over dp 3 and more, some of whose ranks have nothing."""

    degrees: tuple[tuple[str, int], ...] = ()
    rows: int = 16
    batch: int = 4
    micro_batches: int = 1
    layer: dict[str, Any] = field(default_factory=dict, hash=False)
    router: dict[str, Any] = field(default_factory=dict, hash=False)
    one_expert: bool = False
    num_layers: int = 1
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = [f"{name} {size}" for name, size in self.degrees]
        return " ".join(
            words + [f"{k}={v}" for k, v in vars(self).items() if k != "degrees" and v != getattr(Case, k, {})]
        )

    def layers(self, mesh: FoldedMesh | None, here: range) -> list[MoETransformerLayer]:
        options = {"shared_width": 8, "seed": 5, **self.layer}
        seed = options.pop("seed")
        config = RouterConfig(**{"num_experts": 8, "top_k": 2, **self.router})
        made = [
            MoETransformerLayer(HIDDEN, HEADS, KV_HEADS, WIDTH, config, mesh=mesh, seed=seed + index, **options).to(
                self.dtype
            )
            for index in here
        ]
        for layer in made:
            layer.moe.router.weight.data.mul_(20)  # drawn small: without this, all experts are nearly as good
            if self.one_expert:
                layer.moe.router.weight.data.zero_()  # a tie: the lowest indices
        return made

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations [S, B, H] and the gradient of the output: both whole."""
        generator = torch.Generator().manual_seed(2)
        x, g = torch.randn(2, self.rows, self.batch, HIDDEN, generator=generator).to(self.dtype)
        return x, g


@dataclass(frozen=True)
class Expected:
    output: torch.Tensor
    of_x: torch.Tensor
    of_parameters: list[dict[str, torch.Tensor]]


def expected(case: Case) -> Expected:
    """On one process."""
    return _expected(repr(replace(case, degrees=(), micro_batches=1)), case)


_KNOWN: dict[str, Expected] = {}


def _expected(key: str, case: Case) -> Expected:
    if key not in _KNOWN:
        layers = case.layers(None, range(case.num_layers))
        x, gradient = case.data()
        y = x.requires_grad_()
        for layer in layers:
            layer.scale_losses(step_tokens=max(1, case.rows * case.batch))
            y = layer(y)
        y.backward(gradient)
        for layer in layers:
            synchronise_gradients(layer, None)
        found = [{name: p.grad for name, p in layer.named_parameters() if p.grad is not None} for layer in layers]
        assert x.grad is not None
        _KNOWN[key] = Expected(y.detach(), x.grad, found)
    return _KNOWN[key]


def run_case(case: Case) -> list[str]:
    """The differences on this rank. Collective over all ranks."""
    with FoldedMesh(dict(case.degrees)) as mesh:
        return run_on(mesh, case)


def run_on(mesh: FoldedMesh, case: Case) -> list[str]:
    pp = GroupCommunicator(mesh.group("pp"), "pp")
    tp, cp = sequence_groups(mesh)
    (layer,) = case.layers(mesh, range(pp.rank, pp.rank + 1))
    layer.scale_losses(step_tokens=max(1, case.rows * case.batch))

    def mine(whole: torch.Tensor) -> torch.Tensor:
        return split_sequence(whole.split(even_rows(case.batch, mesh.size("dp")), dim=1)[mesh.rank("dp")], cp=cp, tp=tp)

    x, gradient = (mine(whole) for whole in case.data())
    sizes = even_rows(x.shape[1], case.micro_batches)
    xs = [part.clone().requires_grad_() for part in x.split(sizes, dim=1)]
    gradients = gradient.split(sizes, dim=1)
    outputs = []

    def stage(m: int, received: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = layer(xs[m] if received is None else received, case.rows)
        if pp.rank < pp.size - 1:
            return y
        outputs.append(y.detach())
        loss: torch.Tensor = (y * gradients[m]).sum()
        return loss

    run_pipeline(stage, pp, [part.shape for part in xs], dtype=case.dtype)
    synchronise_gradients(layer, mesh)
    wanted = expected(case)
    errors = {}
    if pp.rank == pp.size - 1:
        errors["output"] = error(torch.cat(outputs, 1), mine(wanted.output), wanted.output)
    if pp.rank == 0:
        of_x = torch.cat([part.grad for part in xs if part.grad is not None], 1)
        errors["gradient of x"] = error(of_x, mine(wanted.of_x), wanted.of_x)
    for name, parameter in layer.named_parameters():
        whole = wanted.of_parameters[pp.rank][name]
        # The softmax over one key is 1, whatever the scores: then queries and keys have gradients of 0, but for rounding.
        is_nothing = case.rows == 1 and name in ("attention.q.weight", "attention.k.weight")
        beside = wanted.of_parameters[pp.rank]["attention.v.weight"] if is_nothing else whole
        errors[name] = error(parameter.grad, shard(layer, name, whole), beside)
    bad = {name: size for name, size in errors.items() if not size <= TOLERANCE[case.dtype]}
    return [f"rank {dist.get_rank()}, {case}: {name} off by {size:.2g}" for name, size in bad.items()]


def error(got: torch.Tensor | None, wanted: torch.Tensor, whole: torch.Tensor) -> float:
    assert got is not None
    assert got.shape == wanted.shape, f"{got.shape}, expected {wanted.shape}"
    if not got.numel():
        return 0.0
    return float((got - wanted).abs().max() / whole.abs().max().clamp(min=1e-30))


def shard(module: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a whole parameter's gradient."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, GroupedExperts):
        here = whole[owner.first : owner.first + owner.count]
        dim = 2 if name.endswith("w_down") else 1
        size = here.shape[dim] // getattr(owner, name.rpartition(".")[2]).shape[dim]
        etp_rank = owner._shard.start // (owner._shard.stop - owner._shard.start)
        return here.chunk(size, dim)[etp_rank]
    return owner.shard(whole) if hasattr(owner, "shard") else whole  # type: ignore[operator]


def mapping(**degrees: int) -> Case:
    return Case(tuple(degrees.items()), num_layers=degrees.get("pp", 1))


MAPPINGS = {
    1: [mapping()],
    2: [
        mapping(),  # dp 2, edp 2
        mapping(ep=2),
        mapping(etp=2),
        mapping(tp=2),
        mapping(tp=2, ep=2),
        mapping(tp=2, etp=2),
        mapping(cp=2),
        mapping(cp=2, ep=2),
        mapping(pp=2),
    ],
    4: [
        mapping(ep=4),
        mapping(etp=4),
        mapping(tp=4, ep=2),
        mapping(cp=4, ep=4),
        mapping(tp=2, cp=2),
        mapping(tp=2, cp=2, ep=4),  # EP across TP and CP
        mapping(tp=2, cp=2, ep=2, etp=2),
        mapping(cp=2, ep=4),  # across CP and DP
        mapping(tp=2, ep=4),  # across TP and DP
        mapping(tp=2, etp=2, ep=2),
        mapping(pp=2, tp=2, ep=2),
        mapping(pp=2, cp=2, etp=2),
        mapping(pp=4),
    ],
    8: [
        mapping(tp=2, cp=2, ep=4),
        mapping(tp=2, cp=2, ep=2, etp=2),
        mapping(tp=4, cp=2, ep=4, etp=2),
        mapping(cp=4, ep=4),
        mapping(pp=2, tp=2, cp=2, ep=4),
        mapping(pp=2, tp=2, ep=2, etp=2),
    ],
    16: [
        mapping(tp=2, cp=2, pp=2, ep=4),
        mapping(tp=4, cp=4, ep=4, etp=4),
        mapping(tp=2, cp=4, ep=4, etp=2),
        mapping(pp=4, tp=2, ep=4),
    ],
}


def run_cases(cases: list[Case]) -> list[str]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    wrong = [line for case in cases for line in run_case(case)]
    dist.destroy_process_group()
    return wrong


def run(cluster: ClusterFactory, world: int, cases: list[Case]) -> None:
    prepare(cases)
    nodes = 2 if world >= 4 else 1
    found = cluster(nodes=nodes, ranks_per_node=world // nodes).run(run_cases, cases)
    assert [line for lines in found for line in lines] == []


def prepare(cases: list[Case]) -> None:
    """The references, before the fork: once, not in each rank."""
    torch.set_num_threads(1)
    for case in cases:
        expected(case)


@pytest.mark.parametrize("world", MAPPINGS)
def test_every_mapping_computes_the_same(emulated_cluster: ClusterFactory, world: int) -> None:
    run(emulated_cluster, world, MAPPINGS[world])


# Edges


def edges(**degrees: int) -> list[Case]:
    """Cases that may go wrong, on a mapping whose tp · cp and dp have room for it."""
    base = mapping(**degrees)
    changes: list[dict[str, Any]] = [
        {"rows": 13},
        {"rows": 1, "batch": 1},  # one token: all ranks but one have none
        {"rows": 3, "batch": 1},
        {"batch": 1},  # an empty batch on all of dp but one
        {"batch": 0},
        {"one_expert": True, "router": {"top_k": 1}},  # and no tokens for the others
        {"one_expert": True, "rows": 5, "layer": {"chunks": 4}},
        {"router": {"num_experts": 5}},  # EP 2 and 4 do not divide them
        {"router": {"num_experts": 4, "top_k": 4}},
    ]
    return [replace(base, **change) for change in changes]


EDGES = [
    *edges(tp=2, cp=2, ep=4),
    *edges(tp=2, etp=2, ep=2),
    *edges(ep=4),
    *edges(pp=2, cp=2, ep=2),
]
THIRDS = [replace(case, rows=14) for case in (mapping(ep=3), mapping(tp=3, ep=3), mapping(cp=3, etp=3), mapping(pp=3))]
"""Nothing divides: 4 samples, 14 rows, 8 experts, 4 and 2 heads, all by 3."""


def test_edges(emulated_cluster: ClusterFactory) -> None:
    run(emulated_cluster, 4, EDGES)


def test_in_double_precision(emulated_cluster: ClusterFactory) -> None:
    cases = [*EDGES[::4], mapping(tp=2, etp=2, ep=2), mapping(pp=2, cp=2, ep=2)]
    run(emulated_cluster, 4, [replace(case, dtype=torch.float64) for case in cases])


def test_three_ranks(emulated_cluster: ClusterFactory) -> None:
    run(emulated_cluster, 3, THIRDS)


# Options


def options() -> Iterator[Case]:
    """The options of a layer, on mappings with and without ETP."""
    folded, sharded = mapping(tp=2, cp=2, ep=4), mapping(tp=2, etp=2, ep=2)
    for case in (folded, sharded):
        for layer in (
            {"attention": "tensor"},
            {"dispatch": "all_gather"},
            {"dispatch": "all_to_all", "chunks": 4},
            {"dispatch": "all_to_all", "chunks": 8, "weights_at": "experts", "shared_width": 0},
            {"rope_base": None},
        ):
            yield replace(case, layer=layer)
        yield replace(case, router={"score": "sigmoid", "num_groups": 4, "top_groups": 2})
        losses = {"aux_loss_coefficient": 3.0, "z_loss_coefficient": 0.1}
        yield replace(case, router={**losses, "device_aux_loss_coefficient": 2.0, "num_devices": 4})
        yield replace(case, router=losses, batch=1)  # some ranks have no tokens to balance
    for policy in ("probability", "position"):  # dropped from a sequence, which zigzag has scattered
        drops = {"capacity_factor": 0.8, "drop_scope": "sequence", "drop_policy": policy}
        yield replace(folded, router=drops)
        yield replace(folded, router=drops, rows=13)
    for number in (2, 3, 4, 5):  # of micro-batches: 5 of 4 samples, so that some have none
        yield replace(mapping(pp=2, tp=2, ep=2), micro_batches=number)
        yield replace(mapping(pp=4), micro_batches=number)
    yield replace(mapping(ep=4), micro_batches=3)


def test_options(emulated_cluster: ClusterFactory) -> None:
    run(emulated_cluster, 4, list(options()))


def test_hierarchical_plans(emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "hierarchical")
    cases = [mapping(tp=2, cp=2, ep=4), replace(mapping(ep=4), layer={"dispatch": "all_to_all", "chunks": 4})]
    prepare(cases)

    def job() -> tuple[list[str], set[str]]:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        reset_stats()
        wrong = [line for case in cases for line in run_case(case)]
        return wrong, {call["plan"] for group in stats()["groups"] for call in group["calls"]}

    for wrong, plans in emulated_cluster(nodes=2, ranks_per_node=2).run(job):
        assert wrong == []
        assert "hierarchical" in plans


# The reference, and the check itself


def definition(layer: MoETransformerLayer, x: torch.Tensor) -> torch.Tensor:
    """The layer on one process, head by head and token by token."""
    head_dim, per_kv = HIDDEN // HEADS, HEADS // KV_HEADS

    def norm(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    normed = norm(x, layer.norm_1.weight)
    where = torch.arange(x.shape[0])
    weights = {name: getattr(layer.attention, name).weight for name in ("q", "k", "v", "out")}
    q, k, v = ((normed @ weights[name].t()).unflatten(2, (-1, head_dim)) for name in ("q", "k", "v"))
    q, k = apply_rope(q, where, 10_000.0), apply_rope(k, where, 10_000.0)
    heads = []
    for head in range(HEADS):
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, head // per_kv]) / head_dim**0.5
        scores = scores.masked_fill(where[None, :, None] < where[None, None, :], float("-inf"))
        heads.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1), v[:, :, head // per_kv]))
    x = x + torch.cat(heads, -1) @ weights["out"].t()
    tokens = norm(x, layer.norm_2.weight).flatten(0, 1)
    best, indices = (tokens @ layer.moe.router.weight.t()).softmax(-1).topk(2)
    experts = layer.moe.experts
    triples = list(zip(experts.w_gate.unbind(), experts.w_up.unbind(), experts.w_down.unbind(), strict=True))
    mixed = reference_moe(tokens, indices, best / best.sum(-1, keepdim=True), triples)
    shared = layer.moe.shared
    assert shared is not None
    mixed = mixed + (F.silu(tokens @ shared.gate.t()) * (tokens @ shared.up.t())) @ shared.down.t()
    return x + mixed.view_as(x)


def test_the_reference_is_the_definition() -> None:
    case = mapping()
    wanted = expected(case)
    (layer,) = case.layers(None, range(1))
    x, gradient = case.data()
    y = definition(layer, x.requires_grad_())
    y.backward(gradient)
    assert error(wanted.output, y.detach(), y.detach()) <= TOLERANCE[case.dtype]
    assert x.grad is not None
    assert error(wanted.of_x, x.grad, x.grad) <= TOLERANCE[case.dtype]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert error(wanted.of_parameters[0][name], parameter.grad, parameter.grad) <= TOLERANCE[case.dtype], name


def test_the_check_can_fail(emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are not summed, or summed over another axis, are found, for every parameter of which there are two."""
    cases = [mapping(tp=2, ep=2), mapping(cp=2)]
    prepare(cases)
    monkeypatch.setitem(globals(), "synchronise_gradients", lambda layer, mesh: None)
    for lines in emulated_cluster(nodes=1, ranks_per_node=2).run(run_cases, cases):
        text = "\n".join(lines)
        for name in ("norm_1.weight", "attention.q.weight", "moe.router.weight", "moe.shared.down", "moe.experts.w_up"):
            assert name in text
        assert "output" not in text
        assert "tp 2 ep 2: moe.experts" not in text  # their gradients are whole already


def test_axes_of_parameters_survive_a_copy() -> None:
    """torch drops the marks of parameters in deepcopy(); a module's own remain."""
    (layer,) = mapping().layers(None, range(1))
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    axes = {axis: [names[id(p)] for p in found] for axis, found in gradient_axes(layer, None).items()}
    assert axes["edp"] == ["moe.experts.w_gate", "moe.experts.w_up", "moe.experts.w_down"]
    assert sum(map(len, axes.values())) == len(names)
    copied = copy.deepcopy(layer)
    names = {id(parameter): name for name, parameter in copied.named_parameters()}
    assert {axis: [names[id(p)] for p in found] for axis, found in gradient_axes(copied, None).items()} == axes


def test_a_pipeline_needs_a_micro_batch() -> None:
    with pytest.raises(UsageError, match="at least one micro-batch"):
        run_pipeline(lambda m, x: torch.zeros(()), GroupCommunicator(None, "pp"), [])
