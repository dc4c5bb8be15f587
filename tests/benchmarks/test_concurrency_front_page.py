"""What docs/concurrency.md says, in rows and in words, is what the page of measurements and the recordings say."""

from __future__ import annotations

import re

import pytest

from concurrency_pages import EACH, RESULTS, ROOT, Recorded, Tables, phrases_of, prose_of, sections_of, words_of
from front_page import aims, causes, gains, missed_without_a_row
from held_figures import of_other_documents, unheld

OF_HOSTS = ("58% to 68% of them, by recording", "were no quieter: 45% to 69%", "b2a9d3e: 41% to 59%",
            "bbe8d69 and 970283b: 54%")  # fmt: skip
"""A test beside the tables' holds these."""
OF_NO_RECORDING = (
    "the host's speed jumped by 1.8",
    "28 to 39 ms of the model runner's thread, as profiled, against 30 ms of the device",
    "unlearned at 1% a look",
)
"""Seen or profiled and not kept, and a constant of code that is gone; the page may hold no more of the kind."""


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
    assert unheld(front, [*phrases, *rows], tables_of(page)) == []


def loose(page: str, tables: str, phrases: list[str]) -> list[str]:
    """Figures of the page of measurements that nothing holds."""
    recorded = tables + (RESULTS / EACH).read_text(encoding="utf-8")
    held = [*phrases, *OF_HOSTS, *OF_NO_RECORDING, *of_other_documents(page)]
    return [figure for section in page.split("\n## ")
            for figure in unheld(prose_of(section), held, recorded, tables_of(section))]  # fmt: skip


def test_no_figure_of_the_measurements_is_without_a_recording(page: str, phrases: list[str]) -> None:
    assert loose(page, tables_of(page), phrases) == []


@pytest.mark.parametrize(
    ("said", "forged"),
    [
        ("took up to 890 at b46f46f", "took up to 990 ms at b46f46f"),
        ("e6b6de6, 232.8 ± 14.2", "e6b6de6, 242.8 ± 14.2"),
        ("alone: 16.6 ms on quick cores", "alone: 11.7 ms on quick cores"),
        ("it is 107% and", "it is 167% and"),
        ("One GPU gained 63.8%", "One GPU gained 73.7%"),
    ],
)
def test_a_forged_figure_of_the_measurements_is_noticed(said: str, forged: str, page: str, phrases: list[str]) -> None:
    changed = page.replace(said, forged)
    assert changed != page
    assert loose(changed, tables_of(page), phrases) != []


@pytest.mark.parametrize(
    ("said", "forged"),
    [
        ("-58.5% with 2,048", "-57.3% with 2,048"),
        ("(133.6 to 59.3 ms", "(133.6 to 49.3 ms"),
        ("alone 157.9:", "alone 147.9:"),
        ("89% of what overlap can save", "99% of what overlap can save"),
        ("1.0 ± 0.9 points less.", "0.1 ± 0.9 points less."),
        ("by 32.9%", "by 42.9%"),
        ("Busy for 84%", "Busy for 94%"),
        ("costs 60.9 ms", "costs 70.9 ms"),
        ("| 133.6 → 59.3 | -55.6% ± 0.9%*", "| 133.6 → 59.3 | -65.6% ± 0.9%*"),
        ("-39.4% ± 0.8% over 4 runs | not shown", "-39.4% ± 0.8% over 4 runs | reached"),
        ("+114.3% ± 8.3% | beyond two errors", "+114.3% ± 8.3% | shown"),
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
    assert [*lost, *unspoken(phrases, changed, page), *unheld(changed, [*phrases, *rows], tables_of(page))] != []


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
