"""Measures what a device profile says of the link and the copies, and with torch of prefill.

A profile also holds the engine's own times (admission, decoding, limits), which only the engine can give; those are
carried over from a base profile, and the new profile's sources say which part comes from where.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from lamella.cuda_ext.bench_cases import MAIN_SHAPES, BenchShape
from lamella.cuda_ext.bench_transfer import IDLE, BenchSettings, TransferBench, Variant, idle
from lamella.cuda_ext.beside import Products, torch_reason
from lamella.cuda_ext.device import Device, DeviceMemory, ProbeMethod, RawCopy
from lamella.cuda_ext.prefill_times import STAND_INS, measure_prefill
from lamella.cuda_ext.provenance import Provenance, provenance_of
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.transfer import CopyMethod as EngineMethod
from lamella.reference.geometry import KVGeometry
from lamella.reference.plan import Direction
from lamella.reference.profile import CopyCurve, CopyMethod, DeviceProfile, Source, Wire

RUNS = tuple(1 << power for power in range(11, 20))
"""Run lengths of the table: 2 KiB to 512 KiB."""

_MOST_RUNS = 32768  # of one measurement: enough for a rate, few enough for short runs
_GATHER_LAYERS = 4
_TOKEN_BYTES = 2048  # of one layer and kv: 8 heads of 128, bf16


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """How a calibration measures.

    Args:
        num_bytes: of a raw copy and of a long-run measurement.
        repeats: of each; medians go into the profile.
        rows: of the products that interference is measured with; from the smallest to the largest loss is recorded.
        prefill: whether to measure prefill steps with torch, where the base's model has a stand-in.
    """

    num_bytes: int = 1 << 30
    repeats: int = 5
    rows: tuple[int, ...] = (256, 1024, 4096)
    prefill: bool = True


def calibrate(
    device: Device,
    name: str,
    base: DeviceProfile,
    settings: CalibrationSettings,
    command: Sequence[str],
    progress: Callable[[str], None] = lambda line: None,
) -> DeviceProfile:
    """A profile named `name`: link and copies measured here, everything else from `base` unless torch measures it too.

    Args:
        device: measured.
        name: of the new profile.
        base: whose model, step times and engine times are carried over.
        settings: how.
        command: for the sources.
        progress: called with a line before each part.

    Raises:
        RuntimeError: the device fails, or a transfer does.
    """
    origin = provenance_of(device, command)
    with _buffers(device, settings.num_bytes) as (host, memory):
        progress("the link, each direction and both at once")
        wire = _wire(device, host, memory, settings)
        curves = []
        for method, probe in ((CopyMethod.BATCH_DMA, ProbeMethod.BATCH), (CopyMethod.COPY_2D, ProbeMethod.STRIDED)):
            progress(f"{method.value} by run length")
            curves.append(_probe_curve(device, host, memory, method, probe, settings))
    progress(f"{CopyMethod.SM_GATHER.value} by run length")
    curves.append(_gather_curve(device, settings))
    progress("what a further slice costs")
    wire = replace(wire, slice_fixed_ns=_slice_fixed_ns(device, settings))
    notes = [f"medians of {settings.repeats}; batches of 64 entries; runs at shuffled places"]
    if reason := torch_reason(device.name):
        notes.append(f"slowdowns are the base profile's ({base.name}): {reason}")
        curves = [replace(curve, slowdown=base.curve(curve.method).slowdown) for curve in curves]
    else:
        progress("what copies cost matrix products beside them")
        curves = [replace(curve, slowdown=_slowdown(device, curve.method, settings)) for curve in curves]
        notes.append(f"slowdown of matrix products with {', '.join(map(str, settings.rows))} rows")
    sources = [_source(origin, "wire, copies", "; ".join(notes))]
    prefill = base.prefill
    if settings.prefill and base.model in STAND_INS and not torch_reason(device.name):
        progress(f"prefill steps of layers of {base.model}'s shape")
        prefill = measure_prefill(device.name, base.model, base.num_layers, base.prefill)
        note = "layers of the model's shape in plain torch, not an engine: the engine's own are better"
        sources.append(_source(origin, "prefill", note))
    carried = "engine, decode" if prefill is not base.prefill else "engine, prefill, decode"
    sources += [
        replace(source, covers=f"{carried} from {base.name}: {source.covers}")
        for source in base.sources
        if any(part in source.covers for part in carried.split(", "))
    ]
    return replace(
        base,
        name=name,
        device=origin.device_name,
        sources=tuple(sources),
        wire=wire,
        copies=tuple(curves),
        prefill=prefill,
    )


def _source(origin: Provenance, covers: str, note: str) -> Source:
    system = f"{origin.device_name}, device {origin.device}, driver for CUDA {origin.driver or 'none'}, {origin.host}"
    packages = ", ".join(f"{package} {version}" for package, version in origin.packages.items())
    return Source(covers, origin.date, f"{origin.command} (lamella {origin.lamella})", f"{system}, {packages}", note)


@contextmanager
def _buffers(device: Device, num_bytes: int) -> Iterator[tuple[HostMemory, DeviceMemory]]:
    """Registered host memory and device memory, each of twice the size: a strided copy skips every other run."""
    registrar, host = device.registrar(), HostMemory.anonymous(2 * num_bytes)
    np.frombuffer(memoryview(host.buffer), dtype=np.uint8)[::4096] = 1
    registrar.register(host.address, host.num_bytes)
    try:
        with device.allocate(2 * num_bytes) as memory:
            memory.fill(0)
            yield host, memory
    finally:
        registrar.unregister(host.address, host.num_bytes)
        host.close()


def _wire(device: Device, host: HostMemory, memory: DeviceMemory, settings: CalibrationSettings) -> Wire:
    size = settings.num_bytes

    def whole(direction: Direction) -> RawCopy:
        half = size if direction is Direction.STORE else 0  # apart, so that both can run at once
        return RawCopy(direction, ProbeMethod.WHOLE, host.address + half, memory.address + half, 1, size)

    down, up = whole(Direction.RETRIEVE), whole(Direction.STORE)
    alone = [_median_ns(device, settings, copy) for copy in (down, up)]
    both = statistics.median(max(time.copy_ns for time in device.copy(down, up)) for _ in range(settings.repeats))
    rates = [int(size / taken * 1e9) for taken in alone]
    return Wire(rates[0], rates[1], min(int(size / both * 1e9), *rates), 0)


def _median_ns(device: Device, settings: CalibrationSettings, copy: RawCopy) -> float:
    device.copy(copy)
    return statistics.median(device.copy(copy)[0].copy_ns for _ in range(settings.repeats))


def _probe(host: HostMemory, memory: DeviceMemory, probe: ProbeMethod, run_bytes: int, num_bytes: int) -> RawCopy:
    """Runs of one length: at shuffled places for a batch, at every second place for a strided copy."""
    count = max(1, min(_MOST_RUNS, num_bytes // run_bytes))
    places = np.random.default_rng(run_bytes).permutation(2 * num_bytes // run_bytes)
    return RawCopy(
        Direction.RETRIEVE,
        probe,
        host.address,
        memory.address,
        count,
        run_bytes,
        host_offsets=[int(place) * run_bytes for place in places[:count]],
        device_offsets=[int(place) * run_bytes for place in np.roll(places, count)[:count]],
        host_pitch=2 * run_bytes,
        device_pitch=run_bytes,
    )


def _probe_curve(
    device: Device,
    host: HostMemory,
    memory: DeviceMemory,
    method: CopyMethod,
    probe: ProbeMethod,
    settings: CalibrationSettings,
) -> CopyCurve:
    rates, entries = [], []
    runs = [run for run in RUNS if run <= settings.num_bytes]
    for run_bytes in runs:
        copy = _probe(host, memory, probe, run_bytes, settings.num_bytes)
        device.copy(copy)
        times = [device.copy(copy)[0] for _ in range(settings.repeats)]
        rates.append(int(copy.num_bytes / statistics.median(time.copy_ns for time in times) * 1e9))
        entries.append(statistics.median(time.issue_ns for time in times) / copy.num_runs)
    entry_ns = round(min(entries)) if method is CopyMethod.BATCH_DMA else 0
    return CopyCurve(method, tuple(runs), tuple(rates), entry_ns, (0.0, 0.0))


def _gather_shape(run_bytes: int) -> BenchShape:
    """Objects of one run a layer, as long as asked, of tokens of at most 2 KiB, one block an object."""
    token_bytes = min(run_bytes, _TOKEN_BYTES)
    tokens = run_bytes // token_bytes
    geometry = KVGeometry(_GATHER_LAYERS, 1, 1, token_bytes // 2, 2, tokens)
    return BenchShape(f"runs of {run_bytes}", geometry, "NTD", "NTD", tokens)


def _gather_curve(device: Device, settings: CalibrationSettings) -> CopyCurve:
    """The engine's own kernel, forced: one slice, so that nothing but run length differs."""
    rates = []
    runs = [run for run in RUNS if run <= settings.num_bytes]
    for run_bytes in runs:
        size = min(settings.num_bytes, _MOST_RUNS * run_bytes)
        bench_settings = BenchSettings(repeats=settings.repeats, method=EngineMethod.GATHER)
        with TransferBench(device, _gather_shape(run_bytes), size, bench_settings) as bench:
            (row,) = bench.rows([Variant(Direction.RETRIEVE, None)], IDLE, idle, bench.raw_idle())
        rates.append(int(row.bytes_per_s))
    return CopyCurve(CopyMethod.SM_GATHER, tuple(runs), tuple(rates), 0, (0.0, 0.0))


def _slice_fixed_ns(device: Device, settings: CalibrationSettings) -> int:
    """What each further slice adds to a retrieve of the packed Llama-3.1-8B shape, never less than nothing."""
    shape = MAIN_SHAPES[0]
    layers = shape.geometry.num_layers
    with TransferBench(device, shape, settings.num_bytes, BenchSettings(repeats=settings.repeats)) as bench:
        narrow, whole = bench.rows(
            [Variant(Direction.RETRIEVE, 1), Variant(Direction.RETRIEVE, None)], IDLE, idle, bench.raw_idle()
        )
    return max(0, round((narrow.total.median_ns - whole.total.median_ns) / (layers - 1)))


def _slowdown(device: Device, method: CopyMethod, settings: CalibrationSettings) -> tuple[float, float]:
    """(least, most) that products of each size lose while the method copies."""
    run_bytes = min(65536, settings.num_bytes)
    losses = []
    if method is CopyMethod.SM_GATHER:
        bench_settings = BenchSettings(repeats=settings.repeats, method=EngineMethod.GATHER)
        with TransferBench(device, _gather_shape(run_bytes), settings.num_bytes, bench_settings) as bench:
            for rows in settings.rows:
                losses.append(_loss(device, rows, settings, lambda: bench.retrieve_once(None)))
    else:
        probe = ProbeMethod.BATCH if method is CopyMethod.BATCH_DMA else ProbeMethod.STRIDED
        with _buffers(device, settings.num_bytes) as (host, memory):
            copy = _probe(host, memory, probe, run_bytes, settings.num_bytes)
            for rows in settings.rows:
                losses.append(_loss(device, rows, settings, lambda: device.copy(copy)[0].copy_ns))
    return min(losses), max(losses)


def _loss(device: Device, rows: int, settings: CalibrationSettings, copy_once: Callable[[], int]) -> float:
    """Relative time that products of that size lose beside the copy; as many as fit into nine tenths of it."""
    products = Products(device.name, rows)
    copy_once()
    count = max(1, round(0.9 * copy_once() / (products.run(20) / 20)))
    alone, beside = [], []
    for _ in range(settings.repeats):
        alone.append(products.run(count))
        with products.timed(count) as times:
            copy_once()
        beside += times
    return round(max(0.0, statistics.median(beside) / statistics.median(alone) - 1), 4)
