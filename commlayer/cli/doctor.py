"""``commlayer doctor``: what this machine and environment offer, what is wrong with them, and what to do about it."""

from __future__ import annotations

import sys

import click

from commlayer.cli.commands import Command
from commlayer.cli.doctor_checks import all_findings
from commlayer.cli.option_types import json_option
from commlayer.cli.tables import cell_text, echo, print_grid, print_json

__all__ = ["doctor"]

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "red")}


@click.command(cls=Command)
@json_option
def doctor(as_json: bool) -> None:
    """Check this machine and the environment.

    Versions, GPUs and NCCL, network interfaces, the rights that emulation needs, settings, lanes and variables that
    matter, and what would be chosen here. Exit status 0 if nothing is ✗, else 1.
    """
    findings = all_findings()
    is_sound = all(finding.mark != "bad" for finding in findings)
    if as_json:
        print_json({"ok": is_sound, "findings": findings})
        sys.exit(0 if is_sound else 1)
    from rich.table import Table

    # One grid for all sections: the columns line up, so that the eye runs down the marks.
    table = Table.grid(padding=(0, 2))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(ratio=3, overflow="fold")
    table.add_column(ratio=4, overflow="fold")
    section = ""
    for finding in findings:
        if finding.section != section:
            if section:
                table.add_row()
            table.add_row("", cell_text(finding.section, "bold"))
            section = finding.section
        mark, colour = _MARKS[finding.mark]
        advice = cell_text(finding.advice, "" if finding.mark != "ok" else "dim")
        table.add_row(cell_text(mark, f"bold {colour}"), cell_text(finding.name), cell_text(finding.value), advice)
    print_grid(table)
    counts = {mark: sum(finding.mark == mark for finding in findings) for mark in _MARKS}
    echo(f"\n{counts['ok']} ✓   {counts['warn']} !   {counts['bad']} ✗")
    sys.exit(0 if is_sound else 1)
