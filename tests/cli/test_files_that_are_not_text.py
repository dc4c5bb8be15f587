"""Every verb that reads a file names the one that is not text, and takes text as editors of other systems write it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app
from lamella.reference.profile import profile_to_mapping
from lamella.sim.overheads import open_overheads
from lamella.sim.profiles import load_profile

QUICK = ("--concurrency", "1", "--requests", "2")
SPLIT = {"calibrate": ["one"], "test": ["two"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--profile", "BINARY"),
        ("sweep", "--overheads", "BINARY"),
        ("sweep", "--config", "BINARY"),
        ("simulate", "--profile", "BINARY"),
        ("simulate", "--overheads", "BINARY"),
        ("explain", "slowest", "--trace", "BINARY"),
        ("replay", "BINARY"),
        ("validate", "BINARY", "--split", "SPLIT"),
        ("validate", "EMPTY", "--split", "SPLIT", "--profile", "BINARY"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_text_is_named(arguments: tuple[str, ...], tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name.lower()}.json" for name in ("BINARY", "SPLIT", "EMPTY")}
    files["BINARY"].write_bytes(bytes(range(128, 256)))
    files["SPLIT"].write_text(json.dumps(SPLIT))
    files["EMPTY"].write_text("")
    result = CliRunner().invoke(build_app(), [str(files.get(one, one)) for one in arguments])
    assert result.exit_code == 2, result.output
    assert "binary.json" in "".join(result.stderr.split())
    assert "codec can't decode" in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", *QUICK, "--profile", "PROFILE"),
        ("simulate", *QUICK, "--overheads", "OVERHEADS"),
        ("simulate", *QUICK, "--config", "CONFIG"),
        ("replay", "TRACE", "--instances", "1"),
    ],
    ids=" ".join,
)
def test_a_mark_of_byte_order_and_other_line_ends_are_no_part_of_a_file(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    overheads = "vllm-0.26-h200-llama-3.1-8b"
    texts = {
        "PROFILE": json.dumps(profile_to_mapping(load_profile()), indent=1),
        "OVERHEADS": json.dumps(open_overheads(overheads).document(), indent=1),
        "CONFIG": "schema_version = 1\n[simulate]\nconcurrency = 1\n",
        "TRACE": f"{json.dumps(request)}\n" * 2,
    }
    endings = {"CONFIG": "toml", "TRACE": "jsonl"}
    for name, text in texts.items():
        file = tmp_path / f"{name.lower()}.{endings.get(name, 'json')}"
        file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
        arguments = tuple(str(file) if one == name else one for one in arguments)
    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code == 0, result.output
