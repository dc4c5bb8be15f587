"""What `lamella bench server` measured, for people and as JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lamella.cuda_ext.beside import Ran


class Sample(NamedTuple):
    """One retrieve and the raw copy before it, in nanoseconds.

    Attributes:
        raw_ns: the raw copy.
        lookup_ns: from the lookup's call until its answer is there.
        submitted_ns, first_copy_ns, granted_ns, first_layer_ns, released_ns: from the retrieve's call until the native
            engine has it, its first window is issued, the server's grant is seen, the first slice has landed by the
            device's clock, and a poll reports it. Where the server moves there is no grant (0), and the first two are
            the request and what the board says.
        last_layer_ns: from the lookup's call until the last slice has landed.
        released_slices: that had landed when it was reported.
    """

    raw_ns: int
    lookup_ns: int
    submitted_ns: int
    first_copy_ns: int
    granted_ns: int
    first_layer_ns: int
    released_ns: int
    last_layer_ns: int
    released_slices: int


_STAGES: Final = {
    "lookup_ns": "lookup",
    "submitted_ns": "then submitted",
    "first_copy_ns": "first copy",
    "granted_ns": "granted",
    "first_layer_ns": "first slice landed",
    "released_ns": "released",
}


@dataclass(frozen=True, slots=True)
class RetrieveRow:
    """Retrieves of one kind.

    Attributes:
        load: what ran beside.
        width: layers per slice; 0: chunk-major.
        samples: one a repeat.
        copy_method: that the worker's engine chose; "" where the server moved.
        beside: the products of the worker's own process, where there were any.
    """

    load: str
    width: int
    samples: tuple[Sample, ...]
    copy_method: str
    beside: Ran | None = None

    def median(self, name: str) -> float:
        """Of one of the samples' fields."""
        return float(statistics.median(getattr(sample, name) for sample in self.samples))

    @property
    def ratio(self) -> float:
        """Median of last layer, lookup included, over the raw copy of the same repeat."""
        return statistics.median(sample.last_layer_ns / sample.raw_ns for sample in self.samples)

    def line(self) -> str:
        """For people."""
        middle = {name: self.median(name) / 1e6 for name in ("raw_ns", "last_layer_ns", "released_ns")}
        return (
            f"{self.load:<19} width {self.width or 'off':>3}  last layer {middle['last_layer_ns']:7.2f} ms = "
            f"{self.ratio:5.3f} x raw ({middle['raw_ns']:.2f} ms)  released after {middle['released_ns']:6.3f} ms"
            + (f"  {self.beside.products} products, {self.beside.gaps} gaps" if self.beside is not None else "")
        )

    def stages(self) -> str:
        """When each stage of the middle retrieve was reached, for people."""
        middle = [f"{stage} {self.median(name) / 1e6:.3f}" for name, stage in _STAGES.items()]
        last = statistics.median(sample.last_layer_ns - sample.lookup_ns for sample in self.samples)
        return f"  medians in ms: {', '.join(middle)}, last slice landed {last / 1e6:.3f}"


@dataclass(slots=True)
class ServerBenchReport:
    """What was measured."""

    transfer_side: str
    num_bytes: int
    shape: str
    retrieves: list[RetrieveRow] = field(default_factory=list)
    store_ns: list[int] = field(default_factory=list)
    lookups_ns: dict[int, list[int]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{self.num_bytes >> 20} MiB, {self.shape}, moved by the {self.transfer_side}"]
        found += [line for row in self.retrieves for line in (row.line(), row.stages())]
        if self.store_ns:
            found.append(f"store, until others can read it: {statistics.median(self.store_ns) / 1e6:.2f} ms")
        for chunks, taken in self.lookups_ns.items():
            at = sorted(taken)
            middle, late = at[len(at) // 2] / 1e6, at[len(at) * 99 // 100] / 1e6
            found.append(f"lookup of {chunks} chunks: p50 {middle:.3f} ms, p99 {late:.3f} ms")
        return [*found, *(f"skipped: {reason}" for reason in self.skipped)]

    def as_mapping(self) -> dict[str, Any]:
        """Every repeat."""
        return {
            "transfer_side": self.transfer_side,
            "num_bytes": self.num_bytes,
            "shape": self.shape,
            "retrieves": [
                {
                    "load": row.load,
                    "width": row.width,
                    "copy_method": row.copy_method,
                    "ratio": row.ratio,
                    "beside": row.beside._asdict() if row.beside is not None else None,
                    "samples": [sample._asdict() for sample in row.samples],
                }
                for row in self.retrieves
            ],
            "store_ns": self.store_ns,
            "lookups_ns": {str(chunks): taken for chunks, taken in self.lookups_ns.items()},
            "skipped": self.skipped,
        }
