"""How long one request's load and its prefill take where nobody shares them, as a run itself shows it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from concurrency.rules import Row


class Alone(NamedTuple):
    """T and P of one request as the run itself shows them, in ms; None where it does not."""

    transfer_ms: float | None
    prefill_ms: float | None

    @property
    def ceiling(self) -> float | None:
        """The largest gain of one request alone that overlap can bring: min(T, P) / (T + P)."""
        if not self.transfer_ms or not self.prefill_ms:
            return None
        return min(self.transfer_ms, self.prefill_ms) / (self.transfer_ms + self.prefill_ms)

    @property
    def transfer_over_prefill(self) -> float | None:
        """T/P."""
        return self.transfer_ms / self.prefill_ms if self.transfer_ms and self.prefill_ms else None


def alone(arms: Mapping[str, Sequence[Row]], forms: Sequence[str]) -> Alone:
    """T: the shortest load from its first copy to its last landing; P: the median step of one prefill, no layer waits.

    The shortest, because loads share the link. In a chunk-major arm all has landed before the step begins.
    """
    transfer: list[float] = []
    prefill: list[float] = []
    for name in forms:
        for row in arms.get(name, ()):
            cell = row["cell"]
            if cell["mix"] or cell["miss_every"]:
                return Alone(None, None)
            transfer += [
                (one["landed_us"][-1] - one["started_us"]) / 1e3
                for one in row["requests"]
                if one.get("landed_us") and "started_us" in one
            ]
            spare = cell["concurrency"] + cell["bystanders"]
            prefill += [
                (step[5] if step[5] is not None else step[1]) / 1e3
                for step in row["steps"]
                if cell["new"] <= step[2] < cell["new"] + spare
            ]
    return Alone(min(transfer, default=None), statistics.median(prefill) if prefill else None)
