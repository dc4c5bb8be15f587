"""Every verb that reads a file names the one that is not text, in one sentence."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app

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
