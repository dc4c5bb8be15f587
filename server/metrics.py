"""What the server counts and times, for Prometheus and for STATS; one registry, so that both say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from lamella.connector.storage.metrics import TierCounts, prometheus_text
from lamella.server.leases import PartState
from lamella.server.wire import Kind

if TYPE_CHECKING:
    from lamella.server.places import Place

_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)


class Held(NamedTuple):
    """What a server holds, at a moment of its own choice."""

    sessions: int
    parts: Mapping[PartState, int]
    places: Sequence[Place]


class ServerMetrics:
    """Counters that the service raises, and a collector for what it holds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lamella_server_{name}", text, labels, registry=self.registry)

        requests = counter("requests", "Requests that were answered.", "kind")
        self.refusals = counter("refusals", "Requests that were refused.", "code")
        self.asked_chunks = counter("asked_chunks", "Chunks that were looked up.")
        self.hit_chunks = counter("hit_chunks", "Chunks that were found on every rank.")
        self.retrieves = counter("retrieves", "Transfers into an engine that began, one a rank.", "side")
        self.stored_objects = counter("stored_objects", "Objects that became readable.")
        self.aborted_parts = counter("aborted_parts", "Parts of leases that were given up.")
        self.no_room = counter("no_room", "Stores without room: too much was held.")
        self.no_head = counter("no_head", "Stores of chunks that could not be hit: what comes before them is gone.")
        self.evicted_objects = counter("evicted_objects", "Objects that left the pool for others.")
        self.expired_parts = counter("expired_parts", "Parts that were looked up and not retrieved in time.")
        self.reaped_sessions = counter("reaped_sessions", "Sessions whose process was found dead or silent.")
        self.reaped_parts = counter("reaped_parts", "Parts that ended with their process.")
        seconds = Histogram(
            "lamella_server_request_seconds",
            "Time a request kept the server's thread.",
            ("kind",),
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self._answered = {
            kind: (requests.labels(kind.name.lower()), seconds.labels(kind.name.lower())) for kind in Kind
        }

    def answered(self, kind: Kind, duration_ns: int) -> None:
        """A request kept the server's thread for so long."""
        requests, seconds = self._answered[kind]
        requests.inc()
        seconds.observe(duration_ns / 1e9)

    def show(self, held: Callable[[], Held]) -> None:
        """What is held is shown from now on; `held` is called by whoever reads the figures, on any thread."""
        self.registry.register(_Holdings(held))

    def figures(self) -> dict[str, float]:
        """Every sample but the histograms' buckets, by name and labels."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = float(sample.value)
        return found

    def text(self, places: Iterable[Place]) -> str:
        """As a scraper reads it, the tiers' counts included."""
        tiers: dict[str, TierCounts] = {}
        for place in places:
            for tier in place.metered:
                tiers[f"{tier.name} {place.label}"] = tier.counts()
        shown = generate_latest(self.registry).decode()
        return shown + (prometheus_text(tiers) if tiers else "")


class _Holdings(Collector):
    def __init__(self, held: Callable[[], Held]) -> None:
        self._held = held

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        held = self._held()
        sessions = GaugeMetricFamily("lamella_server_sessions", "Peers that are registered.")
        sessions.add_metric([], held.sessions)
        yield sessions
        parts = GaugeMetricFamily("lamella_server_parts", "Parts of leases, by state.", labels=["state"])
        for state, count in held.parts.items():
            parts.add_metric([state.value], count)
        yield parts
        slots = GaugeMetricFamily(
            "lamella_server_slots", "Slots of the pool, by what they hold.", labels=["place", "state"]
        )
        pieces = GaugeMetricFamily(
            "lamella_server_pieces", "Pieces of the pool's memory, by state.", labels=["place", "state"]
        )
        fetched = CounterMetricFamily(
            "lamella_server_fetched_objects", "Objects that a tier brought into the pool.", labels=["place"]
        )
        for place in held.places:
            report = place.pool.report()
            for name in ("free", "writing", "ready", "pinned"):
                slots.add_metric([place.label, name], getattr(report.occupancy, name))
            pieces.add_metric([place.label, "ready"], report.registration.ready)
            pieces.add_metric([place.label, "pending"], report.registration.pending)
            pieces.add_metric([place.label, "failed"], len(report.registration.failed))
            fetched.add_metric([place.label], place.fetching.fetched)
        yield slots
        yield pieces
        yield fetched
