"""What the connector counts and times, as one plain mapping that engines can carry, add up and export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

COUNTERS: Final[Mapping[str, str]] = {
    "hit_tokens": "Tokens that were loaded instead of computed",
    "stored_tokens": "Tokens whose KV was kept",
    "loads": "Loads ordered",
    "loads_layerwise": "Loads that moved layer-major, slice by slice",
    "loads_whole": "Loads that moved chunk-major",
    "loads_failed": "Loads that failed",
    "loads_cancelled": "Loads cancelled because their request ended before anybody could read them",
    "loaded_bytes": "Bytes of loads that have landed, all ranks",
    "stored_bytes": "Bytes of stores that have ended well, all ranks",
    "released_early": "Loads that were released before all of them had landed",
    "released_by_forecast": "Loads that the scheduler side released before a worker's look would have counted",
    "layer_waits": "Waits of a layer for a load that had not landed there",
    "stall_ns": "Time forward passes waited on the host for layers",
    "wait_timeouts": "Waits that reached their bound",
    "errors_reported": "Steps in which failed blocks were reported",
    "gated_loads": "Loads whose layers replayed graphs waited for by themselves",
    "hook_bypasses": "Steps that passed over the per-layer hook while a load was landing",
    "holds": "Ended requests whose blocks were held until nothing of them was in flight",
    "shared_waits": "Looks at which a request waited for another's load of the same chunks",
    "bound_waits": "Looks at which a request waited for room among the loads in flight",
    "blocks_evicted": "Blocks taken out of the engine's prefix cache",
    "stores_dropped": "Stores given up: their blocks had failed, or the copy did",
    "stores_without_room": "Stores that found every slot in use, or what comes before them gone",
    "stores_after_waiting": "Stores, of those without room, whose request found room for them later",
    "tier_puts_failed": "Stores that the file tier did not keep, as on a full disk: the host pool alone has them",
    "tier_puts_skipped": "Stores not sent to the file tier, because half of the host pool waited for it",
    "auto_chunk_major": "Requests for which auto chose to load whole objects and to wait for all of them",
    "auto_early": "Requests for which auto chose to load slice by slice and to start early",
    "auto_sync": "Requests for which auto chose to join the next step and to wait there, layer by layer",
    "auto_off": "Requests whose hit auto chose to compute again",
    "auto_turns": "Loads that could be released and were left for a later step, not to delay the next",
    "flush_waits": "Steps that waited for a store before its blocks were written again",
}
"""Every counter, with the sentence that explains it."""

TIMES: Final[Mapping[str, str]] = {
    "first_layer_ns": "From a load's order until its first slice has landed",
    "last_layer_ns": "From a load's order until its last slice has landed",
    "release_ns": "From a load's order until its release",
    "auto_predicted_ttft_ns": "Time to first token that auto predicted, from its choice on",
    "auto_predicted_regret_ns": "By how much auto chose a later first token for this request, for the sake of others",
}
"""Every observed duration, with the sentence that explains it."""


class Durations(NamedTuple):
    """Durations of one kind, added up."""

    observations: int
    total_ns: int
    longest_ns: int

    def merged(self, other: Durations) -> Durations:
        """Of both."""
        return Durations(
            self.observations + other.observations,
            self.total_ns + other.total_ns,
            max(self.longest_ns, other.longest_ns),
        )


class Metrics:
    """Counters and durations since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._times: dict[str, Durations] = {}
        self._total: dict[str, int] = {}

    def count(self, name: str, by: int = 1) -> None:
        """The counter is higher by so much.

        Raises:
            KeyError: no counter has that name.
        """
        if name not in COUNTERS:
            raise KeyError(f"unknown counter {name!r}")
        self._counts[name] = self._counts.get(name, 0) + by
        self._total[name] = self._total.get(name, 0) + by

    def observe(self, name: str, duration_ns: int) -> None:
        """One more duration.

        Raises:
            KeyError: no duration has that name.
        """
        if name not in TIMES:
            raise KeyError(f"unknown duration {name!r}")
        one = Durations(1, duration_ns, duration_ns)
        self._times[name] = self._times[name].merged(one) if name in self._times else one

    def total(self, name: str) -> int:
        """The counter since the beginning."""
        return self._total.get(name, 0)

    def take(self) -> dict[str, int | list[int]]:
        """What came since the last call: counters by name, durations as [count, total, longest]."""
        if not (self._counts or self._times):
            return {}
        taken: dict[str, int | list[int]] = {**self._counts}
        taken.update({name: list(times) for name, times in self._times.items()})
        self._counts, self._times = {}, {}
        return taken


def merge_taken(
    left: Mapping[str, int | list[int]], right: Mapping[str, int | list[int]]
) -> dict[str, int | list[int]]:
    """Both mappings of `Metrics.take` as one."""
    merged = dict(left)
    for name, value in right.items():
        mine = merged.get(name)
        if mine is None:
            merged[name] = value
        elif isinstance(mine, int) and isinstance(value, int):
            merged[name] = mine + value
        elif isinstance(mine, list) and isinstance(value, list):
            merged[name] = list(Durations(*mine).merged(Durations(*value)))
        else:
            raise TypeError(f"{name} is a counter on one side and a duration on the other")
    return merged
