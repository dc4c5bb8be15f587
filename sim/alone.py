"""One request of a regime by itself: the time of its hit's way, of its computing, and what overlap can save of both."""

from __future__ import annotations

from typing import NamedTuple

from lamella.sim.hardware import Hardware
from lamella.sim.strategies import Device, Regime


class Alone(NamedTuple):
    """The times of one request with nothing beside it.

    Attributes:
        transfer_ns: T: until the whole hit has landed where it moves as one: read from its tier, if it lies in one,
            then over the slowest rank's link.
        stages_ns: the longer of the two: in slices, tier and link work at once, and no slicing is quicker than this.
        prefill_ns: P: the computing of the new tokens over the hit.
        tier_ns: of T, the tier's reading; 0 where the hit lies in host memory.
    """

    transfer_ns: int
    stages_ns: int
    prefill_ns: int
    tier_ns: int

    @property
    def ratio(self) -> float:
        """T/P."""
        return self.transfer_ns / self.prefill_ns

    @property
    def ceiling(self) -> float:
        """The most that overlap can save of T + P; without a tier that is min(T, P) / (T + P)."""
        return 1 - max(self.stages_ns, self.prefill_ns) / (self.transfer_ns + self.prefill_ns)


def alone(device: Device, regime: Regime, hardware: Hardware | None = None) -> Alone:
    """What the device makes of one request of the regime.

    Args:
        device: where.
        regime: sizes; how many ask at once does not matter.
        hardware: what a load passes on its way; None: one link.
    """
    way = hardware or Hardware()
    slowest = min(way.ranks, key=lambda speed: speed.numerator / speed.denominator)
    link_ns = device.transfer_ns(regime.hit_tokens) * slowest.denominator // slowest.numerator
    num_bytes = regime.hit_tokens * device.profile.token_bytes
    read_ns = sum(tier.slice_ns(num_bytes) for tier in way.tiers[:1])
    latency_ns = sum(tier.latency_ns for tier in way.tiers[:1])
    return Alone(
        read_ns + latency_ns + link_ns,
        max(read_ns, link_ns),
        device.prefill_ns(regime.hit_tokens, regime.new_tokens),
        read_ns + latency_ns,
    )
