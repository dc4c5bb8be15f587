"""`lamella simulate` and `lamella sweep`: a table, a document, a picture, a verdict last; bad input is one sentence and
2."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    """The last line on stderr, its one sentence."""
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


def test_simulate_prints_a_row_a_strategy_and_ends_with_the_verdict(tmp_path: Path) -> None:
    printed = run("simulate", "--requests", "3", "--release", "first:2", "--out", str(tmp_path))
    for strategy in ("chunk-major", "recompute", "round_robin/1/first", "→ fifo/1/first:2"):
        assert strategy in printed
    assert printed.splitlines()[-1].startswith("Turn it on with fifo/1/first:2: mean TTFT -")
    document = json.loads((tmp_path / "simulate.json").read_text())
    assert (document["schema_version"], document["kind"]) == (1, "lamella.simulate")
    assert document["regime"]["hit_tokens"] == 15_152
    assert document["regime"]["overlap_ceiling"] == pytest.approx(0.43, abs=0.01)
    assert document["verdict"] == printed.splitlines()[-1]
    assert {outcome["strategy"] for outcome in document["outcomes"]} >= {"chunk-major", "fifo/1/first:2"}
    assert document["profile"]["sources"][0]["measured"]


def test_sweep_prints_a_map_and_ends_with_the_verdict(tmp_path: Path) -> None:
    printed = run("sweep", "--concurrency", "4,1", "--ratios", "1.32,0.5,4", "--out", str(tmp_path))
    assert "6 regimes × 7 strategies by the recursion" in printed
    assert "1 of them again as discrete events: equal to the nanosecond" in printed
    assert printed.splitlines()[-1].startswith("Turn it on with fifo/1/first")
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert (document["schema_version"], document["kind"]) == (1, "lamella.sweep")
    regimes = [(cell["concurrency"], round(cell["transfer_to_prefill"], 1)) for cell in document["cells"]]
    assert regimes == [(1, 0.5), (1, 1.3), (1, 4.0), (4, 0.5), (4, 1.3), (4, 4.0)]
    for cell in document["cells"]:
        assert set(cell["mean_ttft_ns"]) == set(document["strategies"])
        assert 0 < cell["overlap_ceiling"] <= 0.5
        assert cell["hit_fraction"] == cell["hit_tokens"] / (cell["hit_tokens"] + cell["new_tokens"])


def test_leave_it_off_is_an_answer(tmp_path: Path) -> None:
    arguments = ("--hit-tokens", "64", "--concurrency", "1", "--out", str(tmp_path))
    assert run("sweep", *arguments).splitlines()[-1].startswith("Leave it off: in none of 20 regimes")
    assert run("simulate", *arguments).splitlines()[-1].startswith("Leave it off: fifo/1/first gives mean TTFT")


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_the_same_seed_writes_the_same_bytes(verb: str, tmp_path: Path) -> None:
    quick = ("--requests", "3") if verb == "simulate" else ("--concurrency", "2", "--ratios", "1")
    documents = []
    for folder in ("one", "two"):
        run(verb, *quick, "--seed", "7", "--out", str(tmp_path / folder))
        documents.append((tmp_path / folder / f"{verb}.json").read_bytes())
    assert documents[0] == documents[1]


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_picture_is_written_where_matplotlib_is(verb: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    quick = ("--requests", "2") if verb == "simulate" else ("--concurrency", "1,2", "--ratios", "1,2")
    run(verb, *quick, "--out", str(tmp_path))
    assert (tmp_path / f"{verb}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_without_matplotlib_it_says_how_to_get_it_and_goes_on(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    quick = ("--requests", "2") if verb == "simulate" else ("--concurrency", "1", "--ratios", "1")
    result = CliRunner().invoke(build_app(), [verb, *quick, "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "No picture: pictures need matplotlib: pip install 'lamella[plot]'" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [f"{verb}.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("simulate", "--width", "0"), "a width is a positive number or a schedule"),
        (("simulate", "--width", "40"), "layers_per_slice must be between 1 and 32, got 40"),
        (("simulate", "--order", "lifo"), "order must be one of fifo, shortest_remaining, deadline, round_robin"),
        (("simulate", "--release", "late"), "release must be one of whole, first"),
        (("simulate", "--release", "first:33"), "release after 33 layers needs as many, but the load has 32"),
        (("simulate", "--hit-tokens", "0"), "hit_tokens must be at least 1, got 0"),
        (("simulate", "--requests", "0"), "requests must be at least 1, got 0"),
        (("simulate", "--new-tokens", "200000"), "does not cover"),
        (("simulate", "--model", "llama-3.1-70b"), "has step times of llama-3.1-8b, not of llama-3.1-70b"),
        (("simulate", "--profile", "nope"), "no profile 'nope'; shipped: h200-llama-3.1-8b"),
        (("sweep", "--hit-tokens", "0"), "hit_tokens must be at least 1, got 0"),
        (("sweep", "--hit-tokens", "200000"), "does not cover 200,000 cached"),
        (("sweep", "--concurrency", "1,x"), "each concurrency must be a number, got 'x'"),
        (("sweep", "--concurrency", "0"), "each concurrency must be positive, got 0"),
        (("sweep", "--concurrency", "500"), "500 requests at once"),
        (("sweep", "--ratios", "100"), "no number of new tokens over 15,152 cached ones gives T/P = 100"),
        (("sweep", "--ratios", "nan"), "each ratio must be positive, got nan"),
        (("sweep", "--strategy", "fifo/1"), "a strategy is chunk-major, recompute or order/width/release"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(*arguments, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(verb: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert f"{taken}: File exists" in " ".join(refusal(verb, "--out", str(taken)).split())
    (tmp_path / f"{verb}.json").mkdir()
    assert f"{verb}.json: Is a directory" in " ".join(refusal(verb, "--out", str(tmp_path)).split())
    assert taken.read_text() == "a file"


def test_extrapolation_is_possible_when_asked_for_and_is_written_down(tmp_path: Path) -> None:
    run("simulate", "--hit-tokens", "140000", "--requests", "2", "--extrapolate", "--out", str(tmp_path))
    assert json.loads((tmp_path / "simulate.json").read_text())["profile"]["extrapolated"] is True
