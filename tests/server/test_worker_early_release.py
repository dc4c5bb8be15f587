"""Early release on a rank: requests let go while their load drains, and the layers of steps that wait for it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine_driver import ENGINE_MISSING
from lamella.connector.safety_rules import ALL_RULES
from lamella.reference.plan import Direction
from lamella.server.protocol import TransferSide
from rank_driver import (
    PACED,
    THERE,
    RankMemory,
    ServerProcess,
    caught,
    engine_of,
    join,
    keys_of,
    load,
    released,
    serving,
    store,
    stored_here,
    transfer_of,
    until,
)

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


def test_a_released_request_drains_with_its_future_unresolved(server: ServerProcess, memory: RankMemory) -> None:
    """B7, B12: what chunk-major cannot reach."""
    with join(server.folder, memory, **PACED) as worker:
        engine = engine_of(worker)
        keys = stored_here(worker, memory, engine)
        number, _locked = load(worker, keys, THERE)
        for _ in range(20):
            worker.begin_step()
            assert worker.poll().received == set()
        engine.grant(Direction.RETRIEVE, 2)  # a layer is two windows
        report = until(worker, lambda report: "r" in report.received)[-1]
        assert report.loads == {}
        assert worker.num_open == 1
        assert memory.right_layers(keys, THERE) == [0]
        assert transfer_of(worker, number).state.is_final is False
        engine.grant(Direction.RETRIEVE, 1000)
        assert until(worker, lambda report: number in report.loads)[-1].loads[number].ok
        assert memory.right_layers(keys, THERE) == list(range(32))
        assert worker.metrics.total("released_early") == 1


def test_the_servers_own_move_drains_too(tmp_path: Path) -> None:
    """As above; the server is stopped in the middle of its copy, so that nothing can land meanwhile."""
    memory = RankMemory(num_blocks=512, heads=64)
    with (
        serving(tmp_path / "s", "--memory", "64MiB") as server,
        join(server.folder, memory, transfer_side=TransferSide.SERVER, wait_timeout_s=0.2) as worker,
    ):
        keys = keys_of(memory, range(8 * 64))
        store(worker, memory, keys, range(128))
        there = range(200, 328)
        number, transfer, landed = caught(worker, server, memory, keys, there)
        assert not transfer.state.is_final
        assert worker.poll().loads == {}
        assert set(range(landed)) <= set(memory.right_layers(keys, there))
        assert len(memory.right_layers(keys, there)) < 32
        with pytest.raises(TimeoutError):
            transfer.wait_layer(31, timeout_s=0.05)
        os.kill(server.process.pid, signal.SIGCONT)
        transfer.wait_layer(31, timeout_s=20)
        assert memory.right_layers(keys, there) == list(range(32))
        assert until(worker, lambda report: number in report.loads)[-1].loads[number].ok
    memory.close()


def test_each_layer_of_a_step_waits_for_what_was_released_whoever_is_in_the_batch(
    server: ServerProcess, memory: RankMemory
) -> None:
    """REL-2. The step's own batch holds none of the load's blocks."""
    with join(server.folder, memory, **PACED) as worker:
        engine, keys, _number, _locked = released(worker, memory)
        worker.begin_step(num_tokens=1)
        for layer in range(32):
            engine.grant(Direction.RETRIEVE, 2 if layer else 0)
            worker.wait_layer(layer)
            assert memory.right_layers(keys, THERE) == list(range(layer + 1))
        worker.step_computed()
        assert worker.errors() == set()


def test_without_the_wait_the_same_step_reads_what_has_not_landed(server: ServerProcess, memory: RankMemory) -> None:
    """The control of the test above."""
    rules = replace(ALL_RULES, wait_for_released=False)
    with join(server.folder, memory, rules=rules, **PACED) as worker:
        engine, keys, _number, _locked = released(worker, memory)
        worker.begin_step(num_tokens=1)
        for layer in range(32):
            worker.wait_layer(layer)
        assert memory.right_layers(keys, THERE) == [0]
        engine.grant(Direction.RETRIEVE, 1000)


def test_a_load_that_was_not_released_holds_nobody_back(server: ServerProcess, memory: RankMemory) -> None:
    with join(server.folder, memory, **PACED) as worker:
        engine = engine_of(worker)
        keys = stored_here(worker, memory, engine)
        load(worker, keys, THERE)
        began = time.monotonic()
        worker.begin_step(num_tokens=1)
        for layer in range(32):
            worker.wait_layer(layer)
        assert time.monotonic() - began < 5
        assert worker.metrics.total("wait_timeouts") == 0
        engine.grant(Direction.RETRIEVE, 1000)
