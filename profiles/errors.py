"""The tree of errors that commlayer raises.

    CommlayerError
    ├── UsageError (also ValueError)            the caller asked for something that cannot be
    │   ├── ProfileError                        a profile that is damaged, foreign or newer: names the field and the reason
    │   │   ├── ProfileNotFoundError            no such profile
    │   │   └── ProfileMismatchError            a sound profile, of another cluster
    │   ├── TopologyError                       a topology that is malformed, or uneven where it must be even
    │   ├── PlanError                           traffic that cannot be planned with this profile
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
    "BLAMING",
    "ClusterError",
    "CollectiveTimeoutError",
    "CommlayerError",
    "DisagreementError",
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
    """Base of everything that commlayer raises on purpose.

    As text it is fit to be printed: what it quotes of files, variables and other ranks may hold a terminal's escapes.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(CommlayerError, ValueError):
    """The caller asked for something that cannot be."""


class ProfileError(UsageError):
    """A profile is damaged, foreign or newer than this version reads."""


class ProfileNotFoundError(ProfileError):
    """No profile of that name or path."""


class ProfileMismatchError(ProfileError):
    """A sound profile that describes another cluster."""


class TopologyError(UsageError):
    """A topology is malformed, or uneven where it must be even."""


class PlanError(UsageError):
    """Traffic that cannot be planned with this profile."""


class TensorError(UsageError):
    """A tensor of the wrong size, dtype or device."""


class GroupError(UsageError):
    """Process groups that do not form the grid that the collective needs."""


class SettingsError(UsageError):
    """An unknown or malformed ``COMMLAYER_`` variable."""


class ClusterError(CommlayerError, RuntimeError):
    """The surroundings failed: a peer, a wire, a missing right."""


class DisagreementError(ClusterError):
    """Ranks differ where they must agree."""


class PeerError(ClusterError):
    """A peer died in the middle of a collective."""


class CollectiveTimeoutError(ClusterError, TimeoutError):
    """A collective did not finish in time."""


BLAMING = (DisagreementError, PeerError, CollectiveTimeoutError)
"""The errors of a rank that is not itself to blame, or not alone."""


class RankFailedError(ClusterError):
    """A rank of an emulated cluster failed."""


class RightsError(ClusterError):
    """The machine does not grant what was asked."""


class NonFiniteError(CommlayerError, ArithmeticError):
    """NaN or infinity in a tensor that was to be compressed, where the policy forbids it."""


class InternalError(CommlayerError, RuntimeError):
    """Our own bug."""
