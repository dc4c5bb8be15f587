"""A sequence's chunks on the server: what a lookup locked, and what a store was given, on every rank of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lamella.connector.step_orders import BlockTables, LoadOrder, StoreOrder
from lamella.reference.keys import ChunkKey
from lamella.server.client import Epoch
from lamella.server.connection import ServerLostError
from lamella.server.frames import RefusedError
from lamella.server.moves import LeasedLoad, LeasedStore
from lamella.server.protocol import Found, Places, Stored

_log = logging.getLogger(__name__)


class Locked(NamedTuple):
    """What a lookup found, and how long its lock holds before a retrieve makes it its own.

    Attributes:
        found: the server's answer.
        server: whose slots these are; 0: there is none now.
        until_ns: until when the lock holds (`time.monotonic_ns`).
        first_chunk: that was locked.
    """

    found: Found
    server: int
    until_ns: int
    first_chunk: int

    @property
    def num_chunks(self) -> int:
        """Chunks from chunk 0 on that are there."""
        return self.found.num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLoad(LoadOrder):
    """A load by every rank of an engine, each of its own part of a lookup's lease.

    Attributes:
        lease, server, locked_until_ns: as `LeasedLoad`.
        rows: each rank's slots, of the chunks of `slots` (which are rank 0's).
    """

    lease: int
    server: int
    locked_until_ns: int
    rows: tuple[tuple[int, ...], ...]

    def part(self, rank: int, layers_per_slice: int | tuple[int, ...]) -> LeasedLoad:
        """A rank's own load, moved like this."""
        return LeasedLoad(
            self.number,
            self.request,
            self.rows[rank],
            self.first_chunk,
            self.blocks,
            self.num_tokens,
            self.skip_tokens,
            self.joins_step,
            self.plan,
            lease=self.lease,
            server=self.server,
            locked_until_ns=self.locked_until_ns,
            layers_per_slice=layers_per_slice,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStore(StoreOrder):
    """A store by every rank of an engine that lacks some of the chunks; `slots` and chunks are of the first of them.

    Attributes:
        lease, server: as `LeasedStore`.
        places: each rank's slots, of consecutive chunks.
        chunk_tokens: of a full chunk.
    """

    lease: int
    server: int
    places: tuple[Places, ...]
    chunk_tokens: int

    def part(self, rank: int) -> LeasedStore | None:
        """A rank's own store; None where that rank has everything."""
        return next((part for part in self.parts() if part.rank == rank), None)

    def parts(self) -> tuple[LeasedStore, ...]:
        """Every rank's own."""
        return tuple(
            LeasedStore(
                self.number,
                self.request,
                places.slots,
                places.chunks[0],
                self.blocks,
                min(self.num_tokens, (places.chunks[-1] + 1) * self.chunk_tokens),
                places.chunks[0] * self.chunk_tokens,
                self.keys[places.chunks[0] - self.first_chunk : places.chunks[-1] + 1 - self.first_chunk],
                lease=self.lease,
                server=self.server,
                rank=places.rank,
            )
            for places in self.places
        )


class Allocator(Protocol):
    """Who asks the server for slots; `lamella.server.client.CacheSession` is one."""

    @property
    def epoch(self) -> Epoch:
        """The registration in force; raises ServerLostError where there is none."""

    def allocate(
        self, keys: Sequence[ChunkKey], *, first_chunk: int = 0, rank: int = ..., epoch: Epoch | None = None
    ) -> Stored:
        """As `CacheSession.allocate`."""

    def abort(self, lease: int, rank: int = ...) -> object:
        """As `CacheSession.abort`."""


def allocate(
    session: Allocator,
    request: str,
    keys: Sequence[ChunkKey],
    blocks: BlockTables,
    first_chunk: int,
    chunk_tokens: int,
    rank: int,
    take_number: Callable[[], int],
) -> list[SharedStore]:
    """Orders to store what is not there yet, each of consecutive chunks; none where there is no room or no head.

    Args:
        session: that allocates.
        request: whose.
        keys: of the sequence's chunks from chunk 0 on.
        blocks: block tables of the sequence from its first token on.
        first_chunk: the first to store.
        chunk_tokens: of a full chunk.
        rank: for whom; `EVERY_RANK`: for all that lack something.
        take_number: a number for each order.

    Raises:
        ValueError: a first chunk that is not among them.
    """
    if len(keys) == first_chunk:
        return []
    try:
        epoch = session.epoch  # before the first slot is given, which is good in this one's memory alone
        stored = session.allocate(keys, first_chunk=first_chunk, rank=rank, epoch=epoch)
        runs = _runs(stored.places[0].chunks if stored.places else ())
        answers = [stored]
        if len(runs) > 1:  # a lease is committed as a whole, so each run needs its own
            session.abort(stored.lease, rank)
            answers = [
                session.allocate(keys[: run[-1] + 1], first_chunk=run[0], rank=rank, epoch=epoch) for run in runs
            ]
    except (ServerLostError, RefusedError) as error:
        _log.warning("request %s is not stored: %s", request, error)
        return []
    orders = []
    for one in answers:
        if not one.places:
            continue
        if any(len(_runs(places.chunks)) != 1 for places in one.places):  # others stored between the two calls
            session.abort(one.lease, rank)
            continue
        first = min(places.chunks[0] for places in one.places)
        end = max(places.chunks[-1] for places in one.places) + 1
        orders.append(
            SharedStore(
                take_number(),
                request,
                one.places[0].slots,
                first,
                blocks,
                (end - 1) * chunk_tokens + keys[end - 1].num_tokens,
                first * chunk_tokens,
                tuple(keys[first:end]),
                lease=one.lease,
                server=epoch.server,
                places=one.places,
                chunk_tokens=chunk_tokens,
            )
        )
    return orders


def _runs(chunks: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for chunk in chunks:
        if found and found[-1][-1] + 1 == chunk:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found
