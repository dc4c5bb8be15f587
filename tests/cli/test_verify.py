"""`lamella verify`: what held, in a table; what does not, as a counterexample and 1; bad input, a sentence and 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine_driver import ENGINE_MISSING
from lamella.cli.main import build_app
from lamella.reference.layout import LAYOUTS
from lamella.reference.models import MODELS
from mutants import MUTANTS, NATIVE_SOURCES, plant
from native_build import COMPILER, NATIVE_MISSING, compile_library

TINY = ("--layers", "4", "--heads", "2", "--head-dim", "8", "--chunk-tokens", "32")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["verify", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["verify", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


def test_the_table_names_each_law_executor_width_and_seed_and_ends_with_the_verdict() -> None:
    printed = run(*TINY, "--seed", "7", "--device", "numpy")
    assert "Seed 7." in printed
    assert "NumPy, asked for" in printed
    for part in ("numpy, direct", "numpy, staged", "chunk-major 1 2 3 4", "[1,1,2,4]", "store, then retrieve"):
        assert part in printed
    assert printed.splitlines()[-1].startswith("Every law holds: ")


def test_json_says_the_same_and_when_nothing_is_broken_there_is_no_counterexample() -> None:
    document = json.loads(run(*TINY, "--json", "--width", "3", "--width", "1,2"))
    assert (document["schema_version"], document["kind"], document["holds"]) == (1, "lamella.verify", True)
    assert len(document["rows"]) == 8
    assert document["rows"][0]["widths"] == ["3", "[1,2]"]
    assert all(row["broken"] is None and row["counterexample"] is None for row in document["rows"])
    assert all(row["bytes_moved"] > 0 for row in document["rows"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["token", "block"])
def test_every_named_layout_can_be_verified_in_both_forms(layout: str, form: str) -> None:
    geometry = ("--layers", "3", "--kv", "1", "--heads", "1", "--head-dim", "24") if layout == "mla" else TINY
    printed = run(*geometry, "--chunk-tokens", "32", "--layout", layout, "--form", form, "--width", "2")
    assert "Every law holds" in printed


@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_model_can_be_verified(model: str) -> None:
    printed = run("--model", model, "--tokens", "40", "--chunk-tokens", "64", "--width", "7")
    assert model in printed
    assert "Every law holds" in printed


def test_nothing_to_move_is_not_called_a_success() -> None:
    printed = run(*TINY, "--block-ids", "5,11", "--skip-tokens", "32")
    assert "Every law holds" not in printed
    assert printed.strip().endswith("No byte was to be moved, and none was: every token is skipped or in a null block.")


def test_a_few_bytes_that_were_moved_are_not_called_none() -> None:
    smallest = ("--layers", "1", "--heads", "1", "--head-dim", "1", "--element-bytes", "1", "--block-tokens", "1")
    printed = run(*smallest, "--tokens", "1", "--width", "1")
    assert re.search(r"Every law holds: \d+ B moved", printed), printed


def test_a_users_own_block_table_is_checked_as_it_is() -> None:
    document = json.loads(
        run(*TINY, "--block-ids", "5,0,11,7", "--null-block", "0", "--skip-tokens", "3", "--width", "2", "--json")
    )
    assert document["tokens"] == [64]
    assert document["rows"][0]["bytes_moved"] == (64 - 16 - 3) * 4 * 2 * 16 * 2


@pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))
def test_the_transfer_engine_is_a_device_too() -> None:
    document = json.loads(run(*TINY, "--device", "engine", "--width", "1", "--width", "3", "--json"))
    assert document["executor"] == "the transfer engine on cpu, asked for"
    assert [row["law"] for row in document["rows"]] == [
        "retrieve: exactly the oracle's bytes",
        "store: exactly the oracle's bytes",
    ]
    assert document["holds"]


@pytest.mark.skipif(COMPILER is None or NATIVE_MISSING is not None, reason="no native library to plant a fault in")
def test_a_difference_is_exit_code_1_with_a_minimal_counterexample(tmp_path: Path) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "K runs of an object swapped")
    sources = plant(mutant, tmp_path) / "cuda_ext" / "csrc"
    library = tmp_path / "native" / "liblamella_cpu.so"
    compile_library([sources / name for name in NATIVE_SOURCES], sources / "include", library)
    done = subprocess.run(
        [sys.executable, "-c", "from lamella.cli.main import main; main()", "verify", *TINY],
        env={**os.environ, "LAMELLA_LIBRARY_DIR": str(library.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "BROKEN: retrieve: exactly the oracle's bytes (native-2, direct): " in done.stdout
    assert "first at engine group 0 layer 0 kv 0 block 0 token 0 head 0 dim 0" in done.stdout
    small = done.stdout.partition("The smallest case found that shows it:")[2]
    for part in ("layers=(0,)", "kv=2", "num_heads=1", "head_dim=1", "element_bytes=1", "num_tokens=1", "width=None"):
        assert part in small


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name --model, or a geometry with --layers, --heads and --head-dim"),
        (("--model", "gpt-9"), "unknown model 'gpt-9'; known: deepseek-v3"),
        (("--model", "llama-3.1-8b", "--layers", "4"), "name a model or a geometry"),
        ((*TINY, "--layout", "hnd"), "unknown layout 'hnd'; known: kv-nb-bs-h-d"),
        ((*TINY, "--layout", "mla"), "layout mla holds one run a token and one head, but the geometry has kv 2"),
        ((*TINY, "--form", "page"), "unknown form 'page'; known: token, block"),
        ((*TINY, "--form", "block", "--chunk-tokens", "40"), "chunk_tokens (40) must be a multiple of block_t"),
        ((*TINY, "--width", "0"), "a width is a positive number or a schedule such as 1,1,2,4; got '0'"),
        ((*TINY, "--width", "5"), "layers_per_slice must be between 1 and 4, got 5"),
        ((*TINY, "--width", "2,9"), "layers_per_slice must be between 1 and 4, got 9"),
        ((*TINY, "--staging", "100"), "staging_bytes must be at least 2048"),
        ((*TINY, "--staging", "much"), "a size is a whole number with KiB, MiB, GiB, TiB, kB, MB, GB or TB, got"),
        ((*TINY, "--block-ids", "5,11", "--num-blocks", "11"), "block id 11 is outside the cache's 0 .. 10"),
        ((*TINY, "--tokens", "40", "--num-blocks", "3"), "num_blocks must be at least 6 for two requests of up to 40"),
        (
            (*TINY, "--tokens", "1", "--num-blocks", "100000000"),
            "leave num_blocks 100000000 out, or raise --memory",
        ),
        ((*TINY, "--block-ids", "5,11", "--num-blocks", "0"), "num_blocks must be at least 1, got 0"),
        ((*TINY, "--block-ids", "5,11", "--tokens", "33"), "33 tokens need 3 blocks of 16, got 2 block ids"),
        ((*TINY, "--block-ids", "5,5"), "block 5 would be written twice by one retrieve"),
        ((*TINY, "--block-ids", "5,five"), "--block-ids takes whole numbers between commas, got '5,five'"),
        ((*TINY, "--skip-tokens", "5"), "--null-block and --skip-tokens say more about --block-ids"),
        ((*TINY, "--tokens", "0"), "tokens must be at least 1, got 0"),
        ((*TINY, "--tokens", "9000000"), "raise --memory"),
        ((*TINY, "--threads", "0"), "threads must be between 1 and 1024, got 0"),
        ((*TINY, "--threads", "4294967297"), "threads must be between 1 and 1024, got 4294967297"),
        ((*TINY, "--tokens", "10000000000000"), "raise --memory"),
        ((*TINY, "--block-ids", "5,11", "--num-blocks", "-1"), "num_blocks must be at least 1, got -1"),
        ((*TINY, "--seed", "-1"), "seed must be at least 0, got -1"),
        ((*TINY, "--layers", "1000000000"), "layers must be between 1 and 1024, got 1000000000"),
        ((*TINY, "--device", "tpu"), "unknown device 'tpu'; known: cpu, numpy, engine, cuda"),
        ((*TINY, "--tensor-parallel", "2"), "name --model, or give --heads of one rank; got 2"),
        (("--model", "qwen3-32b", "--block-tokens", "32"), "--element-bytes, --block-tokens), not both"),
        (("--model", "qwen3-32b", "--tensor-parallel", "3"), "divide the 8 KV heads or be a multiple of them, got 3"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_with_its_value(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*arguments)
