"""A progress bar on stderr. Rich draws it: Typer has brought it already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int, every: int = 1) -> Iterator[Callable[[int], None]]:
    """A bar that moves by as much as the yielded function is told, redrawn at every `every`-th."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("", total=total)
        done = shown = 0

        def advance(by: int) -> None:
            nonlocal done, shown
            done += by
            if done - shown >= every:
                shown = done
                progress.update(task, completed=done)

        yield advance
        progress.update(task, completed=done)
