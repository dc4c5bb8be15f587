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
SEEN_SINCE, BUSY, BUSIEST = ("99ca007", "e6b6de6", "f8adb2c"), "10aa3d9", "8cab52b"
AGAIN, PREFILL_GRAPHS, MORE_PREFILL_GRAPHS = "e3ba7d2", "9d63b3d", "b290628"
OTHER_HITS, LARGER_RING = ("2702658", "b2a9d3e"), ("bbe8d69", "970283b")
HELD_OUT = (*SEEN_SINCE, BUSY, BUSIEST, AGAIN, MORE_PREFILL_GRAPHS, *OTHER_HITS, *LARGER_RING)
"""Recorded when the overheads had been measured and shipped; the first three were seen when the model was mended."""
SINCE = (*SEEN_SINCE, BUSY, BUSIEST, AGAIN, PREFILL_GRAPHS, MORE_PREFILL_GRAPHS, *OTHER_HITS, *LARGER_RING)
"""And the one in which one part was measured that no recording before it shows."""
COMMITS = ("f520c5b", "b0a0d48", "8c350d8", "53723eb", "4b1f1f9", *SINCE)
"""Of the recordings in which `auto` releases by forecast; the rules of those from 4b1f1f9 on are the model's."""
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
CELL = "c{}_hit15360_new{}_chunk256_before_batch_full"
AUTO = "auto_full_graphs"
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
    lists = split.arms_of(arms)
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
    assert test["signs_right"] >= test["signs_shown"] - 5 >= 150
    assert sorted(advice["regret"] for advice in test["advice"])[-6] <= 0.03, "the aim is missed in five cells"
    assert test["largest_regret"] <= 0.11
    assert {(arm["cell"], arm["arm"]) for arm in test["arms"] if arm["spoiled"]} == {
        ("c4_hit12288_new2866_chunk4096", "auto"),
        ("c4_hit12288_new2866_chunk4096", "fifo_first"),
        ("c4_hit12288_new2866_chunk4096", "interleaved_first"),
        ("c8_hit12288_new2866_chunk4096", "auto"),
    }
    autos = {arm["commit"][:7] for arm in test["arms"] if "auto" in arm["arm"] and arm["judged"]}
    assert autos == {"4b1f1f9", *SINCE}


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


def test_nothing_was_fitted_to_the_commits_that_are_held_out(kept: dict[str, Any], split: Split) -> None:
    assert {commit[:7] for commit, known in split.commits.items() if known.held_out} == set(HELD_OUT)
    for name in ("calibrate", "test"):
        found = {arm["commit"][:7] for arm in kept[name]["arms"]}
        assert found & set(HELD_OUT) == (set() if name == "calibrate" else set(HELD_OUT))
    assert not {commit[:7] for commit in kept["overheads_of_engines"]} & set(HELD_OUT)


def test_the_documentation_quotes_the_held_out(kept: dict[str, Any]) -> None:
    words = " ".join((ROOT / "docs" / "model.md").read_text(encoding="utf-8").split())
    arms = [arm for arm in kept["test"]["arms"] if arm["commit"].startswith(SEEN_SINCE)]
    judged = [arm for arm in arms if arm["judged"]]
    shown = [sign for sign in kept["test"]["signs"] if sign["shown"] and sign["commit"].startswith(SEEN_SINCE)]
    autos = [sign for sign in shown if sign["arm"].startswith("auto")]
    assert all(sign["right"] for sign in autos)
    for said in (
        f"Of {len(judged)} arms judged by, **{' in the median and '.join(two_of(judged))} at p90**",
        f"(of all {len(arms)} arms {' and '.join(two_of(arms))})",
        f"{sum(sign['right'] for sign in shown)} of {len(shown)} sides of zero right, among them all {len(autos)} of",
    ):
        assert said in words, said
    for title, name in (
        ("chunk-major, bounded", "chunk_full_graphs"),
        ("chunk-major, all at once", "chunk_deep_full_graphs"),
        ("`fifo_full_graphs`", "fifo_full_graphs"),
        ("`auto_full_graphs`", "auto_full_graphs"),
        ("`sync_full_graphs`", "sync_full_graphs"),
    ):
        of = [arm for arm in judged if arm["arm"] == name]
        assert f"| {title} | {len(of)} | {', '.join(two_of(of))} |" in words, name


def test_the_documentation_quotes_those_of_a_busy_host(kept: dict[str, Any]) -> None:
    words = " ".join((ROOT / "docs" / "model.md").read_text(encoding="utf-8").split())
    arms = [arm for arm in kept["test"]["arms"] if arm["commit"].startswith(BUSY)]
    judged = [arm for arm in arms if arm["judged"]]
    shown = [sign for sign in kept["test"]["signs"] if sign["shown"] and sign["commit"].startswith(BUSY)]
    (wrong,) = (sign for sign in shown if not sign["right"])
    (turns,) = (arm for arm in arms if (arm["cell"], arm["arm"]) == (wrong["cell"], wrong["arm"]))
    for said in (
        f"Of {len(judged)} arms judged by, **{' in the median and '.join(two_of(judged))} at p90** (of all {len(arms)} "
        f"arms {' and '.join(two_of(arms))})",
        f"{len(shown) - 1} of {len(shown)} sides of zero right",
        f"recorded {turns['recorded']['ttft_ns'] / 1e6:,.0f} ms, predicted {turns['predicted']['ttft_ns'] / 1e6:.0f}",
    ):
        assert said in words, said


def test_the_documentation_quotes_what_it_says_of_loads_before_their_batch(kept: dict[str, Any]) -> None:
    words = " ".join((ROOT / "docs" / "model.md").read_text(encoding="utf-8").split())
    arms = [arm for arm in kept["test"]["arms"] if arm["commit"].startswith(BUSIEST)]
    judged = [arm for arm in arms if arm["judged"]]
    shown = [sign for sign in kept["test"]["signs"] if sign["shown"] and sign["commit"].startswith(BUSIEST)]
    assert all(sign["right"] for sign in shown)
    ms = {
        (arm["cell"], arm["arm"].replace("_full_graphs", "")): (
            arm["recorded"]["ttft_ns"] / 1e6, arm["predicted"]["ttft_ns"] / 1e6,
        )
        for arm in arms
    }  # fmt: skip
    assert [1 for recorded, predicted in ms.values() if predicted > recorded] == [1], "all but one too soon"
    for said in (
        f"Of {len(judged)} arms judged by, **{' in the median and '.join(two_of(judged))} at p90** (of all {len(arms)} "
        f"arms {' and '.join(two_of(arms))}), {len(shown)} of {len(shown)} sides of zero right",
        *(
            f"| {title} | {ms[cell, off][0]:.1f} → {ms[cell, on][0]:.1f} | "
            f"{ms[cell, off][1]:.1f} → {ms[cell, on][1]:.1f} |"
            for title, cell, off, on in (
                ("one user, 768 new, `sync`", CELL.format(1, 768), "sync", "sync_before_batch"),
                ("one user, 768 new, `auto`", CELL.format(1, 768), "auto", "auto_before_batch"),
                ("four users, 1,024 new, `auto`", CELL.format(4, 1024), "auto", "auto_before_batch"),
                ("four users, 768 new, `auto`", CELL.format(4, 768), "auto", "auto_before_batch"),
            )
        ),
    ):
        assert said in words, said


def test_of_the_first_recording_of_prefills_graphs_one_part_was_measured(kept: dict[str, Any], split: Split) -> None:
    part = "prefill_graph_launch_ns"
    (known,) = (known for commit, known in split.commits.items() if commit.startswith(PREFILL_GRAPHS))
    assert known.measured == (part,)
    (own,) = (found for commit, found in kept["overheads_of_engines"].items() if commit.startswith(PREFILL_GRAPHS))
    assert own == kept["overheads"]["overheads"]
    measured = {arm["cell"] for arm in kept["calibrate"]["arms"] if arm["commit"].startswith(PREFILL_GRAPHS)}
    assert measured == {"c4_hit15360_new768_chunk256_both"}
    assert not {arm["cell"] for arm in kept["test"]["arms"]} & measured


def test_the_documentation_quotes_what_it_says_of_prefills_graphs(kept: dict[str, Any]) -> None:
    words = " ".join((ROOT / "docs" / "model.md").read_text(encoding="utf-8").split())
    first = (PREFILL_GRAPHS, MORE_PREFILL_GRAPHS)
    arms, shown = (
        [one for one in kept["test"][name] if one["arm"].endswith("_both_graphs") and one["commit"].startswith(first)]
        for name in ("arms", "signs")
    )
    assert all(arm["judged"] for arm in arms)
    shown = [sign for sign in shown if sign["shown"]]
    assert all(sign["right"] for sign in shown)
    points = max(abs(sign["predicted"] - sign["recorded"]) for sign in shown)
    overheads, errors = (kept["overheads"][name] for name in ("overheads", "errors"))
    took = [
        f"{overheads[name] / 1e6:.1f} ± {errors[name] / 1e6:.1f} ms"
        for name in ("prefill_launch_ns", "prefill_graph_launch_ns")
    ]
    ms = {
        (arm["cell"], arm["arm"]): (arm["recorded"]["ttft_ns"] / 1e6, arm["predicted"]["ttft_ns"] / 1e6)
        for name in ("calibrate", "test")
        for arm in kept[name]["arms"]
        if arm["commit"].startswith(PREFILL_GRAPHS)
    }
    rows = []
    for title, users, name in (
        ("one user, chunk-major", 1, "chunk"),
        ("one user, one request after another", 1, "fifo"),
        ("one user, `auto`", 1, "auto"),
        ("four, chunk-major", 4, "chunk"),
        ("four, one request after another", 4, "fifo"),
        ("four, `auto`", 4, "auto"),
    ):
        pair = [ms[f"c{users}_hit15360_new768_chunk256_both", f"{name}_{graphs}_graphs"] for graphs in ("full", "both")]
        recorded, predicted = zip(*pair, strict=True)
        rows.append(f"| {title} | " + " | ".join(f"{of[0]:.1f} → {of[1]:.1f}" for of in (recorded, predicted)) + " |")
    for said in (
        f"{took[1]} instead of {took[0]}",
        f"Of {len(arms)} arms judged by, **{' in the median and '.join(two_of(arms))} at p90**, {len(shown)} of "
        f"{len(shown)} sides of zero right, and each change against chunk-major is off by {100 * points:.1f} points "
        "at most",
        *rows,
    ):
        assert said in words, said


def test_the_documentation_quotes_what_it_says_of_other_hits_objects_and_settings(kept: dict[str, Any]) -> None:
    words = " ".join((ROOT / "docs" / "model.md").read_text(encoding="utf-8").split())
    arms = [arm for arm in kept["test"]["arms"] if arm["commit"].startswith(OTHER_HITS)]
    assert all(arm["judged"] for arm in arms)
    shown = [sign for sign in kept["test"]["signs"] if sign["shown"] and sign["commit"].startswith(OTHER_HITS)]
    wrong = [sign for sign in shown if not sign["right"]]
    assert all(abs(sign["recorded"]) < 0.03 for sign in wrong)
    kinds = (
        ("one thing at a time", lambda name: "_finding_" in name or "_beside_" in name),
        ("4,096 cached; objects of 1,024 and 4,096 with 12,288", lambda name: "hit4096_" in name or "hit12288" in name),
        ("32,768 and 65,536 cached", lambda name: ("hit32768" in name or "hit65536" in name) and "in_fl" not in name),
        ("other bytes in flight", lambda name: name.endswith("_in_flight_both")),
        ("three cells again", lambda name: name.startswith(("c4_hit15360_new256", "c8_")) or "_bystanders_" in name),
    )  # fmt: skip
    rows, told = [], 0
    for title, matches in kinds:
        found = [arm for arm in arms if matches(arm["cell"])]
        told += len(found)
        errors = sorted(arm["error"] for arm in found)
        rows.append(f"| {title} | {len(found)} | {', '.join(two_of(found))} | {errors[0]:+.0%} to {errors[-1]:+.0%} |")
    assert told == len(arms)
    joins = []
    for cached, new in ((4_096, 1_024), (15_360, 768), (32_768, 256), (65_536, 1_024)):
        (parts,) = (arm["parts_ns"] for arm in arms if arm["arm"] == "chunk_both_graphs" and arm["commit"].startswith(
            OTHER_HITS[0]) and arm["cell"].startswith(f"c1_hit{cached}_new{new}_"))  # fmt: skip
        took = [
            (stepped - released) / 1e6
            for released, stepped in zip(parts["released_ns"], parts["stepped_ns"], strict=True)
        ]
        begun = [ns / 1e6 for ns in parts["begun_ns"]]
        joins.append(f"| {cached:,} + {new:,} | {begun[0]:.1f}, {begun[1]:.1f} | {took[0]:.1f}, {took[1]:.1f} |")
    autos = {arm["arm"]: arm for arm in arms if arm["cell"] == "c2_hit65536_new1024_chunk256_in_flight_both"}
    ms = {name: arm["recorded"]["ttft_ns"] / 1e6 for name, arm in autos.items()}
    plain = autos["auto_both_graphs"]["predicted"]["ttft_ns"] / 1e6
    for said in (
        f"Of {len(arms)} arms judged by, **{' in the median and '.join(two_of(arms))} at p90**, "
        f"{len(shown) - len(wrong)} of {len(shown)} sides of zero right",
        f"the model has {plain:.0f} ms where {ms['auto_both_graphs']:.1f} were recorded with 55 MB and "
        f"{ms['auto_four_ms_both_graphs']:.1f} with 220",
        *rows,
        *joins,
    ):
        assert said in words, said


def test_the_documentation_quotes_what_it_says_of_a_larger_ring(kept: dict[str, Any]) -> None:
    words = " ".join((ROOT / "docs" / "model.md").read_text(encoding="utf-8").split())
    arms, shown = ([one for one in kept["test"][name] if one["commit"].startswith(LARGER_RING)]
                   for name in ("arms", "signs"))  # fmt: skip
    assert all(arm["judged"] for arm in arms)
    assert all(sign["shown"] and sign["right"] for sign in shown)
    ms = {
        (arm["cell"][:2], arm["arm"].removesuffix("_both_graphs")): (
            f"{arm['recorded']['ttft_ns'] / 1e6:.1f}",
            f"{arm['predicted']['ttft_ns'] / 1e6:.1f} ({arm['error']:+.1%})",
        )
        for arm in arms
    }
    rows = (
        ("`auto`, ring of 64 MiB", "auto_small_ring"),
        ("`auto`, 256 MiB", "auto"),
        ("`auto`, 256 MiB, 110 MB in flight", "auto_two_ms"),
        ("one request after another, 64 MiB", "fifo_small_ring"),
        ("one request after another, 256 MiB", "fifo"),
    )
    recorded, predicted = ms["c4", "fifo_two_ms"]
    assert max(arms, key=lambda arm: abs(arm["error"]))["arm"] == "fifo_two_ms_both_graphs"
    for said in (
        f"Of {len(arms)} arms judged by, **{' in the median and '.join(two_of(arms))} at p90**, {len(shown)} of "
        f"{len(shown)} sides of zero right",
        *(f"| {title} | {' | '.join(ms['c2', arm])} |" for title, arm in rows),
        f"recorded {recorded} ms, predicted {predicted}",
    ):
        assert said in words, said


def two_of(arms: list[dict[str, Any]]) -> tuple[str, str]:
    """Median and p90 of their errors."""
    errors = sorted(abs(arm["error"]) for arm in arms)
    median, p90 = (errors[math.ceil(share * len(errors)) - 1] for share in (0.5, 0.9))
    return f"{median:.1%}", f"{p90:.1%}"


def by_commit(kept: dict[str, Any], commit: str) -> str:
    """Median and p90 of a commit's errors, and how many."""
    found = [arm for arm in kept["test"]["arms"] if arm["judged"] and arm["commit"].startswith(commit)]
    return f"{' and '.join(two_of(found))} ({len(found)}"


def test_the_readme_quotes_them(kept: dict[str, Any]) -> None:
    test, text = kept["test"], (ROOT / "README.md").read_text(encoding="utf-8")
    row = text.partition("| simulator, regime map, trace replay, explanations |")[2].partition("\n")[0]
    arms, advice = test["arms"], test["advice"]
    judged = sum(arm["judged"] for arm in arms)
    off = sorted(one["regret"] for one in advice if one["regret"] >= 0.001)
    least, *autos = sorted(arm["error"] for arm in arms if arm["arm"] in ("auto", "auto_full_graphs") and arm["judged"])
    since = [arm for arm in arms if arm["judged"] and arm["commit"].startswith(SINCE)]
    for said in (
        f"{test['median_error']:.1%} in the median and {test['p90_error']:.1%} at p90 of {judged} arms",
        f"{test['median_error_of_all']:.1%} and {test['p90_error_of_all']:.1%} of all {len(arms)}",
        f"In the recordings of the {WORDS[len(SINCE)]} commits since its overheads were shipped: "
        f"{' and '.join(two_of(since))} of {len(since)} arms",
        f"side of zero in {test['signs_right']} of {test['signs_shown']} effects",
        f"best in {len(advice) - len(off)} of {len(advice)} cells by commit and "
        f"{off[0]:.1%} to {off[-1]:.1%} off in the other {WORDS[len(off)]}",
        f"off by {autos[0]:+.0%} to {autos[-1]:+.0%} in {len(autos)} cells by commit".replace("-", "−"),
        f"and by {least:+.0%} in one with misses".replace("-", "−"),
    ):
        assert said in row, said


def columns_of(kept: dict[str, Any]) -> list[str]:
    """The commits that have `auto` by full graphs."""
    found = {arm["commit"][:7] for name in ("calibrate", "test") for arm in kept[name]["arms"] if arm["arm"] == AUTO}
    return [commit for commit in COMMITS if commit in found]


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
        having = [commit for commit in COMMITS if (commit, cell, "fifo_full_graphs") in arms]
        by_commit = [change(commit, cell, "auto_full_graphs") for commit in columns_of(kept)]
        columns = [cell, change([*COMMITS, *having][-1], cell, "fifo_full_graphs"), *by_commit]
        rows.append(f"| {' | '.join(columns)} |")
    return rows


def test_the_shipped_split_names_cells_once(split: Split) -> None:
    assert len({*split.calibrate, *split.test}) == len(split.calibrate) + len(split.test)
