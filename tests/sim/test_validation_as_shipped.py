"""The committed recordings give the figures that are kept, and the documentation quotes those.

All recordings take the model a minute or two: overheads are measured in all of them here, and every ninth arm is
predicted anew.
"""

import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest

from lamella.sim.checks import check_arm, group_arms
from lamella.sim.overheads import open_overheads
from lamella.sim.profiles import load_profile
from lamella.sim.recorded import RecordedRun, read_recorded
from lamella.sim.recorded_arms import InputsWait
from lamella.sim.splits import Split
from lamella.sim.strategies import Device
from lamella.sim.validate import Judgement, Validation, judge, measure, measure_each

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DEVICE = Device(load_profile())
SAMPLED = 9
COMMITS = ("f520c5b", "b0a0d48", "8c350d8", "53723eb", "4b1f1f9")
"""Of the recordings in which `auto` releases by forecast; the last one's rules are the model's."""
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CHUNK_MAJOR = ("chunk_full_graphs", "chunk_deep_full_graphs")


def read_all() -> RecordedRun:
    """The committed recordings of one GPU."""
    paths = [path for path in sorted(RESULTS.glob("h200-*-grid-*.jsonl.xz")) if "two-gpus" not in path.name]
    lines = [line for path in paths for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    return read_recorded(lines, "the grid")


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "h200-2026-11-29-validation.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def split() -> Split:
    return Split.parse((RESULTS / "validation-split.json").read_text(encoding="utf-8"))


def test_the_committed_recordings_give_the_figures_that_are_kept(kept: dict[str, Any], split: Split) -> None:
    run = split.tell(read_all())
    arms, _ = group_arms(run.repeats)
    lists = {
        name: [arm for cell in cells for where in arms if where.cell == cell for arm in arms[where].values()]
        for name, cells in (("calibrate", split.calibrate), ("test", split.test))
    }
    overheads = measure(lists["calibrate"], run, DEVICE)
    engines = measure_each(lists["calibrate"], run, DEVICE, overheads.overheads)
    assert overheads == open_overheads("vllm-0.26-h200-llama-3.1-8b")
    judged: dict[str, Judgement] = {}
    for name, chosen in lists.items():
        assert [(arm.repeats[0].cell.name, arm.repeats[0].arm) for arm in chosen] == [
            (arm["cell"], arm["arm"]) for arm in kept[name]["arms"]
        ]
        judged[name] = judge(
            [
                check_arm(arm, run, DEVICE, engines.get(arm.repeats[0].commit, overheads.overheads))
                for arm in chosen[::SAMPLED]
            ]
        )
    found = Validation(
        DEVICE.profile.name, InputsWait.TURN, overheads, engines, True, judged["calibrate"], judged["test"], {}
    )
    document = json.loads(json.dumps(found.document()))
    for name in ("overheads", "overheads_of_engines"):
        assert document[name] == kept[name], "run lamella validate again, and say what changed"
    for name in lists:
        assert document[name]["arms"] == kept[name]["arms"][::SAMPLED], "run lamella validate again"


def test_the_figures_that_decide_are_the_kept_ones(kept: dict[str, Any]) -> None:
    test = kept["test"]
    assert test["median_error"] <= 0.05
    assert test["signs_right"] >= test["signs_shown"] - 2 >= 80
    assert sorted(advice["regret"] for advice in test["advice"])[-3] <= 0.03, "the aim is missed in two cells"
    assert test["largest_regret"] <= 0.06
    assert {(arm["cell"], arm["arm"]) for arm in test["arms"] if arm["spoiled"]} == {
        ("c4_hit12288_new2866_chunk4096", "auto"),
        ("c4_hit12288_new2866_chunk4096", "fifo_first"),
        ("c4_hit12288_new2866_chunk4096", "interleaved_first"),
        ("c8_hit12288_new2866_chunk4096", "auto"),
    }
    autos = {arm["commit"][:7] for arm in test["arms"] if "auto" in arm["arm"] and arm["judged"]}
    assert autos == {COMMITS[-1]}


def test_the_documentation_quotes_them(kept: dict[str, Any]) -> None:
    test, text = kept["test"], (ROOT / "docs" / "model.md").read_text(encoding="utf-8")
    judged = sum(arm["judged"] for arm in test["arms"])
    for row in (
        f"| | of {judged} arms judged by | of all {len(test['arms'])} | goal |",
        f"| {test['median_error']:.1%}, {test['p90_error']:.1%} | {test['median_error_of_all']:.1%}, "
        f"{test['p90_error_of_all']:.1%} |",
        f"| {test['signs_right']} of {test['signs_shown']} |",
        *changes(kept),
    ):
        assert row in text, row
    words = " ".join(text.split())
    assert [said for commit in COMMITS if (said := f"{commit} {by_commit(kept, commit)}") not in words] == []


def by_commit(kept: dict[str, Any], commit: str) -> str:
    """Median and p90 of a commit's errors, and how many."""
    arms = kept["test"]["arms"]
    errors = sorted(abs(arm["error"]) for arm in arms if arm["judged"] and arm["commit"].startswith(commit))
    median, p90 = (errors[math.ceil(share * len(errors)) - 1] for share in (0.5, 0.9))
    return f"{median:.1%} and {p90:.1%} ({len(errors)}"


def test_the_readme_quotes_them(kept: dict[str, Any]) -> None:
    test, text = kept["test"], (ROOT / "README.md").read_text(encoding="utf-8")
    row = text.partition("| simulator, regime map, trace replay, explanations |")[2].partition("\n")[0]
    arms, advice = test["arms"], test["advice"]
    judged = sum(arm["judged"] for arm in arms)
    wrong = sorted(f"{one['regret']:.1%}" for one in advice if one["regret"] >= 0.001)
    autos = [arm["error"] for arm in arms if "auto" in arm["arm"] and arm["judged"]]
    for said in (
        f"by {WORDS[len({arm['commit'] for arm in arms})]} commits",
        f"measured in {WORDS[len({arm['cell'] for arm in kept['calibrate']['arms']})]} cells",
        f"{len({arm['cell'] for arm in arms})} held out",
        f"{test['median_error']:.1%} in the median and {test['p90_error']:.1%} at p90 of {judged} arms",
        f"over all {len(arms)} arms {test['median_error_of_all']:.1%} and {test['p90_error_of_all']:.1%}",
        f"{sum(arm['other_auto'] for arm in arms)} of `auto`",
        f"right in {test['signs_right']} of {test['signs_shown']} effects",
        f"best in {len(advice) - len(wrong)} of {len(advice)} cells by commit, {' and '.join(wrong)} off",
        f"off by {min(autos):+.0%} to {max(autos):+.0%} in {WORDS[len(autos)]} cells".replace("-", "−"),
    ):
        assert said in row, said


def changes(kept: dict[str, Any]) -> list[str]:
    """A row for each cell in which `auto` released by forecast: recorded and predicted changes, by commit."""
    arms = {
        (arm["commit"][:7], arm["cell"], arm["arm"]): arm
        for judgement in ("calibrate", "test")
        for arm in kept[judgement]["arms"]
    }

    def change(commit: str, cell: str, name: str) -> str:
        bases = [arms[commit, cell, base] for base in CHUNK_MAJOR if (commit, cell, base) in arms]
        if (commit, cell, name) not in arms:
            return ""
        base = min(bases, key=lambda arm: arm["recorded"]["ttft_ns"])
        mine = arms[commit, cell, name]
        shares = [mine[of]["ttft_ns"] / base[of]["ttft_ns"] - 1 for of in ("recorded", "predicted")]
        return ", ".join(f"{share:+.0%}" for share in shares)

    rows = []
    for cell in sorted({cell for commit, cell, name in arms if name == "auto_full_graphs" and commit in COMMITS}):
        latest = max((commit for commit in COMMITS if (commit, cell, "fifo_full_graphs") in arms), key=COMMITS.index)
        by_commit = [change(commit, cell, "auto_full_graphs") for commit in COMMITS]
        columns = [cell, change(latest, cell, "fifo_full_graphs"), *by_commit]
        rows.append(f"| {' | '.join(columns)} |")
    return rows


def test_the_shipped_split_names_cells_once(split: Split) -> None:
    assert len({*split.calibrate, *split.test}) == len(split.calibrate) + len(split.test)
