"""Marks become instants, step after step, in order, and exact although a GPU answers in a short float."""

import numpy as np

from lamella.connector.observations import HostMarks
from lamella.connector.step_clock import StepClock, TimedStep


class FloatMarks:
    """Marks that are instants in ns, and answer like CUDA events: milliseconds in 32 bits."""

    def __init__(self) -> None:
        self.reached_ns = 0

    def mark(self) -> int:
        raise AssertionError("a clock only compares marks")

    def between_ns(self, begin: int, end: int) -> int | None:
        return round(float(np.float32((end - begin) / 1e6)) * 1e6) if end <= self.reached_ns else None


def test_a_step_has_its_instants_when_the_device_has_reached_its_end() -> None:
    marks = FloatMarks()
    clock = StepClock(marks, mark=1_000, at_ns=50_000)
    step = TimedStep(begin=3_000, waits=[(2, 4_000, 4_500)], end=9_000)
    marks.reached_ns = 8_999
    assert clock.resolve(step) is None
    marks.reached_ns = 9_000
    assert clock.resolve(step) == (52_000, [(2, 53_000, 53_500)], 58_000)


def test_a_long_run_drifts_by_no_more_than_rounding() -> None:
    marks = FloatMarks()
    clock = StepClock(marks, mark=0, at_ns=0)
    worst = 0
    for number in range(1, 30_000):
        begin = number * 12_345_678
        marks.reached_ns = begin + 11_000_000
        found = clock.resolve(TimedStep(begin, [], begin + 11_000_000))
        assert found is not None
        worst = max(worst, abs(found[0] - begin))
    assert worst < 50_000, "after six minutes within 50 µs"


def test_on_a_host_marks_are_the_instants_themselves() -> None:
    marks = HostMarks()
    first = marks.mark()
    begin, end = marks.mark(), marks.mark()
    assert StepClock(marks, first, first).resolve(TimedStep(begin, [], end)) == (begin, [], end)
