"""A blend's bytes: every layer of every reuse comes to the buffers, waits there for its recompute, and goes to blocks.

advance i+1:   load i+1 begins │ the compute stream waits for i │ i-1 is scattered │ i is yielded
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing

import numpy as np

from lamella.connector.blend_plan import BlendPlan, Reuse, check_reuses, plan_blend, whole_numbers
from lamella.connector.buffered import BufferedConnector, BufferedPass
from lamella.connector.cache_engine import CacheEngine, Wanted, let_go, tokens_of
from lamella.connector.in_flight import Load
from lamella.connector.joined_load import PlacedLoad, layers_in_pool, pool_addresses
from lamella.connector.layerwise import LayerFuture
from lamella.connector.storage.held_prefix import HeldPrefix
from lamella.connector.streams import Blocks
from lamella.reference.plan import Direction


class BlendError(RuntimeError):
    """A layer did not come, so what was computed over it is worth nothing. The blocks hold any mixture."""


class BlendLayers:
    """What one blend loads, held from the beginning to the end. For one thread, inside a `with` block.

    Args:
        cache_engine: of a buffered connector (`use_layerwise` and `enable_blending`).
        tokens: the sequence to put together.
        reuses: where its parts were stored.
        block_ids: the engine's blocks for the whole sequence, as in `TransferRequest`.
        tenant: whose objects; None: the key space's.

    Raises:
        TypeError: what should be whole numbers is not.
        ValueError: a connector without buffers, reuses that do not fit, blocks that do not, or more tokens than a
            buffer holds. Nothing is held then.
    """

    def __init__(
        self,
        cache_engine: CacheEngine,
        tokens: Sequence[int],
        reuses: Sequence[Reuse],
        block_ids: Sequence[int],
        *,
        tenant: bytes | None = None,
    ) -> None:
        connector = connector_of(cache_engine)
        check_reuses(tokens, reuses)
        if len(tokens) > connector.max_tokens:
            raise ValueError(f"a buffer holds {connector.max_tokens} tokens, got {len(tokens)}: raise blend_tokens")
        blocks = whole_numbers("block_ids", block_ids)
        connector.check(Blocks((blocks.tolist(),), len(tokens)), Direction.RETRIEVE)
        self._blocks = Blocks((blocks.astype(np.int32),), len(tokens))
        self._engine = cache_engine
        self._connector = connector
        self._held: list[HeldPrefix] = []
        with ExitStack() as holding:
            for reuse in reuses:
                held = cache_engine.hold(reuse.tokens, Wanted(reuse.first, reuse.stop), tenant=tenant)
                holding.callback(held.release)
                self._held.append(held)
            found = [
                max(0, min(reuse.stop, tokens_of(held.keys)) - reuse.first)
                for reuse, held in zip(reuses, self._held, strict=True)
            ]
            self.plan: BlendPlan = plan_blend(tokens, reuses, found)
            """What becomes of each token."""
            self._loads = [
                PlacedLoad(reuse.first + there, reuse.first, held.num_chunks, reuse.offset)
                for reuse, there, held in zip(reuses, found, self._held, strict=True)
            ]
            self._release = holding.pop_all()

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self._connector.num_layers

    def layers(self) -> Generator[int, None, None]:
        """Yields each layer once it may be recomputed in its buffer; run to its end, all are in the blocks.

        Closed early, it returns once nothing of it moves.

        Raises:
            BlendError: a layer was lost on its way. Compute the sequence without reuse.
            RuntimeError: another pass has the buffers.
        """
        connector = self._connector
        loads, coming = self._coming()
        one = BufferedPass(loads, lambda: self._blocks)
        ahead: list[LayerFuture] = []
        with ExitStack() as ending:
            for futures in coming:
                ending.enter_context(closing(futures))
            passing = ending.enter_context(closing(connector.batched_blend(one)))
            ending.callback(lambda: _drop(ahead))
            next(passing)
            ahead = [next(futures) for futures in coming]
            for layer in range(self.num_layers + 1):
                if layer < self.num_layers:
                    sent, ahead = ahead, []
                    passing.send(sent)
                    if layer + 1 < self.num_layers:  # what a tier has to read is read while this layer is under way
                        ahead = [next(futures) for futures in coming]
                else:
                    next(passing)
                if layer:
                    self._check(one)
                    yield layer - 1
            next(passing, None)
            self._check(one)
        self._tell(one)

    def close(self) -> None:
        """The cache may evict what was held. A second call does nothing."""
        self._release.close()

    def __enter__(self) -> BlendLayers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _coming(self) -> tuple[list[Load], list[Generator[LayerFuture, None, None]]]:
        """What is loaded, and each load's futures: one load where all of it lies in the pool, else one a reuse."""
        storage, connector = self._engine.storage, self._connector
        wanted = [
            (load, held)
            for load, held in zip(self._loads, self._held, strict=True)
            if load.blocks.skip_tokens < load.blocks.num_tokens
        ]
        loads, holds = [load for load, _ in wanted], [held for _, held in wanted]
        addresses = [pool_addresses(held) for held in holds]
        if len(loads) < 2 or None in addresses:
            return [*loads], [storage.layerwise_batched_get(held, connector.slices) for held in holds]
        flat = [address for found in addresses for address in found or ()]
        return [connector.join(loads)], [layers_in_pool(storage.pool, holds, flat, connector.slices)]

    def _check(self, one: BufferedPass) -> None:
        if one.reason is not None:
            self._tell(one)
            raise BlendError(f"{one.reason}; compute the sequence without reuse")

    def _tell(self, one: BufferedPass) -> None:
        """What moved is told to the recorder and the circuit breaker."""
        for load in one.loads:
            self._engine.ended("load", load.moving())
        self._engine.ended("scatter", one.scattered)


def connector_of(cache_engine: CacheEngine) -> BufferedConnector:
    """The cache engine's connector, which has buffers.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(cache_engine.connector, BufferedConnector):
        raise ValueError(
            "blending recomputes layers in buffers, which a paged connector has not: set use_layerwise and "
            "enable_blending"
        )
    return cache_engine.connector


def _drop(futures: Sequence[LayerFuture]) -> None:
    """What was asked for and not sent on is not read, or released once it was."""
    for future in futures:
        if not future.cancel():
            future.add_done_callback(let_go)
