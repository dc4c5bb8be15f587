"""What a retrieve holds: the prefix that is there, and where its bytes are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from lamella.connector.storage.tier import Tier
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.pool import PinnedObjects
from lamella.reference.keys import ChunkKey, LayerKey
from lamella.reference.slices import Slice


class SliceSource(NamedTuple):
    """Consecutive chunks of one slice in one host memory.

    `objects.addresses` is by absolute chunk, 0 before `first_chunk`. `is_slice` says what they are addresses of: slice
    objects (`slice_layout`), or whole objects. `release` is to be called once, when no copy reads them any more.
    """

    first_chunk: int
    num_chunks: int
    objects: HostObjects
    is_slice: bool
    release: Callable[[], None]


class LayerObjects(NamedTuple):
    """A layer's bytes, ready in host memory, together with the other layers of its slice.

    `num_chunks` counts what is there from chunk 0 on; fewer than were held means that a tier lost one, for `reason`.
    """

    part: Slice
    num_chunks: int
    sources: tuple[SliceSource, ...]
    reason: str | None = None


class Run(NamedTuple):
    """Consecutive chunks of a prefix from one place: the pool where `tier` is None."""

    first_chunk: int
    num_chunks: int
    tier: Tier | None
    lease: PinnedObjects | None


class HeldPrefix:
    """The longest prefix that can be retrieved now; what lies in the pool stays there until the last holder let go.

    Made with one holder. `hold` adds one, `release` ends one. Chunks before `first_wanted` are part of the prefix, but
    nobody wants their bytes.
    """

    def __init__(self, keys: tuple[ChunkKey, ...], runs: tuple[Run, ...], first_wanted: int = 0) -> None:
        self.keys = keys
        self.runs = runs
        self.first_wanted = first_wanted
        self._holders = 1
        self._when_released: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def num_chunks(self) -> int:
        """Chunks held, from chunk 0 on."""
        return len(self.keys)

    @property
    def num_unwanted(self) -> int:
        """Held chunks that nobody wants."""
        return min(self.first_wanted, self.num_chunks)

    def wanted_runs(self) -> tuple[Run, ...]:
        """The runs without their unwanted chunks; a lease is the whole run's."""
        cut: list[Run] = []
        for run in self.runs:
            first, end = max(run.first_chunk, self.first_wanted), run.first_chunk + run.num_chunks
            if first < end:
                cut.append(run._replace(first_chunk=first, num_chunks=end - first))
        return tuple(cut)

    def split_layers(self, num_layers: int) -> tuple[tuple[LayerKey, ...], ...]:
        """The prefix's keys layer by layer: `[layer][chunk]`."""
        return tuple(zip(*(key.split_layers(num_layers) for key in self.keys), strict=True))

    def hold(self) -> None:
        """One more holder."""
        with self._lock:
            if not self._holders:
                raise RuntimeError("this prefix was let go of: hold_prefix it again")
            self._holders += 1

    def when_released(self, then: Callable[[], None]) -> None:
        """`then` is called once the last holder has let go, on that holder's thread.

        Raises:
            RuntimeError: it has already.
        """
        with self._lock:
            if not self._holders:
                raise RuntimeError("this prefix was let go of: hold_prefix it again")
            self._when_released.append(then)

    def release(self) -> None:
        """One holder fewer.

        Raises:
            RuntimeError: more releases than holders.
        """
        with self._lock:
            if not self._holders:
                raise RuntimeError("this prefix has no holder left: released twice?")
            self._holders -= 1
            if self._holders:
                return
        for run in self.runs:
            if run.lease is not None:
                run.lease.release()
        for then in self._when_released:
            then()
