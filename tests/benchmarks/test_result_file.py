"""A result file holds all of a result, or what it held before."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from result_file import write_json, write_text

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_document_is_there_as_a_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"one": [1, 2]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"one": [1, 2]}
    assert (tmp_path / "a.json").read_text().endswith("}\n")
    write_json(tmp_path / "a.json", {"one": 2}, indent=None)
    assert (tmp_path / "a.json").read_text() == '{"one": 2}\n'
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("when", ["reckoned", "written", "put in its place"])
def test_whoever_is_stopped_leaves_the_file_as_it_was(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"before": 1})
    document: dict[str, Any] = {"after": [1, 2, 3]}

    def stopped(*_args: object, **_kwargs: object) -> None:
        assert path.read_text() == '{\n "before": 1\n}\n'
        raise KeyboardInterrupt

    if when == "reckoned":
        document["odd"] = object()
    elif when == "written":
        written = Path.write_text
        monkeypatch.setattr(Path, "write_text", lambda self, text, **how: (written(self, text[:9], **how), stopped()))
    else:
        monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises((KeyboardInterrupt, TypeError)):
        write_json(path, document)
    monkeypatch.undo()
    assert path.read_text() == '{\n "before": 1\n}\n'
    assert os.listdir(tmp_path) == ["a.json"]


def test_where_nothing_can_be_written_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "none" / "a.json"))):
        write_json(tmp_path / "none" / "a.json", math.pi)


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
    write_text(Path(os.devnull), "new")
    assert not Path(os.devnull).is_file()


def test_every_program_writes_its_result_that_way() -> None:
    """What a program writes by itself is no result: a model's configuration, a stamp, lines appended to a recording."""
    direct = re.compile(r"\.write_text\(|json\.dump\(|\.open\(\"w")
    own = {
        f"{path.name}: {line.strip()}"
        for path in BENCHMARKS.rglob("*.py")
        if path.name != "result_file.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if direct.search(line) and "config.json" not in line
    }
    assert own == {
        "gpu_report.py: stamp.write_text(digest)",
        'gpu_report.py: with log.open("w") as output:',
        "vllm_connector_cost.py: command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, "
        'stderr=self.log.open("w"), text=True, bufsize=1',
    }
