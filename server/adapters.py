"""Clients for engines whose attention waits for no layer: whole loads, in the words such engines use.

Both send what a layer-major rank sends, with placeholders in its place (no board, no events, width 0), so that the
server needs no second protocol. A load that fails, or a server that is gone, is fewer tokens, never an error.

`SlotMappedClient` is SGLang-shaped: a cache of single token slots (or small pages), a slot for each token, calls that
return when the bytes are there. `BlockTableClient` is TensorRT-LLM-shaped: a scheduler asks what matches, gives blocks,
and is told by `get_finished` which loads and saves have ended. An engine that does wait layer by layer takes
`lamella.server.worker.Worker` itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys
from lamella.reference.release import Whole
from lamella.server.rank import RankCaches, RankOfEngine, Report
from lamella.server.sequences import Locked
from lamella.server.worker import Worker

_LOOK_S = 100e-6


class _WholeLoads:
    """A worker whose retrieves are released when all of them has landed."""

    def __init__(self, folder: Path, of: RankOfEngine, caches: RankCaches, timeout_s: float, **options: Any) -> None:
        self.worker = Worker(
            folder, of, caches, layers_per_slice=0, release=Whole(), load_timeout_s=timeout_s, **options
        )
        self.chunk_tokens = caches.layout.chunk_tokens
        self.block_tokens = caches.layout.groups[0].block_tokens
        self._space = of.space
        self._timeout_s = timeout_s

    def keys(self, token_ids: Sequence[int], salt: bytes) -> tuple[ChunkKey, ...]:
        """Keys of a sequence's whole chunks, in its tenant's key space."""
        space = self._space
        salted = KeySpace(
            *(space.model, space.dtype, space.form, space.inner_layout, space.chunk_tokens),
            *(space.tp_rank, space.tp_size, space.layers, salt or space.salt),
        )
        return chunk_keys(salted, token_ids)

    def lookup(self, keys: Sequence[ChunkKey], num_computed: int) -> tuple[Locked, int]:
        """What is there of `keys` behind the tokens the engine has, and how many tokens from token 0 on that covers."""
        locked = self.worker.lookup(keys, first_wanted=min(num_computed // self.chunk_tokens, len(keys)))
        return locked, max(0, locked.num_chunks * self.chunk_tokens)

    def close(self) -> None:
        """The rank has left the server."""
        self.worker.close()


class SlotMappedClient(_WholeLoads):
    """See the module; for one thread.

    Args:
        folder: the server's.
        of: which rank this is.
        caches: whose blocks are single token slots, or pages of a few.
        timeout_s: bound of a load or a store.
        options: for `Worker`.
    """

    def __init__(
        self, folder: Path, of: RankOfEngine, caches: RankCaches, *, timeout_s: float = 10.0, **options: Any
    ) -> None:
        super().__init__(folder, of, caches, timeout_s, **options)

    def load_kv(self, token_ids: Sequence[int], slot_mapping: Sequence[int], offset: int = 0, salt: bytes = b"") -> int:
        """Tokens `[offset, returned)` are in their slots; `offset` itself where nothing was there, or came.

        Args:
            token_ids: of the sequence from its first token on.
            slot_mapping: the slot of each of them; those before `offset` may be any.
            offset: tokens the engine has; whole blocks.
            salt: of the tenant.

        Raises:
            ValueError: slots that are not whole blocks, or an offset inside one.
        """
        blocks = self._blocks(token_ids, slot_mapping, offset)
        locked, end = self.lookup(self.keys(token_ids, salt), offset)
        if end <= offset:
            self.worker.give_back(locked)
            return offset
        number = self.worker.retrieve(
            "load", locked, (tuple(blocks[: end // self.block_tokens]),), end, skip_tokens=offset
        )
        return end if self._wait_load(number) else offset

    def store_kv(
        self, token_ids: Sequence[int], slot_mapping: Sequence[int], offset: int = 0, salt: bytes = b""
    ) -> bool:
        """Whether something new can be read by others: False where all was there, refused, or the server is gone.

        Args:
            token_ids, slot_mapping, salt: as for `load_kv`; whole chunks of them are stored.
            offset: chunks that end before it are known to be there.

        Raises:
            ValueError: as `load_kv`.
        """
        keys = self.keys(token_ids, salt)
        first = min(offset // self.chunk_tokens, len(keys))
        whole = len(keys) * self.chunk_tokens
        blocks = self._blocks(token_ids[:whole], slot_mapping[:whole], 0)
        numbers = set(self.worker.store("store", keys, (tuple(blocks),), first))
        self.worker.begin_step(num_tokens=1)
        self.worker.step_computed()
        done: dict[int, bool] = {}
        end = time.monotonic() + self._timeout_s
        while not numbers <= set(done) and time.monotonic() < end:
            done.update(self.worker.poll().readable)
            time.sleep(_LOOK_S)
        return any(done.values())

    def _blocks(self, token_ids: Sequence[int], slot_mapping: Sequence[int], offset: int) -> list[int]:
        size = self.block_tokens
        if offset % size:
            raise ValueError(f"offset must be whole blocks of {size} tokens, got {offset}")
        if len(slot_mapping) != len(token_ids):
            raise ValueError(f"slot_mapping has an entry a token, got {len(slot_mapping)} for {len(token_ids)} tokens")
        whole = len(token_ids) // size * size
        slots = np.asarray(slot_mapping[:whole], dtype=np.int64).reshape(-1, size)  # [blocks, size]
        wanted = slots[offset // size :]
        if (wanted != wanted[:, :1] // size * size + np.arange(size)).any():
            raise ValueError(f"slots must come in whole blocks of {size} consecutive ones, got {list(slot_mapping)}")
        return [int(first) // size for first in slots[:, 0]]

    def _wait_load(self, number: int) -> bool:
        end = time.monotonic() + self._timeout_s + 5.0
        while time.monotonic() < end:
            self.worker.begin_step()
            report = self.worker.poll()
            if number in report.loads:
                return report.loads[number].ok
            time.sleep(_LOOK_S)
        self.worker.abort(number)
        return False


class Finished(NamedTuple):
    """What has ended since the last look.

    Attributes:
        saved: requests whose blocks are not read any more.
        loaded: requests whose load has landed.
        failed: requests whose load did not: the tokens it was to bring must be computed.
    """

    saved: list[str]
    loaded: list[str]
    failed: list[str]


@dataclass(slots=True)
class _Request:
    keys: tuple[ChunkKey, ...]
    locked: Locked | None
    end: int
    computed: int
    load: int | None = None
    is_over: bool = False
    saves: set[int] = field(default_factory=set)


class BlockTableClient(_WholeLoads):
    """See the module; for one thread.

    Args:
        (all): as `SlotMappedClient`.
    """

    def __init__(
        self, folder: Path, of: RankOfEngine, caches: RankCaches, *, timeout_s: float = 10.0, **options: Any
    ) -> None:
        super().__init__(folder, of, caches, timeout_s, **options)
        self._requests: dict[str, _Request] = {}

    # ---- as its scheduler calls

    def get_num_new_matched_tokens(
        self, request: str, token_ids: Sequence[int], num_computed: int, salt: bytes = b""
    ) -> tuple[int, bool]:
        """(tokens that can be loaded behind `num_computed`, whether they come asynchronously); locked until then.

        Whole blocks, and never the last token, which has to be computed.
        """
        keys = self.keys(token_ids, salt)
        locked, end = self.lookup(keys, num_computed)
        size = self.block_tokens
        end = min(end, (len(token_ids) - 1) // size * size)
        if end <= num_computed or num_computed % size:
            self.worker.give_back(locked)
            self._requests[request] = _Request(keys, None, 0, num_computed)
            return 0, False
        self._requests[request] = _Request(keys, locked, end, num_computed)
        return end - num_computed, True

    def update_state_after_alloc(self, request: str, block_ids: Sequence[int]) -> None:
        """The request's blocks, from its first token on; its load begins.

        Raises:
            KeyError: a request that nobody asked about.
        """
        found = self._requests[request]
        if found.locked is None:
            return
        blocks = tuple(block_ids[: found.end // self.block_tokens])
        found.load = self.worker.retrieve(request, found.locked, (blocks,), found.end, skip_tokens=found.computed)
        found.locked = None

    def request_finished(self, request: str, block_ids: Sequence[int]) -> bool:
        """Whether the request's blocks must be kept until `get_finished` names it: they are being saved, or written."""
        found = self._requests[request]
        if found.locked is not None:
            self.worker.give_back(found.locked)
            found.locked = None
        found.is_over = True
        if found.load is not None:
            self.worker.abort(found.load)
            return True
        found.saves = set(self.worker.store(request, found.keys, (tuple(block_ids),)))
        self.worker.begin_step(num_tokens=1)
        self.worker.step_computed()
        if not found.saves:
            del self._requests[request]
        return bool(found.saves)

    # ---- as its worker calls

    def get_finished(self) -> Finished:
        """What has ended since the last look, each once."""
        self.worker.begin_step()
        report: Report = self.worker.poll()
        finished = Finished([], [], [])
        for name, request in list(self._requests.items()):
            if request.load is not None and request.load in report.loads:
                ok, request.load = report.loads[request.load].ok, None
                if not request.is_over:
                    (finished.loaded if ok else finished.failed).append(name)
            request.saves -= set(report.stores)
            if request.is_over and request.load is None and not request.saves:
                finished.saved.append(name)
                del self._requests[name]
        return finished
