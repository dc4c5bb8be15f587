"""`lamella bench transfer` measures on any device, checks the bytes, and writes down every repeat."""

import json
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lamella.cli._sizes import parse_bytes
from lamella.cli.main import build_app
from lamella.cuda_ext import bench_cases
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.device import Device
from lamella.reference.plan import Direction

QUICK = ["--device", "cpu", "--size", "2MiB", "--layers", "4", "--repeats", "2", "--rows", "16"]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["bench", "transfer", *arguments])


@pytest.fixture(scope="module", autouse=True)
def _needs_the_native_library() -> None:
    try:
        Device("cpu")
    except LibraryMissingError as missing:
        pytest.skip(str(missing))


def test_a_quick_run_on_the_cpu_reports_every_shape_with_ratios_that_follow_from_its_repeats(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = _run(*QUICK, "--beside", "idle", "--no-host-cost", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["schema_version"] == 1
    assert report["provenance"]["device"] == "cpu"
    assert report["provenance"]["command"].startswith("lamella ")
    kinds = {(row["shape"], row["direction"], row["width"]) for row in report["rows"]}
    for shape in (*bench_cases.MAIN_SHAPES, bench_cases.BLOCK_SHAPE):
        for direction, width in (("retrieve", "1"), ("retrieve", "4"), ("store", "1"), ("retrieve with store", "1")):
            assert (shape.name, direction, width) in kinds
    for shape in bench_cases.SMALL_SHAPES:
        assert {(shape.name, "retrieve", "1"), (f"{shape.name}, in order", "retrieve", "1")} <= kinds
    for row in report["rows"]:
        assert len(row["total"]["values_ns"]) == 2
        expected = statistics.median(row["total"]["values_ns"]) / statistics.median(row["raw"]["values_ns"])
        assert row["ratio"] == pytest.approx(expected, abs=1e-4)
        assert 0 < row["first"]["values_ns"][0] <= row["total"]["values_ns"][0]
    assert "packed NHD" in result.output


def test_host_cost_is_measured_for_both_carriers(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = _run("--device", "cpu", "--size", "1MiB", "--layers", "2", "--repeats", "1", "--beside", "idle",
                  "--no-short-runs", "--json", str(path))  # fmt: skip
    assert result.exit_code == 0, result.output
    host = json.loads(path.read_text())["host"]
    assert [(cost["num_objects"], cost["carrier"]) for cost in host] == [
        (32, "event"), (32, "value"), (512, "event"), (512, "value"),
    ]  # fmt: skip
    assert all(cost["submit"]["values_ns"][0] > 0 for cost in host)


def test_loads_that_need_torch_are_measured_or_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = _run(*QUICK, "--beside", "here,elsewhere", "--no-short-runs", "--no-host-cost", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    measured = {row["beside"] for row in report["rows"]}
    named = {reason.partition(":")[0] for reason in report["skipped"]}
    assert measured | named == {"products here", "products elsewhere"}
    assert bool(report["slowdowns"]) == ("products here" in measured)


def test_wrong_bytes_end_the_run_instead_of_giving_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: bench_cases.BenchMemory, direction: Direction) -> None:
        self._cache.fill(0)
        check(self, direction)

    check = bench_cases.BenchMemory.check
    monkeypatch.setattr(bench_cases.BenchMemory, "check", wrong)
    result = _run(*QUICK, "--beside", "idle")
    assert result.exit_code == 1
    assert "does not hold the objects' bytes" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], 'a device is "cpu" or "cuda:N", got \'tpu\''),
        (["--device", "cuda:99"], "lamella doctor says what this machine has, and --device cpu needs no GPU"),
        (["--device", "cpu", "--size", "many"], "a size is a whole number with KiB"),
        (["--device", "cpu", "--size", "1"], "the size must be between 64 KiB and"),
        (["--device", "cpu", "--size", "999999999GiB"], "of which this machine's memory holds 4"),
        (["--device", "cpu", "--json", "/"], "/: Is a directory"),
        (["--device", "cpu", "--beside", "idle,lunch"], "beside names idle, here, elsewhere, got lunch"),
        (["--device", "cpu", "--json", "/no/such/folder/x.json"], "/no/such/folder/x.json: No such file"),
        (["--device", "cpu", "--profile", "/no/such/profile.json"], "profile.json: No such file or directory"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_anything_is_measured(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--side", "both"], "Error: Invalid value: side is worker or server, got 'both'"),
        (["--form", "word"], "Error: Invalid value: form is token or block, got 'word'"),
        (
            ["--folder", "/no/such/folder"],
            "Error: Invalid value: no server to measure: /no/such/folder: No such file or directory; start one with "
            "`lamella serve`",
        ),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(build_app(), ["bench", "server", "--device", "cpu", "--size", "1MiB", *arguments])
    assert result.exit_code == 2, result.output
    assert result.output.strip().splitlines()[-1] == message


@pytest.mark.parametrize("text", ["", "0", "1.5GiB", "GiB", "-1", "12 parsecs", "１GiB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a whole number"):
        parse_bytes(text)
