"""Executors: they carry out a transfer plan on host memory.

Every executor leaves exactly the oracle's bytes (XFER-1); they differ in speed and in what they need. The native one
expands the plan's compact request with its own planner and moves bytes without the GIL; the NumPy one follows the
plan's windows with strided views and needs no compiler.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

from lamella.cuda_ext._execution import Executor, HostObjects, Method, SliceLanded
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext._native import NativeExecutor, NativePlan, expand_natively
from lamella.cuda_ext._numpy import NumpyExecutor

__all__ = [
    "Executor",
    "ExecutorChoice",
    "HostObjects",
    "Method",
    "NativeExecutor",
    "NativePlan",
    "NumpyExecutor",
    "SliceLanded",
    "choose_executor",
    "expand_natively",
]

logger = logging.getLogger(__name__)


class ExecutorChoice(NamedTuple):
    """An executor, and one sentence on why it and no other."""

    executor: Executor
    reason: str


def choose_executor(threads: int = 1) -> ExecutorChoice:
    """The fastest executor that this installation has; a path not taken is logged once with its reason.

    Args:
        threads: for the native executor; NumPy copies on the calling thread.

    Raises:
        ValueError: threads outside 1 .. 1024.
    """
    try:
        return ExecutorChoice(NativeExecutor(threads), "the native library is installed and loads")
    except LibraryMissingError as error:
        reason = f"NumPy, because {error}"
        _say_once(reason)
        return ExecutorChoice(NumpyExecutor(), reason)


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("transfers run with %s", reason)
