"""The transfer engine: retrieves and stores, slice by slice, on native threads that hold no GIL.

    retrieve() ─► key a slice (order policy) ─► lane: smallest key first ─► windows ─► copies ─► scatter ─► landed
                                                └─ a bounded number of bytes in flight, a thread of its own

Each direction has a lane of its own; both share one device. A call returns once the request is checked and queued.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_uint64
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext import _engine_library as abi
from lamella.cuda_ext._engine_library import Fault
from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext.arrival import AfterEvent, Carrier, Fence, HostFence
from lamella.cuda_ext.engine_options import deadline_ns, engine_options
from lamella.cuda_ext.rates import H200_RATES, EngineRates
from lamella.cuda_ext.registered import RegisteredCache, block_table, native_shape
from lamella.cuda_ext.transfer import CopyMethod, Transfer, timeout_ns
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.reference.ordering import Fifo, OrderPolicy, Submission
from lamella.reference.plan import Direction, TransferRequest, check_request
from lamella.reference.slices import Slice

__all__ = ["Fault", "LaneStatus", "RegisteredCache", "TransferEngine"]

DEFAULT_STAGING_BYTES = 256 << 20
DEFAULT_WINDOW_BYTES = 16 << 20
"""Copies pause about 3.5 µs between windows (measured on an H200), so a window is 0.3 ms of wire."""

DEFAULT_IN_FLIGHT_BYTES = 55_000_000
"""About a millisecond of a PCIe 5 x16 link."""

DEFAULT_TURN_BYTES = 32 << 20
"""Two thirds of a millisecond of wire: what the inference engine's own copies may wait for a lane, at no cost to it.

Source: `benchmarks/small_copies.py` on an H200: without turns they waited for the lane's last byte, 19.5 ms of 19.5;
with 32 MiB at most 0.64 ms, the transfer at 1.025 of a raw copy as before; with 16 MiB 0.33 ms, at 1.034.
"""

_DIRECTIONS = {Direction.RETRIEVE: 0, Direction.STORE: 1}
_log = logging.getLogger(__name__)


class LaneStatus(NamedTuple):
    """A lane's thread and queue at one moment. Bytes in flight are those on the wire."""

    thread_cpu_ns: int
    windows: int
    in_flight_bytes: int
    peak_in_flight_bytes: int
    live_transfers: int


class TransferEngine:
    """Moves KV between host objects and one device's paged caches.

    Args:
        device: `"cpu"` or `"cuda:N"`.
        num_layers: most layers of a stage that will be registered.
        staging_bytes: the staging ring that both directions share; all device memory the engine takes but a little.
        window_bytes: bytes that move as one; at least a block of a layer. A cancel takes effect within one.
        in_flight_bytes: bound on bytes enqueued that have not left the wire, a direction. Those that have left it and
            wait for a kernel to scatter them are bounded by the ring alone, which by default holds what moves in four
            milliseconds: kernels that fill the device keep a scatter waiting, and the wire must not wait with it.
        turn_bytes: bytes that a lane copies, in whole windows, until copies that others have enqueued on the same
            device come in between; 0: they wait until the lane has nothing to copy, which can be very long.
        carrier: how streams learn that a slice has landed.
        order: whose slice moves next, in each direction.
        rates: what the copy method is chosen by.
        deadline_s: a transfer that has not landed by then fails (SAFE-5), unless a call says otherwise.
        avoid_kernels: this process must not launch kernels where a copy can do, because another one computes on the
            device.
        gather_factor: AUTO has a kernel read host memory where copies would take so many times as long; 0: never. Such
            a kernel slows products beside it by half and more (measured on an H200), so a busy engine wants 2 or 0.
        batch_entries, kernel_ctas, batch_flags: tuning of batched copies and scatters.
        paced: CPU device, for tests: a window moves only when `grant` lets it.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: sizes, times or a device that cannot be; none is cut down to what the C side can hold.
        LibraryMissingError: the device's native library was not built here.
        RuntimeError: CUDA refuses.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        num_layers: int = 128,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
        turn_bytes: int = DEFAULT_TURN_BYTES,
        carrier: Carrier = Carrier.EVENT,
        order: OrderPolicy | None = None,
        rates: EngineRates = H200_RATES,
        deadline_s: float = 30.0,
        avoid_kernels: bool = False,
        gather_factor: float = 1.1,
        batch_entries: int = 64,
        kernel_ctas: int = 1024,
        batch_flags: int = 1,
        paced: bool = False,
    ) -> None:
        options, _kept = engine_options(
            device,
            order=order,
            carrier=carrier,
            rates=rates,
            gather_factor=gather_factor,
            switches={"avoid_kernels": avoid_kernels, "paced": paced},
            sizes={
                "num_layers": num_layers,
                "staging_bytes": staging_bytes,
                "window_bytes": window_bytes,
                "in_flight_bytes": in_flight_bytes,
                "turn_bytes": turn_bytes,
                "batch_entries": batch_entries,
                "kernel_ctas": kernel_ctas,
                "batch_flags": batch_flags,
            },
        )
        if deadline_s <= 0:
            raise ValueError(f"deadline_s must be positive, got {deadline_s}")
        self.device = device
        self.carrier = carrier
        self._order = order or Fifo()
        self._deadline_ns = deadline_ns(deadline_s)
        self._library = abi.engine_library("lamella_cuda" if options.device else "lamella_cpu")
        self._native: abi.NativeEngine | None = abi.NativeEngine(self._library, options)
        self._lock = threading.Lock()
        self._sequence = {Direction.RETRIEVE: 0, Direction.STORE: 0}
        self._tokens = 0
        self._held: dict[int, Callable[[], object] | None] = {}
        self._reaper = threading.Thread(target=self._reap, args=(self._native,), name="lamella-reaper", daemon=True)
        try:
            self._reaper.start()
        except RuntimeError:  # no thread is left: what the native engine took is given back
            del self._native, self._reaper
            raise

    # ---- set-up

    def register_cache(self, layout: ObjectLayout, engines: Sequence[EngineLayout]) -> RegisteredCache:
        """Makes a paged cache known, once, before the first transfer.

        Args:
            layout: of the objects.
            engines: one paged cache a kernel group; its memory outlives the engine.

        Raises:
            ValueError: caches that do not fit the objects.
        """
        nothing = TransferRequest(0, tuple(() for _ in layout.groups))
        check_request(layout, engines, nothing, Direction.RETRIEVE)
        shape, _kept = native_shape(layout, engines)
        number = c_int32()
        self._call("lm_engine_register", shape, ctypes.byref(number))
        return RegisteredCache(number.value, layout, tuple(engines))

    # ---- transfers

    def retrieve(
        self,
        cache: RegisteredCache,
        objects: HostObjects,
        block_ids: Sequence[Sequence[int] | NDArray[np.int32]],
        num_tokens: int,
        **options: Any,
    ) -> Transfer:
        """Queues host objects for the cache's blocks; as `submit` with `Direction.RETRIEVE`."""
        return self.submit(cache, Direction.RETRIEVE, objects, block_ids, num_tokens, **options)

    def store(
        self,
        cache: RegisteredCache,
        objects: HostObjects,
        block_ids: Sequence[Sequence[int] | NDArray[np.int32]],
        num_tokens: int,
        **options: Any,
    ) -> Transfer:
        """Queues the cache's blocks for host objects; as `submit` with `Direction.STORE`."""
        return self.submit(cache, Direction.STORE, objects, block_ids, num_tokens, **options)

    def submit(
        self,
        cache: RegisteredCache,
        direction: Direction,
        objects: HostObjects,
        block_ids: Sequence[Sequence[int] | NDArray[np.int32]],
        num_tokens: int,
        *,
        width: int | Sequence[int] = 1,
        slices: Sequence[Slice] | None = None,
        skip_tokens: int = 0,
        null_block: int | None = None,
        method: CopyMethod = CopyMethod.AUTO,
        keys: Sequence[int] | None = None,
        due_ns: int | None = None,
        fence: Fence | None = None,
        deadline_s: float | None = None,
        on_drained: Callable[[], object] | None = None,
        board: int = 0,
        generation: int = 0,
    ) -> Transfer:
        """Queues a transfer and returns; nothing has moved yet.

        Blocks and objects are the transfer's until it is final: retrieve writes the blocks and reads the objects, store
        the other way round. Cancelled or failed, they hold any mixture of old and new bytes.

        Args:
            cache: from `register_cache`.
            direction: retrieve or store.
            objects: addresses by absolute chunk; registered with the device.
            block_ids: a block table for each kernel group, as in `TransferRequest`; NumPy arrays are of int32.
            num_tokens, skip_tokens, null_block: as in `TransferRequest`.
            width: layers per slice, or a schedule.
            slices: the slices themselves, without a gap; instead of `width`.
            method: forced, or AUTO.
            keys: a sort key a slice; instead of the engine's order policy.
            due_ns: when the request's first token is due, for the deadline order.
            fence: what must come before the first access to the blocks (XFER-3).
            deadline_s: instead of the engine's; the transfer fails if it has not landed by then.
            on_drained: called once, from the engine's reaper thread, when nothing of the transfer is in flight any
                more, however it ended: the place to unpin its objects (XFER-2). What it raises is logged.
            board: address of a 64-bit word that receives generation << 32 | slices recorded, published last.
            generation: of that word (event carrier); 0: the engine counts.

        Raises:
            ValueError: what `check_request` refuses, a chunk without an object, a block id that has no 32 bits, keys
                that do not match the slices, or a method that these blocks do not allow. Nothing was queued.
            TransferStopped: the engine is closed or its device is lost.
        """
        plan = cache.cut_by(width) if slices is None else cache.cut_at(tuple(slices))
        tables = [block_table(ids) for ids in block_ids]
        table_addresses = array("Q", [table.buffer_info()[0] for table in tables])
        table_sizes = array("i", map(len, tables))
        addresses = array("Q", objects.addresses)
        host_fence, event, stream, has_stream = self._fence(fence)
        seconds_ns = self._deadline_ns if deadline_s is None else deadline_ns(deadline_s)
        handle, queued = ctypes.c_void_p(), abi.ProgressStruct()
        with self._lock:
            now_ns = time.monotonic_ns()
            if keys is None:
                sizes = cache.slice_bytes(plan, tables, num_tokens, skip_tokens, null_block)
                keys = self._order.keys(
                    Submission(self._sequence[direction], now_ns, sizes, due_ns, self._round(direction))
                )
            if len(keys) != len(plan.slices):
                raise ValueError(f"keys must have one entry for each of {len(plan.slices)} slices, got {len(keys)}")
            packed_keys = array("q", keys)
            submission = abi.pack_submission(
                cache.number,
                _DIRECTIONS[direction],
                method.value,
                len(plan.slices),
                plan.address,
                packed_keys.buffer_info()[0],
                num_tokens,
                skip_tokens,
                null_block or 0,
                null_block is not None,
                len(tables),
                table_addresses.buffer_info()[0],
                table_sizes.buffer_info()[0],
                addresses.buffer_info()[0],
                len(addresses),
                objects.registered_base,
                objects.registered_piece_bytes or 0,
                event,
                stream,
                has_stream,
                generation,
                host_fence,
                now_ns + seconds_ns,
                self._tokens,
                board,
                0,
                0,
            )
            token = self._tokens
            self._tokens += 1
            self._held[token] = on_drained
            try:
                self._call("lm_engine_submit", submission, ctypes.byref(handle), ctypes.byref(queued))
            except Exception:  # a KeyboardInterrupt may come when it is queued already
                del self._held[token]
                raise
            self._sequence[direction] += 1
        return Transfer(self._library, handle, plan.slices, queued)

    def _round(self, direction: Direction) -> int:
        return int(self._lane(direction).last_key) if self._order.name == "round_robin" else 0

    def _fence(self, fence: Fence | None) -> tuple[int, int, int, bool]:
        """(host fence, event, stream, whether there is a stream)."""
        if fence is None:
            return 0, 0, 0, False
        if isinstance(fence, HostFence) == self.device.startswith("cuda"):
            raise ValueError(f"a {type(fence).__name__} is no fence of {self.device}")
        if isinstance(fence, HostFence):
            return fence.handle, 0, 0, False
        if isinstance(fence, AfterEvent):
            return 0, fence.handle, 0, False
        return 0, 0, fence.handle, True

    # ---- arrival inside graphs; see arrival.GraphWaits

    def wait_pending(self, layer: int, stream: int) -> None:
        """As `GraphWaits.wait`."""
        self._call("lm_engine_wait_pending", layer, stream)

    def pending_word(self, layer: int) -> int:
        """Address of the word that `wait_pending` waits on."""
        address = c_uint64()
        self._call("lm_engine_pending_word", layer, ctypes.byref(address))
        return address.value

    # ---- what goes on

    def lane(self, direction: Direction) -> LaneStatus:
        """A direction's thread and queue now."""
        s = self._lane(direction)
        return LaneStatus(s.thread_cpu_ns, s.windows, s.in_flight_bytes, s.peak_in_flight_bytes, s.live)

    def _lane(self, direction: Direction) -> abi.LaneStatusStruct:
        status = abi.LaneStatusStruct()
        self._call("lm_engine_lane_status", _DIRECTIONS[direction], ctypes.byref(status))
        return status

    def grant(self, direction: Direction, windows: int) -> None:
        """Paced CPU device: lets that many more windows of the direction move."""
        self._call("lm_engine_grant", _DIRECTIONS[direction], windows)

    def plant_fault(self, direction: Direction, window: int, fault: Fault = Fault.ISSUED) -> None:
        """For tests: the direction's window of that number, counted from the first, meets the fault."""
        self._call("lm_engine_plant_fault", _DIRECTIONS[direction], window, fault.value)

    # ---- the end

    def _reap(self, native: abi.NativeEngine) -> None:
        while (token := native.next_drained()) is not None:
            with self._lock:  # a submission enters its token before it lets go of the lock
                on_drained = self._held.pop(token)
            if on_drained is not None:
                try:
                    on_drained()
                except Exception:
                    _log.exception("what was to be done once a transfer had drained failed; the next ones go on")

    def close(self, timeout_s: float = 10.0) -> None:
        """Transfers in flight were cancelled and have drained, their `on_drained` was called, and the threads ended.

        Raises:
            ValueError: a bound below 0 or of more than 30 years; the engine is as it was.
            TimeoutError: the device did not drain within the bound. The engine is closed all the same; its device
                memory stays taken, because copies may still use it, and `on_drained` of what has not drained is never
                called. Streams that wait for a transfer's words are let go at its deadline.
        """
        bound_ns = timeout_ns(timeout_s)  # first: the threads end only by a close that was begun
        native = self._native
        if native is None or not native.is_of_this_process:
            return  # closed, or in a forked child, which has none of its threads
        with self._lock:
            if self._native is None:
                return
            self._native = None  # no further calls; those under way hold it
        try:
            native.call("lm_engine_close", bound_ns)
        finally:
            self._reaper.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _call(self, function: str, *arguments: Any) -> None:
        native = self._native
        if native is None:
            raise abi.TransferStopped("the engine is closed; create another")
        native.call(function, *arguments)
