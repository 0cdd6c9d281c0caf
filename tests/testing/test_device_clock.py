"""Times of events on the simulated device that torch sees."""

from __future__ import annotations

import time

import pytest
import torch
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays

from commlayer.devices.accelerator import AcceleratorDevice
from commlayer.profiles.errors import UsageError
from commlayer.testing.plugin import ClusterFactory

NAP_S = 0.02


def timed() -> float:
    """The time, by the device's clock, in which a stream sleeps; that of the host is over long before."""
    device = simulated_device(StreamDelays(chance=0.0))
    module = torch.get_device_module(device)
    stream = AcceleratorDevice(device).stream(is_high=False)
    begin = stream.record_time()
    stream.launch(lambda: stream.stream.launch("a nap", lambda: time.sleep(NAP_S)))
    end = stream.record_time()
    end.synchronize()
    assert module.Event(enable_timing=True).query()
    with pytest.raises(UsageError, match="expected two events made with enable_timing=True"):
        begin.event.elapsed_time(module.Event(enable_timing=True))  # never recorded
    with pytest.raises(UsageError, match="expected two events made with enable_timing=True"):
        end.elapsed_us(stream.record())
    return end.elapsed_us(begin)


def test_events_know_what_the_device_has_done(emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(1, 1).run(timed)[0] >= NAP_S * 1e6
