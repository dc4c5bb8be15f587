"""One load on its way on a rank, and what a look at all of them finds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from lamella.connector.connector_metrics import Metrics
from lamella.connector.observations import Readers
from lamella.connector.step_orders import Ended, LoadOrder, StepOrders
from lamella.cuda_ext.transfer import Arriving


class LoadObserver(Protocol):
    """Who measures what loads take on the link."""

    def load_ordered(self) -> Readers:
        """Who computes, and may read its blocks, when a load has just been ordered."""

    def load_landed(
        self, part_bytes: Sequence[int], started_ns: int, landed_ns: Sequence[int], readers: Readers
    ) -> None:
        """A load has landed: its slices' bytes and landings, its begin, and for whom it may have waited behind that."""


@dataclass(slots=True)
class Load:
    """One load on this rank.

    Attributes:
        blocks: of the first KV cache group, which it writes.
        released: it was reported received, its request joined the step, or the scheduler side let it run; only then can
            anybody read its blocks.
        ready_layer: layers before it need no further wait in this step.
        failed: why, or "".
        waited_whole: this step began when all of it had landed.
        readers: whoever may have held it up.
        was_left: it could have been released, and was left for a later step.
        in_graphs: captured graphs that are replayed wait for it by themselves.
    """

    order: LoadOrder
    submitted: Future[Arriving]
    ordered_ns: int
    blocks: frozenset[int]
    released: bool = False
    reported: bool = False
    cancelled: bool = False
    ready_layer: int = 0
    failed: str = ""
    landed: bool = False
    in_graphs: bool = False
    waited_whole: bool = False
    readers: Readers = field(default_factory=Readers)
    was_left: bool = False

    @property
    def transfer(self) -> Arriving | None:
        """Its transfer, once submitted."""
        if not self.submitted.done() or self.submitted.cancelled() or self.submitted.exception() is not None:
            return None
        return self.submitted.result()

    def may_be_read_by(self, orders: StepOrders) -> bool:
        """Whether the step's batch holds blocks of the load: its own request's, or a sharer's (REL-2)."""
        return not orders.held_is_known or not self.blocks.isdisjoint(orders.held_blocks)


@dataclass(slots=True)
class Polled:
    """What one look at the loads found."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    ended: dict[int, Ended] = field(default_factory=dict)


def cancel_transfer(submitted: Future[Arriving]) -> None:
    """The transfer, if one came of it, issues nothing more."""
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()


def count_landed(metrics: Metrics, num_slices: int, num_bytes: int, landed_ns: Sequence[int]) -> None:
    """A load that has landed is counted; `landed_ns`, since it was ordered, a slice each."""
    metrics.observe("first_layer_ns", max(0, landed_ns[0]))
    metrics.observe("last_layer_ns", max(0, landed_ns[-1]))
    metrics.count("loaded_bytes", num_bytes)
    metrics.count("loads_layerwise" if num_slices > 1 else "loads_whole")
