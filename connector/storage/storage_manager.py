"""Where a prefix's objects are, and how they come: the pinned pool first, then slower tiers, slice by slice.

    hold_prefix(keys) ─► HeldPrefix ─► layerwise_batched_get() ─► Future of layer 0, of layer 1, ...
                          pool: pinned, there at once     tier: read by ranges into layer buffers, on I/O threads
    allocate(keys) ─► Reservation ─► (stores land) ─► batched_put() ─► readable in the pool, then kept by every tier
    what came whole from a tier ─► readable in the pool (promotion), then kept by the tiers that are nearer

What a retrieve will use is settled before its first byte moves: pool objects are pinned, and a tier's objects, which
are whole or absent (TIER-1), are asked for together. What a tier loses afterwards ends the prefix there, and is
reported.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NamedTuple

from lamella.connector.slice_objects import slice_ranges
from lamella.connector.storage.circuit import GuardedTier
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects, Run
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.promotion import Promotion
from lamella.connector.storage.slice_reader import Promotions, SliceReader
from lamella.connector.storage.tier import Tier, TierError
from lamella.connector.storage.write_behind import WriteBehind, WriteCounts
from lamella.cuda_ext.pool import HostPool, Reservation
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange, ObjectLayout
from lamella.reference.slices import Slice

_log = logging.getLogger(__name__)


class StorageCounts(NamedTuple):
    """Objects that came into the pool from tiers, or did not come whole; and what became of puts, by tier."""

    promoted: int
    not_promoted: int
    written: dict[str, WriteCounts]


class StorageManager:
    """The pool and the tiers behind it. Thread-safe; it closes neither.

    Args:
        pool: objects in pinned memory; its layout is every tier's.
        tiers: slower stores, the nearest first.
        buffers: where slices from tiers are read into; needed with tiers.
        io_threads: threads that read tiers; each tier has one of its own for writing.
        timeout_s: bound on asking a tier whether it has something, and on waiting for buffers (SAFE-5).
        promote: what a retrieve brings from a tier stays in the pool where it has room, and goes to nearer tiers.
        max_pending_put_bytes: of the objects that wait for one tier; what comes beyond is not sent there.

    Raises:
        ValueError: tiers without buffers, io_threads or the limit below 1, or a timeout that is not positive.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[Tier] = (),
        buffers: LayerBuffers | None = None,
        *,
        io_threads: int = 2,
        timeout_s: float = 10.0,
        promote: bool = False,
        max_pending_put_bytes: int = 1 << 30,
    ) -> None:
        if tiers and buffers is None:
            raise ValueError("tiers are read into layer buffers: give some")
        if io_threads < 1:
            raise ValueError(f"io_threads must be at least 1, got {io_threads}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.pool = pool
        self.tiers = tuple(tiers)
        self.buffers = buffers
        self._timeout_s = timeout_s
        self._promote = promote
        self._promoted = self._not_promoted = 0
        self._gaps = _gaps(pool.layout)
        self._reader = SliceReader(pool, buffers, timeout_s)
        self._writers = tuple(WriteBehind(tier, max_pending_put_bytes) for tier in self.tiers)
        self._threads = ThreadPoolExecutor(io_threads, thread_name_prefix="lamella-io")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="lamella-lookup")  # never behind a long read
        self._lock = threading.Lock()
        self._jobs: set[Future[None]] = set()

    @property
    def layout(self) -> ObjectLayout:
        """Of every object."""
        return self.pool.layout

    # ---- reading

    def lookup(self, keys: Sequence[ChunkKey]) -> int:
        """How many of `keys`, from the first on, could be retrieved now. Only `hold_prefix` makes it certain."""
        held = self.hold_prefix(keys)
        held.release()
        return held.num_chunks

    def hold_prefix(self, keys: Sequence[ChunkKey], first_wanted: int = 0) -> HeldPrefix:
        """The longest prefix of `keys` that the pool and the tiers hold between them, for the caller to release.

        A tier that cannot say counts as empty. Chunks from tiers end where the layer buffers would not hold one slice
        of all of them, which no waiting could change.

        Args:
            keys: of the sequence's chunks, from the first on.
            first_wanted: chunks before it are there for the engine already; they are not read.
        """
        runs: list[Run] = []
        chunk = from_tiers = 0
        most = self.buffers.num_buffers if self.buffers is not None else 0
        owners: list[Tier | None] | None = None
        try:
            while chunk < len(keys):
                lease = self.pool.pin_leading(keys[chunk:])
                if lease.keys:
                    runs.append(Run(chunk, len(lease.keys), None, lease))
                    chunk += len(lease.keys)
                    continue
                lease.release()
                if owners is None:
                    owners = self._owners(keys[chunk:], chunk)
                tier = owners[chunk]
                wanted = chunk >= first_wanted
                if tier is None or (wanted and from_tiers == most):
                    break
                if runs and runs[-1].tier is tier:
                    runs[-1] = runs[-1]._replace(num_chunks=runs[-1].num_chunks + 1)
                else:
                    runs.append(Run(chunk, 1, tier, None))
                chunk += 1
                from_tiers += wanted
        except BaseException:
            HeldPrefix(tuple(keys[:chunk]), tuple(runs)).release()
            raise
        return HeldPrefix(tuple(keys[:chunk]), tuple(runs), first_wanted)

    def layerwise_batched_get(
        self, held: HeldPrefix, slices: Sequence[Slice]
    ) -> Generator[Future[LayerObjects], None, None]:
        """One future a layer, in layer order; reading a slice begins when its first layer's future is asked for.

        Any number of these may run at once. Each resolved source is the caller's to release, also if it is not used.
        What a tier cannot give does not fail a future: it shortens the prefix, with the reason. A future that is
        cancelled before its reading began reads nothing.

        Source: named after the method of LMCache's storage manager; there it takes keys, here what was held beforehand,
        so that nothing can vanish from the pool between two layers (fault 5).
        """
        promotions = self._promotions(held) if self._promote else {}
        for part in slices:
            future = self._get(held, part, promotions)
            for _ in range(part.num_layers):
                yield future

    def _promotions(self, held: HeldPrefix) -> Promotions:
        """Slots for what comes from tiers, where there is room for a whole run."""
        found: dict[int, Promotion] = {}
        for run in held.wanted_runs():
            if run.tier is None:
                continue
            keys = held.keys[run.first_chunk : run.first_chunk + run.num_chunks]
            after = held.keys[run.first_chunk - 1] if run.first_chunk else None
            promotion = Promotion.reserve(self.pool, keys, after, self.layout.num_layers)
            if promotion is not None:
                self._clear(promotion.slots, self._gaps)
                found[run.first_chunk] = promotion
                held.when_released(functools.partial(self._finish, promotion, run.tier))
        return found

    def _finish(self, promotion: Promotion, source: Tier) -> None:
        """What came whole is in the pool, and on its way to the tiers that are nearer than its source."""
        whole = promotion.finish()
        with self._lock:
            self._promoted += len(promotion.keys) if whole else 0
            self._not_promoted += 0 if whole else len(promotion.keys)
        if whole:
            self._write(promotion.keys, self._writers[: self.tiers.index(source)])

    def _get(self, held: HeldPrefix, part: Slice, promotions: Promotions) -> Future[LayerObjects]:
        future: Future[LayerObjects] = Future()
        if all(run.tier is None for run in held.wanted_runs()):
            future.set_result(self._reader.gather(held, part, promotions))
            return future
        held.hold()

        def read() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(self._reader.gather(held, part, promotions))
            except BaseException as error:
                future.set_exception(error)
            finally:
                held.release()

        self._track(self._threads.submit(read))
        return future

    def _owners(self, keys: Sequence[ChunkKey], skipped: int) -> list[Tier | None]:
        """The nearest tier that has each key, behind `skipped` entries of None."""
        owners: list[Tier | None] = [None] * len(keys)
        for tier in self.tiers:
            asked = self._asking.submit(tier.exists, keys)
            try:
                answers = asked.result(self._timeout_s)
            except TierError as error:
                _log.debug("%s counts as empty: %s", tier.name, error)
                continue
            except FutureTimeoutError:
                asked.cancel()
                if isinstance(tier, GuardedTier):
                    tier.breaker.failed(f"no answer within {self._timeout_s} s")
                continue
            owners = [owner or (tier if has else None) for owner, has in zip(owners, answers, strict=True)]
        return [*[None] * skipped, *owners]

    # ---- writing

    def allocate(self, keys: Sequence[ChunkKey], after: ChunkKey | None = None) -> Reservation | None:
        """Room for every layer of those of `keys` that the pool does not hold, or None: all or nothing.

        None also for more keys than the pool has slots. What the objects will not fill, the unused tail of a partial
        chunk and the gaps between groups, is zero, so that no other tenant's bytes reach a tier with it.

        Args:
            keys, after: as `HostPool.reserve`.

        Raises:
            ValueError: as `SlotIndex.reserve`.
        """
        if len(keys) > self.pool.num_slots:
            return None
        reservation = self.pool.reserve(keys, after)
        if reservation is not None:
            for key, slot in zip(reservation.keys, reservation.slots, strict=True):
                is_partial = key.num_tokens < self.layout.chunk_tokens
                self._clear((slot,), (ByteRange(0, self.layout.object_bytes),) if is_partial else self._gaps)
        return reservation

    def batched_put(self, reservation: Reservation) -> tuple[Future[None], ...]:
        """The objects are readable in the pool at once, and on their way to every tier.

        Returns:
            One future an object and tier, resolved when the tier has kept it, or failed with TierError, at once where
            too many bytes wait for that tier already. Objects stay pinned until then.

        Raises:
            RuntimeError: a reservation that was committed or abandoned before.
        """
        reservation.commit()
        return self._write(reservation.keys, self._writers)

    def _write(self, keys: Sequence[ChunkKey], writers: Sequence[WriteBehind]) -> tuple[Future[None], ...]:
        if not writers:
            return ()
        lease = self.pool.pin_leading(keys)  # one lease, so that the prefix ages as one
        if len(lease.keys) < len(keys):
            _log.info("%d objects left the pool before a tier could keep them", len(keys) - len(lease.keys))
        held = HeldPrefix(lease.keys, (Run(0, len(lease.keys), None, lease),))
        puts: list[Future[None]] = []
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            for writer in writers:
                held.hold()
                view = functools.partial(self.pool.memory.buffer, slot)
                puts.append(self._track(writer.put(key, view, self.layout.object_bytes, held.release)))
        held.release()
        return tuple(puts)

    def _clear(self, slots: Sequence[int], ranges: Sequence[ByteRange]) -> None:
        if not ranges:
            return
        for slot in slots:
            with self.pool.memory.buffer(slot) as view:
                for gap in ranges:
                    view[gap.offset : gap.offset + gap.num_bytes] = bytes(gap.num_bytes)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """These objects cannot be found any more, in the pool or in any tier that answers.

        Raises:
            TierError: a tier that does not; the others and the pool were asked all the same.
        """
        self.pool.discard(keys)
        failures: list[TierError] = []
        for tier in self.tiers:
            for key in keys:
                try:
                    tier.delete(key)
                except TierError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    # ---- the end

    def flush(self, timeout_s: float) -> None:
        """Every read and put that was begun has ended.

        Raises:
            TimeoutError: some have not within the bound; they go on.
        """
        with self._lock:
            jobs = set(self._jobs)
        running = wait(jobs, timeout_s).not_done
        if running:
            raise TimeoutError(f"{len(running)} reads and puts of tiers have not ended within {timeout_s} s")

    def close(self, timeout_s: float = 10.0) -> None:
        """Flushed, and its threads ended. A second call does nothing.

        Raises:
            TimeoutError: as `flush`; the threads end with their work.
        """
        try:
            self.flush(timeout_s)
        finally:
            self._threads.shutdown(wait=False)
            self._asking.shutdown(wait=False)
            for writer in self._writers:
                writer.close()

    def counts(self) -> StorageCounts:
        """What moved between the pool and the tiers so far."""
        with self._lock:
            promoted, not_promoted = self._promoted, self._not_promoted
        written = {writer.tier.name: writer.counts() for writer in self._writers}
        return StorageCounts(promoted, not_promoted, written)

    def _track(self, job: Future[None]) -> Future[None]:
        with self._lock:
            self._jobs.add(job)
        job.add_done_callback(self._ended)
        return job

    def _ended(self, job: Future[None]) -> None:
        with self._lock:
            self._jobs.discard(job)


def _gaps(layout: ObjectLayout) -> tuple[ByteRange, ...]:
    """Bytes of an object that belong to no layer."""
    gaps, end = [], 0
    for found in sorted(slice_ranges(layout, Slice(0, layout.num_layers))):
        if found.offset > end:
            gaps.append(ByteRange(end, found.offset - end))
        end = found.offset + found.num_bytes
    return tuple(gaps)
