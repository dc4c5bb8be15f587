"""The transfer engine as the laws' executor, and small caches to try it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference import laws
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import EngineLayout, KernelGroup, ObjectLayout, TensorView, engine_layout
from lamella.reference.plan import Direction

WAIT_S = 20.0


def why_missing() -> str | None:
    """Why there is no engine on the CPU device here, or None."""
    try:
        TransferEngine("cpu", num_layers=1).close()
    except LibraryMissingError as error:
        return str(error)
    return None


ENGINE_MISSING = why_missing()


def engine_move(method: CopyMethod, **options: Any) -> Callable[[laws.Transfer], None]:
    """A move of `reference.laws`: an engine of its own for each plan, with the plan's windows.

    Where slices are to be reported, the engine gets no further than the slice that is reported.
    """

    def move(asked: laws.Transfer) -> None:
        plan = asked.plan
        request = plan.request
        with TransferEngine(
            "cpu",
            num_layers=plan.layout.num_layers,
            window_bytes=plan.window_bytes,
            staging_bytes=plan.window_bytes * 4,
            paced=asked.on_slice is not None,
            **options,
        ) as engine:
            transfer = engine.submit(
                engine.register_cache(plan.layout, asked.engines),
                asked.direction,
                HostObjects(asked.object_addresses, asked.registered_piece_bytes, asked.registered_base),
                request.block_ids,
                request.num_tokens,
                slices=plan.slices,
                skip_tokens=request.skip_tokens,
                null_block=request.null_block,
                method=method,
            )
            assert transfer.num_bytes == plan.num_bytes
            if asked.on_slice is not None:
                windows = iter(plan.windows)
                for index, part in enumerate(plan.slices):
                    for window in windows:
                        engine.grant(asked.direction, 1 if window.num_bytes else 0)
                        if window.completes_slice == index:
                            break
                    transfer.wait_layer(part.first_layer, timeout_s=WAIT_S)
                    asked.on_slice(index)
            transfer.wait(WAIT_S)

    return move


class SmallCache:
    """A paged cache and objects in host memory: `[2, NB, 4, 2, 8]` a layer, objects `[2, L, 8, 16]`, 2-byte
    elements."""

    def __init__(self, num_layers: int = 6, num_blocks: int = 32, num_objects: int = 8, form: str = "token") -> None:
        self.num_layers = num_layers
        self.geometry = KVGeometry(num_layers, 2, 2, 8, 2, 8)
        self.layout = ObjectLayout.single(self.geometry, 4, ObjectForm(form))
        self.cache: NDArray[np.uint16] = np.zeros((num_layers, 2, num_blocks, 4, 2, 8), np.uint16)
        random = np.random.default_rng(7)
        self.objects: NDArray[np.uint16] = random.integers(1, 65535, (num_objects, 2, num_layers, 8, 16), np.uint16)
        self.engines: tuple[EngineLayout, ...] = (
            engine_layout(
                "KNTHD", [TensorView(layer.ctypes.data, layer.shape, layer.strides, 2) for layer in self.cache]
            ),
        )
        self.table = random.permutation(num_blocks).astype(np.int32)

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(int(one.ctypes.data) for one in self.objects)

    def host(self, objects: Sequence[int] | None = None) -> HostObjects:
        chosen = range(len(self.objects)) if objects is None else objects
        return HostObjects([self.addresses[index] for index in chosen])

    def layer_holds(
        self, layer: int, tokens: int, table: NDArray[np.int32] | None = None, first_object: int = 0
    ) -> bool:
        """Whether a layer's blocks hold the first `tokens` tokens of the objects from `first_object` on."""
        ids = self.table if table is None else table
        place = np.arange(tokens)
        found = self.cache[layer][:, ids[place // 4], place % 4]  # [2, tokens, H, D]
        wanted = self.objects[first_object + place // 8, :, layer, place % 8]  # [tokens, 2, H * D]
        return bool((found.reshape(2, tokens, 16) == wanted.transpose(1, 0, 2)).all())

    def split_after(self, first: int) -> tuple[ObjectLayout, tuple[EngineLayout, ...]]:
        """The same layers as two kernel groups, `first` of them in the first."""
        groups = []
        for layers in (range(first), range(first, self.num_layers)):
            geometry = replace(self.geometry, num_layers=len(layers))
            groups.append(KernelGroup(geometry, tuple(layers), 4))
        (whole,) = self.engines
        parts = (whole.bases[:first], whole.bases[first:])
        return ObjectLayout(tuple(groups)), tuple(replace(whole, bases=part) for part in parts)

    def untouched(self) -> bool:
        return not self.cache.any()


@contextmanager
def small_engine(small: SmallCache, **options: Any) -> Iterator[tuple[TransferEngine, RegisteredCache]]:
    """An engine that moves `small`, one block of a layer a window unless told otherwise."""
    options.setdefault("window_bytes", small.layout.groups[0].block_bytes * 4)
    options.setdefault("staging_bytes", options["window_bytes"] * 8)
    with TransferEngine("cpu", num_layers=small.num_layers, **options) as engine:
        yield engine, engine.register_cache(small.layout, small.engines)


def retrieve(
    engine: TransferEngine, cache: RegisteredCache, small: SmallCache, tokens: int = 64, **options: Any
) -> Transfer:
    return engine.submit(
        cache,
        options.pop("direction", Direction.RETRIEVE),
        options.pop("objects", small.host()),
        [options.pop("table", small.table)],
        tokens,
        **options,
    )
