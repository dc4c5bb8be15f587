"""Until when the engine computes what it has been given, as its scheduler can know it."""

from __future__ import annotations

from typing import Final

_SMOOTHED: Final = 0.25
"""Weight of the latest decode step in the length that the next one is taken to have."""
_LONGEST: Final = 4
"""A decode step this many times as long as was expected counts as no longer."""


class EngineClock:
    """Steps as they are made and handed out, on one clock.

    An engine that schedules ahead makes a step while the one before computes, and makes the next when that one's
    outputs have been handed out: the step made last begins on the device then, or at once where there was none before.

    Args:
        steps_ahead: whether the engine does that; one that does not computes nothing while it schedules.
        step_ns: what a decode step is taken to last at first.
        now_ns: the instant.
    """

    def __init__(self, *, steps_ahead: bool, step_ns: int, now_ns: int) -> None:
        self._steps_ahead = steps_ahead
        self._step_ns = float(step_ns)
        self._made_ns = self._handed_out_ns = now_ns
        self._expected_ns = 0
        self._decodes = self._decoded_before = False  # whether the step made last, and the one before, only decodes
        self._is_empty = True

    def step_made(self, now_ns: int, expected_ns: int, *, is_empty: bool) -> None:
        """A step was made that should compute for `expected_ns`; 0: it only decodes, or computes nothing."""
        computed = self._decoded_before if self._steps_ahead else self._decodes  # what the engine did since the last
        if computed and not (self._is_empty or is_empty):
            took_ns = min(now_ns - self._made_ns, round(_LONGEST * self._step_ns))
            self._step_ns += _SMOOTHED * (took_ns - self._step_ns)
        self._made_ns, self._expected_ns, self._is_empty = now_ns, expected_ns, is_empty
        self._decodes, self._decoded_before = not (expected_ns or is_empty), self._decodes

    def handed_out(self, now_ns: int) -> None:
        """The outputs of the step before the one made last are there."""
        self._handed_out_ns = now_ns

    def wait_ns(self, now_ns: int, correction: float) -> int:
        """How long the device still computes what was made, by expected times multiplied by the correction."""
        if not self._steps_ahead or self._is_empty:
            return 0
        lasts_ns = round(self._expected_ns * correction) or self.step_ns
        return max(0, max(self._made_ns, self._handed_out_ns) + lasts_ns - now_ns)

    @property
    def step_ns(self) -> int:
        """A decode step's length."""
        return round(self._step_ns)

    @property
    def is_idle(self) -> bool:
        """Whether the step made last computes nothing."""
        return self._is_empty
