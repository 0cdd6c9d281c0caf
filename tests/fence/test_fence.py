"""The goldens of the fence are unmoved: a sample of each section's cases. `make fence` checks all of them."""

from __future__ import annotations

import pytest
from fence import SECTIONS, check, report
from fence_cases import Case, changes, differences, rounded


@pytest.mark.parametrize("section", SECTIONS)
def test_the_fence_is_unmoved(section: str) -> None:
    found = check(section, SECTIONS[section])
    assert not found, report(section, found)


def test_a_number_that_moves_is_shown_with_old_and_new() -> None:
    golden = {"a case": rounded({"us": 1000.0, "plan": "flat"})}
    assert not list(differences([Case("a case", lambda: {"us": 1000.0 * (1 + 1e-14), "plan": "flat"})], golden))
    found = list(differences([Case("a case", lambda: {"us": 1000.0 * (1 + 1e-11), "plan": "flat"})], golden))
    assert [(each.fact, each.old) for each in found] == [("us", "1000.0")]
    assert "1000.00000001" in report("decisions", found)


def test_texts_places_and_names_that_move_are_shown() -> None:
    old = {"plan": "flat", "parts": [1.0, 2.0], "count": 3, "gone": "x", "same": 2}
    new = {"plan": "ring", "parts": [1.0, 2.5], "count": 4, "new": "y", "same": 2.0}
    found = {each.fact: (each.old, each.new) for each in changes("case", old, new)}
    assert set(found) == {"plan", "parts[1]", "count", "gone", "new"}
    assert found["plan"] == ('"flat"', '"ring"')
    assert found["gone"] == ('"x"', "nothing")


def test_a_case_that_is_gone_and_one_that_is_new_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    import fence

    monkeypatch.setattr(fence, "_cases", lambda section: [Case("new", dict)])
    monkeypatch.setattr(fence, "read_golden", lambda section: {"gone": {}})
    assert [(each.key, each.old) for each in check("decisions")] == [("gone", "a golden"), ("new", "nothing")]
