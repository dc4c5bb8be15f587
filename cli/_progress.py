"""What a long verb is at, on stderr: a bar, or lines where nobody sees a bar move. Rich draws bars; Typer brings it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

QUIET_S: Final = 5.0
"""Where stderr is no terminal, what takes less says nothing."""


@contextmanager
def progress_bar(
    what: str, total: int, clock_s: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """The yielded function is told how many more are done.

    On a terminal a bar moves; elsewhere there is a line after `QUIET_S` and whenever it has taken twice as long.

    Args:
        what: is being done.
        total: how many there are.
        clock_s: a monotonic clock.
    """
    console = _stderr()
    done = 0
    if console.is_terminal:
        with _bar(console) as progress:
            task = progress.add_task(what, total=total)

            def advance(by: int) -> None:
                nonlocal done
                done += by
                progress.update(task, completed=done)

            yield advance
        return
    begun_s, next_s, lock = clock_s(), QUIET_S, threading.Lock()

    def say(by: int) -> None:
        nonlocal done, next_s
        with lock:
            done += by
            if done < total and (elapsed_s := clock_s() - begun_s) >= next_s:
                next_s = 2 * elapsed_s
                typer.echo(f"{what}: {done} of {total} done after {elapsed_s:.0f} s", err=True)

    with _once_it_takes_long(lambda: say(0)):
        yield say


@contextmanager
def progress_by_name(
    what: str, of: str, clock_s: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """The yielded function is told what begins, how many are done, and of how many.

    On a terminal a bar names it; elsewhere, from `QUIET_S` on, each new name is a line.

    Args:
        what: the verb.
        of: what is counted, in the plural.
        clock_s: a monotonic clock.
    """
    console = _stderr()
    if console.is_terminal:
        from rich.progress import TextColumn

        with _bar(console, TextColumn("{task.fields[name]}", markup=False)) as progress:
            task = progress.add_task(what, name="")
            drawn, last = "", 0

            def draw(name: str, done: int, total: int) -> None:
                nonlocal drawn, last
                progress.update(task, name=name, completed=done, total=total, refresh=name != drawn)
                drawn, last = name, total

            yield draw
            progress.update(task, name="", completed=last, total=last)
        return
    begun_s, said, lock = clock_s(), "", threading.Lock()
    now: tuple[str, int, int] | None = None

    def say() -> None:
        nonlocal said
        with lock:
            if now is not None and now[0] != said and clock_s() - begun_s >= QUIET_S:
                said, done, total = now
                typer.echo(f"{what}: {said}, {done} of {total} {of} done", err=True)

    def tell(name: str, done: int, total: int) -> None:
        nonlocal now
        now = name, done, total
        say()

    with _once_it_takes_long(say):
        yield tell


@contextmanager
def _once_it_takes_long(say: Callable[[], None]) -> Iterator[None]:
    """From `QUIET_S` on `say` is called once by a thread of its own: the work may be at its first piece for long."""
    timer = threading.Timer(QUIET_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _bar(console: Console, *more: ProgressColumn) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(10 if more else 40), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn(), *more),
    )
    return Progress(*columns, console=console, refresh_per_second=4)
