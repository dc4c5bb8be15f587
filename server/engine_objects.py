"""What a cache server keeps, as the scheduler of a vLLM engine asks: `lamella.connector.objects.Objects`.

Each question has a bound of 50 ms. What has not been answered by then is a miss, and so is everything until the answer
has come; what a late answer has locked or reserved is given back. A server that is gone is a miss at once. Its loss,
and its return, are said once each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import lamella
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.objects import Refusal, Taken
from lamella.connector.step_orders import BlockTables, FetchOrder, LoadOrder, StepReport, StoreOrder
from lamella.connector.tier_prefetch import RankObjects
from lamella.reference.keys import ChunkKey
from lamella.server.client import MISS, CacheSession, Epoch
from lamella.server.connection import Connection, ServerLostError
from lamella.server.frames import RefusedError, allocation, pack_prefixes
from lamella.server.moves import Line
from lamella.server.protocol import (
    Abort,
    Found,
    Lookup,
    Message,
    Register,
    Release,
    Role,
    Stored,
    TransferSide,
)
from lamella.server.sequences import Locked, SharedLoad, SharedStore, allocate
from lamella.server.wire import EVERY_RANK, Code

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", bound=Message)

ANSWER_S: Final = 0.05
"""How long the scheduler's thread waits for an answer; a lookup of 512 chunks takes about a millisecond."""
_TIER_LOOK_NS: Final = 5_000_000
"""How often a tier's progress is asked for."""


@dataclass(slots=True)
class _Asked:
    """What was found for a request."""

    locked: Locked
    num_keys: int
    last: ChunkKey
    at_ns: int


class EngineObjects:
    """See the module.

    Args:
        folder: the server's.
        facts: of the engine.
        tier_timeout_s: how long a request waits for what a tier brings.
        answer_s: bound of a question.
        clock_ns: the monotonic clock of this host.

    Raises:
        ServerLostError, RefusedError, FileNotFoundError, PermissionError: as `CacheSession`.
    """

    def __init__(
        self,
        folder: Path,
        facts: EngineFacts,
        tier_timeout_s: float,
        *,
        answer_s: float = ANSWER_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._chunk_tokens = facts.space.chunk_tokens
        self._tier_timeout_ns = int(tier_timeout_s * 1e9)
        self._answer_s = answer_s
        self._clock_ns = clock_ns
        side = TransferSide.WORKER
        register = Register(
            *(lamella.__version__, facts.engine, Role.SCHEDULER, 0, facts.num_ranks, None, (), 0),
            *(side, "", (), (), None, ""),
        )
        self._session = CacheSession(folder, register)
        self._line = Line(Connection(folder, timeout_s=answer_s), lambda: self._session.epoch.registered.session)
        self._asked: dict[str, _Asked] = {}
        self._tier_since_ns: dict[str, int] = {}
        self._late: tuple[int, Future[Any]] | None = None
        self._refusal: Refusal | None = None  # of the reservation under way

    # ---- reading

    def set_ranks(self, ranks: Sequence[RankObjects], ready_slots: int, take_number: Callable[[], int]) -> None:
        """As `Objects.set_ranks`: ranks say it to the server."""

    def find(self, request: str, keys: Sequence[ChunkKey], first_wanted: int) -> int | None:
        """As `Objects.find`: the minimum over ranks, locked on each for as long as the request goes on asking."""
        if not keys:
            return 0
        asked, now_ns = self._asked.get(request), self._clock_ns()
        if asked is None or not self._is_good(asked, keys, first_wanted, now_ns):
            self.let_go(request)
            asked = _Asked(self._lookup(keys, first_wanted), len(keys), keys[-1], now_ns)
            self._asked[request] = asked
        if not asked.locked.found.pending:
            self._tier_since_ns.pop(request, None)
        elif now_ns - self._tier_since_ns.setdefault(request, now_ns) < self._tier_timeout_ns:
            return None
        return asked.locked.num_chunks

    def _is_good(self, asked: _Asked, keys: Sequence[ChunkKey], first_wanted: int, now_ns: int) -> bool:
        """Whether what was found still is all there is to find, and stays locked for long enough."""
        locked = asked.locked
        if locked.server != self._server or (asked.num_keys, asked.last) != (len(keys), keys[-1]):
            return False
        if locked.found.pending:
            return now_ns - asked.at_ns < _TIER_LOOK_NS
        half_ns = (locked.until_ns - asked.at_ns) // 2
        return bool(locked.found.lease) and locked.first_chunk == first_wanted and now_ns < asked.at_ns + half_ns

    def _lookup(self, keys: Sequence[ChunkKey], first_wanted: int) -> Locked:
        try:
            epoch = self._session.epoch
        except ServerLostError:
            return Locked(MISS, 0, 0, first_wanted)
        before_ns = self._clock_ns()
        message = Lookup(
            epoch.registered.session, pack_prefixes(keys), keys[-1].num_tokens, first_wanted, EVERY_RANK, True
        )
        found = self._ask(message, Found) or MISS
        until_ns = before_ns + int(epoch.registered.lease_s * 1e9)
        return Locked(found, epoch.server, until_ns, first_wanted)

    def let_go(self, request: str) -> None:
        """As `Objects.let_go`."""
        asked = self._asked.pop(request, None)
        if asked is not None and asked.locked.found.lease:
            self._line.ask(Release(self._line.session, asked.locked.found.lease, EVERY_RANK))

    def load(self, order: LoadOrder, keys: Sequence[ChunkKey]) -> LoadOrder:
        """As `Objects.load`: the lease goes with the order, and each rank takes its part over."""
        locked = self._asked.pop(order.request).locked
        begin = order.first_chunk - locked.first_chunk
        rows = tuple(row[begin : begin + len(keys)] for row in locked.found.slots)
        if begin < 0 or any(len(row) < len(keys) for row in rows):
            raise RuntimeError(
                f"chunks {order.first_chunk} to {order.first_chunk + len(keys) - 1} of {order.request} are to be "
                f"loaded, locked are {locked.first_chunk} to {locked.num_chunks - 1}"
            )
        given = {field.name: getattr(order, field.name) for field in fields(LoadOrder)}
        return SharedLoad(
            **{**given, "slots": rows[0]},
            lease=locked.found.lease,
            server=locked.server,
            locked_until_ns=locked.until_ns,
            rows=rows,
        )

    def load_ended(self, order: LoadOrder) -> None:
        """As `Objects.load_ended`: each rank has let go of its part."""

    # ---- writing

    def reserve(
        self,
        request: str,
        keys: Sequence[ChunkKey],
        first_chunk: int,
        blocks: BlockTables,
        take_number: Callable[[], int],
    ) -> Taken:
        """As `Objects.reserve`: slots on every rank that lacks a chunk."""
        if self._session.is_lost:
            return Taken([], Refusal.NO_ANSWER)
        self._refusal = None
        orders = allocate(self, request, keys, blocks, first_chunk, self._chunk_tokens, EVERY_RANK, take_number)
        return Taken([*orders], self._refusal)

    @property
    def epoch(self) -> Epoch:
        """As `Allocator.epoch`."""
        return self._session.epoch

    def allocate(
        self,
        keys: Sequence[ChunkKey],
        *,
        first_chunk: int = 0,
        rank: int = EVERY_RANK,
        epoch: Epoch | None = None,
    ) -> Stored:
        """As `Allocator.allocate`; what is not answered in time is not stored, nor what comes behind a refusal."""
        if self._refusal is None:
            epoch = epoch or self._session.epoch
            stored = self._ask(allocation(epoch.registered.session, keys, first_chunk, rank), Stored)
            if stored is None:
                self._refusal = Refusal.NO_ANSWER
            elif stored.no_room or stored.no_head:
                self._refusal = Refusal.NO_ROOM if stored.no_room else Refusal.NO_HEAD
            else:
                return stored
        return Stored(0, (), False, False, "", 0, 0)

    def abort(self, lease: int, rank: int = EVERY_RANK) -> None:
        """As `Allocator.abort`."""
        self._line.ask(Abort(self._line.session, lease, rank))

    def drop(self, order: StoreOrder) -> None:
        """As `Objects.drop`."""
        assert isinstance(order, SharedStore), "stores on a server have a lease"
        self.abort(order.lease)

    def store_ended(self, order: StoreOrder, *, ok: bool) -> None:
        """As `Objects.store_ended`: each rank has committed its part, or given it up."""

    # ---- the server's answers

    @property
    def _server(self) -> int:
        try:
            return self._session.epoch.server
        except ServerLostError:
            return 0

    def _ask(self, message: Message, answer: type[_Answer]) -> _Answer | None:
        """The answer; None where there is none in time, or a refusal."""
        if self._is_late():
            return None
        future = self._line.ask(message)
        until = time.monotonic() + self._answer_s
        while not future.done():
            left_s = until - time.monotonic()
            if left_s <= 0:
                _log.warning(
                    "the cache server has not answered within %g s: everything is a miss until it does", self._answer_s
                )
                self._late = self._server, future
                return None
            self._line.look(left_s)
        error = future.exception()
        if isinstance(error, RefusedError) and error.code not in (Code.DRAINING, Code.UNKNOWN_SESSION):
            _log.error("the cache server refused a %s: %s", type(message).__name__, error)
        if error is not None:
            return None
        found = future.result()
        assert isinstance(found, answer), "answers are decoded as what the protocol says"
        return found

    def _is_late(self) -> bool:
        """Whether an answer is still outstanding; one that has come, or never will, is settled."""
        if self._late is None:
            return False
        server, future = self._late
        self._line.look()
        if not future.done() and server == self._server:
            return True
        self._late = None
        if future.done() and future.exception() is None:
            found = future.result()
            if isinstance(found, Found) and found.lease:
                self._line.ask(Release(self._line.session, found.lease, EVERY_RANK))
            elif isinstance(found, Stored) and found.lease:
                self.abort(found.lease)
            _log.warning("the cache server answers again")
        return False

    # ---- steps and ends

    def take_orders(self) -> tuple[FetchOrder, ...]:
        """As `Objects.take_orders`: the server fetches by itself."""
        self._line.look()
        return ()

    def take_in(self, report: StepReport) -> None:
        """As `Objects.take_in`."""

    def has_run(self, request: str) -> None:
        """As `Objects.has_run`."""
        self.let_go(request)
        self._tier_since_ns.pop(request, None)

    def forget(self, request: str) -> None:
        """As `Objects.forget`."""
        self.has_run(request)

    @property
    def num_open(self) -> int:
        """As `Objects.num_open`."""
        return 0

    def reset(self) -> bool:
        """As `Objects.reset`: false, since other engines share what the server keeps."""
        _log.warning("the cache server keeps its objects for other engines; none of them is found here any more")
        return False

    def close(self) -> None:
        """As `Objects.close`."""
        self._line.close()
        self._session.close()
