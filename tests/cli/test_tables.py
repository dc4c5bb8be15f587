"""Tables on stdout: no figure is cut on a narrow terminal, what is left out is named, a pipe gets everything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli._tables import print_table
from lamella.cli.main import build_app

HEADS = ("arm", "TTFT", "p50", "p99", "goodput/s")
ROWS = [["chunk-major", "1,542.5", "1,069.5", "12,237.5", "-"], ["auto", "145.5", "54.9", "1,239.5", "-"]]
VERBS = {
    "simulate": ("--requests", "1"),
    "sweep": ("--concurrencies", "1,2", "--concurrency", "2", "--ratios", "1,2,3", "--requests", "1", "--repeats", "1"),
    "replay": ("--limit", "30"),
    "verify": ("--layers", "2", "--heads", "1", "--head-dim", "8", "--tokens", "40"),
}


def narrow(monkeypatch: pytest.MonkeyPatch, columns: int, kind: str = "xterm") -> None:
    """Stdout is a terminal of so many columns, as Rich sees it; of the kind "dumb" it takes 80."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", kind)


def test_a_pipe_gets_every_column_that_has_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEADS, ROWS, spare=("p50",), fuller="there")
    printed = capsys.readouterr().out
    assert all(entry in printed for row in ROWS for entry in row[:-1])
    assert all(head in printed for head in HEADS[:-1])
    assert "goodput/s" not in printed
    assert "Left out" not in printed


@pytest.mark.parametrize(("columns", "left"), [(60, []), (41, ["p50"]), (32, ["p50", "TTFT"]), (10, ["p50", "TTFT"])])
def test_a_narrow_terminal_loses_whole_columns_in_the_order_given_and_is_told_which(
    columns: int, left: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(monkeypatch, columns)
    print_table(HEADS, ROWS, spare=("p50", "TTFT"), fuller="there")
    *lines, last = capsys.readouterr().out.splitlines()
    kept = [place for place, head in enumerate(HEADS[:-1]) if head not in left]
    for row in ROWS:
        assert any(all(row[place] in line for place in kept) for line in lines), "an entry is cut"
    assert [head for head in HEADS[:-1] if not any(head in line for line in lines)] == sorted(left, key=HEADS.index)
    said = f"Left out for want of width: {', '.join(left)}. A pipe or a wider terminal gets them, and so does there."
    assert (last == said) == bool(left)


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_cuts_a_figure_on_a_terminal_of_eighty_columns(
    verb: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAMELLA_TRACE", raising=False)
    narrow(monkeypatch, 80, kind)
    result = CliRunner().invoke(build_app(), [verb, *VERBS[verb]])
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    drawn = [line.rstrip() for line in plain.splitlines() if line.startswith(" ")]
    assert drawn
    assert max(map(len, drawn)) <= 80
