"""The streams of the layerwise flow: the engine's own, and one for loads and one for stores beside it.

A load or store stream is one direction of a `TransferEngine`. What orders them is said in the words of streams: the
store stream waits for the compute stream before it reads a layer, the compute stream waits for the load stream before
it does. On the CPU device the calling thread is the compute stream: what it was given so far has run, and waiting
blocks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lamella.cuda_ext.arrival import Fence
from lamella.cuda_ext.engine import RegisteredCache, TransferEngine
from lamella.cuda_ext.executors import HostObjects
from lamella.cuda_ext.transfer import CopyMethod, Transfer
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice


def _always() -> bool:
    return True


class Moment(NamedTuple):
    """All that a stream was given up to some instant. `kept` stays alive as long as `fence` is waited for.

    `has_passed` says, without waiting, whether the stream has done all of it; True also where that is not known, since
    the fence orders it all the same.
    """

    fence: Fence | None
    kept: object = None
    has_passed: Callable[[], bool] = _always


class ComputeStream(Protocol):
    """The stream on which the engine computes."""

    @property
    def handle(self) -> int:
        """`cudaStream_t` as an integer; 0 on the CPU."""
        ...

    def record(self) -> Moment:
        """This instant: a transfer fenced by it starts after what the stream was given so far (XFER-3)."""
        ...


class HostStream:
    """The compute stream of the CPU device: the thread that calls."""

    handle = 0

    def record(self) -> Moment:
        """Nothing to wait for: what this thread was given has run."""
        return Moment(None)


class Span(NamedTuple):
    """One transfer of a slice, or one layer's computing, by a monotonic clock."""

    kind: str
    first_layer: int
    num_layers: int
    start_ns: int
    end_ns: int


Recorder = Callable[[Span], None]
"""Takes each span once, in any order, on the engine's thread."""


class Outstanding:
    """How many transfers have not drained yet, and what to do once none is left. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._ended = 0
        self._then: list[Callable[[], None]] = []

    def begin(self) -> None:
        """One more."""
        with self._changed:
            self._count += 1

    def end(self) -> None:
        """One fewer; the last one does what was left to do."""
        with self._changed:
            self._count -= 1
            self._ended += 1
            todo, self._then = ([], self._then) if self._count else (self._then, [])
        for action in todo:
            action()
        with self._changed:
            self._changed.notify_all()

    def then(self, action: Callable[[], None]) -> None:
        """`action` runs once nothing is outstanding: now, or on the thread that ends the last one."""
        with self._changed:
            if self._count:
                self._then.append(action)
                return
        action()

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is outstanding within the bound."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count and not self._then, timeout_s)

    def wait_ended(self, count: int, timeout_s: float) -> bool:
        """Whether `count` have ended, since the beginning, within the bound."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended >= count, timeout_s)


class Blocks(NamedTuple):
    """Tokens `[skip_tokens, num_tokens)` of a sequence in the engine; all fields as in `TransferRequest`."""

    block_ids: tuple[Sequence[int] | NDArray[np.int32], ...]
    num_tokens: int
    skip_tokens: int = 0
    null_block: int | None = None


class TransferStream:
    """One direction of a transfer engine.

    Args:
        engine: moves the bytes.
        direction: loads retrieve, stores store.
        method: how bytes move.
    """

    def __init__(self, engine: TransferEngine, direction: Direction, method: CopyMethod) -> None:
        self._engine = engine
        self._direction = direction
        self._method = method
        self.moment = Moment(None)
        """What `wait_stream` said last."""
        self.outstanding = Outstanding()

    def wait_stream(self, stream: ComputeStream) -> None:
        """What is submitted from now on starts after what `stream` was given so far."""
        self.moment = stream.record()

    def submit(
        self,
        cache: RegisteredCache,
        part: Slice,
        objects: HostObjects,
        blocks: Blocks,
        on_drained: Callable[[], None],
        after: Moment | None = None,
    ) -> Transfer:
        """Queues one slice; `on_drained` is called once when nothing of it is in flight any more.

        If it raises, nothing was queued and `on_drained` is not called.

        Args:
            cache: with the slice among its layers.
            part: the layers, counted as the cache counts them.
            objects: host addresses by absolute chunk.
            blocks: where in the engine.
            on_drained: frees what the transfer reads or writes (XFER-2).
            after: instead of what `wait_stream` said last.
        """
        moment = self.moment if after is None else after
        self.outstanding.begin()

        def drained(_kept: object = moment.kept) -> None:
            try:
                on_drained()
            finally:
                self.outstanding.end()

        try:
            return self._engine.submit(
                cache,
                self._direction,
                objects,
                blocks.block_ids,
                blocks.num_tokens,
                slices=[part],
                skip_tokens=blocks.skip_tokens,
                null_block=blocks.null_block,
                method=self._method,
                fence=moment.fence,
                on_drained=drained,
            )
        except BaseException:
            self.outstanding.end()
            raise
