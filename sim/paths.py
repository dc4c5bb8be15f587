"""The whole way of a load, put together from its parts: ranks, tiers, links and the way back.

All that carries is a `lamella.sim.stations.Carrier`, so the engine knows none of the parts by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lamella.reference.ordering import Fifo, OrderPolicy
from lamella.reference.timeline import Load
from lamella.sim.clock import Clock, Phase
from lamella.sim.hardware import FULL_SPEED, Hardware, Ratio, Sharing, Tier
from lamella.sim.records import SliceRecord, Station
from lamella.sim.shared import SharedLink
from lamella.sim.staged import ScatterKernels, StagedLink
from lamella.sim.stations import Carrier, Link, SliceNote, Transfer

Keep = Callable[[SliceRecord], object]


class RankedLinks:
    """A link for each tensor-parallel rank; a slice has landed when the slowest rank has it.

    Attributes:
        last_rank: which rank was last with the slice that landed everywhere last.
    """

    def __init__(self, links: Sequence[Carrier], speeds: Sequence[Ratio]) -> None:
        self.links = links
        self.last_rank = 0
        self._speeds = speeds
        self._copies: dict[int, list[Transfer]] = {}

    @property
    def carried_bytes(self) -> int:
        """Over all ranks."""
        return sum(link.carried_bytes for link in self.links)

    @property
    def busy_ns(self) -> int:
        """Of the busiest rank."""
        return max(link.busy_ns for link in self.links)

    def submit(self, transfer: Transfer) -> None:
        """Every rank's share is submitted to its link."""
        parts = len(transfer.load.slice_ns)
        landed = [0] * parts
        copies: list[Transfer] = []

        def land(part: int) -> None:
            landed[part] += 1
            if landed[part] == len(self.links):
                instants = [copy.landing_ns[part] for copy in copies]
                transfer.landing_ns.append(max(instants))
                self.last_rank = instants.index(max(instants))
                if part + 1 == parts:
                    del self._copies[id(transfer)]
                transfer.on_landed(part)

        for speed in self._speeds:
            copy = Transfer(transfer.submission, _slowed(transfer.load, speed), land)
            copy.available = transfer.available
            copies.append(copy)
        self._copies[id(transfer)] = copies
        for link, copy in zip(self.links, copies, strict=True):
            link.submit(copy)

    def offer(self, transfer: Transfer) -> None:
        """A slice more is available on every rank."""
        copies = self._copies.get(id(transfer))  # none yet if a tier is quicker than the hand-over to the link
        for link, copy in zip(self.links, copies, strict=True) if copies else ():
            copy.available = transfer.available
            link.offer(copy)

    def cancel(self, transfer: Transfer) -> None:
        """No rank carries more of it."""
        transfer.cancelled = True
        copies = self._copies.pop(id(transfer), None)  # gone when it was never submitted, or all of it has crossed
        for link, copy in zip(self.links, copies, strict=True) if copies else ():
            copy.on_landed = lambda _: None
            link.cancel(copy)

    def ahead_ns(self) -> int:
        """Of the rank that has most before it."""
        return max(link.ahead_ns() for link in self.links)

    def forecast_ns(self) -> dict[int, list[int]]:
        """Per sequence number, the latest rank's landing of each slice that has not landed everywhere."""
        latest: dict[int, list[int]] = {}
        for forecast in (link.forecast_ns() for link in self.links):
            for sequence, landings in forecast.items():
                before = latest.get(sequence, [])
                longer, shorter = sorted((before, landings), key=len, reverse=True)
                skipped = len(longer) - len(shorter)  # a rank that is ahead has fewer slices left: its last ones
                merged = longer[:skipped] + [max(pair) for pair in zip(longer[skipped:], shorter, strict=True)]
                latest[sequence] = merged
        return latest


def _slowed(load: Load, speed: Ratio) -> Load:
    if speed.numerator == speed.denominator:
        return load
    slower = tuple(-(-ns * speed.denominator // speed.numerator) for ns in load.slice_ns)
    return load._replace(slice_ns=slower)


class TierReader:
    """A tier below the host pool: slices in order of submission, one at a time, each available after the latency."""

    def __init__(self, clock: Clock, tier: Tier, note: SliceNote | None) -> None:
        self._clock = clock
        self._tier = tier
        self._note = note
        self._queue: deque[tuple[Transfer, int, Callable[[], None]]] = deque()
        self._reading = False
        self._free_ns = 0
        self.busy_ns = 0

    def reading_ns(self, num_bytes: int) -> int:
        """How long the tier is busy with so many bytes."""
        return self._tier.slice_ns(num_bytes)

    def fetch(self, transfer: Transfer, on_slice: Callable[[], None]) -> None:
        """The transfer's slices will be available one by one; `on_slice` is called with each."""
        transfer.available = 0
        self._queue.extend((transfer, part, on_slice) for part in range(len(transfer.load.slice_bytes)))
        if not self._reading:
            self._read()

    def forecast_ns(self, transfer: Transfer) -> dict[int, int]:
        """Per slice that has not been read, when the link may take it; a slice being read counts from its end."""
        instants: dict[int, int] = {}
        free_ns = max(self._free_ns, self._clock.now_ns)
        for waiting, part, _ in self._queue:
            if not waiting.cancelled:
                free_ns += self._tier.slice_ns(waiting.load.slice_bytes[part])
            if waiting is transfer:
                instants[part] = free_ns + self._tier.latency_ns
        return instants

    def _read(self) -> None:
        while self._queue and self._queue[0][0].cancelled:
            self._queue.popleft()
        self._reading = bool(self._queue)
        if not self._queue:
            return
        transfer, part, on_slice = self._queue.popleft()
        now, num_bytes = self._clock.now_ns, transfer.load.slice_bytes[part]
        end = self._free_ns = now + self._tier.slice_ns(num_bytes)
        self.busy_ns += end - now
        if self._note is not None:
            self._note(transfer.submission.sequence, part, now, end, num_bytes)

        def arrive() -> None:
            if not transfer.cancelled:
                transfer.available += 1
                on_slice()

        self._clock.at(end, Phase.HAPPEN, self._read)
        self._clock.at(end + self._tier.latency_ns, Phase.HAPPEN, arrive)


def build_carrier(
    clock: Clock, order: OrderPolicy, hardware: Hardware, is_computing: Callable[[], bool], keep: Keep | None
) -> tuple[Carrier, Link]:
    """The way to the device, and the way back.

    Args:
        clock: gives the instants.
        order: whose slice goes next; the way back is first come, first served.
        hardware: what the way is made of.
        is_computing: whether the engine is in a step.
        keep: called with each occupation; None if nobody keeps them.
    """
    links: list[Carrier] = []
    backs: list[StagedLink] = []
    plain = hardware.plain
    for rank in range(len(hardware.ranks)):
        note = note_of(keep, Station.H2D, rank)
        if hardware.sharing is Sharing.EQUAL:
            links.append(SharedLink(clock, order, note))
        elif plain:
            links.append(Link(clock, order, note))
        else:
            kernels = None
            if hardware.scatter is not None:
                kernels = ScatterKernels(clock, hardware.scatter, is_computing, note_of(keep, Station.SCATTER, rank))
            link = StagedLink(clock, order, hardware.staging, kernels, note)
            links.append(link)
            backs.append(link)
    back: Link
    if hardware.both_busy == FULL_SPEED:
        back = Link(clock, Fifo(), note_of(keep, Station.D2H, 0))
    else:
        back = _couple(clock, backs, hardware.both_busy, note_of(keep, Station.D2H, 0))
    if len(links) == 1 and hardware.ranks[0].numerator == hardware.ranks[0].denominator:
        return links[0], back
    return RankedLinks(links, hardware.ranks), back


def _couple(clock: Clock, forth: Sequence[StagedLink], both: Ratio, note: SliceNote | None) -> StagedLink:
    """The way back, which slows the ways forth while it carries, and is slowed while any of them does."""
    back = StagedLink(clock, Fifo(), None, None, note)
    busy = [0]

    def back_is(begins: bool) -> None:
        for link in forth:
            link.set_speed(both if begins else FULL_SPEED)

    def forth_is(begins: bool) -> None:
        busy[0] += 1 if begins else -1
        back.set_speed(both if busy[0] else FULL_SPEED)

    back.on_busy = back_is
    for link in forth:
        link.on_busy = forth_is
    return back


def note_of(keep: Keep | None, station: Station, rank: int) -> SliceNote | None:
    """Writes a station's occupations down as records; None if nobody keeps them."""
    if keep is None:
        return None

    def note(sequence: int, part: int, begin_ns: int, end_ns: int, num_bytes: int) -> None:
        keep(SliceRecord(station, rank, sequence, part, begin_ns, end_ns, num_bytes))

    return note
