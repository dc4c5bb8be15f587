"""`auto` on the scheduler side: what is known of the engine when a request asks, and what observations make of it.

`lamella.reference.auto` chooses; this keeps its view. Loads under way are forecast by a ledger, computing that is ahead
is counted from batches, and the workers' reports correct the profile (`StepForecast`): how long loads were on the link,
and steps in which nothing waited for a layer. Nothing here blocks, and a choice costs well below 0.1 ms of the
scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lamella.connector.batch_blocks import StepBatch
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_forecast import StepForecast
from lamella.connector.step_orders import LoadPlan, Observed, StepWeights
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.auto_ledger import LoadLedger
from lamella.reference.auto_view import Abilities, Arm, AutoView, Decision
from lamella.reference.correction import Correction, Probes
from lamella.reference.engine_clock import ORDERING_NS, EngineClock, joining_ns
from lamella.reference.hand_out import CandidateLoad, release_lag_ns, released_at_hand_out
from lamella.reference.release import StallPrice
from lamella.reference.slices import plan_slices

_log = logging.getLogger(__name__)


class AutoChoice:
    """Chooses for each request, and plans its load.

    Args:
        settings: the connector's.
        facts: of the engine.
        metrics: where arms are counted.
        clock_ns: a monotonic clock.

    Raises:
        ValueError: a profile that cannot be read.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        facts: EngineFacts,
        metrics: Metrics,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.forecast = StepForecast(settings, facts)
        """What it takes for true."""
        self._policy = self.forecast.policy
        self._can = Abilities(early=not facts.is_taken_back_whole, sync=not facts.is_taken_back_whole)
        self._before_batch = settings.before_batch
        self._facts = facts
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._ledger = LoadLedger()
        self._probes = Probes()
        self._chosen: dict[str, Decision] = {}
        self._numbers: dict[str, int] = {}
        self._readers: set[str] = set()  # their hit was loaded
        self._decoding: set[str] = set()
        self._cut: dict[str, tuple[int, int]] = {}  # prefills under way: (context, tokens left)
        self._began: dict[str, int] = {}  # the last load ordered when they began
        self._last_number = self._last_begun = -1  # ordered, and with a step that was made
        self._is_full = False  # the next step has no room for anybody
        self._first_tokens = 0  # prefills that end with the step made last
        self._joining_ns: dict[str, int] = {}  # chosen since the last step, to be computed in the next one
        self._parked: dict[str, tuple[int, LoadPlan]] = {}  # loads of requests that are not released
        self._released: dict[str, int] = {}  # prefills of requests that are released and in no step yet
        self._engine = EngineClock(
            steps_ahead=facts.steps_ahead, step_ns=self._policy.step_ns([(0, 1)]), now_ns=clock_ns()
        )
        self._step_expected_ns = 0
        profile = self.forecast.profile
        _log.info(
            "auto chooses by the profile %s (%s on %s), corrected by what is observed",
            profile.name,
            profile.model,
            profile.device,
        )

    @property
    def correction(self) -> Correction:
        """What was observed so far."""
        return self.forecast.correction

    def set_least_width(self, least_width: int) -> None:
        """Narrower slices than this copy below the wire's rate on some rank."""
        self._can = replace(self._can, least_width=max(self._can.least_width, least_width))

    # ---- a request asks

    def choose(self, name: str, load_tokens: int, local_hit: int, num_tokens: int) -> Arm:
        """The arm for a request of `num_tokens`, of which the engine holds `local_hit` and `load_tokens` more are here.

        It stands until the next choice for the request.
        """
        self._leaves_steps(name)
        now_ns = self._clock_ns()
        cached = local_hit + load_tokens
        decoding = len(self._decoding)
        queued_ns = sum(self._policy.prefill_ns(*left, self.correction)[1] for left in self._cut.values())
        view = AutoView(
            load_tokens=load_tokens,
            cached_tokens=cached,
            new_tokens=num_tokens - cached,
            link_wait_ns=self._ledger.link_wait_ns(now_ns),
            engine_wait_ns=self._engine.wait_ns(now_ns),
            queued_ns=queued_ns + sum(self._joining_ns.values()) + sum(self._released.values()),
            sharing=len(self._cut) + len(self._joining_ns) + len(self._released),
            waiting=self._ledger.waiting(now_ns),
            decoding=decoding,
            bystanders=len(self._decoding - self._readers),
            step_ns=self._engine.step_ns,
            idle=self._engine.is_idle,
            release_lag_ns=self._release_lag_ns,
            joining_ns=joining_ns(num_tokens),
            ordering_ns=ORDERING_NS if self._before_batch else None,
            first_tokens=self._first_tokens if self._facts.steps_ahead else 0,
        )
        decision = self._policy.choose(view, self.correction, self._can)
        before = self._chosen.get(name)
        if before is not None:  # asked again, a probe stays one
            decision = before if before.probe else decision
        elif self._probes.overrules(off=decision.arm is Arm.OFF):
            decision = replace(self._policy.choose(view, self.correction, replace(self._can, off=False)), probe=True)
        self._chosen[name] = decision
        if decision.arm is Arm.OFF:
            self._joining_ns[name] = self._policy.prefill_ns(local_hit, num_tokens - local_hit, self.correction)[1]
        return decision.arm

    def missed(self, name: str, local_hit: int, num_tokens: int) -> None:
        """The request has nothing to load; what it computes is ahead of whoever asks next."""
        self._leaves_steps(name)
        self._chosen.pop(name, None)
        if num_tokens > local_hit:
            self._joining_ns[name] = self._policy.prefill_ns(local_hit, num_tokens - local_hit, self.correction)[1]

    def _leaves_steps(self, name: str) -> None:
        """The request asks, so it is in no step: what it had begun or decoded before a preemption is no more."""
        for book in (self._joining_ns, self._released, self._cut, self._began):
            book.pop(name, None)
        self._decoding.discard(name)

    @property
    def _release_lag_ns(self) -> int:
        """From a release to the start of its step, in an engine that computes steps for others meanwhile."""
        if not self._facts.steps_ahead:
            return 0
        return release_lag_ns(self._engine.step_ns if self._decoding else 0, self.forecast.profile.engine.idle_poll_ns)

    # ---- the engine follows

    def planned(self, name: str, number: int) -> LoadPlan:
        """How load `number` of the request moves; it is under way from now on.

        Raises:
            KeyError: nothing was chosen for the request.
        """
        decision = self._chosen.pop(name)
        self._count(name, decision)
        self._ledger.began(number, self._clock_ns(), decision.load_ns, decision.prefill_ns)
        self._numbers[name] = self._last_number = number
        self._readers.add(name)
        plan = LoadPlan(decision.chosen.width, decision.release, decision.compute_ns, decision.load_ns)
        if decision.arm is not Arm.SYNC:
            self._parked[name] = number, plan
        return plan

    def declined(self, name: str) -> None:
        """The engine gave the request its blocks without a load; counted where that was chosen."""
        decision = self._chosen.pop(name, None)
        if decision is not None and decision.arm is Arm.OFF:
            self._count(name, decision)

    def chosen(self, name: str) -> Decision | None:
        """What was chosen for the request, and what was predicted of each arm; None once its load is planned."""
        return self._chosen.get(name)

    def joins(self, name: str) -> bool:
        """Whether the request was chosen to join the next step."""
        decision = self._chosen.get(name)
        return decision is not None and decision.arm is Arm.SYNC

    def _count(self, name: str, decision: Decision) -> None:
        self._metrics.count(f"auto_{decision.arm.value}")
        self._metrics.observe("auto_predicted_ttft_ns", decision.chosen.ttft_ns)
        self._metrics.observe("auto_predicted_regret_ns", round(decision.regret_ns))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("request %s: %s", name, decision.reason())

    def load_ended(self, number: int) -> None:
        """The load has landed, failed or been cancelled on every rank."""
        for name in [name for name, one in self._parked.items() if one[0] == number]:
            del self._parked[name]  # nothing is left to forecast
        self._ledger.ended(number, self._clock_ns())

    def released(self, name: str) -> None:
        """The request may join the next step; a load that is still on its way goes on."""
        number, plan = self._parked.pop(name, (-1, None))
        if plan is not None:
            self._released[name] = plan.compute_ns
            self._ledger.joined(number)

    def handed_out(self) -> list[str]:
        """A step's outputs are there, and the next step has not been made: requests that may join it, by forecast.

        An engine that schedules ahead learns of a worker's look a step late; what is known here joins the next step.
        Only loads that began with an earlier step come into question.
        """
        now_ns = self._clock_ns()
        self._engine.handed_out(now_ns)
        if not self._parked or not self._facts.steps_ahead or self._is_full:
            return []
        parked = [(name, *one) for name, one in self._parked.items() if one[0] <= self._last_begun]
        price = self._price()
        found = released_at_hand_out(
            [
                CandidateLoad(
                    self._arrival_ns(number, plan),
                    plan.compute_ns,
                    plan.release,
                    price._replace(busy_ns=self._ledger.behind_ns(number, now_ns)),
                )
                for _name, number, plan in parked
            ],
            now_ns=now_ns,
            start_delay_ns=self._engine.wait_ns(now_ns),
            step_ns=self._release_lag_ns,
            decoding=len(self._decoding),
            prefills=len(self._cut) + len(self._released),
            step_fixed_ns=self._policy.step_fixed_ns(self.correction),
            first_tokens=self._first_tokens,
        )
        return [parked[index][0] for index in found]

    @property
    def has_parked(self) -> bool:
        """Whether a load's end of waiting may come from here, so that every step's outputs are wanted."""
        return bool(self._parked) and self._facts.steps_ahead

    def _arrival_ns(self, number: int, plan: LoadPlan) -> tuple[int, ...]:
        """When each layer of the load will have landed, by the ledger."""
        num_layers = self._policy.num_layers
        parts = plan_slices(num_layers, num_layers if plan.width is None else plan.width)
        return self._ledger.arrival_ns(number, [part.num_layers for part in parts])

    def forget(self, name: str) -> None:
        """The request is gone; its load may still be on the link, where nobody waits for it."""
        self._leaves_steps(name)
        self._ledger.joined(self._numbers.pop(name, -1))
        self._chosen.pop(name, None)
        self._parked.pop(name, None)
        self._readers.discard(name)

    def step_made(self, batch: StepBatch, requests: Mapping[str, Any]) -> StepWeights:
        """What the workers must know of the step that this batch makes, to weigh releases against it."""
        now_ns = self._clock_ns()
        self._joining_ns.clear()
        prefills: list[tuple[int, int]] = []
        decoding = context = self._first_tokens = 0
        for one in () if self._only_decodes(batch) else batch.all():
            if one.request in self._numbers:
                self._ledger.joined(self._numbers.pop(one.request))
                self._released.pop(one.request, None)
            num_tokens = one.num_tokens(requests)
            left = num_tokens - one.end
            if one.request in self._decoding and one.decodes(num_tokens):
                decoding, context = decoding + one.new, context + one.end
            else:
                prefills.append((one.computed, one.new))
                self._first_tokens += left <= 0
            if left > 0:
                self._cut[one.request] = (one.end, left)
                self._began.setdefault(one.request, self._last_number)
                self._decoding.discard(one.request)
            else:
                self._cut.pop(one.request, None)
                self._began.pop(one.request, None)
                self._decoding.add(one.request)
        self._last_begun = self._last_number
        self._step_expected_ns = self._policy.step_ns(prefills, decoding, context) if prefills else 0
        lasts_ns = round(self.correction.step_ns(self._step_expected_ns)) if prefills else self._engine.step_ns
        self._engine.step_made(now_ns, lasts_ns if batch.names else 0, prefills=bool(prefills))
        taken = sum(left for _, left in self._cut.values()) + len(self._decoding)
        budget = self._facts.token_budget
        self._is_full = budget is not None and taken >= budget
        return StepWeights(
            self._price(),
            self._is_full,
            tuple(self._began.values()),
            self._policy.step_fixed_ns(self.correction),
        )

    def _price(self) -> StallPrice:
        bystanders = len(self._decoding - self._readers)
        return self._policy.stall_price(bystanders, len(self._decoding) - bystanders, len(self._cut))

    @property
    def expected_ns(self) -> int:
        """The profile's time of the step that was made last; 0: it only decodes, or computes nothing."""
        return self._step_expected_ns

    def _only_decodes(self, batch: StepBatch) -> bool:
        """Whether the step is one more token for requests that were decoding before: nobody's state changes by it."""
        names = batch.names
        if self._cut or self._numbers or batch.num_tokens != len(names):
            return False
        return self._decoding.issuperset(names)

    def observed(self, observed: Observed) -> None:
        """The workers' measurements correct the profile."""
        self.forecast.observed(observed)
