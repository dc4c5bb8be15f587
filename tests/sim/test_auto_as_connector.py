"""The model's `auto` where steps are scheduled ahead knows no more and no less than the connector's scheduler side.

A real `AutoChoice` is told what happens in the world: who asks, which steps are made and handed out, what ended. It has
to choose and to release what the model does, at each look and each hand-out. Each wrong engine at the end is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from connector.test_auto_choice import auto_of, batch_of
from lamella.connector.batch_blocks import Scheduled
from lamella.reference.auto_view import Decision
from lamella.reference.slices import by_layer
from lamella.sim.ahead import AheadEngine, Pass
from lamella.sim.auto import AutoAheadEngine, AutoEngine
from lamella.sim.overheads import open_overheads
from lamella.sim.profiles import load_profile
from lamella.sim.requests import Job, Request
from lamella.sim.settings import SubmitAt
from lamella.sim.strategies import AUTO, Device, Regime
from lamella.sim.world import World

NEAR_NS = 2_000
"""Contexts that are a token longer or shorter make a step longer or shorter by some ns, and several steps by more."""
SHIPPED = "vllm-0.26-h200-llama-3.1-8b"


class Told(AutoAheadEngine):
    """Tells a connector's `AutoChoice` of all that happens, and compares."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.at_ns: int | None = None  # of what is told in arrears
        self.choice: Any = auto_of(self, steps_ahead=True)  # type: ignore[arg-type]
        self.compared = {"chosen": 0, "released": 0, "kept": 0, "silent": 0}
        self.called = False  # by the hand-out under way
        self.wanted: set[Pass] = set()  # whose report the connector asks for
        self._members: dict[str, SimpleNamespace] = {}
        self._context: dict[str, int] = {}

    def __call__(self) -> int:
        """The clock that the connector reads."""
        return self._clock.now_ns if self.at_ns is None else self.at_ns

    def _look(self) -> None:
        if self._clock.now_ns >= self._occupied_ns:
            for job in self._due:
                if job.transfer is None:
                    self._known_as(job)
                    self.choice.missed(str(job.sequence), 0, job.prompt_tokens)
        super()._look()

    def _known_as(self, job: Job) -> None:
        name = str(job.sequence)
        self._members[name], self._context[name] = SimpleNamespace(num_tokens=job.prompt_tokens), job.prompt_tokens

    def _planned(self, job: Job, decision: Decision) -> None:
        name, prompt = str(job.sequence), job.prompt_tokens
        self.choice.forecast.correction = self.correction
        arm = self.choice.choose(name, job.request.cached_tokens, 0, prompt)
        theirs = self.choice._chosen[name]
        assert (arm, theirs.chosen.width) == (decision.arm, decision.chosen.width)
        assert theirs.chosen.ttft_ns == pytest.approx(decision.chosen.ttft_ns, abs=NEAR_NS)
        assert theirs.chosen.cost_ns == pytest.approx(decision.chosen.cost_ns, abs=NEAR_NS)
        assert (theirs.compute_ns, theirs.load_ns) == (decision.compute_ns, decision.load_ns)
        self.choice.planned(name, job.sequence)
        self._known_as(job)
        self.compared["chosen"] += 1
        super()._planned(job, decision)

    def _begin_pass(self, made: Pass) -> None:
        parts = [
            Scheduled(str(job.sequence), job.request.cached_tokens + chunk.first_token, chunk.num_tokens)
            for job, chunk in made.taken
        ]
        joining = {part.request for part in parts}
        decoding = [name for name in self.choice._decoding if name not in joining and self._decodes_in(name, made)]
        assert len(decoding) == made.decode_batch
        for name in decoding:
            self._context[name] += 1
            parts.append(Scheduled(name, self._context[name] - 1, 1))
        self.at_ns = made.made_ns
        self.choice.step_made(batch_of(*parts), self._members)
        self.at_ns = None
        if self.choice.has_parked:
            self.wanted.add(made)
        super()._begin_pass(made)
        assert self.choice._engine.step_ns == self._device.step_ns

    def _decodes_in(self, name: str, made: Pass) -> bool:
        """Whether the last token of the request was not scheduled before."""
        before = [job for earlier in self._passes for job in earlier.done]
        return all(str(job.sequence) != name for job in before)

    def _finish(self, done: Any) -> None:
        for job in done:
            self.choice.forget(str(job.sequence))
        super()._finish(done)

    def _hand_out(self, made: Pass, last: Pass) -> None:
        for job in made.reported:
            self.choice.released(str(job.sequence))
        for job, _bytes, _ns in self._told.get(made, ()):
            self.choice.load_ended(job.sequence)
        says = bool(made.num_tokens or made.reported or self._told.get(made)) or made in self.wanted
        self.called = False
        super()._hand_out(made, last)
        assert self.called == says, "vLLM hands an empty output on to no connector"
        self.compared["silent"] += not says

    def _release_by_forecast(self) -> None:
        self.called = True
        self.choice.forecast.correction = self.correction
        theirs = {int(name) for name in self.choice.handed_out()}
        before = set(self._parked)
        super()._release_by_forecast()
        mine = before - set(self._parked)
        assert mine == theirs, self._clock.now_ns
        for number in mine:
            self.choice.released(str(number))
        self.compared["released"] += len(mine)
        self.compared["kept"] += len(before) - len(mine)


Cell = tuple[int, int, int, int, int]
"""(users, hit, new tokens, tokens generated, bystanders)"""
CELLS: list[Cell] = [
    (1, 15_360, 768, 16, 0),
    (4, 15_360, 768, 16, 0),
    (4, 15_360, 768, 16, 8),
    (8, 15_360, 768, 16, 0),
    (4, 15_360, 2_048, 16, 0),
    (8, 12_288, 2_866, 50, 0),
]


def check(cell: Cell, seed: int) -> dict[str, int]:
    """Runs the cell with all comparisons; returns how many there were of each kind."""
    users, hit, new, output, bystanders = cell
    device = Device(load_profile(), extrapolate=True).with_overheads(open_overheads(SHIPPED).overheads)
    made = device.engine(AUTO, seed)
    assert isinstance(made, partial)
    world = World(
        device.compute(AUTO),
        AUTO.order,
        AUTO.release,
        replace(device.settings(), submit_at=SubmitAt.POLL, admits_itself=True),
        hardware=device.hardware(),
        make_engine=partial(Told, **made.keywords, inputs_behind_ns=600_000),
    )
    for _ in range(bystanders):
        world.arrive_at(0, Request(0, 1_024, 400))
    requests = [device.request(Regime(hit, new, users, output), AUTO, tag) for tag in range(5 * users)]
    world.loop_closed(users, requests, starts_ns=[10**9 if bystanders else 0] * users)
    world.run()
    engine = world._engine
    assert isinstance(engine, Told)
    assert engine.compared["chosen"] == 5 * users
    return engine.compared


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("seed", range(3))
def test_the_connector_chooses_and_releases_what_the_model_does(cell: Cell, seed: int) -> None:
    compared = check(cell, seed)
    assert compared["released"] > 0, compared
    assert cell[0] == 1 or compared["kept"] > 0, compared
    assert compared["silent"] > 0, compared


# ---------------------------------------------------------------- wrong engines


def _sees_slices_land(patch: pytest.MonkeyPatch) -> None:
    def of_the_link(engine: AutoAheadEngine, job: Job) -> tuple[int, ...]:
        ((_, landings),) = engine._loads.forecast([job])
        return by_layer(landings, job.request.load.slice_layers)

    patch.setattr(AutoAheadEngine, "_arrival_ns", of_the_link)


def _sees_the_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AutoAheadEngine, "_engine_wait_ns", AheadEngine._engine_wait_ns)


def _knows_decode_steps_from_the_profile(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AutoAheadEngine, "_decode_ns", AutoEngine._decode_ns)


def _makes_steps_before_anybody_asked(patch: pytest.MonkeyPatch) -> None:
    begin = AutoAheadEngine._begin_pass

    def wrong(engine: AutoAheadEngine, made: Pass) -> None:
        made.made_ns = made.polled_ns
        begin(engine, made)

    patch.setattr(AutoAheadEngine, "_begin_pass", wrong)


def _hears_of_ends_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AutoAheadEngine, "_load_ended", AutoEngine._load_ended)


def _forgets_who_has_a_last_token_to_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AutoAheadEngine, "_num_decoding", AutoEngine._num_decoding)


def _counts_who_joins_twice(patch: pytest.MonkeyPatch) -> None:
    def wrong(engine: AutoAheadEngine, job: Job) -> None:
        job.due = True
        engine._let_run_ns[job.sequence] = 10**7

    patch.setattr(AutoAheadEngine, "_join", wrong)


class _All(set[Pass]):
    def __contains__(self, made: object) -> bool:
        return True


def _hears_of_passes_that_say_nothing(patch: pytest.MonkeyPatch) -> None:
    begin = AutoAheadEngine._begin_pass

    def wrong(engine: AutoAheadEngine, made: Pass) -> None:
        engine._asked = _All()
        begin(engine, made)

    patch.setattr(AutoAheadEngine, "_begin_pass", wrong)


def _asks_for_no_report(patch: pytest.MonkeyPatch) -> None:
    begin = AutoAheadEngine._begin_pass

    def wrong(engine: AutoAheadEngine, made: Pass) -> None:
        begin(engine, made)
        engine._asked.clear()

    patch.setattr(AutoAheadEngine, "_begin_pass", wrong)


WRONG: list[Callable[[pytest.MonkeyPatch], None]] = [
    _sees_slices_land,
    _sees_the_device,
    _knows_decode_steps_from_the_profile,
    _makes_steps_before_anybody_asked,
    _hears_of_ends_at_once,
    _forgets_who_has_a_last_token_to_come,
    _counts_who_joins_twice,
    _hears_of_passes_that_say_nothing,
    _asks_for_no_report,
]


@pytest.mark.parametrize("plant", WRONG)
def test_a_wrong_engine_is_rejected(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for cell in CELLS:
            check(cell, 0)
