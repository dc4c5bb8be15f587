"""The transfer side `server`: the server opened this rank's caches and moves the bytes; see `cache_mover`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lamella.cuda_ext.transfer import Arriving
from lamella.reference.slices import Slice
from lamella.server.arriving import BoardTransfer
from lamella.server.moves import FenceEvent, LeasedLoad, LeasedStore, Moves, PendingLoad
from lamella.server.protocol import Retrieve


class ServerSide:
    """The server moves.

    Args:
        moves: what both sides need.
    """

    def __init__(self, moves: Moves) -> None:
        self._moves = moves

    def load(self, order: LeasedLoad) -> PendingLoad:
        """As `Side.load`."""
        return self._moves.pending(order, self._load)

    def _load(self, order: LeasedLoad, event: FenceEvent | None) -> Arriving:
        moves = self._moves
        slices, width, slot = moves.cut(order)
        begun, watch = time.monotonic(), moves.watch()

        def ended() -> None:
            moves.fences.give(event)
            moves.give(slot)

        try:
            message = Retrieve(
                moves.line.session,
                order.lease,
                moves.rank,
                order.request,
                moves.packed(order.blocks),
                order.num_tokens,
                order.skip_tokens,
                moves.sent_null_block,
                moves.place(slot),
                (event[1],) if event is not None else (),
                width,
            )
        except BaseException:
            ended()
            moves.line.ask(moves.abort_message(order.lease))
            raise
        answer = moves.line.ask(message)
        return BoardTransfer(
            slices,
            answer,
            moves.pool.board,
            slot,
            stop=lambda: moves.line.ask(moves.abort_message(order.lease)),
            peer_gone=lambda: watch.gone_since(begun),
            look=moves.line.look,
            on_final=ended,
        )

    def store(self, order: LeasedStore, parts: Sequence[Slice]) -> Arriving:
        """As `Side.store`; the server takes all layers at once, when the last of them is computed."""
        moves = self._moves
        event = moves.fences.record()
        begun, watch = time.monotonic(), moves.watch()
        blocks, events = moves.packed(order.blocks), (event[1],) if event is not None else ()
        return BoardTransfer(
            parts,
            moves.line.ask(moves.commit_message(order, blocks, events)),
            moves.pool.board,
            None,
            stop=lambda: moves.line.ask(moves.abort_message(order.lease)),
            peer_gone=lambda: watch.gone_since(begun),
            look=moves.line.look,
            on_final=lambda: moves.fences.give(event),
        )

    def commit(self, order: LeasedStore, ok: bool) -> Future[Any]:
        """As `Side.commit`; the server has committed what it moved."""
        line = self._moves.line
        if not ok:
            return line.ask(self._moves.abort_message(order.lease))
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """As `Side.close`; what the server moves ends with the session."""
