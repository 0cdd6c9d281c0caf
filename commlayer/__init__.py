"""commlayer: a communication runtime for Mixture-of-Experts training.

It measures a cluster's links, chooses from the curves how to move the bytes of a collective, and in which
format they cross the wire, and runs that choice.
Names are loaded on first use (PEP 562), so that planning offline never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.agree.discovery import discover_topology
    from commlayer.auditing.ledger import audit
    from commlayer.backend.group_options import GroupOptions
    from commlayer.collectives import GroupCommunicator
    from commlayer.communicator import Communicator
    from commlayer.profiles.catalog import load_profile
    from commlayer.profiles.errors import CommlayerError
    from commlayer.profiles.profile import Profile
    from commlayer.readers.cluster_files import resolve as load_cluster
    from commlayer.readers.model_files import resolve as load_model
    from commlayer.scheduler.decision import Policy
    from commlayer.scheduler.wire import Scaling, WireFormat, WirePolicy
    from commlayer.statistics import reset_stats, stats
    from commlayer.traces.recorder import recorder
    from commlayer.transfers import Pending
    from commlayer.version import __version__
    from commlayer.wire.codecs.codec import Codec

__all__ = [
    "Codec",
    "CommlayerError",
    "Communicator",
    "GroupCommunicator",
    "GroupOptions",
    "Pending",
    "Policy",
    "Profile",
    "Scaling",
    "WireFormat",
    "WirePolicy",
    "__version__",
    "audit",
    "discover_topology",
    "load_cluster",
    "load_model",
    "load_profile",
    "recorder",
    "reset_stats",
    "stats",
]

__getattr__, __dir__ = lazy_names(__name__)
