"""The tree of errors that commlayer raises.

    CommlayerError
    ├── UsageError (also ValueError)            the caller asked for something that cannot be
    │   ├── ProfileError                        a profile that is damaged, foreign or newer: names the field and the reason
    │   │   ├── ProfileNotFoundError            no such profile
    │   │   └── ProfileMismatchError            a sound profile, of another cluster
    │   ├── TopologyError                       a topology that is malformed, or uneven where it must be even
    │   ├── PlanError                           traffic that cannot be planned with this profile
    │   │   └── DispatchError                   kernels that cannot send a mapping's tokens there, or in no known time
    │   ├── TensorError                         a tensor of the wrong size, dtype or device
    │   ├── GroupError                          process groups that do not form the needed grid
    │   └── SettingsError                       an unknown or malformed COMMLAYER_ variable
    ├── ClusterError (also RuntimeError)        the surroundings failed
    │   ├── DisagreementError                   ranks differ where they must agree
    │   ├── PeerError                           a peer died in the middle of a collective
    │   ├── CollectiveTimeoutError (also TimeoutError)   a collective did not finish in time
    │   ├── RankFailedError                     a rank of an emulated cluster failed
    │   └── RightsError                         the machine does not grant what was asked (namespaces, traffic control)
    ├── NonFiniteError (also ArithmeticError)   NaN or infinity in what was to be compressed, where the policy forbids it
    └── InternalError (also RuntimeError)       our own bug: please report it

It stands on the lowest floor because every floor raises from it. Messages say what was expected, what was got, on which
rank and group where there is one, and what to do next.
"""

from __future__ import annotations

from commlayer.profiles.printable import printable

__all__ = [
    "ClusterError",
    "CollectiveTimeoutError",
    "CommlayerError",
    "DisagreementError",
    "DispatchError",
    "GroupError",
    "InternalError",
    "NonFiniteError",
    "PeerError",
    "PlanError",
    "ProfileError",
    "ProfileMismatchError",
    "ProfileNotFoundError",
    "RankFailedError",
    "RightsError",
    "SettingsError",
    "TensorError",
    "TopologyError",
    "UsageError",
]


class CommlayerError(Exception):
    """The base class of everything that commlayer raises on purpose.

    As text it is fit to be printed: what it quotes of files, variables and other ranks may hold a terminal's escapes.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(CommlayerError, ValueError):
    """An error of the caller, who asked for something that cannot be."""


class ProfileError(UsageError):
    """The error of a profile that is damaged, foreign or newer than this version reads."""


class ProfileNotFoundError(ProfileError):
    """The error of a name or path that is no profile's."""


class ProfileMismatchError(ProfileError):
    """The error of a sound profile that describes another cluster."""


class TopologyError(UsageError):
    """The error of a topology that is malformed, or uneven where it must be even."""


class PlanError(UsageError):
    """The error of traffic that cannot be planned with this profile."""


class DispatchError(PlanError):
    """The error of a library's kernels that cannot send a mapping's tokens on a cluster, or in no known time."""


class TensorError(UsageError):
    """The error of a tensor of the wrong size, dtype or device."""


class GroupError(UsageError):
    """The error of process groups that do not form the grid that the collective needs."""


class SettingsError(UsageError):
    """The error of an unknown or malformed ``COMMLAYER_`` variable."""


class ClusterError(CommlayerError, RuntimeError):
    """An error of the surroundings: a peer, a wire, a missing right."""


class DisagreementError(ClusterError):
    """The error of ranks that differ where they must agree."""


class PeerError(ClusterError):
    """The error of a collective in whose middle a peer died."""


class CollectiveTimeoutError(ClusterError, TimeoutError):
    """The error of a collective that did not finish in time."""


BLAMING = (DisagreementError, PeerError, CollectiveTimeoutError)
"""The errors of a rank that is not itself to blame, or not alone."""


class RankFailedError(ClusterError):
    """The error of a rank of an emulated cluster that failed."""


class RightsError(ClusterError):
    """The error of a machine that does not grant the rights that were asked for."""


class NonFiniteError(CommlayerError, ArithmeticError):
    """The error of NaN or infinity in a tensor that was to be compressed, where the policy forbids it."""


class InternalError(CommlayerError, RuntimeError):
    """A bug of commlayer itself: please report it."""
