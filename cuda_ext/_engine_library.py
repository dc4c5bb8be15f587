"""The C ABI of the transfer engine, declared (`csrc/include/lamella/engine.h`)."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import struct
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from lamella.cuda_ext._library import (
    HostObjectsStruct,
    RequestStruct,
    SliceStruct,
    check,
    find_library,
    open_library,
)

_REAPER_WAKES_NS = 3_600_000_000_000
TIMEOUT, STOPPED = 4, 5
"""Statuses of the functions that wait."""

OnDrained = ctypes.CFUNCTYPE(None, c_void_p, c_uint64)
"""`on_drained` of a submission; called on the lane's native thread."""


class Fault(enum.IntEnum):
    """What tests plant: `lm_fault`."""

    ISSUED = 0
    """The window fails when it is issued."""

    COMPLETED = 1
    """The window fails when it completes."""

    LOST = 2
    """The device is lost before the window is issued."""

    STUCK = 3
    """The window never completes."""


class TransferStopped(RuntimeError):  # noqa: N818 - a state that was reached, not always somebody's mistake
    """The transfer failed or was cancelled; the message says why."""


class RatesStruct(Structure):
    """`lm_rates`."""

    _fields_ = (
        ("wire_bytes_per_s", c_double),
        ("gather_bytes_per_s", c_double),
        ("copy_2d_ns", c_int64),
        ("num_points", c_int64),
        ("run_bytes", POINTER(c_int64)),
        ("batch_bytes_per_s", POINTER(c_double)),
        ("strided_bytes_per_s", POINTER(c_double)),
    )


class EngineOptionsStruct(Structure):
    """`lm_engine_options`."""

    _fields_ = (
        ("device", c_int32),
        ("ordinal", c_int32),
        ("carrier", c_int32),
        ("num_layers", c_int32),
        ("staging_bytes", c_int64),
        ("window_bytes", c_int64),
        ("in_flight_bytes", c_int64),
        ("turn_bytes", c_int64),
        ("batch_entries", c_int32),
        ("kernel_ctas", c_int32),
        ("avoid_kernels", c_int32),
        ("batch_flags", c_int32),
        ("paced", c_int32),
        ("gather_factor_percent", c_int32),
        ("rates", RatesStruct),
    )


class SubmissionStruct(Structure):
    """`lm_submission`."""

    _fields_ = (
        ("cache", c_int32),
        ("direction", c_int32),
        ("method", c_int32),
        ("num_slices", c_int32),
        ("slices", POINTER(SliceStruct)),
        ("keys", POINTER(c_int64)),
        ("num_tokens", c_int64),
        ("skip_tokens", c_int64),
        ("null_block", c_int64),
        ("has_null_block", c_int32),
        ("num_groups", c_int32),
        ("block_ids", POINTER(POINTER(c_int32))),
        ("num_block_ids", POINTER(c_int32)),
        ("objects", HostObjectsStruct),
        ("fence_event", c_uint64),
        ("fence_stream", c_uint64),
        ("has_fence_stream", c_int32),
        ("generation", c_uint32),
        ("fence", c_void_p),
        ("deadline_ns", c_int64),
        ("token", c_uint64),
        ("board", c_uint64),
        ("on_drained", OnDrained),
        ("context", c_void_p),
    )


SUBMISSION = struct.Struct("@4i2Q3q2i2QQqQq2QiIQqQQQQ")
"""`lm_submission` to be packed at once: on the path of every request, a ctypes structure costs five times as much."""


def pack_submission(*values: Any) -> bytes:
    """The values of a `SubmissionStruct`, in its order, as it lies in memory.

    Raises:
        ValueError: one that its field cannot hold.
    """
    try:
        return SUBMISSION.pack(*values)
    except struct.error as mistake:
        num_tokens, skip_tokens, null_block = values[6:9]
        raise ValueError(
            f"num_tokens, skip_tokens and null_block are 32-bit integers, got {num_tokens!r}, {skip_tokens!r} and "
            f"{null_block!r}; board and generation are unsigned ({mistake})"
        ) from mistake


class ProgressStruct(Structure):
    """`lm_progress`."""

    _fields_ = (
        ("state", c_int32),
        ("num_slices", c_int32),
        ("recorded", c_int32),
        ("landed", c_int32),
        ("generation", c_uint32),
        ("method", c_int32),
        ("num_bytes", c_int64),
        ("submitted_ns", c_int64),
        ("started_ns", c_int64),
        ("num_copies", c_int64),
    )


class LaneStatusStruct(Structure):
    """`lm_lane_status`."""

    _fields_ = (
        ("thread_cpu_ns", c_int64),
        ("windows", c_int64),
        ("in_flight_bytes", c_int64),
        ("peak_in_flight_bytes", c_int64),
        ("last_key", c_int64),
        ("live", c_int64),
    )


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lm_engine_create": (c_int32, (POINTER(EngineOptionsStruct), POINTER(c_void_p))),
    "lm_engine_close": (c_int32, (c_void_p, c_int64)),
    "lm_engine_destroy": (None, (c_void_p,)),
    "lm_engine_register": (c_int32, (c_void_p, POINTER(RequestStruct), POINTER(c_int32))),
    "lm_engine_submit": (c_int32, (c_void_p, c_char_p, POINTER(c_void_p), POINTER(ProgressStruct))),
    "lm_engine_next_drained": (c_int32, (c_void_p, c_int64, POINTER(c_uint64))),
    "lm_engine_lane_status": (c_int32, (c_void_p, c_int32, POINTER(LaneStatusStruct))),
    "lm_engine_pending_word": (c_int32, (c_void_p, c_int32, POINTER(c_uint64))),
    "lm_engine_wait_pending": (c_int32, (c_void_p, c_int32, c_uint64)),
    "lm_engine_grant": (c_int32, (c_void_p, c_int32, c_int64)),
    "lm_engine_plant_fault": (c_int32, (c_void_p, c_int32, c_int64, c_int32)),
    "lm_transfer_progress": (c_int32, (c_void_p, POINTER(ProgressStruct))),
    "lm_transfer_wait": (c_int32, (c_void_p, c_int64)),
    "lm_transfer_wait_layer": (c_int32, (c_void_p, c_int32, c_uint64, c_int64, POINTER(c_int64))),
    "lm_transfer_wait_slices": (c_int32, (c_void_p, c_int32, c_int32, c_int64)),
    "lm_transfer_gate": (c_int32, (c_void_p, c_uint64, c_int64)),
    "lm_transfer_cancel": (c_int32, (c_void_p,)),
    "lm_transfer_timestamps": (c_int32, (c_void_p, POINTER(c_int64), POINTER(c_int64))),
    "lm_transfer_error": (c_int32, (c_void_p, POINTER(c_char), c_int64)),
    "lm_transfer_release": (None, (c_void_p,)),
    "lm_fence_create": (c_int32, (POINTER(c_void_p),)),
    "lm_fence_signal": (c_int32, (c_void_p,)),
    "lm_fence_release": (None, (c_void_p,)),
}


@functools.cache
def engine_library(name: str) -> ctypes.CDLL:
    """`lamella_cpu` or `lamella_cuda` with the engine's functions declared, loaded once.

    Raises:
        LibraryMissingError: it was not built here or cannot be loaded.
    """
    return open_library(find_library(name), name, SIGNATURES)


class NativeEngine:
    """An engine's handle: given back when nobody holds this object any more, so that no call can come after.

    Raises:
        ValueError, MemoryError, RuntimeError: as `_library.check`.
    """

    def __init__(self, library: ctypes.CDLL, options: EngineOptionsStruct) -> None:
        self._library = library
        self._process = os.getpid()
        self._handle = c_void_p()
        check_engine(library, library.lm_engine_create(options, ctypes.byref(self._handle)))

    @property
    def is_of_this_process(self) -> bool:
        """Whether its threads are here; a forked child has a copy without them."""
        return os.getpid() == self._process

    def call(self, function: str, *arguments: Any) -> None:
        """One of `SIGNATURES`, of this engine.

        Raises:
            RuntimeError: in a forked child, which would wait for threads that it has not.
            TimeoutError, TransferStopped, ValueError, MemoryError: as `check_engine`.
        """
        if not self.is_of_this_process:
            raise RuntimeError(f"this engine is of process {self._process}, which forked this one: create another here")
        check_engine(self._library, getattr(self._library, function)(self._handle, *arguments))

    def next_drained(self) -> int | None:
        """The token of a transfer that has drained and was not reported before; None: closed, and all were."""
        token = c_uint64()
        while True:
            try:
                self.call("lm_engine_next_drained", _REAPER_WAKES_NS, ctypes.byref(token))
            except TimeoutError:
                continue
            except TransferStopped:
                return None
            return token.value

    def __del__(self) -> None:
        if self._handle.value and self.is_of_this_process:
            self._library.lm_engine_destroy(self._handle)


def check_engine(library: ctypes.CDLL, status: int) -> None:
    """As `_library.check`, for functions that can also wait in vain.

    Raises:
        TimeoutError: the bound has passed.
        TransferStopped: the transfer, or the engine, has stopped.
        ValueError, MemoryError, RuntimeError: as `_library.check`.
    """
    if status == TIMEOUT:
        raise TimeoutError(library.lm_last_error().decode(errors="replace"))
    if status == STOPPED:
        raise TransferStopped(library.lm_last_error().decode(errors="replace"))
    check(library, status)
