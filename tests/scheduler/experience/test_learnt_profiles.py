"""Profiles that running jobs have learnt, and merging them into another one: nothing is written over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commlayer.cli.main import main
from commlayer.profiles import catalog
from commlayer.profiles.errors import ProfileError, ProfileMismatchError
from commlayer.profiles.links import Resource, SlowLink
from commlayer.profiles.profile import Profile, read_profile
from commlayer.scheduler.experience.learnt_profiles import Learning, learnt_profile, merge_learnt
from commlayer.scheduler.experience.link_rates import profile_at

BASE = catalog.load("emulated-2x4")


def learnt_from(base: Profile, **learning: Any) -> Profile:
    usual: dict[str, Any] = {"base": base.fingerprint, "where": "group 0 of 8 ranks", "time_s": 1_790_000_000.0}
    found = Learning(**(usual | learning))
    return learnt_profile(profile_at(base, found.fabric_rate), found)


def test_a_learnt_profile_says_where_it_comes_from() -> None:
    learnt = learnt_from(BASE, fabric_rate=0.25, node_rates={0: 1.0, 1: 0.5})
    assert learnt.environment["learnt.from"] == BASE.fingerprint
    assert learnt.environment["learnt.by"] == "group 0 of 8 ranks"
    assert learnt.environment["learnt.at"] == "2026-09-21T14:13:20Z"
    assert learnt.slow_links == (SlowLink((1,), 0.5),)
    assert "as measured in a running job" in learnt.source
    assert {name: learnt.environment[name] for name in BASE.environment} == BASE.environment


def test_curves_between_nodes_are_taken_over_and_nothing_else() -> None:
    learnt = learnt_from(BASE, fabric_rate=0.25)
    merged, taken, notes = merge_learnt(BASE, learnt)
    for curve in BASE.curves:
        now = merged.curve(curve.collective, curve.link, curve.group_size)
        if curve.link is Resource.INTER:
            assert now == learnt.curve(curve.collective, curve.link, curve.group_size)
            assert f"{curve.collective} inter {curve.group_size}" in taken
        else:
            assert now == curve
    assert merged.peaks.inter_gbps == pytest.approx(BASE.peaks.inter_gbps / 4)
    assert (merged.peaks.intra_gbps, merged.name, merged.interference) == (
        BASE.peaks.intra_gbps,
        BASE.name,
        BASE.interference,
    )
    assert merged.source.startswith(BASE.source)
    assert learnt.fingerprint in merged.source
    assert notes == ()


def test_cards_are_taken_over_where_they_were_compared() -> None:
    base = BASE.replace(slow_links=(SlowLink((0,), 0.7), SlowLink((0, 1), 0.9)))
    learnt = learnt_from(base, node_rates={0: 1.0, 1: 0.4})
    merged, taken, _ = merge_learnt(base, learnt)
    assert set(merged.slow_links) == {SlowLink((0, 1), 0.9), SlowLink((1,), 0.4)}
    assert taken == ()
    assert merged.curves == base.curves
    only_one = merge_learnt(base, learnt_from(base, node_rates={1: 0.4})).profile
    assert SlowLink((0,), 0.7) in only_one.slow_links  # node 0 was in no group that measured it


def test_a_profile_of_another_base_is_taken_with_a_note() -> None:
    other = BASE.replace(name="other", source="elsewhere")
    (note,) = merge_learnt(other, learnt_from(BASE, fabric_rate=0.5)).notes
    assert BASE.fingerprint in note
    assert other.fingerprint in note


def test_what_no_job_has_learnt_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"field environment: expected a profile that a running job has learnt"):
        merge_learnt(BASE, BASE)
    with pytest.raises(
        ProfileMismatchError, match="got 'emulated-2x8' of shape 2x8 and 'emulated-2x4 at 50%' of shape 2x4"
    ):
        merge_learnt(catalog.load("emulated-2x8"), learnt_from(BASE, fabric_rate=0.5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learnt.fabric_rate", "fast"),
        ("learnt.fabric_rate", "nan"),
        ("learnt.fabric_rate", "-1"),
        ("learnt.nodes", "0,x"),
        ("learnt.nodes", "9" * 5000),
    ],
)
def test_damaged_words_of_what_was_learnt_are_refused(name: str, value: str) -> None:
    learnt = learnt_from(BASE, fabric_rate=0.5)
    hostile = learnt.replace(environment={**learnt.environment, name: value})
    with pytest.raises(ProfileError, match="field environment"):
        merge_learnt(BASE, hostile)


# The command


def call(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="commlayer")
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture
def learnt_path(tmp_path: Path) -> Path:
    path = tmp_path / "learnt-0.json"
    learnt_from(BASE, fabric_rate=0.25).save(path)
    return path


def test_the_command_writes_a_third_file(tmp_path: Path, learnt_path: Path) -> None:
    base, out = tmp_path / "base.json", tmp_path / "out.json"
    BASE.save(base)
    output = call("profiles", "merge", str(base), str(learnt_path), "-o", str(out)).stdout
    assert "curves taken over" in output
    assert read_profile(out) == merge_learnt(BASE, read_profile(learnt_path)).profile
    assert read_profile(base) == BASE
    assert call("profiles", "validate", str(out)).exit_code == 0


def test_a_file_is_replaced_only_with_force(tmp_path: Path, learnt_path: Path) -> None:
    base = tmp_path / "base.json"
    BASE.save(base)
    arguments = ["profiles", "merge", str(base), str(learnt_path), "-o", str(base)]
    assert "there is such a file already" in call(*arguments, status=2).stderr
    assert read_profile(base) == BASE
    found = json.loads(call(*arguments, "--force", "--json").stdout)
    assert found["path"] == str(base)
    assert len(found["taken"]) == sum(curve.link is Resource.INTER for curve in BASE.curves)
    assert read_profile(base).fingerprint == found["fingerprint"] != BASE.fingerprint


def test_the_command_refuses_what_was_not_learnt(tmp_path: Path) -> None:
    result = call("profiles", "merge", "emulated-2x4", "emulated-2x4", "-o", str(tmp_path / "out.json"), status=2)
    assert "learnt.from is missing" in result.stderr
    assert not (tmp_path / "out.json").exists()
