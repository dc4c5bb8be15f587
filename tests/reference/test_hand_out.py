"""Releases at the hand-out: by forecast, never to start on nothing (REL-3, REL-4), and one after another."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference import hand_out
from lamella.reference.hand_out import CandidateLoad, released_at_hand_out
from lamella.reference.release import First, JustInTime, ReleaseView, StallPrice, WeighedRelease, Whole

LAYERS = 4
FORECASTING = (JustInTime(), JustInTime(40), JustInTime(None), WeighedRelease())
NONE_ELSE: dict[str, int] = {
    "now_ns": 1000,
    "start_delay_ns": 0,
    "step_ns": 50,
    "decoding": 0,
    "prefills": 0,
    "step_fixed_ns": 10,
}


def load(
    *arrival_ns: int, compute_ns: int = 400, release: Any = None, stall: StallPrice | None = None
) -> CandidateLoad:
    return CandidateLoad(arrival_ns, compute_ns, release or WeighedRelease(), stall)


def released(*loads: CandidateLoad, **told: int) -> list[int]:
    return released_at_hand_out(loads, **(NONE_ELSE | told))


# ---------------------------------------------------------------- what a newcomer should see


def test_what_will_have_landed_when_the_device_is_free_counts_as_landed() -> None:
    coming = load(1090, 1190, 1290, 1390)
    assert released(coming, start_delay_ns=89) == []
    assert released(coming, start_delay_ns=90) == [0]


def test_a_later_layer_is_met_by_the_layers_before_it() -> None:
    """With 4 decoding who would all stand, 10 ns of stall are worth a step of 50: the last layer is reached at +300."""
    price = StallPrice(4)
    assert released(load(900, 900, 900, 1310, stall=price), decoding=4) == [0]
    assert released(load(900, 900, 900, 1311, stall=price), decoding=4) == []


def test_a_rule_that_counts_landed_layers_is_left_to_the_workers_looks() -> None:
    landed = (900, 910, 920, 930)
    assert released(*(load(*landed, release=release) for release in (Whole(), First(), First(2)))) == []
    assert released(load(*landed, release=Whole()), load(*landed)) == [1], "and holds nobody else up"


def test_two_long_prefills_run_one_after_another_and_two_short_ones_together() -> None:
    landed = (900, 910, 920, 930)
    assert released(load(*landed), load(*landed)) == [0]
    assert released(load(*landed), prefills=1) == []
    short = load(*landed, compute_ns=8)
    assert released(short, short, short) == [0, 1]
    assert released(short, prefills=1) == [0]


def test_no_first_token_waits_for_a_load_longer_than_the_loads_request_would_for_the_next_chance() -> None:
    """The last layer lands 120 behind the start, and the next chance comes 150 later: one may wait, two may not."""
    coming = load(1000, 1040, 1080, 1220)
    told = {"start_delay_ns": 100, "step_ns": 150}
    assert [released(coming, **told, first_tokens=count) for count in (0, 1, 2)] == [[0], [0], []]


# ---------------------------------------------------------------- laws


def random_hand_out(rng: random.Random) -> tuple[list[CandidateLoad], dict[str, int]]:
    def one() -> CandidateLoad:
        price = StallPrice(rng.choice((0, 0.3, 2)), rng.choice((0, 0.3)), rng.choice((0, 100)))
        return load(
            *sorted(rng.randint(800, 1500) for _ in range(LAYERS)),
            compute_ns=rng.choice((4, 40, 400)),
            release=rng.choice((*FORECASTING, First())),
            stall=rng.choice((None, price)),
        )

    told = {
        "now_ns": 1000,
        "start_delay_ns": rng.choice((0, rng.randint(0, 300))),
        "step_ns": rng.choice((0, 50, 200)),
        "decoding": rng.randint(0, 8),
        "prefills": rng.choice((0, 0, 1, 2)),
        "step_fixed_ns": rng.choice((0, 10, 50)),
        "first_tokens": rng.choice((0, 0, 1, 3)),
    }
    return [one() for _ in range(rng.randint(1, 6))], told


def check(seed: int) -> None:
    rng = random.Random(seed)
    loads, told = random_hand_out(rng)
    found = hand_out.released_at_hand_out(loads, **told)
    assert found == sorted(set(found))
    for before, index in enumerate(found):
        one, behind = loads[index], len(loads) - index - 1
        assert one.release.needs_forecast
        assert one.arrival_ns[0] <= told["now_ns"] + told["start_delay_ns"], "it would start on nothing"
        assert (told["prefills"] + before) * one.compute_ns <= (1 + behind) * told["step_fixed_ns"], "it shares a step"
        earlier = [one._replace(arrival_ns=tuple(at - rng.randint(0, 90) for at in one.arrival_ns))]
        landings = earlier[0].arrival_ns
        sooner = earlier[0]._replace(arrival_ns=tuple(max(landings[: layer + 1]) for layer in range(LAYERS)))
        again = hand_out.released_at_hand_out([*loads[:index], sooner, *loads[index + 1 :]], **told)
        assert index in again, "what lands earlier is released later"
    for index, one in enumerate(loads):
        if not one.release.needs_forecast:
            continue
        before = sum(other < index for other in found)
        shares = (told["prefills"] + before) * one.compute_ns > (len(loads) - index) * told["step_fixed_ns"]
        view = ReleaseView(
            told["now_ns"],
            one.arrival_ns,
            (one.compute_ns // LAYERS,) * LAYERS,
            told["start_delay_ns"],
            told["step_ns"],
            told["decoding"],
            one.stall,
        )
        late_ns = told["first_tokens"] * max(0, one.arrival_ns[-1] - told["now_ns"] - told["start_delay_ns"])
        speaks_against = shares or late_ns > told["step_ns"] or one.release.release_ns(view) > told["now_ns"]
        assert (index in found) != speaks_against


SEEDS = 600


def test_hand_outs_keep_the_laws() -> None:
    for seed in range(SEEDS):
        check(seed)


@given(st.integers(min_value=SEEDS))
def test_the_laws_hold_on_any_seed(seed: int) -> None:
    check(seed)


@given(st.lists(st.integers(800, 1500), min_size=LAYERS, max_size=LAYERS), st.integers(0, 300), st.integers(0, 300))
def test_a_device_that_is_busy_longer_never_keeps_a_lone_load_back(arrival_ns: list[int], busy: int, more: int) -> None:
    coming = load(*sorted(arrival_ns), stall=StallPrice(2))
    if released(coming, start_delay_ns=busy):
        assert released(coming, start_delay_ns=busy + more) == [0]


# ---------------------------------------------------------------- wrong rules

RULE = released_at_hand_out
WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "prefills share a step": lambda patch: patch.setattr(hand_out, "waits_its_turn", lambda *_: False),
    "first tokens may wait": lambda patch: patch.setattr(
        hand_out, "released_at_hand_out", lambda loads, **told: RULE(loads, **(told | {"first_tokens": 0}))
    ),
    "every prefill waits": lambda patch: patch.setattr(hand_out, "waits_its_turn", lambda *_: True),
    "the step starts later than it does": lambda patch: patch.setattr(
        hand_out, "ReleaseView", lambda **told: replace(ReleaseView(**told), start_delay_ns=told["start_delay_ns"] + 50)
    ),
    "the step starts at once": lambda patch: patch.setattr(
        hand_out, "ReleaseView", lambda **told: replace(ReleaseView(**told), start_delay_ns=0)
    ),
    "nobody decodes": lambda patch: patch.setattr(
        hand_out, "ReleaseView", lambda **told: replace(ReleaseView(**told), victims=0)
    ),
    "stalls are free": lambda patch: patch.setattr(
        hand_out, "ReleaseView", lambda **told: replace(ReleaseView(**told), stall=StallPrice(0))
    ),
    "those behind do not count": lambda patch: patch.setattr(
        hand_out, "released_at_hand_out", lambda loads, **told: [i for i in (0,) if i in RULE(loads[:1], **told)]
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_rejected(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[wrong](monkeypatch)
    with pytest.raises(AssertionError):
        test_hand_outs_keep_the_laws()
