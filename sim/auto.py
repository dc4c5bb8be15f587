"""The world's engine with `auto`: it chooses an arm when a request asks, as the connector does when vLLM asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from lamella.reference.auto import AutoPolicy
from lamella.reference.auto_ledger import LoadLedger
from lamella.reference.auto_view import Abilities, Arm, AutoView, Decision
from lamella.reference.correction import Correction, Probes, time_on_link
from lamella.reference.engine_clock import ORDERING_NS, EngineClock, joining_ns
from lamella.reference.hand_out import CandidateLoad, release_lag_ns, released_at_hand_out
from lamella.reference.release import StallPrice, waits_its_turn
from lamella.reference.timeline import NOTHING_TO_LOAD, Chunk, Load
from lamella.sim.ahead import AheadEngine, Pass
from lamella.sim.engine import Engine
from lamella.sim.overheads import WHOLE
from lamella.sim.requests import Job
from lamella.sim.steps import RunningStep

SEEN: Final = 8
"""Observations behind a correction that has settled."""


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
        self._planned(job, decision)

    def _planned(self, job: Job, decision: Decision) -> None:
        """The job's load moves as was decided."""
        if decision.arm is Arm.SYNC:
            self._join(job)

    def _view(self, job: Job, tokens: int) -> AutoView:
        now, decoding = self._clock.now_ns, self._num_decoding()
        before_ns = self._before_ns()
        return AutoView(
            load_tokens=tokens,
            cached_tokens=job.request.cached_tokens,
            new_tokens=job.request.new_tokens,
            link_wait_ns=self._ledger.link_wait_ns(now),
            engine_wait_ns=self._engine_wait_ns(),
            queued_ns=sum(before_ns),
            sharing=len(before_ns),
            waiting=self._ledger.waiting(now),
            decoding=decoding,
            bystanders=self._bystanders(),
            step_ns=self._decode_ns(),
            idle=self._is_idle(),
            release_lag_ns=self._release_lag_ns(),
            joining_ns=self._joining_ns(job),
            ordering_ns=self._ordering_ns(),
            first_tokens=self._first_tokens(),
        )

    def _before_ns(self) -> list[int]:
        """What each prefill takes that goes before whoever asks now."""
        return self._prefills_ns([*self._without_load(), *self._scheduler.unfinished()])

    def _without_load(self) -> list[tuple[int, int]]:
        """(context, tokens) of those who have asked, and load nothing."""
        return [(one.request.cached_tokens, one.request.new_tokens) for one in self._due if one.transfer is None]

    def _prefills_ns(self, prefills: list[tuple[int, int]]) -> list[int]:
        return [self._policy.prefill_ns(cached, new, self.correction)[1] for cached, new in prefills]

    def _num_prefills(self) -> int:
        """Prefills whose step stands with a stall."""
        return len(self._scheduler.steppable())

    def _joining_ns(self, job: Job) -> int:
        """What the host takes to put the job into a step."""
        return 0

    def _ordering_ns(self) -> int | None:
        """Of that, what goes before a load that joins the step begins; None: all."""
        return None

    def _first_tokens(self) -> int:
        """Of the step that computes now, if they are handed out when the next one has been launched."""
        return 0

    def _release_lag_ns(self) -> int:
        """From a release to the start of its step, in an engine that computes a step for others meanwhile."""
        return 0

    def _num_decoding(self) -> int:
        """Requests that decode, as far as the scheduler knows."""
        return self._scheduler.decode_batch

    def _is_idle(self) -> bool:
        """Whether nothing is computed."""
        return not self._scheduler.decode_batch

    def _decode_ns(self) -> int:
        """A step of those who decode now; 0 if nobody does."""
        decoding = self._scheduler.decode_batch
        return self._compute.decode_ns(decoding, self._scheduler.context_tokens, 1) if decoding else 0

    def _stall_price(self) -> StallPrice:
        bystanders = self._bystanders()
        return self._policy.stall_price(bystanders, self._num_decoding() - bystanders, self._num_prefills())

    def _stall_price_of(self, job: Job, price: StallPrice) -> StallPrice:
        return price._replace(busy_ns=self._ledger.behind_ns(job.sequence, self._clock.now_ns))

    def _bystanders(self) -> int:
        return self._scheduler.decode_without_load

    def _release_instants(self, away_ns: int) -> list[tuple[Job, int]]:
        """As the release says; but one after another, where sharing a step would cost more."""
        scheduler, now = self._scheduler, self._clock.now_ns
        found = super()._release_instants(0 if self._is_full() else away_ns)
        prefills, fixed_ns = len(scheduler.steppable()), self._policy.step_fixed_ns(self.correction)
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
        taken = sum(tokens for _, tokens in scheduler.steppable()) + scheduler.decode_batch
        return budget is not None and taken >= budget

    # ---- what is observed

    def _land(self, job: Job, part: int) -> None:
        super()._land(job, part)
        transfer, now = job.transfer, self._clock.now_ns
        if job.gate is None or transfer is None or not job.gate.all_landed:
            return
        slices, num_bytes, took_ns = time_on_link(
            transfer.load.slice_bytes, transfer.started_ns, transfer.landing_ns, self._last_landing_ns
        )
        self._last_landing_ns = now
        self._load_ended(job, num_bytes, took_ns - slices * self._policy.slice_ns)

    def _load_ended(self, job: Job, num_bytes: int, took_ns: int) -> None:
        """All of a load has landed, and for so many bytes of it the link took so long."""
        self._ledger.ended(job.sequence, self._clock.now_ns)
        if self._learns:
            expected_ns = self._policy.wire_ns(num_bytes // self._policy.token_bytes)
            self.correction = self.correction.after_load(expected_ns, took_ns)

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

    Its scheduler hears of a worker's look a pass late, so it releases by forecast itself, at each hand-out. What it
    knows is what the connector's scheduler side knows: of a step, when it was made and handed out; of a load, how long
    it was taken to be and, with the hand-out of the pass whose look saw it, that it has ended. A pass that computed
    nothing, saw nothing and was asked for nothing has no hand-out for it. Source: vLLM 0.26, `kv_connector_no_forward`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._device = EngineClock(steps_ahead=True, step_ns=self._policy.step_ns([(0, 1)]), now_ns=self._clock.now_ns)
        self._parked: dict[int, tuple[Job, Decision]] = {}
        self._let_run_ns: dict[int, int] = {}  # by who has been let run and is in no step yet: his first step
        self._ended: list[tuple[Job, int, int]] = []  # landed since the last look
        self._told: dict[Pass, list[tuple[Job, int, int]]] = {}  # by the pass whose look saw it
        self._asked: set[Pass] = set()  # whose report is asked for: somebody was parked when they were made

    def _planned(self, job: Job, decision: Decision) -> None:
        if decision.arm is not Arm.SYNC:
            self._parked[job.sequence] = job, decision
        super()._planned(job, decision)

    def _submit(self, job: Job) -> None:
        if self._learns and not self.correction.steps_seen:
            self.correction = self._settled(job)
        super()._submit(job)

    def _settled(self, job: Job) -> Correction:
        """What such requests have taught an engine that serves for a while: of steps and loads beside each other.

        And what launching their steps takes, which is the least that is known of any.
        """
        policy, load = self._policy, job.request.load
        prefill = job.request.cached_tokens, self._scheduler.first_chunk_tokens(job)
        step_ns = sum(self._compute.step_layers_ns([prefill], 0, 0)) * self._overheads.beside_permille // WHOLE
        bytes_ns = max(sum(load.slice_ns) - len(load.slice_ns) * policy.slice_ns, self._loads.reading_ns(job))
        wire_ns, prefill_ns = policy.wire_ns(sum(load.slice_bytes) // policy.token_bytes), policy.step_ns([prefill])
        seen = Correction()
        for _ in range(SEEN):
            seen = seen.after_load(wire_ns, bytes_ns).after_steps(prefill_ns, step_ns)
        return replace(seen, least_ns=float(self._overheads.least_prefill_ns(prefill[1])), least_seen=SEEN)

    # ---- what the scheduler side sees

    def _begin_pass(self, made: Pass) -> None:
        lasts_ns = self._device.step_ns if made.num_tokens else 0
        if made.taken:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in made.taken]
            profile_ns = self._policy.step_ns(prefills, made.decode_batch, made.context_tokens)
            lasts_ns = round(self.correction.step_ns(profile_ns))
        self._device.step_made(made.made_ns, lasts_ns, prefills=bool(made.taken))
        if self._parked:
            self._asked.add(made)
        super()._begin_pass(made)

    def _load_ended(self, job: Job, num_bytes: int, took_ns: int) -> None:
        self._ended.append((job, num_bytes, took_ns))

    def _end_pass(self) -> None:
        made = self._pass
        assert made is not None, "only a pass that began can end"
        self._told[made], self._ended = self._ended, []
        super()._end_pass()

    def _hand_out(self, made: Pass, last: Pass) -> None:
        made.reported = [job for job in made.reported if job.sequence in self._scheduler.waiting]  # each once
        for job in made.reported:
            self._let_run(job)
        told = self._told.pop(made, ())
        for job, num_bytes, took_ns in told:
            self._parked.pop(job.sequence, None)  # nothing is left to forecast
            super()._load_ended(job, num_bytes, took_ns)
        says_nothing = not (made.num_tokens or made.reported or told or made in self._asked)
        self._asked.discard(made)
        super()._hand_out(made, last)
        if not says_nothing:  # else the connector is not called
            self._device.handed_out(self._clock.now_ns)
            self._release_by_forecast()

    def _let_run(self, job: Job) -> None:
        """The job joins the pass that is made next."""
        _, decision = self._parked.pop(job.sequence, (job, None))
        if decision is not None:
            self._let_run_ns[job.sequence] = decision.compute_ns
            self._ledger.joined(job.sequence)

    def _begin_step(self, taken: list[tuple[Job, Chunk]]) -> None:
        super()._begin_step(taken)
        for job, _ in taken:
            self._let_run_ns.pop(job.sequence, None)

    def _fail(self, job: Job, failure: str) -> None:
        self._parked.pop(job.sequence, None)
        super()._fail(job, failure)

    def _engine_wait_ns(self) -> int:
        return self._device.wait_ns(self._clock.now_ns)

    def _is_idle(self) -> bool:
        return self._device.is_idle

    def _decode_ns(self) -> int:
        return self._device.step_ns

    def _num_decoding(self) -> int:
        """With those whose last token is not handed out."""
        return super()._num_decoding() + sum(len(made.done) for made in self._passes)

    def _before_ns(self) -> list[int]:
        return self._prefills_ns([*self._without_load(), *self._scheduler.cut()]) + list(self._let_run_ns.values())

    def _num_prefills(self) -> int:
        return len(self._scheduler.cut())

    def _joining_ns(self, job: Job) -> int:
        return joining_ns(job.prompt_tokens)

    def _ordering_ns(self) -> int | None:
        return ORDERING_NS if self._before_batch else None

    def _first_tokens(self) -> int:
        return sum(len(made.firsts) for made in self._passes)

    def _release_lag_ns(self) -> int:
        decoding = self._num_decoding()
        return release_lag_ns(self._device.step_ns if decoding else 0, self._settings.idle_poll_ns)

    def _release_by_forecast(self) -> None:
        if not self._parked or self._is_full():
            return
        now, scheduler, price = self._clock.now_ns, self._scheduler, self._stall_price()
        parked = list(self._parked.values())
        released = released_at_hand_out(
            [
                CandidateLoad(
                    self._arrival_ns(job),
                    decision.compute_ns,
                    decision.release,
                    self._stall_price_of(job, price),
                )
                for job, decision in parked
            ],
            now_ns=now,
            start_delay_ns=self._engine_wait_ns(),
            step_ns=self._release_lag_ns(),
            decoding=self._num_decoding(),
            prefills=self._num_prefills() + len(self._let_run_ns),
            step_fixed_ns=self._policy.step_fixed_ns(self.correction),
            first_tokens=self._first_tokens(),
        )
        for index in released:
            job = parked[index][0]
            if not job.due:  # else a look has found it, of which the next hand-out tells
                job.ready_ns = now
            self._let_run(job)
            scheduler.release(job, now)

    def _arrival_ns(self, job: Job) -> tuple[int, ...]:
        return self._ledger.arrival_ns(job.sequence, job.request.load.slice_layers)

    def _forecast_layers_ns(self, job: Job, tokens: int) -> tuple[int, ...]:
        compute_ns, _ = self._policy.prefill_ns(job.request.cached_tokens, tokens, self.correction)
        num_layers = self._policy.num_layers
        return (compute_ns // num_layers,) * num_layers
