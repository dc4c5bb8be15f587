"""A pytest plugin: engines have `before_batch`, and every load, parked or not, begins when a worker hears of its step.

    pytest -p with_vllm.before_batch tests/with_vllm/test_windows.py

Most windows are met by parked loads, which the setting leaves alone; begun as early as those that join their step, they
meet them here too. The CPU's runner is told of a step as the second runner is, first of all, and then once more by
itself. Engines in processes of their own have the setting, and no more.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["LAMELLA_TEST_BEFORE_BATCH"] = "1"


def pytest_collection_finish() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from lamella.connector.before_batch import told_first
    from lamella.connector.step_orders import StepOrders
    from lamella.connector.worker_loads import WorkerLoads

    def tell(metadata: Any) -> None:
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(metadata)

    def begin_all(loads: WorkerLoads, orders: StepOrders) -> None:
        for order in orders.loads:
            loads.begin(order, time.monotonic_ns())

    GPUModelRunner.execute_model = told_first(GPUModelRunner.execute_model, tell)
    WorkerLoads.begin_joining = begin_all  # type: ignore[method-assign]
