"""The fence: goldens that a refactoring must leave unmoved. As a command it checks all of them, or renews them for a reason.

    python tests/fence/fence.py                                  check every case
    python tests/fence/fence.py decisions bits                   check every case of some sections
    python tests/fence/fence.py --renew "why it may move"        write the goldens anew, and note the reason

The suite checks a sample (test_fence.py). CONTRIBUTING.md says what is inside.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from fence_cases import GOLDENS, Case, Difference, changes, differences, read_golden, rounded, sampled, write_golden

__all__ = ["SECTIONS", "check", "report"]

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests share modules there, such as plans_in_memory

SECTIONS = {"decisions": 11, "bits": 7, "estimates": 5, "layers": 5, "files": 4}
"""The sections, and how many cases of each the suite leaves out between two that it checks, plus one."""
_MOST_SHOWN = 12
_REASONS = GOLDENS / "reasons.txt"


def check(section: str, every: int = 1) -> list[Difference]:
    """Find what differs from the goldens of a section, in each ``every``-th case; also cases that are new, or are gone."""
    cases, golden = _cases(section), read_golden(section)
    keys = {case.key for case in cases}
    assert len(keys) == len(cases), f"{section}: two cases have one key"
    gone = [Difference(key, "the case", "a golden", "nothing") for key in golden if key not in keys]
    new = [Difference(key, "the case", "nothing", "a case") for key in keys - golden.keys()]
    known = [case for case in cases if case.key in golden]
    return [*gone, *sorted(new), *differences(sampled(known, every), golden)]


def report(section: str, found: Sequence[Difference]) -> str:
    """Return the first differences in words, old and new, and what to do about them; empty where there are none."""
    if not found:
        return ""
    cases = len({each.key for each in found})
    lines = [f"{section}: {len(found)} facts of {cases} cases are not as they were:"]
    lines += map(str, found[:_MOST_SHOWN])
    lines += [f"… and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
    return "\n".join(
        [*lines, f'If this is meant: python tests/fence/fence.py {section} --renew "why" (CONTRIBUTING.md)']
    )


def _cases(section: str) -> list[Case]:
    find: Callable[[], list[Case]] = import_module(f"fence_{section}").cases
    return find()


def _renew(section: str, reason: str) -> None:
    old, new = read_golden(section), {case.key: rounded(case.facts()) for case in _cases(section)}
    keys = dict.fromkeys([*old, *new])
    found = [each for key in keys for each in changes(key, old.get(key), new.get(key))]
    size, moved = write_golden(section, new), len({each.key for each in found})
    for each in found[:_MOST_SHOWN] if old else ():
        print(each)
    print(f"{section}: {len(new)} cases in {size} bytes, {moved} moved")
    if moved:
        with _REASONS.open("a", encoding="utf-8") as file:
            file.write(f"{section}: {moved} of {len(new)} cases: {reason}\n")


def _main() -> int:
    parser = argparse.ArgumentParser(description="Check the goldens of the fence, or renew them.")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none is named")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check each N-th case only")
    parser.add_argument("--renew", metavar="REASON", help="write goldens anew; say why they may move")
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown or given.every < 1 or given.renew == "":
        parser.error(f"expected sections of {', '.join(SECTIONS)}, N of 1 or more, and a reason in words")
    is_moved = False
    for section in given.sections or SECTIONS:
        started = time.process_time()
        if given.renew:
            _renew(section, given.renew)
        else:
            found = check(section, given.every)
            is_moved |= bool(found)
            print(report(section, found) or f"{section}: unmoved")
        print(f"{section}: {time.process_time() - started:.0f} s of processor time", file=sys.stderr)
    return int(is_moved)


if __name__ == "__main__":
    sys.exit(_main())
