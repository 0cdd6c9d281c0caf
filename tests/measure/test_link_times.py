"""Times of links: the shorter of two measurements, what a larger message says of a smaller one, and waits for a processor."""

from __future__ import annotations

from pathlib import Path

from commlayer.measure import link_times
from commlayer.scheduler.experience.link_rates import LinkTimes


def test_of_two_measurements_the_shorter_time_of_each_pair_counts() -> None:
    one = LinkTimes({(0, 1): 10.0, (0, 2): 30.0}, {(0, 1): 9.0, (0, 2): 5.0})
    other = LinkTimes({(0, 1): 20.0, (0, 2): 20.0}, {(0, 1): 2.0, (0, 2): 20.0})
    assert one.shorter(other) == LinkTimes({(0, 1): 10.0, (0, 2): 20.0}, {(0, 1): 2.0, (0, 2): 5.0})


def test_a_larger_message_says_what_a_smaller_one_takes() -> None:
    assert LinkTimes({(0, 1): 80.0}, {(0, 1): 40.0}).over(4.0) == LinkTimes({(0, 1): 20.0}, {(0, 1): 10.0})


def test_waits_for_a_processor_are_told_where_the_kernel_counts_them() -> None:
    is_counted = Path("/proc/self/task").is_dir() and Path("/proc/self/schedstat").exists()
    assert (link_times._waited_us() > 0.0) == is_counted
