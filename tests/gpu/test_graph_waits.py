"""A captured graph with a wait a layer: replayed while loads land it reads no layer early, and it never hangs."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lamella.cuda_ext.arrival import AfterStream, Carrier, GraphWaits
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import Fault, RegisteredCache, TransferEngine
from lamella.cuda_ext.engine_trial import TIMEOUT_S, PlacedTrial
from lamella.cuda_ext.transfer import CopyMethod, Transfer, TransferState
from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase, Trial
from lamella.reference.plan import Direction, TransferRequest

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reaches no GPU here"),
]

LAYERS = 32
SLOW_CYCLES = 20_000_000  # some 10 ms
REPLAYS = 100


class Replay:
    """A graph that copies each layer's blocks elsewhere behind that layer's wait, and loads that land meanwhile."""

    def __init__(self, engine: TransferEngine, placed: PlacedTrial, trial: Trial) -> None:
        self.trial = trial
        self.placed = placed
        self.engine = engine
        interface = {
            "shape": (placed.engine_bytes,),
            "typestr": "|u1",
            "data": (placed.engine_address, False),
            "version": 3,
        }
        self.memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda:0")
        self.poison = torch.from_numpy(trial.buffers()[0]).cuda()
        self.seen = torch.zeros_like(self.memory)
        self.stream, self.slow = torch.cuda.Stream(), torch.cuda.Stream()
        self.cache: RegisteredCache = engine.register_cache(trial.case.layout, placed.engines)
        self.waits = GraphWaits(engine)
        self.graph = self._capture()

    def _capture(self) -> Any:
        size = self.trial.case.caches[0].tensor_bytes
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="relaxed"):
            for layer, at in enumerate(self.trial.arena.tensor_offsets[0]):
                self.waits.wait(layer, self.stream.cuda_stream)
                self.seen[at : at + size].copy_(self.memory[at : at + size])
        return graph

    def load(self, width: int, method: CopyMethod, *, held_up: bool) -> Transfer:
        """A load into freshly poisoned blocks; held up, it starts some milliseconds from now."""
        self.memory.copy_(self.poison)
        self.seen.fill_(0)
        torch.cuda.synchronize()
        fence = None
        if held_up:
            with torch.cuda.stream(self.slow):
                torch.cuda._sleep(SLOW_CYCLES)
            fence = AfterStream(self.slow.cuda_stream)
        (request,) = self.trial.case.requests
        return self.engine.retrieve(
            self.cache,
            self.placed.objects(0),
            request.block_ids,
            request.num_tokens,
            width=width,
            method=method,
            fence=fence,
        )

    def replay(self) -> Any:
        """Enqueues the graph; returns an event behind it."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()
            event = torch.cuda.Event()
            event.record(self.stream)
        return event

    def saw_everything(self) -> bool:
        """Whether the replay read every layer as the oracle leaves it."""
        found = self.trial.arena.planes(self.seen.cpu().numpy())
        wanted = self.trial.arena.planes(self.trial.expected)
        return all(np.array_equal(ours[0], theirs[0]) for ours, theirs in zip(found[0], wanted[0], strict=True))


def _ends(event: Any, within_s: float = 20.0) -> bool:
    """Whether the event happens; never blocks longer than the bound, as a synchronize on a hanging graph would."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if event.query():
            return True
        time.sleep(0.001)
    return False


def _trial() -> Trial:
    cache = CacheCase(tuple(range(LAYERS)), 1, 2, 16, 2, num_blocks=40, block_tokens=16, axes="NTHD")
    blocks = tuple(int(block) for block in np.random.default_rng(9).permutation(40)[:32])
    request = TransferRequest(512, (blocks,))
    return Trial(TransferCase((cache,), ObjectForm.TOKEN, 64, (request,), Direction.RETRIEVE, 1, staging_bytes=1 << 18))


@pytest.fixture
def replay() -> Iterator[Replay]:
    trial = _trial()
    with (
        PlacedTrial(Device("cuda:0"), trial) as placed,
        TransferEngine(
            "cuda:0", num_layers=LAYERS, staging_bytes=1 << 20, window_bytes=1 << 17, carrier=Carrier.VALUE
        ) as engine,
    ):
        yield Replay(engine, placed, trial)
        torch.cuda.synchronize()


@pytest.mark.known_fault(17)
def test_a_hundred_replays_beside_landing_loads_read_no_layer_early(replay: Replay) -> None:
    methods = (CopyMethod.STAGED_BATCH, CopyMethod.STAGED_2D, CopyMethod.DIRECT_BATCH, CopyMethod.GATHER)
    for turn in range(REPLAYS):
        transfer = replay.load((1, 2, 8, 32)[turn % 4], methods[turn // 4 % 4], held_up=turn % 3 == 0)
        replay.waits.gate(transfer, replay.stream.cuda_stream)
        event = replay.replay()
        assert _ends(event), f"replay {turn} hangs"
        assert replay.saw_everything(), f"replay {turn} read a layer before it landed"
        transfer.wait(TIMEOUT_S)


def test_control_a_replay_that_was_not_gated_reads_old_bytes(replay: Replay) -> None:
    transfer = replay.load(1, CopyMethod.STAGED_BATCH, held_up=True)
    assert _ends(replay.replay())
    assert not replay.saw_everything()
    transfer.wait(TIMEOUT_S)


def test_replays_with_nothing_gated_pass_at_once(replay: Replay) -> None:
    replay.load(1, CopyMethod.AUTO, held_up=False).wait(TIMEOUT_S)
    for _ in range(3):
        assert _ends(replay.replay(), 5)
        assert replay.saw_everything()


def test_a_replay_gated_on_a_load_that_is_cancelled_ends_and_so_does_the_next(replay: Replay) -> None:
    for turn in range(8):
        transfer = replay.load(1, CopyMethod.STAGED_BATCH, held_up=True)
        replay.waits.gate(transfer, replay.stream.cuda_stream)
        event = replay.replay()
        if turn % 2:
            transfer.wait_recorded(1, TIMEOUT_S)
        transfer.cancel()
        assert _ends(event), "a cancelled load hangs the graph"
        assert transfer.wait_final(TIMEOUT_S) in (TransferState.CANCELLED, TransferState.LANDED)
    transfer = replay.load(1, CopyMethod.STAGED_BATCH, held_up=True)
    replay.waits.gate(transfer, replay.stream.cuda_stream)
    assert _ends(replay.replay())
    assert replay.saw_everything(), "a word left over from a cancelled load let the next one through early"
    transfer.wait(TIMEOUT_S)


@pytest.mark.parametrize("fault", [Fault.ISSUED, Fault.COMPLETED])
def test_a_replay_gated_on_a_load_that_fails_ends_and_the_load_says_why(replay: Replay, fault: Fault) -> None:
    replay.engine.plant_fault(Direction.RETRIEVE, 3, fault)
    transfer = replay.load(1, CopyMethod.STAGED_BATCH, held_up=True)
    replay.waits.gate(transfer, replay.stream.cuda_stream)
    event = replay.replay()
    assert _ends(event), "a failed load hangs the graph"
    assert transfer.wait_final(TIMEOUT_S) is TransferState.FAILED
    assert "planted" in transfer.error


def test_two_gated_loads_hold_a_replay_until_the_later_one_has_landed(replay: Replay) -> None:
    """Both loads write the same blocks with the same bytes; only the second is held up."""
    early = replay.load(1, CopyMethod.STAGED_BATCH, held_up=False)
    early.wait(TIMEOUT_S)
    late = replay.load(1, CopyMethod.STAGED_BATCH, held_up=True)
    replay.waits.gate(early, replay.stream.cuda_stream)
    replay.waits.gate(late, replay.stream.cuda_stream)
    assert _ends(replay.replay())
    assert replay.saw_everything()
    late.wait(TIMEOUT_S)
