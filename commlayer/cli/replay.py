"""``commlayer replay``: a planned call that differed from flat, run again without the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import json_option
from commlayer.cli.tables import echo, print_json, print_table
from commlayer.profiles.counted import counted

if TYPE_CHECKING:
    from commlayer.auditing.comparing import ResultDifference
    from commlayer.auditing.replaying import Replayed
    from commlayer.auditing.saved_calls import SavedHeader

__all__ = ["replay"]


@click.command(cls=Command)
@click.argument("path", type=click.Path(path_type=Path, exists=True), metavar="FILE")
@json_option
@click.pass_context
def replay(context: click.Context, path: Path, as_json: bool) -> None:
    """Run a call again that COMMLAYER_SHADOW found to differ from flat, and say whether it differs again.

    FILE is the folder that the warning named, with the files of all ranks in it, or one of those. The plan is run in memory, by
    its own moves, sums and codecs on the inputs that were kept, without links and other machines: what differs here too is a bug
    of the plan, and what does not was changed on its way.

    Exit status: 0 it gives what flat gave, 1 it differs again, 2 no sound file.

    \b
      commlayer replay ~/.cache/commlayer/shadow/1763900000000000000-0-17
    """
    from commlayer.auditing.replaying import replay_call  # torch: not for those who only list commands
    from commlayer.auditing.saved_calls import read_call

    saved = read_call(path)
    found, header = replay_call(saved), saved[0].header
    if as_json:
        print_json(_as_dict(header, found))
    else:
        _show(header, found)
    context.exit(1 if found.is_repeated else 0)


def _as_dict(header: SavedHeader, found: Replayed) -> dict[str, Any]:
    call = header.call
    return {
        "group": header.group,
        "number": header.number,
        "collective": call.traffic.collective,
        "plan": call.plan().name,
        "dtype": call.dtype,
        "op": call.op,
        "nodes": call.nodes,
        "said": header.said,
        "repeats": found.is_repeated,
        "ranks": [
            {
                "rank": each.rank,
                "repeated": each.repeated._asdict(),
                "in_job": each.in_job._asdict(),
                "unlike_job": each.unlike_job._asdict(),
            }
            for each in found.ranks
        ],
    }


def _show(header: SavedHeader, found: Replayed) -> None:
    call = header.call
    echo(f"{header.said}\n")
    print_table(
        ["rank", "differed in the job", "differs here", "other bits here than in the job"],
        [[str(each.rank), *map(_words, (each.in_job, each.repeated, each.unlike_job))] for each in found.ranks],
        title=f"{call.traffic.collective} of {call.dtype} by {call.plan().name}, run again in memory",
    )
    if found.is_repeated:
        echo(
            "It differs again: the plan's own moves, sums or codecs give other numbers. Please report it, with the files."
        )
    else:
        echo(
            "It does not differ here: the plan is sound, and bytes were changed on their way, by memory, a link or the transport."
        )


def _words(found: ResultDifference) -> str:
    return f"{counted(found.num_wrong, 'element')}, first {found.first}" if found.num_wrong else "no"
