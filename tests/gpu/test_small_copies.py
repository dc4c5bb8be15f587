"""What an engine's own small copies wait beside a lane that always has work: a step cannot begin without them."""

import statistics
import time
from typing import Any

import pytest

from lamella.cuda_ext.bench_cases import MAIN_SHAPES, BenchMemory
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.transfer import CopyMethod
from lamella.reference.plan import Direction

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reaches no GPU here"),
]

NUM_BYTES = 1 << 30
MOST_MS = 2.0
"""A window or two of the wire, and never the transfer's twenty milliseconds."""


def _waits_ms(direction: Direction, engine: TransferEngine, memory: BenchMemory, method: CopyMethod) -> list[float]:
    """Milliseconds that small copies of the same direction take, one after another, while a transfer is under way."""
    cache = engine.register_cache(memory.shape.layout, memory.engines)
    host: Any = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    device: Any = torch.zeros(4096, dtype=torch.uint8, device="cuda:0")
    stream = torch.cuda.Stream()  # the default priority, as a model runner's stream has it
    torch.cuda.synchronize()
    table = (memory.block_ids,)
    transfer = engine.submit(cache, direction, memory.objects, table, memory.num_tokens, width=1, method=method)
    while transfer.query().landed == 0:
        time.sleep(0)
    waits: list[float] = []
    while not transfer.state.is_final:
        begin_ns = time.monotonic_ns()
        with torch.cuda.stream(stream):
            if direction is Direction.RETRIEVE:
                device.copy_(host, non_blocking=True)
            else:
                host.copy_(device, non_blocking=True)
        stream.synchronize()
        waits.append((time.monotonic_ns() - begin_ns) / 1e6)
    transfer.wait(60.0)
    return waits


@pytest.mark.parametrize("method", [CopyMethod.STAGED_2D, CopyMethod.STAGED_BATCH], ids=lambda method: method.name)
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_small_copy_waits_for_a_window_and_not_for_the_transfer(direction: Direction, method: CopyMethod) -> None:
    shape = MAIN_SHAPES[0]
    with (
        BenchMemory(Device("cuda:0"), shape, shape.tokens_of(NUM_BYTES), shuffled_slots=False) as memory,
        TransferEngine("cuda:0") as engine,
    ):
        _waits_ms(direction, engine, memory, method)  # everything is compiled, loaded and allocated
        waits = _waits_ms(direction, engine, memory, method)
        print(
            f"{direction.value} {method.name}: {len(waits)} small copies beside it, median "
            f"{statistics.median(waits):.3f} ms, longest {max(waits):.3f} ms"
        )
    assert len(waits) >= 8, f"no more than {len(waits)} small copies were served beside the transfer: {waits}"
    assert statistics.median(waits) <= MOST_MS, waits
