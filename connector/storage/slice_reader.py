"""One slice of a held prefix in host memory: pool objects as they lie, a tier's by ranges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lamella.connector.slice_objects import own_ranges, slice_layout, slice_ranges
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects, Run, SliceSource
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.promotion import Promotion
from lamella.connector.storage.tier import Leading, Tier, TierError
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.pool import HostPool
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange
from lamella.reference.slices import Slice

_log = logging.getLogger(__name__)

Promotions = Mapping[int, Promotion]
"""By the first chunk that is read."""


class _Place(NamedTuple):
    """Where a run's slice is read to: `ranges` of each view; `release` gives it up."""

    views: tuple[memoryview, ...]
    addresses: tuple[int, ...]
    ranges: tuple[ByteRange, ...]
    owner: HostPool | LayerBuffers
    is_slice: bool
    release: Callable[[], None]


class SliceReader:
    """Reads slices, on whatever thread calls it.

    Args:
        pool: whose objects are used as they lie, and whose slots promoted objects are read into.
        buffers: for a tier's slices that are not promoted; None where there are no tiers.
        timeout_s: bound on waiting for buffers.
    """

    def __init__(self, pool: HostPool, buffers: LayerBuffers | None, timeout_s: float) -> None:
        self._pool = pool
        self._buffers = buffers
        self._timeout_s = timeout_s

    def gather(self, held: HeldPrefix, part: Slice, promotions: Promotions) -> LayerObjects:
        """The slice of every wanted chunk, up to the first that a tier cannot give."""
        sources: list[SliceSource] = []
        chunks, reason = 0, None
        for run in held.wanted_runs():
            if run.tier is None:
                assert run.lease is not None, "a run of the pool is pinned"
                held.hold()
                objects = _host_objects(run.first_chunk, run.lease.addresses[-run.num_chunks :], self._pool)
                sources.append(SliceSource(run.first_chunk, run.num_chunks, objects, False, held.release))
                chunks = run.first_chunk + run.num_chunks
                continue
            source, reason = self._read(held, run, run.tier, part, promotions.get(run.first_chunk))
            chunks = run.first_chunk
            if source is not None:
                sources.append(source)
                chunks += source.num_chunks
            if reason is not None:
                break
        return LayerObjects(part, max(chunks, held.num_unwanted), tuple(sources), reason)

    def _read(
        self, held: HeldPrefix, run: Run, tier: Tier, part: Slice, promotion: Promotion | None
    ) -> tuple[SliceSource | None, str | None]:
        """The run's slice in host memory, up to the first chunk that cannot be had, and why it cannot."""
        try:
            place = self._buffer(run, part) if promotion is None else self._slots(held, promotion, part)
        except (TimeoutError, RuntimeError) as error:
            return None, str(error)
        keys = held.keys[run.first_chunk : run.first_chunk + run.num_chunks]
        done, reason = self._fill(tier, keys, slice_ranges(self._pool.layout, part), place)
        if reason is not None:
            reason = f"{tier.name} {reason} at chunk {run.first_chunk + done}"
        elif promotion is not None:
            promotion.arrived(part)
        if not done:
            place.release()
            return None, reason
        objects = _host_objects(run.first_chunk, place.addresses[:done], place.owner)
        return SliceSource(run.first_chunk, done, objects, place.is_slice, place.release), reason

    def _buffer(self, run: Run, part: Slice) -> _Place:
        assert self._buffers is not None, "tiers come with buffers"
        lease = self._buffers.take(run.num_chunks, self._timeout_s)
        ranges = own_ranges(slice_layout(self._pool.layout, part))
        return _Place(lease.views(), lease.addresses, ranges, self._buffers, True, lease.release)

    def _slots(self, held: HeldPrefix, promotion: Promotion, part: Slice) -> _Place:
        held.hold()
        views = tuple(self._pool.memory.buffer(slot) for slot in promotion.slots)
        ranges = slice_ranges(self._pool.layout, part)
        return _Place(views, promotion.addresses, ranges, self._pool, False, held.release)

    @staticmethod
    def _fill(
        tier: Tier, keys: Sequence[ChunkKey], wanted: Sequence[ByteRange], place: _Place
    ) -> tuple[int, str | None]:
        """How many of the objects have their ranges in place, and why not the next one."""
        into = [[view[at.offset : at.offset + at.num_bytes] for at in place.ranges] for view in place.views]
        try:
            read = tier.get_leading(keys, wanted, into)
        except TierError as error:
            read = Leading(0, error)
        except Exception as error:  # a tier's own fault must not take the engine down
            _log.exception("%s failed", tier.name)
            return 0, f"failed ({error!r})"
        finally:  # an exception that somebody keeps would keep the memory's views with it
            for views in (*into, place.views):
                for view in views:
                    view.release()
        if isinstance(read.error, KeyError):
            return read.num_objects, "lost its object"
        return read.num_objects, None if read.error is None else f"cannot read ({read.error})"


def _host_objects(first_chunk: int, addresses: tuple[int, ...], owner: HostPool | LayerBuffers) -> HostObjects:
    memory = owner.memory
    return HostObjects((0,) * first_chunk + addresses, memory.shape.piece_bytes, memory.base)
