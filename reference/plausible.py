"""Measured step times that cannot be right: one that is far off its neighbours, or a row that falls below 0.

More work takes no less time, and not more than in proportion; measurements scatter around that. A value further off
than `WILD` would give steps of negative length, or advice about a measurement that went wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from lamella.reference.tables import DecodeTable, PrefillTable

WILD: Final = 2.0
"""By so much a step may take longer than one with more work, or grow faster than its work. Source: medians of the
shipped profile, where steps bound by the host lie up to 1.4 times above one with more work."""


class _Cell(NamedTuple):
    row: int
    column: int


def check_prefill(table: PrefillTable, name: str) -> None:
    """Every time is plausible beside its neighbours.

    Raises:
        ValueError: one is not; the message begins with `name` and says which, and beside what.
    """
    news, cached = table.new_tokens, table.cached_tokens
    wild = _odd_pairs(
        table.step_ns,
        news,
        cached,
        lambda few, many: (many / few) ** 2,  # each token more looks at all before it
        lambda new, few, many: (many + new) / (few + new),
    )
    _refuse(name, table.step_ns, wild, [f"{new:,} new tokens" for new in news], [f"{one:,} cached" for one in cached])


def check_decode(table: DecodeTable, name: str) -> None:
    """Every time is plausible beside its neighbours, and a batch whose context shrinks to nothing takes time.

    Raises:
        ValueError: one is not; the message begins with `name` and says which, and beside what.
    """
    batches, contexts = table.batch, table.context_tokens
    wild = _odd_pairs(
        table.step_ns, batches, contexts, lambda few, many: many / few, lambda _batch, few, many: many / few
    )
    names = [f"batch {batch:,}" for batch in batches], [f"context {context:,}" for context in contexts]
    _refuse(name, table.step_ns, wild, *names)
    for batch in batches:
        first, second = table.row(batch)[:2]
        if first - (second - first) * contexts[0] / (contexts[1] - contexts[0]) < 1:
            raise ValueError(
                f"{name}: at batch {batch:,} step_ns {first:,.0f} at context {contexts[0]:,} and {second:,.0f} at "
                f"{contexts[1]:,} leave no time for an empty context; {REMEDY}"
            )


REMEDY: Final = "measure it again, or correct the file"


def _odd_pairs(
    step_ns: Sequence[Sequence[int | None]],
    rows: Sequence[int],
    columns: Sequence[int],
    down: Callable[[int, int], float],
    across: Callable[[int, int, int], float],
) -> list[tuple[_Cell, _Cell]]:
    """Neighbours that cannot both be right.

    Args:
        step_ns: by row and column.
        rows, columns: what stands at each, rising.
        down: by how much the work grows from one row to the next.
        across: in a row, from one column to the next.
    """
    found: list[tuple[_Cell, _Cell]] = []
    for column in range(len(columns)):
        for row, (few, many) in enumerate(pairwise(rows)):
            found += _odd(step_ns, _Cell(row, column), _Cell(row + 1, column), down(few, many))
    for row, at in enumerate(rows):
        for column, (few, many) in enumerate(pairwise(columns)):
            found += _odd(step_ns, _Cell(row, column), _Cell(row, column + 1), across(at, few, many))
    return found


def _odd(
    step_ns: Sequence[Sequence[int | None]], less: _Cell, more: _Cell, growth: float
) -> Iterator[tuple[_Cell, _Cell]]:
    """The two cells, if the step of `more`, with `growth` times the work of `less`, cannot be right beside it."""
    short, long = step_ns[less.row][less.column], step_ns[more.row][more.column]
    if short is not None and long is not None and not short / WILD <= long <= WILD * growth * short:
        yield less, more


def _refuse(
    name: str,
    step_ns: Sequence[Sequence[int | None]],
    wild: Sequence[tuple[_Cell, _Cell]],
    rows: Sequence[str],
    columns: Sequence[str],
) -> None:
    """Names the cell that is at odds with most of its neighbours, and one of those."""
    if not wild:
        return
    counts = Counter(cell for pair in wild for cell in pair)
    worst = max(counts, key=lambda cell: counts[cell])
    beside = next(one for pair in wild if worst in pair for one in pair if one != worst)
    said = [
        f"step_ns[{one.row}][{one.column}] = {step_ns[one.row][one.column]:,} ({rows[one.row]}, {columns[one.column]})"
        for one in (worst, beside)
    ]
    raise ValueError(
        f"{name}: {said[0]} cannot be right beside {said[1]}: more work takes no less time, and not more than in "
        f"proportion, within {WILD:g} times; {REMEDY}"
    )
