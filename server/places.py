"""Where objects are: a pool for each model and rank, and the tiers behind it.

The memory is divided equally among `models`; a model's part among its ranks, so that each has as many slots as every
other, whatever its object's size (stages of 21 and 23 layers have as many chunks). A worker maps its own rank's memory
and no other. Engines of the same model share it: their keys are the same.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.metrics import MeteredTier
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier_url import open_tier
from lamella.cuda_ext.pool import Backing, HostPool
from lamella.cuda_ext.registration import Registrar
from lamella.reference.keys import KeySpace
from lamella.reference.layout import ObjectLayout
from lamella.server.fetching import Fetching
from lamella.server.settings import ServerSettings

_log = logging.getLogger(__name__)
_BREAKER_FAILURES: Final = 3
_BREAKER_RETRY_NS: Final = 30_000_000_000
_CLOSE_S: Final = 0.1
"""For what a flush has waited for already."""


class Place:
    """One rank's objects of one model: the pool, the tiers behind it, and what is being brought from them."""

    def __init__(
        self,
        settings: ServerSettings,
        registrar: Registrar,
        space: KeySpace,
        layout: ObjectLayout,
        num_slots: int,
    ) -> None:
        self.space = space
        """Without a salt: tenants share the memory, not the keys."""
        self.layout = layout
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self.metered = tuple(
                opened.enter_context(
                    contextlib.closing(
                        MeteredTier(
                            open_tier(
                                url,
                                layout,
                                max_bytes=settings.tier_max_bytes if "://" not in url or url[:5] == "file:" else None,
                                ttl_s=settings.tier_ttl_s,
                                timeout_s=settings.tier_timeout_s,
                            )
                        )
                    )
                )
                for url in settings.tiers
            )
            tiers = tuple(
                GuardedTier(tier, CircuitBreaker(tier.name, _BREAKER_FAILURES, _BREAKER_RETRY_NS, time.monotonic_ns))
                for tier in self.metered
            )
            self.pool = HostPool(
                layout, num_slots, backing=Backing.SHARED, registrar=registrar, numa_node=settings.numa_node
            )
            opened.callback(self.pool.close)
            buffers = LayerBuffers(mmap.PAGESIZE, 1) if tiers else None  # objects are read into slots, never here
            if buffers is not None:
                opened.callback(buffers.close)
            self.storage = StorageManager(
                self.pool,
                tiers,
                buffers,
                timeout_s=settings.tier_timeout_s,
                max_pending_put_bytes=settings.max_pending_put_bytes,
            )
            opened.callback(self.storage.close, _CLOSE_S)
            self.fetching = Fetching(self.storage, tiers, settings.io_threads)
            opened.callback(self.fetching.close)
            self._opened = opened.pop_all()

    @property
    def label(self) -> str:
        """Model, rank and layers, for metrics and logs."""
        first, end = self.space.layers
        return f"{self.space.model} rank {self.space.tp_rank} of {self.space.tp_size} layers {first}-{end - 1}"

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that can be used now."""
        return self.pool.memory.ready_slots

    def flush(self, timeout_s: float) -> None:
        """What was stored is in the tiers.

        Raises:
            TimeoutError: not within the bound.
        """
        self.storage.flush(timeout_s)

    def close(self) -> None:
        """Memory and tiers are let go of; nothing of it is held. A second call does nothing."""
        self._opened.close()


@dataclass(slots=True)
class _Model:
    chunk_bytes: int
    places: dict[bytes, Future[Place]] = field(default_factory=dict)


class Places:
    """Every place of a server. Called by its loop; places are made on a thread.

    Args:
        settings: the server's.
        registrar: what the memory needs in this process.
        is_used: whether a session has this place, or something of it is held.
    """

    def __init__(self, settings: ServerSettings, registrar: Registrar, is_used: Callable[[Place], bool]) -> None:
        self._settings = settings
        self._registrar = registrar
        self._is_used = is_used
        self._models: dict[bytes, _Model] = {}
        self._lock = threading.Lock()
        self._opening = ThreadPoolExecutor(2, thread_name_prefix="lamella-place")

    def open(self, space: KeySpace, layout: ObjectLayout, chunk_bytes: int) -> Future[Place]:
        """The place of a rank; made if there is none yet.

        Args:
            space: of the rank.
            layout: of its objects.
            chunk_bytes: of one chunk on all ranks of the engine together.

        Raises:
            ValueError: the memory is shared by as many models as it may be, or is too small for a chunk, or ranks
                disagree.
        """
        plain = replace(space, salt=b"")
        family = replace(plain, tp_rank=0, layers=(0, 1)).digest()
        if not layout.object_bytes <= chunk_bytes:
            raise ValueError(
                f"chunk_bytes is of all ranks together: at least this rank's {layout.object_bytes}, got {chunk_bytes}"
            )
        share = self._settings.pool_bytes // self._settings.models
        num_slots = share // chunk_bytes
        if num_slots < 1:
            raise ValueError(
                f"a chunk has {chunk_bytes} bytes on all ranks and each of {self._settings.models} models has {share} "
                "bytes of memory: give the server more, or make chunks smaller"
            )
        with self._lock:
            model = self._models.get(family)
            leaving: tuple[Place, ...] = ()
            if model is None:
                leaving = self._make_room()
                model = self._models[family] = _Model(chunk_bytes)
            if model.chunk_bytes != chunk_bytes:
                raise ValueError(
                    f"another rank said that a chunk of this model has {model.chunk_bytes} bytes on all ranks, this "
                    f"one says {chunk_bytes}"
                )
            found = model.places.get(plain.digest())
            if found is not None and not (found.done() and found.exception() is not None):
                _check_same(found, layout)
                return found
            opening = self._opening.submit(self._make, leaving, plain, layout, num_slots)
            model.places[plain.digest()] = opening
            return opening

    def _make(self, leaving: Sequence[Place], space: KeySpace, layout: ObjectLayout, num_slots: int) -> Place:
        """A new place, for which others give up their memory; on a thread, since either takes long."""
        for place in leaving:
            _log.info("%s has no engine left; its memory goes to %s", place.label, space.model)
            _close(place)
        return Place(self._settings, self._registrar, space, layout, num_slots)

    def _make_room(self) -> tuple[Place, ...]:
        """The places of a model that leaves, if one must."""
        if len(self._models) < self._settings.models:
            return ()
        for family, model in self._models.items():
            places = [future.result() for future in model.places.values() if is_made(future)]
            if all(future.done() for future in model.places.values()) and not any(map(self._is_used, places)):
                del self._models[family]
                return tuple(places)
        raise ValueError(
            f"this server keeps objects of {self._settings.models} models and all of them have engines: start it with "
            f"--models {self._settings.models + 1}, or another server"
        )

    def all(self) -> tuple[Place, ...]:
        """Every place that is ready."""
        with self._lock:
            futures = [future for model in self._models.values() for future in model.places.values()]
        return tuple(future.result() for future in futures if is_made(future))

    def close(self) -> None:
        """Every place is closed. One of which a tier still reads is said, and goes with the process."""
        self._opening.shutdown(wait=True, cancel_futures=True)
        for place in self.all():
            _close(place)


def _close(place: Place) -> None:
    try:
        place.close()
    except (TimeoutError, RuntimeError) as busy:
        _log.error("%s is not closed: %s", place.label, busy)


def is_made(future: Future[Place]) -> bool:
    """Whether the place is there; false as well where it could not be made."""
    return future.done() and not future.cancelled() and future.exception() is None


def _check_same(found: Future[Place], layout: ObjectLayout) -> None:
    if is_made(found) and found.result().layout != layout:
        raise ValueError(
            f"this rank's objects are kept as {found.result().layout} and now said to be {layout}: what differs "
            "belongs into the key space (inner_layout)"
        )
