"""When the device is through with what was made: stories of a fast and a slow host, and the recursion itself."""

import random
from collections.abc import Callable

import pytest

from lamella.reference.engine_clock import EngineClock

STEP = 50


def clock_of(joining_ns: int = 30) -> EngineClock:
    return EngineClock(steps_ahead=True, step_ns=STEP, now_ns=0, joining_ns=joining_ns)


def decode(clock: EngineClock, from_ns: int, apart_ns: int, count: int, lasts_ns: int = STEP) -> int:
    """So many decode steps, each handed out when the next has been made; returns the last hand-out."""
    for number in range(count):
        clock.step_made(from_ns + number * apart_ns, lasts_ns, prefills=False)
        clock.handed_out(from_ns + (number + 1) * apart_ns)
    return from_ns + count * apart_ns


def test_where_the_host_is_quick_the_device_begins_a_step_when_the_one_before_is_handed_out() -> None:
    """The first is made at 1000 and the second, while that computes, at 1005; from then on one waits for the device."""
    clock = clock_of()
    clock.step_made(1000, STEP, prefills=False)
    clock.step_made(1005, STEP, prefills=False)
    clock.handed_out(1050)
    now = decode(clock, 1050, STEP, 20)
    assert clock.wait_ns(now) == pytest.approx(STEP, abs=1)
    assert clock.wait_ns(now + 20) == pytest.approx(STEP - 20, abs=1)
    assert clock.wait_ns(now + 200) == 0


def test_where_launching_takes_the_host_longer_the_device_is_free_at_each_hand_out() -> None:
    """Steps come every 90 and compute for 50: each is launched when it is made, and through before the next look."""
    clock = clock_of()
    now = decode(clock, 1000, 90, 20)
    assert clock.wait_ns(now) == 0
    assert clock.step_ns == pytest.approx(90, abs=1)


def test_a_step_with_a_prompt_begins_when_it_is_prepared_and_not_when_its_launch_is_through() -> None:
    """Made at 2000 behind idle steps, its first layer 30 later; its launch ends at 2200, which the hand-out awaits."""
    clock = clock_of()
    clock.step_made(1990, 0, prefills=False)
    clock.step_made(2000, 400, prefills=True)
    clock.handed_out(2200)
    assert clock.wait_ns(2200) == 2000 + 30 + 400 - 2200


def test_an_engine_that_does_not_schedule_ahead_computes_nothing_while_it_schedules() -> None:
    clock = EngineClock(steps_ahead=False, step_ns=STEP, now_ns=0)
    clock.step_made(100, 400, prefills=True)
    assert clock.wait_ns(110) == 0


def test_an_idle_engine_is_free_and_said_to_be_idle() -> None:
    clock = clock_of()
    clock.step_made(100, 0, prefills=False)
    assert (clock.is_idle, clock.wait_ns(100)) == (True, 0)
    clock.step_made(110, 40, prefills=False)
    assert (clock.is_idle, clock.wait_ns(110)) == (False, 40)


def test_decode_steps_are_timed_from_one_to_the_next_and_a_pause_counts_as_no_more_than_four() -> None:
    clock = clock_of()
    decode(clock, 0, 70, 40)
    assert clock.step_ns == pytest.approx(70, abs=1)
    clock.step_made(2800 + 100_000, STEP, prefills=False)
    assert clock.step_ns <= 70 + (4 * 70 - 70) / 4 + 1


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1 and 5"):
        EngineClock(steps_ahead=True, step_ns=-1, now_ns=0, joining_ns=5)


def check(seed: int) -> None:
    """With true lengths it is the device to the nanosecond, where launches are either hidden or long."""
    rng = random.Random(seed)
    clock, joining = clock_of(), 30
    now = ends = before = 0
    for _ in range(30):
        prefills = rng.random() < 0.3
        lasts = rng.randint(100, 400) if prefills else rng.choice((0, STEP))
        clock.step_made(now, lasts, prefills=prefills)
        before, ends = ends, (max(ends, now + joining * prefills) + lasts if lasts else ends)
        launched = max(before, now + STEP)
        if launched > before or rng.random() < 0.3:
            launched = max(now + STEP, before + 101 + rng.randint(0, 300))
        now = launched  # and handed out
        clock.handed_out(now)
        assert clock.wait_ns(now) == max(0, ends - now)


def test_it_is_the_device_to_the_nanosecond() -> None:
    for seed in range(300):
        check(seed)


def test_steps_forecast_twice_too_long_do_not_add_up() -> None:
    clock = clock_of(0)
    now = 0
    for _ in range(50):
        clock.step_made(now, 800, prefills=True)
        now += 400
        clock.handed_out(now)
        assert clock.wait_ns(now) <= 800


def _counts_from_the_hand_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineClock, "handed_out", lambda clock, now_ns: setattr(clock, "_before_ns", now_ns))


def _never_looks_at_hand_outs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineClock, "handed_out", lambda clock, now_ns: None)


def _knows_no_preparing(patch: pytest.MonkeyPatch) -> None:
    made = EngineClock.step_made
    patch.setattr(
        EngineClock,
        "step_made",
        lambda clock, now_ns, lasts_ns, *, prefills: made(clock, now_ns, lasts_ns, prefills=False),
    )


WRONG: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (_counts_from_the_hand_out, test_it_is_the_device_to_the_nanosecond),
    (_counts_from_the_hand_out, test_where_launching_takes_the_host_longer_the_device_is_free_at_each_hand_out),
    (_never_looks_at_hand_outs, test_steps_forecast_twice_too_long_do_not_add_up),
    (_knows_no_preparing, test_it_is_the_device_to_the_nanosecond),
]


@pytest.mark.parametrize(("plant", "noticed_by"), WRONG)
def test_a_wrong_clock_is_told_apart(
    plant: Callable[[pytest.MonkeyPatch], None], noticed_by: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        noticed_by()
