"""A curve that rests on too few times or sizes says so, in one line."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner
from synthetic_profiles import synthetic_profile

from commlayer.cli import measure as command
from commlayer.cli.main import main
from commlayer.measure import calibrate
from commlayer.profiles import catalog
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.sweep import doubts, least_samples, summarize

SIZES = (4096, 8192, 16384)


def curve(*samples: int, sizes: tuple[int, ...] = SIZES) -> Curve:
    times = [10.0 * 2**place for place in range(len(sizes))]
    return Curve.from_samples("all_to_all", Resource.INTER, 2, sizes, times, p99_us=times, samples=samples)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_a_median_has_an_interval_from_that_many_times_on(confidence: float) -> None:
    least = least_samples(confidence)
    times = [100.0 + number for number in range(least)]
    assert summarize(times, confidence).half_width < math.inf
    assert summarize(times[:-1], confidence).half_width == math.inf if least > 1 else True


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ((6, 6, 6), []),
        ((), []),  # not known, as in a profile from a paper
        ((40, 6, 5), ["1 of 3 sizes (16384 bytes) measured fewer than 6 times (down to 5)"]),
        ((40, 3, 2), ["2 of 3 sizes (8192 to 16384 bytes) measured fewer than 6 times (down to 2)"]),
    ],
)
def test_few_times(samples: tuple[int, ...], words: list[str]) -> None:
    found = doubts([curve(*samples)])
    assert len(found) == len(words)
    for line, expected in zip(found, words, strict=True):
        assert line.startswith(f"all_to_all on inter, group size 2: {expected}")
        assert "no 95% interval" in line


def test_few_sizes_are_in_the_same_line() -> None:
    (line,) = doubts([curve(9, 9, sizes=SIZES[:2])])
    assert line == "all_to_all on inter, group size 2: fewer than 3 sizes, so it has no hold-out error"
    (line,) = doubts([curve(9, 1, sizes=SIZES[:2])])
    assert line.count("all_to_all on inter") == 1
    assert line.endswith("; fewer than 3 sizes, so it has no hold-out error")


def test_a_sweep_with_few_times_warns_and_its_output_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    profile = synthetic_profile()
    command._warn(profile.replace(curves=[curve(6, 6, 6)]))
    assert capsys.readouterr() == ("", "")
    command._warn(profile.replace(curves=[curve(6, 6, 2)]))
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert err.startswith("warning: all_to_all on inter, group size 2: 1 of 3 sizes")
    assert "-n" in err


def test_profiles_show_says_which_curves_rest_on_few_times() -> None:
    known = CliRunner().invoke(main, ["profiles", "show", "emulated-2x8"])
    line = next(
        line for line in known.output.splitlines() if line.startswith("few times: all_to_all on inter, group size 2")
    )
    assert "down to 2" in line
    assert [curve for curve in catalog.load("emulated-2x8").curves if min(curve.samples, default=6) < 6]
    assert "few times" not in CliRunner().invoke(main, ["profiles", "show", "h800-2x8"]).output


def test_a_job_that_measures_says_how_little_its_curves_rest_on() -> None:
    probe = synthetic_profile().replace(curves=[curve(2, 2, 1)])
    assert calibrate._doubted(probe) == (
        "It has too few times to know the error of 1 of its 1 curve, which is taken to be 25%. "
    )
    assert calibrate._doubted(probe.replace(curves=[curve(6, 6, 6)])) == ""
