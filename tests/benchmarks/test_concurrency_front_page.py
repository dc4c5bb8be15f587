"""What docs/concurrency.md says, in rows and in words, is what the page of measurements and the recordings say."""

from __future__ import annotations

import re

import pytest

from concurrency_pages import ROOT, Recorded, Tables, phrases_of, sections_of, words_of
from front_page import aims, causes, gains, missed_without_a_row, unheld


@pytest.fixture(scope="module")
def sections(page: str) -> Tables:
    return sections_of(page)


@pytest.fixture(scope="module")
def phrases(recorded: Recorded, sections: Tables) -> list[str]:
    return phrases_of(recorded, sections)


def tables_of(page: str) -> str:
    return "\n".join(line for line in page.splitlines() if line.startswith("|"))


def unspoken(phrases: list[str], *pages: str) -> list[str]:
    """Phrases that no page says."""
    words = [words_of(page) for page in pages]
    return [said for said in phrases if not any(said in text for text in words)]


def test_every_row_says_a_row_of_the_measurements(front: str, sections: Tables) -> None:
    lines = front.splitlines()
    assert [row for row in (*gains(sections), *causes(sections)) if row not in lines] == []
    assert [row for row in aims(sections) if not any(line.startswith(row) for line in lines)] == []


def test_no_aim_that_was_missed_is_left_out(sections: Tables) -> None:
    assert missed_without_a_row(sections) == []
    hidden = {"Goals and what was measured": [*sections["Goals and what was measured"], "| new | 1 | 2 | missed |"]}
    assert missed_without_a_row(sections | hidden) == ["new"]


def test_what_is_said_in_words_is_what_the_recordings_say(front: str, page: str, phrases: list[str]) -> None:
    assert len(phrases) > 60
    assert unspoken(phrases, front, page) == []
    assert len(unspoken(phrases, front.replace("Busy for 84%", "Busy for 94%"), page)) == 1


def test_no_figure_of_the_front_page_is_without_a_recording(front: str, page: str, sections: Tables,
                                                            phrases: list[str]) -> None:  # fmt: skip
    rows = [*gains(sections), *causes(sections), *aims(sections)]
    assert unheld(front, phrases, rows, tables_of(page)) == []


@pytest.mark.parametrize(
    ("said", "forged"),
    [
        ("-58.5% with 2,048", "-57.3% with 2,048"),
        ("(133.6 to 59.3 ms", "(133.6 to 49.3 ms"),
        ("89% of what overlap can save", "99% of what overlap can save"),
        ("1.0 ± 0.9 points less.", "0.1 ± 0.9 points less."),
        ("by 36.0%", "by 46.0%"),
        ("Busy for 84%", "Busy for 94%"),
        ("costs 56.7 ms", "costs 66.7 ms"),
        ("| 133.6 → 59.3 | -55.6% ± 0.9%*", "| 133.6 → 59.3 | -65.6% ± 0.9%*"),
        ("-39.4% ± 0.8% over 4 runs | not shown", "-39.4% ± 0.8% over 4 runs | reached"),
        ("+110.5% ± 5.6% | beyond two errors", "+110.5% ± 5.6% | shown"),
        ("**Two GPUs** (tensor parallel 2)", "**Two GPUs** (tensor parallel 2) 12.3 ms sooner"),
    ],
)
def test_a_forged_figure_of_the_front_page_is_noticed(
    said: str, forged: str, front: str, page: str, sections: Tables, phrases: list[str]
) -> None:
    changed = front.replace(said, forged)
    assert changed != front
    rows = [*gains(sections), *causes(sections), *aims(sections)]
    lost = [row for row in rows if row in front and row not in changed]
    assert [*lost, *unspoken(phrases, changed, page), *unheld(changed, phrases, rows, tables_of(page))] != []


def test_every_link_of_both_pages_leads_somewhere(front: str, page: str) -> None:
    for text in (front, page):
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            assert not path or (ROOT / "docs" / path).exists(), target
            if anchor:
                document = (ROOT / "docs" / path).read_text(encoding="utf-8") if path else text
                assert anchor in anchors_of(document), target


def anchors_of(document: str) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
