"""The cache of profiles as ``commlayer doctor`` shows it: which one a job on machines like this one would find."""

from __future__ import annotations

import time
from itertools import islice

from commlayer.profiles.errors import CommlayerError
from commlayer.profiles.files import read_file
from commlayer.profiles.printable import shortened
from commlayer.profiles.profile import MEASURED_ON, Profile, parse_profile
from commlayer.profiles.topology import Topology
from commlayer.settings import Settings
from commlayer.transport.foreign_variables import Verdict

__all__ = ["cache_lines"]

Line = tuple[Verdict, str, str, str]
_MOST_FILES = 200
"""Files of the folder that are looked at."""
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def cache_lines(settings: Settings) -> list[Line]:
    """The findings about the cache, each a mark, a name, a value and an advice. Raises nothing."""
    from commlayer.measure.calibrate import cache_folder

    try:
        folder = cache_folder(settings)
        files = sorted(islice(folder.glob("*.json"), _MOST_FILES)) if folder.is_dir() else []
    except (OSError, RuntimeError, ValueError) as error:  # no home folder; a name that no folder can have
        advice = "name another folder in COMMLAYER_CACHE: until then every job measures its cluster again"
        return [("warn", "folder", f"cannot be read: {shortened(str(error))}", advice)]
    lines: list[Line] = []  # none of a file that is sound, and of no use to a job here
    for file in files:
        try:
            age_s = time.time() - file.stat().st_mtime
            profile = parse_profile(read_file(file), shortened(str(file)))
        except (CommlayerError, OSError) as error:
            advice = "a job that finds it measures its cluster again; remove the file"
            lines.append(("warn", "damaged file", f"{shortened(str(file))}: {shortened(str(error), 300)}", advice))
            continue
        ages = (f"{age_s / length:.0f} {unit} old" for length, unit in _UNITS if age_s >= 2 * length)
        age = next(ages, "just measured")
        if MEASURED_ON in profile.environment:
            what = f"{file}: {profile.topology} on {profile.measured_on}, {age}"
            advice = "a group of this shape takes it, on that device and machines like those of then"
            lines.append(("ok", "device profile", what, advice))
        elif file.stem == _key(profile, settings):
            slow = "; ".join(map(str, profile.slow_links))
            what = f"{file}: {profile.topology}, {age}, {slow or 'no slow links'}"
            advice = (
                "of this software, and of nodes like this machine: a job on a cluster of this shape takes it. It is checked "
                "when a job starts, and measured again if off"
            )
            lines.append(("warn" if slow else "ok", "cached profile", what, advice))
    others, where = len(files) - len(lines), shortened(str(folder))
    if all(name != "cached profile" for _, name, _, _ in lines):
        advice = "the first job on a cluster of machines like this one measures its links, which takes some seconds"
        lines.append(("ok", "cached profile", f"none in {where}", advice))
    if others:
        advice = (
            "of other kinds of machines or interfaces, other versions, or other settings: a job here does not find them"
        )
        lines.append(("ok", "other profiles", f"{others} in {where}", advice))
    if settings.profile not in (None, "auto"):
        name = shortened(str(settings.profile))
        lines.append(("ok", "COMMLAYER_PROFILE", name, "with it set, nothing here is looked for"))
    return lines


def _key(profile: Profile, settings: Settings) -> str:
    """The name under which a job of the profile's shape would look, were all of its nodes like this machine."""
    from commlayer.measure.calibrate import cluster_key
    from commlayer.measure.machines import describe_machine

    topology = Topology.parse(profile.topology)
    return cluster_key(topology, [describe_machine(settings)] * topology.world_size, "cpu", settings.intra)
