"""Where a prefix's objects are, and how they come: the pinned pool first, then slower tiers, slice by slice.

    hold_prefix(keys) ─► HeldPrefix ─► layerwise_batched_get() ─► Future of layer 0, of layer 1, ...
                          pool: pinned, there at once     tier: read by ranges into layer buffers, on I/O threads
    allocate(keys) ─► Reservation ─► (stores land) ─► batched_put() ─► readable in the pool, then kept by every tier

What a retrieve will use is settled before its first byte moves: pool objects are pinned, and a tier's objects, which
are whole or absent (TIER-1), are asked for together. What a tier loses afterwards ends the prefix there, and is
reported.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError

from lamella.connector.slice_objects import own_ranges, slice_layout, slice_ranges
from lamella.connector.storage.circuit import GuardedTier
from lamella.connector.storage.held_prefix import HeldPrefix, LayerObjects, Run, SliceSource
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.tier import Tier, TierError
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.pool import HostPool, Reservation
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange, ObjectLayout
from lamella.reference.slices import Slice

_log = logging.getLogger(__name__)


class StorageManager:
    """The pool and the tiers behind it. Thread-safe; it closes neither.

    Args:
        pool: objects in pinned memory; its layout is every tier's.
        tiers: slower stores, the nearest first.
        buffers: where slices from tiers are read into; needed with tiers.
        io_threads: threads that read and write tiers.
        timeout_s: bound on asking a tier whether it has something, and on waiting for buffers (SAFE-5).

    Raises:
        ValueError: tiers without buffers, io_threads below 1, or a timeout that is not positive.
    """

    def __init__(
        self,
        pool: HostPool,
        tiers: Sequence[Tier] = (),
        buffers: LayerBuffers | None = None,
        *,
        io_threads: int = 2,
        timeout_s: float = 10.0,
    ) -> None:
        if tiers and buffers is None:
            raise ValueError("tiers are read into layer buffers: give some")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.pool = pool
        self.tiers = tuple(tiers)
        self.buffers = buffers
        self._timeout_s = timeout_s
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
        for part in slices:
            future = self._get(held, part)
            for _ in range(part.num_layers):
                yield future

    def _get(self, held: HeldPrefix, part: Slice) -> Future[LayerObjects]:
        future: Future[LayerObjects] = Future()
        wanted = [run for run in held.runs if run.first_chunk + run.num_chunks > held.first_wanted]
        if all(run.tier is None for run in wanted):
            future.set_result(self._gather(held, part))
            return future
        held.hold()

        def read() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(self._gather(held, part))
            except BaseException as error:
                future.set_exception(error)
            finally:
                held.release()

        self._start(read)
        return future

    def _gather(self, held: HeldPrefix, part: Slice) -> LayerObjects:
        sources: list[SliceSource] = []
        chunks, reason = 0, None
        for run in held.runs:
            end = run.first_chunk + run.num_chunks
            first = max(run.first_chunk, held.first_wanted)
            if first >= end:
                chunks = end
                continue
            if run.tier is None:
                assert run.lease is not None, "a run of the pool is pinned"
                held.hold()
                objects = self._host_objects(first, run.lease.addresses[first - run.first_chunk :], self.pool)
                sources.append(SliceSource(first, end - first, objects, False, held.release))
                chunks = end
                continue
            source, reason = self._read(held, Run(first, end - first, run.tier, None), part)
            chunks = first
            if source is not None:
                sources.append(source)
                chunks += source.num_chunks
            if reason is not None:
                break
        return LayerObjects(part, chunks, tuple(sources), reason)

    def _read(self, held: HeldPrefix, run: Run, part: Slice) -> tuple[SliceSource | None, str | None]:
        """The run's slice objects in layer buffers, up to the first chunk that cannot be had, and why it cannot."""
        assert run.tier is not None, "only tiers are read"
        assert self.buffers is not None, "tiers come with buffers"
        small = slice_layout(self.layout, part)
        wanted, places = slice_ranges(self.layout, part), own_ranges(small)
        try:
            lease = self.buffers.take(run.num_chunks, self._timeout_s)
        except (TimeoutError, RuntimeError) as error:
            return None, str(error)
        done, reason = 0, None
        for key, view in zip(held.keys[run.first_chunk :], lease.views(), strict=False):
            reason = self._fill(run.tier, key, wanted, view, places)
            if reason is not None:
                reason = f"{run.tier.name} {reason} at chunk {run.first_chunk + done}"
                break
            done += 1
        if not done:
            lease.release()
            return None, reason
        objects = self._host_objects(run.first_chunk, lease.addresses[:done], self.buffers)
        return SliceSource(run.first_chunk, done, objects, True, lease.release), reason

    @staticmethod
    def _fill(
        tier: Tier, key: ChunkKey, wanted: Sequence[ByteRange], view: memoryview, places: Sequence[ByteRange]
    ) -> str | None:
        """The object's ranges in their places of a buffer, or why they cannot be had."""
        into = [view[place.offset : place.offset + place.num_bytes] for place in places]
        try:
            tier.get_ranges(key, wanted, into)
        except KeyError:
            return "lost its object"
        except TierError as error:
            return f"cannot read ({error})"
        except Exception as error:  # a tier's own fault must not take the engine down
            _log.exception("%s failed", tier.name)
            return f"failed ({error!r})"
        finally:  # an exception that somebody keeps would keep the memory's views with it
            for buffer in (*into, view):
                buffer.release()
        return None

    @staticmethod
    def _host_objects(first_chunk: int, addresses: tuple[int, ...], owner: HostPool | LayerBuffers) -> HostObjects:
        memory = owner.memory
        return HostObjects((0,) * first_chunk + addresses, memory.shape.piece_bytes, memory.base)

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

    def allocate(self, keys: Sequence[ChunkKey]) -> Reservation | None:
        """Room for every layer of those of `keys` that the pool does not hold, or None: all or nothing.

        None also for more keys than the pool has slots. The unused tail of a partial chunk is zero, so that no other
        tenant's bytes reach a tier with it.
        """
        if len(keys) > self.pool.num_slots:
            return None
        reservation = self.pool.reserve(keys)
        if reservation is not None:
            for key, slot in zip(reservation.keys, reservation.slots, strict=True):
                if key.num_tokens < self.layout.chunk_tokens:
                    with self.pool.memory.buffer(slot) as view:
                        view[:] = bytes(view.nbytes)
        return reservation

    def batched_put(self, reservation: Reservation) -> tuple[Future[None], ...]:
        """The objects are readable in the pool at once, and on their way to every tier.

        Returns:
            One future an object and tier, resolved when the tier has kept it, or failed with TierError. Objects stay
            pinned until then.

        Raises:
            RuntimeError: a reservation that was committed or abandoned before.
        """
        reservation.commit()
        if not self.tiers:
            return ()
        lease = self.pool.pin_leading(reservation.keys)  # one lease, so that the prefix ages as one
        if len(lease.keys) < len(reservation.keys):
            _log.info("%d objects left the pool before a tier could keep them", len(reservation.keys) - len(lease.keys))
        held = HeldPrefix(lease.keys, (Run(0, len(lease.keys), None, lease),))
        puts: list[Future[None]] = []
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            for tier in self.tiers:
                held.hold()
                puts.append(self._start(functools.partial(self._put, tier, held, key, slot)))
        held.release()
        return tuple(puts)

    def _put(self, tier: Tier, held: HeldPrefix, key: ChunkKey, slot: int) -> None:
        try:
            with self.pool.memory.buffer(slot) as view:
                tier.put(key, view)
        except TierError as error:
            _log.debug("%s did not keep %s: %s", tier.name, key.prefix.hex()[:16], error)
            raise
        finally:
            held.release()

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

    def _start(self, job: Callable[[], None]) -> Future[None]:
        future = self._threads.submit(job)
        with self._lock:
            self._jobs.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, job: Future[None]) -> None:
        with self._lock:
            self._jobs.discard(job)
