"""A link that lands in staging windows, the kernels that scatter them, and a speed that changes on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from lamella.reference.ordering import OrderPolicy
from lamella.reference.pathway import split_windows
from lamella.sim.clock import Clock, Phase
from lamella.sim.hardware import FULL_SPEED, Ratio, Scatter, Staging
from lamella.sim.stations import Link, SliceNote, Transfer


class ScatterKernels:
    """The stream on which windows are scattered, one after another.

    A launch of another context waits for its time slice while the engine computes.
    """

    def __init__(
        self, clock: Clock, scatter: Scatter, is_computing: Callable[[], bool], note: SliceNote | None
    ) -> None:
        self._clock = clock
        self._scatter = scatter
        self._is_computing = is_computing
        self._note = note
        self._queue: deque[tuple[int, int, int, Callable[[], None]]] = deque()
        self._running = False

    def put(self, sequence: int, part: int, num_bytes: int, then: Callable[[], None]) -> None:
        """The window has crossed; `then` is called when it is in the engine's blocks."""
        self._queue.append((sequence, part, num_bytes, then))
        if not self._running:
            self._begin()

    def window_ns(self, num_bytes: int) -> int:
        """One launch, without waiting."""
        return self._scatter.window_ns(num_bytes)

    def _begin(self) -> None:
        self._running = True
        sequence, part, num_bytes, then = self._queue.popleft()
        now = self._clock.now_ns
        end = now + self._scatter.window_ns(num_bytes)
        if self._scatter.foreign_wait_ns and self._is_computing():
            end += self._scatter.foreign_wait_ns
        if self._note is not None:
            self._note(sequence, part, now, end, num_bytes)
        self._clock.at(end, Phase.HAPPEN, lambda: self._end(then))

    def _end(self, then: Callable[[], None]) -> None:
        self._running = False
        if self._queue:
            self._begin()
        then()


class StagedLink(Link):
    """A serial link that lands in a ring of windows, and whose speed may change while it carries.

    A window may begin only while the ring has a free one; it is free again when it has been scattered. A slice lands
    when its last window has been. The link takes its next slice only when a window is free, so that until then a more
    urgent one may come.
    """

    def __init__(
        self,
        clock: Clock,
        order: OrderPolicy,
        staging: Staging | None,
        kernels: ScatterKernels | None,
        note: SliceNote | None = None,
    ) -> None:
        super().__init__(clock, order, note)
        self._window_bytes = None if staging is None else staging.window_bytes
        self._free = None if staging is None or kernels is None else staging.windows
        self._kernels = kernels
        self._windows: deque[tuple[int, int]] = deque()  # of the slice being carried, those that have not begun
        self._bytes = 0
        self._left_ns: int | None = None  # wire time at full speed of the window under way; None between windows
        self._since_ns = self._began_ns = 0
        self._speed = FULL_SPEED
        self._ticket = 0
        self.on_busy: Callable[[bool], None] | None = None
        """Told when the link begins and ends to be busy."""

    def set_speed(self, speed: Ratio) -> None:
        """The link carries at that speed from now on, what is under way included."""
        if self._left_ns is not None:
            self._progress()
        self._speed = speed
        if self._left_ns is not None:
            self._schedule_end()

    def ahead_ns(self) -> int:
        """Wire time at full speed of all that is submitted and has not crossed."""
        waiting = sum(wire_ns for wire_ns, _ in self._windows)
        return self._under_way_ns() + waiting + sum(sum(one.load.slice_ns[part:]) for _, _, part, one in self._heads)

    def forecast_ns(self) -> dict[int, list[int]]:
        """As for a plain link at full speed, with the scatter of each slice's last window behind it."""
        carrying, self._carrying = self._carrying, None
        head = 0
        if carrying is not None:
            transfer, part, _ = carrying
            head = self._clock.now_ns + self._under_way_ns() + sum(wire_ns for wire_ns, _ in self._windows)
            self._carrying = (transfer, part, head)
        forecast = super().forecast_ns()
        self._carrying = carrying
        if self._kernels is not None and self._window_bytes is not None:
            behind = self._kernels.window_ns(self._window_bytes)
            forecast = {sequence: [instant + behind for instant in row] for sequence, row in forecast.items()}
        return forecast

    def _choose(self) -> None:
        if self._free == 0:
            self._choosing = False
            return  # a scattered window brings the link back
        super()._choose()

    def _carry(self, transfer: Transfer, part: int) -> None:
        load = transfer.load
        self._carrying = (transfer, part, -1)
        self._windows.extend(split_windows(load.slice_bytes[part], load.slice_ns[part], self._window_bytes))
        self._begin_window()

    def _begin_window(self) -> None:
        if self._free is not None:
            if self._free == 0:
                return
            self._free -= 1
        self._left_ns, self._bytes = self._windows.popleft()
        self._since_ns = self._began_ns = self._clock.now_ns
        if self.on_busy is not None:
            self.on_busy(True)
        self._schedule_end()

    def _progress(self) -> None:
        self._left_ns, self._since_ns = self._under_way_ns(), self._clock.now_ns

    def _under_way_ns(self) -> int:
        """What is left of the window under way. Asking rounds nothing: the world is the same however often one asks."""
        if self._left_ns is None:
            return 0
        speed = self._speed
        return max(0, self._left_ns - (self._clock.now_ns - self._since_ns) * speed.numerator // speed.denominator)

    def _schedule_end(self) -> None:
        assert self._left_ns is not None, "only a window under way ends"
        self._ticket += 1
        ticket = self._ticket
        wire_ns = -(-self._left_ns * self._speed.denominator // self._speed.numerator)
        self._clock.at(self._clock.now_ns + wire_ns, Phase.HAPPEN, lambda: self._end_window(ticket))

    def _end_window(self, ticket: int) -> None:
        if ticket != self._ticket:
            return  # the speed changed after this end had been scheduled
        assert self._carrying is not None, "only a slice that was begun has windows"
        transfer, part, _ = self._carrying
        now = self._clock.now_ns
        self._left_ns = None
        self.busy_ns += now - self._began_ns
        if self._note is not None:
            self._note(transfer.submission.sequence, part, self._began_ns, now, self._bytes)
        if self.on_busy is not None:
            self.on_busy(False)
        last = not self._windows
        done = partial(self._scattered, transfer, part, self._bytes, last)
        if last:
            self._carrying = None
        if self._kernels is None:
            done()
        else:
            self._kernels.put(transfer.submission.sequence, part, self._bytes, done)
        if self._windows and self._left_ns is None:
            self._begin_window()
        elif self._carrying is None:
            self._choose_soon()

    def _scattered(self, transfer: Transfer, part: int, num_bytes: int, last: bool) -> None:
        self.carried_bytes += num_bytes
        if self._free is not None:
            self._free += 1
            if self._windows and self._left_ns is None:
                self._begin_window()
        if last:
            transfer.landing_ns.append(self._clock.now_ns)
            transfer.on_landed(part)
        if self._carrying is None:
            self._choose_soon()

    def _choose_soon(self) -> None:
        if self._heads and not self._choosing:
            self._choosing = True
            self._clock.at(self._clock.now_ns, Phase.CHOOSE, self._choose)
