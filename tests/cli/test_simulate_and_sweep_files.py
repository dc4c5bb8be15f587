"""What `lamella simulate` and `lamella sweep` write: the same bytes each time, pages, pictures and tables."""

import csv
import html
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app
from model_verbs import QUICK, refusal, run


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_the_same_seed_writes_the_same_bytes(verb: str, tmp_path: Path) -> None:
    written = []
    for folder in ("one", "two"):
        run(verb, *QUICK[verb], "--seed", "7", "--out", str(tmp_path / folder))
        written.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert written[0] == written[1]
    run(verb, *QUICK[verb], "--seed", "8", "--out", str(tmp_path / "other"))
    assert (tmp_path / "other" / f"{verb}.json").read_bytes() != written[0][f"{verb}.json"]


def test_a_sweep_in_processes_or_resumed_writes_the_same_bytes(tmp_path: Path) -> None:
    def sweep(folder: str, *more: str) -> bytes:
        run("sweep", *QUICK["sweep"], *more, "--out", str(tmp_path / folder))
        return (tmp_path / folder / "sweep.json").read_bytes()

    plain = sweep("plain", "--engine", "serial")
    journal = tmp_path / "journal"
    assert sweep("processes", "--engine", "processes", "--workers", "2", "--journal", str(journal)) == plain
    for name in ("map.jsonl", "point.jsonl"):
        lines = (journal / name).read_bytes().splitlines(keepends=True)
        (journal / name).write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
    assert sweep("resumed", "--journal", str(journal)) == plain
    other = ("sweep", *QUICK["sweep"], "--seed", "9", "--journal", str(journal))
    assert "the journal of another sweep" in refusal(*other, "--out", str(tmp_path / "refused"))
    other = ("sweep", *QUICK["sweep"], "--full-graphs", "never", "--journal", str(journal))
    assert "the journal of another sweep" in refusal(*other, "--out", str(tmp_path / "refused"))


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_pictures_are_written_where_matplotlib_is_and_the_page_has_them_inside(verb: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    run(verb, *QUICK[verb], "--out", str(tmp_path))
    assert (tmp_path / f"{verb}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / f"{verb}.html").read_text()
    assert page.count('src="data:image/png;base64,') == (2 if verb == "sweep" else 1)
    document = json.loads((tmp_path / f"{verb}.json").read_text())
    verdict = document["verdict"] if verb == "simulate" else document["answer"][-1]
    assert html.escape(verdict) in page


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_the_page_needs_nothing_from_elsewhere(verb: str, tmp_path: Path) -> None:
    run(verb, *QUICK[verb], "--out", str(tmp_path))
    page = (tmp_path / f"{verb}.html").read_text()
    assert [source for source in re.findall(r"(?:src|href)=\"([^\"]*)", page) if not source.startswith("data:")] == []
    assert not re.search(r"<(?:script|link|iframe)|@import|url\(", page)


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_without_matplotlib_it_says_how_to_get_it_and_goes_on(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(build_app(), [verb, *QUICK[verb], "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "No picture: pictures need matplotlib: pip install 'lamella[plot]'" in result.stderr
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / f"{verb}.json").exists()
    assert "No picture: pictures need matplotlib" in (tmp_path / f"{verb}.html").read_text()


def test_the_table_has_a_row_for_each_request_of_each_strategy(tmp_path: Path) -> None:
    run("simulate", "--requests", "3", "--table", str(tmp_path / "all.csv"), "--out", str(tmp_path))
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    document = json.loads((tmp_path / "simulate.json").read_text())
    for outcome in document["outcomes"]:
        mine = [row for row in rows if row["strategy"] == outcome["strategy"]]
        assert len(mine) == 12
        mean = sum(int(row["ttft_ns"]) for row in mine) / len(mine)
        assert mean == pytest.approx(outcome["mean_ttft_ns"])
    for row in rows:
        assert sum(int(value) for name, value in row.items() if name.startswith("part_")) == int(row["ttft_ns"])


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(verb: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    wanted = f"{taken} is a file, and a folder is wanted there: name another"
    assert wanted in " ".join(refusal(verb, "--out", str(taken)).split())
    (tmp_path / f"{verb}.json").mkdir()
    assert f"{verb}.json: Is a directory" in " ".join(refusal(verb, "--out", str(tmp_path)).split())
    assert taken.read_text() == "a file"
