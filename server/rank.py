"""Who a worker is, what it moves, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lamella
from lamella.connector.step_orders import BlockTables, Ended
from lamella.cuda_ext.arrival_board import BoardPlace, LayerArrivalBoard
from lamella.cuda_ext.peer_memory import ExportedCaches
from lamella.reference.keys import KeySpace
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.server.protocol import Register, Role, TransferSide
from lamella.server.shapes import send_caches, send_groups, send_space


@dataclass(frozen=True, slots=True)
class RankCaches:
    """One rank's paged caches, and how they are kept.

    Attributes:
        layout: of its objects.
        engines: one paged cache a kernel group; their memory outlives the worker.
        device: `"cpu"` or `"cuda:N"`.
        shared: on the CPU device, where the server moves: (path, address here, bytes) of the memories they lie in.
        tables: block tables by KV cache group, as kernel groups read them; by default as they are.
        null_block: block id that stands for none.
    """

    layout: ObjectLayout
    engines: tuple[EngineLayout, ...]
    device: str = "cpu"
    shared: tuple[tuple[Path, int, int], ...] = ()
    tables: Callable[[BlockTables], Sequence[Sequence[int]]] = lambda blocks: blocks
    null_block: int | None = None


@dataclass(frozen=True, slots=True)
class RankOfEngine:
    """Which rank this is.

    Attributes:
        engine: name of the engine, the same for all of its ranks.
        space: this rank's key space.
        rank, num_ranks: counted over tensor and pipeline parallelism.
        chunk_bytes: of one chunk on all ranks together; 0: every rank's objects are as large as this one's.
    """

    engine: str
    space: KeySpace
    rank: int = 0
    num_ranks: int = 1
    chunk_bytes: int = 0


@dataclass(slots=True)
class Report:
    """What has happened since the last poll.

    Attributes:
        received: requests that may run: their first layers have landed, or they failed and will compute.
        failed: those of them that failed before.
        loads: retrieves of which nothing is in flight any more, by number; whether they ended well.
        stores: stores that read their blocks no longer, by number.
        readable: stores that others can read now, by number; False: they were given up.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    loads: dict[int, Ended] = field(default_factory=dict)
    stores: dict[int, Ended] = field(default_factory=dict)
    readable: dict[int, bool] = field(default_factory=dict)


def register_message(
    of: RankOfEngine, layout: ObjectLayout, exported: ExportedCaches | None, board: LayerArrivalBoard
) -> Register:
    """What a rank tells the server of itself.

    Args:
        of: which rank it is.
        layout: of its objects.
        exported: its caches where the server moves the bytes; None: the rank does.
        board: on which the server counts.
    """
    device, allocations, engines = send_caches(exported) if exported is not None else ("", (), ())
    place = None
    if exported is not None and board.path is not None:
        place = str(BoardPlace(board.path, board.num_entries, 0, 1))
    return Register(
        lamella.__version__,
        of.engine,
        Role.RANK,
        of.rank,
        of.num_ranks,
        send_space(of.space),
        send_groups(layout),
        of.chunk_bytes or layout.object_bytes * of.num_ranks,
        TransferSide.WORKER if exported is None else TransferSide.SERVER,
        device,
        allocations,
        engines,
        place,
        "",
    )
