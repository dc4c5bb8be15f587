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

from bisect import insort
from operator import attrgetter

from lamella.reference.release import ReleaseView, StallPrice
from lamella.reference.timeline import NOTHING_TO_LOAD
from lamella.sim.clock import Phase
from lamella.sim.records import Ending
from lamella.sim.requests import Job
from lamella.sim.settings import ARRIVAL_LAG_POLLS, LOAD_LAG_POLLS, OnLoadFailure, SubmitAt
from lamella.sim.step_runner import StepRunner


class Engine(StepRunner):
    """Runs admitted jobs to their end; arguments as for `StepRunner`."""

    # ---------------------------------------------------------------- jobs come

    def occupy(self, duration_ns: int) -> int:
        """The engine's thread is busy so long with something else, and polls afterwards; returns when that is."""
        self._occupied_ns = max(self._occupied_ns, self._clock.now_ns) + duration_ns
        if self._stretch is not None:
            self._look_soon()
        return self._occupied_ns

    def admit(self, job: Job) -> None:
        """The job is in the engine's queue from now on."""
        self._scheduler.waiting[job.sequence] = job
        if not job.request.load.slice_layers:
            self._due.append(job)
            self._look_soon()
        elif self._settings.submit_at is not SubmitAt.ARRIVAL or self._scheduler.blocks is not None:
            self._unsubmitted.append(job)  # blocks are given out at polls
            self._look_soon()
        else:
            self._submit(job)
            self._look_after_submission()

    def _look_after_submission(self) -> None:
        if self._stretch is None or self._release.weighs_steps or self._copies_ahead() or self._due:
            self._look_soon()
        else:
            self._arm_timer(0)

    def _submit(self, job: Job) -> None:
        now = self._clock.now_ns
        if job.first_started_ns < 0:
            job.submitted_ns = job.ready_ns = now
        self._loads.submit(job, lambda part: self._land(job, part))
        timeout = self._settings.load_timeout_ns
        if timeout is not None:
            transfer = job.transfer
            self._clock.at(now + timeout, Phase.HAPPEN, lambda: self._time_out(job, transfer))

    def _submit_waiting(self) -> None:
        """What waits to be submitted is, as far as there are blocks; each submission keeps the engine's thread busy."""
        scheduler, settings = self._scheduler, self._settings
        submitted = 0
        for job in self._unsubmitted:
            if not scheduler.may_hold(job):
                break
            submitted += 1
            if settings.submit_at is SubmitAt.AFTER_FORWARD:
                self._behind.append(job)
            else:
                self._submit(job)
        del self._unsubmitted[:submitted]
        scheduler.queued_before = self._unsubmitted[0].sequence if self._unsubmitted else None
        self._delay_ns += submitted * settings.submit_ns

    def _submit_behind(self) -> None:
        jobs, self._behind, self._behind_ns = self._behind, [], None
        for job in jobs:
            self._submit(job)
        if jobs:
            self._look_after_submission()

    # ---------------------------------------------------------------- slices land, or do not

    def _land(self, job: Job, part: int) -> None:
        gate = job.gate
        if gate is None:
            return  # the load has failed; what was under way still crossed
        now = self._clock.now_ns
        layers = gate.land(part, now)
        all_landed = layers == gate.num_layers
        if part == 0 and job.first_started_ns < 0:
            job.first_layer_ns = now
        if all_landed and (job.first_started_ns < 0 or job.all_landed_ns <= job.first_started_ns):
            job.all_landed_ns = now
            job.rank = self._loads.last_rank(job)
        if job.released:
            if self._step is not None and self._step.blocked:
                if self._settings.wake_ns:
                    self._clock.at(now + self._settings.wake_ns, Phase.HAPPEN, self._wake)
                else:
                    self._advance_layers()
            if all_landed:
                self._scheduler.landing.pop(job.sequence, None)
        elif not job.due and not self._release.needs_forecast and gate.released:
            job.due = True
            if job.first_started_ns < 0:
                job.ready_ns = now
            self._due.append(job)
            self._look_soon()

    def _wake(self) -> None:
        if self._step is not None and self._step.blocked:
            self._advance_layers()

    def _time_out(self, job: Job, transfer: object) -> None:
        if job.transfer is transfer and not job.landed:
            assert job.gate is not None, "only a load that is on its way can be late"
            bound = self._settings.load_timeout_ns
            self._fail(job, f"slice {job.gate.landed} had not landed {bound} ns after submission")

    def _fail(self, job: Job, failure: str) -> None:
        """The job's load has failed: it computes what should have come, or ends."""
        job.failure = failure
        in_step = self._step is not None and any(member is job for member, _ in self._step.taken)
        waits = not job.released and job not in self._due
        self._loads.cancel(job)
        self._scheduler.landing.pop(job.sequence, None)
        if self._settings.on_failure is OnLoadFailure.RECOMPUTE:
            request = job.request
            lost = request.cached_tokens - request.resident_tokens
            job.request = request._replace(
                cached_tokens=request.resident_tokens, new_tokens=request.new_tokens + lost, load=NOTHING_TO_LOAD
            )
            self.prefilled_tokens -= lost  # they were not counted as arrived
            if waits:
                self._due.append(job)
        else:
            job.ending = Ending.FAILED
        job.thrown_back = in_step
        if job.ending is Ending.FAILED and not in_step:
            if self._step is None:
                self._drop(job)
            else:
                self._dropped.append(job)  # it may still be charged with what the step stood
        if self._step is not None and self._step.blocked:
            self._advance_layers()
        self._look_soon()

    def _drop(self, job: Job) -> None:
        if job in self._due:
            self._due.remove(job)
        self._scheduler.drop(job)
        self._on_done(job)

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

    def _poll_soon(self, away_ns: int) -> None:
        """A step has ended: the engine polls in this instant, as the last thing that the step's end does."""
        if not self._poll_scheduled:
            self._poll_scheduled = True
            self._clock.soon(Phase.FORM, lambda: self._poll(away_ns))

    def _poll(self, away_ns: int) -> None:
        """Submits, releases, and forms a step of what is ready; without any, the engine is idle."""
        scheduler = self._scheduler
        self._poll_scheduled = False
        if self._clock.now_ns < self._occupied_ns:
            self._poll_at(self._occupied_ns, away_ns)
            return
        self._looked_ns = None
        busy, self._step_ended = self._step_ended and self._settings.steps_ahead, False
        now = self._clock.now_ns
        self._delay_ns = self._settings.start_delay_ns
        self._ahead_ns = now - self._before_ns if busy else 0
        self._prompt_delay_ns = 0
        if self._loads.delay_inputs():
            self._queue_inputs(now, busy)
        if scheduler.blocks is not None:
            self._preempt()
        if self._unsubmitted:
            self._submit_waiting()
        if self._due:
            self._release_due(now, busy)
        if self._release.needs_forecast:
            for job, instant in self._release_instants(away_ns):
                if instant <= now:
                    if job.first_started_ns < 0:
                        job.ready_ns = now
                    if busy:
                        job.due, job.polls = True, 1
                        self._due.append(job)
                    else:
                        scheduler.release(job, now)
        taken = scheduler.fill_step()
        if taken or (scheduler.decode_batch and scheduler.landing):
            self._begin_step(taken)
        elif scheduler.decode_batch:
            self._begin_stretch()
        else:
            self._looked_ns = now if scheduler.waiting else None
            self._submit_behind()
            if self._due:  # seen, by an engine that was busy until now: an idle one lets it join at its next look
                self._poll_at(now + self._settings.idle_poll_ns, self._settings.idle_poll_ns)
            self._arm_timer(self._settings.idle_poll_ns)

    def _queue_inputs(self, now: int, busy: bool) -> None:
        """A joining prompt is copied behind the loads of earlier polls, and before those of this one.

        An engine that schedules ahead copies it a step earlier, while the one before it runs.
        """
        there_ns = now + self._loads.inputs_wait_ns()
        self._prompt_delay_ns = max(0, (self._inputs_ns if busy else there_ns) - now)
        self._inputs_ns = there_ns

    def _release_due(self, now: int, busy: bool) -> None:
        """What is due joins the queue; of an engine that schedules ahead and is busy, some polls later."""
        if not busy:
            for job in self._due:
                self._scheduler.release(job, now)
            self._due.clear()
            return
        kept: list[Job] = []
        for job in self._due:
            lag = ARRIVAL_LAG_POLLS if job.gate is None else LOAD_LAG_POLLS
            if job.polls >= lag:
                self._scheduler.release(job, now)
                continue
            if job.polls == 0 and job.gate is not None:
                job.polls = int(job.ready_ns <= self._before_ns + self._settings.launch_ns)
            job.polls += 1
            if job.polls == lag and not job.landed:
                job.released = True  # reported: from here on every step waits for its layers (REL-2)
                self._scheduler.landing[job.sequence] = job
            kept.append(job)
        self._due = kept

    def _preempt(self) -> None:
        """Blocks for one more token each: the youngest lose theirs, and queue again with what they had generated."""
        lost = self._scheduler.preempt_for_decoding()
        self._preempted = tuple(job.sequence for job, _ in lost)
        for job, again in lost:
            self.prefilled_tokens -= again
            job.due = False
            job.polls = 0
            if job.request.load.slice_layers:
                job.transfer = job.gate = None
                insort(self._unsubmitted, job, key=attrgetter("sequence"))
            else:
                self._due.append(job)

    def _release_instants(self, away_ns: int) -> list[tuple[Job, int]]:
        """When each waiting request that is on its way may be released, by the forecast of now."""
        coming = [job for job in self._scheduler.waiting.values() if job.transfer is not None and not job.due]
        instants: list[tuple[Job, int]] = []
        for job, landings in self._loads.forecast(coming) if coming else ():
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
                stall=self._stall_price(job),
            )
            instants.append((job, self._release.release_ns(view)))
        return instants

    def _stall_price(self, job: Job) -> StallPrice | None:
        """What a stall for the job costs others, as its release decision is told."""
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
