"""Loads between the engine and the carrier: submission, tiers before it, faults, time-outs, and what is forecast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.ordering import Submission
from lamella.reference.release import ReleasePolicy
from lamella.reference.slices import Slice
from lamella.sim.clock import Clock, Phase
from lamella.sim.hardware import Fault, Hardware
from lamella.sim.paths import RankedLinks, TierReader
from lamella.sim.requests import Job
from lamella.sim.stations import Carrier, Link, Transfer

OnLanded = Callable[[int], None]


class Loads:
    """Puts jobs' loads on their way.

    Args:
        clock: gives the instants.
        carrier: to the device.
        back: from the device, for stores.
        tiers: below the host pool, by name.
        hardware: what else the way has.
        release: how many layers a gate waits for.
        num_layers: of the model.
    """

    def __init__(
        self,
        clock: Clock,
        carrier: Carrier,
        back: Link,
        tiers: dict[str, TierReader],
        hardware: Hardware,
        release: ReleasePolicy,
        num_layers: int,
    ) -> None:
        self._clock = clock
        self._carrier = carrier
        self._back = back
        self._tiers = tiers
        self._first_slice_ns = hardware.first_slice_ns
        self._layers_needed = release.layers_needed(num_layers)
        self._gates: dict[tuple[int, ...], list[Slice]] = {}  # by slice widths; a replay has a few
        self._held: dict[Transfer, int] = {}  # started, and when each may begin

    def submit(self, job: Job, on_landed: OnLanded) -> None:
        """The job's load is on its way; `on_landed(part)` is called with each slice, in order."""
        self.prepare(job, on_landed)
        self.start(job)

    def prepare(self, job: Job, on_landed: OnLanded) -> None:
        """The job has a gate and a transfer, which `start` puts on its way."""
        load, now = job.request.load, self._clock.now_ns
        slices = self._gates.get(load.slice_layers)
        if slices is None:
            ends = accumulate(load.slice_layers)
            slices = [Slice(end - width, width) for end, width in zip(ends, load.slice_layers, strict=True)]
            self._gates[load.slice_layers] = slices
        job.gate = LayerArrivalGate(slices, release_after_layers=self._layers_needed)
        fault = job.request.fault
        if fault is not None:
            on_landed = _FaultyLanding(self._clock, fault, on_landed).land
            job.request = job.request._replace(fault=None)  # a load that is sent again after a preemption is sound
        job.transfer = Transfer(job.submission(now), load, on_landed)

    def start(self, job: Job, device_ns: int = 0) -> None:
        """What was prepared is on its way.

        Args:
            job: whose.
            device_ns: until then the device computes what it was given before; nothing is written sooner (XFER-3).
        """
        transfer, now = job.transfer, self._clock.now_ns
        assert transfer is not None, "only a load that was prepared can start"
        if job.request.tier:
            reader = self._tiers[job.request.tier]
            reader.fetch(transfer, partial(self._carrier.offer, transfer))
        transfer.started_ns = now if device_ns <= now else None
        begins_ns = max(now + self._first_slice_ns, device_ns)
        if begins_ns > now:
            self._held[transfer] = begins_ns
            self._clock.at(begins_ns, Phase.HAPPEN, lambda: self._put(transfer))
        else:
            self._carrier.submit(transfer)

    def _put(self, transfer: Transfer) -> None:
        del self._held[transfer]
        if not transfer.cancelled:
            self._carrier.submit(transfer)

    def reading_ns(self, job: Job) -> int:
        """How long the tier that the job's load comes from is busy with it; 0 if it comes from the host pool."""
        reader = self._tiers.get(job.request.tier)
        return reader.reading_ns(sum(job.request.load.slice_bytes)) if reader is not None else 0

    def cancel(self, job: Job) -> None:
        """What has not begun of the job's load is not carried any more."""
        if job.transfer is not None:
            self._carrier.cancel(job.transfer)
        job.transfer = job.gate = None

    def store(self, job: Job, on_stored: Callable[[], None]) -> None:
        """The job's store goes the other way; `on_stored` is called when all of it has left the device."""
        load = job.request.store

        def left(part: int) -> None:
            if part + 1 == len(load.slice_ns):
                on_stored()

        submission = Submission(job.sequence, self._clock.now_ns, load.slice_bytes)
        self._back.submit(Transfer(submission, load, left))

    def inputs_wait_ns(self, behind_ns: int | None) -> int:
        """How long the prompt of a request that joins now waits behind what the link has to carry.

        Args:
            behind_ns: at most so much wire time of loads; None: until the load that ends next has ended.
        """
        if behind_ns is not None:
            return min(self._carrier.ahead_ns(), behind_ns) if behind_ns else 0
        ends = [landings[-1] for landings in self._carrier.forecast_ns().values()]
        return min(ends) - self._clock.now_ns if ends else 0

    @property
    def ahead_ns(self) -> int:
        """Until the link has carried all that was started, if nothing else is."""
        now = self._clock.now_ns
        end_ns = now + self._carrier.ahead_ns()
        for transfer, begins_ns in self._held.items():
            if not transfer.cancelled:
                end_ns = max(end_ns, begins_ns) + sum(transfer.load.slice_ns)
        return end_ns - now

    def last_rank(self, job: Job) -> int:
        """Which rank brought the last slice last."""
        carrier = self._carrier
        return carrier.last_rank if isinstance(carrier, RankedLinks) and job.gate is not None else 0

    def forecast(self, jobs: list[Job]) -> list[tuple[Job, list[int]]]:
        """Per job on its way, when each slice landed or will, if nothing else is submitted.

        What a tier has still to bring, and what has not reached the link, is taken to follow without anybody between.
        """
        forecast = self._carrier.forecast_ns()
        found: list[tuple[Job, list[int]]] = []
        for job in jobs:
            transfer = job.transfer
            if transfer is None:
                continue
            landings = transfer.landing_ns + forecast.get(job.sequence, [])
            missing = len(transfer.load.slice_ns) - len(landings)
            if missing:
                reader = self._tiers.get(job.request.tier)
                instant = landings[-1] if landings else max(self._clock.now_ns, job.submitted_ns + self._first_slice_ns)
                brought = reader.forecast_ns(transfer) if reader is not None else {}
                for part in range(len(landings), len(transfer.load.slice_ns)):
                    instant = max(instant, brought.get(part, 0)) + transfer.load.slice_ns[part]
                    landings.append(instant)
            found.append((job, landings))
        return found


class _FaultyLanding:
    """Lands a load's slices, one of them late or never; those behind it wait for it, since a count only rises."""

    def __init__(self, clock: Clock, fault: Fault, on_landed: OnLanded) -> None:
        self._clock = clock
        self._fault = fault
        self._on_landed = on_landed
        self._held: list[int] = []
        self._sound = False

    def land(self, part: int) -> None:
        if part < self._fault.part or self._sound:
            self._on_landed(part)
            return
        self._held.append(part)
        if part == self._fault.part and self._fault.late_ns is not None:
            self._clock.at(self._clock.now_ns + self._fault.late_ns, Phase.HAPPEN, self._recover)

    def _recover(self) -> None:
        self._sound = True
        for part in self._held:
            self._on_landed(part)
