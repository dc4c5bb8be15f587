"""`lamella calibrate` writes a profile that the method chooser and the simulator load, and says what it measured."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lamella.cli.main import build_app
from lamella.cuda_ext import calibrate, prefill_times
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.beside import torch_reason
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.rates import EngineRates
from lamella.reference.profile import CopyMethod, choose_copy_method
from lamella.reference.tables import PrefillTable
from lamella.sim.profiles import load_profile
from lamella.sim.what_if import derivations

KIB = 1024


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["calibrate", *arguments])


@pytest.fixture(scope="module", autouse=True)
def _needs_the_native_library() -> None:
    try:
        Device("cpu")
    except LibraryMissingError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "RUNS", (2 * KIB, 64 * KIB))


@pytest.mark.usefixtures("quick")
def test_the_profile_measured_on_the_cpu_serves_the_chooser_the_engine_and_the_simulator(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    result = _run(str(path), "--device", "cpu", "--size", "1MiB", "--repeats", "1")
    assert result.exit_code == 0, result.output
    profile, base = load_profile(str(path)), load_profile()
    assert profile.name == "here"
    for method in CopyMethod:
        least, most = profile.curve(method).slowdown
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(f"{method.value}: GB/s by run ")]
        assert line.endswith(f" ns a run; computing beside it takes {least:.0%} to {most:.0%} longer")
    assert profile.device != base.device
    assert (profile.model, profile.prefill, profile.decode, profile.engine) == (
        base.model, base.prefill, base.decode, base.engine,
    )  # fmt: skip
    assert profile.wire != base.wire
    for method in CopyMethod:
        assert profile.curve(method).run_bytes == (2 * KIB, 64 * KIB)
        assert profile.curve(method).bytes_per_s != base.curve(method).bytes_per_s[:2]
    assert choose_copy_method(profile, 64 * KIB, uniform_stride=True, busy=True) in CopyMethod
    assert EngineRates.from_profile(profile).run_bytes == (2 * KIB, 64 * KIB)
    covers = [source.covers for source in profile.sources]
    assert covers[0] == "wire, copies"
    assert "device cpu" in profile.sources[0].system, "figures of memcpy are marked as such"
    assert any(cover.startswith("engine, prefill, decode from h200-llama-3.1-8b") for cover in covers[1:])
    assert derivations(profile) == [
        "not measured, engine, prefill, decode are those of h200-llama-3.1-8b, carried over"
    ]


@pytest.mark.usefixtures("quick")
def test_without_torch_the_slowdowns_are_the_bases_and_the_profile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "torch_reason", lambda device: "torch is away")
    path = tmp_path / "here.json"
    assert _run(str(path), "--device", "cpu", "--size", "1MiB", "--repeats", "1", "--prefill").exit_code == 0
    profile, base = load_profile(str(path)), load_profile()
    assert all(profile.curve(method).slowdown == base.curve(method).slowdown for method in CopyMethod)
    assert "slowdowns are the base profile's (h200-llama-3.1-8b): torch is away" in profile.sources[0].note
    assert profile.prefill == base.prefill


@pytest.mark.skipif(torch_reason("cpu") is not None, reason="torch is not installed")
def test_prefill_steps_are_timed_at_the_bases_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"tiny": prefill_times.LayerShape(64, 128, 4, 2, 16)}
    monkeypatch.setattr(prefill_times, "STAND_INS", tiny)
    nodes = PrefillTable((0, 8, 32), (1, 16), ((1, 1, 1), (1, 1, 1)))
    table = prefill_times.measure_prefill("cpu", "tiny", 2, nodes)
    assert (table.cached_tokens, table.new_tokens) == (nodes.cached_tokens, nodes.new_tokens)
    assert min(map(min, table.step_ns)) > 1000
    with pytest.raises(ValueError, match="no layer shape is known for 'gpt'; known: tiny"):
        prefill_times.measure_prefill("cpu", "gpt", 2, nodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile.txt", "--device", "cpu"], "must be a .json file"),
        (["/no/such/folder/p.json", "--device", "cpu"], "folder that exists"),
        (["p.json", "--device", "cpu", "--base", "nobody"], "no profile 'nobody'"),
        (["p.json", "--device", "cpu", "--size", "1"], "the size must be between 64 KiB and"),
        (["p.json", "--device", "cpu", "--size", "999999999GiB"], "of which this machine's memory holds 4"),
        (["/proc/p.json", "--device", "cpu"], "/proc/p.json: No such file"),
        (["p.json", "--device", "cpu:3"], 'a device is "cpu" or "cuda:N"'),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


def test_a_written_profile_is_json_that_reads_back_equal(tmp_path: Path) -> None:
    from lamella.reference.profile import profile_from_mapping, profile_to_mapping

    profile = load_profile()
    assert profile_from_mapping(json.loads(json.dumps(profile_to_mapping(profile)))) == profile
