"""Folders into which several replicas of one program have written, each into one of its own there (``COMMLAYER_REPLICA``)."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["of_replicas", "replica_folders"]


def replica_folders(folder: Path, pattern: str) -> list[tuple[str, Path]]:
    """Find the folders in which files of ``pattern`` lie, with the names of their replicas, in order: ``folder`` itself, without
    a name, and those in it. Just itself where there are none."""
    own = [("", folder)] if any(folder.glob(pattern)) else []
    inside = sorted(each for each in folder.iterdir() if each.is_dir() and any(each.glob(pattern)))
    return own + [(each.name, each) for each in inside] or [("", folder)]


def of_replicas(folder: Path, pattern: str, refused: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Find, as :func:`replica_folders`, the folders to report on one by one. Raises UsageError where there are several, and an
    option was given, by its name in ``refused``, that is about one."""
    folders = replica_folders(folder, pattern)
    if len(folders) > 1 and refused:
        names = ", ".join(str(path) for _, path in folders[:4]) + (", …" if len(folders) > 4 else "")
        raise click.UsageError(
            f"{' and '.join(refused)}: {folder} has the files of {len(folders)} replicas, and this is for one: give the "
            f"folder of one, of {names}"
        )
    return folders
