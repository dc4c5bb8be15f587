"""Prefills that replay captured graphs: what launching them takes is measured, and taken by steps that are captured."""

import json
import lzma
import re
import statistics
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamella.sim.host_fit import Fit, fit
from lamella.sim.overheads import MeasuredOverheads, Overheads, open_overheads, read_overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import RecordedRepeat, RecordedRun, read_recorded
from lamella.sim.recorded_arms import model_of, predict
from lamella.sim.requests import Request
from lamella.sim.splits import Split
from lamella.sim.strategies import Device
from lamella.sim.validate import validate
from made_up_repeat import write_repeat
from recorded_run import TRUE, cell, engine_row, lines_of, recorded_lines, repeat_row, request_row
from rich_world import Ahead, run_ahead

DEVICE = Device(load_profile())
SHIPPED = "vllm-0.26-h200-llama-3.1-8b"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIZES = [1, 2, 4, 8, 128, 768, 1_040, 4_096]


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize(("captured", "launched_ns"), [(0, 100), (9, 100), (10, 30), (40, 30)])
def test_a_step_that_was_captured_is_launched_as_its_graphs_are(captured: int, launched_ns: int) -> None:
    """Ten new tokens, launched behind 5 ns of preparing; their token is seen when the next step is launched too."""
    overheads = Overheads(
        pass_ns=5,
        launch_ns=2_000,
        prefill_launch_ns=100,
        prefill_graph_launch_ns=30,
        captured_tokens=4,
        prefill_graph_tokens=captured,
    )
    (record,) = run_ahead(Ahead(overheads), (0, Request(0, 10, output_tokens=2))).records
    assert record.first_token_ns == 5 + launched_ns + 5 + 2_000
    assert overheads.least_prefill_ns(10) == launched_ns, "what auto and jit take for the least"
    assert overheads.least_prefill_ns(4) == 2_000


# ---------------------------------------------------------------- asking for them


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (128, "prefill_graphs must be 0 or more than 128, got 128"),
        (-1, "prefill_graphs must be 0 or more than 128, got -1"),
        (10**9, "prefill_graphs must be at most 10,000,000, got 1000000000"),
    ],
)
def test_sizes_that_no_prefill_has_are_refused(tokens: int, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        open_overheads(SHIPPED).overheads.with_prefill_graphs(tokens)


def test_a_host_of_which_it_was_not_measured_is_refused_and_one_as_it_is_never() -> None:
    assert TRUE.with_prefill_graphs(0) == TRUE
    with pytest.raises(ValueError, match="launching graphs of prefills was not measured with these overheads"):
        TRUE.with_prefill_graphs(1_040)


def test_a_file_from_before_they_were_parts_is_read_as_not_measured() -> None:
    document = MeasuredOverheads("an engine", "a run", TRUE, {}).document()
    del document["overheads"]["prefill_graph_launch_ns"], document["overheads"]["prefill_graph_tokens"]
    assert read_overheads(json.dumps(document), "old.json").overheads == TRUE
    del document["overheads"]["pass_ns"]
    with pytest.raises(ValueError, match="lacks the key 'pass_ns'"):
        read_overheads(json.dumps(document), "old.json")


# ---------------------------------------------------------------- measuring them


def written(launch_ns: int, **more: Any) -> list[RecordedRepeat]:
    """Three repeats whose prefills' launches took so long."""
    true = replace(TRUE, prefill_launch_ns=launch_ns, scatter_permille=0, drift_permille=0)
    return [replace(write_repeat(true, DEVICE, 15_360, 768), **more) for _ in range(3)]


def fit_of(*repeats: RecordedRepeat) -> Fit:
    return fit(repeats, RecordedRun(True, 8192, 128, "0.26.0", "a machine", repeats, {}), DEVICE)


def test_what_launching_them_takes_is_told_from_launching_kernels() -> None:
    graphs = written(4_000_000, graphs="both", prefill_graph_tokens=4_096)
    found = fit_of(*written(6_000_000), *graphs)
    assert (found.overheads.prefill_launch_ns, found.overheads.prefill_graph_launch_ns) == (6_000_000, 4_000_000)
    beyond = fit_of(*(replace(repeat, prefill_graph_tokens=512) for repeat in graphs))
    assert beyond.overheads.prefill_launch_ns == 4_000_000, "its steps have more tokens than were captured"
    assert "prefill_graph_launch_ns" not in beyond.shown


def test_of_a_commit_only_the_named_parts_are_measured() -> None:
    """Whatever else its repeats show; the other parts stay as without them, to the last digit."""
    shows = frozenset({"prefill_graph_launch_ns"})
    slow = replace(TRUE, pass_ns=5 * TRUE.pass_ns, join_ns=5 * TRUE.join_ns, launch_ns=2 * TRUE.launch_ns)
    graphs = [
        replace(write_repeat(slow, DEVICE, 15_360, 768), graphs="both", prefill_graph_tokens=4_096, shows=shows)
        for _ in range(3)
    ]
    alone, both = fit_of(*written(6_000_000)), fit_of(*written(6_000_000), *graphs)
    assert both.overheads == replace(alone.overheads, prefill_graph_launch_ns=TRUE.prefill_launch_ns)
    assert both.shown == alone.shown | shows
    assert fit_of(*graphs).shown == shows


def test_a_split_names_those_parts_and_the_overheads_say_where_they_are_from() -> None:
    lines = recorded_lines([cell("a", 3), cell("d", 1)], DEVICE, TRUE, arms=("chunk_bounded", "fifo_first"))
    new = [json.loads(line) for line in lines]
    for row in new:
        row |= {"commit": "new"} if row["kind"] == "engine" else {"graphs": "both"}
    new[0]["engine"]["cudagraph_capture_sizes"] = SIZES
    split = Split.parse(
        '{"calibrate": ["a"], "test": ["d"], "commits": {"new": {"measured": ["prefill_graph_launch_ns"]}}}'
    )
    old, both = (validate(read_recorded([*lines, *more], "x"), DEVICE, split) for more in ((), lines_of(*new)))
    launch_ns = both.overheads.overheads.prefill_graph_launch_ns
    assert launch_ns == pytest.approx(TRUE.prefill_launch_ns, rel=0.05)
    assert both.overheads.overheads == replace(old.overheads.overheads, prefill_graph_launch_ns=launch_ns)
    assert both.overheads.source == "6 repeats of a; prefill_graph_launch_ns in 6 repeats of a"
    assert old.test.arms == both.test.arms[:2]


# ---------------------------------------------------------------- recorded arms


def recorded(sizes: object, graphs: str = "both") -> tuple[RecordedRun, RecordedRepeat]:
    """A short load, so that launching is what its first token waits for."""
    of, request = cell("x", 1, rate_per_s=1.0, new=192), request_row(9, loadable=256, local_hit=15_104)
    row = repeat_row(of, "fifo_first", 0, [request], graphs=graphs)
    run = read_recorded(lines_of(engine_row(cudagraph_capture_sizes=sizes), row), "x")
    return run, run.repeats[0]


def test_a_recorded_arm_is_predicted_with_the_graphs_that_its_engine_captured() -> None:
    overheads = replace(TRUE, prefill_graph_launch_ns=5_000_000, scatter_permille=0, drift_permille=0)
    ttft_ns = {}
    for graphs in ("full", "both"):
        run, repeat = recorded(SIZES, graphs)
        model = model_of(repeat)
        assert not isinstance(model, str)
        assert model.full_graphs
        assert model.prefill_graph_tokens == (4_096 if graphs == "both" else 0)
        assert ("graphs of prefills" in str(model)) == (graphs == "both")
        (record,) = predict(repeat, model, run, DEVICE, overheads)
        ttft_ns[graphs] = record.first_token_ns - record.admitted_ns
        with pytest.raises(ValueError, match="was not measured"):
            predict(repeat, replace(model, prefill_graph_tokens=4_096), run, DEVICE, TRUE)
    assert 1_000_000 < ttft_ns["full"] - ttft_ns["both"] <= 13_000_000


def test_sizes_that_a_run_does_not_say_are_no_answer_and_impossible_ones_are_refused() -> None:
    assert model_of(recorded(None)[1]) == "graphs of prefills, of sizes that the run does not say"
    for sizes in ("1,2", [0], [True], [1.5]):
        with pytest.raises(ValueError, match=r"cudagraph_capture_sizes must be a list .* got"):
            recorded(sizes)


# ---------------------------------------------------------------- padding


def test_what_steps_are_padded_by_is_too_little_for_a_term_of_its_own() -> None:
    """Of every recorded step with a prefill: tokens up to the next captured size, and what their products take."""
    pads: list[int] = []
    longer_ns: list[float] = []
    shares: list[float] = []
    sizes: list[int] = []
    compute = DEVICE.full_compute
    for line in lzma.decompress((RESULTS / "h200-2026-11-30-grid-prefill-graphs.jsonl.xz").read_bytes()).splitlines():
        row = json.loads(line)
        if row.get("kind") == "engine":
            sizes = sorted(row["engine"]["cudagraph_capture_sizes"])
        if row.get("kind") != "repeat" or row["graphs"] != "both":
            continue
        for _, _, tokens, decoding, _, _ in row["steps"]:
            new = tokens - decoding
            if new >= 64 and tokens <= sizes[-1]:
                padded = sizes[bisect_left(sizes, tokens)]
                pads.append(padded - tokens)
                longer_ns.append(matrix_products_ns(padded) - matrix_products_ns(tokens))
                shares.append(longer_ns[-1] / compute.step_ns([(row["cell"]["hit"], new)], 0, 0))
    coarse_ns = matrix_products_ns(832) - matrix_products_ns(768)
    coarse = coarse_ns / compute.step_ns([(15_360, 768)], 0, 0)
    text = (RESULTS.parents[1] / "docs" / "model.md").read_text(encoding="utf-8")
    for said in (
        f"padded by {max(pads)} tokens at most, {statistics.fmean(pads):.1f} in the mean",
        f"take {max(longer_ns) / 1e6:.2f} ms at most by the profile, {statistics.fmean(shares):.1%} of the step",
        f"would take {coarse_ns / 1e6:.1f} ms longer, {coarse:.0%},",
    ):
        assert said in " ".join(text.split()), said


def matrix_products_ns(tokens: int) -> float:
    """What a step computes of padding; nobody's attention looks at it."""
    return DEVICE.profile.prefill.dense_ns(tokens)
