from __future__ import annotations

from pathlib import Path

import pytest

from commlayer.profiles import Peaks, Profile, Resource, catalog
from commlayer.profiles.catalog import build
from commlayer.profiles.errors import ProfileError, ProfileNotFoundError

INTER, INTRA, DEVICE = Resource.INTER, Resource.INTRA, Resource.DEVICE


@pytest.fixture
def monta() -> Profile:
    return catalog.load("monta-a800-2x8")


def test_every_shipped_profile_is_sound() -> None:
    assert {"h100-eos-2x8", "h800-2x8", "monta-a800-2x8"} <= set(catalog.names())
    for name in catalog.names():
        profile = catalog.load(name)
        assert profile.name == name
        assert profile.source
        assert profile.curves


def test_the_generated_files_are_what_the_generator_writes() -> None:
    folder = Path(build.__file__).parent
    for profile in build.build_catalog():
        assert (folder / f"{profile.name}.json").read_text(encoding="utf-8") == profile.to_json(), (
            "run python -m commlayer.profiles.catalog.build"
        )


@pytest.mark.parametrize(
    ("collective", "link", "group_size", "nbytes", "latency_ms"),
    [
        ("all_to_all", INTER, 2, 256e6, 6.909),
        ("all_to_all", INTER, 2, 32e6, 1.012),
        ("all_gather", INTRA, 8, 256e6, 1.443),
        ("all_to_all", INTER, 2, 8e6, 0.374),
        ("all_gather", INTRA, 8, 64e6, 0.385),
        ("copy", DEVICE, 1, 64e6, 0.05),
    ],
)
def test_monta_table_8(
    monta: Profile, collective: str, link: Resource, group_size: int, nbytes: float, latency_ms: float
) -> None:
    curve = monta.curve(collective, link, group_size)
    assert curve.at(nbytes) / 1e3 == pytest.approx(latency_ms, rel=0.002)  # printed to three places
    assert not curve.is_extrapolated(nbytes)


def test_monta_strategies_at_256_mb(monta: Profile) -> None:
    def all_to_all(nbytes: float) -> float:
        return monta.curve("all_to_all", INTER, 2).at(nbytes)

    def all_gather(nbytes: float) -> float:
        return monta.curve("all_gather", INTRA, 8).at(nbytes)

    copy_us = monta.curve("copy", DEVICE, 1).at(64e6)
    assert all_to_all(256e6) == pytest.approx(6909, rel=5e-3)
    assert all_to_all(32e6) + all_gather(256e6) == pytest.approx(2454, rel=5e-3)
    # algorithms 1 and 2 with 4 chunks: all_gather + copy is the slowest stage, then all_gather alone
    assert all_to_all(8e6) + 4 * (all_gather(64e6) + copy_us) == pytest.approx(2117, rel=5e-3)
    assert all_to_all(8e6) + 4 * all_gather(64e6) + copy_us == pytest.approx(1967, rel=5e-3)


def test_monta_says_only_what_the_paper_says(monta: Profile) -> None:
    assert (monta.kind, monta.gather, monta.topology) == ("paper", "whole", "2x8")
    assert monta.peaks == Peaks(25, 200, 1600)
    assert {curve.key for curve in monta.curves} == {
        ("all_to_all", INTER, 2),
        ("all_gather", INTRA, 8),
        ("copy", DEVICE, 1),
    }
    assert monta.interference == ()
    assert monta.error == 0.0
    assert monta.curve("all_to_all", INTER, 2).efficiency(8192e6, 25) == pytest.approx(0.741)
    assert monta.curve("all_gather", INTRA, 8).efficiency(8192e6, 200) == pytest.approx(0.803)
    for word in ("table 8", "fig. 13", "no interference is stored"):
        assert word in monta.source


@pytest.mark.parametrize(
    ("name", "peaks"), [("h800-2x8", Peaks(50, 200, 1700)), ("h100-eos-2x8", Peaks(50, 450, 1675))]
)
def test_published_profiles_are_peaks_and_say_so(name: str, peaks: Peaks) -> None:
    profile = catalog.load(name)
    assert (profile.kind, profile.gather, profile.topology, profile.peaks) == ("published", "remote", "2x8", peaks)
    for words in ("NOT measurements", "inter 20 us, intra 10 us, device 5 us", "assum"):
        assert words in profile.source
    for collective, link, group_size, latency_us in [
        ("all_to_all", INTER, 2, 20),
        ("all_gather", INTRA, 2, 10),
        ("all_gather", INTRA, 4, 10),
        ("all_gather", INTRA, 8, 10),
        ("copy", DEVICE, 1, 5),
    ]:
        curve = profile.curve(collective, link, group_size)
        assert curve.latency_us == pytest.approx(latency_us, rel=1e-3)
        assert 0.998 < curve.efficiency(8 << 30, peaks.of(link)) <= 1
        assert curve.holdout_error is None


def test_a_profile_is_found_by_name_or_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monta: Profile) -> None:
    mine = monta.replace(name="mine")
    mine.save(tmp_path / "mine.json")
    mine.save(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert catalog.load_profile("monta-a800-2x8") is monta
    for path in (str(tmp_path / "mine.json"), "./mine", "mine.json", "mine"):
        assert catalog.load_profile(path) == mine


def test_a_file_of_a_shipped_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monta: Profile
) -> None:
    (tmp_path / "monta-a800-2x8").write_text("not a profile", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert catalog.load_profile("monta-a800-2x8") is monta
    with pytest.raises(ProfileError, match="expected JSON"):
        catalog.load_profile("./monta-a800-2x8")


def test_an_unknown_profile_is_answered_with_close_ones() -> None:
    with pytest.raises(ProfileNotFoundError, match=r"got 'monta-a800'\. Did you mean monta-a800-2x8.*profiles list"):
        catalog.load_profile("monta-a800")
    with pytest.raises(ProfileNotFoundError, match=r"got 'zzz'\. `commlayer profiles list` shows all"):
        catalog.load_profile("zzz")
    with pytest.raises(ProfileNotFoundError, match=r"none\.json: expected a profile, got no such file"):
        catalog.load_profile("none.json")


def test_the_generator_writes_its_own_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    (tmp_path / "emulated-2x4.json").write_text("measured", encoding="utf-8")
    build.main()
    assert (tmp_path / "emulated-2x4.json").read_text(encoding="utf-8") == "measured"
    assert len(list(tmp_path.iterdir())) == 1 + len(build.build_catalog())
