"""Everything of an in-process cache, from its settings: one object to open, use and close."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from lamella.connector.buffered import BufferedConnector
from lamella.connector.cache_engine import CacheEngine
from lamella.connector.config import CacheSettings
from lamella.connector.layer_hooks import LayerwiseHooks
from lamella.connector.layerwise import LayerwiseConnector
from lamella.connector.slice_objects import slice_layout
from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.metrics import MeteredTier, TierCounts
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier import Tier
from lamella.connector.storage.tier_url import open_tier
from lamella.connector.streams import ComputeStream, Recorder
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.pool import HostPool
from lamella.reference.keys import KeySpace
from lamella.reference.layout import EngineLayout, ObjectLayout

_NS = 1_000_000_000


class InProcessCache:
    """A cache beside one engine, for a `with` block.

    `hooks` is what a model runner calls in each step; `cache_engine` is the generators beneath, for one's own loop.

    Args:
        settings: how it stores and loads; `use_layerwise` selects slices of `layers_per_slice` layers, and with
            `enable_blending` the buffered connector.
        space: everything beside the tokens that decides the bytes.
        layout: of the objects.
        caches: the engine's paged cache of each kernel group.
        device: what the caches are on, `"cpu"` or `"cuda:N"`.
        compute_stream: where the engine computes; None only on the CPU.
        tiers: slower tiers besides those of the settings, behind them; closed with the cache.
        recorder: takes the spans of what moved.
        clock_ns: a monotonic clock, for the circuit breakers.

    Raises:
        ValueError: settings, space, layout and caches that do not fit one another; a CUDA device without its stream.
        OSError, RuntimeError, TierError: memory, device or folder are not to be had.
    """

    def __init__(
        self,
        settings: CacheSettings,
        space: KeySpace,
        layout: ObjectLayout,
        caches: Sequence[EngineLayout],
        *,
        device: str = "cpu",
        compute_stream: ComputeStream | None = None,
        tiers: Sequence[Tier] = (),
        recorder: Recorder | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if compute_stream is None and device != "cpu":
            raise ValueError(f"on {device} loads and stores are ordered with the engine's stream: give compute_stream")
        slices = settings.slices(layout.num_layers)
        timeout_s = settings.wait_timeout_s

        def breaker(name: str) -> CircuitBreaker:
            return CircuitBreaker(name, settings.breaker_failures, int(settings.breaker_retry_s * _NS), clock_ns)

        with ExitStack() as opened:
            registrar = Device(device).registrar()
            numa_node = Device(device).numa_node()
            self._metered = [MeteredTier(tier) for tier in _open_tiers(settings, layout, tiers, opened)]
            guarded = [GuardedTier(tier, breaker(tier.name)) for tier in self._metered]
            self.pool = HostPool(layout, settings.pool_objects, registrar=registrar, numa_node=numa_node)
            opened.callback(self.pool.close)
            buffers: LayerBuffers | None = None
            if guarded:
                widest = max(slice_layout(layout, part).object_bytes for part in slices)
                buffers = LayerBuffers(widest, settings.layer_buffers, registrar)
                opened.callback(buffers.close)
            self.engine = TransferEngine(device, num_layers=layout.num_layers)
            opened.callback(self.engine.close)
            connector: LayerwiseConnector
            if settings.enable_blending:
                connector = BufferedConnector(
                    self.engine,
                    layout,
                    caches,
                    self.pool.memory,
                    max_tokens=settings.blend_tokens,
                    compute_stream=compute_stream,
                    timeout_s=timeout_s,
                )
            else:
                connector = LayerwiseConnector(
                    self.engine,
                    layout,
                    caches,
                    slices,
                    self.pool.memory,
                    use_gpu=settings.use_gpu,
                    compute_stream=compute_stream,
                    timeout_s=timeout_s,
                )
            opened.callback(connector.close)
            self.storage = StorageManager(
                self.pool,
                guarded,
                buffers,
                io_threads=settings.io_threads,
                timeout_s=timeout_s,
                promote=settings.promote,
                max_pending_put_bytes=settings.max_pending_put_bytes,
            )
            opened.callback(self.storage.close)
            self.cache_engine = CacheEngine(
                space,
                self.storage,
                connector,
                save_partial_chunk=settings.save_partial_chunk,
                breaker=breaker(f"transfers on {device}"),
                recorder=recorder,
            )
            self.hooks = LayerwiseHooks(self.cache_engine)
            opened.callback(self.hooks.abort)
            self._opened = opened.pop_all()

    def tier_counts(self) -> dict[str, TierCounts]:
        """What each tier was asked and how it answered so far, the nearest first."""
        return {tier.name: tier.counts() for tier in self._metered}

    def close(self) -> None:
        """An open step is aborted, reads and puts under way have ended, and everything is given back.

        Raises:
            TimeoutError: something did not end within its bound.
        """
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _open_tiers(
    settings: CacheSettings, layout: ObjectLayout, more: Sequence[Tier], opened: ExitStack
) -> Iterator[Tier]:
    """The settings' tiers and those given, nearest first; each is closed with `opened`."""
    if settings.local_file_folder is not None:
        yield FileTier(
            settings.local_file_folder,
            layout.object_bytes,
            layer_runs(layout),
            max_bytes=settings.local_file_max_bytes,
            ttl_s=settings.local_file_ttl_s,
        )
    if settings.remote_tier is not None:
        remote = open_tier(
            settings.remote_tier,
            layout,
            ttl_s=settings.remote_ttl_s,
            timeout_s=settings.remote_timeout_s,
            retries=settings.remote_retries,
        )
        opened.callback(remote.close)
        yield remote
    for tier in more:
        opened.callback(tier.close)
        yield tier
