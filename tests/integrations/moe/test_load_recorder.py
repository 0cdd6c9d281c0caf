"""The recorder of expert loads: what it keeps is what tokens chose, and its memory is bounded."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commlayer.integrations import FoldedMesh, MoELayer, RouterConfig
from commlayer.integrations.mesh import pipeline_stage
from commlayer.integrations.moe import load_recorder
from commlayer.integrations.moe.load_recorder import LayerRecord
from commlayer.readers.routing_files import read_routing
from commlayer.testing.plugin import ClusterFactory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("COMMLAYER_ROUTING", str(tmp_path / "routing"))
    monkeypatch.setattr(load_recorder, "_recorders", {})
    yield tmp_path / "routing"
    for recorder in load_recorder._recorders.values():
        atexit.unregister(recorder.write)


def test_what_tokens_chose_is_recorded(folder: Path) -> None:
    layers = [MoELayer(8, 16, RouterConfig(num_experts=4, top_k=2), seed=seed) for seed in range(2)]
    chosen = []
    for step in range(3):
        for layer in layers:
            layer(torch.randn(10 + step, 8))
            assert layer.routing is not None
            chosen.append(layer.routing.counts.tolist())
    load_recorder._recorders[str(folder)].write()
    loads = read_routing(folder)
    assert loads.counts.reshape(6, 4).tolist() == chosen
    assert (loads.layers, loads.top_k, loads.stride) == (("layer 0", "layer 1"), 2, 1)


def test_replicas_that_write_into_one_folder_are_kept_apart_and_added_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in ("east", "west"):
        monkeypatch.setenv("COMMLAYER_REPLICA", replica)
        MoELayer(8, 16, RouterConfig(num_experts=4, top_k=2))(torch.randn(10, 8))
        load_recorder._recorders[str(folder / replica)].write()
    assert int(read_routing(folder / "west").counts.sum()) == 20
    assert int(read_routing(folder).counts.sum()) == 40


def record_of_a_stage(folder: str) -> str:
    """Record one layer on each stage of a pipeline that is put together by hand; what the layer is called."""
    os.environ["COMMLAYER_ROUTING"] = folder
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"pp": 2, "ep": 2}) as mesh:
        layer = MoELayer(8, 16, RouterConfig(num_experts=4, top_k=2), mesh=mesh)
        stage = mesh.rank("pp")
        assert pipeline_stage(mesh.group("ep")) == stage
        assert pipeline_stage(dist.group.WORLD) is None
        layer(torch.randn(10 + stage, 8))
    for recorder in load_recorder._recorders.values():
        recorder.write()
    return "" if layer.dispatcher.record is None else layer.dispatcher.record.name


@pytest.mark.cluster
def test_stages_of_a_pipeline_are_not_added_up(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    names = emulated_cluster(1, 4).run(record_of_a_stage, str(tmp_path / "routing"))
    assert sorted(name for name in names if name) == ["stage 0, layer 0", "stage 1, layer 0"]
    loads = read_routing(tmp_path / "routing")
    found = dict(zip(loads.layers, loads.counts.sum((0, 2)).tolist(), strict=True))
    assert found == {"stage 0, layer 0": 2 * 10 * 2, "stage 1, layer 0": 2 * 11 * 2}


def test_nothing_is_recorded_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMLAYER_ROUTING", raising=False)
    assert MoELayer(8, 16, RouterConfig(num_experts=4, top_k=2)).dispatcher.record is None


def test_padded_rows_are_no_choices(folder: Path) -> None:
    config = RouterConfig(num_experts=4, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
    layer = MoELayer(8, 16, config)
    with pytest.warns(UserWarning, match="pads its rows to a capacity"):
        layer(torch.randn(10, 8))
    load_recorder._recorders[str(folder)].write()
    assert not folder.exists()


def test_a_long_run_is_kept_in_longer_steps() -> None:
    record = LayerRecord("layer", 2, most=4)
    record.top_k = 1
    for step in range(41):
        record.add_counts(np.array([step, 1]))
    loads = record.loads()
    assert loads is not None
    assert (loads.stride, loads.num_steps) == (8, 5)
    assert loads.counts[:, 0, 1].tolist() == [8] * 5
    assert loads.counts[:, 0, 0].sum() == sum(range(40))


def test_a_full_disk_is_told_and_fails_no_run(folder: Path) -> None:
    folder.write_text("a file in its place", encoding="utf-8")
    MoELayer(8, 16, RouterConfig(num_experts=4, top_k=2))(torch.randn(4, 8))
    with pytest.warns(UserWarning, match="was not written"):
        load_recorder._recorders[str(folder)].write()
