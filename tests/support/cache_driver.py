"""A small engine's paged cache with a cache engine over it, and the oracle's word on what it must hold."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.connector.cache_engine import CacheEngine
from lamella.connector.layerwise import LayerwiseConnector
from lamella.connector.slice_objects import slice_layout
from lamella.connector.storage.circuit import CircuitBreaker
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.layer_buffers import LayerBuffers
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.storage.tier import Leading, Tier, TierError, check_ranges, get_in_turn
from lamella.connector.streams import Recorder
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.pool import HostPool
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace
from lamella.reference.layout import ByteRange, EngineLayout, ObjectLayout, TensorView, engine_layout
from lamella.reference.slices import plan_slices

TOKENS = list(range(100, 116))  # 4 chunks
HERE, THERE = list(range(8)), list(range(8, 16))
WAIT_S = 10.0
CHUNK, BLOCK, HEADS, DIM = 4, 2, 2, 3


class MemoryTier:
    """A tier in a dictionary, which can be told to lose objects, to refuse, and to hold a read back."""

    name = "memory"

    def __init__(self, object_bytes: int) -> None:
        self.object_bytes = object_bytes
        self.objects: dict[ChunkKey, bytes] = {}
        self.down = False
        self.reads: list[tuple[ChunkKey, tuple[ByteRange, ...]]] = []

    def _ask(self) -> None:
        if self.down:
            raise TierError("the memory tier is down")

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        self._ask()
        return tuple(key in self.objects for key in keys)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        self._ask()
        check_ranges(ranges, into, self.object_bytes)
        whole = self.objects[key]
        self.reads.append((key, tuple(ranges)))
        for wanted, buffer in zip(ranges, into, strict=True):
            buffer[:] = whole[wanted.offset : wanted.offset + wanted.num_bytes]

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        return get_in_turn(self, keys, ranges, into)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        self._ask()
        if data.nbytes != self.object_bytes:
            raise ValueError(f"an object has {self.object_bytes} bytes, got {data.nbytes}")
        self.objects.setdefault(key, bytes(data))

    def delete(self, key: ChunkKey) -> bool:
        self._ask()
        return self.objects.pop(key, None) is not None

    def close(self) -> None: ...


class Deployment:
    """One engine process: a paged cache `[K, NB, 2, 2, 3]` a layer in host memory, a pool, tiers and a cache engine."""

    def __init__(
        self,
        *,
        num_layers: int = 3,
        kv: int = 2,
        num_blocks: int = 24,
        num_slots: int = 8,
        num_buffers: int = 8,
        width: int | Sequence[int] = 1,
        form: ObjectForm = ObjectForm.TOKEN,
        tiers: Sequence[Tier] = (),
        use_gpu: bool = True,
        save_partial_chunk: bool = False,
        breaker: CircuitBreaker | None = None,
        recorder: Recorder | None = None,
        timeout_s: float = WAIT_S,
        io_threads: int = 2,
        salt: bytes = b"",
        rank: int = 0,
        engine_options: dict[str, Any] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        geometry = KVGeometry(num_layers, kv, HEADS, DIM, 2, CHUNK)
        self.layout = ObjectLayout.single(geometry, BLOCK, form)
        self.cache: NDArray[np.uint16] = np.zeros((num_layers, kv, num_blocks, BLOCK, HEADS, DIM), np.uint16)
        self.caches: tuple[EngineLayout, ...] = (
            engine_layout(
                "KNTHD", [TensorView(layer.ctypes.data, layer.shape, layer.strides, 2) for layer in self.cache]
            ),
        )
        slices = plan_slices(num_layers, width)
        self.space = KeySpace("tiny", "uint16", form, "THD", CHUNK, rank, 2, (0, num_layers), salt)
        self.engine = TransferEngine("cpu", num_layers=num_layers, **(engine_options or {}))
        self.pool = HostPool(self.layout, num_slots)
        widest = max(slice_layout(self.layout, part).object_bytes for part in slices)
        self.buffers = LayerBuffers(widest, num_buffers)
        self.tiers = tuple(tiers)
        self.storage = StorageManager(
            self.pool, tiers, self.buffers, io_threads=io_threads, timeout_s=timeout_s, **(storage_options or {})
        )
        self.connector = LayerwiseConnector(
            self.engine, self.layout, self.caches, slices, self.pool.memory, use_gpu=use_gpu, timeout_s=timeout_s
        )
        self.cache_engine = CacheEngine(
            self.space,
            self.storage,
            self.connector,
            save_partial_chunk=save_partial_chunk,
            breaker=breaker,
            recorder=recorder,
        )

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    def compute(self, layer: int, tokens: Sequence[int], blocks: Sequence[int], start: int = 0) -> None:
        """Writes one layer's KV of `tokens[start:]`, as a function of the prefix, the layer and the place."""
        for position in range(start, len(tokens)):
            self.cache[layer, :, blocks[position // BLOCK], position % BLOCK] = self.kv_of(layer, tokens, position)

    def kv_of(self, layer: int, tokens: Sequence[int], position: int) -> NDArray[np.uint16]:
        """What a model would cache for a token `[K, H, D]`: it depends on all tokens up to it."""
        seed = [layer, *tokens[: position + 1]]
        shape = self.cache.shape[1], HEADS, DIM
        return np.random.default_rng(seed).integers(1, 65535, shape, np.uint16)

    def holds(self, layer: int, tokens: Sequence[int], blocks: Sequence[int], start: int, end: int) -> bool:
        """Whether the blocks have the layer's KV of tokens `[start, end)`."""
        return all(
            np.array_equal(
                self.cache[layer, :, blocks[position // BLOCK], position % BLOCK], self.kv_of(layer, tokens, position)
            )
            for position in range(start, end)
        )

    def store(self, tokens: Sequence[int], blocks: Sequence[int], **options: Any) -> int:
        """Computes and stores a whole sequence; how many tokens were stored."""
        saving = self.cache_engine.store_layer(tokens, [blocks], **options)
        yields = []
        for layer in range(self.num_layers):
            self.compute(layer, tokens, blocks)
            yields.append(next(saving))
        yields.append(next(saving))
        assert list(saving) == [], "N+1 yields"
        return yields[-1]

    def retrieve(self, tokens: Sequence[int], blocks: Sequence[int], **options: Any) -> NDArray[np.bool_]:
        """Advances a retrieve to its end; its mask."""
        *progress, mask = list(self.cache_engine.retrieve_layer(tokens, [blocks], **options))
        assert len(progress) == self.num_layers + 1, "N+2 yields"
        assert isinstance(mask, np.ndarray)
        return mask

    def settle(self) -> None:
        """Whatever goes on in the background has ended."""
        self.storage.flush(WAIT_S)  # what is read from tiers goes on to the device
        assert self.cache_engine.drain(WAIT_S)  # and what a load lets go of may be written to nearer tiers
        self.storage.flush(WAIT_S)

    def references(self) -> tuple[int, int, int]:
        """(pins, objects being written, layer buffers taken), which are zero whenever nothing is going on."""
        self.settle()
        now = self.pool.report().occupancy
        return now.pins, now.writing, self.buffers.used

    def close(self) -> None:
        self.storage.close(WAIT_S)
        self.engine.close()
        self.buffers.close()
        self.pool.close()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # what the test was about says more than what it left open
            self.engine.close()


def file_tier(folder: Path, num_layers: int = 3, kv: int = 2, form: ObjectForm = ObjectForm.TOKEN) -> FileTier:
    """A file tier for a `Deployment` of the same sizes."""
    layout = ObjectLayout.single(KVGeometry(num_layers, kv, HEADS, DIM, 2, CHUNK), BLOCK, form)
    return FileTier(folder, layout.object_bytes, layer_runs(layout))


def advance(generator: Generator[Any, None, None], times: int) -> list[Any]:
    """The next yields."""
    return [next(generator) for _ in range(times)]


def tiered(**options: Any) -> tuple[Deployment, MemoryTier]:
    """A deployment with a tier behind its pool."""
    tier = MemoryTier(0)
    run = Deployment(tiers=[tier], **options)
    tier.object_bytes = run.layout.object_bytes
    return run, tier


def only_in_tier(run: Deployment, tokens: list[int]) -> None:
    """The sequence's objects are in the tier and no longer in the pool."""
    run.store(tokens, HERE)
    run.settle()
    run.pool.discard(run.cache_engine.keys_of(tokens))
