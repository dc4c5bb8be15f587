"""An engine that schedules a step ahead, with its host thread and its device as two stations (vLLM, asynchronous).

The host makes one *pass* after another::

    look ── schedule, inputs ── loads begin ── launch, layer by layer ── look at loads ── hand out ── look ...

It hands out the pass *before* the one it has just launched: the tokens of step N are seen when step N has been computed
and step N+1 has been launched, whichever is later. What its look at loads finds is known to the scheduler at the same
hand-out, and so joins the next pass but one. A pass with nothing to compute is handed out behind the next pass too, so
from its first request on the engine always has one that is not handed out.

The device runs the layers of the passes in their order, each as soon as it is launched. Where a released load is still
landing the host waits at its layers, so a step takes the longer of launching, computing and landing, layer by layer; a
step that replays one graph waits in front of it for all of them. A load itself begins when the device has computed all
that was launched before it, which may still read the blocks that the load writes (XFER-3).

Source: vLLM 0.26, `v1/engine/core.py` (`step_with_batch_queue`); the connector's own order of calls.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from random import Random
from typing import Any, Final

from lamella.reference.ordering import ahead_of_batch
from lamella.reference.timeline import Chunk
from lamella.sim.clock import Phase
from lamella.sim.engine import Engine
from lamella.sim.overheads import WHOLE, Overheads
from lamella.sim.requests import Job
from lamella.sim.settings import StepsWait, SubmitAt
from lamella.sim.steps import RunningStep, split_evenly

SLOWEST: Final = 0.3
"""Least factor on a mean time that chance may draw."""


class Pass(RunningStep):
    """A pass of the host, and the step on the device that it launches; one without members launches none."""

    __slots__ = ("began_ns", "blocked_ns", "done", "end_ns", "firsts", "launch_ns", "made_ns", "num_tokens", "reported")

    def __init__(self, polled_ns: int, taken: list[tuple[Job, Chunk]], decode_batch: int) -> None:
        super().__init__(polled_ns, -1, taken, (), decode_batch, 0, [])
        self.made_ns = polled_ns
        """Those who ask in it have asked, and it is known who is in it."""
        self.began_ns = self.end_ns = -1
        self.launch_ns = self.blocked_ns = 0
        self.num_tokens = sum(chunk.num_tokens for _, chunk in taken) + decode_batch
        self.reported: list[Job] = []
        self.firsts: list[Job] = []
        """Whose prefill ends with it."""
        self.done: list[Job] = []
        """Whose last token it gives."""


class AheadEngine(Engine):
    """Runs admitted jobs to their end; see the module.

    Args:
        overheads: of the host thread, and of loads beside computing.
        inputs_behind_ns: a joining prompt's own copy waits for at most so much wire time of loads; None: until a load
            ends. 0: it does not wait.
        joins_at_once: loads move inside the very step that asks for them.
        before_batch: such loads begin with the step's orders, before its batch is prepared, and so do those that were
            ordered before them.
        seed: for the scatter of the thread's times; None: each takes its mean.
        steps_wait: which released loads a step's layers wait for.
        (others): as `Engine`.

    Raises:
        ValueError: settings that this engine does not model: counted blocks, bounds on loads.
    """

    def __init__(
        self,
        *arguments: Any,
        overheads: Overheads,
        inputs_behind_ns: int | None = 0,
        joins_at_once: bool = False,
        before_batch: bool = False,
        seed: int | None = None,
        steps_wait: StepsWait = StepsWait.BATCH,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        for name in ("kv_blocks", "load_timeout_ns"):
            if getattr(self._settings, name) is not None:
                raise ValueError(f"an engine that schedules ahead is modelled without {name}; leave it out")
        self._overheads = overheads
        self._inputs_behind_ns = inputs_behind_ns
        self._joins_at_once = joins_at_once
        self._before_batch = before_batch
        self._steps_wait = steps_wait
        self._chance = None if seed is None else Random(seed)
        self._pace = 1.0  # of the thread in this run: its times, of their means
        if self._chance is not None and seed is not None:
            drift = abs(self._chance.gauss(0.0, overheads.drift_permille / WHOLE))
            self._pace = max(SLOWEST, 1 + (drift if seed % 2 else -drift))  # so that a few seeds keep the mean
        self._awake = False
        self._pass: Pass | None = None  # being launched
        # Launched and not handed out. An engine that has served anybody has an empty one left.
        self._passes: deque[Pass] = deque([Pass(0, [], 0)])
        self._starting: list[Job] = []  # their loads begin with the pass that is being made
        self._known: list[Job] = []  # their loads were reported with what has been handed out
        self._joined = False  # a request joined the last pass
        self._device_ns = 0  # the device is busy until then
        self._forward_ns = -1  # begin of the last forward, if the last pass was one
        self._step_took_ns = 0  # from that begin to the next pass's

    @property
    def computing(self) -> bool:
        """Whether the device has something to do."""
        return self._device_ns > self._clock.now_ns

    # ---------------------------------------------------------------- jobs come

    def admit(self, job: Job) -> None:
        """The job is in the engine's queue from now on."""
        self._scheduler.waiting[job.sequence] = job
        (self._unsubmitted if job.request.load.slice_layers else self._due).append(job)
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._awake:
            self._awake = True
            self._clock.at(self._clock.now_ns, Phase.FORM, self._look)

    def _submit(self, job: Job) -> None:
        self._loads.prepare(job, lambda part: self._land(job, part))
        self._scheduler.loading[job.sequence] = job
        self._starting.append(job)
        if self._joins_at_once:
            self._join(job)

    def _join(self, job: Job) -> None:
        job.due = True  # and released, when all have asked

    def _start_loads(self, jobs: list[Job], at_ns: int) -> int:
        """They begin one after another, from then on; returns when the thread is through with it."""
        for job in jobs:
            at_ns += self._takes_ns(self._overheads.submit_ns)
            self._clock.at(at_ns, Phase.HAPPEN, partial(self._start, job))
        return at_ns

    def _begun_ahead(self) -> list[Job]:
        """Loads that join the step which is made, and those that were ordered before them: the link keeps its order."""
        count = ahead_of_batch([job.due for job in self._starting])
        late = self._settings.submit_at is SubmitAt.AFTER_FORWARD
        return [job for job in self._starting[:count] if job.due or not late]

    def _start(self, job: Job) -> None:
        job.submitted_ns = job.ready_ns = self._clock.now_ns
        if job.due:
            job.released_ns = job.ready_ns
        self._loads.start(job, self._device_ns)

    def _land(self, job: Job, part: int) -> None:
        super()._land(job, part)
        if self._pass is not None and self._pass.blocked:
            self._launch_on()

    def _engine_wait_ns(self) -> int:
        return max(0, self._device_ns - self._clock.now_ns)

    def _forecast_layers_ns(self, job: Job, tokens: int) -> tuple[int, ...]:
        """As steps of so many tokens have been observed: no shorter than their launches."""
        computing = super()._forecast_layers_ns(job, tokens)
        least_ns = self._overheads.least_prefill_ns(tokens)
        return computing if sum(computing) >= least_ns else tuple(split_evenly(least_ns, len(computing)))

    # ---------------------------------------------------------------- a pass

    def _look(self) -> None:
        """The thread is free: it schedules the next pass, or sleeps if there is nobody to serve."""
        now, scheduler = self._clock.now_ns, self._scheduler
        if now < self._occupied_ns:
            self._clock.at(self._occupied_ns, Phase.FORM, self._look)
            return
        if not (scheduler.waiting or scheduler.decode_batch or scheduler.has_unfinished or self._in_flight):
            self._awake = False
            return
        for job in self._known:
            scheduler.release(job, now)
        self._known.clear()
        cost_ns = 0
        asking, self._unsubmitted = self._unsubmitted, []
        for job in asking:
            cost_ns += self._overheads.asking_ns(job.prompt_tokens)
            self._submit(job)
        for job in self._starting:
            if job.due:
                scheduler.release(job, now)
        for job in [job for job in self._due if job.gate is None]:
            self._due.remove(job)
            scheduler.release(job, now)
        made = Pass(now, scheduler.fill_step(), scheduler.decode_batch)
        made.made_ns += cost_ns
        begins_ns, order_ns = now, self._overheads.order_ns
        joining = self._begun_ahead() if self._before_batch else []
        if joining:  # their loads begin, and what is left to do is the batch
            self._starting = [job for job in self._starting if job not in joining]
            begins_ns, cost_ns = self._start_loads(joining, now + self._takes_ns(cost_ns + order_ns)), -order_ns
        for job, chunk in made.taken:
            if chunk.first_token == 0:
                cost_ns += self._overheads.joining_ns(job.prompt_tokens)
        if made.num_tokens:
            cost_ns += self._overheads.pass_ns + (self._overheads.after_join_ns if self._joined else 0)
            self._begin_step(made.taken)
            self._plan(made)
        elif asking:
            cost_ns += order_ns
        self._joined = any(chunk.first_token == 0 for _, chunk in made.taken)
        self._clock.at(begins_ns + self._takes_ns(max(0, cost_ns)), Phase.FORM, lambda: self._begin_pass(made))

    def _takes_ns(self, mean_ns: int) -> int:
        """How long the thread takes this time for what takes it so long in the mean."""
        if self._chance is None:
            return mean_ns
        factor = self._pace * self._chance.gauss(1.0, self._overheads.scatter_permille / WHOLE)
        return round(mean_ns * max(SLOWEST, factor))

    @property
    def _in_flight(self) -> bool:
        return any(made.num_tokens for made in self._passes)

    def _begin_step(self, taken: list[tuple[Job, Chunk]]) -> None:
        for _, chunk in taken:
            self.prefilled_tokens += chunk.num_tokens

    def _plan(self, made: Pass) -> None:
        """What the step costs the device, and whom it serves: the scheduler counts its tokens before they are there."""
        scheduler, batch, overheads = self._scheduler, made.decode_batch, self._overheads
        if made.taken:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in made.taken]
            made.costs = self._compute.step_layers_ns(prefills, batch, scheduler.context_tokens)
        else:
            whole = self._compute.decode_ns(batch, scheduler.context_tokens, 1)
            made.costs = split_evenly(whole, self._compute.num_layers)
        made.context_tokens = scheduler.context_tokens
        made.whole = self._full_graphs and not made.taken and made.num_tokens <= overheads.captured_tokens
        launch_ns = overheads.forward_ns(made.num_tokens, full_graphs=made.whole, prefills=bool(made.taken))
        made.launch_ns = self._takes_ns(launch_ns)
        made.done = scheduler.advance_decoding(1) if batch else []
        for job, chunk in made.taken:
            if chunk.first_token + chunk.num_tokens == job.prefill_tokens:
                made.firsts.append(job)
                if job.request.output_tokens == 1:
                    made.done.append(job)
                else:
                    scheduler.begin_decoding(job)

    def _begin_pass(self, made: Pass) -> None:
        """Loads begin; it is settled which of them the layers of this pass wait for."""
        now, overheads = self._clock.now_ns, self._overheads
        made.began_ns = now
        for job, chunk in made.taken:
            if chunk.first_token == 0:
                job.began_ns = now
        if self._forward_ns >= 0:
            self._step_took_ns = now - self._forward_ns
        self._forward_ns = now if made.num_tokens else -1
        if any(chunk.first_token == 0 for _, chunk in made.taken):
            there_ns = now + self._loads.inputs_wait_ns(self._inputs_behind_ns)
            self._device_ns = max(self._device_ns, there_ns)
        late = self._settings.submit_at is SubmitAt.AFTER_FORWARD and made.num_tokens
        now = self._start_loads([job for job in self._starting if job.due or not late], now)
        self._starting = [job for job in self._starting if late and not job.due]
        made.loads = [job for job in self._scheduler.landing.values() if not job.landed]
        if self._steps_wait is StepsWait.BATCH:  # who decodes has been computed over all of its load
            batch = {job.sequence for job, _ in made.taken}
            made.loads = [job for job in made.loads if job.sequence in batch]
        made.launch_ns += len(made.costs) * len(made.loads) * overheads.gate_ns
        self._pass = made
        self._clock.at(now, Phase.FORM, self._launch_on if made.num_tokens else self._end_pass)

    def _launch_on(self) -> None:
        """All layers so far are launched: the thread launches those that have landed, or stands until the next does."""
        made, now = self._pass, self._clock.now_ns
        assert made is not None, "layers are launched only in a pass"
        num_layers = len(made.costs)
        ready = made.runnable(job.gate.landed_layers for job in made.loads if job.gate is not None)
        if ready <= made.layer < num_layers:
            if not made.blocked:
                made.blocked, made.blocked_ns = True, now
            return
        stood_ns = now - made.blocked_ns if made.blocked else 0
        made.blocked = False
        busy_ns = now + self._loads.ahead_ns
        tail_ns = min(self._overheads.tail_ns, made.launch_ns)
        layers_ns = made.launch_ns - tail_ns
        begun, made.layer = made.layer, ready
        for layer in range(begun, ready):
            through = num_layers if made.whole else layer + 1
            launched_ns = now + layers_ns * through // num_layers - layers_ns * begun // num_layers
            free_ns = self._device_ns
            starts_ns = max(free_ns, launched_ns)
            if layer == begun:
                stood_ns = min(stood_ns, starts_ns - free_ns)
                if layer == 0:
                    self._start_step(made, starts_ns - stood_ns)
                self._charge_stall(made, layer, stood_ns)
                for job, _ in made.taken:
                    job.prefill_stall_ns += stood_ns
            slowed = self._overheads.beside_permille if starts_ns < busy_ns else WHOLE
            self._device_ns = starts_ns + made.costs[layer] * slowed // WHOLE
        if ready == num_layers:
            made.end_ns = self._device_ns
        through_ns = now + layers_ns * ready // num_layers - layers_ns * begun // num_layers
        if ready == num_layers:
            self._clock.at(through_ns + tail_ns, Phase.FORM, self._end_pass)
        else:
            self._clock.at(through_ns, Phase.FORM, self._launch_on)

    def _start_step(self, made: Pass, start_ns: int) -> None:
        made.start_ns = start_ns
        for job, chunk in made.taken:
            job.prefill_steps += 1
            if chunk.first_token == 0:
                job.started_ns = job.first_started_ns = start_ns
                job.caused_before_start_ns = job.caused_ns
                job.victim_from_ns = self.stall_ns

    def _end_pass(self) -> None:
        """All is launched: the thread looks at loads, and hands out the pass before."""
        made, now = self._pass, self._clock.now_ns
        assert made is not None, "only a pass that began can end"
        self._pass = None
        now, self._starting = self._start_loads(self._starting, now), []  # where they follow the forward
        for job in self._seen(made):
            job.due = job.released = True
            job.ready_ns = now
            if not job.landed:
                self._scheduler.landing[job.sequence] = job  # from here on steps wait for its layers (REL-2)
            made.reported.append(job)
        self._passes.append(made)
        oldest = self._passes.popleft()
        report_ns = self._overheads.report_ns if oldest.num_tokens else 0
        report_ns += self._overheads.first_token_ns if oldest.firsts else 0
        at_ns = max(now, oldest.end_ns) + self._takes_ns(report_ns)
        self._clock.at(at_ns, Phase.HAPPEN, lambda: self._hand_out(oldest, made))

    def _seen(self, made: Pass) -> list[Job]:
        """Loads that the release rule lets run, by the look behind the launch."""
        if self._release.needs_forecast:
            away_ns = self._step_took_ns if made.num_tokens else self._settings.idle_poll_ns
            now = self._clock.now_ns
            return [job for job, instant_ns in self._release_instants(away_ns) if instant_ns <= now]
        seen, self._due = self._due, [job for job in self._due if job.gate is None]
        return [job for job in seen if job.gate is not None]

    def _hand_out(self, made: Pass, last: Pass) -> None:
        """The tokens of a pass are seen, and what it reported is known to the scheduler."""
        now = self._clock.now_ns
        self._known += made.reported
        if made.num_tokens:
            self.busy_ns += made.end_ns - made.start_ns
            self._step_took(made, made.end_ns - made.start_ns)
            if self._on_step is not None:
                self._note_step(self._on_step, made, made.end_ns)
        for job in made.firsts:
            job.first_token_ns = now
            if job.request.store.slice_layers:
                self._store(job)
        self._finish(made.done)
        pause_ns = 0 if made.num_tokens or last.num_tokens else self._takes_ns(self._overheads.idle_ns)
        self._clock.at(now + pause_ns, Phase.FORM, self._look)
