"""Multi-node clusters on one Linux machine: real processes, real bytes, slow wires.

    from commlayer.emulation import EmulatedCluster

    with EmulatedCluster(nodes=2, ranks_per_node=4, inter="400mbit") as cluster:
        results = cluster.run(train, timeout_s=60)

Each node is an anonymous network namespace with its own host name, each rank a forked process in
it. Times measured here are emulated: quote them as ratios from one run. Importing this package
loads neither torch nor pyroute2.
"""

from __future__ import annotations

from commlayer.device_time import await_device
from commlayer.emulation.accelerators.device import Accelerator
from commlayer.emulation.accelerators.device_clock import DeviceReport
from commlayer.emulation.emulated_cluster import EmulatedCluster
from commlayer.emulation.modes import EmulationWarning, Mode
from commlayer.emulation.outcomes import RankFailure, RankOutcome, RanksFailedError, RanksTimedOutError, exit_status
from commlayer.emulation.protocol import KEEP, request_shape
from commlayer.emulation.rates import format_rate, parse_rate
from commlayer.emulation.rights import Rights, rights

__all__ = [
    "KEEP",
    "Accelerator",
    "DeviceReport",
    "EmulatedCluster",
    "EmulationWarning",
    "Mode",
    "RankFailure",
    "RankOutcome",
    "RanksFailedError",
    "RanksTimedOutError",
    "Rights",
    "await_device",
    "exit_status",
    "format_rate",
    "parse_rate",
    "request_shape",
    "rights",
]
