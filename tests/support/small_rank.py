"""A rank of a `SmallEngine`: real loads, and which blocks they write."""

from __future__ import annotations

from typing import Any

from lamella.connector.connector_metrics import Metrics
from lamella.connector.safety_rules import ALL_RULES
from lamella.connector.step_orders import LoadOrder
from lamella.connector.worker_loads import WorkerLoads
from lamella.reference.release import First
from rank_loads import LAYERS, Moving
from small_blocks import BLOCK


class OneRank:
    """Loads on a rank, whose transfers land as the test says, and all at the end of a step that waited for them."""

    def __init__(self) -> None:
        self.moving: dict[int, Moving] = {}
        self.orders: dict[int, LoadOrder] = {}
        self.loads = WorkerLoads(self._submit, LAYERS, First(1), BLOCK, 16, 0.05, lambda: 0, ALL_RULES, Metrics())

    def _submit(self, order: LoadOrder) -> Any:
        self.orders[order.number] = order
        return lambda: self.moving.setdefault(order.number, Moving(landed=0))

    def writes(self, number: int) -> frozenset[int]:
        """Blocks that a load writes."""
        order = self.orders[number]
        return frozenset(order.blocks[0][order.skip_tokens // BLOCK :])

    def unlanded(self) -> list[int]:
        """Loads of which something may still come; those known to have failed are reported by block."""
        known = {number for number in self.orders if (load := self.loads.find(number)) is not None and load.failed}
        final = {number for number, one in self.moving.items() if one.state.is_final}
        return [number for number in self.orders if number not in known and number not in final]
