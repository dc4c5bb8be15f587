"""`lamella replay` gives a table and a verdict, says what it assumed, and answers bad input with a sentence."""

import csv
import html
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lamella.cli.main import build_app
from lamella.reference.chrome_trace import from_chrome_trace
from lamella.sim.replay import ARMS
from lamella.sim.workload import TraceRequest, generate_conversations


def run(*arguments: str, trace_variable: str = "") -> Result:
    return CliRunner().invoke(build_app(), ["replay", *arguments], env={"LAMELLA_TRACE": trace_variable})


def write_trace(path: Path, requests: list[TraceRequest]) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": request.arrival_ns // 1_000_000,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.chunk_ids),
            }
        )
        for request in requests
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    beyond = TraceRequest(10**12, 150_000, 3, tuple(range(10**7, 10**7 + 293)))
    return write_trace(tmp_path / "chats.jsonl", [*generate_conversations(1, 10), beyond])


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_it_names_trace_instances_profile_and_arms_and_ends_with_a_verdict(trace: Path) -> None:
    result = run(str(trace))
    assert result.exit_code == 0, result.output
    lines = result.stdout.strip().splitlines()
    assert lines[0].startswith("chats.jsonl: ")
    assert "over 1 instance (" in lines[0]
    assert "(chosen for a load of at most 50%" in lines[0]
    for arm in ("chunk-major", "round_robin/auto/first", "fifo/auto/first", "fifo/auto/jit:step", "recompute"):
        assert any(line.startswith(f"  {arm} ") for line in lines)
    assert not any("--overheads" in line for line in lines), "an option that this verb has not"
    assert lines[-1].startswith(("Use ", "Leave it off: "))
    assert any("1 request lies outside the profile" in line for line in lines)


def test_decoding_steps_replay_full_graphs_unless_others_are_asked_for(tmp_path: Path) -> None:
    chats = write_trace(tmp_path / "chats.jsonl", [TraceRequest(at * 10**9, 1_200, 40, (1, 2, 3)) for at in range(8)])
    found = {}
    for name, more in (("left out", ()), *((one, ("--full-graphs", one)) for one in ("before", "never"))):
        result = run(str(chats), *more, "--json", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        found[name] = document(tmp_path / name)
        other = name == "never"
        assert ("\nAssumed: decoding steps replay full graphs (full_graphs: before)" in result.stdout) != other
        assert ("\nAssumed: early release decodes with piecewise graphs (full_graphs: never)" in result.stdout) == other
    assert found["left out"] == found["before"]
    assert found["never"]["settings"] == {**found["before"]["settings"], "full_graphs": "never"}
    for before, never in zip(found["before"]["arms"], found["never"]["arms"], strict=True):
        if before["arm"] in ("chunk-major", "recompute", "chunk-major-in-turn"):
            assert before == never
        else:
            assert never["tpot"]["mean_ns"] > 1.1 * before["tpot"]["mean_ns"]
    assert "full_graphs must be one of before, never" in run(str(chats), "--full-graphs", "inside").stderr


def test_what_was_written_is_said_above_the_verdict_and_nothing_where_nothing_was(trace: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "out.html", "out.csv", "out.trace.json")]
    options = zip(("--json", "--html", "--table", "--trace-out"), map(str, files), strict=True)
    *_, said, verdict = run(str(trace), *(part for option in options for part in option)).stdout.splitlines()
    assert said == f"Written: {', '.join(map(str, files))}"
    assert all(path.stat().st_size for path in files)
    assert verdict.startswith(("Use ", "Leave it off: "))
    assert "Written" not in run(str(trace)).stdout


def test_speed_goes_to_stderr(trace: Path) -> None:
    result = run(str(trace))
    assert "times real time" in result.stderr
    assert "times real time" not in result.stdout


def test_the_document_holds_everything_the_table_shows_and_the_excluded_requests(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run(str(trace), "--instances", "2", "--json", str(out)).exit_code == 0
    found = document(out)
    assert (found["schema_version"], found["kind"]) == (2, "lamella.replay")
    assert found["routing"]["instances"] == 2
    assert found["settings"]["instances_chosen"] is False
    (excluded,) = found["routing"]["excluded"]
    assert excluded["input_tokens"] == 150_000
    assert [arm["num_requests"] for arm in found["arms"]] == [found["routing"]["requests"]] * len(ARMS)
    for arm in found["arms"]:
        assert set(arm["ttft"]) == {"mean_ns", "p50_ns", "p90_ns", "p99_ns"}
        assert isinstance(arm["saturated"], bool)
    assert found["profile"]["sources"]
    assert found["verdict"]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    outs = [tmp_path / f"{i}.json" for i in range(3)]
    for out, seed in zip(outs, ("4", "4", "5"), strict=True):
        assert run("--seed", seed, "--limit", "40", "--json", str(out)).exit_code == 0
    first, second, third = (out.read_bytes() for out in outs)
    assert first == second != third


def test_in_processes_or_resumed_it_writes_the_same_bytes(trace: Path, tmp_path: Path) -> None:
    def replayed(name: str, *more: str) -> bytes:
        out = tmp_path / name
        result = run(str(trace), "--instances", "3", "--slo-ttft", "100ms", "--json", str(out), *more)
        assert result.exit_code == 0, result.output
        return out.read_bytes()

    plain = replayed("plain", "--engine", "serial")
    journal = tmp_path / "journal"
    assert replayed("processes", "--engine", "processes", "--workers", "2", "--journal", str(journal)) == plain
    lines = (journal / "replay.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(ARMS) * 3
    (journal / "replay.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:20])
    assert replayed("resumed", "--journal", str(journal)) == plain
    other = run(str(trace), "--instances", "2", "--journal", str(journal))
    assert other.exit_code == 2
    assert "the journal of another sweep" in other.stderr.replace("\n", " ")


def test_without_an_slo_no_arm_is_called_in_time(trace: Path) -> None:
    unasked = run(str(trace)).stdout
    assert "in time" not in unasked
    assert "goodput" not in unasked
    asked = run(str(trace), "--slo-ttft", "1s").stdout
    assert "in time" in asked
    (row,) = [line for line in asked.splitlines() if line.startswith("  auto ")]
    assert row.split()[-4].endswith("%")


def test_goodput_counts_the_answers_within_the_slo(trace: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "out.json", tmp_path / "all.csv"
    assert run(str(trace), "--slo-ttft", "60ms", "--json", str(out), "--table", str(table)).exit_code == 0
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for arm in document(out)["arms"]:
        mine = [row for row in rows if row["strategy"] == arm["arm"]]
        assert len(mine) == arm["num_requests"]
        met = [row for row in mine if int(row["ttft_ns"]) <= 60_000_000]
        assert arm["slo_met"] == pytest.approx(len(met) / len(mine))
        last_s = max(int(row["end_ns"]) for row in mine) / 1e9
        assert arm["goodput_per_s"] == pytest.approx(len(met) / last_s)
    assert 0 < document(out)["arms"][0]["slo_met"] < 1


def test_an_instance_can_be_traced_and_its_requests_explained(trace: Path, tmp_path: Path) -> None:
    out, traced = tmp_path / "out.json", tmp_path / "trace.json"
    options = ("--trace-out", str(traced), "--trace-arm", "round_robin/auto/first", "--json", str(out))
    assert run(str(trace), *options).exit_code == 0
    (arm,) = [arm for arm in document(out)["arms"] if arm["arm"] == "round_robin/auto/first"]
    recording = from_chrome_trace(document(traced))
    ttft = [one.ttft_ns for one in recording.requests]
    assert (len(ttft), sum(ttft) // len(ttft)) == (arm["num_requests"], arm["ttft"]["mean_ns"])
    explained = CliRunner().invoke(build_app(), ["explain", "slowest", "--trace", str(traced)])
    assert explained.exit_code == 0
    assert f"first token after {max(ttft) / 1e6:,.3f} ms" in explained.stdout


def test_a_page_has_the_picture_the_table_and_the_verdict(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    page = tmp_path / "page.html"
    result = run(str(trace), "--html", str(page))
    assert result.exit_code == 0
    text = page.read_text()
    assert text.count('src="data:image/png;base64,') == 1
    assert html.escape(result.stdout.strip().splitlines()[-1]) in text
    assert "<td>recompute</td>" in text


def test_without_a_trace_it_says_that_the_sample_is_generated() -> None:
    assert "a generated sample of conversations (no trace given; seed 0)" in run("--limit", "5").stdout


def test_the_trace_can_be_named_by_the_environment(trace: Path) -> None:
    assert run("--limit", "5", trace_variable=str(trace)).stdout.startswith("chats.jsonl: 5 requests")


def test_a_rate_that_one_gpu_cannot_carry_is_called_saturated(trace: Path) -> None:
    assert "saturated" in run(str(trace), "--instances", "1", "--rate-scale", "100").stdout


def test_without_a_pool_every_arm_does_the_same_work(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run(str(trace), "--pool-gib", "0", "--json", str(out)).exit_code == 0
    found = document(out)
    assert found["routing"]["hit_share"] == 0
    assert (
        len({arm["ttft"]["p50_ns"] for arm in found["arms"] if "first" not in arm["arm"] and "jit" not in arm["arm"]})
        == 1
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--instances", "0"], "instances must be between 1 and 1024, got 0"),
        (["--width", "33"], "width must be between 1 and 32 layers, got 33"),
        (["--width", "0"], "width must be between 1 and 32 layers, got 0"),
        (["--rate-scale", "0"], "rate_scale must be between 1e-6 and 1e6, got 0.0"),
        (["--rate-scale", "inf"], "rate_scale must be between 1e-6 and 1e6, got inf"),
        (["--rate-scale", "1e-300"], "rate_scale must be between 1e-6 and 1e6, got 1e-300"),
        (["--pool-gib", "-1"], "pool_gib must be between 0 and 1,073,741,824, got -1"),
        (["--pool-gib", "nan"], "pool_gib must be between 0 and 1,073,741,824, got nan"),
        (["--gpu-cache-gib", "inf"], "gpu_cache_gib must be between 0 and 1,073,741,824, got inf"),
        (["--json", "/"], "/: Is a directory"),
        (["--trace-out", "t.json", "--trace-arm", "first"], "trace_arm must be one of chunk-major, fifo/auto/first"),
        (["--trace-out", "t.json", "--trace-instance", "9"], "trace_instance must be between 0 and 0, got 9"),
        (["--table", "all.txt"], "requests are written as .csv or .parquet, got all.txt"),
        (["--engine", "gpu"], "engine must be one of auto, serial, processes, ray; got 'gpu'"),
        (["--limit", "0"], "limit must be at least 1, got 0"),
        (["--profile", "h300"], "no profile 'h300'; shipped: h200-llama-3.1-8b"),
        (["--json", "/no/such/folder/out.json"], "/no/such/folder/out.json: No such file or directory"),
        (["--trace-arm", "chunk-major"], "add --trace-out FILE"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(trace: Path, arguments: list[str], message: str) -> None:
    result = run(str(trace), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_a_broken_line_gets_its_number_a_remedy_and_exit_code_2(trace: Path) -> None:
    with trace.open("a") as lines:
        lines.write('{"timestamp": 5\n')
    number = len(trace.read_text().splitlines())
    result = run(str(trace))
    assert result.exit_code == 2
    assert f"line {number}: not JSON" in result.stderr
    assert "repair or remove the line" in result.stderr


def test_a_trace_that_is_not_there_gets_exit_code_2(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
