"""A result takes the place of no file that the verb reads, and of no other result."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lamella.cli.main import build_app
from lamella.reference.profile import profile_to_mapping
from lamella.sim.profiles import load_profile

REQUEST = {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(build_app(), arguments, env={"LAMELLA_TRACE": "", **environment})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace (and a link to it), a profile, options, a run, and the split of its cells."""
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(json.dumps(REQUEST) + "\n")
    Path("link.jsonl").symlink_to("trace.jsonl")
    Path("mine.json").write_text(json.dumps(profile_to_mapping(load_profile())))
    Path("options.toml").write_text("schema_version = 1\n")
    Path("run.jsonl").write_text("")
    Path("split.json").write_text(json.dumps({"calibrate": ["one"], "test": ["two"]}))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "trace.jsonl", "--json", "trace.jsonl"),
        ("replay", "trace.jsonl", "--html", "./trace.jsonl"),
        ("replay", "trace.jsonl", "--trace-out", "link.jsonl"),
        ("replay", "trace.jsonl", "--profile", "mine.json", "--json", "mine.json"),
        ("replay", "trace.jsonl", "--config", "options.toml", "--json", "options.toml"),
        ("validate", "run.jsonl", "--split", "split.json", "--json", "split.json"),
        ("bench", "transfer", "--device", "cpu", "--profile", "mine.json", "--json", "mine.json"),
    ],
    ids=" ".join,
)
def test_a_result_over_what_is_read_is_refused_and_loses_nothing(arguments: tuple[str, ...], here: Path) -> None:
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "is read here" in " ".join(result.stderr.split())
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before


def test_the_trace_that_the_environment_names_is_kept_too(here: Path) -> None:
    result = run("replay", "--json", "trace.jsonl", LAMELLA_TRACE=str(here / "trace.jsonl"))
    assert result.exit_code == 2, result.output
    assert json.loads((here / "trace.jsonl").read_text()) == REQUEST


def test_a_recording_is_not_written_over_by_its_explanation(here: Path) -> None:
    quick = ("--concurrency", "1", "--requests", "2", "--out", "run")
    assert run("simulate", *quick).exit_code == 0
    recording = here / "run" / "simulate.trace.json"
    before = recording.read_bytes()
    for option in ("--json", "--trace-out"):
        result = run("explain", "slowest", "--trace", str(recording), option, str(recording))
        assert result.exit_code == 2, result.output
        assert recording.read_bytes() == before


def test_two_results_in_one_file_are_refused_and_neither_is_left(here: Path) -> None:
    result = run("replay", "trace.jsonl", "--json", "out.json", "--html", "./out.json")
    assert result.exit_code == 2, result.output
    assert "two results" in " ".join(result.stderr.split())
    assert not (here / "out.json").exists()


def test_a_device_may_take_several_results_and_a_second_run_its_firsts_place(here: Path) -> None:
    several = ("--json", "/dev/null", "--html", "/dev/null")
    for _ in range(2):
        assert run("replay", "trace.jsonl", *several, "--trace-out", "out.trace.json").exit_code == 0
    assert json.loads((here / "out.trace.json").read_text())
