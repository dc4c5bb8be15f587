"""A sweep with a measured host thread: its map is the bare device's, with the columns that this one reaches."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app
from lamella.sim.overheads import MeasuredOverheads, Overheads, shipped_overheads

SLOW = Overheads(
    pass_ns=10**7, launch_ns=10**7, load_ns_per_mib=10**6, beside_permille=3000, prefill_rows=((768, 3000),)
)


def sweep(folder: Path, *options: str) -> dict[str, object]:
    point = ("--prompt-tokens", "4k", "--hit", "90%", "--output-tokens", "2", "--concurrency", "1")
    amount = ("--concurrencies", "1", "--requests", "1", "--repeats", "1", "--engine", "serial", "--out", str(folder))
    result = CliRunner().invoke(build_app(), ["sweep", *point, *amount, *options])
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads((folder / "sweep.json").read_text())
    return found


@pytest.mark.parametrize("name", [*shipped_overheads(), "slow.json"])
def test_overheads_leave_the_map_as_it_is_and_change_the_point(name: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(MeasuredOverheads("a slow engine", "nowhere", SLOW, {}).document()))
    bare = sweep(tmp_path / "bare")
    hosted = sweep(tmp_path / "hosted", "--overheads", str(slow) if name == slow.name else name)
    assert hosted["cells"] == bare["cells"]
    assert hosted["study"] != bare["study"]
