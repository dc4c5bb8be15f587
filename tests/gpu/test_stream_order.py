"""Order against the engine's own work (XFER-3) and against readers behind a wait (REL-2), proved with slow kernels.

Each law has a control beside it: the same work without the fence or the wait must come out wrong, or the test would
prove nothing about order.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from lamella.cuda_ext.arrival import AfterEvent, AfterStream, Carrier, Fence
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.engine_trial import TIMEOUT_S, PlacedTrial
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase, Trial
from lamella.reference.plan import Direction, TransferRequest

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reaches no GPU here"),
]

SLOW_CYCLES = 60_000_000  # some 30 ms
METHODS = (CopyMethod.STAGED_BATCH, CopyMethod.STAGED_2D, CopyMethod.DIRECT_BATCH, CopyMethod.GATHER)


def _case(direction: Direction) -> TransferCase:
    """32 layers in packed NHD blocks, which every method can move."""
    cache = CacheCase(tuple(range(32)), 1, 2, 16, 2, num_blocks=40, block_tokens=16, axes="NTHD")
    blocks = tuple(int(block) for block in np.random.default_rng(7).permutation(40)[:32])
    request = TransferRequest(512, (blocks,))
    return TransferCase((cache,), ObjectForm.TOKEN, 64, (request,), direction, 1, staging_bytes=1 << 18, num_windows=4)


class Stage(NamedTuple):
    trial: Trial
    placed: PlacedTrial
    memory: Any  # the blocks' buffer as a torch tensor
    stream: Any


def _as_tensor(address: int, num_bytes: int) -> Any:
    interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda:0")


@pytest.fixture
def cuda() -> Device:
    return Device("cuda:0")


@pytest.fixture(params=Direction, ids=lambda direction: direction.value)
def stage(request: pytest.FixtureRequest, cuda: Device) -> Iterator[Stage]:
    trial = Trial(_case(request.param))
    with PlacedTrial(cuda, trial) as placed:
        memory = _as_tensor(placed.engine_address, placed.engine_bytes)
        yield Stage(trial, placed, memory, torch.cuda.Stream())
        torch.cuda.synchronize()


@pytest.fixture(params=Direction, ids=lambda direction: direction.value)
def late_stage(request: pytest.FixtureRequest, cuda: Device) -> Iterator[Stage]:
    """The first four layers are a group of their own whose blocks are all null: their slices move nothing."""
    case = _case(request.param)
    (cache,), (whole,) = case.caches, case.requests
    caches = (replace(cache, layers=tuple(range(4))), replace(cache, layers=tuple(range(4, 32))))
    tables = ((99,) * 32, whole.block_ids[0])
    case = replace(case, caches=caches, requests=(TransferRequest(512, tables, null_block=99),))
    trial = Trial(case)
    with PlacedTrial(cuda, trial) as placed:
        memory = _as_tensor(placed.engine_address, placed.engine_bytes)
        yield Stage(trial, placed, memory, torch.cuda.Stream())
        torch.cuda.synchronize()


def _submit(engine: TransferEngine, stage: Stage, method: CopyMethod, fence: Fence | None) -> Transfer:
    case = stage.trial.case
    (request,) = case.requests
    cache = engine.register_cache(case.layout, stage.placed.engines)
    return engine.submit(
        cache,
        case.direction,
        stage.placed.objects(0),
        request.block_ids,
        request.num_tokens,
        width=1,
        null_block=request.null_block,
        method=method,
        fence=fence,
    )


def _engine(carrier: Carrier = Carrier.EVENT, **options: Any) -> TransferEngine:
    return TransferEngine("cuda:0", staging_bytes=1 << 20, window_bytes=1 << 17, carrier=carrier, **options)


def _earlier_work(stage: Stage) -> None:
    """What the engine does to the blocks beforehand, late: it puts there what belongs there before the transfer."""
    before = stage.trial.buffers()[0]
    wanted = torch.from_numpy(before).pin_memory()
    with torch.cuda.stream(stage.stream):
        torch.cuda._sleep(SLOW_CYCLES)
        stage.memory.copy_(wanted, non_blocking=True)


def _run_behind(stage: Stage, method: CopyMethod, fence: str, **options: Any) -> bool:
    """Whether a transfer leaves the oracle's bytes when the blocks are still being prepared as it is submitted."""
    with _engine(**options) as engine:
        stage.memory.fill_(0x33)
        torch.cuda.synchronize()
        _earlier_work(stage)
        event = torch.cuda.Event()
        event.record(stage.stream)
        fences = {"stream": AfterStream(stage.stream.cuda_stream), "event": AfterEvent(event.cuda_event), "none": None}
        _submit(engine, stage, method, fences[fence]).wait(TIMEOUT_S)
        torch.cuda.synchronize()
        left = stage.placed.left()
    return stage.trial.compare(left.engine, left.host) is None


@pytest.mark.known_fault(26, 29)
@pytest.mark.parametrize("fence", ["stream", "event"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name.lower())
def test_a_transfer_behind_a_fence_touches_no_block_before_the_work_that_was_there_first(
    stage: Stage, method: CopyMethod, fence: str
) -> None:
    assert _run_behind(stage, method, fence)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name.lower())
def test_control_without_the_fence_the_same_transfer_goes_wrong(stage: Stage, method: CopyMethod) -> None:
    assert not _run_behind(stage, method, "none")


@pytest.mark.parametrize("avoid_kernels", [False, True], ids=["kernels", "copies"])
def test_a_method_that_is_chosen_behind_empty_slices_still_comes_after_the_fence(
    late_stage: Stage, avoid_kernels: bool
) -> None:
    assert _run_behind(late_stage, CopyMethod.AUTO, "stream", avoid_kernels=avoid_kernels)


def _read_behind_waits(stage: Stage, method: CopyMethod, carrier: Carrier, *, waits: bool) -> bool:
    """Whether a reader on another stream sees each layer as the oracle leaves it, the transfer being held up."""
    case, slow = stage.trial.case, torch.cuda.Stream()
    layer_bytes = case.caches[0].tensor_bytes
    offsets = stage.trial.arena.tensor_offsets[0]
    seen = torch.zeros_like(stage.memory)
    with _engine(carrier) as engine:
        with torch.cuda.stream(slow):
            torch.cuda._sleep(SLOW_CYCLES)
        transfer = _submit(engine, stage, method, AfterStream(slow.cuda_stream))
        for layer, at in enumerate(offsets):
            if waits:
                transfer.wait_layer(layer, stage.stream.cuda_stream, TIMEOUT_S)
            with torch.cuda.stream(stage.stream):
                seen[at : at + layer_bytes].copy_(stage.memory[at : at + layer_bytes], non_blocking=True)
        stage.stream.synchronize()
        transfer.wait(TIMEOUT_S)
    found, wanted = stage.trial.arena.planes(seen.cpu().numpy()), stage.trial.arena.planes(stage.trial.expected)
    return all(np.array_equal(ours[0], theirs[0]) for ours, theirs in zip(found[0], wanted[0], strict=True))


@pytest.mark.known_fault(28)
@pytest.mark.parametrize("carrier", Carrier, ids=lambda carrier: carrier.name.lower())
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name.lower())
@pytest.mark.parametrize("stage", [Direction.RETRIEVE], indirect=True, ids=["retrieve"])
def test_a_reader_behind_a_layers_wait_sees_the_whole_layer(stage: Stage, method: CopyMethod, carrier: Carrier) -> None:
    assert _read_behind_waits(stage, method, carrier, waits=True)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name.lower())
@pytest.mark.parametrize("stage", [Direction.RETRIEVE], indirect=True, ids=["retrieve"])
def test_control_without_the_waits_the_reader_sees_old_bytes(stage: Stage, method: CopyMethod) -> None:
    assert not _read_behind_waits(stage, method, Carrier.EVENT, waits=False)
