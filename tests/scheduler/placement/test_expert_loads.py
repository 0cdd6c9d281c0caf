"""Expert loads: averages and forecasts, synthetic ones, and the file that keeps them."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlayer.profiles.errors import UsageError
from commlayer.readers.routing_files import read_routing, routing_path, write_routing
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from examples.synthetic_loads import LOAD_KINDS, synthetic_loads


def loads_of(*steps: list[int], top_k: int = 1, stride: int = 1) -> ExpertLoads:
    return ExpertLoads(np.array([[step] for step in steps]), ("only",), top_k, stride)


def test_averages() -> None:
    loads = loads_of([8, 0], [0, 4], [4, 4])
    assert loads.window(2).tolist() == [[2.0, 4.0]]
    assert loads.window(9).tolist() == [[4.0, 8 / 3]]
    assert loads.moving_average(1.0).tolist() == [[(8 / 4 + 4) / 1.75, (4 / 2 + 4) / 1.75]]
    assert loads.moving_average(1e9) == pytest.approx(loads.window(3))


def test_a_forecast_follows_a_jump_and_not_noise() -> None:
    jump = loads_of(*[[90, 10]] * 20, *[[10, 90]] * 6)
    assert jump.forecast(2)[0, 1] > 80
    draw = np.random.default_rng(1)
    noise = loads_of(*(draw.multinomial(100, [0.5, 0.5]).tolist() for _ in range(64)))
    assert noise.forecast(8)[0, 0] == pytest.approx(50, abs=2)
    assert loads_of([4, 2], [2, 4]).forecast(100).tolist() == [[3.0, 3.0]]


def test_popularity_is_of_places_not_of_experts() -> None:
    loads = ExpertLoads(np.array([[[3, 1], [1, 3], [0, 0]]]), ("a", "b", "c"), 1)
    assert loads.popularity() == (0.75, 0.25)


def test_loads_of_groups_are_added() -> None:
    fine, coarse = loads_of([1, 0], [2, 0], [3, 1]), loads_of([5, 5], stride=2)
    both = ExpertLoads.added([fine, coarse])
    assert (both.counts.tolist(), both.stride) == ([[[8, 5]]], 2)
    other = ExpertLoads(fine.counts, ("another",), 1)
    beside = ExpertLoads.added([fine, other, fine])
    assert (beside.layers, beside.counts[0].tolist()) == (("only", "another"), [[2, 0], [1, 0]])
    with pytest.raises(UsageError, match="one model"):
        ExpertLoads.added([fine, loads_of([1, 1, 1])])
    with pytest.raises(UsageError, match="cannot be added up"):
        coarse.with_stride(3)


@pytest.mark.parametrize(
    ("counts", "top_k", "match"),
    [
        (np.zeros((1, 2)), 1, "shape"),
        (np.zeros((0, 1, 4), int), 1, "shape"),
        (np.full((1, 1, 2), 0.5), 1, "whole numbers"),
        (np.full((1, 1, 2), -1), 1, "at least 0"),
        (np.ones((1, 1, 2), int), 3, "1 to 2 choices"),
    ],
)
def test_unsound_loads_are_refused(counts: Any, top_k: int, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ExpertLoads(counts, ("only",), top_k)


@pytest.mark.parametrize("kind", LOAD_KINDS)
def test_synthetic_loads_are_seeded_and_whole(kind: Any) -> None:
    made = [synthetic_loads(kind, experts=16, layers=3, steps=40, tokens=64, top_k=4, seed=seed) for seed in (5, 5, 6)]
    assert (made[0].counts == made[1].counts).all()
    assert (made[0].counts != made[2].counts).any()
    assert (made[0].counts.sum(-1) == 64 * 4).all()
    assert made[0].counts.max() <= 64


def test_the_kinds_differ_as_they_say() -> None:
    def made(kind: Any) -> Any:
        return synthetic_loads(kind, experts=32, steps=96, tokens=4096, top_k=2, period=24, seed=3).counts[:, 0]

    uniform, zipf, drifting, bursty = map(made, LOAD_KINDS)
    assert uniform.max() < 1.5 * uniform.mean()
    assert zipf.max() > 4 * zipf.mean()
    assert len(set(zipf.argmax(-1).tolist())) == 1
    assert len(set(drifting.argmax(-1).tolist())) > 2
    is_burst = bursty.max(-1) > 1.5 * np.median(bursty.max(-1))
    assert 2 <= is_burst.sum() < 48


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(UsageError, match="one of uniform"):
        synthetic_loads("other", experts=4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no more choices than experts"):
        synthetic_loads("zipf", experts=4, top_k=5)


# The file


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    loads = synthetic_loads("zipf", experts=6, layers=2, steps=5, top_k=2)
    write_routing(tmp_path / "r.json", loads)
    again = read_routing(tmp_path / "r.json")
    assert (again.counts == loads.counts).all()
    assert (again.layers, again.top_k, again.stride, again.source) == (loads.layers, 2, 1, loads.source)


def test_a_folder_is_added_up(tmp_path: Path) -> None:
    for rank in (0, 4):
        write_routing(routing_path(tmp_path, rank), loads_of([1, 2], [3, 4]))
    assert read_routing(tmp_path).counts.tolist() == [[[2, 4]], [[6, 8]]]
    with pytest.raises(UsageError, match="routing-00000"):
        read_routing(_empty(tmp_path))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def edited(content: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**content, **changes})


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_routing(path, loads_of([1, 2], [3, 4]))
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    bomb = [{"name": "only", "counts": base64.b64encode(zlib.compress(bytes(1 << 20))).decode()}]
    for written, match in {
        "": "damaged text",
        "[]": "JSON array",
        text[: len(text) // 2]: "damaged text",
        edited(content, format="commlayer-profile"): "field format.*no routing file",
        edited(content, version=2): "newer commlayer",
        edited(content, steps="2"): "field steps",
        edited(content, more=1): "unknown field",
        edited(content, source="edited"): "field checksum",
        edited(content, layers=bomb): "field checksum",
    }.items():
        path.write_text(written, encoding="utf-8")
        with pytest.raises(UsageError, match=match) as caught:
            read_routing(path)
        assert str(path) in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        read_routing(tmp_path / "none.json")


def test_counts_of_another_size_are_refused_unpacked_no_further(tmp_path: Path) -> None:
    from commlayer.readers.routing_files import _checksum

    path = tmp_path / "r.json"
    write_routing(path, loads_of([1, 2], [3, 4]))
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["checksum"]
    for counts, match in {
        base64.b64encode(zlib.compress(bytes(1 << 20))).decode(): "expected 16 bytes.*got more",
        base64.b64encode(zlib.compress(bytes(8))).decode(): "expected 16 bytes.*got 8",
        "no base64!": "damaged text",
    }.items():
        content["layers"] = [{"name": "only", "counts": counts}]
        path.write_text(json.dumps({**content, "checksum": _checksum(content)}), encoding="utf-8")
        with pytest.raises(UsageError, match=match):
            read_routing(path)
