"""Whether a load's request may run now: what has landed so far, put to a release policy."""

from __future__ import annotations

import time
from typing import Final

from lamella.connector.step_orders import LoadPlan, StepOrders
from lamella.cuda_ext.transfer import Arriving
from lamella.reference.release import ReleasePolicy, ReleaseView
from lamella.reference.slices import by_layer

_IDLE_STEP_NS: Final = 1_000_000
"""What an engine with nothing to compute waits between two looks. Source: vLLM 0.32, v1/engine/core.py."""


def may_run(
    policy: ReleasePolicy,
    plan: LoadPlan | None,
    transfer: Arriving,
    orders: StepOrders,
    num_layers: int,
    computed_ns: int,
    busy_ns: int,
) -> bool:
    """Whether the policy lets the request run in the next step.

    Args:
        policy: when a request may run.
        plan: how its load was planned; None: nobody has forecast its prefill, and the last step stands for it.
        transfer: of the load.
        orders: of the step that has just run.
        num_layers: of this stage.
        computed_ns: what that step took.
        busy_ns: how long the link has other loads to carry behind this one, as predicted.
    """
    progress = transfer.query()
    landed = transfer.slices[progress.landed - 1].end_layer if progress.landed else 0
    if landed < policy.layers_needed(num_layers):
        return False
    if not policy.needs_forecast:
        return True
    now_ns = time.monotonic_ns()
    times = transfer.timestamps_ns().landed_ns
    took_ns = max(1, times[progress.landed - 1] - progress.started_ns)  # so far, for `landed` layers
    landings = [
        times[index] if index < progress.landed else progress.started_ns + took_ns * part.end_layer // landed
        for index, part in enumerate(transfer.slices)
    ]
    arrivals = by_layer(landings, [part.num_layers for part in transfer.slices])
    weights = orders.weights
    step_ns = computed_ns if orders.num_tokens else _IDLE_STEP_NS
    compute_ns = computed_ns if plan is None else plan.compute_ns
    compute = (compute_ns // num_layers,) * num_layers
    price = None if weights is None else weights.price._replace(busy_ns=busy_ns)
    if weights is not None and weights.full:
        step_ns = 0  # released or not, the request is not in the next step
    view = ReleaseView(now_ns, arrivals, compute, 0, step_ns, orders.num_decoding, price)
    return policy.release_ns(view) <= now_ns
