"""The router against a slow, obvious reference: loops over tokens and experts, Python floats, no tensors."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, TypeVar

import pytest
import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.balance import Usage, attach_loss, device_balance_loss, expert_balance_loss
from commlayer.integrations.moe.capacity import capacity
from commlayer.integrations.moe.router import Router, RouterConfig, Routing
from commlayer.integrations.moe.scoring import fixed_shape_logits
from commlayer.profiles.errors import DisagreementError, TensorError, UsageError

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small: a second thread would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_router(config: RouterConfig, hidden_size: int = 16, seed: int = 0, **kwargs: Any) -> Router:
    return Router(config, hidden_size, generator=torch.Generator().manual_seed(seed), **kwargs)


def transparent(config: RouterConfig, **kwargs: Any) -> Router:
    """A router whose logits are its input: H = E and the weight is the unit matrix."""
    router = make_router(config, config.num_experts, **kwargs)
    router.load_state_dict({"weight": torch.eye(config.num_experts)}, strict=False)
    return router


def random_tokens(num_tokens: int, hidden_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The reference


@dataclasses.dataclass
class Expected:
    indices: list[list[int]]
    weights: list[list[float]]
    chosen: list[int]
    losses: dict[str, float]


def reference(config: RouterConfig, logits: list[list[float]], bias: list[float], positions: list[int]) -> Expected:
    scores = [reference_scores(config, row) for row in logits]
    indices = [reference_choice(config, row, bias) for row in scores]
    weights = [reference_weights(config, row, chosen) for row, chosen in zip(scores, indices, strict=True)]
    chosen = [sum(row.count(expert) for row in indices) for expert in range(config.num_experts)]
    losses = reference_losses(config, logits, chosen)
    for token, choice in reference_dropped(config, indices, weights, positions):
        indices[token][choice], weights[token][choice] = -1, 0.0
    return Expected(indices, weights, chosen, losses)


def softmax(row: Sequence[float]) -> list[float]:
    exponentials = [math.exp(value - max(row)) for value in row]
    return [value / sum(exponentials) for value in exponentials]


def reference_scores(config: RouterConfig, row: list[float]) -> list[float]:
    if config.score == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in row]
    return list(row) if config.order == "topk_softmax" else softmax(row)


def reference_choice(config: RouterConfig, row: list[float], bias: list[float]) -> list[int]:
    biased = [value + shift for value, shift in zip(row, bias, strict=True)]
    allowed = list(range(config.num_experts))
    if config.num_groups is not None and config.top_groups is not None:
        size = config.num_experts // config.num_groups
        groups = [range(group * size, (group + 1) * size) for group in range(config.num_groups)]
        summed = 1 if config.bias_update_rate is None else 2
        worth = [sum(sorted((biased[expert] for expert in group), reverse=True)[:summed]) for group in groups]
        best = sorted(range(len(groups)), key=lambda group: (-worth[group], group))[: config.top_groups]
        allowed = [expert for group in best for expert in groups[group]]
    return sorted(allowed, key=lambda expert: (-biased[expert], expert))[: config.top_k]


def reference_weights(config: RouterConfig, row: list[float], chosen: list[int]) -> list[float]:
    weights = [row[expert] for expert in chosen]
    if config.order == "topk_softmax":
        weights = softmax(weights)
    elif config.normalise and config.top_k > 1:
        weights = [weight / sum(weights) for weight in weights]
    return [weight * config.scaling_factor for weight in weights]


def reference_losses(config: RouterConfig, logits: list[list[float]], chosen: list[int]) -> dict[str, float]:
    num_tokens, num_experts = max(len(logits), 1), config.num_experts
    fraction = [count / max(sum(chosen), 1) for count in chosen]
    mean = [0.0] * num_experts
    for row in logits:
        scores = [1 / (1 + math.exp(-value)) for value in row] if config.score == "sigmoid" else softmax(row)
        for expert, value in enumerate(scores):
            mean[expert] += value / sum(scores) / num_tokens
    losses = {}
    if config.aux_loss_coefficient:
        even = sum(f * p for f, p in zip(fraction, mean, strict=True))
        losses["aux"] = config.aux_loss_coefficient * num_experts * even
    if config.device_aux_loss_coefficient and config.num_devices:
        size = num_experts // config.num_devices
        parts = [slice(device * size, (device + 1) * size) for device in range(config.num_devices)]
        even = sum(sum(fraction[part]) * sum(mean[part]) for part in parts)
        losses["device_aux"] = config.device_aux_loss_coefficient * config.num_devices * even
    if config.z_loss_coefficient:
        squares = [math.log(sum(math.exp(value) for value in row)) ** 2 for row in logits]
        losses["z"] = config.z_loss_coefficient * sum(squares) / num_tokens
    return losses


def reference_dropped(
    config: RouterConfig, indices: list[list[int]], weights: list[list[float]], positions: list[int]
) -> set[tuple[int, int]]:
    places = [(token, choice) for token in range(len(indices)) for choice in range(config.top_k)]

    def urgency(place: tuple[int, int]) -> tuple[float, int, int]:
        token, choice = place
        weight = weights[token][choice] if config.drop_policy == "probability" else 0.0
        return -weight, positions[token], choice

    dropped: set[tuple[int, int]] = set()
    contests: list[tuple[float | None, int]] = [(config.capacity_factor, config.num_experts)]
    if config.num_devices is not None:
        contests.append((config.device_capacity_factor, config.num_devices))
    for factor, num_bins in contests:
        if factor is None:
            continue
        most = max(min(1, len(places)), math.ceil(Fraction(str(factor)) * len(places) / num_bins))
        per_bin = config.num_experts // num_bins
        for bin_ in range(num_bins):
            rivals = [p for p in places if indices[p[0]][p[1]] // per_bin == bin_ and p not in dropped]
            dropped.update(sorted(rivals, key=urgency)[most:])
    return dropped


def random_config(rng: random.Random) -> RouterConfig:
    num_groups = rng.choice([None, None, 1, 2, 3, 4])
    num_experts = (num_groups or 1) * rng.randint(1, 5)
    top_groups = rng.randint(1, num_groups) if num_groups else None
    most = num_experts if num_groups is None or top_groups is None else top_groups * (num_experts // num_groups)
    top_k = rng.randint(1, most)
    score = rng.choice(["softmax", "sigmoid"])
    order = rng.choice(["softmax_topk", "topk_softmax"]) if score == "softmax" and top_k > 1 else "softmax_topk"
    num_devices = rng.choice([n for n in range(1, num_experts + 1) if num_experts % n == 0])
    capacity_factor = rng.choice([None, 0.1, 0.5, 1.0, 1.25, 4.0])
    return RouterConfig(
        num_experts=num_experts,
        top_k=top_k,
        score=score,  # type: ignore[arg-type]
        order=order,  # type: ignore[arg-type]
        normalise=order == "topk_softmax" or rng.random() < 0.5,
        scaling_factor=rng.choice([1.0, 2.5]),
        num_groups=num_groups,
        top_groups=top_groups,
        bias_update_rate=rng.choice([None, 0.01]) if score == "sigmoid" else None,
        aux_loss_coefficient=rng.choice([0.0, 0.01]),
        device_aux_loss_coefficient=rng.choice([0.0, 0.05]),
        z_loss_coefficient=rng.choice([0.0, 0.001]),
        num_devices=num_devices,
        capacity_factor=capacity_factor,
        device_capacity_factor=rng.choice([None, None, 0.3, 1.0]),
        drop_policy=rng.choice(["probability", "position"]),
        pad_to_capacity=capacity_factor is not None and rng.random() < 0.5,
    )


def assert_as_expected(got: Routing, expected: Expected, config: RouterConfig) -> None:
    assert got.indices.dtype == torch.int64
    assert got.indices.tolist() == expected.indices
    for weights, row in zip(got.weights.tolist(), expected.weights, strict=True):
        assert weights == pytest.approx(row, rel=1e-12)
    assert got.chosen.tolist() == expected.chosen
    kept = [sum(row.count(expert) for row in expected.indices) for expert in range(config.num_experts)]
    assert got.counts.tolist() == kept
    assert got.dropped == sum(expected.chosen) - sum(kept)
    assert {name: loss.item() for name, loss in got.losses.items()} == pytest.approx(expected.losses)


@pytest.mark.parametrize("block", range(8))
def test_every_option_against_the_reference(block: int) -> None:
    num_dropped = 0
    for seed in range(block * 50, block * 50 + 50):
        rng = random.Random(seed)
        config = random_config(rng)
        num_tokens = rng.choice([0, 1, 2, 7, 16, 30])
        x = random_tokens(num_tokens, config.num_experts, seed, torch.float64)
        positions = rng.sample(range(1000), num_tokens) if rng.random() < 0.5 else None
        router = transparent(config).double()
        bias = [0.0] * config.num_experts
        if router.expert_bias is not None:
            router.expert_bias += random_tokens(1, config.num_experts, seed + 1).squeeze(0) / 3
            bias = router.expert_bias.tolist()
        got = router(x, None if positions is None else torch.tensor(positions, dtype=torch.int64))
        expected = reference(config, x.tolist(), bias, positions or list(range(num_tokens)))
        try:
            assert_as_expected(got, expected, config)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {num_tokens} tokens, positions {positions}, {config}") from error
        num_dropped += got.dropped
    assert num_dropped > 100, "configurations without drops would test half of it"


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lowest_expert_and_the_earliest_token(score: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]).repeat(6, 1)
    routing = transparent(RouterConfig(num_experts=5, top_k=4, score=score, capacity_factor=0.4))(logits)
    assert routing.capacity == math.ceil(0.4 * 6 * 4 / 5)
    assert routing.indices.tolist() == [[1, 2, 4, 0]] * 2 + [[-1] * 4] * 4


def test_all_zero_logits_spread_by_index_and_still_learn() -> None:
    router = transparent(RouterConfig(num_experts=4, top_k=2, score="sigmoid", normalise=False))
    routing = router(torch.zeros(3, 4))
    assert routing.indices.tolist() == [[0, 1]] * 3
    routing.weights.sum().backward()
    x = torch.zeros(3, 4, requires_grad=True)
    router(x).weights.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.25, 0.25, 0.0, 0.0]] * 3


def test_groups_count_as_their_best_or_with_a_bias_as_their_two_best() -> None:
    logits = torch.tensor([[5.0, -9.0, 2.0, 2.0]])
    groups: dict[str, Any] = {"num_experts": 4, "top_k": 1, "score": "sigmoid", "num_groups": 2, "top_groups": 1}
    assert transparent(RouterConfig(**groups))(logits).indices.tolist() == [[0]]
    assert transparent(RouterConfig(**groups, bias_update_rate=0.0))(logits).indices.tolist() == [[2]]


# One token's routing depends on nothing but the token

SPLITS = [1, 2, 3, 31, 128, 135], [100, 7, 8, 185], [0, 150, 150]


@pytest.mark.parametrize(("hidden_size", "num_experts"), [(513, 7), (64, 8), (33, 5), (1024, 60), (100, 100), (777, 2)])
def test_logits_have_the_same_bits_however_tokens_are_split(hidden_size: int, num_experts: int) -> None:
    x = random_tokens(300, hidden_size)
    weight = random_tokens(num_experts, hidden_size, seed=1)
    whole = fixed_shape_logits(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
    for rows in SPLITS:
        assert torch.equal(torch.cat([fixed_shape_logits(part, weight) for part in x.split(rows)]), whole), rows


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fixed_seed_gives_the_same_routing_however_tokens_are_split(score: Any, dtype: torch.dtype) -> None:
    config = RouterConfig(num_experts=7, top_k=3, score=score, num_groups=7, top_groups=5)
    x = random_tokens(300, 65, dtype=dtype)
    whole = make_router(config, 65, seed=5)(x)
    for rows in SPLITS:
        parts = [make_router(config, 65, seed=5)(part) for part in x.split(rows)]
        assert torch.equal(torch.cat([part.indices for part in parts]), whole.indices)
        assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    assert not torch.equal(make_router(config, 65, seed=6)(x).indices, whole.indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_computed_in_fp32(dtype: torch.dtype) -> None:
    config = RouterConfig(num_experts=8, top_k=3, score="sigmoid", aux_loss_coefficient=0.1)
    router = make_router(config)
    x = random_tokens(40, 16, dtype=dtype).requires_grad_()
    got, expected = router(x), router(x.detach().float())
    assert got.weights.dtype == torch.float32
    assert torch.equal(got.indices, expected.indices)
    assert torch.equal(got.weights, expected.weights)
    got.weights.square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x).weights, expected.weights)


# Gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalise": False, "scaling_factor": 2.5},
        {"order": "topk_softmax"},
        {"score": "sigmoid", "bias_update_rate": 0.1, "num_groups": 3, "top_groups": 2},
        {"capacity_factor": 0.5, "device_capacity_factor": 0.8},
    ],
)
def test_gradients_of_weights_and_losses(options: dict[str, Any]) -> None:
    config = RouterConfig(
        num_experts=6, top_k=2, num_devices=3, aux_loss_coefficient=0.3, device_aux_loss_coefficient=0.2,
        z_loss_coefficient=0.1, attach_losses=False, **options,
    )  # fmt: skip
    router = make_router(config, 5).double()

    def outputs(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = torch.func.functional_call(router, {"weight": weight}, (x,))
        return (routing.weights, *routing.losses.values())

    x = random_tokens(5, 5, dtype=torch.float64).requires_grad_()
    weight = random_tokens(6, 5, seed=1, dtype=torch.float64).requires_grad_()
    assert len(outputs(x, weight)) == 4
    assert torch.autograd.gradcheck(outputs, (x, weight))


@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor(0.5)])
def test_attached_losses_join_the_backward_pass(scale: float | torch.Tensor) -> None:
    options: dict[str, Any] = {"num_experts": 6, "top_k": 2, "aux_loss_coefficient": 0.3, "z_loss_coefficient": 0.1}
    x = random_tokens(20, 16)
    attached = make_router(RouterConfig(**options))
    attached.loss_scale = scale
    routing = attached(x)
    assert not any(loss.requires_grad for loss in routing.losses.values())
    routing.weights.square().sum().backward()

    by_hand = make_router(RouterConfig(**options, attach_losses=False))
    routing = by_hand(x)
    (routing.weights.square().sum() + scale * sum(routing.losses.values())).backward()
    torch.testing.assert_close(attached.weight.grad, by_hand.weight.grad)

    plain = make_router(RouterConfig(num_experts=6, top_k=2))
    plain(x).weights.square().sum().backward()
    assert plain.weight.grad is not None
    assert attached.weight.grad is not None
    assert (plain.weight.grad - attached.weight.grad).abs().max() > 1e-3


def test_attach_loss_leaves_the_output_as_it_is() -> None:
    output = torch.randn(3, requires_grad=True)
    parameter = torch.tensor(2.0, requires_grad=True)
    result = attach_loss(output, parameter.square(), 10.0)
    assert torch.equal(result, output)
    (5 * result).sum().backward()
    assert output.grad is not None
    assert parameter.grad is not None
    assert output.grad.tolist() == [5.0] * 3
    assert parameter.grad.item() == 40.0
    with pytest.raises(TensorError, match="without dimensions"):
        attach_loss(output, output)


def test_evaluation_adds_no_losses() -> None:
    router = make_router(RouterConfig(num_experts=4, top_k=2, aux_loss_coefficient=1.0)).eval()
    assert router(random_tokens(5, 16)).losses == {}


def test_balanced_use_costs_the_coefficient_and_one_expert_for_all_costs_e_times_that() -> None:
    even = Usage(torch.full((8,), 1 / 8), torch.full((8,), 1 / 8), torch.tensor(0.0), torch.tensor(8.0))
    single = Usage(torch.eye(8)[3], torch.eye(8)[3], torch.tensor(0.0), torch.tensor(8.0))
    assert expert_balance_loss(even).item() == pytest.approx(1.0)
    assert expert_balance_loss(single).item() == pytest.approx(8.0)
    for num_devices in (1, 2, 4, 8):
        assert device_balance_loss(even, num_devices).item() == pytest.approx(1.0)
        assert device_balance_loss(single, num_devices).item() == pytest.approx(num_devices)
    inside = Usage(torch.tensor([0.5, 0, 0.5, 0]), torch.tensor([0.5, 0, 0.5, 0]), torch.tensor(0.0), torch.tensor(8.0))
    assert device_balance_loss(inside, 2).item() == pytest.approx(1.0), "uneven inside a device is no matter"


# Several ranks, each a thread


class Meeting:
    """Ranks that are threads: what each brings is handed to all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self.brought[rank] = thing
        self.barrier.wait()
        everything = list(self.brought)
        self.barrier.wait()
        return everything


class Member(GroupCommunicator):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(None, "ep")
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.num_calls = 0

    def all_gather(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        self.num_calls += 1
        assert not x.requires_grad, "its gradient would need a collective"
        assert len(x) == (rows[self.rank] if rows is not None else len(x))
        parts = self.meeting.exchange(self.rank, x)
        assert [len(part) for part in parts] == (list(rows) if rows is not None else [len(x)] * self.size)
        return torch.cat(parts)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        assert not x.requires_grad, "its gradient would need a collective"
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)


def on_ranks(size: int, job: Callable[[Member], Result]) -> list[Result]:
    """``job`` on every rank; the first error of any, once all have ended."""
    meeting = Meeting(size)

    def guarded(rank: int) -> Result:
        try:
            return job(Member(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def test_the_fake_group_sums() -> None:
    member = Member(Meeting(1), 0)
    assert member.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize("rows", [[10, 10], [7, 0, 13, 1], [20], [0, 0]])
def test_dropping_from_the_sequence_equals_one_rank_with_all_of_it(policy: Any, rows: list[int]) -> None:
    config = RouterConfig(
        num_experts=6, top_k=3, num_devices=3, capacity_factor=0.7, device_capacity_factor=0.6, drop_policy=policy,
        drop_scope="sequence",
    )  # fmt: skip
    x = random_tokens(sum(rows), 16)
    whole = make_router(config)(x)
    parts = x.split(rows)
    got = on_ranks(len(rows), lambda member: make_router(config, sequence=member)(parts[member.rank]))
    assert torch.equal(torch.cat([routing.indices for routing in got]), whole.indices)
    assert torch.equal(torch.cat([routing.weights for routing in got]), whole.weights)
    assert torch.equal(torch.stack([routing.counts for routing in got]).sum(0), whole.counts)
    limits = {(routing.capacity, routing.device_capacity) for routing in got}
    assert limits == {(whole.capacity, whole.device_capacity)}
    assert sum(routing.dropped for routing in got) == whole.dropped
    assert whole.dropped > 0 or not sum(rows)


def test_dropping_from_the_sub_sequence_is_local_and_differs() -> None:
    rows = [9, 15]
    options: dict[str, Any] = {"num_experts": 4, "top_k": 2, "capacity_factor": 1.0}
    x = random_tokens(sum(rows), 16)
    config = RouterConfig(**options)

    def job(member: Member) -> Routing:
        routing: Routing = make_router(config, sequence=member)(x.split(rows)[member.rank])
        assert member.num_calls == 0
        return routing

    got = on_ranks(2, job)
    assert [routing.capacity for routing in got] == [5, 8]
    for routing, part in zip(got, x.split(rows), strict=True):
        assert torch.equal(routing.indices, make_router(config)(part).indices)
    whole = make_router(RouterConfig(**options, drop_scope="sequence"))(x)
    assert whole.capacity == 12
    assert not torch.equal(torch.cat([routing.indices for routing in got]), whole.indices)


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_positions_make_a_zigzag_split_equal_to_the_sequence(policy: Any) -> None:
    config = RouterConfig(num_experts=4, top_k=2, capacity_factor=0.5, drop_scope="sequence", drop_policy=policy)
    x = random_tokens(24, 16)
    x[12:] = x[:12]  # equal weights: position decides
    whole = make_router(config)(x)
    zigzag = [torch.cat([torch.arange(6), torch.arange(18, 24)]), torch.arange(6, 18)]

    def job(member: Member) -> torch.Tensor:
        mine = zigzag[member.rank]
        indices: torch.Tensor = make_router(config, sequence=member)(x[mine], mine).indices
        return indices

    got = on_ranks(2, job)
    for indices, tokens in zip(got, zigzag, strict=True):
        assert torch.equal(indices, whole.indices[tokens])


def test_positions_on_some_ranks_only_are_refused_on_all() -> None:
    config = RouterConfig(num_experts=4, top_k=2, capacity_factor=1.0, drop_scope="sequence")

    def job(member: Member) -> str:
        with pytest.raises(DisagreementError) as caught:
            make_router(config, sequence=member)(torch.ones(3, 16), None if member.rank else torch.arange(3))
        return str(caught.value)

    assert all("ranks [1, 2] of the 3" in message for message in on_ranks(3, job))


@pytest.mark.parametrize("rows", [[6, 14], [0, 15, 5]])
def test_losses_over_ranks_equal_one_rank_with_all_tokens(rows: list[int]) -> None:
    config = RouterConfig(
        num_experts=6, top_k=2, score="sigmoid", num_devices=2, aux_loss_coefficient=0.3, device_aux_loss_coefficient=0.2,
        z_loss_coefficient=0.1, attach_losses=False,
    )  # fmt: skip
    x = random_tokens(sum(rows), 16)
    alone = make_router(config)
    expected = alone(x).losses
    sum(expected.values()).backward()

    def job(member: Member) -> tuple[Router, Routing]:
        router = make_router(config, balance=member)
        routing = router(x.split(rows)[member.rank])
        assert member.num_calls == 1
        return router, routing

    gradients = []
    for router, routing in on_ranks(len(rows), job):
        torch.testing.assert_close(routing.losses, expected)
        torch.stack(list(routing.losses.values())).sum().backward()  # each rank on its own, one after the other
        assert router.weight.grad is not None
        gradients.append(router.weight.grad)
    averaged = torch.stack(gradients).mean(0)  # as data parallelism does
    torch.testing.assert_close(averaged, alone.weight.grad)


# The bias of loss-free balancing


def test_the_bias_moves_against_the_load_of_all_ranks() -> None:
    config = RouterConfig(num_experts=4, top_k=1, score="sigmoid", bias_update_rate=0.25)
    counts = [torch.tensor([9, 0, 3, 0]), torch.tensor([1, 2, 3, 6])]  # together 10, 2, 6, 6 of mean 6

    def job(member: Member) -> list[float]:
        router = make_router(config, balance=member)
        router.update_bias(counts[member.rank])
        assert router.expert_bias is not None
        bias: list[float] = router.expert_bias.tolist()
        return bias

    assert on_ranks(2, job) == [[-0.25, 0.25, 0.0, 0.0]] * 2


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    config = RouterConfig(num_experts=3, top_k=1, score="sigmoid", normalise=False, bias_update_rate=0.01)
    router = transparent(config)
    assert router.expert_bias is not None
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    assert router(logits).indices.tolist() == [[0]]
    router.expert_bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    routing = router(logits)
    assert routing.indices.tolist() == [[2]]
    assert routing.weights.item() == pytest.approx(1 / (1 + math.e))


def test_the_bias_evens_out_a_skewed_load() -> None:
    config = RouterConfig(num_experts=8, top_k=2, score="sigmoid", bias_update_rate=0.01)
    router = transparent(config)
    x = random_tokens(256, 8) + torch.linspace(-1, 1, 8)
    before = router(x).chosen
    for _ in range(100):
        router.update_bias(router(x).chosen)
    after = router(x).chosen
    assert before.max() > 2 * 64
    assert after.max() < 1.2 * 64
    assert "expert_bias" in router.state_dict()


def test_the_bias_stays_fp32_when_the_model_is_cast() -> None:
    router = make_router(RouterConfig(num_experts=4, top_k=2, score="sigmoid", bias_update_rate=0.001))
    assert router.expert_bias is not None
    router.expert_bias.fill_(1.001)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.dtype == torch.float32
    assert router.expert_bias[0].item() == pytest.approx(1.001, abs=1e-6)
    assert router(random_tokens(3, 16, dtype=torch.bfloat16)).weights.dtype == torch.float32


def test_updating_a_bias_that_is_not_there_or_with_other_counts() -> None:
    with pytest.raises(UsageError, match="bias_update_rate"):
        make_router(RouterConfig(num_experts=4, top_k=2)).update_bias(torch.zeros(4, dtype=torch.int64))
    router = make_router(RouterConfig(num_experts=4, top_k=2, score="sigmoid", bias_update_rate=0.1))
    with pytest.raises(TensorError, match=r"counts of 4 experts.*\[3\]"):
        router.update_bias(torch.zeros(3, dtype=torch.int64))


# Capacity


@pytest.mark.parametrize(
    ("factor", "num_choices", "num_bins", "expected"),
    [
        (1.0, 16, 4, 4),
        (1.25, 16, 4, 5),
        (0.07, 100, 1, 7),
        (0.001, 5, 8, 1),
        (1.0, 0, 8, 0),
        (1.0, 7, 2, 4),
        (2, 3, 3, 2),
    ],
)
def test_capacity(factor: float, num_choices: int, num_bins: int, expected: int) -> None:
    assert capacity(factor, num_choices, num_bins) == expected


def test_capacity_counts_every_choice_of_a_token() -> None:
    routing = make_router(RouterConfig(num_experts=4, top_k=2, capacity_factor=1.0, pad_to_capacity=True))(
        torch.ones(8, 16)
    )
    assert routing.capacity == 4, "with the paper's equation 4 it would be 2"
    assert routing.padded_rows == routing.capacity
    assert routing.counts.tolist() == [4 if count else 0 for count in routing.chosen.tolist()]


def test_a_capacity_of_one_keeps_the_strongest_token_of_every_expert() -> None:
    config = RouterConfig(num_experts=3, top_k=1, normalise=False, capacity_factor=0.01)
    logits = torch.tensor([[1.0, 0, 0], [3.0, 0, 0], [2.0, 0, 0], [0, 0, 1.0]])
    routing = transparent(config)(logits)
    assert routing.capacity == 1
    assert routing.indices.tolist() == [[-1], [0], [-1], [2]]
    assert routing.dropped == 2
    assert routing.weights[0].item() == 0.0
    assert routing.counts.tolist() == [1, 0, 1]
    assert routing.chosen.tolist() == [3, 0, 1]
    by_position = transparent(dataclasses.replace(config, drop_policy="position"))(logits)
    assert by_position.indices.tolist() == [[0], [-1], [-1], [2]]


def test_a_device_drops_over_its_experts_together() -> None:
    options: dict[str, Any] = {"num_experts": 4, "top_k": 1, "normalise": False, "num_devices": 2}
    logits = torch.tensor([[4.0, 0, 0, 0], [0, 3.0, 0, 0], [2.0, 0, 0, 0], [0, 1.0, 0, 0]])
    routing = transparent(RouterConfig(**options, device_capacity_factor=1.0))(logits)
    assert (routing.capacity, routing.device_capacity) == (None, 2)
    assert routing.indices.tolist() == [[0], [1], [-1], [-1]]


def test_every_token_to_every_expert() -> None:
    config = RouterConfig(num_experts=5, top_k=5, capacity_factor=1.0, aux_loss_coefficient=1.0)
    routing = make_router(config)(random_tokens(9, 16))
    assert routing.indices.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 9
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(9))
    assert routing.capacity == 9
    assert routing.dropped == 0
    assert routing.losses["aux"].item() == pytest.approx(1.0)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_no_tokens(capacity_factor: float | None) -> None:
    config = RouterConfig(
        num_experts=4, top_k=2, num_devices=2, capacity_factor=capacity_factor, aux_loss_coefficient=1.0,
        device_aux_loss_coefficient=1.0, z_loss_coefficient=1.0,
    )  # fmt: skip
    router = make_router(config)
    routing = router(torch.zeros(0, 16))
    assert routing.indices.shape == routing.weights.shape == (0, 2)
    assert routing.counts.tolist() == [0] * 4
    assert {loss.item() for loss in routing.losses.values()} == {0.0}
    assert routing.capacity == (None if capacity_factor is None else 0)
    routing.weights.sum().backward()
    assert router.weight.grad is not None
    assert not router.weight.grad.any()


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k 9 of 8 experts"),
        ({"top_k": 0}, "top_k must be an int, 1 or more"),
        ({"num_experts": 8.0}, "num_experts must be an int, 1 or more, got 8.0"),
        ({"num_groups": 3, "top_groups": 1}, "num_groups must divide"),
        ({"num_groups": 4}, "together, or neither"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups 5 of 4"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "raise top_groups or lower top_k"),
        ({"num_devices": 3}, "num_devices must divide"),
        ({"device_capacity_factor": 1.0}, "need num_devices"),
        ({"device_aux_loss_coefficient": 1.0}, "need num_devices"),
        ({"pad_to_capacity": True}, "needs a capacity_factor"),
        ({"capacity_factor": 0.0}, "capacity_factor must be a positive number"),
        ({"capacity_factor": "1.0"}, "capacity_factor must be a positive number, got '1.0'"),
        ({"capacity_factor": math.nan}, "capacity_factor must be a positive number"),
        ({"aux_loss_coefficient": -1.0}, "aux_loss_coefficient must be a number, 0 or more"),
        ({"score": "tanh"}, "'softmax' or 'sigmoid', got 'tanh'"),
        ({"drop_scope": "batch"}, "'subsequence' or 'sequence'"),
        ({"bias_update_rate": 0.1}, "for score='sigmoid'"),
        ({"score": "sigmoid", "order": "topk_softmax"}, "for score='softmax'"),
        ({"order": "topk_softmax", "normalise": False}, "always normalises"),
        ({"order": "topk_softmax", "top_k": 1}, "the router learns nothing"),
    ],
)
def test_a_config_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RouterConfig(**{"num_experts": 8, "top_k": 2, **options})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 15), r"expected tokens \[tokens, 16\], got shape \[3, 15\]"),
        (torch.zeros(2, 3, 16), "flatten batch and sequence"),
        (torch.zeros(3, 16, dtype=torch.int64), "expected floating tokens"),
        (torch.zeros(3, 16, device="meta"), "expected floating tokens on cpu"),
        (torch.zeros(3, 16).index_fill(0, torch.tensor([1]), math.nan), "first nan at token 1, 1 of 3 tokens"),
        (torch.zeros(3, 16).index_fill(0, torch.tensor([0, 2]), math.inf), "at token 0, 2 of 3 tokens"),
    ],
)
def test_tokens_that_cannot_be_routed(x: torch.Tensor, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        make_router(RouterConfig(num_experts=4, top_k=2))(x)


def test_positions_that_do_not_fit() -> None:
    with pytest.raises(TensorError, match=r"expected int64 positions \[3\]"):
        make_router(RouterConfig(num_experts=4, top_k=2))(torch.zeros(3, 16), torch.arange(4))
    with pytest.raises(UsageError, match="hidden_size"):
        make_router(RouterConfig(num_experts=4, top_k=2), 0)


@pytest.mark.parametrize(
    ("indices", "weights", "message"),
    [
        ([[0, 4]], [[0.5, 0.5]], r"expected 0 to 3, or -1 .* \(first 4 at token 0, 1 of 1 tokens\)"),
        ([[0, 1], [-2, 1]], [[0.5, 0.5]] * 2, "first -2 at token 1"),
        ([[2, 2]], [[0.5, 0.5]], "chooses one expert twice"),
        ([[0, 1]], [[0.5, math.nan]], "weights that are NaN or infinite"),
        ([[0, 1]], [[0.5]], r"one shape .* got \[1, 2\] and \[1, 1\]"),
        ([[0.0, 1.0]], [[0.5, 0.5]], "integer indices"),
    ],
)
def test_another_routers_result_that_is_none(indices: Any, weights: Any, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        Routing.of(torch.tensor(indices), torch.tensor(weights), 4)


def test_another_routers_result() -> None:
    routing = Routing.of(torch.tensor([[0, -1], [-1, -1], [2, 0]]), torch.full((3, 2), 0.5, dtype=torch.bfloat16), 4)
    assert routing.counts.tolist() == [2, 0, 1, 0]
    assert routing.num_experts == 4
    assert routing.dropped == 3
    assert routing.weights.tolist() == [[0.5, 0.0], [0.0, 0.0], [0.5, 0.5]]
    assert Routing.of(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), 4).counts.tolist() == [0] * 4
