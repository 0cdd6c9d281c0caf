"""``commlayer profiles``: look at what is known about clusters, without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from commlayer.cli.commands import CommandGroup
from commlayer.cli.failure import fitting
from commlayer.cli.interchange import export_command, import_command, tuner_command
from commlayer.cli.option_types import PICTURE, PROFILE, json_option
from commlayer.cli.output_files import draw
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table, record, rounded
from commlayer.profiles import catalog
from commlayer.profiles.compare import diff
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import ProfileError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.profiles.sweep import doubts
from commlayer.units import format_bytes

__all__ = ["profiles"]


@click.group(cls=CommandGroup, no_args_is_help=True)
def profiles() -> None:
    """List, show, validate, compare, import and export profiles."""


for each in (import_command, export_command, tuner_command):
    profiles.add_command(each)


@profiles.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the profiles that are shipped."""
    shipped = [catalog.load(name) for name in catalog.names()]
    if as_json:
        print_json([_summary(profile) for profile in shipped])
        return
    rows = []
    for profile in shipped:
        source = profile.source.split("\n", 1)[0]
        if len(source) > 80:
            source = source.split(". ", 1)[0].rstrip(".")
        peaks = [f"{profile.peaks.of(link):g}" for link in _LINKS]
        rows.append([profile.name, profile.kind, profile.topology, *peaks, str(len(profile.curves)), source])
    columns = ["name", "kind", "topology", ">inter GB/s", ">intra GB/s", ">device GB/s", ">curves", "~source"]
    print_table(columns, rows, spare=(7, 5))  # the source, which `show` has whole, and what copies inside a device take


@profiles.command("show")
@click.argument("profile_name", type=PROFILE, metavar="NAME|PATH")
@click.option("--picture", type=PICTURE, help="Draw efficiency over bytes (.svg, .png, .pdf).")
@json_option
def show(profile_name: str, picture: Path | None, as_json: bool) -> None:
    """Show one profile: peaks, curves in nccl-tests' columns, interference, where it comes from."""
    profile = catalog.load_profile(profile_name)
    if picture is not None:
        from commlayer.drawing import efficiency_figure

        draw(picture, efficiency_figure(profile))
    if as_json:
        curves = []
        for curve in profile.curves:
            peak = profile.peaks.of(curve.link)
            rows = [
                {
                    "bytes": size,
                    "time_us": rounded(time_us),
                    "algbw_gbps": rounded(curve.algbw_gbps(size), 6),
                    "busbw_gbps": rounded(curve.busbw_gbps(size), 6),
                    "efficiency": rounded(curve.efficiency(size, peak), 6),
                }
                for size, time_us in zip(curve.bytes, curve.time_us, strict=True)
            ]
            about = record(curve, "collective", "link", "group_size", "latency_us", "bandwidth_gbps")
            curves.append(about | {"holdout_error": curve.holdout_error, "source": curve.source, "rows": rows})
        print_json({**_summary(profile), "curves": curves})
    else:
        _show(profile)


@profiles.command("validate")
@click.argument("names", nargs=-1, required=True, type=PROFILE, metavar="NAME|PATH...")
@json_option
def validate(names: tuple[str, ...], as_json: bool) -> None:
    """Check profiles, one line each; exit status 2 if one of them is not sound."""
    results = [_checked(name) for name in names]
    if as_json:
        print_json(results)
    else:
        for result in results:
            lead, colour = ("ok ", "green") if result["ok"] else ("bad", "red")
            echo_sentence(f" {result['message']}", lead=lead, colour=colour)
    sys.exit(0 if all(result["ok"] for result in results) else 2)


@profiles.command("diff")
@click.argument("a", type=PROFILE, metavar="A")
@click.argument("b", type=PROFILE, metavar="B")
@json_option
def diff_(a: str, b: str, as_json: bool) -> None:
    """Compare two profiles; exit status 0 if their content is equal, 1 if it differs."""
    first, second = catalog.load_profile(a), catalog.load_profile(b)
    differences, ratios = diff(first, second), _ratios(first, second)
    if as_json:
        print_json(
            {"a": first.name, "b": second.name, "same": not differences, "differences": differences, "ratios": ratios}
        )
    elif not differences:
        echo_sentence(f"{a} and {b}: equal content ({first.fingerprint})")
    else:
        rows = []
        for each in differences:
            texts = [each.a, each.b]
            if max(map(len, texts)) > _LONGEST:  # from shortly before they part
                pairs = enumerate(zip(*texts, strict=False))
                parts = next((place for place, (a, b) in pairs if a != b), min(map(len, texts)))
                start = parts - 20 if parts > 40 else 0
                end = start + _LONGEST
                texts = ["…" * (start > 0) + text[start:end] + "…" * (len(text) > end) for text in texts]
            rows.append([each.field, *texts, "" if each.change is None else f"{each.change:+.1%}"])
        print_table(["field", f"~{first.name}", f"~{second.name}", ">change"], rows)
        if ratios:
            echo()
            cells, above = [], ""
            for entry in ratios:
                name = entry["curve"] if entry["curve"] != above else ""  # once for each curve
                above = entry["curve"]
                times = [f"{entry['a_us']:.5g}", f"{entry['b_us']:.5g}"]
                cells.append([name, format_bytes(entry["bytes"]), *times, f"{entry['ratio']:.3f}"])
            print_table(["curve", ">size", f">{first.name} us", f">{second.name} us", ">ratio"], cells)
    sys.exit(1 if differences else 0)


_LINKS = (Resource.INTER, Resource.INTRA, Resource.DEVICE)
_LONGEST = 120
"""Characters of a source that a comparison shows; the whole is in ``--json``."""


def _summary(profile: Profile) -> dict[str, Any]:
    return {
        **record(profile, "name", "kind", "topology", "fingerprint", "gather", "peaks", "error"),
        "curves": [record(curve, "collective", "link", "group_size") for curve in profile.curves],
        **record(profile, "interference", "environment", "source"),
    }


def _show(profile: Profile) -> None:
    where = f", measured on {profile.measured_on}" if profile.measured_on else ""
    echo_sentence(f"  {profile.kind}, {profile.topology}, gathers {profile.gather}{where}", lead=profile.name)
    echo_sentence(f"{profile.fingerprint}\n")
    echo_sentence(profile.source)
    echo()
    print_table(
        ["peak, one rank, one direction", ">GB/s"], [[link.value, f"{profile.peaks.of(link):g}"] for link in _LINKS]
    )
    for curve in profile.curves:
        echo()
        peak = profile.peaks.of(curve.link)
        known = "not known" if curve.holdout_error is None else f"{curve.holdout_error:.1%}"
        title = (
            f"{curve.collective} on {curve.link}, {counted(curve.group_size, 'rank')}: latency "
            f"{curve.latency_us:.4g} µs, bandwidth {curve.bandwidth_gbps:.4g} GB/s, hold-out error {known}"
        )
        rows = [
            [
                str(size),
                format_bytes(size),
                f"{time_us:.5g}" if time_us < 1e5 else f"{time_us:.0f}",
                f"{curve.algbw_gbps(size):.4g}",
                f"{curve.busbw_gbps(size):.4g}",
                f"{curve.efficiency(size, peak):.1%}",
            ]
            for size, time_us in zip(curve.bytes, curve.time_us, strict=True)
        ]
        columns = [">size(B)", ">", ">time(us)", ">algbw(GB/s)", ">busbw(GB/s)", ">of peak"]
        print_table(columns, rows, title=title, spare=(1, 3))
    if profile.interference:
        rows = [[f"{entry.resource} beside {entry.other}", f"×{entry.slowdown:.3f}"] for entry in profile.interference]
        echo()
        print_table(["interference", ">takes longer"], rows)
    else:
        echo_sentence("\nno interference stored: resources are priced as independent")
    if doubtful := doubts(profile.curves):
        echo()
        for doubt in doubtful:
            echo_sentence(f"few times: {doubt}")
    if profile.environment:
        echo()
        print_table(["environment", "~"], sorted(profile.environment.items()))


def _checked(name: str) -> dict[str, Any]:
    try:
        profile = catalog.load_profile(name)
    except ProfileError as error:
        message = fitting(str(error))
        return {"profile": name, "ok": False, "message": message if name in message else f"{name}: {message}"}
    about = f"{profile.kind}, {profile.topology}, {counted(len(profile.curves), 'curve')}, {profile.fingerprint[:19]}…"
    return {"profile": name, "ok": True, "message": f"{name}: {profile.name}, {about}"}


def _ratios(a: Profile, b: Profile) -> list[dict[str, Any]]:
    """Time of ``b`` over time of ``a``, for the curves that both have.

    At the sizes that both measured; where there are none, at those of either one that both ranges
    cover.
    """
    others = {curve.key: curve for curve in b.curves}
    ratios = []
    for first in a.curves:
        second = others.get(first.key)
        if second is None or second == first:
            continue
        sizes = sorted(set(first.bytes) & set(second.bytes))
        if not sizes:
            either = sorted({*first.bytes, *second.bytes})
            sizes = [n for n in either if not (first.is_extrapolated(n) or second.is_extrapolated(n))]
        ratios += [
            {
                "curve": f"{first.collective} {first.link} {first.group_size}",
                "bytes": size,
                "a_us": rounded(first.at(size)),
                "b_us": rounded(second.at(size)),
                "ratio": rounded(second.at(size) / first.at(size), 6),
            }
            for size in sizes
        ]
    return ratios
