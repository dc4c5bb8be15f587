"""`--before-batch` of simulate and sweep: what it is worth behind a host thread, to whom, and where it says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app
from lamella.sim.overheads import Overheads, shipped_overheads
from lamella.sim.profiles import load_profile
from lamella.sim.report import profile_lines
from lamella.sim.strategies import Device
from model_verbs import refusal, run

SHIPPED = shipped_overheads()[0]
POINT = ("--prompt-tokens", "16k", "--hit", "93%", "--concurrency", "1", "--requests", "3", "--overheads", SHIPPED)
VERBS = {"simulate": (), "sweep": ("--concurrencies", "1", "--ratios", "1", "--repeats", "1", "--engine", "serial")}


def answered(verb: str, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    printed = run(verb, *POINT, *VERBS[verb], *options, "--out", str(folder))
    return printed, json.loads((folder / f"{verb}.json").read_text())


def outcomes(verb: str, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By strategy, at the point."""
    if verb == "simulate":
        return {one["strategy"]: one for one in document["outcomes"]}
    return {one["strategy"]: one["repeats"][0] for one in document["study"]}


@pytest.mark.parametrize("verb", VERBS)
def test_first_tokens_of_loads_inside_their_step_come_sooner_by_what_preparing_a_batch_takes(
    verb: str, tmp_path: Path
) -> None:
    printed = {}
    found = {}
    for name, options in (("off", ()), ("on", ("--before-batch",))):
        printed[name], found[name] = answered(verb, tmp_path / name, *options)
    assert (found["off"]["before_batch"], found["on"]["before_batch"]) == (False, True)
    assert ["(before_batch)" in printed[name] for name in ("off", "on")] == [False, True]
    off, on = (outcomes(verb, found[name]) for name in ("off", "on"))
    assert {name for name in off if off[name] != on[name]} == {"auto"}, "nobody else has loads inside their own step"
    assert 0.5e6 < off["auto"]["mean_ttft_ns"] - on["auto"]["mean_ttft_ns"] < 6e6
    assert verb == "simulate" or found["off"]["cells"] == found["on"]["cells"], "the map is the bare device's"


@pytest.mark.parametrize("verb", VERBS)
def test_on_the_bare_device_nobody_prepares_a_batch(verb: str) -> None:
    said = refusal(verb, *POINT[:-2], *VERBS[verb], "--before-batch")
    assert "on the bare device nobody prepares a batch: add --overheads, or leave it out" in said


def test_a_sweep_is_not_resumed_with_the_other_setting(tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "journal"), "--out", str(tmp_path / "out"))
    run("sweep", *POINT, *VERBS["sweep"], *journal)
    other = CliRunner().invoke(build_app(), ["sweep", *POINT, *VERBS["sweep"], "--before-batch", *journal])
    assert other.exit_code != 0
    assert "the journal of another sweep" in other.stderr.replace("\n", " ")


def test_a_device_keeps_the_setting_behind_another_host_and_says_it_only_behind_one() -> None:
    device = Device(load_profile(), before_batch=True)
    assert not any("before_batch" in line for line in profile_lines(device))
    hosted = device.with_overheads(Overheads())
    assert hosted.before_batch
    assert any("before_batch" in line for line in profile_lines(hosted))
    assert repr(hosted) != repr(Device(load_profile(), overheads=Overheads()))
