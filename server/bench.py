"""`lamella bench server`: what a retrieve through a running server takes, against one raw copy of the same bytes.

Each repeat poisons the blocks, makes a raw pinned copy, then looks up and retrieves; the bytes of every repeat's kind
are checked against the bench's own copy of them, which the server never saw. Times are the caller's, see `Sample`;
polls come without a pause.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from lamella.cuda_ext.bench_cases import BenchMemory, BenchShape
from lamella.cuda_ext.beside import OtherProcess, ThisProcess, torch_reason
from lamella.cuda_ext.device import Device, ProbeMethod, RawCopy
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.reference.layout import ObjectLayout
from lamella.reference.plan import Direction
from lamella.server.arriving import GrantedTransfer
from lamella.server.bench_report import RetrieveRow, Sample, ServerBenchReport
from lamella.server.protocol import Ping, Pong, TransferSide
from lamella.server.rank import RankCaches, RankOfEngine
from lamella.server.worker import Worker

TIMEOUT_S: Final = 60.0
_STILL_S: Final = 2.0
IDLE, HERE, ELSEWHERE = "idle", "products here", "products elsewhere"


@dataclass(frozen=True, slots=True)
class ServerBenchSettings:
    """How the bench measures.

    Args:
        transfer_side: whose process moves the bytes.
        widths: layers per slice; 0: chunk-major.
        loads: of `IDLE`, `HERE` (products of the worker's own process, where an inference engine's are) and
            `ELSEWHERE` (of a third process).
        repeats: runs of each kind that count.
        warm_up: runs before them that do not.
        rows: tokens of the products beside.
        lookups: of each size.
    """

    transfer_side: TransferSide = TransferSide.WORKER
    widths: tuple[int, ...] = (1, 8, 32, 0)
    loads: tuple[str, ...] = (IDLE, HERE, ELSEWHERE)
    repeats: int = 9
    warm_up: int = 2
    rows: int = 1024
    lookups: int = 300


class ServerBench:
    """One rank with a prefix of its own on a running server; a context manager.

    Args:
        folder: the server's.
        device: whose memory the blocks are in.
        shape: of the cache and objects.
        num_bytes: about how many a retrieve moves; whole chunks.
        settings: how.
        engine_options: for the worker's `TransferEngine`.

    Raises:
        ValueError: the server has no room for the prefix.
        (others): as `Worker`.
    """

    def __init__(
        self,
        folder: Path,
        device: Device,
        shape: BenchShape,
        num_bytes: int,
        settings: ServerBenchSettings,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._device = device
        self._shape = shape
        self.settings = settings
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            tokens = shape.tokens_of(num_bytes)
            self.memory = stack.enter_context(BenchMemory(device, shape, tokens))
            pages = -(-self.memory.num_bytes // mmap.PAGESIZE)
            self._raw_memory = stack.enter_context(contextlib.closing(HostMemory.anonymous(pages * mmap.PAGESIZE)))
            registrar = device.registrar()
            registrar.register(self._raw_memory.address, self._raw_memory.num_bytes)
            stack.callback(registrar.unregister, self._raw_memory.address, self._raw_memory.num_bytes)
            layers = shape.geometry.num_layers
            space = KeySpace(
                f"bench {os.getpid()}",
                "bfloat16",
                shape.form,
                shape.memory,
                shape.geometry.chunk_tokens,
                0,
                1,
                (0, layers),
            )
            self.worker = stack.enter_context(
                Worker(
                    folder,
                    RankOfEngine(f"bench-{os.getpid()}", space),
                    RankCaches(shape.layout, self.memory.engines, device.name),
                    transfer_side=settings.transfer_side,
                    engine_options=engine_options,
                )
            )
            self._keys = chunk_keys(space, range(tokens))
            self._space = space
            if self._num_slots < len(self._keys):
                raise ValueError(
                    f"the server has {self._num_slots} slots of {shape.geometry.object_bytes} bytes for this model and "
                    f"{len(self._keys)} are needed: start it with more --memory, which its --models share, or measure "
                    "a smaller --size"
                )
            self._stack = stack.pop_all()
        self.report = ServerBenchReport(self.worker.transfer_side.value, self.memory.num_bytes, shape.name)

    def run(self, progress: Callable[[str], None] = lambda line: None) -> ServerBenchReport:
        """Everything has been measured; what cannot be here is in the report with its reason.

        Raises:
            RuntimeError: wrong bytes.
        """
        progress("store")
        self.prepare()
        self.wait_ready()
        self.time_store()
        for load in self.settings.loads:
            reason = torch_reason(self._device.name) if load != IDLE else None
            if reason:
                self.report.skipped.append(f"{load}: {reason}")
                continue
            with contextlib.ExitStack() as stack:
                beside = self._beside(load, stack)
                for width in self.settings.widths:
                    progress(f"retrieve, {load}, width {width}")
                    with beside.multiplying() if beside is not None else contextlib.nullcontext():
                        row = self._row(load, width)
                    ran = beside.ran[-1] if isinstance(beside, ThisProcess) else None
                    self.report.retrieves.append(replace(row, beside=ran))
        progress("lookups")
        self._time_lookups(self._keys[:32], self.worker)
        self._time_many_lookups()
        return self.report

    def _beside(self, load: str, stack: contextlib.ExitStack) -> ThisProcess | OtherProcess | None:
        if load == HERE:
            return ThisProcess(self._device.name, self.settings.rows)
        if load == ELSEWHERE:
            return stack.enter_context(OtherProcess(self._device.name, self.settings.rows))
        return None

    # ---- store

    def prepare(self) -> None:
        """The prefix is on the server; slots become usable in the background, so it may take several stores.

        Raises:
            RuntimeError: not within a minute.
        """
        self._fill_blocks()
        end = time.monotonic() + TIMEOUT_S
        while True:
            self._store(self._keys)
            locked = self.worker.lookup(self._keys)
            self.worker.give_back(locked)
            if locked.num_chunks == len(self._keys):
                return
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the server keeps {locked.num_chunks} of {len(self._keys)} objects of "
                    f"{self._shape.geometry.object_bytes} bytes: start it with more --memory"
                )
            time.sleep(0.5)

    def wait_ready(self) -> None:
        """Every slot can be used, or no more have become usable for two seconds.

        Until then the server fills its memory and who moves registers it, which takes the host's bandwidth and the
        device's lock from what is measured.
        """
        seen, since = -1, time.monotonic()
        while (ready := self._ready_slots()) < self._num_slots:
            if ready > seen:
                seen, since = ready, time.monotonic()
            elif time.monotonic() - since > _STILL_S:
                self.report.skipped.append(f"{self._num_slots - ready} slots did not become usable")
                return
            time.sleep(0.02)

    @property
    def _num_slots(self) -> int:
        shared = self.worker.session.epoch.shared
        assert shared is not None, "a rank has slots"
        return shared.shape.num_slots

    def _ready_slots(self) -> int:
        own = self.worker.mover.ready_slots
        if own >= 0:
            return own
        session = self.worker.session
        return session.call(Ping(session.epoch.registered.session, own), Pong).ready_slots

    def time_store(self) -> None:
        """As many bytes under other keys, once; what they take until others can read them."""
        keys = chunk_keys(self._space, range(1, self.memory.num_tokens + 1))
        begun_ns = time.monotonic_ns()
        if self._store(keys) == len(keys):
            self.report.store_ns.append(time.monotonic_ns() - begun_ns)
        else:
            self.report.skipped.append("store: the server has no room for as many bytes again")

    def _store(self, keys: Sequence[ChunkKey]) -> int:
        """What of `keys` has room is readable; how many chunks that was."""
        orders = self.worker.allocate("bench", keys, (self.memory.block_ids,), 0, self.worker.rank)
        for order in orders:
            self.worker.begin_store(order)
        self.worker.begin_step(num_tokens=1)
        self.worker.step_computed()
        numbers = {order.number for order in orders}
        readable: dict[int, bool] = {}
        end = time.monotonic() + TIMEOUT_S
        while not numbers <= set(readable):
            readable.update(self.worker.poll().readable)
            if time.monotonic() > end:
                raise RuntimeError(f"stores are not readable after {TIMEOUT_S:g} s")
        return sum(len(order.slots) for order in orders if readable[order.number])

    def _fill_blocks(self) -> None:
        """By an engine of the bench's own, from its own pool."""
        self.memory.poison()
        with TransferEngine(self._device.name, num_layers=self._shape.geometry.num_layers) as engine:
            cache = engine.register_cache(self._shape.layout, self.memory.engines)
            request = self.memory.request
            engine.retrieve(cache, self.memory.objects, request.block_ids, request.num_tokens).wait(TIMEOUT_S)
        self.memory.check(Direction.RETRIEVE)

    # ---- retrieve

    def _row(self, load: str, width: int) -> RetrieveRow:
        samples: list[Sample] = []
        method = ""
        for repeat in range(self.settings.warm_up + self.settings.repeats):
            sample, method = self.retrieve(width)
            if repeat == 0:
                self.memory.check(Direction.RETRIEVE)
            if repeat >= self.settings.warm_up:
                samples.append(sample)
        self.memory.check(Direction.RETRIEVE)
        return RetrieveRow(load, width, tuple(samples), method)

    def retrieve(self, width: int) -> tuple[Sample, str]:
        """One raw copy into the blocks, which are then poisoned, and one retrieve; and how the bytes were copied.

        Raises:
            RuntimeError: it failed, or did not end.
        """
        raw_ns = self._raw()
        self.memory.poison()
        worker, begun_ns = self.worker, time.monotonic_ns()
        locked = worker.lookup(self._keys)
        asked_ns = time.monotonic_ns()
        if locked.num_chunks != len(self._keys):
            raise RuntimeError(f"{locked.num_chunks} of {len(self._keys)} chunks are there")
        number = worker.retrieve(
            "bench", locked, (self.memory.block_ids,), self.memory.num_tokens, layers_per_slice=width
        )
        released_ns = released_slices = 0
        load = worker.loads.find(number)
        assert load is not None, "its end was not polled yet"
        while True:
            report = worker.poll()
            now_ns = time.monotonic_ns()
            if report.received:
                released_ns = now_ns
                released_slices = load.transfer.query().landed if load.transfer is not None else 0
            if number in report.loads:
                break
            if now_ns - begun_ns > TIMEOUT_S * 1e9:
                raise RuntimeError(f"the retrieve has not ended after {TIMEOUT_S:g} s")
        transfer = load.transfer
        if not report.loads[number].ok or transfer is None:
            raise RuntimeError(f"the retrieve failed: {load.failed}")
        progress, landed_ns = transfer.query(), transfer.timestamps_ns().landed_ns
        granted_ns = transfer.granted_ns if isinstance(transfer, GrantedTransfer) else asked_ns
        return (
            Sample(
                raw_ns,
                lookup_ns=asked_ns - begun_ns,
                submitted_ns=progress.submitted_ns - asked_ns,
                first_copy_ns=progress.started_ns - asked_ns,
                granted_ns=granted_ns - asked_ns,
                first_layer_ns=landed_ns[0] - asked_ns,
                released_ns=released_ns - asked_ns,
                last_layer_ns=landed_ns[-1] - begun_ns,
                released_slices=released_slices,
            ),
            progress.method.name,
        )

    def _raw(self) -> int:
        size = self.memory.num_bytes
        copied = RawCopy(
            Direction.RETRIEVE, ProbeMethod.WHOLE, self._raw_memory.address, self.memory.cache_address, 1, size
        )
        return self._device.copy(copied)[0].copy_ns

    # ---- lookup

    def _time_lookups(self, keys: Sequence[ChunkKey], worker: Worker) -> None:
        taken = []
        for _ in range(self.settings.lookups):
            begun_ns = time.monotonic_ns()
            locked = worker.lookup(keys)
            taken.append(time.monotonic_ns() - begun_ns)
            if locked.num_chunks != len(keys):
                raise RuntimeError(f"{locked.num_chunks} of {len(keys)} chunks are there")
            worker.give_back(locked)
        self.report.lookups_ns[len(keys)] = taken

    def _time_many_lookups(self, num_chunks: int = 512) -> None:
        """Of small objects of another model, so that so many fit."""
        device = Device("cpu")
        geometry = KVGeometry(1, 1, 1, 8, 2, 16)
        shape = BenchShape("lookup", geometry, "NHTD", "NTHD", 16, ObjectForm.TOKEN)
        layout: ObjectLayout = shape.layout
        space = KeySpace(f"bench lookup {os.getpid()}", "bfloat16", ObjectForm.TOKEN, "NTHD", 16, 0, 1, (0, 1))
        try:
            with (
                BenchMemory(device, shape, num_chunks * 16) as memory,
                Worker(
                    self._folder,
                    RankOfEngine(f"bench-lookup-{os.getpid()}", space),
                    RankCaches(layout, memory.engines, "cpu"),
                ) as worker,
            ):
                keys = chunk_keys(space, range(num_chunks * 16))
                worker.store("bench", keys, (memory.block_ids,))
                worker.begin_step(num_tokens=1)
                worker.step_computed()
                end = time.monotonic() + TIMEOUT_S
                while not worker.poll().readable and time.monotonic() < end:
                    time.sleep(0.001)
                self._time_lookups(keys, worker)
        except Exception as refused:
            self.report.skipped.append(f"lookup of {num_chunks} chunks: {refused}")

    # ---- the end

    def close(self) -> None:
        """The rank has left the server."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
