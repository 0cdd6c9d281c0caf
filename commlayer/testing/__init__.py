"""Tools for testing code that runs on a cluster.

The pytest fixture `emulated_cluster` (see `commlayer.emulation`); `check_communicator`, which every communicator must pass; a
communicator of threads for unit tests (`FakeWorld`), and one that fails on purpose (`FaultyVerbs`). See docs/testing.md.
Names are loaded on first use: pytest loads this package with its plugin, and must not load torch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.testing.conformance import (
        DTYPES,
        OPS,
        REDUCE_DTYPES,
        ConformanceError,
        FailedCheck,
        check_communicator,
    )
    from commlayer.testing.fake import FakeVerbs, FakeWorld
    from commlayer.testing.faults import Fault, FaultyVerbs, InjectedFault, delay_at, fail_at, wrong_bytes_at
    from commlayer.testing.megatron_on_cpu import stand_in_for_cuda
    from commlayer.testing.nodes import outcomes_on_nodes, run_on_nodes
    from commlayer.testing.process_group import ProcessGroupVerbs
    from commlayer.testing.simulated.judge import RaceJudge
    from commlayer.testing.simulated.machine import SimulatedMachine
    from commlayer.testing.simulated.torch_device import simulated_device
    from commlayer.testing.simulated.torch_streams import StreamDelays
    from commlayer.testing.verbs_contract import AsyncCall, ReduceOp, Verbs
    from commlayer.testing.witness import alarms, testifying

__all__ = [
    "DTYPES",
    "OPS",
    "REDUCE_DTYPES",
    "AsyncCall",
    "ConformanceError",
    "FailedCheck",
    "FakeVerbs",
    "FakeWorld",
    "Fault",
    "FaultyVerbs",
    "InjectedFault",
    "ProcessGroupVerbs",
    "RaceJudge",
    "ReduceOp",
    "SimulatedMachine",
    "StreamDelays",
    "Verbs",
    "alarms",
    "check_communicator",
    "delay_at",
    "fail_at",
    "outcomes_on_nodes",
    "run_on_nodes",
    "simulated_device",
    "stand_in_for_cuda",
    "testifying",
    "wrong_bytes_at",
]

__getattr__, __dir__ = lazy_names(__name__)
