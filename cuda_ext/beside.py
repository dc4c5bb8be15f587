"""Something for a transfer to run beside: matrix products in this process, or in another one on the same device.

Prefill is mostly matrix products, and they are what a copy disturbs and is disturbed by. Needs torch; a machine without
it measures transfers alone. On the CPU device the products run on the CPU.

Run as a program (`python -m lamella.cuda_ext.beside DEVICE ROWS`) it multiplies until its standard input closes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

WIDTH: Final = 8192
CPU_WIDTH: Final = 512
_READY: Final = "multiplying"


def torch_reason(device: str) -> str | None:
    """Why products cannot run on this device, None if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed (pip install 'lamella[torch]')"
    if device != "cpu" and not torch.cuda.is_available():
        return f"this torch build ({torch.__version__}) reaches no GPU"
    return None


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
            import threading

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


@contextmanager
def another_process(device: str, rows: int, start_timeout_s: float = 120) -> Iterator[None]:
    """Inside the block another process multiplies on the device without a pause; afterwards it has ended.

    Raises:
        RuntimeError: it did not start within `start_timeout_s`, or ended inside the block.
    """
    command = [sys.executable, "-m", "lamella.cuda_ext.beside", device, str(rows)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            line = _line_within(child, start_timeout_s)
            if line != _READY:
                raise RuntimeError(f"the process beside did not start within {start_timeout_s} s, it said {line!r}")
            yield
            if child.poll() is not None:
                raise RuntimeError(f"the process beside ended with code {child.returncode} while it was needed")
        finally:
            child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def _line_within(child: subprocess.Popen[str], timeout_s: float) -> str:
    import select

    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], timeout_s)
    return child.stdout.readline().strip() if readable else ""


def _multiply_until_closed(device: str, rows: int) -> None:
    import select

    products = Products(device, rows)
    sys.stdout.write(_READY + "\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        products.enqueue(40).wait()


if __name__ == "__main__":
    _multiply_until_closed(sys.argv[1], int(sys.argv[2]))
