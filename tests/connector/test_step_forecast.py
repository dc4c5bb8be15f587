"""A release just in time is timed by the prefill that comes, and not by the step that was last."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.test_quiet_steps import Engine
from lamella.connector import step_forecast
from lamella.connector.auto_choice import AutoChoice
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.release_look import may_run
from lamella.connector.step_forecast import StepForecast, read_profile
from lamella.connector.step_orders import Ended, LoadPlan, Observed, StepOrders, StepReport
from lamella.connector.vllm_scheduler import SchedulerSide
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.cuda_ext.transfer import CopyMethod, Progress, SliceTimes, TransferState
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.release import parse_release
from lamella.reference.slices import plan_slices
from scheduler_side import Request, done

MS = 1_000_000
LAYERS = 32
SPACE = KeySpace("m", "bfloat16", ObjectForm.BLOCK, "logical", 256, 0, 1, (0, LAYERS))
FACTS = EngineFacts((16,), 131_072, 1, SPACE, token_budget=8_192)
JIT = ConnectorSettings(layers_per_slice=1, release="jit")


class Landing:
    """A load of which so many layers have landed, one each millisecond."""

    slices = plan_slices(LAYERS, 1)

    def __init__(self, landed: int) -> None:
        self._landed = landed
        self._began_ns = time.monotonic_ns() - landed * MS

    def query(self) -> Progress:
        return Progress(
            TransferState.RUNNING, self._landed, self._landed, CopyMethod.AUTO, 0, self._began_ns, self._began_ns
        )

    def timestamps_ns(self) -> SliceTimes:
        landed = tuple(self._began_ns + (layer + 1) * MS for layer in range(self._landed))
        return SliceTimes(landed, landed + (0,) * (LAYERS - self._landed))


def runs(landed: int, last_step_ms: int, plan: LoadPlan | None) -> bool:
    """Whether jit lets the request run, when a decode step of so many ms has just ended."""
    orders = StepOrders(num_tokens=1, num_decoding=1)
    return may_run(parse_release("jit"), plan, Landing(landed), orders, LAYERS, last_step_ms * MS, 0)  # type: ignore[arg-type]


def forecast(compute_ms: int) -> LoadPlan:
    return LoadPlan(None, parse_release("jit"), compute_ms * MS, LAYERS * MS)


def test_jit_goes_by_the_prefill_that_was_forecast_whatever_the_last_step_took() -> None:
    for last_step_ms in (1, 5, 500):
        assert runs(2, last_step_ms, forecast(64))  # 2 ms a layer, and one lands each ms: it never stalls
        assert not runs(2, last_step_ms, forecast(16))  # half of the load must be there before it may begin
        assert runs(17, last_step_ms, forecast(16))


def test_without_a_forecast_the_last_step_stands_for_the_prefill() -> None:
    assert not runs(2, 5, None)
    assert runs(2, 500, None)


def loaded_after(engine: Engine, num_tokens: int) -> LoadPlan | None:
    """The plan of a load of two chunks, for a request of so many tokens; the chunks are stored first."""
    engine.add("first", 128)
    orders = engine.step(first=128)
    done(engine.side, stores={one.number: Ended(1, True) for one in orders.stores})
    request = Request("later", [*range(128), *range(5_000, 5_000 + num_tokens - 128)])
    wanted, parked = engine.side.matched_tokens(request, 0)
    assert (wanted, parked) == (128, True)
    engine.side.allocated(request, ([*range(900, 908)],), wanted)
    (load,) = engine.step(first=1).loads
    return load.plan


@pytest.mark.parametrize("release", ["jit", "jit:2ms", "jit:step"])
def test_a_load_released_just_in_time_carries_the_profiles_forecast_of_its_first_step(release: str) -> None:
    engine = Engine(release=release)
    plan = loaded_after(engine, 4_000)
    assert plan is not None
    assert (plan.width, plan.release) == (None, parse_release(release))
    expected = StepForecast(engine.side._settings, engine.side._facts)
    assert plan.compute_ns == expected.policy.prefill_ns(128, 3_872, expected.correction)[0]


@pytest.mark.parametrize(
    "settings", [{}, {"release": "first:2"}, {"release": "whole"}, {"layers_per_slice": 0}], ids=str
)
def test_where_the_release_asks_for_no_forecast_none_is_made(settings: dict[str, str]) -> None:
    engine = Engine(**settings)
    assert loaded_after(engine, 4_000) is None
    assert engine.side._forecast is None


def test_only_steps_in_which_somebody_computes_several_tokens_are_measured() -> None:
    engine = Engine(release="jit")
    engine.add("a", 100)
    assert engine.step(a=100).expected_ns > 0
    assert engine.step(a=1).expected_ns == 0


PART = st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 5), st.sampled_from([100, 400, 600]))


@given(st.lists(st.lists(PART, max_size=3, unique_by=lambda part: part[0]), max_size=8))
def test_steps_are_measured_by_what_they_compute_of_prompts_and_of_drafts(
    steps: list[list[tuple[str, int, int, int]]],
) -> None:
    """Of each request in a step: drafts behind its last token, how many of them are right, and a prompt's next part."""
    engines = [Engine(release="jit"), Engine(layers_per_slice="auto", profile="h200-llama-3.1-8b")]
    policy = StepForecast(JIT, engines[0].side._facts).policy
    for engine in engines:
        for name in "abc":
            engine.add(name, 1_200)
    for step in steps:
        for engine in engines:
            scheduled, right, prefills, decoding, context = {}, {}, [], 0, 0
            for name, drafts, accepted, part in step:
                computed, num_tokens = engine.computed.get(name, 0), engine.requests[name].num_tokens
                if computed and num_tokens - computed == 1:
                    scheduled[name], right[name] = 1 + drafts, min(accepted, drafts)
                    decoding, context = decoding + 1 + drafts, context + computed + 1 + drafts
                else:
                    scheduled[name] = min(part, num_tokens - computed)
                    prefills.append((computed, scheduled[name]))
            found = engine.step(**scheduled).expected_ns
            assert found == (policy.step_ns(prefills, decoding, context) if prefills else 0)
            for name, accepted in right.items():
                engine.computed[name] += accepted + 1 - scheduled[name]
                missing = engine.computed[name] + 1 - engine.requests[name].num_tokens
                engine.requests[name].all_token_ids += [7] * missing


def test_what_the_workers_observe_corrects_the_forecast() -> None:
    engine = Engine(release="jit")
    before = StepForecast(engine.side._settings, engine.side._facts).plan(128, 128, 3_872)
    seen = Observed(steps=1, step_expected_ns=10 * MS, step_ns=25 * MS)
    done(engine.side, observed=seen)
    plan = loaded_after(engine, 4_000)
    assert plan is not None
    assert plan.compute_ns == pytest.approx(2.5 * before.compute_ns, rel=1e-6)


def test_auto_and_jit_forecast_the_same() -> None:
    """One definition: the same profile, the same correction, the same first step."""
    auto = AutoChoice(ConnectorSettings(layers_per_slice="auto"), FACTS, Metrics())
    jit = StepForecast(JIT, FACTS)
    for observed in (
        Observed(),
        Observed(steps=3, step_expected_ns=30 * MS, step_ns=45 * MS),
        Observed(loads=1, slices=32, load_bytes=4_096 * 131_072, load_ns=20 * MS),
    ):
        auto.observed(observed)
        jit.observed(observed)
        assert auto.correction == jit.correction
        auto.choose("a", 15_104, 0, 16_000)
        planned = auto.planned("a", 0)
        plan = jit.plan(15_104, 15_104, 896)
        assert plan.compute_ns == planned.compute_ns
        assert plan.load_ns == pytest.approx(planned.load_ns, rel=0.05)  # auto's slices may be wider
        auto.forget("a")
        auto.load_ended(0)


@pytest.mark.parametrize("times", [1 / 4, 1.0, 4.0])
def test_loads_in_one_slice_behind_a_device_that_always_computes_put_the_link_right(times: float) -> None:
    """Of each is known that it took the link's time and at most a step of 20 ms more."""
    forecast = StepForecast(JIT, FACTS)
    policy, tokens = forecast.policy, 15_360
    took_ns = round(policy.wire_ns(tokens) * times) + policy.slice_ns
    for _ in range(60):
        seen = Observed().with_bounded_load(tokens * FACTS.token_bytes, took_ns - 5 * MS, took_ns + 15 * MS)
        assert not StepReport(observed=seen).is_empty
        forecast.observed(seen)
    within = [(took_ns + more_ns) / policy.wire_ns(tokens) for more_ns in (-5 * MS, 15 * MS)]
    assert forecast.correction.wire == pytest.approx(sorted((1.0, *within))[1], rel=0.2)


SETTINGS: list[dict[str, object]] = [
    {"layers_per_slice": 1},
    {},
    {"layers_per_slice": 1, "release": "jit"},
    {"layers_per_slice": "auto"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_profile_is_read_once_whoever_needs_it(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(step_forecast, "read_profile", lambda name: (read.append(name), read_profile(name))[1])
    SchedulerSide(ConnectorSettings.from_mapping(settings), FACTS)
    assert read == ["h200-llama-3.1-8b"]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_profile_that_is_none_stops_an_engine_whether_it_is_needed_or_not(settings: dict[str, object]) -> None:
    named = ConnectorSettings.from_mapping({**settings, "profile": "h100"})
    with pytest.raises(ValueError, match=r"profile 'h100' cannot be used: .*h200-llama-3\.1-8b"):
        SchedulerSide(named, FACTS)
