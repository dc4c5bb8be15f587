"""What the documents show is what the code computes, and what they point at is there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_timeline_picture_is_what_the_recursion_draws_today() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "timeline.py"))["draw"]()
    assert drawn == (ROOT / "docs" / "timeline.svg").read_text(encoding="utf-8"), "run: python docs/timeline.py"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_a_document_points_only_at_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = {target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    missing = [target for target in targets if target and "://" not in target and not (ROOT / target).exists()]
    assert missing == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_that_a_document_names_exists(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / document).read_text(encoding="utf-8")))
    assert named <= targets


def python_of(document: str) -> tuple[str, str]:
    """The document's one Python program, and what stands after it: what it prints, if anything."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (found,) = re.findall(r"```python\n(.*?)```\n(?:\nIt prints\n\n```\n(.*?)```)?", text, flags=re.DOTALL)
    return found


@pytest.mark.parametrize("document", ["docs/layerwise.md", "docs/model.md", "docs/tiers.md"])
def test_the_program_in_a_document_runs_and_prints_what_stands_there(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, printed = python_of(document)
    if "import torch\n" in program:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    runpy.run_path("program.py")
    assert capsys.readouterr().out == printed
