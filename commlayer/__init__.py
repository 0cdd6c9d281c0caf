"""commlayer: a communication runtime for Mixture-of-Experts training.

It measures a cluster's links, chooses from the curves how to move the bytes of a collective, and in which
format they cross the wire, and runs that choice.
Names are loaded on first use (PEP 562), so that planning offline never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlayer.agree.discovery import discover_topology as discover_topology
    from commlayer.collectives import GroupCommunicator as GroupCommunicator
    from commlayer.communicator import Communicator as Communicator
    from commlayer.compressed import CompressedGroup as CompressedGroup
    from commlayer.profiles.catalog import load_profile as load_profile
    from commlayer.profiles.errors import CommlayerError as CommlayerError
    from commlayer.profiles.profile import Profile as Profile
    from commlayer.readers.cluster_files import resolve as load_cluster
    from commlayer.readers.model_files import resolve as load_model
    from commlayer.scheduler.choose import Policy as Policy
    from commlayer.scheduler.wire import Scaling as Scaling
    from commlayer.scheduler.wire import WireFormat as WireFormat
    from commlayer.scheduler.wire import WirePolicy as WirePolicy
    from commlayer.statistics import reset_stats as reset_stats
    from commlayer.statistics import stats as stats
    from commlayer.traces.recorder import recorder as recorder
    from commlayer.transfers import Pending as Pending
    from commlayer.wire.codecs.codec import Codec as Codec

__version__: str

_HOME = {
    "Codec": "commlayer.wire.codecs.codec:Codec",
    "CommlayerError": "commlayer.profiles.errors:CommlayerError",
    "Communicator": "commlayer.communicator:Communicator",
    "CompressedGroup": "commlayer.compressed:CompressedGroup",
    "GroupCommunicator": "commlayer.collectives:GroupCommunicator",
    "Pending": "commlayer.transfers:Pending",
    "Policy": "commlayer.scheduler.choose:Policy",
    "Profile": "commlayer.profiles.profile:Profile",
    "Scaling": "commlayer.scheduler.wire:Scaling",
    "WireFormat": "commlayer.scheduler.wire:WireFormat",
    "WirePolicy": "commlayer.scheduler.wire:WirePolicy",
    "__version__": "commlayer.version:__version__",
    "discover_topology": "commlayer.agree.discovery:discover_topology",
    "load_cluster": "commlayer.readers.cluster_files:resolve",
    "load_model": "commlayer.readers.model_files:resolve",
    "load_profile": "commlayer.profiles.catalog:load_profile",
    "recorder": "commlayer.traces.recorder:recorder",
    "reset_stats": "commlayer.statistics:reset_stats",
    "stats": "commlayer.statistics:stats",
}

__all__ = [
    "Codec",
    "CommlayerError",
    "Communicator",
    "CompressedGroup",
    "GroupCommunicator",
    "Pending",
    "Policy",
    "Profile",
    "Scaling",
    "WireFormat",
    "WirePolicy",
    "__version__",
    "discover_topology",
    "load_cluster",
    "load_model",
    "load_profile",
    "recorder",
    "reset_stats",
    "stats",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, attribute = _HOME[name].split(":")
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
