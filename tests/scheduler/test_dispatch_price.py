"""The price of a dispatch: its terms, for floats and arrays; the bytes of a choice."""

from __future__ import annotations

import numpy as np
import pytest

from commlayer.scheduler.dispatch_price import dispatch_us, is_worth_it, packed_index_bytes, row_maps_us

TERMS = {"out_us": 1.0, "home_us": 10.0, "weights_us": 100.0, "choices_us": 1000.0, "moves_us": 10000.0}


def test_the_gradient_goes_all_ways_but_that_of_the_choices() -> None:
    """Moves are those of all passes already."""
    assert dispatch_us(1, **TERMS) == 11111.0
    assert dispatch_us(2, **TERMS) == 2 * 111.0 + 11000.0


def test_terms_that_a_kind_does_not_have_are_nothing() -> None:
    assert dispatch_us(2, out_us=1.0, home_us=10.0) == 22.0


@pytest.mark.parametrize("passes", [1, 2])
def test_arrays_are_priced_as_their_numbers(passes: int) -> None:
    drawn = np.random.default_rng(0).uniform(0, 1e4, (5, 7))
    found = dispatch_us(passes, **dict(zip(TERMS, drawn, strict=True)))
    each = [dispatch_us(passes, **dict(zip(TERMS, map(float, column), strict=True))) for column in drawn.T]
    assert found.tolist() == each
    assert is_worth_it(found, 2 * drawn[0]).tolist() == [
        is_worth_it(us, float(flat_us)) for us, flat_us in zip(each, 2 * drawn[0], strict=True)
    ]


def test_another_kind_must_be_faster_by_what_its_row_maps_cost() -> None:
    assert is_worth_it(100.0 - row_maps_us(100.0), 100.0)
    assert not is_worth_it(100.0, 100.0 + row_maps_us(100.0))


def test_a_choice_takes_two_bytes_up_to_the_largest_int16() -> None:
    assert [packed_index_bytes(count) for count in (1, 256, 32767, 32768)] == [2, 2, 2, 4]
