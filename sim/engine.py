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
from lamella.reference.slices import by_layer
from lamella.reference.timeline import NOTHING_TO_LOAD
from lamella.sim.clock import Phase
from lamella.sim.records import Ending
from lamella.sim.requests import Job
from lamella.sim.settings import OnLoadFailure, SubmitAt
from lamella.sim.step_runner import StepRunner
from lamella.sim.steps import RunningStep


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
        if self._stretch is None or self._release.weighs_steps or self._due:
            self._look_soon()
        else:
            self._arm_timer(0)

    def _submit(self, job: Job) -> None:
        now = self._clock.now_ns
        if job.first_started_ns < 0:
            job.submitted_ns = job.ready_ns = now
        self._loads.submit(job, lambda part: self._land(job, part))
        self._scheduler.loading[job.sequence] = job
        timeout = self._settings.load_timeout_ns
        if timeout is not None:
            transfer = job.transfer
            self._clock.at(now + timeout, Phase.HAPPEN, lambda: self._time_out(job, transfer))

    def _join(self, job: Job) -> None:
        """The job, whose load is on its way, joins the next step; its layers are waited for there."""
        self._due.append(job)

    def _step_took(self, step: RunningStep, took_ns: int) -> None:
        pass  # only an engine that learns from it keeps it

    def _engine_wait_ns(self) -> int:
        """How long the steps under way still compute, in an engine that schedules the next one meanwhile."""
        return 0

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
        if part == 0 and not job.preemptions:  # with a start delay it may land between the release and the start
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
        for jobs in (self._scheduler.loading, self._scheduler.landing):
            jobs.pop(job.sequence, None)
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
        self._step_ended = False
        now = self._clock.now_ns
        self._delay_ns = self._settings.start_delay_ns
        if scheduler.blocks is not None:
            self._preempt()
        if self._unsubmitted:
            self._submit_waiting()
        for job in self._due:
            scheduler.release(job, now)
        self._due.clear()
        if self._release.needs_forecast:
            for job, instant in self._release_instants(away_ns):
                if instant <= now:
                    if job.first_started_ns < 0:
                        job.ready_ns = now
                    scheduler.release(job, now)
        taken = scheduler.fill_step()
        if taken or (scheduler.decode_batch and scheduler.landing):
            self._begin_step(taken)
        elif scheduler.decode_batch:
            self._begin_stretch()
        else:
            self._looked_ns = now if scheduler.waiting else None
            self._submit_behind()
            self._arm_timer(self._settings.idle_poll_ns)

    def _preempt(self) -> None:
        """Blocks for one more token each: the youngest lose theirs, and queue again with what they had generated."""
        lost = self._scheduler.preempt_for_decoding()
        self._preempted = tuple(job.sequence for job, _ in lost)
        for job, again in lost:
            self.prefilled_tokens -= again
            job.due = False
            if job.request.load.slice_layers:
                job.transfer = job.gate = None
                insort(self._unsubmitted, job, key=attrgetter("sequence"))
            else:
                self._due.append(job)

    def _release_instants(self, away_ns: int) -> list[tuple[Job, int]]:
        """When each waiting request that is on its way may be released, by the forecast of now."""
        coming = [job for job in self._scheduler.loading.values() if not job.due]
        instants: list[tuple[Job, int]] = []
        price = self._stall_price() if coming else None
        for job, landings in self._loads.forecast(coming) if coming else ():
            tokens = self._scheduler.first_chunk_tokens(job)
            view = ReleaseView(
                now_ns=self._clock.now_ns,
                arrival_ns=by_layer(landings, job.request.load.slice_layers),
                layer_compute_ns=self._forecast_layers_ns(job, tokens),
                start_delay_ns=self._settings.start_delay_ns,
                step_ns=away_ns,
                victims=self._scheduler.decode_batch,
                stall=price and self._stall_price_of(job, price),
            )
            instants.append((job, self._release.release_ns(view)))
        return instants

    def _forecast_layers_ns(self, job: Job, tokens: int) -> tuple[int, ...]:
        """Per layer, what the job's first step of so many tokens is taken to compute."""
        return tuple(self._compute.step_layers_ns([(job.request.cached_tokens, tokens)], 0, 0))

    def _stall_price(self) -> StallPrice | None:
        """What a stall costs others now, as release decisions are told."""
        return None

    def _stall_price_of(self, job: Job, price: StallPrice) -> StallPrice:
        """Of it, what a stall for that job does."""
        return price

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
