"""Files that commands write beside what they print; stderr says where each of them is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from commlayer.cli.tables import echo_sentence
from commlayer.profiles.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "tell", "write_chrome"]


def draw(path: Path, figure: Figure) -> None:
    from commlayer.drawing.style import save_figure

    save_figure(figure, path)
    tell("picture", path)


def write_chrome(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace for Chrome and Perfetto."""
    write_file(path, json.dumps(trace) + "\n")
    tell("trace", path)


def tell(kind: Literal["picture", "report", "runs", "trace"], path: Path) -> None:
    """Say where a file of this kind is."""
    how = " (open it at ui.perfetto.dev or chrome://tracing)" if kind == "trace" else ""
    echo_sentence(f"{kind}: {path}{how}", err=True)
