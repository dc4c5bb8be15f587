"""The transfer engine before the laws: a case of `reference.laws` on a device's own memory, through real transfers.

The blocks lie in device memory and the objects in registered host memory, at the same offsets as in the case's buffers,
so every gap, margin and guard byte is compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.device import Device, DeviceMemory
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.arena import Bytes
from lamella.reference.laws import Difference, TransferCase, Trial
from lamella.reference.layout import EngineLayout
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice

TIMEOUT_S = 30.0


class Left(NamedTuple):
    """The bytes a run left, copied back: the blocks' buffer and the objects' buffer."""

    engine: Bytes
    host: Bytes


class PlacedTrial:
    """A trial's buffers on a device, for the length of a `with` block.

    Args:
        device: where the blocks go.
        trial: the case, with the bytes before and the bytes expected.
    """

    def __init__(self, device: Device, trial: Trial) -> None:
        self.trial = trial
        self._registrar = device.registrar()
        engine, host = trial.buffers()
        self._engine_before = engine
        self._memory: DeviceMemory = device.allocate(max(1, engine.nbytes))
        self._memory.write(engine.ctypes.data, engine.nbytes)
        self._pages = -(-host.nbytes // 4096) * 4096
        self._host_memory = HostMemory.anonymous(self._pages)
        self._registrar.register(self._host_memory.address, self._pages)
        self._host: Bytes = np.frombuffer(memoryview(self._host_memory.buffer), dtype=np.uint8)[: host.nbytes]
        self._host[:] = host

    @property
    def engines(self) -> tuple[EngineLayout, ...]:
        """The case's caches at their place on the device."""
        shift = self._memory.address - self._engine_before.ctypes.data
        return tuple(
            replace(layout, bases=tuple(tuple(base + shift for base in kv) for kv in layout.bases))
            for layout in self.trial.arena.engines(self._engine_before)
        )

    @property
    def engine_address(self) -> int:
        """Where the blocks' buffer begins on the device."""
        return self._memory.address

    @property
    def engine_bytes(self) -> int:
        """Bytes of the blocks' buffer."""
        return self._engine_before.nbytes

    def objects(self, request: int) -> HostObjects:
        """One request's objects at their place in registered memory."""
        addresses = self.trial.arena.object_addresses(self._host, request)
        return HostObjects(addresses, self.trial.case.registered_piece_bytes, self._host_memory.address)

    def left(self) -> Left:
        """What is there now; nothing may still be in flight."""
        engine = np.empty_like(self._engine_before)
        self._memory.read(engine.ctypes.data, engine.nbytes)
        return Left(engine, self._host.copy())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._memory.close()
        self._registrar.unregister(self._host_memory.address, self._pages)
        del self._host
        self._host_memory.close()


def engine_for(
    device: Device, case: TransferCase, carrier: Carrier = Carrier.EVENT, batch_entries: int = 64
) -> TransferEngine:
    """An engine whose lanes have the case's staging budget and windows."""
    return TransferEngine(
        device.name,
        staging_bytes=2 * case.staging_bytes,
        window_bytes=case.staging_bytes // case.num_windows,
        carrier=carrier,
        deadline_s=TIMEOUT_S,
        batch_entries=batch_entries,
    )


def submit_all(
    engine: TransferEngine,
    placed: PlacedTrial,
    method: CopyMethod = CopyMethod.AUTO,
    direction: Direction | None = None,
) -> list[Transfer]:
    """Every request of the case, queued at once; their slices are to move in the case's turns.

    Raises:
        ValueError: the method does not allow these blocks.
    """
    case = placed.trial.case
    cache: RegisteredCache = engine.register_cache(case.layout, placed.engines)
    keys: list[list[int]] = [[] for _ in case.requests]
    for turn, (owner, plan) in enumerate(case.in_turns()):
        keys[owner] += [turn] * len(plan.slices)
    transfers = []
    for index, request in enumerate(case.requests):
        slices: Sequence[Slice] = case.plan(request).slices
        transfers.append(
            engine.submit(
                cache,
                direction or case.direction,
                placed.objects(index),
                request.block_ids,
                request.num_tokens,
                slices=slices,
                skip_tokens=request.skip_tokens,
                null_block=request.null_block,
                method=method,
                keys=keys[index],
            )
        )
    return transfers


def run_on_device(
    device: Device,
    trial: Trial,
    method: CopyMethod = CopyMethod.AUTO,
    carrier: Carrier = Carrier.EVENT,
    batch_entries: int = 64,
) -> Difference | None:
    """XFER-1 on a device: None if the engine left exactly the oracle's bytes, in blocks, objects and the gaps.

    Raises:
        ValueError: the method does not allow these blocks; nothing was moved.
        TransferStopped, TimeoutError: a transfer failed or did not end.
    """
    with PlacedTrial(device, trial) as placed, engine_for(device, trial.case, carrier, batch_entries) as engine:
        for transfer in submit_all(engine, placed, method):
            transfer.wait(TIMEOUT_S)
        left = placed.left()
    return trial.compare(left.engine, left.host)
