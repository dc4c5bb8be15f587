"""Objects that lie in a file tier only are brought into the host pool before a request may load them.

    asked ──lookup thread──► found ──fetch ordered──► in the pool, or not: either way the request goes on

Nobody waits on a file system here: a lookup runs on a thread, a fetch in the workers, and the engine asks again later.
Both are bounded; what does not answer in time is a miss, and so is all that is asked until it has answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lamella.connector.step_orders import Ended, FetchOrder
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.tier import TierError
from lamella.cuda_ext.slot_index import SlotIndex
from lamella.reference.keys import ChunkKey

_log = logging.getLogger(__name__)


class RankObjects(NamedTuple):
    """How one rank names and sizes its share of an object."""

    space: bytes
    object_bytes: int


def rank_key(key: ChunkKey, space: bytes) -> ChunkKey:
    """The rank's own key of a chunk: its layout, heads and layers are in `space`."""
    return key._replace(space=space)


@dataclass(slots=True)
class _Asked:
    lookup: Future[int]
    since_ns: int
    fetch: int | None = None
    done: bool = False


@dataclass(slots=True)
class _Fetch:
    keys: tuple[ChunkKey, ...]
    slots: tuple[int, ...]
    ends: list[Ended] = field(default_factory=list)


class TierPrefetch:
    """Lookups and fetches in flight, by request.

    Args:
        folder: of the file tier.
        index: where fetched objects are entered.
        ranks: every rank's objects; an object is found if every rank's share is there.
        numbers: gives each fetch its number.
        timeout_s: bound on a lookup and on a fetch.
        clock_ns: a monotonic clock.
    """

    def __init__(
        self,
        folder: Path,
        index: SlotIndex,
        ranks: Sequence[RankObjects],
        numbers: Callable[[], int],
        timeout_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._tiers = [(FileTier(folder, rank.object_bytes), rank.space) for rank in ranks]
        self._index = index
        self._numbers = numbers
        self._timeout_ns = int(timeout_s * 1e9)
        self._clock_ns = clock_ns
        self._asked: dict[str, _Asked] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._orders: list[FetchOrder] = []
        self._late: Future[int] | None = None  # a lookup that was not answered in time
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamella-lookup")

    def settle(self, request: str, keys: Sequence[ChunkKey], after: ChunkKey | None = None) -> bool:
        """Whether the tier has nothing more to bring for the request; False: ask again later.

        The first call starts the lookup.

        Args:
            request: its name.
            keys: of its chunks from the first on that the pool does not hold.
            after: the chunk before them; None: they begin the prompt.
        """
        asked = self._asked.get(request)
        if asked is None:
            if self._late is not None and not self._late.done():
                return True
            asked = _Asked(self._thread.submit(self._leading, tuple(keys)), self._clock_ns())
            self._asked[request] = asked
        if asked.done:
            return True
        if asked.fetch is not None:
            asked.done = asked.fetch not in self._fetches
        elif asked.lookup.done():  # it was not cancelled: then the request has settled, or is forgotten
            asked.done = not self._begin(asked, keys, after)
        if not asked.done and self._clock_ns() - asked.since_ns > self._timeout_ns:
            _log.warning(
                "the file tier did not answer within %.1f s; request %s goes on", self._timeout_ns / 1e9, request
            )
            asked.done = True
            if not asked.lookup.done() and not asked.lookup.cancel():
                self._late = asked.lookup
        return asked.done

    def forget(self, request: str) -> None:
        """The request is gone, or has run: if it asks again, it asks anew. A fetch in flight goes on."""
        asked = self._asked.pop(request, None)
        if asked is not None:
            asked.lookup.cancel()  # or a folder that hangs has a queue of them that nobody waits for

    def take_orders(self) -> tuple[FetchOrder, ...]:
        """Fetches to begin, each once."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def ended(self, number: int, ends: Sequence[Ended], num_ranks: int) -> None:
        """Some ranks have ended a fetch; with the last, what every rank has is readable and the rest is unknown."""
        fetch = self._fetches[number]
        fetch.ends = (
            [mine.merged(new) for mine, new in zip(fetch.ends, ends, strict=True)] if fetch.ends else list(ends)
        )
        if fetch.ends[0].ranks < num_ranks:
            return
        del self._fetches[number]
        came = [end.ok for end in fetch.ends]
        self._index.commit([slot for slot, ok in zip(fetch.slots, came, strict=True) if ok])
        self._index.abandon([slot for slot, ok in zip(fetch.slots, came, strict=True) if not ok])

    @property
    def num_open(self) -> int:
        """Fetches in flight."""
        return len(self._fetches)

    def close(self) -> None:
        """The lookup thread ends with its present lookup, and the tiers are closed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for tier, _space in self._tiers:
            tier.close()

    def _leading(self, keys: tuple[ChunkKey, ...]) -> int:
        """How many of `keys`, from the first on, every rank's tier holds."""
        found = len(keys)
        for tier, space in self._tiers:
            try:
                there = tier.exists([rank_key(key, space) for key in keys[:found]])
            except TierError as error:
                _log.warning("%s", error)
                return 0
            except Exception:  # a tier's own fault must not take the engine down
                _log.exception("%s failed", tier.name)
                return 0
            found = there.index(False) if False in there else found
        return found

    def _begin(self, asked: _Asked, keys: Sequence[ChunkKey], after: ChunkKey | None) -> bool:
        wanted = tuple(keys[: asked.lookup.result()])
        if not wanted:
            return False
        for number, fetch in self._fetches.items():  # another request brings them already
            if wanted[0] in fetch.keys:
                asked.fetch = number
                return True
        reserved = self._index.reserve(wanted, after)
        if reserved is None or not reserved.keys:
            return False
        asked.fetch = number = self._numbers()
        self._fetches[number] = _Fetch(reserved.keys, reserved.slots)
        self._orders.append(FetchOrder(number, reserved.slots, reserved.keys))
        return True
