"""What a tier is asked and how it answers, in counts that a monitor can read at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lamella.connector.storage.tier import DamagedObjectError, Leading, Tier, TierError
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Since the tier was opened. A read is one slice of one object; times are sums over calls that may overlap."""

    lookups: int = 0
    found: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_ns: int = 0
    lost: int = 0
    """Objects that were gone when a slice of them was read."""
    puts: int = 0
    put_bytes: int = 0
    put_ns: int = 0
    damaged: int = 0
    """Objects whose bytes were not those that were put."""
    failures: int = 0
    """Calls that the tier could not serve, damaged objects apart."""


_HELP: Mapping[str, str] = {
    "lookups": "Objects that the tier was asked for.",
    "found": "Objects that it had.",
    "reads": "Slices of objects that were read.",
    "read_bytes": "Bytes of these slices.",
    "read_ns": "Nanoseconds spent in reads that gave something.",
    "lost": "Objects that were gone when a slice of them was read.",
    "puts": "Objects that were kept.",
    "put_bytes": "Bytes of these objects.",
    "put_ns": "Nanoseconds spent in puts that succeeded.",
    "damaged": "Objects whose bytes were not those that were put.",
    "failures": "Calls that the tier could not serve.",
}


class MeteredTier:
    """A tier whose calls are counted. It is itself a `Tier`."""

    def __init__(self, tier: Tier, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._tier = tier
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._counts = TierCounts()

    @property
    def name(self) -> str:
        """The metered tier's."""
        return self._tier.name

    def counts(self) -> TierCounts:
        """Of this moment."""
        with self._lock:
            return self._counts

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """As `Tier.exists`."""
        with self._failures_counted():
            answers = self._tier.exists(keys)
        self._add(lookups=len(keys), found=sum(answers))
        return answers

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        start = self._clock_ns()
        with self._failures_counted():
            self._tier.get_ranges(key, ranges, into)
        self._read(1, ranges, start)

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`."""
        start = self._clock_ns()
        with self._failures_counted():
            read = self._tier.get_leading(keys, ranges, into)
        if read.num_objects:
            self._read(read.num_objects, ranges, start)
        if read.error is not None:
            self._count(read.error)
        return read

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        start = self._clock_ns()
        with self._failures_counted():
            self._tier.put(key, data)
        self._add(puts=1, put_bytes=data.nbytes, put_ns=self._clock_ns() - start)

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`."""
        with self._failures_counted():
            return self._tier.delete(key)

    def close(self) -> None:
        """As `Tier.close`."""
        self._tier.close()

    def _read(self, num_objects: int, ranges: Sequence[ByteRange], start_ns: int) -> None:
        num_bytes = num_objects * sum(wanted.num_bytes for wanted in ranges)
        self._add(reads=num_objects, read_bytes=num_bytes, read_ns=self._clock_ns() - start_ns)

    @contextmanager
    def _failures_counted(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TierError) as error:
            self._count(error)
            raise

    def _count(self, error: KeyError | TierError) -> None:
        if isinstance(error, KeyError):
            self._add(lost=1)
        elif isinstance(error, DamagedObjectError):
            self._add(damaged=1)
        else:
            self._add(failures=1)

    def _add(self, **more: int) -> None:
        with self._lock:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + number for name, number in more.items()}
            )


def prometheus_text(counts: Mapping[str, TierCounts]) -> str:
    r"""The counts of several tiers, by name, as a Prometheus scraper reads them.

    >>> print(prometheus_text({"file:/kv": TierCounts(reads=3)}).splitlines()[8])
    lamella_tier_reads_total{tier="file:/kv"} 3
    """
    lines = []
    for name, text in _HELP.items():
        lines += [f"# HELP lamella_tier_{name}_total {text}", f"# TYPE lamella_tier_{name}_total counter"]
        for tier, found in counts.items():
            label = tier.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            lines.append(f'lamella_tier_{name}_total{{tier="{label}"}} {getattr(found, name)}')
    return "\n".join(lines) + "\n"
