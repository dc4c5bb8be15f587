"""Simulated time: SimPy's event queue with integer nanoseconds and a fixed order within an instant."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any

import simpy
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
        self._queue = (
            self._environment._queue
        )  # what follows is SimPy 4's own order: (instant, priority, number, event)
        self._numbers = self._environment._eid
        self.now_ns = 0
        """The present instant; a plain attribute, because the innermost loops read it."""

    @property
    def environment(self) -> simpy.Environment:
        """For SimPy processes of your own beside the world; their time-outs are whole ns."""
        return self._environment

    def at(self, instant_ns: int, phase: Phase, action: Callable[[], Any]) -> None:
        """`action` will run at that instant, in that phase. What is scheduled cannot be taken back.

        Raises:
            ValueError: an instant in the past.
        """
        if instant_ns < self.now_ns:
            raise ValueError(f"instant {instant_ns} has passed; it is {self.now_ns}")
        # What Environment.schedule does, with the instant in place of a delay; SimPy pops it like any other event.
        heappush(self._queue, (instant_ns, phase, next(self._numbers), _Action(action)))  # type: ignore[misc]

    def soon(self, phase: Phase, action: Callable[[], Any]) -> None:
        """`action` runs in this instant, in that phase: at once if nothing that comes before it is left.

        Only as the last thing an action does, since what it schedules afterwards would come too late. It saves an
        event.
        """
        queue = self._queue
        if queue and queue[0][0] == self.now_ns and queue[0][1] < phase:
            self.at(self.now_ns, phase, action)
        else:
            action()

    def run(self) -> None:
        """Runs until nothing is scheduled any more."""
        environment, queue = self._environment, self._queue
        while queue:
            instant, _, _, event = heappop(queue)
            self.now_ns = environment._now = instant  # type: ignore[assignment]
            if type(event) is _Action:  # without the calls that SimPy makes for events that may fail or be awaited
                event.action()
            else:
                heappush(queue, (instant, -1, -1, event))  # type: ignore[misc]
                environment.step()


class _Action(Event):
    """A SimPy event that has been triggered and does one thing when its instant comes.

    `Clock.run` runs the action itself. SimPy's own `step`, which a process that shares the environment may reach, finds
    in `callbacks` what it expects.
    """

    __slots__ = ("action",)
    _ok = True
    _value = None

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    @property
    def callbacks(self) -> list[Callable[[Event], None]]:
        """The action, as SimPy calls it."""
        return [lambda _: self.action()]

    @callbacks.setter
    def callbacks(self, _: object) -> None:
        """SimPy marks an event as processed by taking its callbacks away; nobody asks an action for that."""
