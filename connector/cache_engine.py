"""The in-process cache engine: two generators that advance with the engine's forward pass.

    retrieve_layer(tokens)   setup │ layer 0 │ layer 1 │ ... │ layer N-1 │ mask     N+2 yields
    store_layer(tokens)              layer 0 │ layer 1 │ ... │ layer N-1 │ done     N+1 yields

Both complete their protocol whatever is found: a total miss, a partial hit, chunks that are stored already, no room, a
tier that fails, a device that fails. Less is loaded or stored then, and the last yield says how much.

A retrieve settles before its first byte moves what it will use; it takes host buffers for what comes from slower tiers
slice by slice. A store takes room for every layer of every chunk up front, all or nothing.

Source: names and yields are those of LMCache's layerwise mode.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.connector.in_flight import Load, Moving, Save
from lamella.connector.layerwise import LayerFuture, LayerwiseConnector
from lamella.connector.storage.circuit import CircuitBreaker, CircuitState
from lamella.connector.storage.held_prefix import HeldPrefix
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.streams import Blocks, Recorder
from lamella.cuda_ext.transfer import TransferState
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.reference.plan import Direction
from lamella.reference.whole import check_whole

Mask = NDArray[np.bool_]
"""One entry a token of the sequence."""

RetrieveYield = int | Mask

_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """The tokens `[skip_tokens, num_tokens)` that a mask asks for."""

    skip_tokens: int
    num_tokens: int


class CacheEngine:
    """Stores a sequence's KV beyond the engine and brings it back, layer by layer. For one thread.

    Args:
        space: everything beside the tokens that decides the bytes, this rank's share included; its salt is the default
            tenant's.
        storage: where objects are kept.
        connector: moves them, in slices of its own choice.
        save_partial_chunk: the last, shorter chunk of a sequence is stored too.
        breaker: leaves the device alone after failures in a row; retrieves are misses and stores are skipped then.
        recorder: takes the spans of what moved.

    Raises:
        ValueError: a key space that does not describe the storage's objects.
    """

    def __init__(
        self,
        space: KeySpace,
        storage: StorageManager,
        connector: LayerwiseConnector,
        *,
        save_partial_chunk: bool = False,
        breaker: CircuitBreaker | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        layout = storage.layout
        described = (space.chunk_tokens, space.form, space.layers[1] - space.layers[0])
        if described != (layout.chunk_tokens, layout.form, layout.num_layers):
            raise ValueError(
                f"the key space says (chunk tokens, form, layers) {described}, the objects have "
                f"{(layout.chunk_tokens, layout.form, layout.num_layers)}"
            )
        if save_partial_chunk and layout.form is ObjectForm.BLOCK:
            raise ValueError("save_partial_chunk needs the token form: in block form a chunk is whole blocks")
        self.space = space
        self.storage = storage
        self.connector = connector
        self._save_partial_chunk = save_partial_chunk
        self._breaker = breaker
        self._recorder = recorder

    @property
    def num_layers(self) -> int:
        """N, layers of the stage."""
        return self.connector.num_layers

    # ---- asking

    def keys_of(self, tokens: Sequence[int], tenant: bytes | None = None) -> tuple[ChunkKey, ...]:
        """Keys of the sequence's chunks, for this rank and tenant.

        Raises:
            TypeError: a tenant that is not bytes, tokens that are no sequence.
            ValueError: a token that is no whole number of 32 bits.
        """
        _count(tokens)
        if tenant is not None and not isinstance(tenant, bytes):
            raise TypeError(f"tenant must be bytes or None, got {tenant!r}: encode it, as in b'acme'")
        space = self.space if tenant is None else replace(self.space, salt=tenant)
        return chunk_keys(space, tokens, partial=self._save_partial_chunk)

    def lookup(self, tokens: Sequence[int], *, tenant: bytes | None = None) -> int:
        """Tokens of the longest prefix that could be retrieved now. Only a retrieve makes it certain."""
        if not self._allowed():
            return 0
        keys = self.keys_of(tokens, tenant)
        return tokens_of(keys[: self.storage.lookup(keys)])

    def num_new_matched_tokens(
        self, tokens: Sequence[int], num_computed_tokens: int, *, tenant: bytes | None = None
    ) -> int:
        """Tokens that a retrieve would bring beyond those the engine has; never the prompt's last one.

        The last token is computed in any case, for its logits; loading it as well would have the engine write a slot
        that is landing (fault 56). In block form the hit ends at a block. What the engine has more of than the cache
        counts as nothing new (fault 58).

        Raises:
            TypeError, ValueError: as `keys_of`, or num_computed_tokens that is no whole number or negative.
        """
        check_whole("num_computed_tokens", num_computed_tokens, 0)
        hit = min(self.lookup(tokens, tenant=tenant), max(0, len(tokens) - 1))
        if self.storage.layout.form is ObjectForm.BLOCK:
            hit -= hit % math.lcm(*(group.block_tokens for group in self.storage.layout.groups))
        return max(0, hit - num_computed_tokens)

    # ---- loading

    def hold(self, tokens: Sequence[int], wanted: Wanted, *, tenant: bytes | None = None) -> HeldPrefix:
        """What a load of the wanted tokens can use, for the caller to release; nothing while the device is left alone.

        Args:
            tokens: the sequence, from its first token on, to the end of the chunk in which the wanted ones end.
            wanted: of the sequence.
            tenant: whose objects; None: the key space's.
        """
        keys = self.keys_of(tokens, tenant)[: -(-wanted.num_tokens // self.space.chunk_tokens)]
        if not self._allowed() or wanted.skip_tokens == wanted.num_tokens:
            keys = ()
        return self.storage.hold_prefix(keys, wanted.skip_tokens // self.space.chunk_tokens)

    def retrieve_layer(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        mask: Mask | None = None,
        *,
        tenant: bytes | None = None,
        sync: bool = True,
    ) -> Generator[RetrieveYield, None, None]:
        """N+2 yields: setup, each layer on its way, the mask of the tokens that are there.

        The setup and each layer yield how many tokens will come, or still do: a smaller number than before means that a
        load failed, in this very step. Moving on from layer l to layer l+1, the compute stream waits for layer l of
        every request of the batch if this is its last (`sync`); moving on from the last layer, for that one.

        With the mask it holds nothing any more: an object stays pinned until the last copy that reads it has drained
        (XFER-2), by the copy. Closed early, it returns once nothing of it moves, and holds nothing. With blending it is
        to be run to its end (`next(retriever, None)`): what follows the mask scatters the last layer.

        Args:
            tokens: the sequence, from its first token on.
            block_ids: the engine's block table of each kernel group, from the first token on: `[groups][blocks]`.
            mask: True for the tokens that are wanted, `[len(tokens)]`: any number of leading tokens that the engine has
                already, and of trailing ones that it will compute, may be False. None: all.
            tenant: whose objects; None: the key space's.
            sync: whether this is the last request of the batch.

        Raises:
            ValueError: a mask with a hole, tokens that have no block, or (block form) a wanted range that cuts a block.
            TypeError: as `keys_of`, a mask that is no array of bool, or a block table that stands for all of them.
        """
        wanted = _wanted(mask, _count(tokens))
        tables = self._tables(block_ids)
        held = self.hold(tokens, wanted, tenant=tenant)
        with ExitStack() as holding:
            holding.callback(held.release)
            num_tokens = min(wanted.num_tokens, tokens_of(held.keys))
            blocks = Blocks(tables, num_tokens, min(wanted.skip_tokens, num_tokens))
            self.connector.check(blocks, Direction.RETRIEVE)
            yield from self._advance(Load(blocks, held.num_chunks), held, len(tokens), sync, holding.close)

    def _advance(
        self, load: Load, held: HeldPrefix, num_tokens: int, sync: bool, release: Callable[[], None]
    ) -> Generator[RetrieveYield, None, None]:
        futures = self.storage.layerwise_batched_get(held, self.connector.slices)
        consumer = self.connector.batched_to_gpu(load, sync=sync)
        future = next(futures)
        unsent: LayerFuture | None = future
        try:
            next(consumer)
            yield _coming(load, held)
            for layer in range(1, self.num_layers + 1):
                unsent = None  # the connector's from here on
                consumer.send(future)
                if layer < self.num_layers:  # what a tier has to read is read while this layer is under way
                    following = next(futures)
                    unsent = following if following is not future else None
                    future = following
                yield _coming(load, held)
            next(consumer)
            there = np.zeros(num_tokens, dtype=np.bool_)
            there[load.blocks.skip_tokens : load.blocks.skip_tokens + _coming(load, held)] = True
            release()  # what is still being copied is held by its copies
            yield there
            next(consumer, None)  # whatever the connector does after the last yield
        finally:
            consumer.close()
            if unsent is not None and not unsent.cancel():
                unsent.add_done_callback(let_go)
            self.ended("load", load.moving())

    # ---- storing

    def store_layer(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        mask: Mask | None = None,
        *,
        tenant: bytes | None = None,
        sync: bool = True,
    ) -> Generator[int, None, None]:
        """N+1 yields: each layer, which was just computed, on its way; at last all have landed and can be found.

        The first advance takes room for every layer, all or nothing. Each yield says how many tokens are being stored;
        the last one, how many were: 0 if the store was given up, with nothing of it left.

        Closed early, it returns once nothing of it moves, and nothing of it can be found.

        Args:
            tokens: the sequence, from its first token on, with every layer's KV in the blocks when it is due.
            block_ids: the engine's block table of each kernel group, from the first token on: `[groups][blocks]`.
            mask: False for leading tokens that need not be stored, `[len(tokens)]`. Objects are whole chunks, so the
                chunk in which the True part begins is stored from its start (fault 55).
            tenant: whose objects; None: the key space's.
            sync: whether this is the first request of the batch: the store stream waits for what was computed so far.

        Raises:
            ValueError: a mask with a hole or a False tail, or blocks that are missing.
            TypeError: as `retrieve_layer`.
        """
        wanted = _wanted(mask, _count(tokens))
        if mask is not None and wanted.skip_tokens < wanted.num_tokens < len(tokens):
            raise ValueError(f"a store's mask must be True to its end, got False from token {wanted.num_tokens} on")
        keys = self.keys_of(tokens, tenant)
        blocks = Blocks(self._tables(block_ids), tokens_of(keys))
        self.connector.check(blocks, Direction.STORE)
        first = wanted.skip_tokens // self.space.chunk_tokens
        new = keys[first:] if wanted.skip_tokens < wanted.num_tokens else ()
        reservation = self.storage.allocate(new, keys[first - 1] if first else None) if self._allowed() else None
        if reservation is None and new:
            _log.info("%d chunks are not stored: no room for all of them now", len(new))
        chunk_of = {key: chunk for chunk, key in enumerate(keys)}
        placed = {} if reservation is None else dict(zip(reservation.keys, reservation.addresses, strict=True))
        save = Save(blocks, {chunk_of[key]: address for key, address in placed.items()})
        num_tokens = tokens_of(tuple(placed))
        producer = self.connector.batched_from_gpu(save, sync=sync)
        try:
            for _ in range(self.num_layers):
                next(producer)
                yield num_tokens if save.reason is None else 0
            next(producer)
            if reservation is not None:
                room, reservation = reservation, None
                if save.reason is None:
                    self.storage.batched_put(room)
                else:
                    save.outstanding.then(room.abandon)
            yield num_tokens if save.reason is None else 0
        finally:
            producer.close()
            if reservation is not None:
                save.outstanding.then(reservation.abandon)
            self.ended("store", save.moving)

    def drain(self, timeout_s: float) -> bool:
        """Whether every transfer begun has drained and let go of its objects within the bound."""
        streams = (self.connector.load_stream, self.connector.store_stream)
        return all(stream.outstanding.wait(timeout_s) for stream in streams)

    def let_go_of_loads(self) -> None:
        """The objects of loads that have landed are free for whoever needs room next, within the connector's bound."""
        self.connector.load_stream.outstanding.wait(self.connector.timeout_s)

    def _tables(self, block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        """The block tables, one a kernel group, each a sequence of whole numbers."""
        groups = len(self.storage.layout.groups)
        wanted = f"block_ids must be a block table for each kernel group, {groups} here, each a list of whole numbers"
        try:
            tables = tuple(block_ids)
        except TypeError:
            raise TypeError(f"{wanted}, as in [[3, 4, 5]], got {block_ids!r}") from None
        for group, table in enumerate(tables):
            try:
                ids = np.asarray(table)
            except ValueError:  # tables of unlike lengths, one in the other
                ids = np.empty((0, 0))
            if ids.ndim == 0 and ids.dtype.kind in "iu":
                raise TypeError(
                    f"{wanted}, got the numbers themselves, {table!r} first: pass [block_ids] for one group"
                )
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise TypeError(f"{wanted}, got {table!r} for group {group}")
        return tables

    # ---- health and trace

    def _allowed(self) -> bool:
        return self._breaker is None or self._breaker.state is not CircuitState.OPEN

    def ended(self, kind: str, moving: Sequence[Moving]) -> None:
        """What moved is told to the recorder, and how it ended to the circuit breaker."""
        if self._recorder is not None:
            for span in self.connector.spans(kind, moving):
                self._recorder(span)
        if self._breaker is None:
            return
        failed = [one.transfer.error for one in moving if one.transfer.state is TransferState.FAILED]
        if failed:
            self._breaker.failed(failed[0])
        elif moving and all(one.has_landed for one in moving):
            self._breaker.succeeded()


def _count(tokens: Sequence[int]) -> int:
    try:
        return len(tokens)
    except TypeError:
        raise TypeError(f"tokens must be a sequence of whole numbers, as in list(tokens), got {tokens!r}") from None


def _wanted(mask: Mask | None, num_tokens: int) -> Wanted:
    if mask is None:
        return Wanted(0, num_tokens)
    given: object = mask
    if not isinstance(given, np.ndarray) or given.dtype != np.bool_:
        kind = f"an array of {given.dtype}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        raise TypeError(
            f"mask must be a NumPy array of bool, [{num_tokens}], or None, got {kind}: "
            "pass numpy.asarray(mask, dtype=bool)"
        )
    if mask.shape != (num_tokens,):
        raise ValueError(f"a mask must have one entry for each of {num_tokens} tokens, got shape {mask.shape}")
    found = np.flatnonzero(mask)
    if not found.size:
        return Wanted(num_tokens, num_tokens)
    first, end = int(found[0]), int(found[-1]) + 1
    if found.size != end - first:
        hole = first + int(np.flatnonzero(~mask[first:end])[0])
        raise ValueError(f"a mask must be True for one run of tokens, got False at {hole} inside {first} .. {end - 1}")
    return Wanted(first, end)


def tokens_of(keys: Sequence[ChunkKey]) -> int:
    """Tokens of these chunks together."""
    return sum(key.num_tokens for key in keys)


def let_go(future: LayerFuture) -> None:
    """What was read for nobody is released. For `add_done_callback`, of a future that could not be cancelled."""
    if future.exception() is None:
        for source in future.result().sources:
            source.release()


def _coming(load: Load, held: HeldPrefix) -> int:
    """Tokens that the load still brings."""
    there = min(load.blocks.num_tokens, tokens_of(held.keys[: load.num_chunks]))
    return max(0, there - load.blocks.skip_tokens)
