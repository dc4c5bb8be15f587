"""What the transfer benchmark found: rows of repeats, their ratios to a raw copy, and how they are written down."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lamella.cuda_ext.provenance import Provenance

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Repeats:
    """One figure, measured several times; nanoseconds."""

    values_ns: tuple[int, ...]

    @property
    def median_ns(self) -> float:
        """The figure that is quoted."""
        return statistics.median(self.values_ns)

    @property
    def spread(self) -> float:
        """(most - least) / median."""
        return (max(self.values_ns) - min(self.values_ns)) / self.median_ns


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of transfer, beside one kind of load.

    Args:
        shape: of the cache.
        beside: "idle", "products here" or "products elsewhere".
        direction: "retrieve", "store", or one of them "with store" / "with retrieve" at once.
        width: layers a slice, as a text; "chunk-major" for whole objects, "-" for a raw copy.
        method: the copy method that ran, or "raw copy": two in opposite directions, the bound of such transfers.
        num_bytes: moved.
        num_slices: how many.
        total: from the call until the last slice landed.
        first: from the call until the first slice landed.
        queued: the part of both before the engine had the transfer: the submitting call, checks included.
        first_share: the first slice's share of the bytes.
        raw: one raw copy of as many bytes, same direction, same load beside it, in turns with the transfers.
        raw_idle: one raw copy with nothing beside it.
    """

    shape: str
    beside: str
    direction: str
    width: str
    method: str
    num_bytes: int
    num_slices: int
    total: Repeats
    first: Repeats
    queued: Repeats
    first_share: float
    raw: Repeats
    raw_idle: Repeats

    @property
    def ratio(self) -> float:
        """Total over the raw copy beside the same load."""
        return self.total.median_ns / self.raw.median_ns

    @property
    def ratio_to_idle(self) -> float:
        """Total over the raw copy with nothing beside it."""
        return self.total.median_ns / self.raw_idle.median_ns

    @property
    def first_ratio(self) -> float:
        """First slice over its share of the raw copy with nothing beside it."""
        return self.first.median_ns / (self.first_share * self.raw_idle.median_ns)

    @property
    def engine_ratio(self) -> float:
        """As `ratio`, from when the engine had the transfer."""
        return (self.total.median_ns - self.queued.median_ns) / self.raw.median_ns

    @property
    def engine_first_ratio(self) -> float:
        """As `first_ratio`, from when the engine had the transfer."""
        return (self.first.median_ns - self.queued.median_ns) / (self.first_share * self.raw_idle.median_ns)

    @property
    def bytes_per_s(self) -> float:
        """Bytes over the total."""
        return self.num_bytes / self.total.median_ns * 1e9


@dataclass(frozen=True, slots=True)
class Slowdown:
    """What products on the same device lose while something is copied: 0.03 is 3%. All repeats, relative to alone."""

    beside: str
    rows: int
    alone: Repeats
    meanwhile: Repeats

    @property
    def loss(self) -> float:
        """Median meanwhile over median alone, minus one."""
        return self.meanwhile.median_ns / self.alone.median_ns - 1


@dataclass(frozen=True, slots=True)
class HostCost:
    """Host time of one transfer of `num_objects` objects in `num_slices` slices.

    Args:
        submit: how long the submitting call takes.
        wait_layer: one call that makes a stream wait for a layer, the host's own waiting taken off.
        host_wait: that waiting.
        carrier: what signals arrival.
        thread_share: processor time of the native thread over the transfer's time.
        device_bytes: device memory that the engine took, beside the cache.
        staging_bytes: its staging budget.
    """

    num_objects: int
    num_slices: int
    submit: Repeats
    wait_layer: Repeats
    host_wait: Repeats
    carrier: str
    thread_share: float
    device_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything one run found. `skipped` says what was not measured, and why."""

    provenance: Provenance
    rows: tuple[Row, ...]
    slowdowns: tuple[Slowdown, ...]
    host: tuple[HostCost, ...]
    skipped: tuple[str, ...]

    def as_mapping(self) -> dict[str, Any]:
        """For JSON: every repeat, and the ratios that follow from them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "provenance": asdict(self.provenance),
            "rows": [
                asdict(row)
                | {
                    "ratio": round(row.ratio, 4),
                    "ratio_to_idle": round(row.ratio_to_idle, 4),
                    "first_ratio": round(row.first_ratio, 4),
                    "engine_ratio": round(row.engine_ratio, 4),
                    "engine_first_ratio": round(row.engine_first_ratio, 4),
                    "gb_per_s": round(row.bytes_per_s / 1e9, 3),
                }
                for row in self.rows
            ],
            "slowdowns": [asdict(entry) | {"loss": round(entry.loss, 4)} for entry in self.slowdowns],
            "host": [asdict(entry) for entry in self.host],
            "skipped": list(self.skipped),
        }

    def lines(self) -> Iterable[str]:
        """The tables, as text of fixed columns."""
        yield (
            f"{self.provenance.device_name} ({self.provenance.device}), {self.provenance.date}; times are medians "
            "from the call to the last landing; × is the ratio to a raw copy of the same bytes beside the same load, "
            "× idle to one with nothing beside it, × queued as × from when the engine had the transfer; first: the "
            "first slice, against its share of the idle raw copy; spread is (most − least) / median"
        )
        yield ""
        header = ("shape", "beside", "direction", "width", "method", "ms", "GB/s", "×", "× idle", "× queued")
        yield _columns((*header, "first ms", "first ×", "× queued", "spread"))
        for row in self.rows:
            yield _columns(
                (
                    *(row.shape, row.beside, row.direction, row.width, row.method),
                    f"{row.total.median_ns / 1e6:.3f}",
                    f"{row.bytes_per_s / 1e9:.2f}",
                    f"{row.ratio:.3f}",
                    f"{row.ratio_to_idle:.3f}",
                    f"{row.engine_ratio:.3f}",
                    f"{row.first.median_ns / 1e6:.3f}",
                    f"{row.first_ratio:.2f}",
                    f"{row.engine_first_ratio:.2f}",
                    f"{row.total.spread:.1%}",
                )
            )
        for loss in self.slowdowns:
            yield f"products with {loss.rows} rows beside {loss.beside}: {loss.loss:+.1%}"
        for cost in self.host:
            yield (
                f"{cost.num_objects} objects, {cost.num_slices} slices, {cost.carrier} carrier: submitting "
                f"{cost.submit.median_ns / 1e3:.0f} µs, waiting for a layer {cost.wait_layer.median_ns / 1e3:.1f} µs "
                f"(and {cost.host_wait.median_ns / 1e3:.0f} µs on the host), native thread "
                f"{cost.thread_share:.1%} of a core, device memory {cost.device_bytes / 2**20:.1f} MiB for a budget of "
                f"{cost.staging_bytes / 2**20:.0f} MiB"
            )
        for reason in self.skipped:
            yield f"not measured: {reason}"


_WIDTHS = (38, 18, 20, 11, 12, 7, 6, 6, 6, 8, 8, 7, 8, 6)


def _columns(cells: Iterable[str]) -> str:
    return " ".join(
        cell.ljust(width) if place < 5 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    ).rstrip()
