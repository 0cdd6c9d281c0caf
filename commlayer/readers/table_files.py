"""Tables of others' measurements, as parquet or as CSV, row by row."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any

from commlayer.profiles.errors import ProfileError

__all__ = ["PARQUET", "table_rows"]

PARQUET = b"PAR1"
"""The beginning of a parquet file."""
_MOST_ROWS = 1_000_000


def table_rows(data: bytes, where: str, wanted: Iterable[str]) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """The names of a table's columns, and of each row the columns that are wanted, as far as it has them.

    Raises:
        ProfileError: no such table, more than a million rows, or parquet where pyarrow is not installed.
    """
    if not data.startswith(PARQUET):
        columns = set(wanted)
        try:
            lines = data.decode().splitlines()
            _check_count(where, len(lines) - 1)
            table = csv.DictReader(lines, strict=True)
            rows = [{name: value for name, value in row.items() if name in columns} for row in table]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ProfileError(f"{where}: expected a table as parquet or as CSV: {error}") from error
        return tuple(table.fieldnames or ()), rows
    try:
        from pyarrow import BufferReader
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ProfileError(f"{where}: reading a parquet table needs pyarrow: pip install pyarrow") from error
    try:
        file = ParquetFile(BufferReader(data))
        _check_count(where, file.metadata.num_rows)
        names = tuple(file.schema_arrow.names)
        return names, file.read(columns=[name for name in wanted if name in names]).to_pylist()
    except (OSError, ValueError) as error:
        raise ProfileError(f"{where}: expected a parquet table: {error}") from error


def _check_count(where: str, count: int) -> None:
    if count > _MOST_ROWS:
        raise ProfileError(f"{where}: expected at most {_MOST_ROWS:,} rows, got {count:,}")
