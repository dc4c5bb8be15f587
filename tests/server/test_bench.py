"""`lamella bench server` against a real server on the CPU device: its figures are there, and wrong bytes are found."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.bench_cases import MAIN_SHAPES
from lamella.cuda_ext.beside import torch_reason
from lamella.cuda_ext.device import Device
from lamella.server.bench import HERE, IDLE, ServerBench, ServerBenchSettings
from lamella.server.connection import Connection, ServerLostError
from lamella.server.protocol import Stats, StatsReport
from rank_driver import ServerProcess, serving
from waiting import wait_until

try:
    DEVICE = Device("cpu")
except LibraryMissingError as _missing:
    pytest.skip(str(_missing), allow_module_level=True)

SHAPE = replace(MAIN_SHAPES[0], geometry=replace(MAIN_SHAPES[0].geometry, num_layers=4))


@pytest.fixture
def server_options() -> tuple[str, ...]:
    return ("--memory", "128MiB", "--models", "2")


def _bench(server: ServerProcess, **settings: Any) -> ServerBench:
    end = time.monotonic() + 20
    while True:
        try:
            measured = ServerBenchSettings(**{"loads": (IDLE,), "repeats": 2, "warm_up": 1, "lookups": 5} | settings)
            return ServerBench(server.folder, DEVICE, SHAPE, 16 << 20, measured)
        except (ServerLostError, FileNotFoundError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_every_figure_is_measured_and_the_report_says_which_side_moved(server: ServerProcess) -> None:
    with _bench(server, widths=(1, 4, 0)) as bench:
        report = bench.run()
    assert report.transfer_side == "worker"
    assert [(row.load, row.width, len(row.samples)) for row in report.retrieves] == [
        (IDLE, 1, 2),
        (IDLE, 4, 2),
        (IDLE, 0, 2),
    ]
    for row in report.retrieves:
        for sample in row.samples:
            assert 0 < sample.first_layer_ns <= sample.last_layer_ns - sample.lookup_ns
            assert sample.raw_ns > 0
            assert 0 < sample.submitted_ns <= sample.first_copy_ns <= sample.first_layer_ns <= sample.released_ns
            assert sample.submitted_ns < sample.granted_ns <= sample.released_ns
        middle = f"{row.median('submitted_ns') / 1e6:.3f}"
        assert f"lookup {row.median('lookup_ns') / 1e6:.3f}, then submitted {middle}, first copy" in row.stages()
    assert len(report.store_ns) == 1
    assert set(report.lookups_ns) == {4, 512}
    assert report.skipped == []
    assert json.loads(json.dumps(report.as_mapping()))["retrieves"][0]["ratio"] > 0


@pytest.mark.skipif(torch_reason("cpu") is not None, reason=str(torch_reason("cpu")))
def test_a_worker_is_measured_beside_products_of_its_own_process(server: ServerProcess) -> None:
    with _bench(server, widths=(1,), loads=(IDLE, HERE)) as bench:
        report = bench.run()
    idle, here = report.retrieves
    assert (idle.load, idle.beside) == (IDLE, None)
    assert here.load == HERE
    assert here.beside is not None
    assert here.beside.products > 0
    assert f"{here.beside.products} products" in here.line()
    assert json.loads(json.dumps(report.as_mapping()))["retrieves"][1]["beside"]["products"] == here.beside.products


def test_a_load_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    found = CliRunner().invoke(build_app(), ["bench", "server", "--beside", "idle,there", "--device", "cpu"])
    assert found.exit_code == 2
    assert "idle, here, elsewhere, got there" in found.output


def test_nothing_is_measured_while_slots_become_usable_or_they_are_named(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella.server.bench._STILL_S", 0.1)
    with _bench(server, widths=(1,)) as bench:
        shared = bench.worker.session.epoch.shared
        assert shared is not None
        num_slots = shared.shape.num_slots
        bench.wait_ready()
        assert bench.worker.mover.ready_slots == num_slots
        assert bench.report.skipped == []
        ready = iter([1, 1, 2, num_slots])
        monkeypatch.setattr(type(bench.worker.mover), "ready_slots", property(lambda _: next(ready)))
        bench.wait_ready()
        assert next(ready, None) is None, "it waited for all of them"
        monkeypatch.setattr(type(bench.worker.mover), "ready_slots", property(lambda _: num_slots - 3))
        bench.wait_ready()
        assert bench.report.skipped == ["3 slots did not become usable"]


def test_a_wrong_byte_on_the_server_is_found(server: ServerProcess) -> None:
    with _bench(server, widths=(1,)) as bench:
        bench.prepare()
        side = bench.worker.mover._worker_side
        assert side is not None
        attached = side._attached
        assert attached is not None
        for slot in range(attached.memory.shape.num_slots):
            attached.memory.buffer(slot)[1000] ^= 1
        with pytest.raises(RuntimeError, match="does not hold the objects' bytes"):
            bench._row(IDLE, 1)


def test_a_prefix_that_does_not_fit_is_refused_with_the_remedy_before_anything_is_stored(tmp_path: Path) -> None:
    with serving(tmp_path / "s", "--memory", "16MiB", "--models", "2") as server:
        wait_until((server.folder / "server.sock").exists, "it serves")
        command = ["bench", "server", "--folder", str(server.folder), "--device", "cpu", "--size", "64MiB"]
        for layers, reason in (("2", "4 slots of 2097152 bytes for this model and 32 are needed"), ("32", "refuses: ")):
            found = CliRunner().invoke(build_app(), [*command, "--layers", layers, "--widths", "1"])
            assert found.exit_code == 2
            assert reason in " ".join(found.output.split())
        with Connection(server.folder, timeout_s=15.0) as connection:
            figures = connection.call(Stats(), StatsReport).figures
        assert not any(value for name, value in figures.items() if "stored" in name), figures


def test_the_command_without_a_server_says_what_to_start(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        build_app(), ["bench", "server", "--folder", str(tmp_path / "none"), "--device", "cpu", "--size", "1MiB"]
    )
    assert found.exit_code == 2
    assert "lamella serve" in found.output
