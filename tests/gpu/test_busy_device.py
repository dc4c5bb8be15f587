"""A load beside long kernels that fill the device, as attention over a long prompt does: its scatters wait for them,
and the link goes on meanwhile."""

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
triton = pytest.importorskip("triton", reason="triton is not installed")
language = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reaches no GPU here"),
]

NUM_BYTES = 1 << 30
KERNEL_MS = 3.0
"""As long as attention over 65,536 tokens takes in one layer of an 8B model."""
SHORT_KERNELS = 15
"""After a long kernel so many, as long together: a scatter gets in between any two of them."""
BESIDE_MS = 200.0


@triton.jit
def _multiply(out, rounds):  # type: ignore[no-untyped-def]  # Triton takes annotations for types of its own
    number = language.program_id(0) * 1024 + language.arange(0, 1024)
    value = number
    for _ in range(rounds):
        value = value * 1664525 + 1013904223
    language.store(out + number, value)


class Layers:
    """A kernel of `KERNEL_MS`, then short ones for as long; none leaves a multiprocessor room for another's block."""

    def __init__(self) -> None:
        self._programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count  # of 1,024 threads each
        self._out = torch.empty(self._programs * 1024, dtype=torch.int32, device="cuda:0")
        self._rounds = 100_000
        self._run_ms()  # compiled
        self._rounds = round(self._rounds * KERNEL_MS / self._run_ms())

    def enqueue(self, count: int) -> None:
        for _ in range(count):
            self._launch(self._rounds)
            for _ in range(SHORT_KERNELS):
                self._launch(self._rounds // SHORT_KERNELS)

    def _launch(self, rounds: int) -> None:
        _multiply[(self._programs,)](self._out, rounds, num_warps=32)

    def _run_ms(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._launch(self._rounds)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


@pytest.fixture(scope="module")
def memory() -> Any:
    shape = MAIN_SHAPES[0]
    with BenchMemory(Device("cuda:0"), shape, shape.tokens_of(NUM_BYTES), shuffled_slots=False) as made:
        yield made


def _load_ms(memory: BenchMemory, layers: Layers | None, staging_bytes: int) -> float:
    """From the order to the end of a load slice by slice; the median of three after one more."""
    times: list[float] = []
    with TransferEngine("cuda:0", staging_bytes=staging_bytes) as engine:
        cache = engine.register_cache(memory.shape.layout, memory.engines)
        for _ in range(4):
            torch.cuda.synchronize()
            if layers is not None:
                layers.enqueue(round(BESIDE_MS / (2 * KERNEL_MS)))
            begin_s = time.monotonic()
            engine.submit(
                cache,
                Direction.RETRIEVE,
                memory.objects,
                (memory.block_ids,),
                memory.num_tokens,
                width=1,
                method=CopyMethod.STAGED_BATCH,
            ).wait(60.0)
            times.append(1e3 * (time.monotonic() - begin_s))
    torch.cuda.synchronize()
    assert layers is None or max(times) < BESIDE_MS, f"it outlasted the kernels beside it: {times}"
    return statistics.median(times[1:])


def test_the_link_goes_on_while_scatters_wait_for_long_kernels(memory: BenchMemory) -> None:
    layers = Layers()
    alone = _load_ms(memory, None, 256 << 20)
    beside = _load_ms(memory, layers, 256 << 20)
    held_up = _load_ms(memory, layers, 64 << 20)
    print(f"alone {alone:.1f} ms, beside kernels of {KERNEL_MS} ms {beside:.1f}, by a ring of 64 MiB {held_up:.1f}")
    assert beside < 1.2 * alone + KERNEL_MS, "the scatters of what came meanwhile follow a long kernel at once"
    assert held_up > 1.2 * beside, "a ring that does not hold what comes in a kernel's time holds the link up"
