"""How a verb's figures stand on stdout: whole, whatever the terminal's width. Rich draws them; Typer brings it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

NOTHING: Final = "-"
"""What stands where there is no figure."""
_WIDEST: Final = 10_000


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    spare: Sequence[str] = (),
    fuller: str = "",
) -> None:
    """The table is on stdout, and no entry of it is cut.

    A column without any figure is left out. On a terminal that is too narrow so are columns of `spare`, and a line says
    which; if the rest is too wide still, the terminal wraps it. A file or a pipe gets every column.

    Args:
        heads: of the columns; the first column is text, the others are figures.
        rows: as many entries each as there are heads.
        title: above the table.
        spare: heads of columns that can be missed, the least needed first.
        fuller: where all of them are, for the line that says what was left out.
    """
    shown = [place for place in range(len(heads)) if any(row[place] != NOTHING for row in rows)]
    missed = [place for place in map(list(heads).index, spare) if place in shown]
    left: list[str] = []
    while missed and not fits(draw_table(heads, rows, shown)):
        shown.remove(missed[0])
        left.append(heads[missed.pop(0)])
    print_whole(draw_table(heads, rows, shown, title))
    if left:
        also = f", and so does {fuller}" if fuller else ""
        typer.echo(f"Left out for want of width: {', '.join(left)}. A pipe or a wider terminal gets them{also}.")


def draw_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int], title: str | None = None
) -> Table:
    """The columns `shown` of the table; the first is text, the others are figures."""
    table = Table(box=SIMPLE, title=title)
    for place in shown:
        table.add_column(heads[place], justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    return table


def fits(table: Table) -> bool:
    """Whether stdout holds the table: a terminal that is wide enough, a file or a pipe."""
    console = Console()
    return not console.is_terminal or _width(table) <= console.width


def print_whole(table: Table) -> None:
    """The table is on stdout as wide as it is."""
    _as_wide_as(max(_width(table), Console().width)).print(table)


def _width(table: Table) -> int:
    console = _as_wide_as(_WIDEST)
    return Measurement.get(console, console.options, table).maximum


def _as_wide_as(columns: int) -> Console:
    return Console(width=columns, height=25, highlight=False)  # with a height Rich takes the width on any terminal
