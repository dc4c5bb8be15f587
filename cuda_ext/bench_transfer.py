"""Measures transfers against one raw copy of the same bytes: idle, and beside matrix products here or elsewhere.

Raw copies and transfers take turns, so that a drift of the machine meets both. A transfer's time is from the call to
the last slice's landing by the device's clock; the raw copy's is the device's alone, so the ratio is not flattered.
Every shape's bytes are checked after the first run of each direction.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.bench_cases import BenchMemory, BenchShape
from lamella.cuda_ext.bench_report import HostCost, Repeats, Row, Slowdown
from lamella.cuda_ext.beside import Products, torch_reason
from lamella.cuda_ext.device import Device, ProbeMethod, RawCopy
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.rates import H200_RATES, EngineRates
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.plan import Direction

TIMEOUT_S = 60.0
IDLE, HERE, ELSEWHERE = "idle", "products here", "products elsewhere"
Beside = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How a bench measures.

    Args:
        repeats: runs of each kind that count.
        warm_up: runs before them that do not.
        rows: tokens of the products beside.
        staging_bytes: the engine's budget.
        rates: what AUTO chooses by.
        method: forced, or AUTO.
    """

    repeats: int = 7
    warm_up: int = 2
    rows: int = 1024
    staging_bytes: int = 64 << 20
    rates: EngineRates = H200_RATES
    method: CopyMethod = CopyMethod.AUTO


class Variant(NamedTuple):
    """One kind of transfer; `width` None is chunk-major: all layers in one slice."""

    direction: Direction
    width: int | None
    with_other: bool = False


class _Sample(NamedTuple):
    total_ns: int
    first_ns: int
    queued_ns: int
    method: str
    num_slices: int


class _Mover(NamedTuple):
    engine: TransferEngine
    caches: tuple[RegisteredCache, ...]


class TransferBench:
    """One shape's memory and the engines that move it; a context manager.

    Args:
        device: measured.
        shape: of the cache.
        num_bytes: about how many a transfer moves; whole chunks.
        settings: how.
        duplex: room for a second prefix, so that a store can run beside a retrieve.
        shuffled_slots: objects in random slots rather than consecutive ones.
    """

    def __init__(
        self,
        device: Device,
        shape: BenchShape,
        num_bytes: int,
        settings: BenchSettings,
        *,
        duplex: bool = False,
        shuffled_slots: bool = True,
    ) -> None:
        self.device = device
        self.shape = shape
        self.settings = settings
        self._movers: dict[bool, _Mover] = {}
        self._stack = contextlib.ExitStack()
        try:
            tokens = shape.tokens_of(num_bytes)
            self._memories = [
                self._stack.enter_context(BenchMemory(device, shape, tokens, shuffled_slots=shuffled_slots, seed=seed))
                for seed in range(2 if duplex else 1)
            ]
            # In one piece of registered memory, which a copy that is not split needs.
            pages = -(-len(self._memories) * self.num_bytes // mmap.PAGESIZE)
            self._raw = HostMemory.anonymous(pages * mmap.PAGESIZE)
            self._stack.callback(self._raw.close)
            registrar = device.registrar()
            registrar.register(self._raw.address, self._raw.num_bytes)
            self._stack.callback(registrar.unregister, self._raw.address, self._raw.num_bytes)
        except BaseException:
            self._stack.close()
            raise

    @property
    def memory(self) -> BenchMemory:
        """The prefix that is moved, and its blocks."""
        return self._memories[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.memory.num_bytes

    def check(self, direction: Direction, width: int | None = 1) -> None:
        """One transfer in that direction leaves the right bytes.

        Raises:
            RuntimeError: it does not.
        """
        memory = self._memories[0]
        memory.poison() if direction is Direction.RETRIEVE else memory.scramble_cache()
        self._transfer(Variant(direction, width)).wait(TIMEOUT_S)
        memory.check(direction)

    def raw(self, direction: Direction) -> int:
        """Nanoseconds of one raw copy of as many bytes, by the device's clock."""
        target = self._memories[0].cache_address
        (taken,) = self.device.copy(RawCopy(direction, ProbeMethod.WHOLE, self._raw.address, target, 1, self.num_bytes))
        return taken.copy_ns

    def raw_both(self, raw_idle: Mapping[Direction, Repeats]) -> list[Row]:
        """What two raw copies in opposite directions make of one another: the bound of transfers both ways at once."""
        host, half = self._raw.address, self.num_bytes
        copies = [
            RawCopy(direction, ProbeMethod.WHOLE, host + place * half, self._memories[place].cache_address, 1, half)
            for place, direction in enumerate((Direction.RETRIEVE, Direction.STORE))
        ]
        times = [self.device.copy(*copies) for _ in range(self.settings.warm_up + self.settings.repeats)]
        rows = []
        for place, copy in enumerate(copies):
            taken = Repeats(tuple(time[place].copy_ns for time in times[self.settings.warm_up :]))
            idle_copy = raw_idle[copy.direction]
            name = _name(Variant(copy.direction, 1, with_other=True))
            nothing = Repeats((0,) * len(taken.values_ns))
            rows.append(
                Row(
                    self.shape.name,
                    IDLE,
                    name,
                    "-",
                    "raw copy",
                    half,
                    1,
                    taken,
                    taken,
                    nothing,
                    1.0,
                    idle_copy,
                    idle_copy,
                )
            )
        return rows

    def retrieve_once(self, width: int | None) -> int:
        """Nanoseconds of one retrieve, from the call to the last landing."""
        return self._measure(Variant(Direction.RETRIEVE, width), avoid_kernels=False).total_ns

    def raw_idle(self) -> dict[Direction, Repeats]:
        """Raw copies in both directions with nothing beside them."""
        turns = range(self.settings.warm_up + self.settings.repeats)
        taken = {direction: [self.raw(direction) for _ in turns] for direction in Direction}
        return {direction: Repeats(tuple(times[self.settings.warm_up :])) for direction, times in taken.items()}

    def rows(
        self, variants: Sequence[Variant], beside: str, load: Beside, raw_idle: Mapping[Direction, Repeats]
    ) -> list[Row]:
        """Every variant beside the same load, taking turns with raw copies."""
        samples: dict[Variant, list[_Sample]] = {variant: [] for variant in variants}
        raw: dict[Direction, list[int]] = {variant.direction: [] for variant in variants}
        for turn in range(self.settings.warm_up + self.settings.repeats):
            counts = turn >= self.settings.warm_up
            for direction, taken in raw.items():
                with load():
                    time_ns = self.raw(direction)
                if counts:
                    taken.append(time_ns)
            for variant in variants:
                with load():
                    sample = self._measure(variant, avoid_kernels=beside == ELSEWHERE)
                if counts:
                    samples[variant].append(sample)
        return [
            Row(
                shape=self.shape.name,
                beside=beside,
                direction=_name(variant),
                width="chunk-major" if variant.width is None else str(variant.width),
                method=" ".join(sorted({sample.method for sample in taken})),
                num_bytes=self.num_bytes,
                num_slices=taken[0].num_slices,
                total=Repeats(tuple(sample.total_ns for sample in taken)),
                first=Repeats(tuple(sample.first_ns for sample in taken)),
                queued=Repeats(tuple(sample.queued_ns for sample in taken)),
                first_share=(variant.width or self.shape.geometry.num_layers) / self.shape.geometry.num_layers,
                raw=Repeats(tuple(raw[variant.direction])),
                raw_idle=raw_idle[variant.direction],
            )
            for variant, taken in samples.items()
        ]

    def slowdowns(self, rows: int) -> list[Slowdown]:
        """What products lose beside a bare raw copy, and beside a retrieve at width 1.

        As many products as fit into nine tenths of a raw copy, so that all of them have the copy beside them.
        """
        products = Products(self.device.name, rows)
        count = max(1, round(0.9 * self.raw(Direction.RETRIEVE) / (products.run(20) / 20)))
        meanwhile: dict[str, list[int]] = {"nothing": [], "a raw copy": [], "a retrieve, width 1": []}
        for turn in range(self.settings.warm_up + self.settings.repeats):
            for name, taken in meanwhile.items():
                transfer: Transfer | None = None
                if name == "a retrieve, width 1":
                    transfer = self._transfer(Variant(Direction.RETRIEVE, 1))
                with products.timed(count) as times:
                    if name == "a raw copy":
                        self.raw(Direction.RETRIEVE)
                if transfer:
                    transfer.wait(TIMEOUT_S)
                if turn >= self.settings.warm_up:
                    taken.append(times[0])
        alone = Repeats(tuple(meanwhile.pop("nothing")))
        return [Slowdown(name, rows, alone, Repeats(tuple(taken))) for name, taken in meanwhile.items()]

    @contextlib.contextmanager
    def products_here(self, rows: int) -> Iterator[Beside]:
        """A load of products in this process that outlasts a transfer by half."""
        products = Products(self.device.name, rows)
        count = max(1, round(1.5 * self.raw(Direction.RETRIEVE) / (products.run(20) / 20)))
        yield lambda: products.timed(count)

    def _measure(self, variant: Variant, avoid_kernels: bool) -> _Sample:
        self._mover(avoid_kernels)
        before = time.monotonic_ns()
        transfer = self._transfer(variant, avoid_kernels=avoid_kernels)
        other = None
        if variant.with_other:
            opposite = Direction.STORE if variant.direction is Direction.RETRIEVE else Direction.RETRIEVE
            other = self._transfer(Variant(opposite, variant.width), prefix=1, avoid_kernels=avoid_kernels)
        transfer.wait(TIMEOUT_S)
        if other:
            other.wait(TIMEOUT_S)
        landed = transfer.timestamps_ns().landed_ns
        progress = transfer.query()
        method = progress.method.name.lower().replace("_", " ")
        return _Sample(
            landed[-1] - before, landed[0] - before, progress.submitted_ns - before, method, transfer.num_slices
        )

    def _transfer(self, variant: Variant, *, prefix: int = 0, avoid_kernels: bool = False) -> Transfer:
        memory, mover = self._memories[prefix], self._mover(avoid_kernels)
        return mover.engine.submit(
            mover.caches[prefix],
            variant.direction,
            memory.objects,
            (memory.block_ids,),
            memory.num_tokens,
            width=variant.width or self.shape.geometry.num_layers,
            method=self.settings.method,
        )

    def _mover(self, avoid_kernels: bool) -> _Mover:
        if avoid_kernels not in self._movers:
            engine = self._stack.enter_context(
                TransferEngine(
                    self.device.name,
                    staging_bytes=self.settings.staging_bytes,
                    avoid_kernels=avoid_kernels,
                    rates=self.settings.rates,
                )
            )
            caches = tuple(engine.register_cache(self.shape.layout, memory.engines) for memory in self._memories)
            self._movers[avoid_kernels] = _Mover(engine, caches)
        return self._movers[avoid_kernels]

    def __enter__(self) -> TransferBench:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _compute_stream(device: Device) -> tuple[object, int]:
    """A stream to wait on as an engine's would be, and its owner; the legacy default stream where torch is missing."""
    if not device.is_cuda or torch_reason(device.name):
        return None, 0
    import torch

    stream = torch.cuda.Stream(torch.device(device.name))
    return stream, int(stream.cuda_stream)


def idle() -> contextlib.AbstractContextManager[object]:
    """The load that is none."""
    return contextlib.nullcontext()


def _name(variant: Variant) -> str:
    other = "store" if variant.direction is Direction.RETRIEVE else "retrieve"
    return variant.direction.value + (f" with {other}" if variant.with_other else "")


def host_cost(
    device: Device, shape: BenchShape, num_objects: int, carrier: Carrier, settings: BenchSettings
) -> HostCost:
    """What one retrieve of `num_objects` objects at width 1 costs the host, and the engine the device's memory."""
    tokens = num_objects * shape.geometry.chunk_tokens
    with BenchMemory(device, shape, tokens, spare=0.05) as memory:
        free = device.facts().free_bytes
        submit: list[int] = []
        waits: list[int] = []
        host_waits: list[int] = []
        with TransferEngine(device.name, staging_bytes=settings.staging_bytes, carrier=carrier) as engine:
            cache = engine.register_cache(shape.layout, memory.engines)
            owner, stream = _compute_stream(device)
            objects, table = memory.objects, (memory.block_ids,)
            busy_ns = wall_ns = device_bytes = 0
            for turn in range(settings.warm_up + settings.repeats):
                cpu = engine.lane(Direction.RETRIEVE).thread_cpu_ns
                before = time.monotonic_ns()
                transfer = engine.retrieve(cache, objects, table, tokens, width=1)
                queued = time.monotonic_ns()
                for layer in range(transfer.num_slices):
                    start = time.monotonic_ns()
                    waited = transfer.wait_layer(layer, stream, TIMEOUT_S)
                    if turn >= settings.warm_up:
                        waits.append(time.monotonic_ns() - start - waited)
                        host_waits.append(waited)
                transfer.wait(TIMEOUT_S)
                if turn >= settings.warm_up:
                    submit.append(queued - before)
                    wall_ns += time.monotonic_ns() - before
                    busy_ns += engine.lane(Direction.RETRIEVE).thread_cpu_ns - cpu
                device_bytes = max(device_bytes, free - device.facts().free_bytes)
        del owner
        return HostCost(
            num_objects=num_objects,
            num_slices=shape.geometry.num_layers,
            submit=Repeats(tuple(submit)),
            wait_layer=Repeats(tuple(waits)),
            host_wait=Repeats(tuple(host_waits)),
            carrier=carrier.name.lower(),
            thread_share=busy_ns / wall_ns,
            device_bytes=device_bytes if device.is_cuda else 0,
            staging_bytes=settings.staging_bytes,
        )
