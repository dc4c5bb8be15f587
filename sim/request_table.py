"""Requests one by one, as CSV or Parquet: a row for each request of each strategy or arm."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from lamella.sim.records import RequestRecord, TtftParts

_RECORD_COLUMNS: Final = (
    *("sequence", "tag", "cached_tokens", "new_tokens", "output_tokens", "load_bytes", "arrival_ns", "admitted_ns"),
    *("submitted_ns", "first_layer_ns", "all_landed_ns", "ready_ns", "released_ns", "first_started_ns", "started_ns"),
    *("first_token_ns", "end_ns", "caused_stall_ns", "victim_stall_ns", "preemptions"),
)
_PART_COLUMNS: Final = tuple(f"part_{name}" for name in TtftParts._fields)
COLUMNS: Final = ("strategy", *_RECORD_COLUMNS, "ending", "failure", "ttft_ns", *_PART_COLUMNS)
"""`part_*` add up to `ttft_ns`; both are -1 for a request that failed before its first token."""
SUFFIXES: Final = (".csv", ".parquet")


def check_table_path(path: Path) -> None:
    """The table can be written in the form that the name asks for.

    Raises:
        ValueError: another ending than .csv or .parquet.
        ImportError: Parquet without pyarrow; the message says how to get it.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"requests are written as .csv or .parquet, got {path.name}")
    if path.suffix == ".parquet":
        _pyarrow()


def request_rows(strategy: str, records: Iterable[RequestRecord]) -> list[tuple[Any, ...]]:
    """A row for each record, in the order of `COLUMNS`."""
    return [_row(strategy, record) for record in records]


def _row(strategy: str, record: RequestRecord) -> tuple[Any, ...]:
    values = (getattr(record, name) for name in _RECORD_COLUMNS)
    if record.first_token_ns < 0:
        times: tuple[int, ...] = (-1,) * (1 + len(_PART_COLUMNS))
    else:
        times = (record.ttft_ns, *record.ttft_parts())
    return (strategy, *values, record.ending.value, record.failure, *times)


def write_requests(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    """The rows lie in the file.

    Raises:
        ValueError, ImportError: as `check_table_path`.
        OSError: the file cannot be written.
    """
    check_table_path(path)
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(rows)
        return
    pyarrow = _pyarrow()
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    text = {"strategy", "ending", "failure"}
    arrays = [
        pyarrow.array(column, pyarrow.string() if name in text else pyarrow.int64())
        for name, column in zip(COLUMNS, columns, strict=True)
    ]
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(arrays, names=list(COLUMNS)), path)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise ImportError("Parquet needs pyarrow: pip install 'lamella[parquet]', or write .csv") from missing
    return pyarrow
