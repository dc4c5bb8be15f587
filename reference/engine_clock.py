"""Until when an engine that schedules ahead computes what it has been given, as its scheduler can know it.

The scheduler sees when it makes a step and when a step's outputs are handed out, and nothing of the device. A step
begins there when the one before has ended, but not before the host has prepared it::

    ends(n) = max(ends(n - 1), made(n) + preparing) + length(n),     ends(n - 1) <= hand-out of n - 1

A hand-out waits for the launch of the next step as well, which computes meanwhile. So one that comes about when its
step should have ended is that end, and sets right what was forecast; a later one is the end of a launch.
"""

from __future__ import annotations

from typing import Final

_PASS_NS: Final = 1_300_000
_JOIN_NS_PER_TOKEN: Final = 250
"""What a step takes the host before its first layer, and for each token of a prompt that joins it. Source: 1.3 ms, and
4.0 for 16 thousand tokens, of vLLM 0.26 beside an H200: benchmarks/results/h200-2026-11-29-validation.json."""
JOINING_NS: Final = 5_000_000
"""Both, for prompts of about that length."""
ORDERING_NS: Final = 2_000_000
"""From the making of a step to the begin of a load that is ordered before the step's batch is prepared. Source: loads
of parked requests beside an idle engine began 4 to 5 ms sooner than loads that joined their step, in the recordings of
one request at a time with 16 thousand tokens under benchmarks/results."""
_ABOUT: Final = 0.25
"""A hand-out so much of a step's length behind its forecast end is still its end."""
_SMOOTHED: Final = 0.25
"""Weight of the latest decode step in the length that the next one is taken to have."""
_LONGEST: Final = 4
"""A decode step this many times as long as was expected counts as no longer."""


def joining_ns(prompt_tokens: int) -> int:
    """From the making of a step that such a prompt joins to its first layer, and to the begin of a load it brings.

    >>> joining_ns(16_128)
    5332000
    """
    return _PASS_NS + _JOIN_NS_PER_TOKEN * prompt_tokens


class EngineClock:
    """Steps as they are made and handed out, on one clock.

    Args:
        steps_ahead: whether the engine makes a step while the one before computes; else it computes nothing then.
        step_ns: what it is taken to be from one decode step to the next at first.
        now_ns: the instant.
        joining_ns: from the making of a step with prompts in it to its first layer.

    Raises:
        ValueError: a negative time.

    >>> clock = EngineClock(steps_ahead=True, step_ns=10, now_ns=0, joining_ns=5)
    >>> clock.step_made(100, 30, prefills=True)
    >>> clock.step_made(101, 8, prefills=False)
    >>> clock.handed_out(137)
    >>> clock.wait_ns(137)
    8
    """

    def __init__(self, *, steps_ahead: bool, step_ns: int, now_ns: int, joining_ns: int = JOINING_NS) -> None:
        if min(step_ns, joining_ns) < 0:
            raise ValueError(f"step_ns and joining_ns must be at least 0, got {step_ns} and {joining_ns}")
        self._steps_ahead = steps_ahead
        self._joining_ns = joining_ns
        self._step_ns = float(step_ns)
        self._made_ns = self._before_ns = now_ns  # the last step was made, and the one before it ends
        self._lasts_ns = self._before_lasts_ns = 0
        self._prefills = False
        self._decodes = self._decoded_before = False  # whether the step made last, and the one before, only decodes

    def step_made(self, now_ns: int, lasts_ns: int, *, prefills: bool) -> None:
        """A step was made that should compute for `lasts_ns`, 0: nothing; with prompts in it or without."""
        # Where steps are made ahead, the one before the last computed since then, while the last was launched: a launch
        # with prompts in it may wait for a load, and says nothing of the step that computes.
        computed = self._decodes and (self._decoded_before or not self._steps_ahead)
        if computed and self._lasts_ns and lasts_ns:
            took_ns = min(now_ns - self._made_ns, round(_LONGEST * self._step_ns))
            self._step_ns += _SMOOTHED * (took_ns - self._step_ns)
        self._before_ns, self._before_lasts_ns = self._ends_ns, self._lasts_ns
        self._made_ns, self._lasts_ns, self._prefills = now_ns, lasts_ns, prefills
        self._decodes, self._decoded_before = lasts_ns > 0 and not prefills, self._decodes

    def handed_out(self, now_ns: int) -> None:
        """The outputs of the step before the one made last are there."""
        if now_ns <= self._before_ns + _ABOUT * self._before_lasts_ns:
            self._before_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """How long the device still computes what was made."""
        return max(0, self._ends_ns - now_ns) if self._steps_ahead else 0

    @property
    def _ends_ns(self) -> int:
        """When the device is through with all that was made."""
        lasts_ns, begins_ns = self._lasts_ns, self._made_ns  # few calls: this runs in every step
        if not lasts_ns:
            return self._before_ns
        if self._prefills:
            begins_ns += self._joining_ns
        elif lasts_ns > self._step_ns:  # no step takes the device longer than it is to the next
            lasts_ns = int(self._step_ns)
        return lasts_ns + (begins_ns if begins_ns > self._before_ns else self._before_ns)

    @property
    def step_ns(self) -> int:
        """From one decode step to the next, as it was seen: as long as the longer of device and host takes for it."""
        return round(self._step_ns)

    @property
    def is_idle(self) -> bool:
        """Whether the step made last computes nothing."""
        return self._lasts_ns == 0
