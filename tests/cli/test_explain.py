"""`lamella explain`: the parts of a time to first token in words and in JSON, from the trace that simulate wrote."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lamella.cli.main import build_app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), arguments)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    interleaved = ("--order", "round_robin", "--release", "first", "--concurrency", "4", "--requests", "3")
    assert run("simulate", *interleaved, "--out", str(folder)).exit_code == 0
    return folder / "simulate.trace.json"


def test_the_printed_parts_add_up_to_the_printed_time(trace: Path) -> None:
    lines = run("explain", "slowest", "--trace", str(trace)).stdout.splitlines()
    (whole,) = re.findall(r"first token after ([\d,.]+) ms", lines[0])
    parts = [re.match(r" {0,12}([\d,.]+) ms +[\d.]+%  \S", line) for line in lines]
    values = [float(part[1].replace(",", "")) for part in parts if part]
    assert len(values) > 4
    assert sum(values) == pytest.approx(float(whole.replace(",", "")), abs=0.001 * len(values))
    assert any("transfer wait" in line for line in lines)


def test_interleaved_requests_wait_for_each_other_and_it_says_for_whom(trace: Path) -> None:
    said = "".join(run("explain", str(number), "--trace", str(trace)).stdout for number in range(12))
    assert re.search(r"\d ms  request \d+\n", said)
    assert re.search(r"\d ms  layers \d+ .. \d+ of request \d+\n", said)
    assert re.search(r"\d ms  layers \d+ .. \d+, its own\n", said)
    assert re.search(r"\d ms  of it the link carried slices of request \d+\n", said)


def test_the_parts_in_json_add_up_exactly(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    for request in ("0", "1", "7", "median", "fastest"):
        assert run("explain", request, "--trace", str(trace), "--json", str(out)).exit_code == 0
        found = json.loads(out.read_text())
        assert (found["schema_version"], found["kind"], found["source"]) == (1, "lamella.explain", "simulated")
        assert sum(found["parts_ns"].values()) == found["ttft_ns"]
        assert sum(stall["stall_ns"] for stall in found["stalls"]) == found["parts_ns"]["stall"]
        assert sum(blame["ns"] for blame in found["behind"]) == found["parts_ns"]["transfer wait: behind others"]


def test_words_name_the_requests_that_they_mean(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts.json"
    times = {}
    for word in ("fastest", "median", "slowest"):
        assert run("explain", word, "--trace", str(trace), "--json", str(out)).exit_code == 0
        times[word] = json.loads(out.read_text())["ttft_ns"]
    everything = sorted(
        event["args"]["first_token_ns"] - event["args"]["arrival_ns"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") == "lamella.request"
    )
    assert list(times.values()) == [everything[0], everything[(len(everything) - 1) // 2], everything[-1]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("99",), "no request 99 in this recording; it holds 12 (0 .. 11)"),
        (("worst",), "a request is a number, or one of fastest, median, slowest; got 'worst'"),
        (("0", "--json", "/no/such/folder/x.json"), "/no/such/folder/x.json: No such file or directory"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: tuple[str, ...], sentence: str, trace: Path) -> None:
    result = run("explain", *arguments, "--trace", str(trace))
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "is not JSON"), ("{}", "not a recording: a trace of lamella has otherData.kind"), (None, "No such file")],
)
def test_a_file_that_is_no_recording_is_refused(content: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    result = run("explain", "0", "--trace", str(path))
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_without_a_recording_it_says_what_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build_app(), ["explain", "slowest"])
    assert result.exit_code == 2
    assert "run lamella simulate first" in " ".join(result.stderr.split())
