"""The three papers, predicted: every published row beside ours, what must hold, and docs/papers.md.

``make papers`` predicts with the frozen factors of ``scheduler/mapping/calibrated.py``, writes docs/papers.md, its
pictures and a dated JSON file, and fails where a check does. ``make papers ARGS=--calibrate`` fits the factors anew
first: to the four MCore rows of table 3 of MoE Parallel Folding, and to nothing else. Some two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

from papers_data import CALIBRATION, TABLE_3
from papers_document import document
from papers_folding import as_json, calibrate, checks, fp8_rows, freeze, predict_all, searched
from papers_megascale import checks as megascale_checks
from papers_megascale import dispatch_kinds, gains, synchronisation
from papers_monta import checks as monta_checks
from papers_pictures import monta_figure, scaling_curves, scaling_figure, scatter_figure

from commlayer.drawing.style import save_figure
from commlayer.scheduler.mapping.calibrated import FACTORS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="fit the four factors and freeze them first")
    parser.add_argument("--no-pictures", action="store_true", help="leave the pictures as they are (matplotlib)")
    options = parser.parse_args()
    factors = {row.model: calibrate(row) for row in CALIBRATION} if options.calibrate else FACTORS
    if options.calibrate:
        freeze(factors)
    found = predict_all(factors)
    fp8 = fp8_rows(factors)
    places = [searched(row, factors) for row in TABLE_3 if row.method in ("MCore", "folded")]
    megascale = gains(), dispatch_kinds(), synchronisation()
    held = [*checks(found, fp8), *megascale_checks(*megascale), *monta_checks()]
    text = document(factors=factors, found=found, fp8=fp8, places=places, megascale=megascale, held=held)
    (DOCS / "papers.md").write_text(text, encoding="utf-8")
    content = {
        "date": date.today().isoformat(),
        "factors": factors,
        "rows": as_json(found),
        "checks": [{"name": each.name, "holds": each.holds, "details": each.details} for each in held],
    }
    path = RESULTS / f"{date.today().isoformat()}-papers.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not options.no_pictures:
        pictures = DOCS / "pictures"
        pictures.mkdir(exist_ok=True)
        save_figure(scatter_figure(found), pictures / "papers-mfu.svg")
        save_figure(scaling_figure(scaling_curves(found)), pictures / "papers-scaling.svg")
        save_figure(monta_figure(), pictures / "papers-monta.svg")
    for each in held:
        print(f"{'holds ' if each.holds else 'FAILS '} {each.name}: {each.details}")
    if not all(each.holds for each in held):
        sys.exit("not everything that must hold does: docs/papers.md says what and why")


if __name__ == "__main__":
    main()
