"""Published training runs, predicted: every row beside ours, by kind of case; and the errors that estimates are labelled with.

``make published`` predicts the rows of published_rows.json (and takes the papers' along, whose errors are known as well), writes
docs/published.md, its pictures, a dated JSON file, and ``scheduler/mapping/checked_rows.json``, from which estimates have their
intervals. Held-back rows are left alone until ``make published ARGS=--held`` predicts them: once, with the model as it is then,
and keeps what came out in published_held.json. `make published ARGS=--blind` only prints the rows of
published_blind.json, of which nothing is made, beside their intervals. More than a minute on one core,
most of it pairs of runs of which one is predicted from the other (published_fits.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from papers_folding import CLUSTER, SOFTWARE_OF
from papers_folding import predict_all as predict_papers
from published_blind import blind_table
from published_data import BLIND, Published, load
from published_document import document
from published_fits import errors_of, pairs_of
from published_pictures import errors_figure, scatter_figure
from published_predict import Outcome, predict_all

from commlayer.drawing.style import save_figure
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.mapping.calibrated import FACTORS
from commlayer.scheduler.mapping.validity import CaseKind, CheckedRow, FittedErrors, checked_rows, kind_of

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
ROWS = HERE.parent / "scheduler" / "mapping" / "checked_rows.json"
HELD = HERE / "published_held.json"
_FOLDING = "MoE Parallel Folding"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held", action="store_true", help="predict the held-back third, once and for all")
    parser.add_argument("--blind", action="store_true", help="only print the blind rows beside their intervals")
    parser.add_argument("--no-pictures", action="store_true", help="leave the pictures as they are (matplotlib)")
    options = parser.parse_args()
    blind = predict_all(load(BLIND))
    if options.blind:
        print(blind_table(blind, checked_rows()))
        return
    rows = load()
    if options.held:
        _predict_held(rows)
    first = json.loads(HELD.read_text(encoding="utf-8")) if HELD.exists() else None
    outcomes = predict_all(row for row in rows if row.group != "held" or first is not None)
    papers = _papers()
    checked = [*filter(None, (each.checked for each in outcomes)), *papers]
    pairs = pairs_of(outcomes)
    ROWS.write_text(rows_text(checked, errors_of(pairs)), encoding="utf-8")
    held = [row for row in rows if row.group == "held"]
    text = document(outcomes=outcomes, held=held, first=first, papers=papers, pairs=pairs, blind=blind)
    (DOCS / "published.md").write_text(text, encoding="utf-8")
    content = {"date": date.today().isoformat(), "rows": [_as_json(each) for each in outcomes]}
    result = HERE / "results" / f"{date.today().isoformat()}-published.json"
    result.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not options.no_pictures:
        save_figure(scatter_figure(outcomes), DOCS / "pictures" / "published-scatter.svg")
        save_figure(errors_figure(outcomes), DOCS / "pictures" / "published-errors.svg")


def _predict_held(rows: Sequence[Published]) -> None:
    if HELD.exists():
        sys.exit(f"{HELD.name} has them already: the held-back rows are predicted once")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE
    )
    outcomes = predict_all(row for row in rows if row.group == "held")
    content = {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "rows": {each.row.key: {"error": each.error, "reason": each.reason} for each in outcomes},
    }
    HELD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _papers() -> list[CheckedRow]:
    """MoE Parallel Folding's rows, but for those that factors were fitted to or that were scanned badly, and FSDP's, whose
    overlap is not known."""
    found = []
    for each in predict_papers(FACTORS):
        row, estimate = each.row, each.estimate
        if each.error is None or row.is_calibration or row.quality == "misprint" or row.method.startswith("FSDP"):
            continue
        busy_us = estimate.step_us * (1 - estimate.bubble)
        kind = kind_of(estimate.job, estimate.setup, clusters.load(CLUSTER), SOFTWARE_OF[row.method], busy_us)
        found.append(CheckedRow(f"{_FOLDING}, {row.name}", _FOLDING, kind, round(each.error, 4)))
    return found


def rows_text(rows: Sequence[CheckedRow], fitted: Sequence[FittedErrors]) -> str:
    """The file of the rows that are shipped: one a line, so that a difference shows which."""
    lists = {
        name: ",\n    ".join(json.dumps(each, ensure_ascii=False) for each in entries)
        for name, entries in (("rows", rows), ("fitted", fitted))
    }
    parts = ",\n".join(f'  "{name}": [\n    {lines}\n  ]' for name, lines in lists.items())
    return f'{{\n  "kind": {json.dumps(CaseKind._fields)},\n{parts}\n}}\n'


def _as_json(outcome: Outcome) -> dict[str, object]:
    row = outcome.row
    return {
        "key": row.key,
        "group": row.group,
        "published_tokens_per_s": round(outcome.published, 1),
        "predicted_tokens_per_s": round(outcome.predicted, 1),
        "error": outcome.error,
        "left_out": list(outcome.left_out),
        "reason": outcome.reason,
    }


if __name__ == "__main__":
    main()
