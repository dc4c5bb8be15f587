"""A transfer in flight, as its owner sees it."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from lamella.cuda_ext._engine_library import ProgressStruct, TransferStopped, check_engine
from lamella.reference.slices import Slice
from lamella.reference.whole import MOST_SECONDS

_NS = 1_000_000_000


class CopyMethod(enum.Enum):
    """How a transfer's bytes move."""

    AUTO = 0
    """The engine picks by its calibrated rates."""
    STAGED_BATCH = 1
    """Batched copies into the staging ring, then one scatter a window."""
    STAGED_2D = 2
    """As STAGED_BATCH, with rows of one stride merged into 2-D copies."""
    DIRECT_BATCH = 3
    """Batched copies straight into blocks, without a kernel; runs must match the engine's blocks."""
    GATHER = 4
    """A kernel reads mapped host memory. On the CPU device: one pass without staging."""


class TransferState(enum.Enum):
    """Where a transfer is; from LANDED on nothing of it is in flight (SAFE-1)."""

    QUEUED = 0
    RUNNING = 1
    LANDED = 2
    CANCELLED = 3
    FAILED = 4

    @property
    def is_final(self) -> bool:
        """Whether objects and blocks are the caller's own again."""
        return self.value >= TransferState.LANDED.value


class Progress(NamedTuple):
    """A transfer at one moment. Times are of `time.monotonic_ns`; `started_ns` is 0 before the first window."""

    state: TransferState
    recorded: int
    landed: int
    method: CopyMethod
    num_copies: int
    submitted_ns: int
    started_ns: int


class SliceTimes(NamedTuple):
    """When each slice was recorded and landed, by `time.monotonic_ns`; 0 where it has not happened."""

    recorded_ns: tuple[int, ...]
    landed_ns: tuple[int, ...]


class Arriving(Protocol):
    """A transfer that somebody waits for, whether this process moves it (`Transfer`) or another one."""

    @property
    def slices(self) -> Sequence[Slice]:
        """The units in which it moves, in order."""

    @property
    def num_slices(self) -> int:
        """Units in which it moves."""

    @property
    def num_bytes(self) -> int:
        """Bytes it moves in all; 0 where that is known only at its end, and this is not it."""

    @property
    def state(self) -> TransferState:
        """Where it is now."""

    @property
    def error(self) -> str:
        """Why it failed or was cancelled; "" otherwise."""

    def query(self) -> Progress:
        """Its progress now; never blocks."""

    def wait_layer(self, layer: int, stream: int = 0, timeout_s: float = 30.0) -> int:
        """As `Transfer.wait_layer`."""

    def wait_final(self, timeout_s: float) -> TransferState:
        """As `Transfer.wait_final`."""

    def timestamps_ns(self) -> SliceTimes:
        """As `Transfer.timestamps_ns`."""

    def cancel(self) -> None:
        """As `Transfer.cancel`."""


class Transfer:
    """A handle of one transfer; safe to use from several threads.

    Dropping it changes nothing: the transfer goes on, and keeps what it was given until it has drained (XFER-2).
    """

    def __init__(
        self, library: ctypes.CDLL, handle: ctypes.c_void_p, slices: Sequence[Slice], queued: ProgressStruct
    ) -> None:
        self._library = library
        self._handle = handle
        self.slices: Sequence[Slice] = tuple(slices)
        """The units in which it moves, in order."""
        self.num_bytes: int = queued.num_bytes
        """Bytes it moves in all."""
        self.generation: int = queued.generation
        """Which use of its count word this is (SAFE-2)."""
        self._landed = range(0)  # layers that have landed for certain

    @property
    def num_slices(self) -> int:
        """Units in which it moves."""
        return len(self.slices)

    def query(self) -> Progress:
        """Its progress now; never blocks."""
        p = self._read()
        return Progress(
            TransferState(p.state),
            p.recorded,
            p.landed,
            CopyMethod(p.method),
            p.num_copies,
            p.submitted_ns,
            p.started_ns,
        )

    @property
    def state(self) -> TransferState:
        """Where it is now."""
        return TransferState(self._read().state)

    def recorded(self) -> int:
        """Slices enqueued at the device with their event."""
        return int(self._read().recorded)

    def landed(self) -> int:
        """Slices whose bytes are all in place."""
        return int(self._read().landed)

    def wait(self, timeout_s: float) -> None:
        """The transfer has landed.

        Raises:
            TimeoutError: it has not within the bound; it goes on.
            TransferStopped: it failed or was cancelled; nothing of it is in flight.
        """
        state = self.wait_final(timeout_s)
        if state is not TransferState.LANDED:
            raise TransferStopped(self.error or f"the transfer was {state.name.lower()}")

    def wait_final(self, timeout_s: float) -> TransferState:
        """The state it ended in: landed, cancelled or failed.

        Raises:
            TimeoutError: it is not final within the bound.
        """
        self._check(self._library.lm_transfer_wait(self._handle, timeout_ns(timeout_s)))
        return self.state

    def wait_recorded(self, slices: int, timeout_s: float) -> None:
        """That many slices are recorded.

        Raises:
            ValueError: more slices than there are.
            TimeoutError, TransferStopped: as `wait`.
        """
        self._check(self._library.lm_transfer_wait_slices(self._handle, slices, 0, timeout_ns(timeout_s)))

    def wait_landed(self, slices: int, timeout_s: float) -> None:
        """That many slices are in place.

        Raises:
            ValueError: more slices than there are.
            TimeoutError, TransferStopped: as `wait`.
        """
        self._check(self._library.lm_transfer_wait_slices(self._handle, slices, 1, timeout_ns(timeout_s)))

    def wait_layer(self, layer: int, stream: int = 0, timeout_s: float = 30.0) -> int:
        """Work given to `stream` from now on runs after the layer has landed; returns the host's waiting time in ns.

        One wait a slice is enough: a slice's layers land together, and later slices after earlier ones. On the CPU
        device the caller is its own stream, so this returns when the layer has landed.

        Args:
            layer: of the stage, within the transfer's slices.
            stream: `cudaStream_t` as an integer; the CPU device ignores it.
            timeout_s: bound on waiting on the host for the slice to be recorded (event carrier), or landed (CPU).

        Raises:
            ValueError: no such layer.
            TimeoutError: the slice was not recorded within the bound.
            TransferStopped: it failed or was cancelled before the layer landed.
        """
        if layer in self._landed:
            return 0
        landed = self._read().landed  # a look is cheaper than a wait, and for a late reader covers many layers
        if landed:
            self._landed = range(self.slices[0].first_layer, self.slices[landed - 1].end_layer)
            if layer in self._landed:
                return 0
        waited = ctypes.c_int64()
        status = self._library.lm_transfer_wait_layer(
            self._handle, layer, stream, timeout_ns(timeout_s), ctypes.byref(waited)
        )
        if status:
            self._check(status)
        return waited.value

    def gate(self, stream: int, timeout_s: float) -> None:
        """As `GraphWaits.gate`."""
        self._check(self._library.lm_transfer_gate(self._handle, stream, timeout_ns(timeout_s)))

    def cancel(self) -> None:
        """Nothing more of it is issued. It is final, CANCELLED, once what is in flight has drained; LANDED if that was
        all of it. A final transfer stays as it is.
        """  # noqa: D205 - one sentence more than a line
        self._check(self._library.lm_transfer_cancel(self._handle))

    @property
    def error(self) -> str:
        """Why it failed or was cancelled; "" otherwise."""
        text = ctypes.create_string_buffer(1024)
        self._check(self._library.lm_transfer_error(self._handle, text, len(text)))
        return text.value.decode(errors="replace")

    def timestamps_ns(self) -> SliceTimes:
        """When each slice was recorded, and when it landed by the device's own clock."""
        recorded = (ctypes.c_int64 * self.num_slices)()
        landed = (ctypes.c_int64 * self.num_slices)()
        self._check(self._library.lm_transfer_timestamps(self._handle, recorded, landed))
        return SliceTimes(tuple(recorded), tuple(landed))

    def _read(self) -> ProgressStruct:
        progress = ProgressStruct()
        self._check(self._library.lm_transfer_progress(self._handle, ctypes.byref(progress)))
        return progress

    def _check(self, status: int) -> None:
        check_engine(self._library, status)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.lm_transfer_release(self._handle)


def timeout_ns(timeout_s: float) -> int:
    """A bound in ns.

    Raises:
        ValueError: below 0, no number, or beyond what a clock of 64 bits of ns is good for.
    """
    if not 0 <= timeout_s <= MOST_SECONDS:
        raise ValueError(f"timeout_s must be between 0 and {MOST_SECONDS:,}, got {timeout_s}")
    return int(timeout_s * _NS)
