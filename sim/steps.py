"""What the engine has under way: a step, layer by layer, or a stretch of decode steps as one event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from lamella.reference.timeline import Chunk
from lamella.sim.requests import Job
from lamella.sim.stations import ComputeModel


class RunningStep:
    """A step under way: the layer it has reached, and what it stood waiting for.

    One that replays one graph (`whole`) waits in front of it, until all its layers may run.
    """

    __slots__ = (
        "blocked",
        "context_tokens",
        "costs",
        "decode_batch",
        "layer",
        "loads",
        "polled_ns",
        "reached_ns",
        "stalls",
        "start_ns",
        "taken",
        "whole",
    )

    def __init__(
        self,
        polled_ns: int,
        start_ns: int,
        taken: list[tuple[Job, Chunk]],
        costs: Sequence[int],
        decode_batch: int,
        context_tokens: int,
        loads: list[Job],
        *,
        whole: bool = False,
    ) -> None:
        self.polled_ns = polled_ns
        self.start_ns = start_ns
        self.taken = taken
        self.costs = costs
        self.decode_batch = decode_batch
        self.context_tokens = context_tokens  # of those who decode
        self.loads = loads  # released and not fully landed when it began
        self.whole = whole
        self.layer = 0
        self.blocked = False
        self.reached_ns = start_ns
        self.stalls: dict[int, tuple[int, int | None]] = {}

    def runnable(self, landed: Iterable[int]) -> int:
        """So many of its layers may run, where of each load that it waits for so many have landed."""
        num_layers = len(self.costs)
        ready = min((num_layers, *landed))
        return 0 if self.whole and ready < num_layers else ready

    def awaited(self, layer: int) -> int:
        """The layer for which it waits in front of that one."""
        return len(self.costs) - 1 if self.whole else layer


class DecodeStretch:
    """Successive decode steps as one event; `num_steps` shrinks when it is cut.

    It was formed at `polled_ns`; `start_ns` is later where the engine's thread or its inputs were held up. Each step
    begins with the start delay.
    """

    __slots__ = (
        "_boundaries",
        "_compute",
        "_context_tokens",
        "_start_delay_ns",
        "batch",
        "num_steps",
        "polled_ns",
        "start_ns",
    )

    def __init__(
        self,
        compute: ComputeModel,
        polled_ns: int,
        start_ns: int,
        start_delay_ns: int,
        batch: int,
        context_tokens: int,
        num_steps: int,
    ) -> None:
        self._compute = compute
        self._start_delay_ns = start_delay_ns
        self._context_tokens = context_tokens
        self.polled_ns = polled_ns
        self.start_ns = start_ns
        self.batch = batch
        self.num_steps = num_steps
        self._boundaries: dict[int, int] = {}  # those that have been asked for; ends are asked for again

    def boundary_ns(self, num_steps: int) -> int:
        """When that many of its steps have run."""
        known = self._boundaries.get(num_steps)
        if known is None:
            computing_ns = self._compute.decode_ns(self.batch, self._context_tokens, num_steps)
            known = self.start_ns + num_steps * self._start_delay_ns + computing_ns
            self._boundaries[num_steps] = known
        return known

    def next_boundary(self, instant_ns: int) -> int:
        """Steps, at least 1, that have run at the first boundary not before that instant."""
        last = self.num_steps
        if last == 1:
            return 1
        # Steps differ little, so the first guess is right or next to it; a search over all is the fall-back.
        end = self.boundary_ns(last)
        guess = min(max(1, (instant_ns - self.start_ns) * last // max(1, end - self.start_ns)), last - 1)
        for steps in (guess, guess + 1):
            if self.boundary_ns(steps) >= instant_ns and (steps == 1 or self.boundary_ns(steps - 1) < instant_ns):
                return steps
        return 1 + bisect_left(range(1, last), instant_ns, key=self.boundary_ns)


def split_evenly(whole_ns: int, num_layers: int) -> list[int]:
    """The parts of a time that each layer takes, if all take the same to the nanosecond; they add up to it."""
    return [whole_ns * (layer + 1) // num_layers - whole_ns * layer // num_layers for layer in range(num_layers)]
