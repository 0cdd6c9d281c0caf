"""Pictures of curves, plans and runs: Chrome/Perfetto traces, figures, one HTML report.

    from commlayer.drawing import chrome_trace, timeline_figure, save_figure

Figures need the extra ``commlayer[plots]``; traces, and reports without their figures, do not. The names below are loaded
when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.drawing.efficiency import efficiency_figure
    from commlayer.drawing.figures import (
        bench_figure,
        plans_figure,
        save_figure,
        timeline_figure,
    )
    from commlayer.drawing.report import write_report
    from commlayer.drawing.trace_figure import lanes_figure
    from commlayer.traces.chrome import chrome_trace

__all__ = [
    "bench_figure",
    "chrome_trace",
    "efficiency_figure",
    "lanes_figure",
    "plans_figure",
    "save_figure",
    "timeline_figure",
    "write_report",
]

_HOMES = {
    "chrome_trace": "commlayer.traces.chrome",
    "efficiency_figure": "commlayer.drawing.efficiency",
    "lanes_figure": "commlayer.drawing.trace_figure",
    "write_report": "commlayer.drawing.report",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOMES.get(name, "commlayer.drawing.figures")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
