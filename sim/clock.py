"""Simulated time: SimPy's event queue with integer nanoseconds and a fixed order within an instant."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

import simpy
from simpy.core import EmptySchedule
from simpy.events import Event


class Phase(IntEnum):
    """What comes first among things of the same instant.

    Copies land before the link chooses its next slice, and both before a step forms. An action may schedule others in
    the same instant, earlier phases included; they run before any later phase. That is why step formation needs no
    draining by repeated zero time-outs, which livelock as soon as two schedulers do it.
    """

    HAPPEN = 1
    """Arrivals, landings, ends of layers and steps."""
    CHOOSE = 2
    """A free link takes its next slice."""
    FORM = 3
    """A free engine polls and forms a step."""


class Clock:
    """A SimPy environment that runs actions at integer instants, by (instant, phase, order of scheduling).

    >>> clock = Clock()
    >>> clock.at(5, Phase.FORM, lambda: print("step at", clock.now_ns))
    >>> clock.at(5, Phase.HAPPEN, lambda: print("landing at", clock.now_ns))
    >>> clock.run()
    landing at 5
    step at 5
    """

    def __init__(self) -> None:
        self._environment = simpy.Environment(initial_time=0)

    @property
    def now_ns(self) -> int:
        """The present instant."""
        return cast("int", self._environment._now)  # SimPy's own property costs a call more in the innermost loop

    def at(self, instant_ns: int, phase: Phase, action: Callable[[], Any]) -> None:
        """`action` will run at that instant, in that phase. What is scheduled cannot be taken back.

        Raises:
            ValueError: an instant in the past.
        """
        delay = instant_ns - self._environment._now
        if delay < 0:
            raise ValueError(f"instant {instant_ns} has passed; it is {self._environment.now}")
        event = _Action(self._environment, action)
        self._environment.schedule(event, phase, delay)  # type: ignore[arg-type]  # EventPriority(phase) is phase

    def soon(self, phase: Phase, action: Callable[[], Any]) -> None:
        """`action` runs in this instant, in that phase: at once if nothing that comes before it is left.

        Only as the last thing an action does, since what it schedules afterwards would come too late. It saves an
        event.
        """
        environment = self._environment
        queue = environment._queue
        if queue and queue[0][:2] < (environment._now, phase):
            self.at(self.now_ns, phase, action)
        else:
            action()

    def run(self) -> None:
        """Runs until nothing is scheduled any more."""
        step = self._environment.step
        try:
            while True:
                step()
        except EmptySchedule:
            return


class _Action(Event):
    """A SimPy event that has been triggered and does one thing when its instant comes."""

    __slots__ = ("_action",)

    def __init__(self, environment: simpy.Environment, action: Callable[[], Any]) -> None:
        self.env = environment
        self.callbacks = [self._run]
        self._ok = True
        self._value = None
        self._action = action

    def _run(self, _: Event) -> None:
        self._action()
