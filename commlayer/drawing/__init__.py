"""Pictures of curves, plans and runs: Chrome/Perfetto traces, figures, one HTML report.

    from commlayer.drawing import chrome_trace, timeline_figure, save_figure

Figures need matplotlib, the extra ``plots``; traces, and reports without their figures, do not. The names below are loaded
when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.drawing.efficiency import efficiency_figure
    from commlayer.drawing.figures import (
        bench_figure,
        plans_figure,
        save_figure,
        timeline_figure,
    )
    from commlayer.drawing.report import write_report
    from commlayer.traces.chrome_of_plan import chrome_trace

__all__ = [
    "bench_figure",
    "chrome_trace",
    "efficiency_figure",
    "plans_figure",
    "save_figure",
    "timeline_figure",
    "write_report",
]

__getattr__, __dir__ = lazy_names(__name__)
