"""A second process that computes on the same device beside some arms, and whether both share it through MPS.

Kernels of two processes take turns on a device, a time slice each. NVIDIA's multi-process service (MPS) lets them run
beside each other instead; its daemon must be there before either process has begun, so an engine runs with it or
without it: `nvidia-cuda-mps-control -d`, and CUDA_MPS_PIPE_DIRECTORY where its pipes are not in the usual folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from lamella.cuda_ext.beside import OtherProcess

MPS_CONTROL: Final = "nvidia-cuda-mps-control"
MPS_ANSWER_S: Final = 10.0
_ROWS: Final = 1024
"""Tokens of the products: those of a prefill."""
_ANSWER_S: Final = 60.0


class SecondProcess:
    """Multiplies beside whatever says so; there is none before the first that does.

    Args:
        device: as torch names it.
        shared: in which threads and processes are made that do not get this thread's core.
    """

    def __init__(self, device: str, shared: Callable[[], AbstractContextManager[None]]) -> None:
        self._device, self._shared = device, shared
        self._other: OtherProcess | None = None

    @contextmanager
    def multiplying(self, wanted: bool) -> Iterator[None]:
        """Inside the block the process multiplies, where that is wanted; none is left after an error.

        Raises:
            RuntimeError: it did not start or does not answer within a minute.
        """
        if not wanted:
            yield
            return
        if self._other is None:
            with self._shared():
                self._other = OtherProcess(self._device, _ROWS, _ANSWER_S)
        try:
            with self._other.multiplying():
                yield
        except BaseException:  # it would go on beside what comes next
            self.close()
            raise

    def close(self) -> None:
        """There is none. A second call does nothing."""
        other, self._other = self._other, None
        if other is not None:
            other.close()


def mps_servers() -> list[int] | None:
    """The process ids of the MPS servers here, none before the first process computes; None: no daemon answers."""
    try:
        asked = subprocess.run(
            [MPS_CONTROL], input="get_server_list\n", capture_output=True, text=True, timeout=MPS_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [int(word) for word in asked.stdout.split() if word.isdigit()]
