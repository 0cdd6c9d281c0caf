"""Settings: each has an environment variable ``COMMLAYER_<NAME>`` and a field here. Nothing is read at import.

An unknown ``COMMLAYER_`` variable is an error: a misspelt setting that is silently ignored costs its user a day.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from commlayer.profiles.errors import SettingsError

__all__ = ["Settings"]

_PREFIX = "COMMLAYER_"
_EMULATED = "EMULATED"
"""Set by the emulated cluster in the environment of its ranks; not a setting."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for.

    profile: a profile's name in the catalogue, or a path to its JSON file. topology: declared instead of discovered,
    ``2x4`` is two nodes of four ranks. timeout_s: longest wait in one collective, seconds. debug: ``off``, or ``detail``
    to compare every call across ranks before it moves a byte. emulation: ``auto``, ``netns`` or ``loopback``.
    """

    profile: str | None = None
    topology: str | None = None
    timeout_s: float = 300.0
    debug: str = "off"
    emulation: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise SettingsError(f"COMMLAYER_TIMEOUT_S must be a positive number of seconds, got {self.timeout_s}")
        if self.debug not in ("off", "detail"):
            raise SettingsError(f"COMMLAYER_DEBUG must be off or detail, got {self.debug!r}")
        if self.emulation not in ("auto", "netns", "loopback"):
            raise SettingsError(f"COMMLAYER_EMULATION must be auto, netns or loopback, got {self.emulation!r}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read ``COMMLAYER_*``. Raises SettingsError for an unknown variable or a malformed value."""
        environment = os.environ if environment is None else environment
        known = {field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, str | float] = {}
        for variable, value in environment.items():
            name = variable.removeprefix(_PREFIX)
            if name in (variable, _EMULATED):
                continue
            if name not in known:
                close = get_close_matches(name, known, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {_PREFIX}{close[0]}?" if close else f"known: {', '.join(_PREFIX + k for k in known)}"
                )
                raise SettingsError(f"unknown variable {variable}; {hint}")
            values[known[name]] = _number(variable, value) if name == "TIMEOUT_S" else value
        return cls(**values)  # type: ignore[arg-type]  # the names were checked above


def _number(variable: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise SettingsError(f"{variable} must be a number, got {value!r}") from None
