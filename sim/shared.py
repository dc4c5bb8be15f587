"""A link that all loads share equally: the other discipline, and the worst of them for layers that are waited for."""

from __future__ import annotations

from itertools import accumulate

from lamella.reference.ordering import OrderPolicy, slice_keys
from lamella.sim.clock import Clock, Phase
from lamella.sim.stations import SliceNote, Transfer


class SharedLink:
    """A link on which every load moves at once, each with an equal share; a load's own slices follow one another.

    Time is counted in service: each of n loads receives dt / n in dt. A slice lands when its load has received its wire
    time, rounded up to the ns.

    Source: processor sharing in virtual time, as in Demers, Keshav, Shenker, "Analysis and Simulation of a Fair
    Queueing Algorithm" (1989).
    """

    _PARTS = 1 << 20  # of a ns of service: what n loads lose in rounding stays below a ns for a million events

    def __init__(self, clock: Clock, order: OrderPolicy, note: SliceNote | None = None) -> None:
        self._clock = clock
        self._order = order
        self._note = note
        self._moving: list[tuple[int, int, Transfer]] = []  # (service at which its slice lands, sequence, transfer)
        self._service = 0
        self._since_ns = 0
        self._ticket = 0
        self._began: dict[int, int] = {}
        self.carried_bytes = 0
        self.busy_ns = 0

    def submit(self, transfer: Transfer) -> None:
        """The transfer shares the link from now on."""
        transfer.keys = slice_keys(self._order, transfer.submission)
        if transfer.keys and transfer.available:
            self._join(transfer)

    def offer(self, transfer: Transfer) -> None:
        """A slice more is available than before; the transfer shares again if it lacked one."""
        waits = transfer.keys and transfer.begun == transfer.available - 1 and not transfer.cancelled
        if waits and not any(one is transfer for _, _, one in self._moving):
            self._join(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """The transfer takes no share any more, the slice under way included."""
        self._advance()
        transfer.cancelled = True
        self._moving = [entry for entry in self._moving if entry[2] is not transfer]
        self._schedule()

    def ahead_ns(self) -> int:
        """Wire time of all that is submitted and has not crossed."""
        service = self._served()
        left = sum(max(0, end - service) for end, _, _ in self._moving) // self._PARTS
        return left + sum(sum(one.load.slice_ns[one.begun :]) for _, _, one in self._moving)

    def forecast_ns(self) -> dict[int, list[int]]:
        """Per sequence number, when the slices that have not landed will, if nothing else is submitted."""
        ends: list[tuple[int, int, bool]] = []
        for end, sequence, transfer in self._moving:
            rest = [end, *(ns * self._PARTS for ns in transfer.load.slice_ns[transfer.begun : transfer.available])]
            marks = list(accumulate(rest))
            ends += [(mark, sequence, mark == marks[-1]) for mark in marks]
        landings: dict[int, list[int]] = {}
        moving, service, instant = len(self._moving), self._served(), self._clock.now_ns * self._PARTS
        for mark, sequence, leaves in sorted(ends):
            instant += max(0, mark - service) * moving
            service = max(service, mark)
            landings.setdefault(sequence, []).append(-(-instant // self._PARTS))
            moving -= leaves
        return landings

    def _join(self, transfer: Transfer) -> None:
        self._advance()
        self._begin(transfer, self._service)
        self._schedule()

    def _begin(self, transfer: Transfer, service: int) -> None:
        part = transfer.begin()
        self._began[transfer.submission.sequence] = self._clock.now_ns
        end = service + transfer.load.slice_ns[part] * self._PARTS
        self._moving.append((end, transfer.submission.sequence, transfer))

    def _served(self) -> int:
        """The service of now. Asking rounds nothing: the world is the same however often one asks."""
        since_ns = self._clock.now_ns - self._since_ns
        return self._service + (since_ns * self._PARTS // len(self._moving) if self._moving else 0)

    def _advance(self) -> None:
        now, self._service = self._clock.now_ns, self._served()
        if self._moving:
            self.busy_ns += now - self._since_ns
        self._since_ns = now

    def _schedule(self) -> None:
        self._ticket += 1
        if self._moving:
            ticket = self._ticket
            left = max(0, min(self._moving)[0] - self._service)
            delay_ns = -(-left * len(self._moving) // self._PARTS)
            self._clock.at(self._clock.now_ns + delay_ns, Phase.HAPPEN, lambda: self._land(ticket))

    def _land(self, ticket: int) -> None:
        if ticket != self._ticket:
            return  # somebody joined or left after this landing had been scheduled
        self._advance()
        now = self._clock.now_ns
        landed = sorted(entry for entry in self._moving if entry[0] <= self._service)
        self._moving = [entry for entry in self._moving if entry[0] > self._service]
        for end, sequence, transfer in landed:
            part = transfer.begun - 1
            self.carried_bytes += transfer.load.slice_bytes[part]
            if self._note is not None:
                self._note(sequence, part, self._began[sequence], now, transfer.load.slice_bytes[part])
            if transfer.begun < transfer.available and not transfer.cancelled:
                self._begin(transfer, end)
        self._schedule()
        for _, _, transfer in landed:
            transfer.landing_ns.append(now)
            transfer.on_landed(len(transfer.landing_ns) - 1)
