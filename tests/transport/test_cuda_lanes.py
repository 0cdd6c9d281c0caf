"""Lanes on CUDA and NCCL, as far as it is arithmetic: it needs no device. With one: tests/gpu/test_lanes_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from commlayer.cli.lane_checks import Line, at_hand, lane_lines
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import LANES
from commlayer.transport.c10d import is_usable
from commlayer.transport.nccl import (
    CONFIG_SINCE,
    LOWER_LANE_CTAS,
    Inner,
    Nccl,
    apply_lane,
    is_high_priority,
    nccl_lane_options,
    use_lane,
)
from commlayer.transport.streams import is_high_priority_of

NEW, OLD, ANCIENT = (2, 28, 9), (2, 23, 4), (2, 14, 3)
UNDEFINED = -(2**31)
FIELDS = frozenset(CONFIG_SINCE) | {"min_ctas", "blocking"}


def torch_options(*fields: str) -> SimpleNamespace:
    """A stand-in for ProcessGroupNCCL.Options of a torch that can set ``fields`` of NCCL's configuration."""
    return SimpleNamespace(
        is_high_priority_stream=False, config=SimpleNamespace(**dict.fromkeys(fields or FIELDS, UNDEFINED))
    )


def test_the_first_lanes_have_high_priority() -> None:
    assert {lane for lane in LANES if is_high_priority(lane)} == {"ep", "tp", "pp"}
    assert not is_high_priority("")
    for lane in LANES:
        assert {is_high_priority_of(resource, lane) for resource in Resource} == {is_high_priority(lane)}
    assert [each for each in Resource if is_high_priority_of(each)] == [Resource.INTER], "without lanes"
    with pytest.raises(UsageError, match="lane"):
        is_high_priority_of(Resource.INTER, "gradients")


def test_each_lane_sets_what_this_nccl_has() -> None:
    classes = {"ep": 3, "dp": 1}
    assert nccl_lane_options("ep", NEW) == {"is_high_priority_stream": 1}
    assert nccl_lane_options("ep", NEW, traffic_classes=classes) == {"is_high_priority_stream": 1, "traffic_class": 3}
    assert nccl_lane_options("dp", NEW, traffic_classes=classes) == {
        "is_high_priority_stream": 0,
        "max_ctas": LOWER_LANE_CTAS,
        "traffic_class": 1,
    }
    assert nccl_lane_options("dp", OLD, traffic_classes=classes).keys() == {"is_high_priority_stream", "max_ctas"}
    assert nccl_lane_options("dp", ANCIENT, traffic_classes=classes).keys() == {"is_high_priority_stream"}
    assert "traffic_class" in nccl_lane_options("dp", (2, 26, 2), traffic_classes=classes)
    assert "traffic_class" not in nccl_lane_options("dp", (2, 25, 1), traffic_classes=classes)
    assert nccl_lane_options("", NEW, traffic_classes=classes) == {}
    assert "traffic_class" not in nccl_lane_options("cp", NEW, traffic_classes=classes)


@pytest.mark.parametrize("classes", [{"gradients": 1}, {"ep": -1}, {"ep": "high"}])
def test_a_wrong_traffic_class_is_told(classes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="traffic_classes"):
        nccl_lane_options("ep", NEW, traffic_classes=classes)


def test_options_get_what_torch_can_set_and_an_earlier_lane_is_forgotten() -> None:
    options = torch_options()
    apply_lane(options, "dp", NEW, traffic_classes={"dp": 0})
    assert (options.is_high_priority_stream, options.config.max_ctas, options.config.traffic_class) == (
        False,
        LOWER_LANE_CTAS,
        0,
    )
    assert apply_lane(options, "ep", NEW) == {"is_high_priority_stream": 1}
    assert [options.is_high_priority_stream] == [True]
    assert options.config.max_ctas == options.config.traffic_class == UNDEFINED
    apply_lane(options, "", NEW)
    assert [options.is_high_priority_stream] == [False]
    old = torch_options("max_ctas")
    assert "traffic_class" not in apply_lane(old, "dp", NEW, traffic_classes={"dp": 0})
    assert not hasattr(old.config, "traffic_class")
    assert old.config.max_ctas == LOWER_LANE_CTAS


def test_options_of_the_user_stay_as_they_are() -> None:
    backend = cast("Inner", SimpleNamespace())
    assert use_lane(Nccl(backend), "dp") == {}
    assert 1 <= LOWER_LANE_CTAS <= 32, "what NCCL takes"


def lines(version: tuple[int, ...] | None, fields: frozenset[str] = FIELDS, **environment: str) -> dict[str, Line]:
    return {line[1]: line for line in lane_lines(environment, version, fields)}


def test_doctor_says_what_is_not_active_without_cuda() -> None:
    if not is_usable():
        assert at_hand(None) == (None, frozenset())
    by_name = lines(None)
    assert "2 chunks" in by_name["CPU (Gloo)"][2]
    assert "5%" in by_name["CPU (Gloo)"][2]
    assert by_name["order"][2] == "ep and tp before pp before cp before dp"
    assert by_name["CUDA"] == ("ok", "CUDA", "not active: no CUDA here", "")


def test_doctor_says_what_is_active_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    by_name = lines(NEW, NCCL_IB_TC="", TORCH_NCCL_HIGH_PRIORITY="0")
    assert all(mark == "ok" for mark, *_ in by_name.values())
    assert by_name["CUDA streams"][2] == "high priority for ep, pp, tp"
    assert by_name["CTA limits"][2] == "16 for cp, dp"
    assert "one chunk of each communicator" in by_name["CUDA holds"][2]
    assert "the program gives one" in by_name["traffic class"][2]


def test_doctor_says_what_undoes_lanes_on_cuda() -> None:
    undoing = {
        "NCCL_MAX_CTAS": "4",
        "NCCL_MAX_NCHANNELS": "2",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "NCCL_IB_SL": "3",
        "NCCL_IB_TC": "96",
    }
    by_name = lines(NEW, FIELDS, **undoing, NCCL_LAUNCH_ORDER_IMPLICIT="1")
    for name, value in undoing.items():
        assert by_name[name][:3] == ("warn", name, value)
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" in by_name["CUDA holds"][3]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in lines(NEW, CUDA_DEVICE_MAX_CONNECTIONS="1")["CUDA holds"][3]


def test_doctor_names_the_nccl_that_cannot() -> None:
    assert "NCCL 2.23.4 cannot, 2.26 and later can" in lines(OLD)["traffic class"][2]
    assert "without it" in lines(NEW, frozenset({"max_ctas"}))["traffic class"][2]


def test_doctor_says_that_lanes_are_off() -> None:
    found = {line[1]: line for line in lane_lines({}, NEW, FIELDS, is_on=False)}
    assert found["lanes"][0] == "warn"
    assert found.keys() == {"order", "lanes"}
