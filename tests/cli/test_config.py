"""`--config`: options from a TOML file, strictly; the command line goes before it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lamella.cli.main import build_app

GOOD = """
schema_version = 1

[simulate]
prompt_tokens = "16k"
hit = "90%"
concurrency = 2
requests = 2
compute_speed = 2
extrapolate = false

[sweep]
strategy = ["fifo/1/first", "fifo/8/first"]
concurrencies = "1,2"
concurrency = 2
ratios = "1"
requests = 2
repeats = 1
"""


def run(verb: str, text: str, folder: Path, *more: str) -> Result:
    path = folder / "run.toml"
    path.write_text(text)
    return CliRunner().invoke(build_app(), [verb, "--config", str(path), "--out", str(folder / "out"), *more])


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    result = run("simulate", GOOD, tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert (found["regime"]["hit_tokens"], found["regime"]["concurrency"]) == (14_400, 2)
    assert found["profile"]["name"].endswith("compute-2x")
    said = ("--prompt-tokens", "16k", "--hit", "90%", "--concurrency", "2", "--requests", "2", "--compute-speed", "2")
    plain = CliRunner().invoke(build_app(), ["simulate", *said, "--out", str(tmp_path / "plain")])
    assert plain.exit_code == 0
    assert json.loads((tmp_path / "plain" / "simulate.json").read_text()) == found


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    assert run("simulate", GOOD, tmp_path, "--concurrency", "3").exit_code == 0
    assert json.loads((tmp_path / "out" / "simulate.json").read_text())["regime"]["concurrency"] == 3


def test_what_is_given_several_times_is_a_list(tmp_path: Path) -> None:
    assert run("sweep", GOOD, tmp_path).exit_code == 0
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert found["strategies"] == ["chunk-major", "recompute", "fifo/1/first", "fifo/8/first"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "concurrency = 2",
            "concurency = 2",
            "[simulate] has an unknown key 'concurency'; did you mean 'concurrency'?",
        ),
        ("hit =", "zzz =", "[simulate] has an unknown key 'zzz'; known: prompt_tokens, hit,"),
        ("[simulate]", "[simulat]", "no verb 'simulat'; did you mean 'simulate'?"),
        ("concurrency = 2", "concurrency = 2.5", "simulate.concurrency must be a whole number, got 2.5"),
        ("concurrency = 2", "concurrency = true", "simulate.concurrency must be a whole number, got True"),
        ("concurrency = 2", 'concurrency = "2"', "simulate.concurrency must be a whole number, got '2'"),
        ("compute_speed = 2", "compute_speed = false", "simulate.compute_speed must be a number, got False"),
        ("extrapolate = false", "extrapolate = 0", "simulate.extrapolate must be true or false, got 0"),
        ('hit = "90%"', "hit = 0.9", "simulate.hit must be text in quotes, got 0.9"),
        ("schema_version = 1", "", "schema_version must be 1, got None"),
        ("schema_version = 1", "schema_version = 2", "schema_version must be 1, got 2"),
        ("schema_version = 1", "schema_version = ", "is not TOML"),
        ("schema_version = 1", "schema_version = 1\nseed = 4", "no verb 'seed'"),
        ("requests = 2\ncompute", "requests = 0\ncompute", "requests must be at least 1, got 0"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_and_exit_2(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in GOOD
    result = run("simulate", GOOD.replace(old, new, 1), tmp_path)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("out/*"))


def test_a_list_must_be_one(tmp_path: Path) -> None:
    result = run("sweep", GOOD.replace('["fifo/1/first", "fifo/8/first"]', '"fifo/1/first"'), tmp_path)
    assert result.exit_code == 2
    assert "sweep.strategy must be a list, got 'fifo/1/first'" in " ".join(result.stderr.split())


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(build_app(), ["simulate", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml: No such file or directory" in " ".join(result.stderr.split())
