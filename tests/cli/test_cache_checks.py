"""``commlayer doctor`` on the cache of profiles: the one that a job here would find, others, and damaged ones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from synthetic_profiles import synthetic_profile

from commlayer.cli.cache_checks import cache_lines
from commlayer.cli.main import main
from commlayer.measure.calibrate import cluster_key
from commlayer.measure.machines import describe_machine
from commlayer.profiles.links import SlowLink
from commlayer.profiles.topology import Topology
from commlayer.settings import Settings


def kept(folder: Path, *, slow: bool = False) -> Path:
    """A profile where a job of this machine's kind would look."""
    settings, topology = Settings(cache=str(folder)), Topology.parse("2x4")
    machine = describe_machine(settings)
    path = folder / f"{cluster_key(topology, [machine] * 8, 'cpu', settings.intra)}.json"
    links = [SlowLink((1,), 0.25)] if slow else []
    synthetic_profile().replace(slow_links=links).save(path)
    return path


def test_the_profile_that_a_job_would_find_is_named_with_its_age(tmp_path: Path) -> None:
    path = kept(tmp_path)
    then = time.time() - 3 * 86400 - 60
    os.utime(path, (then, then))
    ((mark, name, value, advice),) = cache_lines(Settings(cache=str(tmp_path)))
    assert (mark, name) == ("ok", "cached profile")
    assert value == f"{path}: 2x4, 3 days old, no slow links"
    assert "checked when a job starts" in advice
    os.utime(path)  # measured again since
    assert ": 2x4, just measured, no slow links" in cache_lines(Settings(cache=str(tmp_path)))[0][2]


def test_slow_links_are_a_warning(tmp_path: Path) -> None:
    kept(tmp_path, slow=True)
    ((mark, _, value, _),) = cache_lines(Settings(cache=str(tmp_path)))
    assert mark == "warn"
    assert value.endswith("2x4, just measured, node 1's card has 25% of the usual rate")


def test_an_empty_or_missing_folder_says_that_nothing_is_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none", Path("/dev/null")):
        ((mark, name, value, advice),) = cache_lines(Settings(cache=str(folder)))
        assert (mark, name, value) == ("ok", "cached profile", f"none in {folder}")
        assert "measures its links" in advice


def test_others_are_counted_and_damaged_ones_named(tmp_path: Path) -> None:
    path = kept(tmp_path)
    (tmp_path / "2x4-0123456789abcdef.json").write_bytes(path.read_bytes())
    (tmp_path / "2x4-damaged.json").write_text("{", encoding="utf-8")
    (tmp_path / "2x4-folder.json").mkdir()
    lines = cache_lines(Settings(cache=str(tmp_path), profile="some.json"))
    assert [(mark, name) for mark, name, _, _ in lines] == [
        ("ok", "cached profile") if name == path.name else ("warn", "damaged file")
        for name in sorted([path.name, "2x4-damaged.json", "2x4-folder.json"])
    ] + [("ok", "other profiles"), ("ok", "COMMLAYER_PROFILE")]
    assert lines[-2][2] == f"1 in {tmp_path}"
    assert all(str(tmp_path / "2x4-") in value for _, name, value, _ in lines if name == "damaged file")


@pytest.mark.parametrize("cache", ["/tmp/a\0b", "/" + "x" * 5000])
def test_a_folder_that_cannot_be_is_a_line(cache: str) -> None:
    lines = cache_lines(Settings(cache=cache))
    assert len(lines) == 1
    assert len(lines[0][2]) < 600


def test_doctor_shows_it_in_json_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept(tmp_path)
    monkeypatch.setenv("COMMLAYER_CACHE", str(tmp_path))
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)["findings"]
    (line,) = [each for each in found if each["name"] == "cached profile"]
    assert line["section"] == "Cached profiles"
    assert line["value"].startswith(f"{path}: 2x4")
