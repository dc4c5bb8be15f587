"""What is observed of a device while it serves, as factors on the times of its profile.

A correction moves towards what is observed and never beyond it, so it settles at a constant truth without swinging
about it, whatever the profile said. Contract: AUTO-3 of `lamella.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

CORRECTION_RANGE: Final = 32.0
"""A device is taken to be at most so many times faster or slower than its profile."""
LARGEST_JUMP: Final = 4.0
"""One observation counts for at most this factor, so that a hiccup is not believed."""
SETTLED_GAIN: Final = 0.125
"""Weight of an observation once several have been seen; the n-th before that has 1/n."""

FIRST_PROBE: Final = 32
"""So many choices in a row against loading, and the next is overruled."""
MOST_BETWEEN_PROBES: Final = 1024
"""However long the row, a probe comes after so many."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What was observed of the device, as factors on the profile's times; 2 for twice as slow.

    Attributes:
        wire: on the time of bytes on the link.
        steps: on the computing time of steps.
        wire_seen, steps_seen: observations behind each.

    Raises:
        ValueError: a factor outside 1/32 .. 32, or a negative count.

    >>> Correction().after_load(1_000, 2_000).wire
    2.0
    """

    wire: float = 1.0
    steps: float = 1.0
    wire_seen: int = 0
    steps_seen: int = 0

    def __post_init__(self) -> None:
        for name in ("wire", "steps"):
            if not 1 / CORRECTION_RANGE <= getattr(self, name) <= CORRECTION_RANGE:
                raise ValueError(f"{name} must be between 1/32 and 32, got {getattr(self, name)}")
        if min(self.wire_seen, self.steps_seen) < 0:
            raise ValueError(f"observations must be at least 0, got {self.wire_seen} and {self.steps_seen}")

    def after_load(self, profile_ns: int, measured_ns: int) -> Correction:
        """With one more load, for which the profile alone says `profile_ns`; ignored if a time is below 1."""
        if min(profile_ns, measured_ns) < 1:
            return self
        wire = _moved(self.wire, measured_ns / profile_ns, self.wire_seen)
        return replace(self, wire=wire, wire_seen=self.wire_seen + 1)

    def after_steps(self, profile_ns: int, measured_ns: int) -> Correction:
        """With one more step, or several together, as `after_load`."""
        if min(profile_ns, measured_ns) < 1:
            return self
        steps = _moved(self.steps, measured_ns / profile_ns, self.steps_seen)
        return replace(self, steps=steps, steps_seen=self.steps_seen + 1)


def time_on_link(
    part_bytes: Sequence[int], started_ns: int, landed_ns: Sequence[int], before_ns: int
) -> tuple[int, int, int]:
    """(slices, bytes, ns): the part of a load that says what the link takes, and how long it took.

    A load had the link from its first slice's landing, or from the landing of the load before it: before that it may
    have waited for blocks that were still being read. One of a single slice counts from its begin. Slices that were
    seen to land with the first, by somebody who looks now and then, had landed before.

    Args:
        part_bytes: of each slice.
        started_ns: the load's begin.
        landed_ns: each slice's landing, never falling.
        before_ns: the landing of the load before.
    """
    begun_ns = started_ns if len(part_bytes) == 1 else landed_ns[0]
    counted = [num_bytes for num_bytes, at_ns in zip(part_bytes, landed_ns, strict=True) if at_ns > begun_ns]
    return len(counted), sum(counted), landed_ns[-1] - max(begun_ns, before_ns)


def _moved(factor: float, observed: float, seen: int) -> float:
    """The factor a share of the way to the observed one, in proportions: never beyond it (AUTO-3)."""
    bounded = min(max(observed / factor, 1 / LARGEST_JUMP), LARGEST_JUMP)
    gain = max(SETTLED_GAIN, 1 / (seen + 1))
    return min(max(factor * math.pow(bounded, gain), 1 / CORRECTION_RANGE), CORRECTION_RANGE)


class Probes:
    """Says when a hit should be loaded although that seems to cost more than computing it again.

    A link that is never used is never observed, so a profile that is too slow would stay believed. After
    `FIRST_PROBE` choices against loading in a row, one is overruled; every further one of the row takes twice as many,
    so that a belief which holds costs less and less.

    >>> probes = Probes()
    >>> [number for number in range(200) if probes.overrules(off=True)]
    [31, 95]
    """

    def __init__(self) -> None:
        self._row = 0
        self._next = FIRST_PROBE

    def overrules(self, *, off: bool) -> bool:
        """Whether this choice is to be overruled; `off`: it was against loading."""
        if not off:
            self._row, self._next = 0, FIRST_PROBE
            return False
        self._row += 1
        if self._row < self._next:
            return False
        self._row = 0
        self._next = min(2 * self._next, MOST_BETWEEN_PROBES)
        return True
