"""`lamella validate`: a run that the model itself made is predicted to the microsecond; one that it did not, is not."""

import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import recorded_run
from lamella.cli.main import build_app
from lamella.sim.overheads import MeasuredOverheads, Overheads, open_overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import read_recorded
from lamella.sim.recorded_arms import model_of, predict
from lamella.sim.strategies import Device

DEVICE = Device(load_profile())
ARMS: dict[str, dict[str, Any] | None] = {
    "chunk_bounded": {"layers_per_slice": 0},
    "fifo_first": {"layers_per_slice": 1, "release": "first", "order": "fifo"},
    "recompute": None,
    "auto": {"layers_per_slice": "auto"},
}
CELLS = {"one": (1, 8_192, 512), "four": (4, 8_192, 512), "far": (2, 4_096, 256)}
ENGINE = {
    "schema": 1,
    "kind": "engine",
    "vllm": "0.26.0",
    "engine": {"max_num_batched_tokens": 8192, "async_scheduling": True},
}


def row(cell: str, arm: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    concurrency, hit, new = CELLS[cell]
    return {
        "schema": 1,
        "kind": "repeat",
        "arm": arm,
        "settings": ARMS[arm],
        "cell": {
            "name": cell,
            "concurrency": concurrency,
            "hit": hit,
            "new": new,
            "mix": [],
            "output": 8,
            "width": 1,
            "bystanders": 0,
            "rate_per_s": None,
            "stores": False,
        },
        "requests": requests,
    }


def record(path: Path, slower: float = 1.0, arms: tuple[str, ...] = tuple(ARMS)) -> Path:
    """A run in which every request took what the model says, or so many times as long; two repeats an arm."""
    lines = [json.dumps(ENGINE)]
    for cell in CELLS:
        for arm in arms:
            waiting = {"at_us": 0, "queued_us": 0, "token_us": [1] * 8}
            draft = row(cell, arm, [waiting] * (4 * CELLS[cell][0]))
            run = read_recorded([json.dumps(ENGINE), json.dumps(draft)], "a draft")
            model = model_of(run.repeats[0])
            if not isinstance(model, str):
                for one in predict(run.repeats[0], model, run, DEVICE, Overheads()):
                    ttft = one.first_token_ns - one.admitted_ns
                    tokens = [round(slower * (ttft + step * one.tpot_ns) / 1000) for step in range(8)]
                    draft["requests"][one.tag] = {"at_us": 0, "queued_us": 0, "token_us": tokens}
            lines += [json.dumps(draft)] * 2
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"calibrate": ["one"], "test": ["four", "far"], "note": "made up"}))
    return path


@pytest.fixture
def no_overheads(tmp_path: Path) -> Path:
    path = tmp_path / "overheads.json"
    path.write_text(json.dumps(MeasuredOverheads("none", "nothing", Overheads(), {}).document()))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["validate", *map(str, arguments)])


def test_what_the_model_made_it_predicts(tmp_path: Path, split: Path, no_overheads: Path) -> None:
    out = tmp_path / "out.json"
    made = record(tmp_path / "run.jsonl")
    result = run(made, "--split", split, "--overheads", no_overheads, "--json", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert (found["schema_version"], found["kind"], found["overheads_fitted"]) == (1, "lamella.validate", False)
    assert {arm["cell"] for arm in found["test"]["arms"]} == {"four", "far"}
    for arm in found["test"]["arms"]:
        assert abs(arm["error"]) < 1e-4
        assert max(map(abs, arm["percentile_errors"].values())) < 1e-4
    assert found["test"]["signs_right"] == found["test"]["signs_shown"] > 0
    assert found["test"]["largest_regret"] == 0
    assert any(
        "Held out: error of the mean time to first token 0.0% in the median" in line
        for line in result.stdout.splitlines()
    )


def test_a_machine_that_is_a_quarter_slower_is_noticed(tmp_path: Path, split: Path, no_overheads: Path) -> None:
    out = tmp_path / "out.json"
    slower = record(tmp_path / "run.jsonl", slower=1.25)
    assert run(slower, "--split", split, "--overheads", no_overheads, "--json", out).exit_code == 0
    found = json.loads(out.read_text())
    assert found["test"]["median_error"] == pytest.approx(0.2, abs=0.001)
    assert {arm["error"] < 0 for arm in found["test"]["arms"]} == {True}


def test_overheads_measured_in_the_first_list_are_written_and_can_be_given(tmp_path: Path) -> None:
    true = Overheads(pass_ns=1_400_000, launch_ns=6_000_000, prefill_launch_ns=18_000_000, idle_ns=1_600_000)
    made, split, measured, out = (tmp_path / name for name in ("run.jsonl", "split.json", "measured.json", "out.json"))
    cells = [recorded_run.cell("one", 3), recorded_run.cell("two", 2)]
    made.write_text("\n".join(recorded_run.recorded_lines(cells, DEVICE, true)) + "\n")
    split.write_text(json.dumps({"calibrate": ["one"], "test": ["two"]}))
    assert run(made, "--split", split, "--overheads-out", measured, "--json", out).exit_code == 0
    found = json.loads(out.read_text())
    assert found["overheads_fitted"] is True
    assert found["test"]["p90_error"] < 0.05
    kept = open_overheads(str(measured))
    assert kept.overheads.launch_ns == pytest.approx(6_000_000, rel=0.05)
    assert "one" in kept.source
    assert found["overheads"] == json.loads(json.dumps(kept.document()))
    assert run(made, "--split", split, "--overheads", measured, "--json", out).exit_code == 0
    given = json.loads(out.read_text())
    assert given["overheads_fitted"] is False
    assert given["test"] == found["test"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"split": '{"calibrate": ["one"], "test": ["one"]}'},
            "one in both lists: a cell that was fitted on proves nothing",
        ),
        ({"split": '{"calibrate": [], "test": []}'}, "the list test is empty"),
        ({"split": "{"}, "a split is JSON"),
        ({"split": '{"calibrate": [], "test": ["none"]}'}, "no cell of the list test was recorded"),
        ({"run": "nonsense"}, "line 1"),
        ({"run": json.dumps(ENGINE)}, "holds no repeat"),
        ({"overheads": '{"launch_ns": 1}'}, 'no object of kind "lamella.overheads"'),
        ({"overheads": '{"kind": "lamella.overheads", "schema_version": 2}'}, "schema_version must be 1, got 2"),
        ({"overheads": '{"kind": "lamella.overheads", "schema_version": 1}'}, "lacks the key"),
        ({"overheads": "{"}, "Expecting"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    change: dict[str, str], sentence: str, tmp_path: Path, split: Path, no_overheads: Path
) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    paths = {"run": made, "split": split, "overheads": no_overheads}
    for name, text in change.items():
        paths[name].write_text(text)
    result = run(made, "--split", split, "--overheads", no_overheads)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"calibrate": []}'])
def test_a_bad_split_is_named_once(content: bytes, tmp_path: Path, split: Path, no_overheads: Path) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    split.write_bytes(content)
    result = run(made, "--split", split, "--overheads", no_overheads)
    assert result.exit_code == 2, result.output
    assert result.stderr.splitlines()[-1].count(str(split)) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"engine": {**ENGINE["engine"], "max_num_batched_tokens": "x"}},
            "max_num_batched_tokens must be a whole number",
        ),
        ({"engine": {**ENGINE["engine"], "cudagraph_capture_max": -8}}, "of at least 1, got -8"),
    ],
)
def test_an_engine_without_sense_is_one_sentence_and_exit_2(
    change: dict[str, object], sentence: str, tmp_path: Path, split: Path
) -> None:
    made = tmp_path / "run.jsonl"
    made.write_text(json.dumps({**ENGINE, **change}))
    result = run(made, "--split", split)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())


@pytest.mark.parametrize("key", ["concurrency", "hit", "new", "output", "width", "tier_gb_per_s"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1])
def test_a_cell_without_sense_is_one_sentence_and_exit_2(
    key: str, value: float, tmp_path: Path, split: Path, no_overheads: Path
) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    rows = [json.loads(line) for line in made.read_text().splitlines()]
    rows[1]["cell"][key] = value
    made.write_text("\n".join(map(json.dumps, rows)))
    result = run(made, "--split", split, "--overheads", no_overheads)
    assert result.exit_code == 2, result.output or repr(result.exception)


def test_what_a_joining_prompt_waits_for_is_said_and_matters(tmp_path: Path, split: Path, no_overheads: Path) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded", "fifo_first"))
    out, errors = tmp_path / "out.json", {}
    for wait in ("none", "turn", "load-end"):
        found = run(made, "--split", split, "--overheads", no_overheads, "--json", out, "--inputs-wait", wait)
        assert found.exit_code == 0, found.output
        document = json.loads(out.read_text())
        assert document["inputs_wait"] == wait
        errors[wait] = {(arm["cell"], arm["arm"]): arm["error"] for arm in document["test"]["arms"]}
    assert max(map(abs, errors["turn"].values())) < 1e-4
    assert errors["load-end"]["four", "fifo_first"] > 0.01
    refused = run(made, "--split", split, "--inputs-wait", "link")
    assert refused.exit_code == 2
    assert "--inputs-wait must be one of none, turn, load-end, got 'link'" in " ".join(refused.stderr.split())


def broken(made: Path, key: str, value: object, *, request: bool = False) -> None:
    """One repeat of the run says something impossible."""
    lines = [json.loads(line) for line in made.read_text().splitlines()]
    one = next(line for line in lines if line["kind"] == "repeat")
    place = one["requests"][1] if request else one if key == "settings" else one["cell"]
    place[key] = value
    made.write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.mark.parametrize(
    ("key", "value", "request_", "sentence"),
    [
        ("settings", "layers", False, "settings must be an object or null, got 'layers'"),
        ("concurrency", 0, False, "concurrency must be at least 1, got 0"),
        ("new", 0, False, "new at least 1, got"),
        ("hit", 900_000, False, "take the cell out of the split"),
        ("token_us", [-5], True, "a request's times rise"),
        ("token_us", [5, 4], True, "a request's times rise"),
        ("queued_us", 10**9, True, "queued_us 1000000000"),
        ("at_us", -1, True, "at_us -1"),
    ],
)
def test_an_impossible_repeat_is_refused_by_name(
    key: str, value: object, request_: bool, sentence: str, tmp_path: Path, split: Path, no_overheads: Path
) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    broken(made, key, value, request=request_)
    result = run(made, "--split", split, "--overheads", no_overheads)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())


def test_an_unknown_order_names_its_cell_and_arm(tmp_path: Path, split: Path, no_overheads: Path) -> None:
    made = record(tmp_path / "run.jsonl", arms=("fifo_first",))
    broken(made, "settings", {"order": "lifo", "release": "first"})
    result = run(made, "--split", split, "--overheads", no_overheads)
    assert result.exit_code == 2, result.output
    assert ", fifo_first: order must be one of" in " ".join(result.stderr.split())


def test_a_run_counts_once_and_beside_no_other_engine(tmp_path: Path, split: Path, no_overheads: Path) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    twice = run(made, made, "--split", split)
    assert twice.exit_code == 2
    assert "a run counts once" in " ".join(twice.stderr.split())
    other = tmp_path / "other.jsonl"
    lines = [json.loads(line) for line in made.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "engine":
            line["engine"]["async_scheduling"] = not line["engine"]["async_scheduling"]
    other.write_text("\n".join(map(json.dumps, lines)) + "\n")
    mixed = run(made, other, "--split", split, "--overheads", no_overheads)
    assert mixed.exit_code == 2
    assert "other.jsonl, line" in " ".join(mixed.stderr.split())
    assert "another engine than before" in " ".join(mixed.stderr.split())


def test_without_a_split_it_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    monkeypatch.chdir(tmp_path)
    result = run(made)
    assert result.exit_code == 2
    assert "validation-split.json is not there; name with --split" in " ".join(result.stderr.split())


def test_a_packed_run_is_read_as_it_is(tmp_path: Path, split: Path, no_overheads: Path) -> None:
    made = record(tmp_path / "run.jsonl", arms=("chunk_bounded",))
    packed = tmp_path / "run.jsonl.xz"
    packed.write_bytes(lzma.compress(made.read_bytes()))
    plain, same = (run(path, "--split", split, "--overheads", no_overheads) for path in (made, packed))
    assert (same.exit_code, same.stdout) == (0, plain.stdout)
    packed.write_bytes(made.read_bytes())
    broken_one = run(packed, "--split", split, "--overheads", no_overheads)
    assert broken_one.exit_code == 2
    assert "run.jsonl.xz is not an .xz file" in " ".join(broken_one.stderr.split())


def test_a_file_that_is_not_there_is_said(tmp_path: Path, split: Path) -> None:
    result = run(tmp_path / "none.jsonl", "--split", split)
    assert result.exit_code == 2
    assert "none.jsonl: No such file or directory" in " ".join(result.stderr.split())
