"""A calibrated device: what was measured, where it holds, and what follows from it for copies and steps.

A profile is a value made of plain numbers. `profile_from_mapping` builds it from parsed JSON and is strict: an unknown
or missing key, a wrong type or an impossible value fails and names the key. Reading files is somebody else's business
(`lamella.sim.profiles`).

A profile answers for the regimes it covers and refuses the rest: `MeasuredCompute` raises outside its tables unless it
was built with `extrapolate=True`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lamella.reference.plausible import check_decode, check_prefill
from lamella.reference.records import read_record, write_record
from lamella.reference.tables import DecodeTable, MeasuredCompute, PrefillTable, check_nodes

SCHEMA_VERSION: Final = 1


class CopyMethod(Enum):
    """How the bytes of a slice cross the link."""

    COPY_2D = "copy_2d"
    """One strided 2-D copy: needs runs of one length at one stride."""
    BATCH_DMA = "batch_dma"
    """One batched call for many runs; each run costs host time."""
    SM_GATHER = "sm_gather"
    """A kernel reads the pinned memory: any run, but it takes the processors from whatever computes."""


class Graphs(Enum):
    """What steps that only decode replay: one graph each, or pieces, between which they can wait for a layer."""

    FULL = "full"
    PIECEWISE = "piecewise"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a part of the profile comes from.

    Attributes:
        covers: the parts of the profile, for example "prefill, decode".
        measured: date of the measurement, ISO 8601.
        program: what measured it, with its commit if it has one.
        system: device, driver and software.
        note: regime and reservations.
    """

    covers: str
    measured: str
    program: str
    system: str
    note: str


@dataclass(frozen=True, slots=True)
class Wire:
    """The link between host and device, with pinned memory.

    Attributes:
        h2d_bytes_per_s: to the device, nothing the other way.
        d2h_bytes_per_s: to the host, nothing the other way.
        both_bytes_per_s: each way while both are busy.
        slice_fixed_ns: what each further slice adds to a load.

    Raises:
        ValueError: a rate that is not positive, a negative time, or a direction faster with both busy than alone.
    """

    h2d_bytes_per_s: int
    d2h_bytes_per_s: int
    both_bytes_per_s: int
    slice_fixed_ns: int

    def __post_init__(self) -> None:
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.slice_fixed_ns < 0:
            raise ValueError(f"slice_fixed_ns must be at least 0, got {self.slice_fixed_ns}")
        if self.both_bytes_per_s > min(self.h2d_bytes_per_s, self.d2h_bytes_per_s):
            raise ValueError(
                f"both_bytes_per_s is a rate each way and cannot exceed a direction alone, got {self.both_bytes_per_s}"
            )


@dataclass(frozen=True, slots=True)
class CopyCurve:
    """Rate of one copy method by run length, and what it costs the compute beside it.

    Attributes:
        method: which one.
        run_bytes: nodes, rising.
        bytes_per_s: rate at each node.
        entry_ns: host time of each run, 0 if runs cost none.
        slowdown: by how much compute beside it takes longer: (least, most) measured, 0.1 for 10%.

    Raises:
        ValueError: nodes that do not rise, rates that do not match them, or a negative number.
    """

    method: CopyMethod
    run_bytes: tuple[int, ...]
    bytes_per_s: tuple[int, ...]
    entry_ns: int
    slowdown: tuple[float, float]

    def __post_init__(self) -> None:
        check_nodes("run_bytes", self.run_bytes, least=1)
        if len(self.bytes_per_s) != len(self.run_bytes):
            raise ValueError(f"bytes_per_s needs {len(self.run_bytes)} rates, got {len(self.bytes_per_s)}")
        if min(self.bytes_per_s) < 1 or self.entry_ns < 0:
            raise ValueError(f"rates must be positive and entry_ns at least 0, got {self.bytes_per_s}, {self.entry_ns}")
        least, most = self.slowdown
        if not 0 <= least <= most < math.inf:
            raise ValueError(f"slowdown must be two rising numbers, at least 0 and finite, got {least} and {most}")

    def rate(self, run_bytes: int) -> float:
        """Bytes per second with runs of that length: a power law between the nodes, the end values outside them.

        Raises:
            ValueError: a run below one byte.
        """
        if run_bytes < 1:
            raise ValueError(f"run_bytes must be at least 1, got {run_bytes}")
        if run_bytes <= self.run_bytes[0]:
            return float(self.bytes_per_s[0])
        if run_bytes >= self.run_bytes[-1]:
            return float(self.bytes_per_s[-1])
        i = bisect_right(self.run_bytes, run_bytes) - 1
        share = math.log(run_bytes / self.run_bytes[i]) / math.log(self.run_bytes[i + 1] / self.run_bytes[i])
        return float(self.bytes_per_s[i] * (self.bytes_per_s[i + 1] / self.bytes_per_s[i]) ** share)


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What the engine's host side adds to a request.

    Attributes:
        admission_ns: from a request's arrival at an idle engine until its step runs, tokens apart.
        admission_ns_per_1000_tokens: what each thousand prompt tokens adds: copying, hashing, block tables.
        idle_poll_ns: how often an idle engine with a waiting load looks.
        token_budget: most tokens in a step where the tables were measured.
        kv_capacity_tokens: what the device's KV cache holds.

    Raises:
        ValueError: a negative time, or a budget or capacity below 1.
    """

    admission_ns: int
    admission_ns_per_1000_tokens: int
    idle_poll_ns: int
    token_budget: int
    kv_capacity_tokens: int

    def __post_init__(self) -> None:
        for name in ("admission_ns", "admission_ns_per_1000_tokens", "idle_poll_ns"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("token_budget", "kv_capacity_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def admit_ns(self, prompt_tokens: int) -> int:
        """From arrival until the engine has the request in its queue."""
        return self.admission_ns + self.admission_ns_per_1000_tokens * prompt_tokens // 1000


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device, measured while it served one model.

    Attributes:
        name: file name without its ending.
        device: what it is.
        model: whose step times these are.
        num_layers: its layers.
        token_bytes: KV bytes of a token over all layers.
        sources: provenance of each part.
        wire: the link.
        copies: one curve a method.
        engine: host side and limits.
        prefill: step times of one prefill.
        decode: step times of decoding, by how graphs are replayed.

    Raises:
        ValueError: a count below 1, token_bytes that do not divide over the layers, no sources, a copy method or graph
            mode missing or twice.
    """

    name: str
    device: str
    model: str
    num_layers: int
    token_bytes: int
    sources: tuple[Source, ...]
    wire: Wire
    copies: tuple[CopyCurve, ...]
    engine: EngineTimes
    prefill: PrefillTable
    decode: Mapping[Graphs, DecodeTable]

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.token_bytes < 1 or self.token_bytes % self.num_layers:
            raise ValueError(
                f"token_bytes must be a positive multiple of num_layers, got {self.token_bytes} and {self.num_layers}"
            )
        if not self.sources:
            raise ValueError("sources must name at least one measurement, got none")
        if sorted(curve.method.value for curve in self.copies) != sorted(method.value for method in CopyMethod):
            raise ValueError(
                f"copies needs each of {[method.value for method in CopyMethod]} once, got "
                f"{[curve.method.value for curve in self.copies]}"
            )
        if set(self.decode) != set(Graphs):
            raise ValueError(f"decode needs full and piecewise, got {[mode.value for mode in self.decode]}")

    def covers(self, cached: int, new: int, output: int = 1) -> bool:
        """Whether a whole request is inside the tables: every step of its prefill, and its decoding to the end."""
        prompt = cached + new
        in_one_step = new <= self.engine.token_budget and self.prefill.covers(cached, new)
        a_step = 1 <= min(new, self.engine.token_budget) <= self.prefill.new_tokens[-1]
        in_several = 0 <= cached and a_step and prompt <= self.prefill.cached_tokens[-1]
        decoding = output == 1 or all(table.covers(1, prompt + output) for table in self.decode.values())
        return (in_one_step or in_several) and output >= 1 and decoding

    @property
    def max_batch(self) -> int:
        """The largest batch whose decoding was measured."""
        return min(table.batch[-1] for table in self.decode.values())

    def regimes(self) -> str:
        """What the tables cover, in one sentence."""
        contexts = min(table.context_tokens[-1] for table in self.decode.values())
        return (
            f"{self.model} on {self.device}: prefill of 1 .. {self.prefill.new_tokens[-1]:,} new tokens a step over "
            f"0 .. {self.prefill.cached_tokens[-1]:,} cached, decode of batches 1 .. {self.max_batch} at contexts up "
            f"to {contexts:,} tokens, {self.engine.kv_capacity_tokens:,} tokens of KV in all"
        )

    def curve(self, method: CopyMethod) -> CopyCurve:
        """The curve of that method."""
        return next(curve for curve in self.copies if curve.method is method)

    def compute(self, graphs: Graphs = Graphs.FULL, *, extrapolate: bool = False) -> MeasuredCompute:
        """The step times as a compute model."""
        return MeasuredCompute(self.prefill, self.decode[graphs], self.num_layers, extrapolate=extrapolate)


def choose_copy_method(profile: DeviceProfile, run_bytes: int, *, uniform_stride: bool, busy: bool) -> CopyMethod:
    """The method to copy runs of that length with.

    The fastest one that is allowed: a 2-D copy needs a uniform stride, an SM gather must have nothing beside it. A copy
    engine within 10% of the gather is preferred to it, since it leaves the processors alone, and what is beside a copy
    can change while it runs.

    Args:
        run_bytes: length of a contiguous run, at least 1.
        uniform_stride: whether all runs have one length and one stride on both sides.
        busy: whether the engine computes meanwhile.

    Source: the run lengths and the slowdowns in the profile.
    """
    engines = [CopyMethod.COPY_2D, CopyMethod.BATCH_DMA] if uniform_stride else [CopyMethod.BATCH_DMA]
    best = max(engines, key=lambda method: profile.curve(method).rate(run_bytes))
    gather = profile.curve(CopyMethod.SM_GATHER).rate(run_bytes)
    if not busy and profile.curve(best).rate(run_bytes) < 0.9 * gather:
        return CopyMethod.SM_GATHER
    return best


def profile_from_mapping(mapping: Mapping[str, object]) -> DeviceProfile:
    """The profile that parsed JSON describes.

    Raises:
        ValueError: an unknown or missing key, another schema version, an impossible value, or a step time that cannot
            be right beside its neighbours; the key is named.
        TypeError: a value of another type; the message names the key.
    """
    version = mapping.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"profile.schema_version must be {SCHEMA_VERSION}, got {version!r}; convert the file")
    rest = {key: value for key, value in mapping.items() if key != "schema_version"}
    profile = read_record(DeviceProfile, rest, "profile")
    check_prefill(profile.prefill, "profile.prefill")
    for graphs, table in profile.decode.items():
        check_decode(table, f"profile.decode.{graphs.value}")
    return profile


def profile_to_mapping(profile: DeviceProfile) -> dict[str, object]:
    """What `profile_from_mapping` reads back to an equal profile; JSON can hold it."""
    return {"schema_version": SCHEMA_VERSION, **write_record(profile)}
