"""What is kept and where, as the scheduler side asks: `Objects`, of this process's own pool or of a cache server.

find ──► load ──► load_ended          found is found until then, or until it is let go of
reserve ──► store_ended, or drop      nobody finds what is reserved before its store has ended well
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_orders import BlockTables, FetchOrder, LoadOrder, StepReport, StoreOrder
from lamella.connector.tier_prefetch import RankObjects, TierPrefetch
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.cuda_ext.slot_index import SlotIndex
from lamella.reference.keys import ChunkKey


class Refusal(enum.Enum):
    """Why chunks are not stored."""

    NO_ROOM = "every slot is in use now"
    NO_HEAD = "what comes before them is gone, so that they could never be hit"
    NO_ANSWER = "who keeps them did not answer"

    @property
    def may_pass(self) -> bool:
        """Whether the same chunks may be taken later."""
        return self is not Refusal.NO_HEAD


class Taken(NamedTuple):
    """What `Objects.reserve` gave: orders in a prompt's order, and why what comes behind the last of them was refused.

    Without a refusal every chunk that was named is kept, or is being stored by these orders or by others.
    """

    orders: list[StoreOrder]
    refusal: Refusal | None = None


class Objects(Protocol):
    """See the module. On the scheduler's thread, which none of its calls holds up for long."""

    def set_ranks(self, ranks: Sequence[RankObjects], ready_slots: int, take_number: Callable[[], int]) -> None:
        """Every rank has said how it names its objects, and how many slots each has ready at least."""

    def find(self, request: str, keys: Sequence[ChunkKey], first_wanted: int) -> int | None:
        """How many chunks of a sequence, from chunk 0 on, can be loaded now; None: ask again later.

        Args:
            keys: of the sequence's chunks from chunk 0 on.
            first_wanted: chunks before it are not needed, and may count as hits unseen.
        """

    def let_go(self, request: str) -> None:
        """What was found for the request is not going to be loaded."""

    def load(self, order: LoadOrder, keys: Sequence[ChunkKey]) -> LoadOrder:
        """The order as the workers need it, for chunks that were found; they stay until `load_ended`."""

    def load_ended(self, order: LoadOrder) -> None:
        """No rank reads them any more."""

    def reserve(
        self,
        request: str,
        keys: Sequence[ChunkKey],
        first_chunk: int,
        blocks: BlockTables,
        take_number: Callable[[], int],
    ) -> Taken:
        """Orders to store those of the chunks that are not kept yet, and why others are not stored.

        Args:
            request: its name.
            keys: of the sequence's chunks from chunk 0 on; those before `first_chunk` are not stored again.
            first_chunk: the first to store.
            blocks: of the request.
            take_number: gives each store its number.
        """

    def drop(self, order: StoreOrder) -> None:
        """The order is not given to anybody."""

    def store_ended(self, order: StoreOrder, *, ok: bool) -> None:
        """No rank reads its blocks any more; `ok`: every rank's bytes are where they belong."""

    def take_orders(self) -> tuple[FetchOrder, ...]:
        """A step begins: what the workers are to bring behind everybody's back."""

    def take_in(self, report: StepReport) -> None:
        """What the workers said of their memory, and of fetches and puts."""

    def has_run(self, request: str) -> None:
        """The request is in a step: if it asks again, it asks anew."""

    def forget(self, request: str) -> None:
        """The request is gone."""

    @property
    def num_open(self) -> int:
        """Things in flight of which no load or store in flight tells."""

    def reset(self) -> bool:
        """Everything readable is forgotten; whether it is."""

    def close(self) -> None:
        """Threads and connections end."""


@dataclass(slots=True)
class _Put:
    """A store on its way into the file tier: the slots that it reads, once stored on every rank, and who is done."""

    slots: tuple[int, ...] | None = None
    ranks: int = 0


class PoolObjects:
    """An index of slots that every rank has in its own memory, and the file tier behind them.

    Args:
        settings: the connector's.
        facts: of the engine.
    """

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts) -> None:
        self._settings = settings
        self._facts = facts
        self.index = SlotIndex()
        self.num_slots = 0
        """Slots that the index knows of."""
        self._ready_slots: dict[int, int] = {}  # by rank
        self._tier: TierPrefetch | None = None
        self._puts: dict[int, _Put] = {}
        self._storing: dict[int, bool] = {}  # stores under way: was the pool reset meanwhile?
        self._behind = 0  # slots on their way into the file tier

    def set_ranks(self, ranks: Sequence[RankObjects], ready_slots: int, take_number: Callable[[], int]) -> None:
        """As `Objects.set_ranks`."""
        self._add_slots(ready_slots)
        if self._settings.file_tier is not None and not self._facts.refusal:
            self._tier = TierPrefetch(
                self._settings.file_tier, self.index, ranks, take_number, self._settings.load_timeout_s
            )

    def find(self, request: str, keys: Sequence[ChunkKey], first_wanted: int) -> int | None:
        """As `Objects.find`; what the pool lacks and the tier has is brought first."""
        hits = self.index.leading_hits(keys)
        if self._tier is not None and hits < len(keys):
            if not self._tier.settle(request, keys[hits:], keys[hits - 1] if hits else None):
                return None
            hits = self.index.leading_hits(keys)
        return hits

    def let_go(self, request: str) -> None:
        """As `Objects.let_go`: nothing is held before it is loaded."""

    def load(self, order: LoadOrder, keys: Sequence[ChunkKey]) -> LoadOrder:
        """As `Objects.load`."""
        return replace(order, slots=self.index.pin(keys))

    def load_ended(self, order: LoadOrder) -> None:
        """As `Objects.load_ended`."""
        self.index.unpin(order.slots)

    def reserve(
        self,
        request: str,
        keys: Sequence[ChunkKey],
        first_chunk: int,
        blocks: BlockTables,
        take_number: Callable[[], int],
    ) -> Taken:
        """As `Objects.reserve`."""
        wanted, after = keys[first_chunk:], keys[first_chunk - 1] if first_chunk else None
        if self._tier is None and not self.index.is_whole(after):
            return Taken([], Refusal.NO_HEAD)
        reserved = self.index.reserve(wanted, after)
        if reserved is None:
            return Taken([], Refusal.NO_ROOM)
        place = {key: first_chunk + offset for offset, key in enumerate(wanted)}
        runs: list[list[tuple[int, int, ChunkKey]]] = []
        for key, slot in zip(reserved.keys, reserved.slots, strict=True):
            if runs and runs[-1][-1][0] == place[key] - 1:
                runs[-1].append((place[key], slot, key))
            else:
                runs.append([(place[key], slot, key)])
        size = self._facts.space.chunk_tokens
        orders = []
        for run in runs:
            chunks, slots, own = zip(*run, strict=True)
            end = (chunks[-1] + 1) * size
            number = take_number()
            self._storing[number] = False
            kept = own if self._may_wait(len(slots)) else ()
            orders.append(StoreOrder(number, request, slots, chunks[0], blocks, end, chunks[0] * size, kept))
        return Taken(orders)

    def _may_wait(self, num_slots: int) -> bool:
        """Whether these slots go into the file tier, and stay taken until they are there.

        Engines store faster than disks write: behind one, all of the pool would wait, and nothing new would be kept.
        """
        if self._settings.file_tier is None or (self._behind and self._behind + num_slots > self.num_slots // 2):
            return False
        self._behind += num_slots
        return True

    def drop(self, order: StoreOrder) -> None:
        """As `Objects.drop`."""
        self._is_over(order)
        self._behind -= len(order.slots) if order.keys else 0
        self.index.abandon(order.slots)

    def _is_over(self, order: StoreOrder) -> bool:
        """Nothing of the store is under way; whether the pool was reset meanwhile."""
        return self._storing.pop(order.number, False)

    def store_ended(self, order: StoreOrder, *, ok: bool) -> None:
        """As `Objects.store_ended`."""
        ok = not self._is_over(order) and ok
        if not ok and not order.keys:
            self.index.abandon(order.slots)
            return
        self.index.commit(order.slots)
        if not order.keys:
            return
        self.index.pin(order.keys)
        if not ok:  # it can be tried again, while a rank that has its share makes a file of it
            self.index.discard(order.keys)
        self._puts.setdefault(order.number, _Put()).slots = order.slots
        self._end_put(order.number)

    def _end_put(self, number: int) -> None:
        """Slots that no rank's tier reads any more are free of it."""
        put = self._puts[number]
        if put.slots is not None and put.ranks == self._facts.num_ranks:
            del self._puts[number]
            self._behind -= len(put.slots)
            self.index.unpin(put.slots)

    def take_orders(self) -> tuple[FetchOrder, ...]:
        """As `Objects.take_orders`."""
        return self._tier.take_orders() if self._tier is not None else ()

    def take_in(self, report: StepReport) -> None:
        """As `Objects.take_in`."""
        self._ready_slots.update(report.ready_slots)
        if len(self._ready_slots) == self._facts.num_ranks:  # a rank that has told nothing yet may have fewer
            self._add_slots(min(self._ready_slots.values()))
        for number, end in report.puts.items():
            self._puts.setdefault(number, _Put()).ranks += end.ranks  # maybe before the store has ended everywhere
            self._end_put(number)
        for number, ends in report.fetches.items():
            if self._tier is not None:
                self._tier.ended(number, ends, self._facts.num_ranks)

    def _add_slots(self, ready: int) -> None:
        if ready > self.num_slots:
            self.index.add_slots(self.num_slots, ready - self.num_slots)
            self.num_slots = ready

    def has_run(self, request: str) -> None:
        """As `Objects.has_run`."""
        if self._tier is not None:
            self._tier.forget(request)

    def forget(self, request: str) -> None:
        """As `Objects.forget`."""
        self.has_run(request)

    @property
    def num_open(self) -> int:
        """As `Objects.num_open`: puts and fetches."""
        return len(self._puts) + (self._tier.num_open if self._tier is not None else 0)

    def reset(self) -> bool:
        """As `Objects.reset`; those in use are forgotten when their last user is done, those on their way as they come.

        A file tier keeps its objects, which are found again: other processes share it.
        """
        self.index.discard(self.index.ready_keys())
        if self._settings.file_tier is not None:
            return False
        self._storing = dict.fromkeys(self._storing, True)
        return True

    def close(self) -> None:
        """As `Objects.close`."""
        if self._tier is not None:
            self._tier.close()
