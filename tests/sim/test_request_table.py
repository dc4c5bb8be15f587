"""Requests as rows: the same in CSV and in Parquet, a failed one marked, parts that add up."""

import csv
from pathlib import Path

import pytest

from lamella.sim.profiles import load_profile
from lamella.sim.records import Ending
from lamella.sim.request_table import COLUMNS, check_table_path, request_rows, write_requests
from lamella.sim.serving import run_world
from lamella.sim.strategies import Device, Regime, parse_strategy

RECORDS = run_world(Device(load_profile()), Regime(8_192, 256, 2, 10), parse_strategy("fifo/1/first"), 3, 0).records


def test_a_row_holds_what_the_record_holds_and_parts_that_add_up() -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in request_rows("fifo/1/first", RECORDS)]
    for row, record in zip(rows, RECORDS, strict=True):
        assert row["strategy"] == "fifo/1/first"
        assert (row["sequence"], row["ttft_ns"], row["end_ns"]) == (record.sequence, record.ttft_ns, record.end_ns)
        assert sum(value for name, value in row.items() if name.startswith("part_")) == record.ttft_ns


def test_a_request_without_a_first_token_has_no_times() -> None:
    failed = RECORDS[0]._replace(first_token_ns=-1, ending=Ending.FAILED, failure="timed out")
    ((row),) = request_rows("x", [failed])
    values = dict(zip(COLUMNS, row, strict=True))
    assert (values["ending"], values["failure"], values["ttft_ns"]) == ("failed", "timed out", -1)


def test_csv_and_parquet_hold_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the parquet extra is not installed")
    rows = request_rows("fifo/1/first", RECORDS) + request_rows('è,\n"', RECORDS[:1])
    write_requests(tmp_path / "all.csv", rows)
    write_requests(tmp_path / "all.parquet", rows)
    with (tmp_path / "all.csv").open(newline="", encoding="utf-8") as file:
        from_csv = list(csv.DictReader(file))
    from_parquet = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [{name: str(value) for name, value in row.items()} for row in from_parquet] == from_csv
    assert [tuple(row.values()) for row in from_parquet] == rows
    write_requests(tmp_path / "none.parquet", [])
    assert parquet.read_table(tmp_path / "none.parquet").column_names == list(COLUMNS)


def test_another_ending_is_refused_and_parquet_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"written as .csv or .parquet, got all.json"):
        check_table_path(Path("all.json"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'lamella\[parquet\]', or write .csv"):
        check_table_path(Path("all.parquet"))
