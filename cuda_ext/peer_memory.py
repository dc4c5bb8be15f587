"""One process's paged cache opened in another: CUDA memory by IPC handle, host memory by shared memory.

The owner exports whole allocations; addresses inside them travel as offsets, so both processes may map them anywhere.
An event exported with them orders a copy of the other process behind the owner's stream (XFER-3).

CUDA's driver is called by ctypes (`libcuda.so.1`, in the device's primary context, which torch and the native library
use as well), so that nothing of it is needed where there is no GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from lamella.cuda_ext.shared_memory import HostMemory
from lamella.reference.layout import EngineLayout

_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_INTERPROCESS: Final = 0x4 | 0x2  # CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING


class Allocation(NamedTuple):
    """One allocation of the owner's.

    Attributes:
        handle: a CUDA IPC handle, or the path of a shared memory.
        base: its first byte in the owner's process.
        num_bytes: of the whole allocation.
    """

    handle: bytes
    base: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExportedCaches:
    """Paged caches as another process can open them.

    Attributes:
        device: `"cuda:N"` as the owner numbers it, or `"cpu"`.
        allocations: that hold every base of `engines`.
        engines: one a kernel group, with the owner's addresses.
    """

    device: str
    allocations: tuple[Allocation, ...]
    engines: tuple[EngineLayout, ...]


class OpenedCaches:
    """Another process's caches, mapped here until `close`.

    Args:
        caches: as the owner exported them.
        device: the same GPU as this process numbers it; by default the owner's number.

    Raises:
        ValueError: a cache that does not lie in one allocation, whatever its owner says: copies would go beyond it.
        OSError: the owner or its memory is gone, or CUDA refuses (containers must share the IPC namespace).
    """

    def __init__(self, caches: ExportedCaches, device: str | None = None) -> None:
        self.device = device or caches.device
        self._mapped: list[_Mapped] = []
        try:
            for one in caches.allocations:
                self._mapped.append(_open(one, self.device))
            moved = [mapped.address for mapped in self._mapped]
            self.engines = tuple(_moved(engine, caches.allocations, moved) for engine in caches.engines)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmapped; no copy may still use them. A second call does nothing."""
        while self._mapped:
            self._mapped.pop().close()


def export_caches(
    device: str, engines: Sequence[EngineLayout], shared: Sequence[tuple[Path, int, int]] = ()
) -> ExportedCaches:
    """What another process needs to open these caches; they outlive its use of them.

    Args:
        device: where they are.
        engines: one a kernel group.
        shared: on the CPU device (path, address of the first byte here, bytes) of each shared memory they lie in.

    Raises:
        ValueError: caches on the CPU device outside every `shared` memory, or that do not lie in one allocation.
        OSError: CUDA cannot export the memory, such as that of expandable segments; the message says what to set.
    """
    if not device.startswith("cuda"):
        found = tuple(Allocation(bytes(path), base, num_bytes) for path, base, num_bytes in shared)
    else:
        found = _cuda_allocations(device, {base for engine in engines for layer in engine.bases for base in layer})
    for engine in engines:
        _moved(engine, found, [one.base for one in found])
    return ExportedCaches(device, found, tuple(engines))


def _moved(engine: EngineLayout, allocations: Sequence[Allocation], to: Sequence[int]) -> EngineLayout:
    extents = [
        stride * (count - 1)
        for stride, count in (
            (engine.block_stride, engine.num_blocks),
            (engine.token_stride, engine.block_tokens),
            (engine.head_stride, engine.num_heads),
            (engine.dim_stride, engine.head_dim),
        )
    ]
    before, behind = -sum(min(0, one) for one in extents), sum(max(0, one) for one in extents) + engine.element_bytes

    def moved(address: int) -> int:
        for one, base in zip(allocations, to, strict=True):
            if one.base <= address < one.base + one.num_bytes:
                first, end = address - before - one.base, address + behind - one.base
                if first < 0 or end > one.num_bytes:
                    raise ValueError(
                        f"the cache at {address:#x} is said to be bytes {first} to {end - 1} of an exported memory of "
                        f"{one.num_bytes}: its sizes or strides are not those of the memory"
                    )
                return base + address - one.base
        raise ValueError(
            f"the cache at {address:#x} lies in no exported memory: on a machine without a GPU the engine's caches "
            "must lie in shared memory for another process to move them; use the transfer side 'worker'"
        )

    return replace(engine, bases=tuple(tuple(moved(base) for base in layer) for layer in engine.bases))


class _Mapped(Protocol):
    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


def _open(one: Allocation, device: str) -> _Mapped:
    if device.startswith("cuda"):
        return _CudaMapped(one, device)
    return HostMemory.attach(Path(one.handle.decode()), one.num_bytes)


# ---- CUDA


class _Handle(Structure):
    """`CUipcMemHandle` and `CUipcEventHandle`: 64 opaque bytes, passed by value."""

    _fields_ = (("reserved", c_char * _HANDLE_BYTES),)

    @property
    def raw(self) -> bytes:
        return ctypes.string_at(ctypes.addressof(self), _HANDLE_BYTES)


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuGetErrorName": (c_int, POINTER(ctypes.c_char_p)),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetEventHandle": (POINTER(_Handle), c_void_p),
    "cuIpcOpenEventHandle": (POINTER(c_void_p), _Handle),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
}


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as missing:
        raise OSError(f"no NVIDIA driver here: {missing}") from missing
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.restype, function.argtypes = c_int, arguments
    _check(driver, driver.cuInit(0), "cuInit")
    return driver


def _check(driver: ctypes.CDLL, code: int, what: str, remedy: str = "") -> None:
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, byref(name))
        raise OSError(f"{what}: {(name.value or b'unknown error').decode()}{remedy}")


@functools.cache
def _context(device: str) -> c_void_p:
    driver, number, context = _driver(), c_int(), c_void_p()
    _check(driver, driver.cuDeviceGet(byref(number), int(device.partition(":")[2] or 0)), f"device {device}")
    _check(driver, driver.cuDevicePrimaryCtxRetain(byref(context), number), f"context of {device}")
    return context


@contextmanager
def _current(device: str) -> Iterator[ctypes.CDLL]:
    driver, before = _driver(), c_void_p()
    _check(driver, driver.cuCtxPushCurrent_v2(_context(device)), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(byref(before))


def _cuda_allocations(device: str, bases: set[int]) -> tuple[Allocation, ...]:
    found: dict[int, Allocation] = {}
    with _current(device) as driver:
        for address in sorted(bases):
            start, size, handle = c_uint64(), c_size_t(), _Handle()
            _check(
                driver,
                driver.cuMemGetAddressRange_v2(byref(start), byref(size), address),
                f"the cache at {address:#x} is no memory of {device}",
            )
            if start.value in found:
                continue
            _check(
                driver,
                driver.cuIpcGetMemHandle(byref(handle), start.value),
                f"the memory of the cache at {address:#x} cannot be opened by another process",
                "; torch: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or use the transfer side 'worker'",
            )
            found[start.value] = Allocation(handle.raw, start.value, size.value)
    return tuple(found.values())


class _CudaMapped:
    def __init__(self, one: Allocation, device: str) -> None:
        found = c_uint64()
        self._device = device
        with _current(device) as driver:
            _check(
                driver,
                driver.cuIpcOpenMemHandle_v2(byref(found), _Handle.from_buffer_copy(one.handle), _LAZY_PEER_ACCESS),
                "opening another process's GPU memory",
                "; containers must share the IPC namespace, or use the transfer side 'worker'",
            )
        self.address = found.value

    def close(self) -> None:
        with _current(self._device) as driver:
            _check(driver, driver.cuIpcCloseMemHandle(self.address), "closing another process's GPU memory")


class PeerEvent:
    """A CUDA event that another process waits for; made by its owner, opened by the other.

    Args:
        device: whose context it belongs to.
        handle: of an event that another process made; None: a new one.

    Raises:
        OSError: CUDA refuses.
    """

    def __init__(self, device: str, handle: bytes | None = None) -> None:
        self._device, self._owned = device, handle is None
        event = c_void_p()
        with _current(device) as driver:
            if handle is None:
                _check(driver, driver.cuEventCreate(byref(event), _INTERPROCESS), "making an event for other processes")
            else:
                opened = _Handle.from_buffer_copy(handle)
                _check(driver, driver.cuIpcOpenEventHandle(byref(event), opened), "opening another process's event")
        self._event: c_void_p | None = event

    @property
    def address(self) -> int:
        """The `cudaEvent_t`, as `AfterEvent` takes it.

        Raises:
            RuntimeError: it was closed.
        """
        if self._event is None:
            raise RuntimeError("this event was closed: make or open another")
        return self._event.value or 0

    def export(self) -> bytes:
        """What the other process opens it by; the same bytes every time."""
        handle = _Handle()
        with _current(self._device) as driver:
            _check(driver, driver.cuIpcGetEventHandle(byref(handle), self.address), "exporting an event")
        return handle.raw

    def record(self, stream: int) -> None:
        """It happens when all that the stream was given so far has run."""
        with _current(self._device) as driver:
            _check(driver, driver.cuEventRecord(self.address, stream), "recording an event")

    def close(self) -> None:
        """Gone, as far as this process goes. A second call does nothing."""
        if self._event is not None:
            event, self._event = self._event, None
            with _current(self._device) as driver:
                _check(driver, driver.cuEventDestroy_v2(event), "destroying an event")
