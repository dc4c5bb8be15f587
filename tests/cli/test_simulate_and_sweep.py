"""`lamella simulate` and `lamella sweep`: a table, a document, a picture, a verdict last; bad input is one sentence and
2."""

import csv
import html
import json
import re
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app
from lamella.reference.release import parse_release
from lamella.sim.profiles import DEFAULT_PROFILE


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    """The last line on stderr, its one sentence."""
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


QUICK = {
    "simulate": ("--requests", "2"),
    "sweep": ("--concurrencies", "1,2", "--concurrency", "2", "--ratios", "1,2", "--requests", "2", "--repeats", "2"),
}


def test_simulate_prints_a_row_a_strategy_and_ends_with_the_verdict(tmp_path: Path) -> None:
    printed = run("simulate", "--requests", "3", "--release", "first:2", "--out", str(tmp_path))
    for strategy in ("chunk-major", "recompute", "round_robin/1/first", "→ fifo/1/first:2"):
        assert strategy in printed
    assert printed.splitlines()[-1].startswith("Turn it on with fifo/1/first:2: mean TTFT -")
    document = json.loads((tmp_path / "simulate.json").read_text())
    assert (document["schema_version"], document["kind"]) == (2, "lamella.simulate")
    assert document["regime"]["hit_tokens"] == 15_152
    assert document["regime"]["overlap_ceiling"] == pytest.approx(0.43, abs=0.01)
    assert document["verdict"] == printed.splitlines()[-1]
    assert {outcome["strategy"] for outcome in document["outcomes"]} >= {"chunk-major", "fifo/1/first:2"}
    assert document["profile"]["sources"][0]["measured"]
    for assumption in document["assumptions"]:
        assert f"Assumed: {assumption}." in printed


def test_sweep_prints_a_map_and_the_point_and_ends_with_what_to_do(tmp_path: Path) -> None:
    arguments = ("--concurrency", "4", "--concurrencies", "4,1", "--ratios", "0.5,4")
    printed = run("sweep", *arguments, "--requests", "4", "--repeats", "2", "--out", str(tmp_path))
    assert "6 regimes × 8 strategies by the recursion" in printed
    assert "1 of them again as discrete events: equal to the nanosecond" in printed
    assert "Break-even concurrency: fifo/1/first pays at every concurrency tried (1 .. 4)." in printed
    last = printed.splitlines()[-1]
    assert last.startswith("Turn it on: width 1, order fifo, release first: mean TTFT -")
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert (document["schema_version"], document["kind"]) == (2, "lamella.sweep")
    assert document["answer"][-1] == last
    assert document["recommended"]["strategy"] == "fifo/1/first"
    assert document["recommended"]["turn_on"] is True
    assert document["break_even"] == {"tried": [1, 4], "pays_at": [1, 4], "interleaving_pays_at": [1]}
    regimes = [(cell["concurrency"], round(cell["transfer_to_prefill"], 1)) for cell in document["cells"]]
    assert regimes == [(1, 0.5), (1, 1.3), (1, 4.0), (4, 0.5), (4, 1.3), (4, 4.0)]
    for cell in document["cells"]:
        assert set(cell["mean_ttft_ns"]) == set(document["strategies"])
        assert 0 < cell["overlap_ceiling"] <= 0.5
        assert cell["hit_fraction"] == cell["hit_tokens"] / (cell["hit_tokens"] + cell["new_tokens"])


def test_the_users_own_point_is_a_cell_of_the_map(tmp_path: Path) -> None:
    run("sweep", *QUICK["sweep"][:-6], "--ratios", "0.5", "--new-tokens", "801", "--requests", "2", "--repeats", "1",
        "--concurrency", "3", "--out", str(tmp_path))  # fmt: skip
    document = json.loads((tmp_path / "sweep.json").read_text())
    cells = {(cell["hit_tokens"], cell["new_tokens"], cell["concurrency"]) for cell in document["cells"]}
    assert (15_152, 801, 3) in cells
    assert (document["point"]["new_tokens"], document["point"]["concurrency"]) == (801, 3)


def test_a_width_that_is_chosen_by_request_is_a_strategy_too(tmp_path: Path) -> None:
    printed = run("simulate", "--width", "auto", "--requests", "3", "--out", str(tmp_path))
    assert "→ auto" in printed
    explained = run("explain", "median", "--trace", str(tmp_path / "simulate.trace.json"))
    assert explained.startswith("Request ")
    assert "(simulated, auto)" in explained


def test_leave_it_off_is_an_answer(tmp_path: Path) -> None:
    arguments = ("--hit-tokens", "64", "--concurrency", "1", "--out", str(tmp_path))
    quick = ("--strategy", "fifo/1/first", "--concurrencies", "1,2", "--requests", "2", "--repeats", "2")
    printed = run("sweep", *arguments, *quick)
    assert printed.splitlines()[-1].startswith("Leave it off (chunk-major): the best layerwise setting, ")
    assert "pays at no concurrency tried (1 .. 2)" in printed
    assert json.loads((tmp_path / "sweep.json").read_text())["recommended"]["turn_on"] is False
    assert run("simulate", *arguments).splitlines()[-1].startswith("Leave it off: fifo/1/first gives mean TTFT")


def test_an_slo_gives_goodput(tmp_path: Path) -> None:
    slo = ("--slo-ttft", "90ms", "--slo-tpot", "1s", "--out", str(tmp_path))
    printed = run("sweep", *QUICK["sweep"], *slo)
    (goodput,) = [line for line in printed.splitlines() if line.startswith("Goodput within the SLO: ")]
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert document["slo"] == {"ttft_ns": 90_000_000, "tpot_ns": 1_000_000_000}
    rates = document["recommended"]["goodput_per_s"]
    assert f"{rates[document['recommended']['best_layerwise']]:.1f} requests/s" in goodput
    run("simulate", *QUICK["simulate"], *slo)
    outcomes = json.loads((tmp_path / "simulate.json").read_text())["outcomes"]
    assert any(0 < outcome["slo_met"] < 1 for outcome in outcomes)
    for outcome in outcomes:
        assert outcome["goodput_per_s"] == pytest.approx(outcome["requests_per_s"] * outcome["slo_met"])


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_prompt_and_the_share_of_it_that_is_found_say_the_same_as_tokens(verb: str, tmp_path: Path) -> None:
    said = run(verb, *QUICK[verb], "--prompt-tokens", "16k", "--hit", "90%", "--out", str(tmp_path / "a"))
    assert "prompts of 16,000 tokens, 14,400 cached + 1,600 new (90% hit)" in said
    run(verb, *QUICK[verb], "--hit-tokens", "14400", "--new-tokens", "1600", "--out", str(tmp_path / "b"))
    first, second = (json.loads((tmp_path / folder / f"{verb}.json").read_text()) for folder in "ab")
    assert first == second


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_link_and_a_gpu_that_were_not_measured_are_said_to_be_derived(verb: str, tmp_path: Path) -> None:
    changed = ("--link", "pcie4", "--compute-speed", "0.5")
    printed = run(verb, *QUICK[verb], *changed, "--out", str(tmp_path))
    assert "Assumed: not measured, derived (link: PCIe 4 x16 by signalling rate, 0.5 × the measured link" in printed
    assert "Assumed: not measured, derived (compute: every step time divided by 0.5)" in printed
    document = json.loads((tmp_path / f"{verb}.json").read_text())
    assert len(document["profile"]["derived"]) == 2
    assert document["profile"]["name"] == "h200-llama-3.1-8b+pcie4+compute-0.5x"


SHIPPED = "vllm-0.26-h200-llama-3.1-8b"


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_measured_host_thread_changes_the_point_and_is_said(verb: str, tmp_path: Path) -> None:
    bare, hosted = (tmp_path / name for name in ("bare", "hosted"))
    assert "steps follow each other on the bare device" in run(verb, *QUICK[verb], "--out", str(bare))
    printed = run(verb, *QUICK[verb], "--overheads", SHIPPED, "--out", str(hosted))
    assert "Assumed: overheads of vLLM 0.26.0 with piecewise and full graphs on NVIDIA H200" in printed
    assert "it schedules a step ahead" in printed
    without, beside = (json.loads((folder / f"{verb}.json").read_text()) for folder in (bare, hosted))
    if verb == "simulate":
        times = [document["outcomes"][0]["mean_ttft_ns"] for document in (without, beside)]
    else:
        assert without["cells"] == beside["cells"], "the map stays the bare device's"
        times = [document["study"][0]["repeats"][0]["mean_ttft_ns"] for document in (without, beside)]
    assert times[1] > 1.05 * times[0]


@pytest.mark.parametrize("host", [(), ("--overheads", SHIPPED)])
@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_decoding_steps_replay_full_graphs_unless_others_are_asked_for(
    verb: str, host: tuple[str, ...], tmp_path: Path
) -> None:
    """A short hit: at contexts like that piecewise steps take visibly longer."""
    ratios = ("--ratios", "0.2") if verb == "sweep" else ()
    short = ("--hit-tokens", "1024", "--new-tokens", "64", *ratios, *host)
    found = {}
    for name, more in (("left out", ()), *((one, ("--full-graphs", one)) for one in ("before", "never"))):
        printed = run(verb, *QUICK[verb], *short, *more, "--out", str(tmp_path / name))
        found[name] = json.loads((tmp_path / name / f"{verb}.json").read_text())
        other = name == "never"
        assert ("decoding steps replay full graphs (full_graphs: before); one that must wait" in printed) != other
        assert ("early release decodes with piecewise graphs (full_graphs: never), the others" in printed) == other
    assert found["left out"] == found["before"]
    assert [found[name]["full_graphs"] for name in ("before", "never")] == ["before", "never"]

    def tpot(name: str, strategy: str) -> float:
        document = found[name]
        outcomes = document["outcomes"] if verb == "simulate" else [one["repeats"][0] for one in document["study"]]
        return next(float(one["mean_tpot_ns"]) for one in outcomes if one["strategy"] == strategy)

    for strategy in ("chunk-major", "recompute"):
        assert tpot("before", strategy) == tpot("never", strategy), "nothing waits there"
    for strategy in ("fifo/1/first", "auto", "round_robin/1/first"):
        assert tpot("never", strategy) > 1.2 * tpot("before", strategy)
    assert verb == "simulate" or found["before"]["cells"] == found["never"]["cells"], "nobody decodes in a burst"


@pytest.mark.parametrize("verb", ["simulate", "sweep", "replay"])
def test_a_profile_with_one_wild_step_time_is_refused_by_that_value(verb: str, tmp_path: Path) -> None:
    profile = json.loads((files("lamella.sim.profiles") / f"{DEFAULT_PROFILE}.json").read_text("utf-8"))
    profile["decode"]["full"]["step_ns"][0][0] *= 100
    (tmp_path / "wild.json").write_text(json.dumps(profile))
    said = refusal(verb, "--profile", str(tmp_path / "wild.json"))
    assert "wild.json: profile.decode.full: step_ns[0][0] = 492,030,000 (batch 1, context 144) cannot be right" in said


def test_explain_says_whose_host_thread_it_was_and_what_handing_out_took(tmp_path: Path) -> None:
    run("simulate", "--requests", "2", "--overheads", SHIPPED, "--out", str(tmp_path))
    printed = run("explain", "slowest", "--trace", str(tmp_path / "simulate.trace.json"))
    assert "  handing out" in printed
    assert "Note: Assumed: overheads of vLLM 0.26.0" in printed


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_the_same_seed_writes_the_same_bytes(verb: str, tmp_path: Path) -> None:
    written = []
    for folder in ("one", "two"):
        run(verb, *QUICK[verb], "--seed", "7", "--out", str(tmp_path / folder))
        written.append({path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()})
    assert written[0] == written[1]
    run(verb, *QUICK[verb], "--seed", "8", "--out", str(tmp_path / "other"))
    assert (tmp_path / "other" / f"{verb}.json").read_bytes() != written[0][f"{verb}.json"]


def test_a_sweep_in_processes_or_resumed_writes_the_same_bytes(tmp_path: Path) -> None:
    def sweep(folder: str, *more: str) -> bytes:
        run("sweep", *QUICK["sweep"], *more, "--out", str(tmp_path / folder))
        return (tmp_path / folder / "sweep.json").read_bytes()

    plain = sweep("plain", "--engine", "serial")
    journal = tmp_path / "journal"
    assert sweep("processes", "--engine", "processes", "--workers", "2", "--journal", str(journal)) == plain
    for name in ("map.jsonl", "point.jsonl"):
        lines = (journal / name).read_bytes().splitlines(keepends=True)
        (journal / name).write_bytes(b"".join(lines[: len(lines) // 2 + 1]))
    assert sweep("resumed", "--journal", str(journal)) == plain
    other = ("sweep", *QUICK["sweep"], "--seed", "9", "--journal", str(journal))
    assert "the journal of another sweep" in refusal(*other, "--out", str(tmp_path / "refused"))
    other = ("sweep", *QUICK["sweep"], "--full-graphs", "never", "--journal", str(journal))
    assert "the journal of another sweep" in refusal(*other, "--out", str(tmp_path / "refused"))


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_pictures_are_written_where_matplotlib_is_and_the_page_has_them_inside(verb: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    run(verb, *QUICK[verb], "--out", str(tmp_path))
    assert (tmp_path / f"{verb}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / f"{verb}.html").read_text()
    assert page.count('src="data:image/png;base64,') == (2 if verb == "sweep" else 1)
    document = json.loads((tmp_path / f"{verb}.json").read_text())
    verdict = document["verdict"] if verb == "simulate" else document["answer"][-1]
    assert html.escape(verdict) in page


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_the_page_needs_nothing_from_elsewhere(verb: str, tmp_path: Path) -> None:
    run(verb, *QUICK[verb], "--out", str(tmp_path))
    page = (tmp_path / f"{verb}.html").read_text()
    assert [source for source in re.findall(r"(?:src|href)=\"([^\"]*)", page) if not source.startswith("data:")] == []
    assert not re.search(r"<(?:script|link|iframe)|@import|url\(", page)


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_without_matplotlib_it_says_how_to_get_it_and_goes_on(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(build_app(), [verb, *QUICK[verb], "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "No picture: pictures need matplotlib: pip install 'lamella[plot]'" in result.stderr
    assert not list(tmp_path.glob("*.png"))
    assert (tmp_path / f"{verb}.json").exists()
    assert "No picture: pictures need matplotlib" in (tmp_path / f"{verb}.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rate", "3"), "requests come at random, 3 a second on average"),
        (("--think", "2s"), "users ask again as soon as they are answered, 2 s later"),
        (
            ("--turns", "3", "--think", "500ms"),
            "users have conversations of 3 turns, 64 tokens a question, thinking 0.5 s",
        ),
    ],
)
def test_requests_come_as_asked(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    printed = run("simulate", "--requests", "4", *options, "--out", str(tmp_path))
    assert f"Assumed: {said}" in printed
    assert json.loads((tmp_path / "simulate.json").read_text())["arrivals"].startswith(said)


@pytest.mark.parametrize(
    ("options", "said", "slower"),
    [
        (("--tier", "5GB/s:1ms"), "all hits lie in a tier of 5GB/s:1ms, which brings one slice after another", True),
        (("--ranks", "1,0.5"), "2 tensor-parallel ranks, whose links each carry what the profile's one would", True),
        (("--ranks", "2"), "2 tensor-parallel ranks, whose links each carry what the profile's one would", False),
        (("--sharing", "equal"), "loads share the link equally, whatever the order says", True),
    ],
)
def test_what_a_load_passes_on_its_way_can_be_said(
    options: tuple[str, ...], said: str, slower: bool, tmp_path: Path
) -> None:
    def mean_ttft(folder: str, *more: str) -> float:
        run("simulate", "--requests", "3", *more, "--out", str(tmp_path / folder))
        document = json.loads((tmp_path / folder / "simulate.json").read_text())
        assert bool(document["way"]) == bool(more)
        (one,) = [one for one in document["outcomes"] if one["strategy"] == "fifo/1/first"]
        found: float = one["mean_ttft_ns"]
        return found

    plain, other = mean_ttft("plain"), mean_ttft("other", *options)
    assert other > 1.2 * plain if slower else other == plain
    assert said in json.loads((tmp_path / "other" / "simulate.json").read_text())["way"][0]


def test_the_table_has_a_row_for_each_request_of_each_strategy(tmp_path: Path) -> None:
    run("simulate", "--requests", "3", "--table", str(tmp_path / "all.csv"), "--out", str(tmp_path))
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    document = json.loads((tmp_path / "simulate.json").read_text())
    for outcome in document["outcomes"]:
        mine = [row for row in rows if row["strategy"] == outcome["strategy"]]
        assert len(mine) == 12
        mean = sum(int(row["ttft_ns"]) for row in mine) / len(mine)
        assert mean == pytest.approx(outcome["mean_ttft_ns"])
    for row in rows:
        assert sum(int(value) for name, value in row.items() if name.startswith("part_")) == int(row["ttft_ns"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("simulate", "--width", "0"), "a width is a positive number or a schedule"),
        (("simulate", "--width", "40"), "layers_per_slice must be between 1 and 32, got 40"),
        (("simulate", "--order", "lifo"), "order must be one of fifo, shortest_remaining, deadline, round_robin"),
        (("simulate", "--release", "late"), "release must be one of whole, first"),
        (("simulate", "--release", "first:33"), "release after 33 layers needs as many, but the load has 32"),
        (("simulate", "--hit-tokens", "0"), "hit_tokens must be at least 1, got 0"),
        (("simulate", "--requests", "0"), "requests must be at least 1, got 0"),
        (("simulate", "--new-tokens", "200000"), "does not cover"),
        (("simulate", "--model", "llama-3.1-70b"), "has step times of llama-3.1-8b, not of llama-3.1-70b"),
        (("simulate", "--profile", "nope"), "no profile 'nope'; shipped: h200-llama-3.1-8b"),
        (("sweep", "--hit-tokens", "0"), "hit_tokens must be at least 1, got 0"),
        (("sweep", "--hit-tokens", "200000"), "does not cover 200,000 cached"),
        (("sweep", "--concurrencies", "1,x"), "each concurrency must be a number, got 'x'"),
        (("sweep", "--concurrencies", "0"), "each concurrency must be positive, got 0"),
        (("sweep", "--concurrency", "0"), "concurrency must be at least 1, got 0"),
        (("sweep", "--ratios", ""), "each ratio must be a number, got ''"),
        (("sweep", "--repeats", "0"), "repeats must be at least 1, got 0"),
        (("sweep", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("sweep", "--engine", "cluster"), "engine must be one of auto, serial, processes, ray; got 'cluster'"),
        (("sweep", "--workers", "0"), "workers must be at least 1, got 0"),
        (("sweep", "--strategy", "round_robin/1/first"), "a study needs a layerwise strategy besides interleaving"),
        (("sweep", "--prompt-tokens", "16k"), "--prompt-tokens and --hit go together"),
        (("sweep", "--hit", "90%"), "--prompt-tokens and --hit go together"),
        (("sweep", "--prompt-tokens", "16x", "--hit", "90%"), "prompt_tokens must be a whole number of tokens"),
        (("sweep", "--prompt-tokens", "16k", "--hit", "100%"), "hit must be a share above 0 and below 1"),
        (
            ("simulate", "--width", "auto", "--order", "round_robin"),
            "one load after another; got round_robin and first",
        ),
        (("simulate", "--question-tokens", "10"), "add --turns, got 10 alone"),
        (("simulate", "--table", "no-folder/x.csv"), "make the folder no-folder first"),
        (("sweep", "--prompt-tokens", "16", "--hit", "90%"), "is not one block of 16"),
        (("sweep", "--prompt-tokens", "16k", "--hit", "90%", "--hit-tokens", "5"), "not both"),
        (
            ("sweep", "--overheads", "nobodys"),
            "no overheads 'nobodys' (No such file or directory); shipped are vllm-0.26",
        ),
        (("sweep", "--link", "pcie9"), "a link is one of pcie3, pcie4, pcie5, pcie6, such as pcie4 or pcie4x8"),
        (("sweep", "--compute-speed", "0"), "compute speed must be between 0.01 and 100"),
        (("sweep", "--slo-ttft", "fast"), "a time is a positive number with us, ms or s, such as 200ms, got 'fast'"),
        (
            ("simulate", "--tier", "fast"),
            "a tier is a rate such as 5GB/s, perhaps with a latency: 5GB/s:1ms; got 'fast'",
        ),
        (("simulate", "--tier", "5GB/s:soon"), "a time is a positive number with us, ms or s"),
        (("simulate", "--ranks", "0"), "ranks are a number up to 64, or the speed of each one's link up to 1"),
        (("simulate", "--ranks", "1,2"), "ranks are a number up to 64, or the speed of each one's link up to 1"),
        (("simulate", "--full-graphs", "inside"), "full_graphs must be one of before, never (of waits inside a graph"),
        (("sweep", "--full-graphs", ""), "there is no model), got ''"),
        (("simulate", "--sharing", "fair"), "sharing must be one of serial, equal; got 'fair'"),
        (("simulate", "--rate", "0"), "a rate must be between 0.001 and 100,000 requests a second, got 0"),
        (("simulate", "--rate", "2", "--turns", "2"), "give one of them"),
        (("simulate", "--turns", "0"), "turns must be at least 1, got 0"),
        (("simulate", "--turns", "3000"), "does not cover"),
        (("simulate", "--table", "requests.xlsx"), "requests are written as .csv or .parquet, got requests.xlsx"),
        (("sweep", "--concurrency", "500"), "500 requests at once"),
        (("sweep", "--ratios", "100"), "no number of new tokens over 15,152 cached ones gives T/P = 100"),
        (("sweep", "--ratios", "nan"), "each ratio must be positive, got nan"),
        (("sweep", "--strategy", "fifo/1"), "a strategy is chunk-major, recompute, auto or order/width/release"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(*arguments, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_help_names_every_release_rule() -> None:
    with pytest.raises(ValueError, match="release must be one of") as refused:
        parse_release("")
    forms = re.sub(r" \([^)]*\)", "", str(refused.value).partition("one of ")[2].partition(";")[0]).split(", ")
    said = " ".join(run("simulate", "--help").split())
    assert {form for form in forms if not re.search(rf"(?<![a-z:]){re.escape(form)}(?![a-z:])", said)} == set()
    assert "weighed" in forms


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(verb: str, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert f"{taken}: File exists" in " ".join(refusal(verb, "--out", str(taken)).split())
    (tmp_path / f"{verb}.json").mkdir()
    assert f"{verb}.json: Is a directory" in " ".join(refusal(verb, "--out", str(tmp_path)).split())
    assert taken.read_text() == "a file"


def test_extrapolation_is_possible_when_asked_for_and_is_written_down(tmp_path: Path) -> None:
    run("simulate", "--hit-tokens", "140000", "--requests", "2", "--extrapolate", "--out", str(tmp_path))
    assert json.loads((tmp_path / "simulate.json").read_text())["profile"]["extrapolated"] is True
