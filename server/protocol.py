"""What server and clients say to each other: messages, their numbers, and how they lie in a frame.

A frame is a header of 16 bytes and a msgpack array. The header is the same in every version, so that peers of mixed
versions can name them to each other; the array's length is fixed for each message, so that whoever has nothing to say
in a field says a placeholder.

    LOOKUP ──► lease, slots   locked: they stay for `lease_s`, however many other engines come
      RETRIEVE ──► from here on the lease is the transfer's: it ends by RELEASE, ABORT or the peer's death, by no clock
        RELEASE
    STORE allocate ──► lease, slots   nobody else sees them
      STORE commit ──► readable
    ABORT ends either, without effect; no copy may still be writing the slots then

A lease has a part for each rank of the engine. The one who looked up or allocated may hand it on: each rank retrieves,
commits and releases its own part.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from lamella.server.wire import (
    Address,
    Blob,
    Bytes64,
    Code,
    Count,
    Events,
    Kind,
    Name,
    Number,
    Offset,
    Prefix,
    Prefixes,
    Rank,
    Tables,
    Width,
)


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array of fixed length: no field has a default, so none is ever left out."""


# ---- who somebody is


class Role(enum.Enum):
    """What a session does for its engine."""

    RANK = "rank"
    """It has a rank's caches and moves, or has moved, that rank's bytes."""
    SCHEDULER = "scheduler"
    """It looks up and allocates for every rank, and moves nothing."""


class TransferSide(enum.Enum):
    """Whose process moves the bytes."""

    WORKER = "worker"
    SERVER = "server"


class Space(Message, frozen=True):
    """`lamella.reference.keys.KeySpace`, this rank's share included."""

    model: Name
    dtype: Name
    form: Name
    inner_layout: Name
    chunk_tokens: Count
    tp_rank: Count
    tp_size: Count
    layers: tuple[Count, Count]
    salt: Blob


class Group(Message, frozen=True):
    """`lamella.reference.layout.KernelGroup`."""

    num_layers: Count
    kv: Count
    num_heads: Count
    head_dim: Count
    element_bytes: Count
    chunk_tokens: Count
    layers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4096)]
    block_tokens: Count


class Allocation(Message, frozen=True):
    """`lamella.cuda_ext.peer_memory.Allocation`: memory that holds caches; its handle goes as it was exported."""

    handle: Blob
    base: Address
    num_bytes: Bytes64


class PagedCache(Message, frozen=True):
    """`lamella.reference.layout.EngineLayout` of one kernel group, with the owner's addresses."""

    bases: Annotated[tuple[tuple[Address, ...], ...], msgspec.Meta(max_length=4096)]
    block_stride: Offset
    token_stride: Offset
    head_stride: Offset
    dim_stride: Offset
    num_blocks: Count
    block_tokens: Count
    num_heads: Count
    head_dim: Count
    element_bytes: Count


class Register(Message, frozen=True):
    """A session is wanted.

    Attributes:
        lamella_version: of the client.
        engine: name of the engine, the same for all of its ranks.
        role: see `Role`.
        rank: 0 .. num_ranks - 1; of a scheduler 0.
        num_ranks: ranks whose objects this server keeps for the engine, all stages.
        space: key space of this rank; of a scheduler None.
        groups: of this rank's objects; of a scheduler empty.
        chunk_bytes: of one chunk on all `num_ranks` ranks together: decides how many chunks the memory holds.
        transfer_side: who moves this rank's bytes.
        device, allocations, caches: the rank's paged caches (`ExportedCaches`) where the server moves the bytes;
            "" and empty otherwise.
        board: an entry of the arrival board that it will count on (`BoardPlace`), so that the board is mapped before
            its name goes; None: there is none.
        alive: name of the file in the server's folder on which this process holds a lock for as long as it lives; ""
            where it cannot (TCP): then it lives while it is heard.
    """

    lamella_version: Name
    engine: Name
    role: Role
    rank: Count
    num_ranks: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    space: Space | None
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=64)]
    chunk_bytes: Bytes64
    transfer_side: TransferSide
    device: Name
    allocations: Annotated[tuple[Allocation, ...], msgspec.Meta(max_length=8192)]
    caches: Annotated[tuple[PagedCache, ...], msgspec.Meta(max_length=64)]
    board: Name | None
    alive: Name


class PoolShape(Message, frozen=True):
    """How to attach this rank's slots: `SharedSlots(Path(path), SlotShape(object_bytes, num_slots, piece_bytes))`."""

    path: Name
    object_bytes: Bytes64
    num_slots: Count
    target_piece_bytes: Bytes64


class Registered(Message, frozen=True):
    """The session; `pool` is None for a scheduler. PING at least every `ping_s` seconds.

    `server` is drawn when a server starts: slots and leases mean the same to every session that has the same one.
    """

    lamella_version: Name
    server: Number
    session: Number
    pool: PoolShape | None
    lease_s: float
    ping_s: float


# ---- reading


class Lookup(Message, frozen=True):
    """How much of a sequence is there, and lock it.

    Attributes:
        prefixes: `pack_prefixes` of the sequence's chunk keys, from chunk 0 on.
        last_tokens: tokens of the last chunk named.
        first_wanted: chunks before it are there for the engine already: they count, unseen, and are not locked.
        rank: only this rank; `EVERY_RANK`: the minimum over the engine's ranks.
        use_tiers: what the pool lacks is looked for in the tiers and brought, behind this call's back.
    """

    session: Number
    prefixes: Prefixes
    last_tokens: Count
    first_wanted: Count
    rank: Rank
    use_tiers: bool


class Found(Message, frozen=True):
    """`num_chunks` from chunk 0 on are there, on every rank asked for.

    `slots[rank][i]` is the slot of chunk `first_wanted + i`; with `rank` given there is one row. `lease` is 0 where
    nothing was locked. `pending`: a tier may bring more; ask again.
    """

    lease: Number
    num_chunks: Count
    slots: tuple[tuple[Count, ...], ...]
    pending: bool


class Retrieve(Message, frozen=True):
    """The transfer of one rank's part of a lease begins: until it ends, no clock takes the slots away.

    Attributes:
        request: the engine's name for it, for logs.
        blocks: where to, if the server moves the bytes; otherwise empty.
        num_tokens, skip_tokens: tokens `[skip_tokens, num_tokens)` of the sequence.
        null_block: block id that stands for none; -1: there is none.
        board: entry of the arrival board to count on (`str(BoardPlace)`), None when chunk-major.
        events: exported handles of the slices' events, unchanged since their export; None when chunk-major.
        layers_per_slice: 0 when chunk-major.
    """

    session: Number
    lease: Number
    rank: Count
    request: Name
    blocks: Tables
    num_tokens: Count
    skip_tokens: Count
    null_block: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
    board: Name | None
    events: Events | None
    layers_per_slice: Width


class Retrieved(Message, frozen=True):
    """Worker side: at once, and the transfer may begin. Server side: every layer has landed, and the part has ended.

    `slots[i]` is the slot of chunk `first_chunk + i`. `path` says what moved the bytes ("worker", or the server's
    "layer-major" or "chunk-major"), `reason` why not otherwise.
    """

    first_chunk: Count
    slots: tuple[Count, ...]
    path: Name
    reason: Name
    num_bytes: Bytes64
    duration_ns: Bytes64


# ---- writing


class Phase(enum.Enum):
    """Of a store."""

    ALLOCATE = "allocate"
    COMMIT = "commit"


class Store(Message, frozen=True):
    """Slots for chunks that are not there yet, or: one rank's bytes are in its slots.

    Attributes:
        phase: see `Phase`.
        lease: to commit; 0 to allocate.
        prefixes, last_tokens: keys of chunks `first_chunk`, `first_chunk + 1`, ... to allocate; empty to commit.
        first_chunk: of the keys.
        after: prefix of the chunk before `first_chunk`, which those named leave before; empty for 0, and to commit.
        rank: whose slots; `EVERY_RANK` to allocate for all of them.
        request, blocks, num_tokens, skip_tokens, null_block, events: as `Retrieve`; where the server moves the bytes, a
            commit moves them, behind the events.
    """

    session: Number
    phase: Phase
    lease: Number
    prefixes: Prefixes
    last_tokens: Count
    first_chunk: Count
    after: Prefix
    rank: Rank
    request: Name
    blocks: Tables
    num_tokens: Count
    skip_tokens: Count
    null_block: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
    events: Events | None


class Places(Message, frozen=True):
    """One rank's slots to write: `slots[i]` is for chunk `chunks[i]`."""

    rank: Count
    chunks: tuple[Count, ...]
    slots: tuple[Count, ...]


class Stored(Message, frozen=True):
    """Allocated: `lease` is 0 where there is nothing to write. Committed: the objects are readable; it is 0.

    `no_room`: too much is locked, ask again later. `no_head`: what comes before is gone, and no tier may bring it back.
    """

    lease: Number
    places: tuple[Places, ...]
    no_room: bool
    no_head: bool
    path: Name
    num_bytes: Bytes64
    duration_ns: Bytes64


# ---- ends, and the rest


class Release(Message, frozen=True):
    """The part was read to its end, by this rank or by all. Saying it twice does no harm."""

    session: Number
    lease: Number
    rank: Rank


class Abort(Message, frozen=True):
    """The part is given up; what the server moves of it is stopped first. Saying it twice does no harm."""

    session: Number
    lease: Number
    rank: Rank


class Ended(Message, frozen=True):
    """`held`: something was locked until now."""

    held: bool


class Stats(Message, frozen=True):
    """What the server holds and has done."""


class StatsReport(Message, frozen=True):
    """Figures by name, as the metrics have them."""

    lamella_version: Name
    uptime_s: float
    draining: bool
    figures: dict[str, float]


class Ping(Message, frozen=True):
    """The peer is there; `ready_slots` from 0 on can be reached by its device (-1: all); it is given no others.

    A worker has none until its first ping.
    """

    session: Number
    ready_slots: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class Pong(Message, frozen=True):
    """`known`: the session lives; otherwise register again."""

    known: bool
    draining: bool
    ready_slots: Count


class Refusal(Message, frozen=True):
    """Why a request was not obeyed; it changed nothing."""

    code: Code
    message: str


class Exchange(NamedTuple):
    """A request and its answer."""

    request: type[Message]
    answer: type[Message]


PROTOCOL: Final[Mapping[Kind, Exchange]] = {
    Kind.REGISTER: Exchange(Register, Registered),
    Kind.LOOKUP: Exchange(Lookup, Found),
    Kind.RETRIEVE: Exchange(Retrieve, Retrieved),
    Kind.STORE: Exchange(Store, Stored),
    Kind.RELEASE: Exchange(Release, Ended),
    Kind.ABORT: Exchange(Abort, Ended),
    Kind.STATS: Exchange(Stats, StatsReport),
    Kind.PING: Exchange(Ping, Pong),
}

KIND_OF: Final[Mapping[type[Message], Kind]] = {exchange.request: kind for kind, exchange in PROTOCOL.items()}
