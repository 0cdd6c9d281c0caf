"""A mapping's step as the input of a simulator: Chakra execution traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.exports import Export
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.simulate import Estimator

__all__ = ["simulator_export"]


def simulator_export(kind: str | None, estimator: Estimator, folder: Path | None) -> Callable[[Setup], Export] | None:
    """Return what writes a mapping for simulators, where ``kind`` is ``chakra``; None where it is a trainer, or nobody.

    ``folder``: where the files of Chakra go. Raises UsageError: a folder that is missing, or that no file goes into.
    """
    if kind == "chakra" and folder is None:
        raise UsageError("--export chakra writes a file for a rank of each stage: name a folder with --output")
    if kind != "chakra" and folder is not None:
        raise UsageError("--output: only --export chakra has files, all else goes to stdout")
    return None if folder is None else lambda setup: _chakra(estimator, setup, folder)


def _chakra(estimator: Estimator, setup: Setup, folder: Path) -> Export:
    from commlayer.scheduler.mapping.rank_graph import rank_graph, stage_ranks
    from commlayer.traces.chakra import write_chakra

    graphs = {rank: rank_graph(estimator, setup, stage) for stage, rank in enumerate(stage_ranks(setup))}
    written = [str(path) for path in write_chakra(folder, graphs)]
    notes = [
        f"one rank of each of {counted(setup.pp, 'stage')}: the others of a stage do as much, in groups of their own",
        "times of calls are the simulator's: only what is computed has a duration",
    ]
    if (kernels := estimator.software.kernels) is not None:
        notes.append(f"what {kernels.name} sends is written as one all_to_all: simulators have no word for it")
    return Export("chakra", {"files": written}, "\n".join(written), tuple(notes))
