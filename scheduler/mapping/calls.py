"""The collective calls of a training step, for a job, a way of running it, and a trainer's software.

One description for the simulated step (:mod:`commlayer.scheduler.simulate`) and for the test that holds it against what the run
time counts (:func:`commlayer.stats`), call by call and byte by byte: ``tests/mapping/test_calls.py``.
"""

from commlayer.scheduler.mapping.exchange import SEND_RECV as SEND_RECV
from commlayer.scheduler.mapping.exchange import Exchange as Exchange
from commlayer.scheduler.mapping.layer_calls import dispatched_rows as dispatched_rows
from commlayer.scheduler.mapping.layer_calls import layer_backward as layer_backward
from commlayer.scheduler.mapping.layer_calls import layer_forward as layer_forward
from commlayer.scheduler.mapping.step_calls import step_exchanges as step_exchanges
from commlayer.scheduler.mapping.step_calls import whole_step as whole_step

__all__ = [
    "SEND_RECV",
    "Exchange",
    "dispatched_rows",
    "layer_backward",
    "layer_forward",
    "step_exchanges",
    "whole_step",
]
