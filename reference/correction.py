"""What is observed of a device while it serves, as factors on the times of its profile.

A correction moves towards what is observed and never beyond it, so it settles at a constant truth without swinging
about it, whatever the profile said. Contract: AUTO-3 of `lamella.reference`.

A step takes what its tokens take to compute, and no less than the host takes to launch it::

    step = max(least, steps * profile)

Of steps that take clearly longer than that, the longest tell the factor, and the others the least. With one factor for
both, short steps would make long ones look longer than they are. The first that tells the least may have been held up,
which the second shows.
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
SHORT: Final = 0.75
"""A step that by the profile is shorter than this share of the longest one seen may be as long as its launch. Source:
prefills of 256 tokens on an H200 take 21 ms where the profile says 11, and of 2,048 78 for 72."""
CLEARLY: Final = 1.15
"""And is taken for one if it is this many times as long as expected; less is scatter."""
_FORGETS: Final = 0.99
"""What the longest step seen counts for after one more: the device may serve other requests now."""
HELD_UP: Final = 3.0
"""The first step that told the least was held up if it took more than so many times as long as the second."""
_DOWN_GAIN: Final = 0.5
"""Weight of a step that took less than what no step should."""
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
        least_ns: no step with a prompt in it takes less.
        least_seen: observations behind that.
        longest_ns: by the profile, of the steps seen; less of it the longer ago.

    Raises:
        ValueError: a factor outside 1/32 .. 32, or a negative count or time.

    >>> Correction().after_load(1_000, 2_000).wire
    2.0
    >>> Correction().after_steps(70_000, 70_000).after_steps(11_000, 21_000).step_ns(12_000)
    21000.0
    """

    wire: float = 1.0
    steps: float = 1.0
    wire_seen: int = 0
    steps_seen: int = 0
    least_ns: float = 0.0
    least_seen: int = 0
    longest_ns: float = 0.0

    def __post_init__(self) -> None:
        for name in ("wire", "steps"):
            if not 1 / CORRECTION_RANGE <= getattr(self, name) <= CORRECTION_RANGE:
                raise ValueError(f"{name} must be between 1/32 and 32, got {getattr(self, name)}")
        if min(self.wire_seen, self.steps_seen, self.least_seen) < 0:
            raise ValueError(
                f"observations must be at least 0, got {self.wire_seen}, {self.steps_seen} and {self.least_seen}"
            )
        if not 0 <= min(self.least_ns, self.longest_ns) <= max(self.least_ns, self.longest_ns) < math.inf:
            raise ValueError(f"times must be at least 0 and finite, got {self.least_ns} and {self.longest_ns}")

    def after_load(self, profile_ns: int, measured_ns: int) -> Correction:
        """With one more load, for which the profile alone says `profile_ns`; ignored if a time is below 1."""
        if min(profile_ns, measured_ns) < 1:
            return self
        wire = _moved(self.wire, measured_ns / profile_ns, self.wire_seen)
        return replace(self, wire=wire, wire_seen=self.wire_seen + 1)

    def after_bounded_load(self, profile_ns: int, least_ns: int, most_ns: int) -> Correction:
        """With one more load of which it is known only that it took no less and no more than so long.

        It teaches nothing while what is expected lies between the two, or beyond one of them by no more than scatter.
        """
        expected_ns = self.wire * profile_ns
        if expected_ns > CLEARLY * most_ns:
            return self.after_load(profile_ns, most_ns)
        return self.after_load(profile_ns, least_ns) if CLEARLY * expected_ns < least_ns else self

    def step_ns(self, profile_ns: float) -> float:
        """What a step takes for which the profile alone says `profile_ns`."""
        return max(self.least_ns, self.steps * profile_ns)

    def after_steps(self, profile_ns: int, measured_ns: int, count: int = 1) -> Correction:
        """With one more step, or `count` together, as `after_load`."""
        if min(profile_ns, measured_ns, count) < 1:
            return self
        one_ns, took_ns = profile_ns / count, measured_ns / count
        expected_ns = self.step_ns(one_ns)
        longest_ns = max(one_ns, _FORGETS * self.longest_ns)
        is_slow = took_ns > CLEARLY * expected_ns
        if one_ns < SHORT * longest_ns if is_slow else self.steps * one_ns < self.least_ns:
            least_ns = self._least_after(took_ns, expected_ns)
            return replace(self, least_ns=least_ns, least_seen=self.least_seen + 1, longest_ns=longest_ns)
        steps = _moved(self.steps, took_ns / one_ns, self.steps_seen)
        return replace(self, steps=steps, steps_seen=self.steps_seen + 1, longest_ns=longest_ns)

    def _least_after(self, took_ns: float, expected_ns: float) -> float:
        """The least with one more step that tells it; once known, it alone is what moves."""
        if self.least_seen == 1 and HELD_UP * took_ns < self.least_ns:
            return took_ns
        known_ns = self.least_ns if self.least_seen else expected_ns
        return _towards(known_ns, took_ns, _DOWN_GAIN if took_ns < known_ns else _gain(self.least_seen))


def time_on_link(
    part_bytes: Sequence[int], started_ns: int | None, landed_ns: Sequence[int], before_ns: int
) -> tuple[int, int, int]:
    """(slices, bytes, ns): the part of a load that says what the link takes, and how long it took.

    A load had the link from its first slice's landing, or from the landing of the load before it: before that it may
    have waited for blocks that were still being read. One of a single slice counts from its begin, where the link could
    begin then, and else says nothing: it would teach that the link is as slow as the reader of its blocks. Slices that
    were seen to land with the first, by somebody who looks now and then, had landed before.

    Args:
        part_bytes: of each slice.
        started_ns: the load's begin; None if it may have waited after that for something other than a load, or if its
            landing was merely looked for.
        landed_ns: each slice's landing, never falling.
        before_ns: the landing of the load before.
    """
    begun_ns = landed_ns[0]
    if len(part_bytes) == 1 and started_ns is not None:
        begun_ns = started_ns
    counted = [num_bytes for num_bytes, at_ns in zip(part_bytes, landed_ns, strict=True) if at_ns > begun_ns]
    return len(counted), sum(counted), landed_ns[-1] - max(begun_ns, before_ns)


def _moved(factor: float, observed: float, seen: int) -> float:
    """The factor after one more observation, within its range."""
    return min(max(_towards(factor, observed, _gain(seen)), 1 / CORRECTION_RANGE), CORRECTION_RANGE)


def _towards(believed: float, observed: float, gain: float) -> float:
    """A share of the way to what was observed, in proportions: never beyond it (AUTO-3)."""
    return believed * math.pow(min(max(observed / believed, 1 / LARGEST_JUMP), LARGEST_JUMP), gain)


def _gain(seen: int) -> float:
    """Weight of one more observation."""
    return max(SETTLED_GAIN, 1 / (seen + 1))


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
