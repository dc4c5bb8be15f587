"""The engine of the world: it polls, releases, forms steps, and stands still where a layer has not landed.

An engine is at any instant in one of four states, and `_look_soon` is the only way out of the last three before their
time::

    step       runs to its end, layer by layer while a released load is landing
    stretch    decodes; cut at the next step boundary when something may be ready
    waiting    has requests and none is ready; looks at every change, or on the grid of its idle poll
    asleep     has no requests; looks when one comes

The rules are those of `lamella.reference.timeline`, with decoding added; here they are carried out event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.release import ReleasePolicy, ReleaseView
from lamella.reference.slices import Slice
from lamella.reference.timeline import Chunk
from lamella.sim.clock import Clock, Phase
from lamella.sim.records import StepRecord, Suffered
from lamella.sim.scheduler import EngineSettings, Job, Scheduler, SubmitAt
from lamella.sim.stations import ComputeModel, Link, Transfer
from lamella.sim.steps import DecodeStretch, RunningStep, split_evenly


class Engine:
    """Runs admitted jobs to their end.

    Args:
        clock: gives the instants.
        link: carries the jobs' loads.
        compute: how long layers take.
        release: when a job may run.
        settings: how steps form.
        on_done: called with each job when its last token is there.
        on_step: called with each step or stretch when it ends; None if nobody keeps them.
        fast_forward: False runs every decode step as an event of its own.
    """

    def __init__(
        self,
        clock: Clock,
        link: Link,
        compute: ComputeModel,
        release: ReleasePolicy,
        settings: EngineSettings,
        on_done: Callable[[Job], object],
        on_step: Callable[[StepRecord], object] | None,
        *,
        fast_forward: bool,
    ) -> None:
        self._clock = clock
        self._link = link
        self._compute = compute
        self._release = release
        self._settings = settings
        self._on_done = on_done
        self._on_step = on_step
        self._fast_forward = fast_forward
        self.busy_ns = 0
        """Time in steps, stalls included."""
        self.stall_ns = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed, those of the present step included."""
        self._scheduler = Scheduler(settings)
        self._unsubmitted: list[Job] = []
        self._due: list[Job] = []  # so many layers landed that a policy without forecast releases at the next poll
        self._step: RunningStep | None = None
        self._stretch: DecodeStretch | None = None
        self._looked_ns: int | None = None  # last poll of an engine that is waiting; None in the other states
        self._poll_scheduled = False
        self._timer = 0  # only the latest armed timer counts

    def admit(self, job: Job) -> None:
        """The job is in the engine's queue from now on."""
        self._scheduler.waiting[job.sequence] = job
        if not job.request.load.slice_layers:
            self._due.append(job)
            self._look_soon()
        elif self._settings.submit_at is SubmitAt.POLL:
            self._unsubmitted.append(job)
            self._look_soon()
        else:
            self._submit(job)
            if self._stretch is None or self._release.weighs_steps:
                self._look_soon()
            else:
                self._arm_timer(0)

    def _submit(self, job: Job) -> None:
        load = job.request.load
        ends = list(accumulate(load.slice_layers))
        slices = [Slice(end - width, width) for end, width in zip(ends, load.slice_layers, strict=True)]
        needed = self._release.layers_needed(self._compute.num_layers)
        job.gate = LayerArrivalGate(slices, release_after_layers=needed)
        job.submitted_ns = job.ready_ns = self._clock.now_ns
        job.transfer = Transfer(job.submission(job.submitted_ns), load, lambda part: self._land(job, part))
        self._link.submit(job.transfer)

    # ---------------------------------------------------------------- slices land

    def _land(self, job: Job, part: int) -> None:
        gate = job.gate
        assert gate is not None, "only a submitted load lands"
        now = self._clock.now_ns
        gate.record(part, now, generation=gate.generation)
        gate.mark_landed(part, generation=gate.generation)
        if part == 0:
            job.first_layer_ns = now
        if gate.all_landed:
            job.all_landed_ns = now
        if job.released_ns >= 0:
            if self._step is not None and self._step.blocked:
                self._advance_layers()
            if gate.all_landed:
                self._scheduler.landing.pop(job.sequence, None)
        elif gate.released and not job.due and not self._release.needs_forecast:
            job.due = True
            job.ready_ns = now
            self._due.append(job)
            self._look_soon()

    # ---------------------------------------------------------------- the engine looks

    def _look_soon(self) -> None:
        """Something may be ready: the engine polls as soon as its rule lets it."""
        if self._stretch is not None:
            self._cut_stretch()
        elif self._step is None:
            now, poll = self._clock.now_ns, self._settings.idle_poll_ns
            if self._looked_ns is not None and poll:
                now = self._looked_ns + max(1, -(-(now - self._looked_ns) // poll)) * poll
            self._poll_at(now, poll)

    def _poll_at(self, instant_ns: int, away_ns: int) -> None:
        if not self._poll_scheduled:
            self._poll_scheduled = True
            self._clock.at(instant_ns, Phase.FORM, lambda: self._poll(away_ns))

    def _poll(self, away_ns: int) -> None:
        """Submits, releases, and forms a step of what is ready; without any, the engine is idle."""
        self._poll_scheduled = False
        self._looked_ns = None
        for job in self._unsubmitted:
            self._submit(job)
        self._unsubmitted.clear()
        now = self._clock.now_ns
        for job in self._due:
            self._scheduler.release(job, now)
        self._due.clear()
        if self._release.needs_forecast:
            for job, instant in self._release_instants(away_ns):
                if instant <= now:
                    job.ready_ns = now
                    self._scheduler.release(job, now)
        taken = self._scheduler.fill_step()
        if taken or (self._scheduler.decode_batch and self._scheduler.landing):
            self._begin_step(taken)
        elif self._scheduler.decode_batch:
            self._begin_stretch()
        else:
            self._looked_ns = now if self._scheduler.waiting else None
            self._arm_timer(self._settings.idle_poll_ns)

    def _release_instants(self, away_ns: int) -> list[tuple[Job, int]]:
        """When each waiting request that is on the link may be released, by the forecast of now."""
        forecast = self._link.forecast_ns()
        instants: list[tuple[Job, int]] = []
        for job in self._scheduler.waiting.values():
            if job.transfer is None:
                continue
            landings = job.transfer.landing_ns + forecast.get(job.sequence, [])
            tokens = self._scheduler.first_chunk_tokens(job)
            view = ReleaseView(
                now_ns=self._clock.now_ns,
                arrival_ns=tuple(
                    landing
                    for landing, layers in zip(landings, job.request.load.slice_layers, strict=True)
                    for _ in range(layers)
                ),
                layer_compute_ns=tuple(self._compute.step_layers_ns([(job.request.cached_tokens, tokens)], 0, 0)),
                start_delay_ns=self._settings.start_delay_ns,
                step_ns=away_ns,
                victims=self._scheduler.decode_batch,
                hurt=self._hurt(),
            )
            instants.append((job, self._release.release_ns(view)))
        return instants

    def _hurt(self) -> float | None:
        """What a stall costs others, as release decisions are told."""
        return None

    def _arm_timer(self, away_ns: int) -> None:
        """An idle or decoding engine will look at the next release instant that the forecast holds."""
        if not self._release.needs_forecast:
            return
        instants = [instant for _, instant in self._release_instants(away_ns)]
        self._timer += 1
        if instants:
            timer = self._timer
            self._clock.at(max(self._clock.now_ns, min(instants)), Phase.HAPPEN, lambda: self._ring(timer))

    def _ring(self, timer: int) -> None:
        if timer == self._timer:
            self._look_soon()

    # ---------------------------------------------------------------- a step runs

    def _begin_step(self, taken: list[tuple[Job, Chunk]]) -> None:
        now, scheduler = self._clock.now_ns, self._scheduler
        start = now + self._settings.start_delay_ns
        for job, chunk in taken:
            self.prefilled_tokens += chunk.num_tokens
            job.prefill_steps += 1
            if chunk.first_token == 0:
                job.started_ns = start
                if job.first_started_ns < 0:
                    job.first_started_ns = start
                job.stall_before_start_ns = self.stall_ns
                job.caused_before_start_ns = job.caused_ns
        if taken:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in taken]
            costs = self._compute.step_layers_ns(prefills, scheduler.decode_batch, scheduler.context_tokens)
        else:
            whole = self._compute.decode_ns(scheduler.decode_batch, scheduler.context_tokens, 1)
            costs = split_evenly(whole, self._compute.num_layers)
        self._step = RunningStep(now, start, taken, costs, scheduler.decode_batch, list(scheduler.landing.values()))
        self._clock.at(start, Phase.HAPPEN, self._advance_layers)

    def _advance_layers(self) -> None:
        """The step has reached a layer: runs all layers that have landed, or blocks until the next one does."""
        step = self._step
        assert step is not None, "layers advance only in a step"
        now = self._clock.now_ns
        landing = self._scheduler.landing.values()
        num_layers = len(step.costs)
        ready = min((job.gate.landed_layers for job in landing if job.gate is not None), default=num_layers)
        if ready <= step.layer < num_layers:
            if not step.blocked:
                step.blocked = True
                step.reached_ns = now
            return
        if step.blocked:
            step.blocked = False
            self._charge_stall(step, now - step.reached_ns)
        begun, step.layer = step.layer, ready
        end = now + sum(step.costs[begun:ready])
        self._clock.at(end, Phase.HAPPEN, self._end_step if ready == num_layers else self._advance_layers)

    def _charge_stall(self, step: RunningStep, stall_ns: int) -> None:
        """Notes who kept the step waiting at its present layer: the load whose slice landed last."""
        if stall_ns == 0:
            return

        def landed_ns(job: Job) -> int:
            assert job.gate is not None, "only loads land"
            return job.gate.event_for(step.layer)

        culprit = max(step.loads, key=lambda job: (landed_ns(job), -job.sequence))
        if culprit.layer_stall_ns is None:
            culprit.layer_stall_ns = [0] * len(step.costs)
        culprit.layer_stall_ns[step.layer] += stall_ns
        culprit.caused_ns += stall_ns
        self.stall_ns += stall_ns
        step.stalls[step.layer] = (stall_ns, culprit.sequence)
        suffered = Suffered(step.layer, culprit.sequence, stall_ns)
        for job, _ in step.taken:
            if job.suffered is None:
                job.suffered = []
            job.suffered.append(suffered)

    def _end_step(self) -> None:
        step, now = self._step, self._clock.now_ns
        assert step is not None, "only a step that began can end"
        self._step = None
        self.busy_ns += now - step.polled_ns
        if self._on_step is not None:
            stalls = [step.stalls.get(layer, (0, None)) for layer in range(len(step.costs))]
            layer_stall_ns, culprits = zip(*stalls, strict=True)
            chunks = tuple(chunk for _, chunk in step.taken)
            self._on_step(
                StepRecord(
                    step.polled_ns,
                    step.start_ns,
                    now,
                    chunks,
                    layer_stall_ns,
                    culprits,
                    step.decode_batch,
                    1,
                    len(self._scheduler.waiting),
                    0,
                    (),
                )
            )
        done = self._scheduler.advance_decoding(1) if step.decode_batch else []
        for job, chunk in step.taken:
            if chunk.first_token + chunk.num_tokens == job.request.new_tokens:
                job.first_token_ns = now
                job.prefill_stall_ns = self.stall_ns - job.stall_before_start_ns
                if job.request.output_tokens == 1:
                    done.append(job)
                else:
                    self._scheduler.begin_decoding(job)
        self._finish(done)
        self._poll_at(now, now - step.polled_ns)

    # ---------------------------------------------------------------- only decoding happens

    def _begin_stretch(self) -> None:
        scheduler = self._scheduler
        # A policy that weighs the last step's length is asked at every poll while it has something to decide.
        asked = self._release.weighs_steps and any(job.transfer for job in scheduler.waiting.values())
        planned = scheduler.steps_to_next_end if self._fast_forward and not asked else 1
        stretch = DecodeStretch(
            self._compute,
            self._clock.now_ns,
            self._settings.start_delay_ns,
            scheduler.decode_batch,
            scheduler.context_tokens,
            planned,
        )
        self._stretch = stretch
        self._schedule_stretch_end(stretch)
        self._arm_timer(0)

    def _schedule_stretch_end(self, stretch: DecodeStretch) -> None:
        planned = stretch.num_steps
        self._clock.at(stretch.boundary_ns(planned), Phase.HAPPEN, lambda: self._end_stretch(stretch, planned))

    def _cut_stretch(self) -> None:
        """The engine looks at the next step boundary: no later step of the stretch will have run by then."""
        stretch = self._stretch
        assert stretch is not None, "only a running stretch can be cut"
        boundary = stretch.next_boundary(self._clock.now_ns)
        if boundary < stretch.num_steps:
            stretch.num_steps = boundary
            self._schedule_stretch_end(stretch)

    def _end_stretch(self, stretch: DecodeStretch, planned: int) -> None:
        if self._stretch is not stretch or planned != stretch.num_steps:
            return  # the stretch was cut after this end had been scheduled
        now = self._clock.now_ns
        self._stretch = None
        self.busy_ns += now - stretch.start_ns
        if self._on_step is not None:
            waiting = len(self._scheduler.waiting)
            start = stretch.start_ns
            self._on_step(StepRecord(start, start, now, (), (), (), stretch.batch, planned, waiting, 0, ()))
        self._finish(self._scheduler.advance_decoding(planned))
        self._poll_at(now, now - stretch.boundary_ns(planned - 1))

    def _finish(self, done: Sequence[Job]) -> None:
        for job in done:
            self._on_done(job)
