"""Settings of a cache server: read once, strictly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella.connector.storage.tier_url import TierUrl

_COUNTS: Final = ("pool_bytes", "models", "max_sessions", "io_threads", "max_pending_put_bytes")
_SECONDS: Final = ("lease_s", "ping_s", "silent_s", "grace_s", "drain_s", "tier_timeout_s")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server keeps objects and for whom.

    Args:
        folder: where its socket lies; mode 0700, made if need be.
        pool_bytes: memory for objects, of all models and ranks together.
        models: how many models share it, in equal parts; one more is refused unless another has no engine left.
        tiers: URLs of slower stores behind the pool, the nearest first, see `lamella.connector.storage.tier_url`.
        tier_max_bytes: size limit of each folder among the tiers; None: none.
        tier_ttl_s: how long tiers keep an object; None: as long as they do.
        tier_timeout_s: bound of each call to a tier.
        io_threads: threads that read tiers, of each model and rank.
        max_pending_put_bytes: of the objects that wait for one tier.
        lease_s: how long what was looked up stays locked before its retrieve.
        ping_s: how often a peer should be heard.
        silent_s: how long a peer over TCP may say nothing.
        grace_s: how long the slots that a dead process was writing are left alone.
        drain_s: how long a stop waits for transfers and tiers.
        max_sessions: peers at the same time.
        lock_memory: keeps the pool from being swapped out (`mlock`); a device's registration does so by itself.
        numa_node: memory node to prefer; None leaves it to the kernel.

    Raises:
        ValueError: a value out of range, or a URL that is none.
    """

    folder: Path
    pool_bytes: int = 4 << 30
    models: int = 1
    tiers: tuple[str, ...] = ()
    tier_max_bytes: int | None = None
    tier_ttl_s: float | None = None
    tier_timeout_s: float = 5.0
    io_threads: int = 2
    max_pending_put_bytes: int = 1 << 30
    lease_s: float = 30.0
    ping_s: float = 2.0
    silent_s: float = 30.0
    grace_s: float = 2.0
    drain_s: float = 30.0
    max_sessions: int = 1024
    lock_memory: bool = False
    numa_node: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.silent_s <= 2 * self.ping_s:
            raise ValueError(f"silent_s ({self.silent_s}) must be more than two pings of ping_s ({self.ping_s})")
        if len(set(self.tiers)) < len(self.tiers):
            raise ValueError(f"a tier stands behind another, and none behind itself; got {', '.join(self.tiers)}")
        for url in self.tiers:
            TierUrl.parse(url)
        if not self.tiers and (self.tier_max_bytes is not None or self.tier_ttl_s is not None):
            raise ValueError("tier_max_bytes and tier_ttl_s limit tiers: name one")
