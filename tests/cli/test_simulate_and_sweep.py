"""What `lamella simulate` and `lamella sweep` answer: a table or a map, what is assumed, a verdict last."""

import json
from pathlib import Path

import pytest

from model_verbs import QUICK, run


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


def test_a_stream_of_requests_says_how_many_and_a_tier_counts_as_transfer(tmp_path: Path) -> None:
    quick = ("--requests", "2", "--concurrency", "1", "--out", str(tmp_path))
    printed = run("simulate", "--rate", "8", "--tier", "5GB/s", *quick)
    assert printed.startswith("2 requests at 8 a second on one NVIDIA H200")
    assert "transfer 433.0 ms (the tier's reading 397.2 of it), prefill 27.2 ms" in printed
    assert "requests come at random, 8 a second on average: 2 of them, so what a longer stream would pile up" in printed
    document = json.loads((tmp_path / "simulate.json").read_text())
    assert document["regime"]["transfer_ns"] == pytest.approx(433.0e6, abs=1e5)
    assert run("simulate", *quick).startswith("1 user on one NVIDIA H200")


def test_one_repeat_has_no_standard_error_and_the_answer_says_so(tmp_path: Path) -> None:
    quick = (
        "--strategy",
        "fifo/1/first",
        "--concurrencies",
        "1",
        "--concurrency",
        "1",
        "--ratios",
        "1",
        "--requests",
        "2",
    )
    printed = run("sweep", *quick, "--repeats", "1", "--out", str(tmp_path))
    assert "Assumed: one repeat has no standard error, so ± is 0 and says nothing" in printed
    assert "standard error over repeats with other seeds" not in printed


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


def test_a_simulation_says_how_much_comes_in_time(tmp_path: Path) -> None:
    """Goodput alone does not: a stream's last answers come after its last request, so that it is less than the rate."""
    printed = run("simulate", "--rate", "8", "--requests", "4", "--slo-ttft", "300ms", "--out", str(tmp_path))
    (heads,) = [line for line in printed.splitlines() if "goodput/s" in line]
    assert heads.split()[-6:] == ["req/s", "goodput/s", "in", "time", "GPU", "link"]
    document = json.loads((tmp_path / "simulate.json").read_text())
    shares = {outcome["strategy"]: outcome["slo_met"] for outcome in document["outcomes"]}
    assert shares["chunk-major"] > shares["recompute"]
    for strategy, share in shares.items():
        (row,) = [line for line in printed.splitlines() if line.lstrip(" →").startswith(f"{strategy} ")]
        assert row.split()[-3] == f"{share:.0%}"


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_without_an_slo_nothing_is_called_in_time(verb: str, tmp_path: Path) -> None:
    """Every answer would be: recomputing behind a queue of seconds was 100% in time."""
    printed = run(verb, *QUICK[verb], "--out", str(tmp_path))
    assert "recompute" in printed
    assert "in time" not in printed
    assert "goodput" not in printed


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
    assert "Assumed: not measured, derived (compute: every step time divided by 0.5, decoding's too" in printed
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


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_graphs_of_prefills_take_their_launches_off_the_host(verb: str, tmp_path: Path) -> None:
    """64 new tokens beside four that decode are launched as decoding is; 192 in 10 ms instead of 24."""
    found = {}
    for tokens in ("0", "512"):
        options = ("--new-tokens", "192", "--overheads", SHIPPED, "--prefill-graphs", tokens)
        printed = run(verb, *QUICK[verb], *options, "--out", str(tmp_path / tokens))
        found[tokens] = json.loads((tmp_path / tokens / f"{verb}.json").read_text())
        said = "steps with prefills of up to 512 tokens replay captured graphs and take 10.3 ms to launch"
        assert (said in printed) == (tokens == "512")
    assert [document["prefill_graphs"] for document in found.values()] == [0, 512]

    def ttft_ns(tokens: str) -> float:
        document = found[tokens]
        outcomes = document["outcomes"] if verb == "simulate" else [one["repeats"][0] for one in document["study"]]
        return next(float(one["mean_ttft_ns"]) for one in outcomes if one["strategy"] == "fifo/1/first")

    assert 3e6 < ttft_ns("0") - ttft_ns("512") < 30e6


def test_explain_says_whose_host_thread_it_was_and_what_handing_out_took(tmp_path: Path) -> None:
    run("simulate", "--requests", "2", "--overheads", SHIPPED, "--out", str(tmp_path))
    printed = run("explain", "slowest", "--trace", str(tmp_path / "simulate.trace.json"))
    assert "  handing out" in printed
    assert "Note: Assumed: overheads of vLLM 0.26.0" in printed


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


def test_extrapolation_is_possible_when_asked_for_and_is_written_down(tmp_path: Path) -> None:
    run("simulate", "--hit-tokens", "140000", "--requests", "2", "--extrapolate", "--out", str(tmp_path))
    assert json.loads((tmp_path / "simulate.json").read_text())["profile"]["extrapolated"] is True
