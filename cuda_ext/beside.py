"""Something for a transfer to run beside: matrix products in this process, or in another one on the same device.

Prefill is mostly matrix products, and they are what a copy disturbs and is disturbed by. Needs torch; a machine without
it measures transfers alone. On the CPU device the products run on the CPU.

Run as a program (`python -m lamella.cuda_ext.beside DEVICE ROWS`) it is the other process of `OtherProcess`.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Self

WIDTH: Final = 8192
CPU_WIDTH: Final = 512
_MULTIPLYING, _PAUSED = "multiplying", "paused"
_BATCH: Final = 4
"""Products that are enqueued at once: some 20 µs of the interpreter's lock, 0.8 ms of an H200."""
_BATCHES_AHEAD: Final = 3


def torch_reason(device: str) -> str | None:
    """Why products cannot run on this device, None if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed (pip install 'lamella[torch]')"
    if device != "cpu" and not torch.cuda.is_available():
        return f"this torch build ({torch.__version__}) reaches no GPU"
    return None


class _Done:
    """On the CPU device nothing is queued; and nothing can be said of gaps."""

    def query(self) -> bool:
        """Whether there was a gap."""
        return False

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Products:
    """Matrix products `[WIDTH, WIDTH] x [WIDTH, rows]` in bf16 on a stream of their own, at the default priority.

    Args:
        device: as torch names it.
        rows: columns of the right operand, the tokens of a prefill step.
    """

    def __init__(self, device: str, rows: int) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        width = WIDTH if self._device.type == "cuda" else CPU_WIDTH
        random = torch.Generator(self._device).manual_seed(1)
        self._left: Any = torch.randn(width, width, device=device, dtype=torch.bfloat16, generator=random)
        self._right: Any = torch.randn(width, rows, device=device, dtype=torch.bfloat16, generator=random)
        self._result: Any = torch.empty(width, rows, device=device, dtype=torch.bfloat16)
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.run(10)

    def enqueue(self, count: int) -> Products:
        """`count` products are queued; on the CPU they have run."""
        if self._stream is None:
            for _ in range(count):
                self._torch.mm(self._left, self._right, out=self._result)
            return self
        with self._torch.cuda.stream(self._stream):
            for _ in range(count):
                self._torch.mm(self._left, self._right, out=self._result)
        return self

    def mark(self) -> Any:
        """An event behind what was queued: `query` says whether that has run, `synchronize` sleeps until it has."""
        if self._stream is None:
            return _Done()
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self) -> None:
        """What was queued has run."""
        if self._stream is not None:
            self._stream.synchronize()

    def run(self, count: int) -> int:
        """Nanoseconds that `count` products took, on the device's clock."""
        if self._stream is None:
            before = time.perf_counter_ns()
            self.enqueue(count)
            return time.perf_counter_ns() - before
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self._stream)
        self.enqueue(count)
        last.record(self._stream)
        last.synchronize()
        return int(first.elapsed_time(last) * 1e6)

    @contextmanager
    def timed(self, count: int) -> Iterator[list[int]]:
        """Queues `count` products before the block and, after it, appends the nanoseconds they took to the list.

        On the CPU they run behind the block's back in a thread.
        """
        taken: list[int] = []
        if self._stream is None:
            thread = threading.Thread(target=lambda: taken.append(self.run(count)))
            thread.start()
            yield taken
            thread.join()
            return
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self._stream)
        self.enqueue(count)
        last.record(self._stream)
        yield taken
        last.synchronize()
        taken.append(int(first.elapsed_time(last) * 1e6))


class Ran(NamedTuple):
    """What ran beside something.

    Attributes:
        products: that have run.
        duration_ns: from the first to the last of them.
        gaps: how often the device was found with nothing to multiply.
    """

    products: int
    duration_ns: int
    gaps: int


class ThisProcess:
    """Products of this process, enqueued by a thread of its own, as an inference engine's are beside its connector.

    The thread keeps the device's queue a few batches long and holds the interpreter's lock for one small batch at a
    time: waiting for the device, and on the CPU device multiplying, happen without the lock.

    Args:
        device: as torch names it.
        rows: as for `Products`.
    """

    def __init__(self, device: str, rows: int) -> None:
        self._products = Products(device, rows)
        self.ran: list[Ran] = []
        """One entry for each block of `multiplying`."""

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        """Inside the block products run without a pause.

        Raises:
            RuntimeError: they ended before the block did.
        """
        stop, begun, failed = threading.Event(), threading.Event(), list[BaseException]()

        def multiply() -> None:
            try:
                self.ran.append(self._multiply(stop, begun))
            except BaseException as error:
                failed.append(error)
            finally:
                begun.set()

        thread = threading.Thread(target=multiply, name="lamella-products", daemon=True)
        thread.start()
        begun.wait()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failed:
            raise RuntimeError(f"the products beside ended early: {failed[0]}") from failed[0]

    def _multiply(self, stop: threading.Event, begun: threading.Event) -> Ran:
        marks: deque[Any] = deque()
        batches = gaps = 0
        begun_ns = time.monotonic_ns()
        while not stop.is_set():
            if marks and marks[-1].query():
                gaps += 1
            marks.append(self._products.enqueue(_BATCH).mark())
            batches += 1
            begun.set()
            if len(marks) > _BATCHES_AHEAD:
                marks.popleft().synchronize()
        self._products.wait()
        return Ran(batches * _BATCH, time.monotonic_ns() - begun_ns, gaps)


class OtherProcess:
    """Another process on the same device that multiplies while it is told to; a context manager ends it.

    Args:
        device: as torch names it.
        rows: as for `Products`.
        timeout_s: bound on its start, and on each of its answers.

    Raises:
        RuntimeError: it did not start within the bound.
    """

    def __init__(self, device: str, rows: int, timeout_s: float = 120) -> None:
        command = [sys.executable, "-m", "lamella.cuda_ext.beside", device, str(rows)]
        self._timeout_s = timeout_s
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._expect(_PAUSED)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        """Inside the block it multiplies without a pause.

        Raises:
            RuntimeError: it ended, or does not answer.
        """
        self._tell(_MULTIPLYING)
        yield
        self._tell(_PAUSED)

    def close(self) -> None:
        """It has ended. A second call does nothing."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a word that it never read
                    pipe.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tell(self, word: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(word + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the process beside ended with code {self._child.wait(10)}") from None
        self._expect(word)

    def _expect(self, word: str) -> None:
        assert self._child.stdout is not None
        readable, _, _ = select.select([self._child.stdout], [], [], self._timeout_s)
        said = self._child.stdout.readline().strip() if readable else f"nothing for {self._timeout_s} s"
        if said != word:
            raise RuntimeError(f"the process beside should have said {word!r}, it said {said!r}")


def _serve(device: str, rows: int) -> None:
    """Says which of the two states it is in, first and whenever it is told one, until its standard input closes."""
    products = Products(device, rows)
    state = _PAUSED
    while True:
        sys.stdout.write(state + "\n")
        sys.stdout.flush()
        while state == _MULTIPLYING and not select.select([sys.stdin], [], [], 0)[0]:
            products.enqueue(40).wait()
        line = sys.stdin.readline()
        if not line:
            return
        state = line.strip()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
