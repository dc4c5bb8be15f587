"""The model against recorded runs: a run that the world itself made is predicted, and every figure can be wrong."""

import json
from dataclasses import replace

import pytest

from lamella.sim.checks import Where
from lamella.sim.overheads import MeasuredOverheads, Overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import read_recorded
from lamella.sim.splits import Split
from lamella.sim.strategies import Device
from lamella.sim.validate import Validation, validate
from recorded_run import ARMS, CELLS, TRUE, cell, engine_row, lines_of, recorded_lines, repeat_row, request_row

DEVICE = Device(load_profile())
KNOWN = MeasuredOverheads("an engine", "made up", TRUE, {})
SPLIT = Split(("a", "b", "c"), ("d", "e", "f"))


@pytest.fixture(scope="module")
def validation() -> Validation:
    return validate(read_recorded(recorded_lines(CELLS, DEVICE, TRUE), "a run"), DEVICE, SPLIT)


def test_overheads_fitted_on_some_cells_predict_the_others(validation: Validation) -> None:
    assert validation.fitted
    assert validation.test.error_at(0.5) <= 0.02
    assert validation.test.error_at(1.0) <= 0.06
    assert validation.test.right_signs == len(validation.test.shown) >= 3
    assert validation.test.largest_regret <= 0.03


def test_without_the_overheads_the_same_run_is_not_predicted(validation: Validation) -> None:
    run = read_recorded(recorded_lines(CELLS, DEVICE, TRUE), "a run")
    bare = validate(run, DEVICE, SPLIT, MeasuredOverheads("none", "nothing", Overheads(), {}))
    assert not bare.fitted
    assert bare.test.error_at(0.5) > 5 * validation.test.error_at(0.5)


def test_true_overheads_without_scatter_predict_a_run_to_the_microsecond() -> None:
    still = replace(TRUE, scatter_permille=0, drift_permille=0)
    run = read_recorded(recorded_lines(CELLS[:2], DEVICE, still, repeats=2), "a run")
    exact = validate(run, DEVICE, Split((), ("a", "b")), replace(KNOWN, overheads=still))
    assert exact.test.errors[-1] < 1e-4
    for arm in exact.test.arms:
        assert (arm.measured.parts is None) == (arm.predicted.parts is None)
        for mine, theirs in zip((arm.measured.parts or ())[1:], (arm.predicted.parts or ())[1:], strict=True):
            assert mine == pytest.approx(theirs, abs=2_000)


def test_the_document_is_json_and_the_last_words_are_the_figures_that_decide(validation: Validation) -> None:
    document = json.loads(json.dumps(validation.document(), allow_nan=False))
    assert document["kind"] == "lamella.validate"
    assert [arm["cell"] for arm in document["test"]["arms"]] == [name for name in "def" for _ in ARMS]
    said = validation.lines()
    assert any(line.startswith("Held out: error of the mean time to first token") for line in said)
    assert len(said) == len(CELLS) * len(ARMS) + 1


def test_what_was_recorded_once_has_no_scatter_and_is_said_to() -> None:
    run = read_recorded(recorded_lines(CELLS[:1], DEVICE, TRUE, repeats=1), "a run")
    first, *_ = validate(run, DEVICE, Split((), ("a",)), KNOWN).lines()
    assert " ms (one repeat), predicted " in first
    assert "inf" not in first


def test_a_run_without_a_cell_to_measure_overheads_in_is_said_to_be_predicted_bare() -> None:
    run = read_recorded(recorded_lines(CELLS[:1], DEVICE, TRUE, repeats=2), "a run")
    *_, told, _ = validate(run, DEVICE, Split(("z",), ("a",))).lines()
    assert told.startswith("Overheads: no cell in which they are measured was recorded")
    assert "vllm-0.26-h200-llama-3.1-8b, or a .json file" in told
    assert told not in validate(run, DEVICE, Split((), ("a",)), KNOWN).lines()


def test_an_engine_that_does_not_schedule_ahead_is_refused_by_cell() -> None:
    rows = [engine_row(async_scheduling=False), repeat_row(cell("x", 1), "fifo_first", 0, [request_row(9)] * 3)]
    with pytest.raises(ValueError, match="x, fifo_first: the engine did not schedule its steps ahead"):
        validate(read_recorded(lines_of(*rows), "x"), DEVICE, Split((), ("x",)), KNOWN)


def test_it_is_told_before_each_arm_which_cell_is_next_and_how_many_are_done() -> None:
    told: list[tuple[Where, int, int]] = []
    run = read_recorded(recorded_lines(CELLS[:2], DEVICE, TRUE, repeats=2), "a run")
    found = validate(run, DEVICE, Split(("a",), ("b",)), KNOWN, tell=lambda *what: told.append(what))
    assert [(where.cell, done) for where, done, _total in told] == [
        (arm.cell, done) for done, arm in enumerate((*found.calibrate.arms, *found.test.arms))
    ]
    assert {total for _where, _done, total in told} == {2 * len(ARMS)}
