"""Executors before the laws: every way in which this installation can move a plan, as a `reference.laws.Move`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lamella.cuda_ext.executors import Executor, HostObjects, Method
from lamella.reference.laws import Move, Transfer


class NamedMove(NamedTuple):
    """An executor with its method chosen, and the name that a report gives it."""

    name: str
    move: Move


def as_move(executor: Executor, method: Method) -> NamedMove:
    """`executor` with `method`, for `Trial.run` and `check`."""

    def move(transfer: Transfer) -> None:
        objects = HostObjects(transfer.object_addresses, transfer.registered_piece_bytes, transfer.registered_base)
        executor.run(
            transfer.plan,
            transfer.engines,
            objects,
            transfer.direction,
            method=method,
            on_slice=transfer.on_slice,
        )

    return NamedMove(f"{executor.name}, {method.value}", move)


def each_method(executor: Executor) -> Iterator[NamedMove]:
    """The executor direct and staged; AUTO only picks one of these."""
    for method in (Method.DIRECT, Method.STAGED):
        yield as_move(executor, method)
