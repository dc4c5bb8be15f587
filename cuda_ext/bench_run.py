"""One whole run of the transfer benchmark: every shape beside every load, then short runs, slowdown and host cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.bench_cases import BLOCK_SHAPE, MAIN_SHAPES, SMALL_SHAPES, BenchShape
from lamella.cuda_ext.bench_report import BenchReport, HostCost, Row, Slowdown
from lamella.cuda_ext.bench_transfer import (
    ELSEWHERE,
    HERE,
    IDLE,
    BenchSettings,
    TransferBench,
    Variant,
    host_cost,
    idle,
)
from lamella.cuda_ext.beside import OtherProcess, torch_reason
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.provenance import provenance_of
from lamella.reference.plan import Direction

LOADS = (IDLE, HERE, ELSEWHERE)
MANY_OBJECTS_SHAPE = next(shape for shape in SMALL_SHAPES if shape.name == "hidden 128 (TP 8), chunk 256")
_MOST_LONG_OBJECTS = 64  # of the main shape: 2 GiB


@dataclass(frozen=True, slots=True)
class BenchScope:
    """What a run covers.

    Args:
        num_bytes: of one transfer.
        loads: of `LOADS`.
        shapes: measured in full.
        small: measured idle, at width 1 only.
        host_objects: how many objects a transfer has when its host cost is measured.
        num_layers: layers of every shape, None for the shapes' own; fewer make a quick look.
    """

    num_bytes: int = 1 << 30
    loads: tuple[str, ...] = LOADS
    shapes: tuple[BenchShape, ...] = (*MAIN_SHAPES, BLOCK_SHAPE)
    small: tuple[BenchShape, ...] = SMALL_SHAPES
    host_objects: tuple[int, ...] = (32, 512)
    num_layers: int | None = None

    def cut(self, shape: BenchShape) -> BenchShape:
        """The shape with this scope's layers."""
        if self.num_layers is None:
            return shape
        return replace(shape, geometry=replace(shape.geometry, num_layers=self.num_layers))


def run_bench(
    device: Device,
    scope: BenchScope,
    settings: BenchSettings,
    command: Sequence[str],
    checkout: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Measures everything in scope; what cannot be measured here is in the report with its reason.

    Args:
        device: measured.
        scope: what.
        settings: how.
        command: for the provenance.
        checkout: likewise.
        progress: called with a line before each part.

    Raises:
        RuntimeError: a transfer left wrong bytes.
    """
    skipped: list[str] = []
    loads = list(scope.loads)
    if loads != [IDLE] and (reason := torch_reason(device.name)):
        skipped += [f"{load}: {reason}" for load in loads if load != IDLE]
        loads = [load for load in loads if load == IDLE]
    rows: list[Row] = []
    slowdowns: list[Slowdown] = []
    with contextlib.ExitStack() as stack:
        other = None
        if ELSEWHERE in loads and scope.shapes:
            other = stack.enter_context(OtherProcess(device.name, settings.rows))
        for index, shape in enumerate(map(scope.cut, scope.shapes)):
            progress(f"{shape.name}: {', '.join(loads)}")
            with TransferBench(device, shape, scope.num_bytes, settings, duplex=True) as bench:
                rows += _main_rows(bench, loads, other)
                if HERE in loads and not index:
                    slowdowns += bench.slowdowns(settings.rows)
    for shape in map(scope.cut, scope.small):
        progress(f"{shape.name}: {IDLE}")
        for shuffled in (True, False):
            with TransferBench(device, shape, scope.num_bytes, settings, shuffled_slots=shuffled) as bench:
                bench.check(Direction.RETRIEVE)
                found = bench.rows([Variant(Direction.RETRIEVE, 1)], IDLE, idle, bench.raw_idle())
                rows += found if shuffled else [replace(row, shape=f"{row.shape}, in order") for row in found]
    host: list[HostCost] = []
    for num_objects in scope.host_objects:
        for carrier in Carrier:
            progress(f"host cost of {num_objects} objects, {carrier.name.lower()} carrier")
            shape = MAIN_SHAPES[0] if num_objects <= _MOST_LONG_OBJECTS else MANY_OBJECTS_SHAPE
            host.append(host_cost(device, scope.cut(shape), num_objects, carrier, settings))
    return BenchReport(
        provenance_of(device, command, checkout), tuple(rows), tuple(slowdowns), tuple(host), tuple(skipped)
    )


def _main_rows(bench: TransferBench, loads: Sequence[str], other: OtherProcess | None) -> list[Row]:
    for direction in Direction:
        bench.check(direction)
    layers = bench.shape.geometry.num_layers
    retrieves = [Variant(Direction.RETRIEVE, width) for width in sorted({1, min(8, layers), layers})]
    store = Variant(Direction.STORE, 1)
    both = [Variant(direction, 1, with_other=True) for direction in Direction]
    raw_idle = bench.raw_idle()
    rows: list[Row] = []
    if IDLE in loads:
        rows += bench.rows([*retrieves, store, *both], IDLE, idle, raw_idle)
        rows += bench.raw_both(raw_idle)
    if HERE in loads:
        with bench.products_here(bench.settings.rows) as load:
            rows += bench.rows([*retrieves, store], HERE, load, raw_idle)
    if other:
        with other.multiplying():
            rows += bench.rows([*retrieves, store], ELSEWHERE, idle, raw_idle)
    return rows
