"""What of one request is in flight: a load that may come short, a store that may be given up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamella.connector.storage.held_prefix import SliceSource
from lamella.connector.streams import Blocks, Outstanding
from lamella.cuda_ext.transfer import Transfer
from lamella.reference.slices import Slice

_log = logging.getLogger(__name__)


class Bound:
    """A bound on several waits together (SAFE-5).

    Args:
        timeout_s: seconds from now on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that may still be waited, 0 once the bound has passed."""
        return max(0.0, self._until - time.monotonic())


class Moving(NamedTuple):
    """One transfer of a slice, from the chunk on that it begins with."""

    part: Slice
    first_chunk: int
    transfer: Transfer
    layer: int  # the slice's first, as the transfer counts

    @property
    def has_landed(self) -> bool:
        """Whether every byte is in place, although the engine may not have let go of the transfer yet."""
        return self.transfer.landed() == self.transfer.num_slices


class Load:
    """One request's load: how much of its prefix is still good, and what moves. Thread-safe.

    Args:
        blocks: where the prefix goes, and how much of it.
        num_chunks: chunks held.
    """

    def __init__(self, blocks: Blocks, num_chunks: int) -> None:
        self.blocks = blocks
        self.reason: str | None = None
        """Why fewer chunks came than were held."""
        self._lock = threading.Lock()
        self._num_chunks = num_chunks
        self._closed = False
        self._moving: list[Moving] = []

    @property
    def num_chunks(self) -> int:
        """Chunks, from 0 on, of which nothing has failed so far."""
        with self._lock:
            return self._num_chunks

    def moving(self) -> tuple[Moving, ...]:
        """Every transfer submitted so far."""
        with self._lock:
            return tuple(self._moving)

    def shorten(self, num_chunks: int, reason: str) -> None:
        """Only that many chunks can be relied on; nothing more is submitted for the others."""
        with self._lock:
            if num_chunks >= self._num_chunks:
                return
            self._num_chunks, self.reason = num_chunks, reason
            lost = [one.transfer for one in self._moving if one.first_chunk >= num_chunks]
        _log.warning("a load ends at chunk %d: %s", num_chunks, reason)
        for transfer in lost:
            transfer.cancel()

    def close(self) -> None:
        """Nothing more is submitted, and what moves is cancelled."""
        with self._lock:
            self._closed = True
        for one in self.moving():
            one.transfer.cancel()

    def submit(self, source: SliceSource, part: Slice, submit: Callable[[int], Transfer]) -> Moving | None:
        """The source on its way by `submit(chunks that are still good)`; None if nobody wants it any more."""
        with self._lock:
            if self._closed or source.first_chunk >= self._num_chunks:
                return None
            transfer = submit(self._num_chunks)
            moving = Moving(part, source.first_chunk, transfer, 0 if source.is_slice else part.first_layer)
            self._moving.append(moving)
            return moving


class Save:
    """One request's store: which of its chunks have room, and what moves. For one thread.

    Args:
        blocks: where the sequence is in the engine.
        addresses: host object of each chunk that is to be stored, by absolute chunk.
    """

    def __init__(self, blocks: Blocks, addresses: dict[int, int]) -> None:
        self.blocks = blocks
        self.addresses = addresses
        self.reason: str | None = None
        """Why it was given up."""
        self.moving: list[Moving] = []
        self.outstanding = Outstanding()

    def runs(self) -> list[tuple[int, tuple[int, ...]]]:
        """(first chunk, addresses) of each longest run of consecutive chunks."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for chunk in sorted(self.addresses):
            if found and found[-1][0] + len(found[-1][1]) == chunk:
                found[-1] = (found[-1][0], (*found[-1][1], self.addresses[chunk]))
            else:
                found.append((chunk, (self.addresses[chunk],)))
        return found

    def give_up(self, reason: str) -> None:
        """Nothing more is submitted, and what moves is cancelled."""
        if self.reason is None:
            self.reason = reason
        for one in self.moving:
            one.transfer.cancel()


def drain(transfers: Sequence[Transfer], timeout_s: float) -> None:
    """Nothing of these is in flight; said where a device does not let go within the bound."""
    bound = Bound(timeout_s)
    for transfer in transfers:
        try:
            transfer.wait_final(bound.left_s)
        except TimeoutError:
            _log.error(
                "layers %s have not drained within %s s: their blocks must not be reused",
                [tuple(part) for part in transfer.slices],
                timeout_s,
            )
