"""The connector's metrics in vLLM's own frames: its statistics log line and its Prometheus registry."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lamella.connector.connector_metrics import COUNTERS, TIMES, Durations, merge_taken

_PREFIX = "vllm:lamella_"


class LamellaStats(KVConnectorStats):  # type: ignore[misc]
    """Counters and durations of an interval, as `Metrics.take` gives them."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Nothing has been observed."""
        self.data.clear()

    def aggregate(self, other: LamellaStats) -> LamellaStats:
        """Both intervals, or ranks, as one."""
        self.data = merge_taken(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Counters as they are; of durations the count, the mean and the longest in milliseconds."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in TIMES:
                times = Durations(*value)
                stem = name.removesuffix("_ns")
                reduced[f"{stem}_mean_ms"] = round(times.total_ns / times.observations / 1e6, 3)
                reduced[f"{stem}_max_ms"] = round(times.longest_ns / 1e6, 3)
            else:
                reduced[name] = value
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return not self.data


class LamellaPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter for each counter, and count and seconds for each duration."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {name: self._counter(name, text) for name, text in COUNTERS.items()}
        for name, text in TIMES.items():
            stem = name.removesuffix("_ns")
            self._counters[f"{name}:count"] = self._counter(f"{stem}_observations", f"{text}: how many")
            self._counters[f"{name}:total"] = self._counter(f"{stem}_seconds", f"{text}: seconds in all")

    def _counter(self, name: str, text: str) -> dict[int, Any]:
        family = self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=self._labelnames)
        return {engine: family.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """An interval's statistics are added."""
        for name, value in transfer_stats_data.items():
            if name in TIMES:
                times = Durations(*value)
                self._counters[f"{name}:count"][engine_idx].inc(times.observations)
                self._counters[f"{name}:total"][engine_idx].inc(times.total_ns / 1e9)
            else:
                self._counters[name][engine_idx].inc(value)
