"""The error of a prediction, defined once: predicted over measured, less 1."""

from __future__ import annotations

__all__ = ["prediction_error"]


def prediction_error(predicted: float, measured: float) -> float:
    """Return ``predicted`` over ``measured``, less 1, both in one unit; ``measured`` is above zero.

    Of times, an error below zero is a run that was slower than predicted; of speeds, one that was faster.
    """
    return (predicted - measured) / measured
