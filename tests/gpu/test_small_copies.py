"""What an inference engine's own copies wait beside a lane that always has work: a step cannot begin without them."""

import statistics
import time
from typing import Any

import pytest

from lamella.cuda_ext.bench_cases import MAIN_SHAPES, BenchMemory
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.reference.plan import Direction

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reaches no GPU here"),
]

NUM_BYTES = 1 << 30
COPIED_BYTES = 256 << 10  # above what the driver sends along with its commands
MOST_MS = 2.0
"""A few windows of the wire, and never the transfer's twenty milliseconds."""


def _waits_ms(direction: Direction, memory: BenchMemory, turn_bytes: int) -> list[float]:
    """Milliseconds that copies of the same direction take, one after another, while a transfer is under way."""
    host: Any = torch.zeros(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    device: Any = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream()  # the default priority, as a model runner's stream has it
    with TransferEngine("cuda:0", turn_bytes=turn_bytes) as engine:
        cache = engine.register_cache(memory.shape.layout, memory.engines)
        waits: list[float] = []
        for counts in (False, True):  # the first time everything is loaded and allocated
            torch.cuda.synchronize()
            transfer = engine.submit(cache, direction, memory.objects, (memory.block_ids,), memory.num_tokens, width=1)
            while transfer.query().landed == 0:
                time.sleep(0)
            while not transfer.state.is_final:
                begin_ns = time.monotonic_ns()
                with torch.cuda.stream(stream):
                    if direction is Direction.RETRIEVE:
                        device.copy_(host, non_blocking=True)
                    else:
                        host.copy_(device, non_blocking=True)
                stream.synchronize()
                if counts:
                    waits.append((time.monotonic_ns() - begin_ns) / 1e6)
            transfer.wait(60.0)
    return waits


@pytest.fixture(scope="module")
def memory() -> Any:
    shape = MAIN_SHAPES[0]
    with BenchMemory(Device("cuda:0"), shape, shape.tokens_of(NUM_BYTES), shuffled_slots=False) as made:
        yield made


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_copy_of_the_engines_own_waits_for_a_turn_and_not_for_the_transfer(
    direction: Direction, memory: BenchMemory
) -> None:
    waits = _waits_ms(direction, memory, turn_bytes=16 << 20)
    assert len(waits) >= 8, f"no more than {len(waits)} copies were served beside the transfer: {waits}"
    assert statistics.median(waits) <= MOST_MS, waits


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_without_turns_it_waits_for_the_transfer(direction: Direction, memory: BenchMemory) -> None:
    waits = _waits_ms(direction, memory, turn_bytes=0)
    assert max(waits) > 4 * MOST_MS, waits
