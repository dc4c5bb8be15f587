"""Several ranks, stages and engines on one server: tensor parallel 2 and 4, stages of 21 and 23 layers, sharing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING
from lamella.reference.plan import Direction
from lamella.server.protocol import TransferSide
from lamella.server.worker import Worker
from rank_driver import CHUNK, HERE, THERE, RankMemory, ServerProcess, join, keys_of, load, serving, store, until

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


@pytest.fixture
def server_options() -> tuple[str, ...]:
    return ("--memory", "8MiB")


class Engine:
    """All ranks of one engine, each with its own caches and worker."""

    def __init__(self, server: ServerProcess, memories: list[RankMemory], **options: Any) -> None:
        self.memories = memories
        chunk_bytes = sum(memory.layout.object_bytes for memory in memories)
        self._stack = ExitStack()
        self.workers: list[Worker] = []
        for rank, memory in enumerate(memories):
            self._stack.callback(memory.close)
            worker = join(server.folder, memory, rank=rank, num_ranks=len(memories), chunk_bytes=chunk_bytes, **options)
            self.workers.append(self._stack.enter_context(worker))
        self.keys = keys_of(memories[0], range(8 * CHUNK))

    def load_everywhere(self) -> None:
        """One lookup, as the scheduler makes it; each rank retrieves its own part."""
        for memory in self.memories:
            memory.poison()
        locked = self.workers[0].lookup(self.keys)
        assert locked.num_chunks == len(self.keys)
        assert len(locked.found.slots) == len(self.workers)
        numbers = [worker.retrieve("r", locked, (THERE,), 8 * CHUNK) for worker in self.workers]
        for worker, number in zip(self.workers, numbers, strict=True):
            report = until(worker, lambda report, wanted=number: wanted in report.loads)[-1]
            assert report.loads[number].ok

    def right(self) -> list[int]:
        """Layers that are right, one entry a rank."""
        return [len(memory.right_layers(self.keys, THERE)) for memory in self.memories]

    def close(self) -> None:
        self._stack.close()


def _tp(size: int) -> list[RankMemory]:
    return [RankMemory(num_layers=8, heads=8 // size, tp_rank=rank, tp_size=size) for rank in range(size)]


def _pp(stages: tuple[int, ...]) -> list[RankMemory]:
    firsts = [sum(stages[:stage]) for stage in range(len(stages))]
    return [RankMemory(num_layers=layers, first_layer=first) for first, layers in zip(firsts, stages, strict=True)]


@pytest.mark.parametrize("side", list(TransferSide), ids=lambda side: side.value)
@pytest.mark.parametrize("size", [2, 4])
def test_each_tensor_parallel_rank_gets_its_own_heads_back(
    server: ServerProcess, size: int, side: TransferSide
) -> None:
    engine = Engine(server, _tp(size), transfer_side=side)
    _store_in_parts(engine)
    engine.load_everywhere()
    assert engine.right() == [8] * size
    engine.close()


@pytest.mark.known_fault(13, 16)
@pytest.mark.parametrize("side", list(TransferSide), ids=lambda side: side.value)
def test_stages_of_21_and_23_layers_get_their_own_layers_back(server: ServerProcess, side: TransferSide) -> None:
    engine = Engine(server, _pp((21, 23)), transfer_side=side)
    _store_in_parts(engine)
    engine.load_everywhere()
    assert engine.right() == [21, 23]
    engine.close()


def _store_in_parts(engine: Engine) -> None:
    """One allocation for all ranks; until the last has committed its part nobody finds anything (SAFE-6)."""
    orders = {order.rank: order for order in engine.workers[0].allocate("s", engine.keys, (tuple(HERE),), 0)}
    for rank, worker in enumerate(engine.workers):
        assert worker.lookup(engine.keys).num_chunks == 0, "not on every rank yet"
        memory = engine.memories[rank]
        memory.fill(engine.keys, HERE)
        order = orders[rank]
        worker.begin_store(order)
        worker.begin_step(num_tokens=1)
        worker.step_computed()
        until(worker, lambda report, wanted=order.number: report.readable.get(wanted, False))


@pytest.mark.known_fault(74)
def test_another_tensor_parallel_size_finds_nothing(server: ServerProcess) -> None:
    with serving(server.folder.parent / "other", "--memory", "8MiB", "--models", "2") as shared:
        pair = Engine(shared, _tp(2))
        _store_in_parts(pair)
        single = Engine(shared, [RankMemory(num_layers=8, heads=8)], engine="single")
        assert single.workers[0].lookup(single.keys).num_chunks == 0
        assert pair.workers[0].lookup(pair.keys).num_chunks == len(pair.keys)
        single.close()
        pair.close()


def test_two_engines_of_a_model_share_what_either_stored_and_die_apart(server: ServerProcess) -> None:
    """E3: a killed or closed engine takes nothing of the other's with it."""
    first, second = RankMemory(), RankMemory()
    with join(server.folder, second, engine="second") as other:
        with join(server.folder, first, engine="first") as worker:
            keys = keys_of(first, range(64))
            store(worker, first, keys, HERE)
        second.poison()
        number, _locked = load(other, keys, THERE)
        until(other, lambda report: number in report.loads)
        assert second.right_layers(keys, THERE) == list(range(32))
    first.close()
    second.close()


@pytest.mark.known_fault(32)
def test_a_request_has_landed_only_when_every_rank_says_so(server: ServerProcess) -> None:
    """SAFE-6: each rank reports its own state; one that is frozen holds the minimum back."""
    memories = _tp(2)
    options = {"engine_options": {"paced": True, "window_bytes": 1024, "staging_bytes": 4096, "in_flight_bytes": 2048}}
    engine = Engine(server, memories, **options)
    for worker in engine.workers:
        assert worker.engine is not None
        worker.engine.grant(Direction.STORE, 10**6)
    _store_in_parts(engine)
    for memory in memories:
        memory.poison()
    locked = engine.workers[0].lookup(engine.keys)
    numbers = [worker.retrieve("r", locked, (THERE,), 64) for worker in engine.workers]
    assert engine.workers[0].engine is not None
    engine.workers[0].engine.grant(Direction.RETRIEVE, 10**6)
    assert until(engine.workers[0], lambda report: numbers[0] in report.loads)[-1].loads[numbers[0]].ok
    engine.workers[1].begin_step()
    assert engine.workers[1].poll().loads == {}
    assert engine.right() == [8, 0]
    assert engine.workers[1].engine is not None
    engine.workers[1].engine.grant(Direction.RETRIEVE, 10**6)
    assert until(engine.workers[1], lambda report: numbers[1] in report.loads)[-1].loads[numbers[1]].ok
    assert engine.right() == [8, 8]
    engine.close()
