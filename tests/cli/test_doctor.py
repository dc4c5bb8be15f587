"""`lamella doctor` exits with 0 whatever it finds, and says for everything missing what would change that."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from lamella.cli import doctor
from lamella.cli.main import build_app
from lamella.cuda_ext import executors
from lamella.cuda_ext.machine import Finding, State


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_json_names_every_finding_with_its_state_and_remedy() -> None:
    document = json.loads(_run("--json"))
    assert document["schema_version"] == 1
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert {"C++ compiler", "native CPU library", "executor", "GPU", "pinned memory", "torch", "vLLM"} <= set(findings)
    for finding in findings.values():
        assert finding["state"] in ("yes", "no", "limited")
        assert finding["detail"]
        assert finding["state"] != "no" or finding["remedy"], f"{finding['name']} is missing, with no remedy"


def test_the_executor_named_is_the_one_that_would_run() -> None:
    findings = {finding["name"]: finding for finding in json.loads(_run("--json"))["findings"]}
    kind = executors.choose_executor().executor.name.partition("-")[0]
    assert findings["executor"]["detail"].startswith(kind)


def test_a_remedy_stands_under_its_finding_as_it_would_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Finding("plotting", State.NO, "matplotlib is not installed", "pip install 'lamella[plot]'")
    monkeypatch.setattr(doctor, "examine", lambda: [missing])
    first, second = _run().splitlines()
    assert first.split() == ["no", "plotting", "matplotlib", "is", "not", "installed"]
    assert second.strip() == "to change that: pip install 'lamella[plot]'"


def test_the_lines_and_the_json_hold_the_same_names() -> None:
    lines = _run()
    for finding in json.loads(_run("--json"))["findings"]:
        assert finding["name"] in lines


def test_a_finding_is_said_before_the_next_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def examine() -> Iterator[Finding]:
        yield Finding("cores", State.YES, "2 usable of 2")
        said.append(capsys.readouterr().out)  # while torch, say, is loaded
        yield Finding("torch", State.YES, "2.13.0")

    monkeypatch.setattr(doctor, "examine", examine)
    doctor._print_lines(doctor.examine())
    assert [line.split()[1] for line in said] == ["cores"]


def test_the_longest_name_has_its_column() -> None:
    assert max(len(finding.name) for finding in doctor.examine()) == doctor.NAME_WIDTH
