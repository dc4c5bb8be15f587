"""One host memory that outlives the connectors of a benchmark: registered once, cut anew for every object size."""

from __future__ import annotations

from typing import Any, Final

from lamella.cuda_ext.device import Device
from lamella.cuda_ext.numa import prefer_node
from lamella.cuda_ext.registration import PieceState, Registration
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slots import SlotMemory, SlotShape

_PIECE_BYTES: Final = 512 << 20
_PATIENCE_S: Final = 180.0


def keep_pool(pool: KeptPool) -> None:
    """Every worker side that this process makes from now on takes its host memory from the pool."""
    from lamella.connector.vllm_worker import WorkerSide

    def kept(worker: Any, object_bytes: int) -> Any:
        return pool.cut(object_bytes)

    WorkerSide._make_memory = kept  # type: ignore[assignment,method-assign]


class _Borrowed(HostMemory):
    """A memory whose close is the lender's."""

    def __init__(self, lender: HostMemory) -> None:
        self._lender = lender

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lender, name)

    num_bytes = property(lambda self: self._lender.num_bytes)
    path = property(lambda self: None)
    address = property(lambda self: self._lender.address)
    buffer = property(lambda self: self._lender.buffer)

    def populate(self, offset: int, num_bytes: int) -> None:
        """The lender has done that."""

    def close(self) -> None:
        """The lender does that."""


class KeptPool:
    """Host memory for a whole benchmark; registering begins at once, in the background.

    Args:
        device: `"cpu"` or `"cuda:N"`.
        num_bytes: rounded up to whole pieces.
    """

    name = "kept"

    def __init__(self, device: str, num_bytes: int) -> None:
        one = Device(device)
        self.num_bytes = -(-num_bytes // _PIECE_BYTES) * _PIECE_BYTES
        self._memory = HostMemory.anonymous(self.num_bytes)
        node = one.numa_node()
        if node is not None:
            try:
                prefer_node(self._memory.address, self.num_bytes, node)
            except OSError as refused:
                print(f"host pool is not placed on memory node {node}: {refused}", flush=True)
        self._pieces = Registration(
            self._memory.address, _PIECE_BYTES, self.num_bytes, one.registrar(), self._memory.populate
        )

    def cut(self, object_bytes: int) -> SlotMemory:
        """Slots for objects of that size over the whole memory, registered.

        Raises:
            ValueError: objects whose pieces would straddle registered ones.
            OSError: a piece could not be registered.
            TimeoutError: registering takes longer than three minutes.
        """
        shape = SlotShape(object_bytes, 1)
        shape = SlotShape(object_bytes, self.num_bytes // shape.pitch_bytes)
        if _PIECE_BYTES % shape.pitch_bytes:
            raise ValueError(f"objects of {shape.pitch_bytes} bytes do not divide pieces of {_PIECE_BYTES}")
        self._pieces.wait(_PATIENCE_S)
        memory = SlotMemory(_Borrowed(self._memory), shape, self)
        memory.wait_registered(_PATIENCE_S)
        return memory

    # ---- as the registrar of what it cuts

    def register(self, address: int, num_bytes: int) -> None:
        """The range is registered already."""
        first = (address - self._memory.address) // _PIECE_BYTES
        last = (address + num_bytes - 1 - self._memory.address) // _PIECE_BYTES
        for piece in range(first, last + 1):
            if self._pieces.state(piece) is not PieceState.READY:
                raise OSError(f"piece {piece} of the host pool could not be registered: {self._pieces.report().failed}")

    def unregister(self, address: int, num_bytes: int) -> None:
        """The whole memory goes at once, in `close`."""

    def close(self) -> None:
        """Unregistered and given back; nothing is in flight."""
        self._pieces.close()
        self._memory.close()
