"""The world's engine with `auto`: it chooses an arm when a request asks, as the connector does when vLLM asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lamella.reference.auto import AutoPolicy
from lamella.reference.auto_ledger import LoadLedger
from lamella.reference.auto_view import Abilities, Arm, AutoView, Decision
from lamella.reference.correction import Correction, Probes
from lamella.reference.engine_clock import EngineClock, joining_ns
from lamella.reference.hand_out import CandidateLoad, release_lag_ns, released_at_hand_out
from lamella.reference.release import StallPrice, Whole, waits_its_turn
from lamella.reference.slices import by_layer
from lamella.reference.timeline import NOTHING_TO_LOAD, Chunk, Load
from lamella.sim.ahead import AheadEngine, Pass
from lamella.sim.engine import Engine
from lamella.sim.requests import Job
from lamella.sim.steps import RunningStep


class AutoEngine(Engine):
    """Chooses at the poll that would submit a job's load.

    A job comes with the load of the whole hit in one slice; what is chosen takes its place. Chunk-major is one slice,
    which no release rule can tell from whole release, so the world's one rule serves all arms.

    Args:
        policy: chooses.
        load_of: the load of so many tokens with such a width, on the true link.
        on_choice: called with each decision; None if nobody counts.
        can: what the engine can do.
        learns: whether observations correct the policy's profile.
        (others): as `Engine`.
    """

    def __init__(
        self,
        *arguments: Any,
        policy: AutoPolicy,
        load_of: Callable[[int, int | tuple[int, ...]], Load],
        on_choice: Callable[[Decision], object] | None = None,
        can: Abilities | None = None,
        learns: bool = True,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._policy = policy
        self._load_of = load_of
        self._can = can or Abilities()
        self._learns = learns
        self._on_choice = on_choice
        self.correction = Correction()
        """What was observed so far."""
        self._ledger = LoadLedger()
        self._probes = Probes()
        self._last_landing_ns = 0

    # ---- a request asks

    def _submit(self, job: Job) -> None:
        request = job.request
        tokens = sum(request.load.slice_bytes) // self._policy.token_bytes
        view = self._view(job, tokens)
        decision = self._policy.choose(view, self.correction, self._can)
        if self._probes.overrules(off=decision.arm is Arm.OFF):
            decision = replace(self._policy.choose(view, self.correction, replace(self._can, off=False)), probe=True)
        if self._on_choice is not None:
            self._on_choice(decision)
        if decision.arm is Arm.OFF:
            job.request = request._replace(
                cached_tokens=request.cached_tokens - tokens,
                new_tokens=request.new_tokens + tokens,
                load=NOTHING_TO_LOAD,
            )
            self.prefilled_tokens -= tokens  # they were not counted as arrived
            self._due.append(job)
            return
        job.request = request._replace(load=self._load_of(tokens, decision.chosen.width))
        super()._submit(job)
        self._ledger.ended(job.sequence, self._clock.now_ns)  # one that was preempted loads again
        self._ledger.began(job.sequence, self._clock.now_ns, decision.load_ns, decision.prefill_ns)
        if decision.arm is Arm.SYNC:
            self._join(job)

    def _view(self, job: Job, tokens: int) -> AutoView:
        now, scheduler = self._clock.now_ns, self._scheduler
        ready = [(one.request.cached_tokens, one.request.new_tokens) for one in self._due if one.transfer is None]
        before = (*ready, *scheduler.unfinished())
        decoding = scheduler.decode_batch
        return AutoView(
            load_tokens=tokens,
            cached_tokens=job.request.cached_tokens,
            new_tokens=job.request.new_tokens,
            link_wait_ns=self._ledger.link_wait_ns(now),
            engine_wait_ns=self._engine_wait_ns(),
            queued_ns=sum(self._policy.prefill_ns(cached, new, self.correction)[1] for cached, new in before),
            sharing=len(before),
            waiting=self._ledger.waiting(now),
            decoding=decoding,
            bystanders=self._bystanders(),
            step_ns=self._decode_ns(),
            idle=not decoding,
            release_lag_ns=self._release_lag_ns(),
            joining_ns=self._joining_ns(job),
            first_tokens=self._first_tokens(),
        )

    def _joining_ns(self, job: Job) -> int:
        """What the host takes to put the job into a step, before its load begins."""
        return 0

    def _first_tokens(self) -> int:
        """Of the step that computes now, if they are handed out when the next one has been launched."""
        return 0

    def _release_lag_ns(self) -> int:
        """From a release to the start of its step, in an engine that computes a step for others meanwhile."""
        return 0

    def _decode_ns(self) -> int:
        """A step of those who decode now; 0 if nobody does."""
        decoding = self._scheduler.decode_batch
        return self._compute.decode_ns(decoding, self._scheduler.context_tokens, 1) if decoding else 0

    def _stall_price(self, job: Job) -> StallPrice:
        bystanders = self._bystanders()
        return self._policy.stall_price(
            bystanders,
            self._scheduler.decode_batch - bystanders,
            len(self._scheduler.unfinished()),
        )._replace(busy_ns=self._ledger.behind_ns(job.sequence, self._clock.now_ns))

    def _bystanders(self) -> int:
        return sum(not job.request.load.slice_layers for job in self._scheduler.decoding())

    def _release_instants(self, away_ns: int) -> list[tuple[Job, int]]:
        """As the release says; but one after another, where sharing a step would cost more."""
        scheduler, now = self._scheduler, self._clock.now_ns
        found = super()._release_instants(0 if self._is_full() else away_ns)
        prefills, fixed_ns = len(scheduler.unfinished()), self._policy.step_fixed_ns(self.correction)
        instants: list[tuple[Job, int]] = []
        for index, (job, instant_ns) in enumerate(found):
            held = False
            if instant_ns <= now:
                tokens = scheduler.first_chunk_tokens(job)
                compute_ns, _ = self._policy.prefill_ns(job.request.cached_tokens, tokens, self.correction)
                held = waits_its_turn(compute_ns, prefills, len(found) - index - 1, fixed_ns)
                prefills += not held
            instants.append((job, now + 1 if held else instant_ns))
        return instants

    def _is_full(self) -> bool:
        """Whether, released or not, nobody else is in the next step."""
        scheduler, budget = self._scheduler, self._settings.token_budget
        taken = sum(tokens for _, tokens in scheduler.unfinished()) + scheduler.decode_batch
        return budget is not None and taken >= budget

    # ---- what is observed

    def _land(self, job: Job, part: int) -> None:
        super()._land(job, part)
        transfer, now = job.transfer, self._clock.now_ns
        if job.gate is None or transfer is None or not job.gate.all_landed:
            return
        self._ledger.ended(job.sequence, now)
        begun_ns = max(transfer.submission.arrival_ns, self._last_landing_ns)
        self._last_landing_ns = now
        if self._learns:
            load = job.request.load
            tokens = sum(load.slice_bytes) // self._policy.token_bytes
            took_ns = now - begun_ns - len(load.slice_ns) * self._policy.slice_ns
            self.correction = self.correction.after_load(self._policy.wire_ns(tokens), took_ns)

    def _fail(self, job: Job, failure: str) -> None:
        self._ledger.ended(job.sequence, self._clock.now_ns)
        super()._fail(job, failure)

    def _begin_step(self, taken: list[tuple[Job, Chunk]]) -> None:
        for job, _ in taken:
            self._ledger.joined(job.sequence)
        super()._begin_step(taken)

    def _step_took(self, step: RunningStep, took_ns: int) -> None:
        if self._learns and step.taken and not step.loads:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in step.taken]
            expected_ns = self._policy.step_ns(prefills, step.decode_batch, step.context_tokens)
            self.correction = self.correction.after_steps(expected_ns, took_ns)


class AutoAheadEngine(AutoEngine, AheadEngine):
    """The same in an engine that schedules ahead.

    Its scheduler hears of a worker's look a pass late, so it releases by forecast itself, just before it schedules.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._device = EngineClock(steps_ahead=True, step_ns=self._policy.step_ns([(0, 1)]), now_ns=self._clock.now_ns)

    def _begin_pass(self, made: Pass) -> None:
        lasts_ns = 0
        if made.num_tokens:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in made.taken]
            profile_ns = self._policy.step_ns(prefills, made.decode_batch, made.context_tokens)
            lasts_ns = round(profile_ns * self.correction.steps)
        self._device.step_made(made.polled_ns, lasts_ns, prefills=bool(made.taken))
        super()._begin_pass(made)

    def _hand_out(self, made: Pass, last: Pass) -> None:
        self._device.handed_out(self._clock.now_ns)
        super()._hand_out(made, last)

    def _engine_wait_ns(self) -> int:
        return self._device.wait_ns(self._clock.now_ns)

    def _joining_ns(self, job: Job) -> int:
        return joining_ns(job.prompt_tokens)

    def _first_tokens(self) -> int:
        return sum(len(made.firsts) for made in self._passes)

    def _release_lag_ns(self) -> int:
        return release_lag_ns(self._decode_ns(), self._settings.idle_poll_ns)

    def _release_at_hand_out(self) -> None:
        now, scheduler = self._clock.now_ns, self._scheduler
        waiting = [] if self._is_full() else scheduler.waiting.values()  # who asks in this pass asks behind this
        coming = [job for job in waiting if job.transfer is not None and not job.due]
        jobs, loads = [], []
        for job, landings in self._loads.forecast(coming) if coming else ():
            layers = job.request.load.slice_layers
            tokens = scheduler.first_chunk_tokens(job)
            compute_ns, _ = self._policy.prefill_ns(job.request.cached_tokens, tokens, self.correction)
            release = self._release if len(layers) > 1 else Whole()  # as it was chosen: one slice is chunk-major
            jobs.append(job)
            loads.append(CandidateLoad(by_layer(landings, layers), compute_ns, release, self._stall_price(job)))
        released = released_at_hand_out(
            loads,
            now_ns=now,
            start_delay_ns=self._engine_wait_ns(),
            step_ns=self._release_lag_ns(),
            decoding=scheduler.decode_batch,
            prefills=len(scheduler.unfinished()),
            step_fixed_ns=self._policy.step_fixed_ns(self.correction),
            first_tokens=self._first_tokens(),
        )
        for index in released:
            job = jobs[index]
            job.ready_ns = now
            self._ledger.joined(job.sequence)
            scheduler.release(job, now)

    def _forecast_layers_ns(self, job: Job, tokens: int) -> tuple[int, ...]:
        compute_ns, _ = self._policy.prefill_ns(job.request.cached_tokens, tokens, self.correction)
        num_layers = self._policy.num_layers
        return (compute_ns // num_layers,) * num_layers
