"""Whoever has only the documents gets the answers they show: every transcript is run, and nothing differs."""

import re
import runpy
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRANSCRIPTS = runpy.run_path(str(ROOT / "docs" / "transcripts.py"))
FIVE_MINUTES_S = 300


@pytest.mark.parametrize("document", TRANSCRIPTS["DOCUMENTS"])
def test_a_document_shows_what_its_commands_print_today(document: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a transcript names the picture that was written")
    text = (ROOT / document).read_text(encoding="utf-8")
    begun = time.monotonic()
    now = TRANSCRIPTS["renew"](text, lambda line: TRANSCRIPTS["run_command"](line, tmp_path))
    assert time.monotonic() - begun < FIVE_MINUTES_S
    assert now == text, "run: python docs/transcripts.py"


def test_the_readme_answers_whether_to_turn_it_on_and_says_what_the_answer_rests_on() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (transcript,) = [found[0] for found in re.finditer(TRANSCRIPTS["BLOCK"], text) if "--link pcie4" in found[0]]
    assert "$ lamella sweep --prompt-tokens 16k --hit 90% --concurrency 8 --link pcie4" in transcript
    *_, answer, _ = transcript.splitlines()
    assert re.match(r"(Turn it on|Leave it off)", answer)
    assert re.search(r"mean TTFT [+-]\d+\.\d% ± \d+\.\d%, whole answers [+-]\d+\.\d%", answer)
    for needed in (
        "Assumed: profile h200-llama-3.1-8b+pcie4, measured",
        "Assumed: not measured, derived (link: PCIe 4",
        "Assumed: nothing is extrapolated",
        "Break-even concurrency: ",
        "Goodput within the SLO: ",
    ):
        assert needed in transcript


def test_a_transcript_that_is_not_what_is_printed_is_noticed() -> None:
    text = "<!-- transcript: last 1 -->\n```console\n$ lamella x\n...\nold\n```\n"
    renew = TRANSCRIPTS["renew"]
    assert renew(text, lambda line: ["a", "old"]) == text
    assert renew(text, lambda line: ["a", "new"]) == text.replace("old", "new")
    with pytest.raises(RuntimeError, match="a transcript runs lamella, not rm"):
        TRANSCRIPTS["run_command"]("rm x", Path())
