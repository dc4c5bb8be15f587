"""What is recommended follows from the outcomes: the setting, its margin, where it pays, and when to leave it off."""

from dataclasses import replace

import pytest

from lamella.sim.arrivals import Conversations
from lamella.sim.parallel import Runner, Running
from lamella.sim.profiles import load_profile
from lamella.sim.serving import Outcome, Slo, serve
from lamella.sim.strategies import AUTO, CHUNK_MAJOR, INTERLEAVED, RECOMPUTE, Device, Regime, Strategy, parse_strategy
from lamella.sim.study import Study, answer_lines, compute_study, plan_study, study_strategies

DEVICE = Device(load_profile())
FIRST, WIDE, JIT = (parse_strategy(f"fifo/{rest}") for rest in ("1/first", "8/first", "1/jit"))
TRIED = (CHUNK_MAJOR, RECOMPUTE, FIRST, WIDE, JIT, AUTO, INTERLEAVED)
REGIME = Regime(15_152, 768, 2, 50)
PLAIN = serve(DEVICE, Regime(1_024, 64, 1), CHUNK_MAJOR, 1, 0)


def made_up(changes: dict[int, dict[Strategy, tuple[float, ...]]], latency: float = 1.0, here: int = 2) -> Study:
    """A study in which a strategy's mean TTFT is so many times chunk-major's, in each repeat."""

    def outcome(strategy: Strategy, factor: float) -> Outcome:
        answer = latency if strategy.layerwise else 1.0
        return PLAIN._replace(strategy=strategy, mean_ttft_ns=factor * 1e8, mean_end_ns=answer * 1e9)

    factors = {CHUNK_MAJOR: (1.0, 1.0), RECOMPUTE: (3.0, 3.0), INTERLEAVED: (1.5, 1.5)}
    outcomes = tuple(
        tuple(
            tuple(outcome(one, {**factors, **given}.get(one, (1.2, 1.2))[repeat]) for one in TRIED)
            for repeat in range(2)
        )
        for given in changes.values()
    )
    return Study(replace(REGIME, concurrency=here), TRIED, tuple(changes), outcomes)


def test_the_best_is_recommended_with_its_margin_over_the_next_of_another_kind() -> None:
    found = made_up({2: {FIRST: (0.7, 0.7), WIDE: (0.75, 0.75), JIT: (0.77, 0.77)}}).recommend()
    assert found.strategy == found.best_layerwise == FIRST
    assert (found.change.mean, found.change.error) == (pytest.approx(-0.3), pytest.approx(0, abs=1e-12))
    assert found.next_best == JIT
    assert found.margin == pytest.approx(0.77 / 0.7 - 1)


def test_of_equal_ones_the_simplest_is_recommended() -> None:
    assert made_up({2: {FIRST: (0.7, 0.7), WIDE: (0.704, 0.704), JIT: (0.7, 0.7)}}).recommend().strategy == WIDE
    assert made_up({2: {FIRST: (0.703, 0.703), JIT: (0.70, 0.70)}}).recommend().strategy == FIRST


def test_a_gain_that_repeats_do_not_bear_out_is_left_off() -> None:
    doubtful = made_up({2: {FIRST: (0.90, 1.04)}})
    found = doubtful.recommend()
    assert found.best_layerwise == FIRST
    assert found.change.mean == pytest.approx(-0.03)
    assert found.strategy == CHUNK_MAJOR
    said = answer_lines(doubtful, Slo())[-1]
    assert said.startswith("Leave it off (chunk-major): the best layerwise setting, fifo/1")
    assert said.endswith(
        "The repeats do not show that gain: two standard errors less it is -11.0%, and 1% counts; more --repeats tell."
    )


def test_a_setting_that_gains_nothing_is_left_off_without_a_word_of_repeats() -> None:
    assert "repeats" not in answer_lines(made_up({2: {FIRST: (1.01, 1.02)}}), Slo())[-1]


def test_a_gain_that_costs_answers_ten_times_as_much_is_left_off_and_says_so() -> None:
    said = answer_lines(made_up({2: {FIRST: (0.9, 0.9)}}, latency=1.2), Slo())[-1]
    assert said.startswith("Leave it off (chunk-major): ")
    assert said.endswith("Its answers end later by more than 10 times what its first tokens gain.")


def test_what_is_off_is_the_better_of_both() -> None:
    found = made_up({2: {RECOMPUTE: (0.5, 0.5), FIRST: (0.6, 0.6)}}).recommend()
    assert found.strategy == found.off == RECOMPUTE


def test_where_the_other_thing_that_is_off_ends_answers_earlier_that_is_said() -> None:
    study = made_up({2: {FIRST: (0.7, 0.7), RECOMPUTE: (0.9, 0.9)}})
    assert not [line for line in answer_lines(study, Slo()) if line.startswith("Of what is off")]
    slow = tuple(
        tuple(
            tuple(one._replace(mean_end_ns=2e9) if one.strategy == RECOMPUTE else one for one in repeat)
            for repeat in row
        )
        for row in study.outcomes
    )
    *_, traded, last = answer_lines(replace(study, outcomes=slow), Slo())
    later = "Of what is off, chunk-major's first tokens come 11.1% later than recompute's"
    assert traded == f"{later}, and its answers end 50.0% earlier."
    assert "against recompute, the better of what is off" in last


def test_an_slo_that_nothing_keeps_is_said() -> None:
    study = made_up({2: {FIRST: (0.7, 0.7)}})
    kept = answer_lines(study, Slo(ttft_ns=10**9))
    late = tuple(tuple(tuple(one._replace(slo_met=0.0) for one in repeat) for repeat in row) for row in study.outcomes)
    said = "Nothing that was tried keeps within the SLO at 2 at once: ask for fewer users, or more time."
    assert said not in kept
    assert answer_lines(replace(study, outcomes=late), Slo(ttft_ns=10**9))[-2] == said


def test_interleaving_is_a_control_and_never_recommended() -> None:
    found = made_up({2: {INTERLEAVED: (0.3, 0.3), FIRST: (0.8, 0.8)}}).recommend()
    assert found.strategy == FIRST
    assert found.next_best == INTERLEAVED
    assert found.margin < 0


def test_earlier_first_tokens_for_later_answers_are_left_to_the_reader() -> None:
    study = made_up({2: {FIRST: (0.7, 0.7)}}, latency=1.05)
    assert answer_lines(study, Slo())[-1].startswith("Turn it on only if first tokens matter more than whole answers: ")


def test_a_first_token_is_not_bought_with_ten_times_as_much_of_the_answer() -> None:
    """30 ms earlier for 500 ms later is off; for 200 ms later it is left to the reader."""
    assert not made_up({2: {FIRST: (0.7, 0.7)}}, latency=1.5).recommend().strategy.layerwise
    assert made_up({2: {FIRST: (0.7, 0.7)}}, latency=1.2).recommend().strategy == FIRST


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((0.7, 0.8, 0.9), "fifo/1/first pays at every concurrency tried (1 .. 4)"),
        ((0.7, 0.8, 1.1), "fifo/1/first pays up to 2 at once and no longer at 4"),
        ((0.7, 1.1, 0.9), "fifo/1/first pays at 1, 4 at once and not at 2"),
        ((1.1, 1.15, 1.1), "fifo/1/first pays at no concurrency tried (1 .. 4)"),
    ],
)
def test_break_even_says_where_it_pays(factors: tuple[float, float, float], said: str) -> None:
    study = made_up({row: {FIRST: (one, one)} for row, one in zip((1, 2, 4), factors, strict=True)})
    assert said in answer_lines(study, Slo())[0]
    assert "Interleaving (round_robin/1/first) pays at no concurrency tried (1 .. 4)." in answer_lines(study, Slo())[0]


def test_a_real_study_has_the_original_pattern_and_recommends_against_it() -> None:
    """Alone, early release gains whatever the order; with four at once interleaving loses, one after another gains."""
    plan = plan_study(DEVICE, Regime(15_152, 768, 4, 50), (1, 4), TRIED, requests_per_user=6, repeats=4)
    study = compute_study(plan, seed=3)
    assert study.change(1, INTERLEAVED).certain_gain
    assert study.change(4, INTERLEAVED).mean > study.change(4, FIRST).mean + 0.25
    found = study.recommend()
    assert found.strategy in (FIRST, JIT)
    assert found.change.mean < -0.25
    assert found.pays_at == (1, 4)
    assert found.control_pays_at == (1,)


def test_strategies_of_a_cell_get_the_same_arrivals_and_processes_change_nothing() -> None:
    plan = plan_study(DEVICE, REGIME, (1,), TRIED[:3], requests_per_user=2, repeats=2, slo=Slo(ttft_ns=10**8))
    here = compute_study(plan, seed=3)
    assert compute_study(plan, 3, Running(Runner.PROCESSES, 2)) == here
    assert compute_study(plan, 4) != here
    assert here.change(1, here.off(1)) == (0.0, 0.0), "paired: nothing differs from itself"


def test_a_study_of_conversations_is_checked_at_their_longest_prompt() -> None:
    with pytest.raises(ValueError, match="does not cover"):
        plan_study(DEVICE, REGIME, (1,), TRIED, arrivals=Conversations(2000, 64))


def test_a_choice_by_request_is_named_if_it_is_better_and_not_if_it_is_equal() -> None:
    def recommended(factor: float) -> str:
        study = made_up({2: {FIRST: (0.7, 0.7), AUTO: (factor, factor)}})
        return answer_lines(study, Slo())[-1]

    assert recommended(0.6).startswith("Turn it on: auto, which chooses for each request: mean TTFT -40.0%")
    assert recommended(0.698).startswith("Turn it on: width 1, order fifo, release first: mean TTFT -30.0%")


def test_the_usual_strategies_fit_the_model() -> None:
    tried = study_strategies(4)
    assert {one.width for one in tried if one.layerwise and not one.chooses} == {1, 2, 4}
    assert tried[-1] == INTERLEAVED
    DEVICE.check(REGIME, study_strategies(DEVICE.profile.num_layers))


@pytest.mark.parametrize(
    ("strategies", "options", "message"),
    [
        ((CHUNK_MAJOR, INTERLEAVED), {}, "needs a layerwise strategy besides interleaving"),
        (TRIED, {"repeats": 0}, "repeats must be at least 1, got 0"),
        (TRIED, {"requests_per_user": 0}, "requests must be at least 1, got 0"),
    ],
)
def test_an_impossible_study_is_refused(strategies: object, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_study(DEVICE, REGIME, (1,), strategies, **options)  # type: ignore[arg-type]


def test_an_slo_bounds_both_or_either() -> None:
    with pytest.raises(ValueError, match="an SLO must be positive, got ttft_ns 0"):
        Slo(ttft_ns=0)
    strict = serve(DEVICE, REGIME, CHUNK_MAJOR, 3, 0, slo=Slo(ttft_ns=1))
    loose = serve(DEVICE, REGIME, CHUNK_MAJOR, 3, 0, slo=Slo(tpot_ns=10**10))
    assert (strict.slo_met, strict.goodput_per_s) == (0.0, 0.0)
    assert (loose.slo_met, loose.goodput_per_s) == (1.0, loose.requests_per_s)
