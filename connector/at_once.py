"""Work that a caller would rather do itself than hand to a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class AtOnce(Executor):
    """Runs what it is given on the caller's thread; the future it returns is done.

    Handing a load to a thread of its own costs a switch of the interpreter's lock, up to 15 ms where the model runner's
    thread is busy in Python; the load's submission itself takes a fraction of a millisecond.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as refused:
            done.set_exception(refused)
        return done
