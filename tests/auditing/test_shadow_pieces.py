"""The pieces of the shadow without processes: which calls, how far sums may be apart, every plan run again, files of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from commlayer.auditing.comparing import Allowance, compare_results, is_sampled, sizes_of
from commlayer.auditing.replaying import replay_call
from commlayer.auditing.retracing import suspects
from commlayer.auditing.saved_calls import CallShape, SavedCall, SavedHeader, read_call, saved_name, write_call
from commlayer.cli.main import main
from commlayer.profiles.errors import PlanError, SettingsError, UsageError
from commlayer.scheduler import Strategy, Traffic, build
from commlayer.scheduler.call_moves import everyones_moves
from commlayer.scheduler.plan import Plan, Span
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.wire import Scaling, Wire, WireFormat
from commlayer.settings import Settings
from commlayer.wire.codecs import Codec

NODES = ((0, 2), (1, 3))
PLANS = [
    (Strategy.DIRECT, 1),
    (Strategy.HIERARCHICAL, 1),
    (Strategy.LEADERS, 1),
    (Strategy.PIPELINED, 3),
    (Strategy.RING, 2),
]


@pytest.mark.parametrize("every", [1, 2, 3, 7, 8, 100])
def test_one_call_of_each_window_is_sampled_and_each_place_in_turn(every: int) -> None:
    chosen = [number for number in range(every * every) if is_sampled(number, every)]
    assert [number // every for number in chosen] == list(range(every))
    assert sorted(number % every for number in chosen) == list(range(every))
    assert chosen[0] == 0


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "often", "", "1e3", "10000000000", "٣"])
def test_what_is_no_number_of_calls_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="COMMLAYER_SHADOW must be a whole number"):
        Settings.from_environment({"COMMLAYER_SHADOW": value})


def test_a_number_of_calls_is_taken() -> None:
    assert Settings.from_environment({"COMMLAYER_SHADOW": "8"}).shadow == 8
    assert Settings.from_environment({}).shadow is None


def allowed(terms: torch.Tensor, op: str = "sum", wire: Wire | None = None) -> Allowance:
    sizes = [sizes_of(each, op) for each in terms]
    columns = [torch.stack(each) for each in zip(*sizes, strict=True)]
    whole = [each.prod(0) if op == "product" else each.sum(0) for each in columns]
    smallest = whole[1] if len(whole) > 1 else None
    return Allowance(op, len(terms), terms.dtype, whole[0], smallest, *(() if wire is None else (wire,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_other_orders_of_a_reduction_are_within_its_bound_and_other_numbers_are_not(
    dtype: torch.dtype, op: str
) -> None:
    terms = torch.randn(6, 5000, generator=torch.Generator().manual_seed(3)).to(dtype)
    pairs: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    pair = pairs[op]

    def reduced(order: list[int]) -> torch.Tensor:
        total = terms[order[0]].clone()
        for place in order[1:]:
            total = pair(total, terms[place])
        return total

    one, other = reduced([0, 1, 2, 3, 4, 5]), reduced([5, 0, 3, 1, 4, 2])
    assert compare_results(one, other, dtype, allowed(terms, op)).num_wrong == 0
    wrong = one.clone()
    wrong[1234] = wrong[1234] * 2 + 1
    assert compare_results(wrong, other, dtype, allowed(terms, op)) == (1234, 1)


def test_of_an_overflow_nothing_is_said_and_nan_must_stay() -> None:
    terms = torch.tensor([[3e38, 1.0, float("nan")], [3e38, 2.0, 1.0], [-3e38, 3.0, 1.0]])
    flat = torch.tensor([float("inf"), 6.0, float("nan")])
    assert compare_results(torch.tensor([3e38, 6.0, float("nan")]), flat, torch.float32, allowed(terms)).num_wrong == 0
    assert compare_results(torch.tensor([3e38, 6.0, 2.0]), flat, torch.float32, allowed(terms)) == (2, 1)


def test_bits_are_compared_also_of_nan_and_zero() -> None:
    a = torch.tensor([0.0, float("nan"), 1.0])
    assert compare_results(a, a.clone(), torch.float32, None).num_wrong == 0
    assert compare_results(a, torch.tensor([-0.0, float("nan"), 1.0]), torch.float32, None) == (0, 1)


@pytest.mark.parametrize("scaling", list(Scaling))
@pytest.mark.parametrize("wire_format", [WireFormat.BF16, WireFormat.INT8, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2])
def test_sums_of_what_was_encoded_are_within_their_bound(wire_format: WireFormat, scaling: Scaling) -> None:
    wire = Wire(wire_format, 96, scaling, power_of_two=True)
    codec = Codec(wire, torch.float32)
    terms = torch.randn(4, 256, 96, generator=torch.Generator().manual_seed(1)) * 10.0
    rounded = torch.empty_like(terms)
    for rows, out in zip(terms, rounded, strict=True):
        message = torch.empty(wire.wire_bytes(256), dtype=torch.uint8)
        codec.encode(rows, message)
        codec.decode(message, out)
    assert compare_results(rounded.sum(0), terms.sum(0), torch.float32, allowed(terms, wire=wire)).num_wrong == 0
    wrong = rounded.sum(0)
    wrong[7, 9] += 200.0
    assert compare_results(wrong, terms.sum(0), torch.float32, allowed(terms, wire=wire)) == (7 * 96 + 9, 1)


# Plans run again


def shape_of(
    collective: str, num_bytes: int, strategy: Strategy, chunks: int, *, root: int = 0, wire: Wire | None = None
) -> CallShape | None:
    traffic = Traffic.on_nodes(collective, num_bytes, (2, 2))
    try:
        if wire is None:
            plan = build(traffic, strategy, chunks)
        else:
            plan = build(replace(traffic, wires=(wire,), element_bytes=4), strategy, chunks, wire=wire)
    except PlanError:
        return None
    return CallShape.of("whole" if wire is None else "encoded", plan, NODES, torch.float32, root=root)


def saved(
    shape: CallShape, inputs: list[torch.Tensor], flats: list[torch.Tensor], splits: object = None
) -> list[SavedCall]:
    everyones = splits or [((), ())] * 4
    return [
        SavedCall(
            SavedHeader(
                call=shape,
                group="0",
                number=3,
                made_ns=1,
                global_ranks=(0, 1, 2, 3),
                rank=rank,
                sent=everyones[rank][0],  # type: ignore[index]
                received=everyones[rank][1],  # type: ignore[index]
                first=-1,
                said="on no rank",
            ),
            given.reshape(-1).view(torch.uint8),
            flat.reshape(-1).view(torch.uint8),
            flat.reshape(-1).view(torch.uint8),
        )
        for rank, (given, flat) in enumerate(zip(inputs, flats, strict=True))
    ]


def draw(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]


def calls() -> list[tuple[CallShape, list[torch.Tensor], list[torch.Tensor], object]]:
    """A sound call of every plan that applies."""
    found: list[tuple[CallShape, list[torch.Tensor], list[torch.Tensor], object]] = []
    x, rows = draw(1000), draw(4, 1000)
    for strategy, chunks in PLANS:
        of_all = {
            "all_gather": (16000, x, [torch.cat(x)] * 4),
            "all_reduce": (4000, x, [torch.stack(x).sum(0)] * 4),
            "reduce_scatter": (16000, rows, list(torch.stack(rows).sum(0))),
            "broadcast": (4000, x, [x[1].clone()] * 4),
        }
        for collective, (size, given, flat) in of_all.items():
            shape = shape_of(collective, size, strategy, chunks, root=1 if collective == "broadcast" else 0)
            if shape is not None:
                found.append((shape, given, flat, None))
        for wire in (Wire(WireFormat.BF16, 100), Wire(WireFormat.FP8_E4M3, 100)):
            shape = shape_of("all_reduce", 4000, strategy, chunks, wire=wire)
            if shape is not None:
                found.append((shape, x, [torch.stack(x).sum(0)] * 4, None))
    counts = [[(5 * a + 3 * b) % 7 * 8 for b in range(4)] for a in range(4)]
    splits = [(tuple(counts[a]), tuple(row[a] for row in counts)) for a in range(4)]
    given = [torch.randn(sum(row) // 4, generator=torch.Generator().manual_seed(a)) for a, row in enumerate(counts)]
    parts = [part.split([count // 4 for count in row]) for part, row in zip(given, counts, strict=True)]
    plan = build(Traffic.on_nodes("all_to_all_v", 256, (2, 2)), Strategy.HIERARCHICAL)
    flats = [torch.cat([part[a] for part in parts]) for a in range(4)]
    found.append((CallShape.of("split", plan, NODES, torch.float32), given, flats, splits))
    return found


def test_every_plan_run_again_gives_what_flat_gives() -> None:
    kinds = set()
    for shape, inputs, flats, splits in calls():
        replayed = replay_call(saved(shape, inputs, flats, splits))
        assert not replayed.is_repeated, (shape.plan().name, shape.traffic.collective)
        kinds.add((shape.kind, shape.traffic.collective, shape.strategy))
        files = saved(shape, inputs, flats, splits)
        flats[2].view(-1)[0] += 1000
        assert replay_call(saved(shape, inputs, flats, splits)).is_repeated
        flats[2].view(-1)[0] = files[2].flat.view(torch.float32)[0]
    assert len(kinds) > 15


def test_rows_over_rails_and_in_place() -> None:
    partners = (1, 0, 3, 2)
    splits = [tuple(400 if k in (a, partner) else 0 for k in range(4)) for a, partner in enumerate(partners)]
    given = draw(200)
    plan = exchange_over(Span.RAIL, (2, 2), 800)
    halves = [slice(100, 200) if a > partner else slice(0, 100) for a, partner in enumerate(partners)]
    flats = [torch.cat([given[b][halves[a]] for b in sorted((a, partner))]) for a, partner in enumerate(partners)]
    shape = CallShape.of("over", plan, NODES, torch.float32)
    assert not replay_call(saved(shape, given, flats, [(each, each) for each in splits])).is_repeated
    bf16 = Wire(WireFormat.BF16)
    one_node = replace(Traffic.on_nodes("reduce_scatter", 16000, (4,)), wires=(bf16,), element_bytes=4)
    in_place = CallShape.of("in place", build(one_node, Strategy.DIRECT, wire=bf16), NODES, torch.float32)
    rows = draw(4, 1000)
    assert not replay_call(saved(in_place, rows, list(torch.stack(rows).sum(0)))).is_repeated


def test_the_message_that_brought_a_wrong_byte_is_found() -> None:
    plan = build(Traffic.on_nodes("all_gather", 4 * 256, (2, 2)), Strategy.HIERARCHICAL)
    moves = everyones_moves("whole", plan, NODES)
    of_rank_3 = 3 * 256 + 17

    def brought(wrong: set[int]) -> list[tuple[str, int, int]]:
        firsts = [of_rank_3 if member in wrong else -1 for member in range(4)]
        return [hop[1:] for hop in suspects(moves, firsts, 1, is_in_place=False, is_shared=True)]

    assert brought({0, 2}) == [("message", 3, 2)]
    assert brought({0}) == [("message", 2, 0)]
    assert brought({1}) == [("message", 3, 1)]
    assert brought({3}) == []  # it went on to others as it should be
    assert brought({0, 1, 2, 3}) == []


# Files


def written(folder: Path) -> list[Path]:
    shape, inputs, flats, _ = calls()[0]
    return [write_call(folder / "call", each) for each in saved(shape, inputs, flats)]


def test_a_kept_call_is_read_and_replayed_by_the_command(tmp_path: Path) -> None:
    paths = written(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 4
    assert paths[0].parent.stat().st_mode & 0o777 == 0o700
    found = CliRunner().invoke(main, ["replay", str(paths[2]), "--json"])
    assert found.exit_code == 0, found.output
    told = msgspec.json.decode(found.output)
    assert (told["repeats"], told["collective"], len(told["ranks"])) == (False, "all_gather", 4)
    shape, inputs, flats, _ = calls()[0]
    for each in saved(shape, inputs, [flat * 2 for flat in flats]):
        write_call(tmp_path / "call", each)
    found = CliRunner().invoke(main, ["replay", str(tmp_path / "call")])
    assert found.exit_code == 1
    assert "differs again" in found.output


def test_files_that_are_not_sound_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)[1]
    whole = path.read_bytes()
    start = whole.index(b"{")
    stop = start + int.from_bytes(whole[start - 4 : start], "little")

    def with_header(old: bytes, new: bytes) -> bytes:
        header = whole[start:stop].replace(old, new)
        assert header != whole[start:stop]
        return whole[: start - 4] + len(header).to_bytes(4, "little") + header + whole[stop:]

    damaged = {
        "cut": whole[:-1],
        "longer": whole + b"\0",
        "empty": b"",
        "other": b"\x80\x04pickle" + whole,
        "no header": whole[: start - 4] + b"\xff\xff\xff\xff" + whole[start:],
        "no json": whole[:start] + b"x" + whole[start + 1 :],
        "unknown field": with_header(b'{"call"', b'{"more":1,"call"'),
        "unknown field within": with_header(b'"logical_bytes"', b'"more":1,"logical_bytes"'),
        "huge": with_header(b'"logical_bytes":16000', b'"logical_bytes":1600000000000'),
        "negative": with_header(b'"logical_bytes":16000', b'"logical_bytes":-16'),
        "many chunks": with_header(b'"chunks":1', b'"chunks":16385'),
        "no such plan": with_header(b'"strategy":"flat_direct"', b'"strategy":"pipelined_copy"'),
        "other ranks": with_header(b'"nodes":[[0,2],[1,3]]', b'"nodes":[[0,2],[1,1]]'),
        "dtype": with_header(b'"dtype":"float32"', b'"dtype":"__class__"'),
        "another call": with_header(b'"number":3', b'"number":4'),
        "another rank": with_header(b'"rank":1', b'"rank":2'),
    }
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(UsageError):
            read_call(path.parent)
        found = CliRunner().invoke(main, ["replay", str(path.parent)])
        assert found.exit_code == 2, (name, found.output)
    path.unlink()
    with pytest.raises(UsageError, match="none of rank 1"):
        read_call(path.parent)
    with pytest.raises(UsageError, match=saved_name(0)):
        read_call(tmp_path)


def test_a_shape_says_what_makes_its_plan_again() -> None:
    for shape, *_ in calls():
        plan: Plan = shape.plan()
        assert CallShape.of(shape.kind, plan, NODES, torch.float32, op=shape.op, root=shape.root) == shape
        assert msgspec.json.decode(msgspec.json.encode(shape), type=CallShape).plan() == plan
