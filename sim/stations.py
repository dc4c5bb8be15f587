"""The stations of the world: the link that carries slices, and the cost of computing.

The link shares with the recursion of `lamella.reference.timeline` nothing but the order policy: there a schedule is
computed from all submissions at once, here a slice is taken when the link is free, one event after another.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from lamella.reference.ordering import OrderPolicy, Submission, slice_keys
from lamella.reference.slices import Slice
from lamella.reference.timeline import Load
from lamella.sim.clock import Clock, Phase

SliceNote = Callable[[int, int, int, int, int], None]
"""Writes down an occupation: (sequence, slice, begin, end, bytes)."""

Prefill = tuple[int, int]
"""One member's prefill in a step: (tokens already in the cache, tokens to compute)."""


class ComputeModel(Protocol):
    """How long the engine's layers take; `lamella.reference.profile` holds measured ones."""

    @property
    def num_layers(self) -> int:
        """Layers of the model; every answer of `step_layers_ns` has as many."""

    def step_layers_ns(
        self, prefills: Sequence[Prefill], decode_batch: int, decode_context_tokens: int
    ) -> Sequence[int]:
        """Per layer, the time of a step with at least one prefill, beside `decode_batch` decoding requests.

        Args:
            prefills: (cached, new) tokens of each prefilling member; `new` is at least 1.
            decode_batch: requests that decode one token in this step.
            decode_context_tokens: the sum of their contexts.
        """

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        """The time of `num_steps` successive steps in which `batch` requests decode and nothing else happens.

        The context grows by `batch` a step. A stretch must cost what its parts cost, to the nanosecond, because the
        world runs it as one event and cuts it when something arrives::

            decode_ns(b, c, m + n) == decode_ns(b, c, m) + decode_ns(b, c + m * b, n)

        Args:
            batch: at least 1.
            context_tokens: the sum of the contexts before the first of the steps.
            num_steps: at least 0.
        """


@dataclass(frozen=True, slots=True)
class EntryCost:
    """What the runs of a slice cost besides their bytes, each an entry of a copy call.

    Attributes:
        per_layer: entries of one layer; runs that were merged count once.
        issue_ns: the host's time for each. It runs ahead of the wire, so a slice takes the longer of the two.
        gap_ns: how long the wire stands idle behind each: none in one batched call, a turnaround where every entry is a
            call of its own on one stream.

    Raises:
        ValueError: a negative number.
    """

    per_layer: int
    issue_ns: int = 0
    gap_ns: int = 0

    def __post_init__(self) -> None:
        if min(self.per_layer, self.issue_ns, self.gap_ns) < 0:
            raise ValueError(f"entries and their times must be at least 0, got {self}")

    def slice_ns(self, num_layers: int, wire_ns: int) -> int:
        """A slice's time, given that of its bytes."""
        entries = num_layers * self.per_layer
        return max(wire_ns, entries * self.issue_ns) + entries * self.gap_ns


def plan_load(
    slices: Sequence[Slice],
    layer_bytes: int,
    bytes_per_s: float,
    fixed_ns: int = 0,
    entries: EntryCost | None = None,
) -> Load:
    """The load of `slices` over a link of that rate.

    Slices end where the wire has carried that many bytes, so that all widths take the same time but for the fixed cost.

    Args:
        slices: as `plan_slices` gives them; one slice of all layers is chunk-major.
        layer_bytes: bytes of one layer of the hit.
        bytes_per_s: what the link carries.
        fixed_ns: what each slice costs besides its bytes.
        entries: what its runs cost besides; None: nothing.

    >>> plan_load([Slice(0, 1), Slice(1, 2)], layer_bytes=100, bytes_per_s=1e9, fixed_ns=7)
    Load(slice_layers=(1, 2), slice_bytes=(100, 200), slice_ns=(107, 207))
    """
    ends = [0, *(round(part.end_layer * layer_bytes * 1e9 / bytes_per_s) for part in slices)]
    cost = entries or EntryCost(0)
    return Load(
        tuple(part.num_layers for part in slices),
        tuple(part.num_layers * layer_bytes for part in slices),
        tuple(
            cost.slice_ns(part.num_layers, end - begin) + fixed_ns
            for part, (begin, end) in zip(slices, pairwise(ends), strict=True)
        ),
    )


class Transfer:
    """One load on one link: its keys, how far it is, and whom to tell when a slice has landed.

    Attributes:
        available: slices that may move; fewer than all while a tier below still brings them.
        cancelled: no further slice of it is taken; one under way runs to its end.
        started_ns: when it was put on its way; None if it had to wait then for what the device computes.
    """

    __slots__ = (
        "_begun",
        "available",
        "cancelled",
        "keys",
        "landing_ns",
        "load",
        "on_landed",
        "started_ns",
        "submission",
    )

    def __init__(self, submission: Submission, load: Load, on_landed: Callable[[int], None]) -> None:
        self.submission = submission
        self.load = load
        self.on_landed = on_landed
        self.keys: tuple[int, ...] = ()
        self.landing_ns: list[int] = []
        self.available = len(load.slice_ns)
        self.cancelled = False
        self.started_ns: int | None = None
        self._begun = 0

    def head(self) -> tuple[int, int, int, Transfer]:
        """What the transfer's next slice competes with on the link."""
        return (self.keys[self._begun], self.submission.sequence, self._begun, self)

    def begin(self) -> int:
        """The next slice begins; returns its index."""
        self._begun += 1
        return self._begun - 1

    @property
    def begun(self) -> int:
        """Slices that have begun."""
        return self._begun

    @property
    def left(self) -> int:
        """Slices that have not begun."""
        return len(self.keys) - self._begun


class Carrier(Protocol):
    """What carries loads to where the engine sees them: a link, a staged link, a shared one, one for each rank."""

    @property
    def carried_bytes(self) -> int:
        """What has crossed."""

    @property
    def busy_ns(self) -> int:
        """Time in which something crossed."""

    def submit(self, transfer: Transfer) -> None:
        """The transfer's slices compete from now on."""

    def offer(self, transfer: Transfer) -> None:
        """More of the transfer's slices are available than before."""

    def cancel(self, transfer: Transfer) -> None:
        """No slice of the transfer that has not begun is carried any more."""

    def forecast_ns(self) -> dict[int, list[int]]:
        """Per sequence number, when the slices that have not landed will, if nothing else is submitted."""

    def ahead_ns(self) -> int:
        """Wire time of all that is submitted and has not crossed."""


class Link:
    """A serial link, never idle while a slice waits, that finishes a slice it began (ORD-2).

    When it is free it takes the smallest (key, sequence, slice index) among the next slices of the submitted transfers.

    Args:
        clock: gives the instants.
        order: gives the keys.
        note: called with (sequence, slice, begin, end, bytes) of each slice; None if nobody keeps them.
    """

    def __init__(self, clock: Clock, order: OrderPolicy, note: SliceNote | None = None) -> None:
        self._clock = clock
        self._order = order
        self._note = note
        self._heads: list[tuple[int, int, int, Transfer]] = []
        self._carrying: tuple[Transfer, int, int] | None = None  # transfer, slice index, landing instant
        self._choosing = False
        self._round = 0
        self.carried_bytes = 0
        self.busy_ns = 0

    def submit(self, transfer: Transfer) -> None:
        """The transfer's slices compete from now on; its keys are fixed here, once."""
        one = transfer.submission  # spelled out: dataclasses.replace takes seven times as long
        transfer.submission = Submission(one.sequence, one.arrival_ns, one.slice_bytes, one.deadline_ns, self._round)
        transfer.keys = slice_keys(self._order, transfer.submission)
        if transfer.keys and transfer.available:
            self._compete(transfer)

    def offer(self, transfer: Transfer) -> None:
        """A slice more is available than before; the transfer competes again if it lacked one."""
        if transfer.keys and transfer.begun == transfer.available - 1 and not transfer.cancelled:
            self._compete(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """No slice of it that has not begun is carried any more."""
        transfer.cancelled = True
        self._heads = [head for head in self._heads if head[3] is not transfer]
        heapq.heapify(self._heads)

    def ahead_ns(self) -> int:
        """Wire time of all that is submitted and has not crossed."""
        carrying = self._carrying[2] - self._clock.now_ns if self._carrying else 0
        return carrying + sum(sum(transfer.load.slice_ns[part:]) for _, _, part, transfer in self._heads)

    def _compete(self, transfer: Transfer) -> None:
        heapq.heappush(self._heads, transfer.head())
        if self._carrying is None and not self._choosing:
            self._choosing = True
            self._clock.at(self._clock.now_ns, Phase.CHOOSE, self._choose)

    def forecast_ns(self) -> dict[int, list[int]]:
        """Per sequence number, when the slices that have not landed will, if nothing else is submitted."""
        landings: dict[int, list[int]] = {}
        free_ns = self._clock.now_ns
        if self._carrying:
            transfer, _, free_ns = self._carrying
            landings[transfer.submission.sequence] = [free_ns]
        heads = list(self._heads)
        while heads:
            _, sequence, part, transfer = heads[0]
            free_ns += transfer.load.slice_ns[part]
            landings.setdefault(sequence, []).append(free_ns)
            if part + 1 < transfer.available:
                heapq.heapreplace(heads, (transfer.keys[part + 1], sequence, part + 1, transfer))
            else:
                heapq.heappop(heads)
        return landings

    def _choose(self) -> None:
        self._choosing = False
        if not self._heads:
            return  # what was to be taken has been cancelled in this instant
        heads = self._heads
        _, sequence, part, transfer = heads[0]
        self._round = transfer.submission.round + part
        following = transfer._begun = part + 1
        if following < transfer.available:
            heapq.heapreplace(heads, (transfer.keys[following], sequence, following, transfer))
        else:
            heapq.heappop(heads)
        self._carry(transfer, part)

    def _carry(self, transfer: Transfer, part: int) -> None:
        slice_ns = transfer.load.slice_ns[part]
        now = self._clock.now_ns
        self._carrying = (transfer, part, now + slice_ns)
        self.busy_ns += slice_ns
        if self._note is not None:
            self._note(transfer.submission.sequence, part, now, now + slice_ns, transfer.load.slice_bytes[part])
        self._clock.at(now + slice_ns, Phase.HAPPEN, self._land)

    def _land(self) -> None:
        assert self._carrying is not None, "only a slice that was begun can land"
        transfer, part, landing_ns = self._carrying
        self._carrying = None
        self.carried_bytes += transfer.load.slice_bytes[part]
        transfer.landing_ns.append(landing_ns)
        transfer.on_landed(part)
        if self._heads and not self._choosing:
            self._choosing = True
            self._clock.soon(Phase.CHOOSE, self._choose)
