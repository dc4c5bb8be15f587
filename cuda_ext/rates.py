"""How fast a device copies, as the engine's method chooser takes it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from lamella.cuda_ext._engine_library import RatesStruct
from lamella.reference.profile import CopyMethod as ProfileMethod
from lamella.reference.profile import DeviceProfile

COPY_2D_NS: Final = 4_000
"""Host time of enqueueing one 2-D copy."""


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Rates to choose a copy method by.

    Args:
        wire_bytes_per_s: one long pinned copy.
        gather_bytes_per_s: a kernel that reads mapped host memory.
        run_bytes: run lengths, ascending.
        batch_bytes_per_s: batched copies of runs of each of these lengths.
        strided_bytes_per_s: 2-D copies of rows of each of these lengths.
        copy_2d_ns: host time of one 2-D copy.

    Raises:
        ValueError: no points, lengths that do not ascend, or a rate that is not positive.
    """

    wire_bytes_per_s: float
    gather_bytes_per_s: float
    run_bytes: tuple[int, ...]
    batch_bytes_per_s: tuple[float, ...]
    strided_bytes_per_s: tuple[float, ...]
    copy_2d_ns: int = COPY_2D_NS

    def __post_init__(self) -> None:
        if not self.run_bytes:
            raise ValueError("run_bytes needs at least one length, got none")
        for name in ("batch_bytes_per_s", "strided_bytes_per_s"):
            if len(getattr(self, name)) != len(self.run_bytes):
                raise ValueError(f"{name} needs {len(self.run_bytes)} rates, got {len(getattr(self, name))}")
        if list(self.run_bytes) != sorted(set(self.run_bytes)) or self.run_bytes[0] < 1:
            raise ValueError(f"run_bytes must ascend from 1, got {self.run_bytes}")
        rates = (
            self.wire_bytes_per_s,
            self.gather_bytes_per_s,
            *self.batch_bytes_per_s,
            *self.strided_bytes_per_s,
        )
        if min(rates) <= 0:
            raise ValueError(f"rates must be positive, got {rates}")

    @classmethod
    def from_profile(cls, profile: DeviceProfile) -> EngineRates:
        """What a calibrated device says."""
        batch = profile.curve(ProfileMethod.BATCH_DMA)
        strided = profile.curve(ProfileMethod.COPY_2D)
        gather = profile.curve(ProfileMethod.SM_GATHER)
        return cls(
            wire_bytes_per_s=float(profile.wire.h2d_bytes_per_s),
            gather_bytes_per_s=float(max(gather.bytes_per_s)),
            run_bytes=tuple(batch.run_bytes),
            batch_bytes_per_s=tuple(float(rate) for rate in batch.bytes_per_s),
            strided_bytes_per_s=tuple(strided.rate(run) for run in batch.run_bytes),
        )

    def to_struct(self) -> tuple[RatesStruct, tuple[object, ...]]:
        """The C structure, and what must stay alive while it is read."""
        runs = (ctypes.c_int64 * len(self.run_bytes))(*self.run_bytes)
        batch = (ctypes.c_double * len(self.batch_bytes_per_s))(*self.batch_bytes_per_s)
        strided = (ctypes.c_double * len(self.strided_bytes_per_s))(*self.strided_bytes_per_s)
        struct = RatesStruct(
            wire_bytes_per_s=self.wire_bytes_per_s,
            gather_bytes_per_s=self.gather_bytes_per_s,
            copy_2d_ns=self.copy_2d_ns,
            num_points=len(self.run_bytes),
            run_bytes=runs,
            batch_bytes_per_s=batch,
            strided_bytes_per_s=strided,
        )
        return struct, (runs, batch, strided)


H200_RATES: Final = EngineRates(
    wire_bytes_per_s=55.4e9,
    gather_bytes_per_s=48.5e9,
    run_bytes=(2048, 4096, 8192, 16384, 32768, 65536, 131072, 524288),
    batch_bytes_per_s=(2.4e9, 4.8e9, 9.4e9, 18.5e9, 36.5e9, 52.0e9, 53.3e9, 54.4e9),
    strided_bytes_per_s=(30.0e9, 36.0e9, 40.0e9, 43.0e9, 50.0e9, 53.0e9, 54.0e9, 55.0e9),
)
"""One H200 on PCIe 5 x16, CUDA 13.0, driver 580, batches of 64 entries.

Source: measurement of 2026-11-29, medians; another machine of the kind took twice as long an entry.
"""
