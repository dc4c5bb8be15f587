"""One device by name: its memory, its facts, what its host memory needs, and raw copies as a yardstick.

The transfer engine does not use this; the pool, the benchmarks, the calibration and the tests do. "cpu" is a device
like the others, whose memory happens to be host memory.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char, c_int32, c_int64, c_uint64
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from lamella.cuda_ext._library import check, find_library, open_library
from lamella.cuda_ext.numa import node_of_pci_device
from lamella.cuda_ext.registration import NoRegistrar, Registrar
from lamella.reference.plan import Direction

_DIRECTIONS = {Direction.RETRIEVE: 0, Direction.STORE: 1}


class ProbeMethod(enum.IntEnum):
    """`lm_probe_method`: how a raw copy is made."""

    WHOLE = 0
    BATCH = 1
    STRIDED = 2


class FactsStruct(Structure):
    """`lm_device_facts`."""

    _fields_ = (
        ("name", c_char * 256),
        ("pci_bus_id", c_char * 32),
        ("free_bytes", c_int64),
        ("total_bytes", c_int64),
        ("driver_version", c_int32),
        ("multiprocessors", c_int32),
    )


class ProbeStruct(Structure):
    """`lm_probe`."""

    _fields_ = (
        ("direction", c_int32),
        ("method", c_int32),
        ("host", c_uint64),
        ("device", c_uint64),
        ("num_runs", c_int64),
        ("run_bytes", c_int64),
        ("host_offsets", POINTER(c_int64)),
        ("device_offsets", POINTER(c_int64)),
        ("host_pitch", c_int64),
        ("device_pitch", c_int64),
        ("batch_entries", c_int32),
        ("batch_flags", c_int32),
    )


class ProbeTimeStruct(Structure):
    """`lm_probe_time`."""

    _fields_ = (("copy_ns", c_int64), ("issue_ns", c_int64))


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lm_host_register": (c_int32, (c_int32, c_uint64, c_int64)),
    "lm_host_unregister": (c_int32, (c_int32, c_uint64)),
    "lm_device_facts_of": (c_int32, (c_int32, POINTER(FactsStruct))),
    "lm_memory_allocate": (c_int32, (c_int32, c_int64, POINTER(c_uint64))),
    "lm_memory_free": (c_int32, (c_int32, c_uint64)),
    "lm_memory_fill": (c_int32, (c_int32, c_uint64, c_int32, c_int64)),
    "lm_memory_copy": (c_int32, (c_int32, c_uint64, c_uint64, c_int64)),
    "lm_probe_run": (c_int32, (c_int32, POINTER(ProbeStruct), c_int32, POINTER(ProbeTimeStruct))),
}


class DeviceFacts(NamedTuple):
    """What the driver says. `driver` is the CUDA version it supports, such as "13.0", "" for the CPU."""

    name: str
    pci_bus_id: str
    free_bytes: int
    total_bytes: int
    driver: str
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class RawCopy:
    """A copy of `num_runs` runs of `run_bytes` between registered host memory and device memory.

    Args:
        direction: retrieve writes the device.
        method: WHOLE takes the runs as one; BATCH needs an offset a run on both sides; STRIDED needs pitches.
        host, device: addresses of the two memories.
        num_runs, run_bytes: what is copied.
        host_offsets, device_offsets: where each run starts, for BATCH.
        host_pitch, device_pitch: from one run to the next, for STRIDED.
        batch_entries: most runs in one batched call.
    """

    direction: Direction
    method: ProbeMethod
    host: int
    device: int
    num_runs: int
    run_bytes: int
    host_offsets: Sequence[int] = ()
    device_offsets: Sequence[int] = ()
    host_pitch: int = 0
    device_pitch: int = 0
    batch_entries: int = 64

    @property
    def num_bytes(self) -> int:
        """Bytes copied."""
        return self.num_runs * self.run_bytes


class CopyTime(NamedTuple):
    """`copy_ns` from the common start to the copy's end, on the device's clock; `issue_ns` of one host thread."""

    copy_ns: int
    issue_ns: int


class DeviceMemory:
    """Memory on a device, freed at the end of a `with` block or by `close`. Its first bytes are whatever was there."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        found = c_uint64()
        device._call("lm_memory_allocate", num_bytes, ctypes.byref(found))
        self._device = device
        self._address: int | None = found.value
        self.num_bytes = num_bytes

    @property
    def address(self) -> int:
        """Address of the first byte.

        Raises:
            RuntimeError: the memory was freed.
        """
        if self._address is None:
            raise RuntimeError("this device memory was freed: allocate another")
        return self._address

    def fill(self, byte: int) -> None:
        """Every byte is `byte`."""
        self._device._call("lm_memory_fill", self.address, byte, self.num_bytes)

    def write(self, source: int, num_bytes: int | None = None) -> None:
        """The first bytes are those at host address `source`."""
        self._device._call("lm_memory_copy", self.address, source, self._whole(num_bytes))

    def read(self, target: int, num_bytes: int | None = None, offset: int = 0) -> None:
        """The bytes at host address `target` are those from `offset` on here; by default all of them."""
        size = self.num_bytes - offset if num_bytes is None else num_bytes
        if not 0 <= offset <= offset + size <= self.num_bytes:
            raise ValueError(f"offset and num_bytes must stay within {self.num_bytes}, got {offset} and {size}")
        self._device._call("lm_memory_copy", target, self.address + offset, size)

    def close(self) -> None:
        """Freed; no copy may still use it. A second call does nothing."""
        if self._address is not None:
            address, self._address = self._address, None
            self._device._call("lm_memory_free", address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _whole(self, num_bytes: int | None) -> int:
        wanted = self.num_bytes if num_bytes is None else num_bytes
        if not 0 <= wanted <= self.num_bytes:
            raise ValueError(f"num_bytes must be between 0 and {self.num_bytes}, got {wanted}")
        return wanted


class Device:
    """A device by name: "cpu", "cuda" (the first) or "cuda:N".

    Raises:
        ValueError: another name.
        LibraryMissingError: the native library for it was not built or cannot be loaded here.
    """

    def __init__(self, name: str) -> None:
        kind, _, number = name.partition(":")
        if kind not in ("cpu", "cuda") or (number and (kind == "cpu" or not number.isdecimal())) or name.endswith(":"):
            raise ValueError(f'a device is "cpu" or "cuda:N", got {name!r}')
        self.ordinal = int(number or 0)
        self.is_cuda = kind == "cuda"
        self.name = f"cuda:{self.ordinal}" if self.is_cuda else "cpu"
        self._library = _library("lamella_cuda" if self.is_cuda else "lamella_cpu")

    def facts(self) -> DeviceFacts:
        """What the driver says now.

        Raises:
            RuntimeError: no such device, or no driver.
        """
        found = FactsStruct()
        self._call("lm_device_facts_of", ctypes.byref(found))
        version = found.driver_version
        return DeviceFacts(
            name=found.name.decode() if self.is_cuda else _processor(),
            pci_bus_id=found.pci_bus_id.decode(),
            free_bytes=found.free_bytes,
            total_bytes=found.total_bytes,
            driver=f"{version // 1000}.{version % 1000 // 10}" if version else "",
            multiprocessors=found.multiprocessors or len(os.sched_getaffinity(0)),
        )

    def registrar(self) -> Registrar:
        """What makes a host pool's memory reachable for this device."""
        return CudaRegistrar(self) if self.is_cuda else NoRegistrar()

    def numa_node(self) -> int | None:
        """The memory node the device hangs on, None if the machine has no say in it."""
        return node_of_pci_device(self.facts().pci_bus_id) if self.is_cuda else None

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Memory on the device.

        Raises:
            RuntimeError, MemoryError: the device has not that much.
        """
        return DeviceMemory(self, num_bytes)

    def copy(self, *copies: RawCopy) -> tuple[CopyTime, ...]:
        """All copies have been made, started together; returns how long each took.

        Raises:
            ValueError: none, or sizes that cannot be.
        """
        times = (ProbeTimeStruct * len(copies))()
        self._call("lm_probe_run", (ProbeStruct * len(copies))(*map(_struct, copies)), len(copies), times)
        return tuple(CopyTime(time.copy_ns, time.issue_ns) for time in times)

    def _call(self, function: str, *arguments: Any) -> None:
        check(self._library, getattr(self._library, function)(self.ordinal, *arguments))


class CudaRegistrar:
    """Pins host memory for a CUDA device (`cudaHostRegister`), for every context of this process."""

    name = "cudaHostRegister"

    def __init__(self, device: Device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> None:
        """The range is pinned and mapped. The device is set first, so no context appears on another (fault 49).

        Raises:
            OSError: CUDA refuses; the message is CUDA's.
        """
        try:
            self._device._call("lm_host_register", address, num_bytes)
        except RuntimeError as refused:
            raise OSError(str(refused)) from refused

    def unregister(self, address: int, num_bytes: int) -> None:
        """The range is ordinary memory again."""
        self._device._call("lm_host_unregister", address)


def _struct(copy: RawCopy) -> ProbeStruct:
    batched = copy.method is ProbeMethod.BATCH
    for name in ("host_offsets", "device_offsets"):
        if batched and len(getattr(copy, name)) != copy.num_runs:
            raise ValueError(f"{name} must have {copy.num_runs} entries, one a run, got {len(getattr(copy, name))}")
    offsets = c_int64 * copy.num_runs
    return ProbeStruct(
        direction=_DIRECTIONS[copy.direction],
        method=copy.method,
        host=copy.host,
        device=copy.device,
        num_runs=copy.num_runs,
        run_bytes=copy.run_bytes,
        host_offsets=offsets(*copy.host_offsets) if batched else None,
        device_offsets=offsets(*copy.device_offsets) if batched else None,
        host_pitch=copy.host_pitch,
        device_pitch=copy.device_pitch,
        batch_entries=copy.batch_entries,
    )


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    return open_library(find_library(name), name, _SIGNATURES)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        found = []
    return found[0] if found else "cpu"
