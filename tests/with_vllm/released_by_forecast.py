"""A pytest plugin: whoever is parked is released as early as the scheduler side can, whatever has landed.

    pytest -p with_vllm.ahead_on_cpu -p with_vllm.released_by_forecast tests/with_vllm/test_windows.py

`auto` releases so by forecast, and seldom before anything has landed. Here every load that an earlier step has begun is
released at the next hand-out, so that every window is met by steps that must wait for all of it.
"""

from __future__ import annotations

from lamella.connector.vllm_scheduler import SchedulerSide


def _everybody(side: SchedulerSide) -> list[str]:
    new = {order.number for order in side._new_loads}
    return [name for name, number in side.book._parked.items() if number not in new]


SchedulerSide._may_join = _everybody  # type: ignore[method-assign]
SchedulerSide._wants_hand_outs = property(lambda side: bool(side.book._parked))  # type: ignore[method-assign, assignment]
