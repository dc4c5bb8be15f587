"""Two engines of two ranks on one server, against dictionaries: whatever is looked up, moved, stored or killed.

Processes are the test's: they write into slots whenever they may, also on their way out of life, so that a slot that is
given to another too early shows as a wrong byte. SRV-1 to SRV-3, SRV-6 and KEEP-1 are looked at after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamella.cuda_ext.pool import HostPool
from lamella.reference.keys import ChunkKey
from lamella.server.frames import RefusedError
from lamella.server.protocol import Role
from lamella.server.wire import EVERY_RANK, Code
from prefix_model import Prefix, prefixes
from server_driver import Bench, Client, keys_of, layout_of, space_of

RANKS, NUM_SLOTS, MAX_OPEN = 2, 3, 4
LEASE_S, GRACE_S, DYING_S = 10.0, 2.0, 1.5
SPACES = [space_of(rank=rank, ranks=RANKS).digest() for rank in range(RANKS)]
documents = st.lists(st.integers(0, 1), min_size=1, max_size=NUM_SLOTS).map(tuple)
engines = st.sampled_from("ab")
ranks = st.integers(0, RANKS - 1)
picks = st.integers(0, MAX_OPEN - 1)
firsts = st.sampled_from([0, 0, 0, 1, 2])


def rank_key(document: Prefix, rank: int) -> ChunkKey:
    return keys_of(*document)[-1]._replace(space=SPACES[rank])


def content(key: ChunkKey) -> bytes:
    """What an object with this key holds."""
    return (key.prefix + bytes([key.space[0]]) * 32) * 2


@dataclass
class OpenPart:
    """What the model knows of a part: the documents in its slots and how it stands."""

    documents: list[Prefix]
    slots: tuple[int, ...]
    state: str
    until_ns: int | None = None
    looked_up_by: str = ""


@dataclass
class OpenLease:
    number: int
    engine: str
    parts: dict[int, OpenPart] = field(default_factory=dict)


@dataclass
class Dying:
    """A killed process whose device still writes."""

    rank: int
    documents: list[Prefix]
    slots: tuple[int, ...]
    until_ns: int


class ServerMachine(RuleBasedStateMachine):
    """Every rule draws what it does; `test_server_machine` runs it, as it is and with planted faults."""

    def __init__(self) -> None:
        super().__init__()
        object_bytes = layout_of().object_bytes
        self.bench = Bench(
            Path("/never-entered"),
            num_slots=NUM_SLOTS,
            chunk_bytes=RANKS * object_bytes,
            lease_s=LEASE_S,
            grace_s=GRACE_S,
        )
        self.clients: dict[tuple[str, Any], Client] = {}
        self.ready: list[set[Prefix]] = [set() for _ in range(RANKS)]
        self.lost: list[set[Prefix]] = [set() for _ in range(RANKS)]  # reserved and never written
        self.leases: list[OpenLease] = []
        self.dying: list[Dying] = []
        for engine in "ab":
            for who in (None, *range(RANKS)):
                self.start(engine, who)

    # ---- processes

    def start(self, engine: str, who: int | None) -> None:
        if who is None:
            self.clients[engine, None] = self.bench.scheduler(engine=engine, role=Role.SCHEDULER, num_ranks=RANKS)
        else:
            space = space_of(rank=who, ranks=RANKS)
            self.clients[engine, who] = self.bench.rank(engine=engine, rank=who, num_ranks=RANKS, space=space)

    def lives(self, engine: str, who: int | None) -> bool:
        return (engine, who) in self.clients

    def all_live(self, engine: str) -> bool:
        return all(self.lives(engine, who) for who in range(RANKS))

    def pool(self, rank: int) -> HostPool:
        (found,) = [place.pool for place in self.bench.service.places.all() if place.space.tp_rank == rank]
        return found

    @rule(engine=engines, who=st.none() | ranks)
    def kill(self, engine: str, who: int | None) -> None:
        if not self.lives(engine, who):
            return
        self.clients.pop((engine, who)).die()
        for lease in self.leases:
            if lease.engine != engine:
                continue
            for rank, part in list(lease.parts.items()):
                if (who is None and part.state == "locked") or (who == rank and part.state == "moving"):
                    del lease.parts[rank]
                elif who == rank and part.state == "writing":
                    part.state, part.until_ns = "quarantined", self.bench.now_ns + int((GRACE_S + 0.25) * 1e9)
                    self.dying.append(Dying(rank, part.documents, part.slots, self.bench.now_ns + int(DYING_S * 1e9)))
        self.wait(0.25)

    @rule(engine=engines, who=st.none() | ranks)
    def start_again(self, engine: str, who: int | None) -> None:
        if not self.lives(engine, who):
            self.start(engine, who)

    # ---- reading

    @precondition(lambda self: len(self.leases) < MAX_OPEN)
    @rule(engine=engines, document=documents, first=firsts)
    def look_up(self, engine: str, document: Prefix, first: int = 0) -> None:
        """The engine has the chunks before `first` by itself."""
        if not self.lives(engine, None):
            return
        first = min(first, len(document))
        found = self.clients[engine, None].lookup(keys_of(*document), first)
        hits = first if self.all_live(engine) else 0
        while self.all_live(engine) and hits < len(document) and all(document[: hits + 1] in had for had in self.ready):
            hits += 1
        assert found.num_chunks == hits, "SRV-3: the minimum over the ranks"
        assert bool(found.lease) == (hits > first)
        if hits > first:
            until_ns = self.bench.now_ns + int(LEASE_S * 1e9)
            parts = {
                rank: OpenPart(prefixes(document)[first:hits], found.slots[rank], "locked", until_ns)
                for rank in range(RANKS)
            }
            assert all(len(part.slots) == hits - first for part in parts.values())
            self.leases.append(OpenLease(found.lease, engine, parts))

    @rule(pick=picks, rank=ranks, by_other=st.booleans())
    def retrieve(self, pick: int, rank: int, by_other: bool) -> None:
        lease = self.lease(pick)
        if lease is None:
            return
        engine = lease.engine if not by_other else "ab".replace(lease.engine, "")
        if not self.lives(engine, rank):
            return
        part = lease.parts.get(rank)
        try:
            answer = self.clients[engine, rank].retrieve(lease.number)
        except RefusedError as refused:
            expected = Code.REFUSED if part is not None and part.state in ("moving", "writing") else Code.UNKNOWN_LEASE
            assert refused.code is (Code.UNKNOWN_LEASE if by_other else expected)
            assert by_other or part is None or part.state != "locked"
            return
        assert not by_other, "SRV-6: a lease is its engine's"
        assert part is not None, "SRV-6: an ended lease gives no slot"
        assert part.state == "locked"
        assert answer.slots == part.slots
        part.state, part.until_ns = "moving", None

    # ---- writing

    @precondition(lambda self: len(self.leases) < MAX_OPEN)
    @rule(engine=engines, document=documents, first=firsts)
    def allocate(self, engine: str, document: Prefix, first: int = 0) -> None:
        """A step of a prompt whose chunks before `first` were stored by earlier ones."""
        if not self.lives(engine, None):
            return
        first = min(first, len(document) - 1)
        chunks = prefixes(document)
        missing = [[one for one in chunks[first:] if one not in self.present(rank)] for rank in range(RANKS)]
        named = set(chunks[max(0, first - 1) :])
        stays = [self.stays(rank, named if missing[rank] else set()) for rank in range(RANKS)]
        room = [NUM_SLOTS - self.num_writing(rank) - len(stays[rank] & self.ready[rank]) for rank in range(RANKS)]
        stored = self.clients[engine, None].allocate(keys_of(*document), first)
        if not self.all_live(engine):
            assert (stored.lease, stored.no_room, stored.no_head) == (0, False, False)
            return
        has_head = all(one in self.present(rank) for one in chunks[:first] for rank in range(RANKS))
        assert stored.no_head == (not has_head), "what could never be hit is not stored"
        fits = all(len(missing[rank]) <= room[rank] for rank in range(RANKS) if missing[rank])
        assert stored.no_room == (has_head and not fits), "all or nothing"
        self.see_evictions()
        if stored.lease == 0:
            assert stored.no_room or stored.no_head or not any(missing)
            return
        parts = {}
        for place in stored.places:
            found = [chunks[chunk] for chunk in place.chunks]
            assert found == missing[place.rank]
            parts[place.rank] = OpenPart(found, place.slots, "writing")
        self.leases.append(OpenLease(stored.lease, engine, parts))

    @precondition(lambda self: len(self.leases) == MAX_OPEN)
    @rule()
    def forget_ended_leases(self) -> None:
        """They are asked for until then, to see that they give nothing."""
        self.leases = [lease for lease in self.leases if lease.parts]

    @rule(pick=picks, rank=ranks)
    def write(self, pick: int, rank: int) -> None:
        """A rank's copies land in the slots of a store, before its commit."""
        lease = self.lease(pick)
        part = lease.parts.get(rank) if lease is not None else None
        if lease is not None and part is not None and part.state == "writing" and self.lives(lease.engine, rank):
            self.fill(rank, part.documents, part.slots)

    @rule(pick=picks)
    def write_while_dying(self, pick: int) -> None:
        if self.dying:
            dying = self.dying[pick % len(self.dying)]
            self.fill(dying.rank, dying.documents, dying.slots)

    def fill(self, rank: int, found: list[Prefix], slots: tuple[int, ...]) -> None:
        for document, slot in zip(found, slots, strict=True):
            with self.pool(rank).memory.buffer(slot) as view:
                view[:] = content(rank_key(document, rank))

    @rule(pick=picks, rank=ranks)
    def commit(self, pick: int, rank: int) -> None:
        lease = self.lease(pick)
        if lease is None or not self.lives(lease.engine, rank):
            return
        part = lease.parts.get(rank)
        if part is not None and part.state == "writing":
            self.fill(rank, part.documents, part.slots)
        try:
            self.clients[lease.engine, rank].commit(lease.number)
        except RefusedError:
            assert part is None or part.state != "writing"
            return
        assert part is not None
        assert part.state == "writing"
        self.ready[rank] |= set(part.documents)
        del lease.parts[rank]

    @precondition(lambda self: len(self.leases) < MAX_OPEN)
    @rule(engine=engines, document=documents)
    def store(self, engine: str, document: Prefix) -> None:
        """All of a store at once, so that there is something to look up."""
        before = len(self.leases)
        self.allocate(engine, document)
        for rank in range(RANKS):
            if len(self.leases) > before:
                self.commit(before, rank)

    @precondition(lambda self: len(self.leases) < MAX_OPEN)
    @rule(engine=engines, document=documents)
    def load(self, engine: str, document: Prefix) -> None:
        """A look-up that every rank retrieves."""
        before = len(self.leases)
        self.look_up(engine, document)
        for rank in range(RANKS):
            if len(self.leases) > before:
                self.retrieve(before, rank, by_other=False)

    # ---- ends

    @rule(pick=picks, rank=st.just(EVERY_RANK) | ranks, aborts=st.booleans(), who=st.none() | ranks)
    def end(self, pick: int, rank: int, aborts: bool, who: int | None) -> None:
        lease = self.lease(pick)
        if lease is None or not self.lives(lease.engine, who):
            return
        client = self.clients[lease.engine, who]
        named = {
            one: part for one, part in lease.parts.items() if rank in (EVERY_RANK, one) and part.state != "quarantined"
        }
        try:
            held = client.abort(lease.number, rank) if aborts else client.release(lease.number, rank)
        except RefusedError:
            assert any(part.state == "writing" for part in named.values())
            assert not aborts
            return
        assert held == bool(named)
        for one, part in named.items():
            self.end_part(lease, one, part)

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.5, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.bench.pass_s(seconds)
        now_ns = self.bench.now_ns
        for lease in self.leases:
            for rank, part in list(lease.parts.items()):
                if part.until_ns is not None and part.until_ns <= now_ns:
                    self.end_part(lease, rank, part)
        self.dying = [one for one in self.dying if one.until_ns > now_ns]

    def end_part(self, lease: OpenLease, rank: int, part: OpenPart) -> None:
        """It ended without a commit."""
        del lease.parts[rank]
        if part.state in ("writing", "quarantined"):
            self.lost[rank] |= set(part.documents)

    # ---- what the model says

    def lease(self, pick: int) -> OpenLease | None:
        """One of those that were given."""
        return self.leases[pick] if pick < len(self.leases) else None

    def present(self, rank: int) -> set[Prefix]:
        """What can be read, and what is being written."""
        return self.ready[rank] | {
            document
            for lease in self.leases
            if (part := lease.parts.get(rank)) is not None and part.state in ("writing", "quarantined")
            for document in part.documents
        }

    def num_writing(self, rank: int) -> int:
        return sum(
            len(part.documents)
            for lease in self.leases
            if (part := lease.parts.get(rank)) is not None and part.state in ("writing", "quarantined")
        )

    def kept(self, rank: int) -> set[Prefix]:
        """Documents that somebody reads or writes."""
        return {
            document
            for lease in self.leases
            if (part := lease.parts.get(rank)) is not None
            for document in part.documents
        }

    def stays(self, rank: int, named: set[Prefix]) -> set[Prefix]:
        """What cannot leave while a store names these: they, what is kept, and what comes right before what stays."""
        found, here = set[Prefix](), self.present(rank)
        for document in (self.kept(rank) | named) & here:
            while document in here:
                found.add(document)
                document = document[:-1]
        return found

    def see_evictions(self) -> None:
        for rank in range(RANKS):
            gone = {one for one in self.ready[rank] if not self.pool(rank).leading_hits([rank_key(one, rank)])}
            assert not gone & self.kept(rank), "SRV-1: what is locked or moved is never evicted"
            self.ready[rank] -= gone

    @invariant()
    def locks_and_slots_are_what_the_model_says(self) -> None:
        for rank in range(RANKS):
            now = self.pool(rank).report().occupancy
            pins = sum(
                len(part.documents)
                for lease in self.leases
                if (part := lease.parts.get(rank)) is not None and part.state in ("locked", "moving")
            )
            assert (now.pins, now.writing) == (pins, self.num_writing(rank)), "SRV-2: nothing outlives its holder"
            assert (now.ready, now.free) == (
                len(self.ready[rank]),
                NUM_SLOTS - len(self.ready[rank]) - self.num_writing(rank),
            )

    @invariant()
    def what_is_kept_has_everything_before_it(self) -> None:
        for rank in range(RANKS):
            here = self.present(rank)
            self.lost[rank] -= here
            for document in here:
                missing = set(prefixes(document)) - here
                assert not missing or missing & self.lost[rank], f"KEEP-1: {document} without {missing}"

    @invariant()
    def what_can_be_read_is_what_was_written(self) -> None:
        for rank in range(RANKS):
            for document in self.ready[rank]:
                key = rank_key(document, rank)
                with self.pool(rank).pin([key]) as lease, self.pool(rank).memory.buffer(lease.slots[0]) as view:
                    assert view == content(key), "SRV-1: nobody writes into another's slot"
            for lease in self.leases:
                part = lease.parts.get(rank)
                if part is None or part.state not in ("locked", "moving"):
                    continue
                for document, slot in zip(part.documents, part.slots, strict=True):
                    with self.pool(rank).memory.buffer(slot) as view:
                        assert view == content(rank_key(document, rank)), "SRV-1: it stays while it is read"

    def teardown(self) -> None:
        self.bench.close()
