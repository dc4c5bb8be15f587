"""Order against other work on a GPU: waits on streams and in graphs, fences by delay kernels, each with its control.

The controls matter as much as the tests: without the wait or the fence the same program must leave wrong bytes, or the
test would show nothing.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.arrival import AfterEvent, AfterStream, Carrier, GraphWaits
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.transfer import CopyMethod, Transfer, TransferState
from lamella.reference.geometry import KVGeometry
from lamella.reference.layout import ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch with CUDA"),
]

WAIT_S = 20.0
LAYERS, BLOCK, CHUNK, TOKENS = 32, 16, 256, 2048
DELAY_CYCLES = 40_000_000  # about 20 ms


class Paged:
    """64 MiB of KV: 32 layers of `[NB, 16, 8, 64]` on the GPU, and its objects in pinned memory."""

    def __init__(self) -> None:
        self.geometry = KVGeometry(LAYERS, 1, 8, 64, 2, CHUNK)
        self.layout = ObjectLayout.single(self.geometry, BLOCK)
        blocks = TOKENS // BLOCK
        self.cache = torch.zeros((LAYERS, blocks + 8, BLOCK, 8, 64), dtype=torch.int16, device="cuda:0")
        objects = torch.randint(1, 2**15, (TOKENS // CHUNK, LAYERS, CHUNK, 512), dtype=torch.int16)
        self.objects = objects.pin_memory()
        self.table = np.random.default_rng(3).permutation(blocks + 8)[:blocks].astype(np.int32)
        self.blocks = torch.from_numpy(self.table.astype(np.int64)).cuda()
        self.wanted = self.objects.permute(1, 0, 2, 3).reshape(LAYERS, blocks, BLOCK, 8, 64).cuda()
        view = [TensorView(x.data_ptr(), tuple(x.shape), tuple(2 * s for s in x.stride()), 2) for x in self.cache]
        self.engines = (engine_layout("NTHD", view),)
        self.out = torch.zeros_like(self.wanted)

    def host(self) -> HostObjects:
        return HostObjects([one.data_ptr() for one in self.objects])

    def read_layer(self, layer: int) -> None:
        """What a model's layer does: takes the blocks as they are now, on the current stream."""
        torch.index_select(self.cache[layer], 0, self.blocks, out=self.out[layer])

    def reset(self) -> None:
        self.cache.zero_()
        self.out.zero_()
        torch.cuda.synchronize()

    def right_layers(self) -> list[int]:
        return [layer for layer in range(LAYERS) if torch.equal(self.out[layer], self.wanted[layer])]


@pytest.fixture(scope="module")
def paged() -> Paged:
    return Paged()


def _engine(carrier: Carrier = Carrier.EVENT, **options: Any) -> TransferEngine:
    try:
        # Few bytes in flight, so that a slice is often waited for before it is recorded.
        sizes = {"window_bytes": 1 << 20, "staging_bytes": 8 << 20} | options
        return TransferEngine("cuda:0", num_layers=LAYERS, carrier=carrier, **sizes)
    except LibraryMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=Carrier)
def loaded(request: pytest.FixtureRequest, paged: Paged) -> Iterator[tuple[TransferEngine, RegisteredCache]]:
    paged.reset()
    with _engine(request.param) as engine:
        yield engine, engine.register_cache(paged.layout, paged.engines)


def _retrieve(engine: TransferEngine, cache: RegisteredCache, paged: Paged, **options: Any) -> Transfer:
    direction = options.pop("direction", Direction.RETRIEVE)
    return engine.submit(cache, direction, paged.host(), [paged.table], TOKENS, **options)


def _finishes(stream: Any) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# ---- waits on a stream


@pytest.mark.parametrize("method", [CopyMethod.STAGED_BATCH, CopyMethod.DIRECT_BATCH, CopyMethod.GATHER])
@pytest.mark.parametrize("width", [1, 3])
def test_a_stream_reads_each_layer_only_after_it_landed(
    loaded: tuple[TransferEngine, RegisteredCache], paged: Paged, width: int, method: CopyMethod
) -> None:
    engine, cache = loaded
    stream = torch.cuda.Stream()
    for _ in range(5):
        paged.reset()
        transfer = _retrieve(engine, cache, paged, width=width, method=method)
        with torch.cuda.stream(stream):
            for layer in range(LAYERS):
                waited = transfer.wait_layer(layer, stream.cuda_stream)
                assert waited == 0 or engine.carrier is Carrier.EVENT
                paged.read_layer(layer)
        assert _finishes(stream)
        assert paged.right_layers() == list(range(LAYERS))
        transfer.wait(WAIT_S)


def _first_transfer(results: Any) -> None:
    """In a process that has launched none of the engine's kernels: how a transfer ends that a stream waits for."""
    paged = Paged()
    paged.read_layer(0)
    paged.reset()
    stream = torch.cuda.Stream()
    with _engine(Carrier.VALUE) as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        transfer = _retrieve(engine, cache, paged, width=3, method=CopyMethod.STAGED_BATCH, deadline_s=3.0)
        with torch.cuda.stream(stream):
            transfer.wait_layer(LAYERS - 1, stream.cuda_stream)
            paged.read_layer(LAYERS - 1)
        results.put(transfer.wait_final(WAIT_S).name)


def test_a_stream_that_waits_does_not_keep_the_first_kernel_from_being_loaded() -> None:
    """CUDA loads a kernel at its first launch and waits for the device to do so, and so for the stream that waits."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=_first_transfer, args=(results,))
    process.start()
    assert results.get(timeout=60) == "LANDED"
    process.join(WAIT_S)


def test_without_the_wait_a_stream_reads_layers_that_have_not_landed(
    loaded: tuple[TransferEngine, RegisteredCache], paged: Paged
) -> None:
    engine, cache = loaded
    transfer = _retrieve(engine, cache, paged)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(LAYERS):
            paged.read_layer(layer)
    stream.synchronize()
    transfer.wait(WAIT_S)
    assert len(paged.right_layers()) < LAYERS


@pytest.mark.parametrize("how", ["cancel", "failure", "deadline"])
def test_no_stream_hangs_on_a_transfer_that_ends_early(paged: Paged, how: str) -> None:
    paged.reset()
    stuck, stream = torch.cuda.Stream(), torch.cuda.Stream()
    with _engine(Carrier.VALUE) as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        with torch.cuda.stream(stuck):
            torch.cuda._sleep(DELAY_CYCLES * (25 if how == "deadline" else 1))
        if how == "failure":
            engine.plant_fault(Direction.RETRIEVE, 5)
        transfer = _retrieve(
            engine, cache, paged, fence=AfterStream(stuck.cuda_stream), deadline_s=0.1 if how == "deadline" else 30.0
        )
        started = time.monotonic()
        transfer.wait_layer(LAYERS - 1, stream.cuda_stream)
        if how == "cancel":
            transfer.cancel()
        assert _finishes(stream)
        if how == "deadline":
            assert time.monotonic() - started < 0.4
            assert not stuck.query(), "the stream was let go while the transfer is stuck still"
            assert "the deadline has passed" in transfer.error
        assert transfer.wait_final(WAIT_S) in (TransferState.CANCELLED, TransferState.FAILED)
        with pytest.raises(TransferStopped):
            transfer.wait_layer(LAYERS - 1, stream.cuda_stream)
        _retrieve(engine, cache, paged).wait(WAIT_S)  # the lane goes on


# ---- waits inside a graph


def _captured(engine: TransferEngine, paged: Paged, stream: Any, *, waits: bool) -> Any:
    """One replay reads every layer in order, each behind its word."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for layer in range(LAYERS):  # kernels are loaded before the capture
            paged.read_layer(layer)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        for layer in range(LAYERS):
            if waits:
                GraphWaits(engine).wait(layer, stream.cuda_stream)
            paged.read_layer(layer)
    return graph


def test_a_graph_replayed_a_hundred_times_reads_no_layer_early(paged: Paged) -> None:
    stream = torch.cuda.Stream()
    random = np.random.default_rng(11)
    with _engine(Carrier.VALUE) as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        graph = _captured(engine, paged, stream, waits=True)
        gated_late = 0
        for _ in range(100):
            paged.reset()
            transfer = _retrieve(engine, cache, paged, width=int(random.integers(1, 5)))
            transfer.wait_recorded(int(random.integers(0, 3)), WAIT_S)
            GraphWaits(engine).gate(transfer, stream.cuda_stream)
            gated_late += transfer.landed() == transfer.num_slices
            with torch.cuda.stream(stream):
                graph.replay()
            assert _finishes(stream)
            assert paged.right_layers() == list(range(LAYERS))
            transfer.wait(WAIT_S)
        assert gated_late < 50, "most transfers had landed before their graph ran: the test shows little"


def test_a_graph_without_waits_reads_layers_early(paged: Paged) -> None:
    stream = torch.cuda.Stream()
    paged.reset()
    with _engine(Carrier.VALUE) as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        graph = _captured(engine, paged, stream, waits=False)
        paged.reset()
        transfer = _retrieve(engine, cache, paged)
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        transfer.wait(WAIT_S)
        assert len(paged.right_layers()) < LAYERS


@pytest.mark.parametrize("how", ["cancel", "failure"])
def test_a_graph_does_not_hang_on_a_gated_transfer_that_ends_early(paged: Paged, how: str) -> None:
    stream = torch.cuda.Stream()
    with _engine(Carrier.VALUE) as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        graph = _captured(engine, paged, stream, waits=True)
        for turn in range(10):
            paged.reset()
            if how == "failure":
                engine.plant_fault(Direction.RETRIEVE, engine.lane(Direction.RETRIEVE).windows + 40)
            transfer = _retrieve(engine, cache, paged)
            transfer.wait_recorded(1 + turn % 3, WAIT_S)
            try:
                GraphWaits(engine).gate(transfer, stream.cuda_stream)
            except TransferStopped:
                assert how == "failure"
            with torch.cuda.stream(stream):
                graph.replay()
            if how == "cancel":
                transfer.cancel()
            assert _finishes(stream)
            assert transfer.wait_final(WAIT_S).is_final
        paged.reset()  # nothing is left pending
        with torch.cuda.stream(stream):
            graph.replay()
        assert _finishes(stream)


# ---- fences (XFER-3)


def _after_stream(stream: Any) -> AfterStream:
    return AfterStream(stream.cuda_stream)


def _after_event(stream: Any) -> AfterEvent:
    event = torch.cuda.Event()
    event.record(stream)
    _after_event.kept = event  # type: ignore[attr-defined]
    return AfterEvent(event.cuda_event)


@pytest.mark.parametrize("fence", [_after_stream, _after_event, None])
@pytest.mark.parametrize("method", [CopyMethod.STAGED_BATCH, CopyMethod.DIRECT_BATCH, CopyMethod.GATHER])
def test_a_retrieve_comes_after_the_engines_work_on_its_blocks(
    paged: Paged, method: CopyMethod, fence: Callable[[Any], AfterStream | AfterEvent] | None
) -> None:
    paged.reset()
    busy = torch.cuda.Stream()
    with _engine() as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        with torch.cuda.stream(busy):
            torch.cuda._sleep(DELAY_CYCLES)
            paged.cache.fill_(-7)  # zeroing of fresh blocks, say
        transfer = _retrieve(engine, cache, paged, method=method, fence=fence(busy) if fence else None)
        transfer.wait(WAIT_S)
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            paged.read_layer(layer)
        torch.cuda.synchronize()
        right = len(paged.right_layers())
    assert right == (LAYERS if fence else 0)


@pytest.mark.parametrize("fence", [_after_stream, _after_event, None])
@pytest.mark.parametrize("method", [CopyMethod.STAGED_BATCH, CopyMethod.DIRECT_BATCH, CopyMethod.GATHER])
def test_a_store_comes_after_the_engines_work_on_its_blocks(
    method: CopyMethod, fence: Callable[[Any], AfterStream | AfterEvent] | None
) -> None:
    paged = Paged()
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    with _engine() as engine:
        cache = engine.register_cache(paged.layout, paged.engines)
        with torch.cuda.stream(busy):
            torch.cuda._sleep(DELAY_CYCLES)
            paged.cache.fill_(77)
        transfer = _retrieve(
            engine, cache, paged, method=method, fence=fence(busy) if fence else None, direction=Direction.STORE
        )
        transfer.wait(WAIT_S)
        assert bool((paged.objects == (77 if fence else 0)).all())
        torch.cuda.synchronize()


# ---- resources


def test_engines_come_and_go_without_a_trace(paged: Paged) -> None:
    paged.reset()
    free = []
    for _ in range(6):
        with _engine() as engine:
            cache = engine.register_cache(paged.layout, paged.engines)
            _retrieve(engine, cache, paged).wait(WAIT_S)
            taken = torch.cuda.mem_get_info()[0]
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] - taken <= (8 << 20) + (16 << 20), "more than the staging budget and 16 MiB"
    assert free[-1] >= free[1] - (2 << 20)
