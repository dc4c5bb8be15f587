"""Loads that could be released and are left for a later step, so that prefills do not end together and late.

Prefills in one step end with the last of them. Where each takes long against what a step costs anyway, the engine had
better run one after another, and it runs what is released: one a step, in the order of the loads. What is not released
by `auto`, a prompt that hits nothing for example, comes when it likes; nobody waits for what came after him.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from lamella.connector.connector_metrics import Metrics
from lamella.connector.load_in_flight import Load
from lamella.connector.step_orders import StepOrders
from lamella.reference.release import waits_its_turn

_LONGEST_NS: Final = 5_000_000_000
"""A load this old is left for no later step."""


class Turns:
    """Whose turn it is; called on the model runner's thread.

    Args:
        metrics: where loads are counted that were left for a later step.
        clock_ns: a monotonic clock.
    """

    def __init__(self, metrics: Metrics, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._orders = StepOrders()
        self._released = 0  # in this step, however often it polls

    def step_begins(self, orders: StepOrders) -> None:
        """Whatever is released from now on joins the step after this one."""
        self._orders, self._released = orders, 0

    def is_left(self, load: Load, loads: Iterable[Load]) -> bool:
        """Whether the load, which may be released, is left for a later step; else it counts as released.

        Args:
            load: neither failed nor cancelled.
            loads: all that are open.
        """
        plan, weights, number = load.order.plan, self._orders.weights, load.order.number
        if plan is not None and weights is not None and self._clock_ns() - load.ordered_ns < _LONGEST_NS:
            prefills = self._released + sum(began < number for began in weights.prefills)
            behind = sum(one.order.number > number and not one.reported for one in loads)
            if waits_its_turn(plan.compute_ns, prefills, behind, weights.step_fixed_ns):
                if not load.was_left:
                    load.was_left = True
                    self._metrics.count("auto_turns")
                return True
        self._released += 1
        return False
