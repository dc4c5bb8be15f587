"""A sequence's chunks on the server: what a lookup locked, and what a store was given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lamella.connector.step_orders import BlockTables
from lamella.reference.keys import ChunkKey
from lamella.server.client import CacheSession
from lamella.server.connection import ServerLostError
from lamella.server.frames import RefusedError
from lamella.server.moves import LeasedStore
from lamella.server.protocol import Found

_log = logging.getLogger(__name__)


class Locked(NamedTuple):
    """What a lookup found, and how long its lock holds before a retrieve makes it its own.

    Attributes:
        found: the server's answer.
        epoch: registration whose slots these are; 0: there is none now.
        until_ns: until when the lock holds (`time.monotonic_ns`).
        first_chunk: that was locked.
    """

    found: Found
    epoch: int
    until_ns: int
    first_chunk: int

    @property
    def num_chunks(self) -> int:
        """Chunks from chunk 0 on that are there."""
        return self.found.num_chunks


def allocate(
    session: CacheSession,
    request: str,
    keys: Sequence[ChunkKey],
    blocks: BlockTables,
    first_chunk: int,
    chunk_tokens: int,
    rank: int,
    take_number: Callable[[], int],
) -> list[LeasedStore]:
    """Orders to store what of `keys` is not there yet, each of consecutive chunks; none where there is no room.

    Args:
        session: that allocates.
        request: whose.
        keys: of chunks `first_chunk`, `first_chunk + 1`, ...
        blocks: block tables of the sequence from its first token on.
        chunk_tokens: of a full chunk.
        rank: for whom; `EVERY_RANK`: an order for each rank that is in the answer, each under the same lease.
        take_number: a number for each order.
    """
    if not keys:
        return []
    try:
        epoch = session.epoch  # before the first slot is given, which is good in this one's memory alone
        stored = session.allocate(keys, first_chunk=first_chunk, rank=rank, epoch=epoch)
        runs = _runs(stored.places[0].chunks if stored.places else ())
        answers = [stored]
        if len(runs) > 1:  # a lease is committed as a whole, so each run needs its own
            session.abort(stored.lease, rank)
            answers = [
                session.allocate(
                    keys[run[0] - first_chunk : run[-1] + 1 - first_chunk],
                    first_chunk=run[0],
                    rank=rank,
                    epoch=epoch,
                )
                for run in runs
            ]
    except (ServerLostError, RefusedError) as error:
        _log.warning("request %s is not stored: %s", request, error)
        return []
    orders = []
    for one in answers:
        if any(len(_runs(places.chunks)) != 1 for places in one.places):  # others stored between the two calls
            session.abort(one.lease, rank)
            continue
        for places in one.places:
            first, end = places.chunks[0], places.chunks[-1] + 1
            last = keys[end - 1 - first_chunk].num_tokens
            orders.append(
                LeasedStore(
                    take_number(),
                    request,
                    places.slots,
                    first,
                    blocks,
                    (end - 1) * chunk_tokens + last,
                    first * chunk_tokens,
                    tuple(keys[first - first_chunk : end - first_chunk]),
                    lease=one.lease,
                    epoch=epoch.number,
                    rank=places.rank,
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
