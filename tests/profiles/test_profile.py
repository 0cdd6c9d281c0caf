from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles import (
    Curve,
    Interference,
    Peaks,
    Profile,
    Resource,
    Topology,
    check_shape,
    diff,
    parse_profile,
    read_profile,
)
from commlayer.profiles.errors import (
    PlanError,
    ProfileError,
    ProfileMismatchError,
    ProfileNotFoundError,
    TopologyError,
)

UNHURRIED = settings(deadline=None)  # a busy machine is no failure

INTER, INTRA, DEVICE = Resource.INTER, Resource.INTRA, Resource.DEVICE


def make(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "name": "test",
        "kind": "measured",
        "source": "a test",
        "topology": "2x4",
        "peaks": Peaks(25, 200, 1600),
        "gather": "remote",
        "curves": [
            Curve("all_to_all", INTER, 2, (1024, 4096), (10.0, 20.0), holdout_error=0.02),
            Curve("all_to_all", INTER, 4, (1024,), (11.0,)),
            Curve("copy", DEVICE, 1, (1024, 4096), (1.0, 2.0), holdout_error=0.06, p99_us=(2.0, 3.0), samples=(7, 8)),
        ],
        "interference": [Interference(INTRA, DEVICE, 1.25)],
        "environment": {"host": "h", "torch": "2.13"},
    }
    return Profile.create(**{**fields, **changes})


TIMES = st.floats(1e-3, 1e9)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    curves = []
    for group_size in sorted(draw(st.sets(st.integers(1, 8), max_size=3))):
        sizes = sorted(draw(st.sets(st.integers(1, 1 << 40), min_size=1, max_size=5)))
        times = draw(st.lists(TIMES, min_size=len(sizes), max_size=len(sizes)))
        curves.append(Curve.from_samples("all_gather", INTRA, group_size, sizes, times, source=draw(TEXT)))
    pairs = draw(st.sets(st.permutations(list(Resource)).map(lambda both: (both[0], both[1])), max_size=3))
    return make(
        name=draw(TEXT.filter(bool)),
        source=draw(TEXT),
        topology=draw(st.sampled_from(["2x4", "3+4", "1x1"])),
        peaks=Peaks(draw(TIMES), draw(TIMES), draw(TIMES)),
        curves=curves,
        interference=[Interference(one, other, draw(st.floats(1, 10))) for one, other in sorted(pairs)],
        environment=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


@UNHURRIED
@given(profiles())
def test_a_profile_survives_its_file(profile: Profile) -> None:
    again = parse_profile(profile.to_json(), "memory")
    assert again == profile
    assert again.to_json() == profile.to_json()
    assert diff(profile, again) == []


@UNHURRIED
@given(profiles())
def test_the_fingerprint_depends_on_content_and_not_on_spelling(profile: Profile) -> None:
    spelled = json.loads(profile.to_json())
    shuffled = json.dumps(dict(sorted(spelled.items(), reverse=True)), indent=7)
    assert parse_profile(shuffled, "memory").fingerprint == profile.fingerprint
    assert profile.replace().fingerprint == profile.fingerprint
    assert profile.replace(source=profile.source + "!").fingerprint != profile.fingerprint


def test_the_fingerprint_is_the_same_for_ever() -> None:
    # If this fails, every profile that users have stored is refused as edited: raise VERSION instead.
    assert make().fingerprint == "sha256:c778fab0544675d83e406e316efdbe9e22399a644befd8c007bec8b986d9fb11"


def test_a_profile_of_sizes_that_it_does_not_know_says_so_in_its_file() -> None:
    assert "plan_from_bytes" not in make().to_json()
    coarse = make(plan_from_bytes=4096)
    assert coarse.fingerprint != make().fingerprint
    assert parse_profile(coarse.to_json(), "memory") == coarse
    assert coarse.replace(name="other").plan_from_bytes == 4096
    (difference,) = diff(make(), coarse)
    assert (difference.field, difference.a, difference.b) == ("plan_from_bytes", "0", "4096")
    with pytest.raises(ProfileError, match="plan_from_bytes: expected a size of at least 0, got -1"):
        make(plan_from_bytes=-1)


def test_whole_numbers_may_be_spelled_either_way() -> None:
    profile = make()
    whole = profile.to_json().replace("25.0", "25").replace("10.0", "10")
    assert parse_profile(whole, "memory") == profile


def test_save_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("old", encoding="utf-8")
    make().save(path)
    assert read_profile(path) == make()
    assert [entry.name for entry in tmp_path.iterdir()] == ["cluster.json"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("old", encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        make().save(path)
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["cluster.json"]


def test_a_profile_not_made_by_create_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="fingerprint"):
        msgspec.structs.replace(make(), name="other").save(tmp_path / "cluster.json")
    assert not list(tmp_path.iterdir())


def test_curves_are_found_by_collective_link_and_group() -> None:
    profile = make()
    assert profile.curve("all_to_all", INTER, 4).at(1024) == 11.0
    assert profile.curve("copy", DEVICE, 1) is profile.curves[2]


def test_a_missing_curve_says_what_there_is_and_how_to_get_it() -> None:
    with pytest.raises(PlanError, match=r"'test' \(2x4\).*group size 8.*group size 2, 4\b.*`commlayer measure`"):
        make().curve("all_to_all", INTER, 8)
    assert make().find("all_to_all", INTER, 8) is None
    with pytest.raises(PlanError, match=r"all_gather on intra.*it has all_to_all on inter, copy on device"):
        make().curve("all_gather", INTRA, 4)
    with pytest.raises(PlanError, match="no curves at all"):
        make(curves=[]).curve("all_gather", INTRA, 4)


@pytest.mark.parametrize(
    ("topology", "collective", "link", "group_size", "is_measured"),
    [
        ("2x4", "all_to_all", INTER, 2, True),
        ("2x4", "all_gather", INTRA, 4, True),
        ("2x4", "copy", DEVICE, 1, True),
        ("1x4", "all_to_all", INTRA, 4, True),
        ("2x4", "all_to_all", INTRA, 4, True),
        ("2x4", "all_reduce", INTER, 8, True),
        ("2x4", "all_reduce", INTER, 4, False),
        ("4x4", "all_to_all", INTER, 2, False),
        ("2x4", "all_gather", INTRA, 2, True),
        ("2x4", "all_gather", INTRA, 3, False),
        ("1x4", "all_gather", INTRA, 4, True),
        ("2x1", "all_gather", INTRA, 1, False),
        ("3+4", "copy", DEVICE, 1, True),
        ("3+4", "all_to_all", INTRA, 4, True),
        ("3+4", "all_to_all", INTRA, 3, False),
        ("3+4", "all_reduce", INTER, 7, True),
    ],
)
def test_a_missing_curve_advises_to_measure_only_what_the_profiler_measures(
    topology: str, collective: str, link: Resource, group_size: int, is_measured: bool
) -> None:
    with pytest.raises(PlanError) as caught:
        make(topology=topology, curves=[]).curve(collective, link, group_size)
    assert ("Measure it on that cluster" in str(caught.value)) == is_measured
    assert ("those of other groups follow from them" in str(caught.value)) != is_measured


def test_slowdowns_are_directed_and_one_by_default() -> None:
    assert make().slowdown(INTRA, DEVICE) == 1.25
    assert make().slowdown(DEVICE, INTRA) == 1.0


def test_error_is_the_median_of_what_the_curves_state() -> None:
    assert make().error == pytest.approx(0.04)
    assert make(curves=[]).error == 0.0


def test_profiles_can_key_a_cache() -> None:
    assert {make(): 1}[make()] == 1


def set_field(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = to

    return edit


def drop_field(*path: Any) -> Callable[[dict[str, Any]], None]:
    def edit(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        del content[path[-1]]

    return edit


def add_twin(field: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[field].append(content[field][0])


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "foreign": (set_field("format", to="nccl-topo"), r"field format: expected 'commlayer-profile', got 'nccl-topo'"),
    "no format": (drop_field("format"), "field format: .*missing: this is not a commlayer profile"),
    "newer": (set_field("version", to=2), "field version: expected at most 1, got 2: a newer commlayer .*Upgrade"),
    "no version": (drop_field("version"), "field version: expected 1, but it is missing"),
    "odd version": (set_field("version", to="1"), "field version: expected 1, got '1'"),
    "true version": (set_field("version", to=True), "field version: expected 1, got True"),
    "unknown field": (set_field("speed", to=1), "field speed: unknown field"),
    "unknown curve field": (set_field("curves", 1, "speed", to=1), r"field curves\[1\]\.speed: unknown field"),
    "missing field": (drop_field("peaks"), "field peaks: expected this field"),
    "missing curve field": (drop_field("curves", 2, "time_us"), r"field curves\[2\]\.time_us: expected this field"),
    "mistyped": (set_field("name", to=3), "field name: expected str, got int"),
    "mistyped time": (
        set_field("curves", 0, "time_us", 1, to="fast"),
        r"field curves\[0\]\.time_us\[1\]: expected float",
    ),
    "mistyped bytes": (set_field("curves", 0, "bytes", 0, to=1.5), r"field curves\[0\]\.bytes\[0\]: expected int"),
    "mistyped environment": (set_field("environment", "host", to=1), r"field environment\[.*expected str, got int"),
    "empty name": (set_field("name", to=""), "field name: expected a name"),
    "kind": (set_field("kind", to="guessed"), "field kind: expected measured, emulated, published or paper"),
    "gather": (set_field("gather", to="half"), "field gather: expected whole or remote"),
    "link": (set_field("curves", 0, "link", to="nvlink"), r"field curves\[0\]\.link: expected inter, intra or device"),
    "non-monotone bytes": (
        set_field("curves", 0, "bytes", 1, to=8),
        r"field curves\[0\]\.bytes\[1\]: .*got 8 after 1024",
    ),
    "falling time": (set_field("curves", 0, "time_us", 1, to=9.0), r"field curves\[0\]\.time_us\[1\]: .*do not fall"),
    "negative time": (set_field("curves", 0, "time_us", 0, to=-1.0), r"field curves\[0\]\.time_us\[0\]: .*got -1.0"),
    "NaN": (set_field("curves", 0, "time_us", 0, to=float("nan")), r"field curves\[0\]\.time_us\[0\]: .*got nan"),
    "infinite peak": (set_field("peaks", "inter_gbps", to=float("inf")), r"field peaks\.inter_gbps: .*got inf"),
    "twin curve": (add_twin("curves"), r"field curves\[3\]: expected all_to_all inter 2 once.*curves\[0\]"),
    "twin pair": (add_twin("interference"), r"field interference\[1\]: expected intra device once"),
    "speed-up": (set_field("interference", 0, "slowdown", to=0.5), r"field interference\[0\]\.slowdown: .*got 0.5"),
    "itself": (set_field("interference", 0, "other", to="intra"), r"field interference\[0\]\.other: "),
    "bad topology": (set_field("topology", to="2 nodes"), "field topology: expected .*got '2 nodes'"),
    "long topology": (set_field("topology", to="4+4"), "field topology: expected the shortest spelling '2x4'"),
    "edited": (set_field("source", to="mine"), "field fingerprint: damaged or edited: expected sha256:.*got sha256:"),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_damaged_profile_is_refused_with_file_field_and_reason(case: str, tmp_path: Path) -> None:
    edit, message = EDITS[case]
    content = json.loads(make().to_json())
    edit(content)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ProfileError, match=message) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: field ")


@UNHURRIED
@given(st.data())
def test_any_changed_character_is_refused_or_harmless(data: st.DataObject) -> None:
    text = make().to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.sampled_from('09aZ.-e"{}[], \n\x00\u20ac')) + text[place + 1 :]
    try:
        assert parse_profile(changed, "memory") == make()
    except ProfileError as error:
        assert str(error).startswith("memory: ")  # noqa: PT017 (either way is right)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1, column 1: expected JSON"),
        (b'{"format": "commlayer-profile",\n  "version": 1,,}', "line 2, column 1[56]: expected JSON"),
        (make().to_json()[:-100].encode(), r"line \d+, column \d+: expected JSON"),
        (b"\xff\xfe", "expected UTF-8 text, got byte 0xff at offset 0"),
        (b"[1, 2]", "expected a JSON object .* got a JSON array"),
        (b"3", "got a JSON number"),
        (b"[" * 100_000, "no profile needs"),
        (b'{"name": "a", "name": "b"}', "field name: expected it once"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=message) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileNotFoundError, match=r"none\.json: expected a profile, got no such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot read the profile: expected a regular file, got a directory"):
        read_profile(tmp_path)


def test_create_refuses_what_the_file_would_be_refused_for() -> None:
    with pytest.raises(ProfileError, match="profile 'test': field kind: expected measured"):
        make(kind="guessed")
    with pytest.raises(TopologyError):
        make(topology="many")
    with pytest.raises(TypeError):
        make(speed=1)


def test_a_profile_of_another_shape_is_refused() -> None:
    check_shape(make(), Topology.from_identities(["a", "b"] * 4))
    with pytest.raises(ProfileMismatchError, match=r"shape 2x8, got 'test' of shape 2x4.*`commlayer measure`"):
        check_shape(make(), Topology.parse("2x8"))


def test_create_takes_a_topology_too() -> None:
    assert make(topology=Topology.parse("4+4")).topology == "2x4"


def test_diff_names_what_differs_and_by_how_much() -> None:
    old = make()
    new = make(
        name="new",
        peaks=Peaks(50, 200, 1600),
        curves=[
            Curve("all_to_all", INTER, 2, (1024, 4096), (10.0, 30.0), holdout_error=0.02),
            Curve("all_to_all", INTER, 4, (1024,), (11.0,), source="again"),
            Curve("all_gather", INTRA, 4, (1024,), (1.0,)),
        ],
        interference=[Interference(DEVICE, INTRA, 1.5)],
        environment={"host": "h", "torch": "2.14", "nccl": "2.28"},
    )
    found = {item.field: item for item in diff(old, new)}
    assert list(found) == [
        "name",
        "peaks.inter_gbps",
        "curves[all_gather intra 4]",
        "curves[all_to_all inter 2]",
        "curves[all_to_all inter 4]",
        "curves[copy device 1]",
        "interference[device beside intra]",
        "interference[intra beside device]",
        "environment.nccl",
        "environment.torch",
    ]
    assert found["peaks.inter_gbps"].change == 1.0
    slower = found["curves[all_to_all inter 2]"]
    assert (slower.a, slower.b) == ("20 us at 4096 B", "30 us at 4096 B")
    assert slower.change == pytest.approx(0.5)
    assert found["curves[all_to_all inter 4]"].change == 0.0
    assert (found["curves[copy device 1]"].a, found["curves[copy device 1]"].b) == ("2 sizes", "(none)")
    assert (found["interference[device beside intra]"].a, found["environment.nccl"].a) == ("(none)", "(none)")


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = ("torch", "numpy", "scipy", "matplotlib")
    code = (
        "import sys, commlayer.profiles as p; assert 'msgspec' not in sys.modules; "
        "[getattr(p, name) for name in p.__all__]; p.catalog.load_profile('monta-a800-2x8'); p.sweep; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import commlayer.profiles

    assert {*commlayer.profiles.__all__, "catalog", "sweep"} <= set(dir(commlayer.profiles))
    with pytest.raises(AttributeError, match="has no attribute 'speed'"):
        commlayer.profiles.speed  # noqa: B018


def test_a_profile_that_has_been_pickled_is_the_same() -> None:
    profile = make()
    assert pickle.loads(pickle.dumps(profile)).to_json() == profile.to_json()
