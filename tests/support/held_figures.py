"""Which figures of a page no recording holds: percentages, ms, points and whatever has a decimal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from concurrency_pages import RESULTS, prose_of, words_of

_FIGURE: Final = re.compile(
    r"(?P<pair>\d+\.\d to \d+\.\d ms)|[+-]?\d[\d,]*(?:\.\d+)?%?(?: ± \d+\.\d+%?)?(?: (?:ms|points)\b)?"
)
_NO_MEASUREMENT: Final = (
    "vLLM 0.26", "Llama-3.1-8B", "standard errors of at most 2% in both arms", "drifted by at most 5%",
    "differ by at most 5%", "(at least 80%)", "with 0, 0.3 and 2", "with 2 instead of 0.3", "0.3 (the default)",
    "at most 5 points less than one GPU", "must be at most 2 points", "itself uncertain by 70%",
    "error is above 2%", "within 2% of the baseline's", "the 5% that are allowed", "at the same T/P (within 15%)",
    "errors of at most 2%", "1.3 times as long", "a fixed loop of 0.7 ms", "(0.7 ms on a quick one)",
)  # fmt: skip
"""Figures that are a name, a rule or a setting."""


def unheld(page: str, held: Sequence[str], tables: str, near: str = "") -> list[str]:
    """Those that neither lie in a phrase or row that the recordings would say so nor stand in a table.

    A change, a figure with its error and a pair of times may stand in any table; others only in those that are near.
    """
    text = words_of(page)
    places = [
        range(found.start(), found.end())
        for said in (*held, *_NO_MEASUREMENT)
        for found in re.finditer(re.escape(said), text)
    ]
    return [
        figure.group()
        for figure in _FIGURE.finditer(text)
        if re.search(r"[.%]| ms| points", figure.group())
        and not any(figure.start() in place for place in places)
        and not _in_a_table(figure, tables, near)
    ]


def _in_a_table(figure: re.Match[str], tables: str, near: str) -> bool:
    said = figure.group().removesuffix(" points").removesuffix(" ms")
    if figure["pair"]:
        return said.replace(" to ", " → ") in tables
    where = tables if "±" in said or ("." in said and "%" in said) else near
    return bool(re.search(rf"(?<![\d.]){re.escape(said)}(?![\d.])", where))


def of_other_documents(page: str) -> list[str]:
    """Paragraphs that name result files, as far as each of their figures is a number of one of these.

    Returns:
        The paragraphs' figures with what stands before and behind them, to be taken for held.
    """
    held = []
    for paragraph in re.split(r"\n(?=- |\n)", prose_of(page)):
        named = re.findall(r"[\w.-]+\.json\b", paragraph)
        numbers = [number for name in named for number in _numbers(_document(name))]
        text = words_of(paragraph)
        for figure in re.finditer(r"\d+\.\d+|\d+(?= ms| instead)", text) if numbers else ():
            decimals = len(figure.group().partition(".")[2])
            scaled = (number * scale for number in numbers for scale in (1, 1e-3, 1e-6, 1e3))
            if any(f"{number:.{decimals}f}" == figure.group() for number in scaled):
                held.append(text[max(0, figure.start() - 12) : figure.end() + 12])
    return held


def _document(name: str) -> Any:
    (path,) = RESULTS.glob(f"*{name.lstrip('.')}")  # a page may leave the date out
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _numbers(document: Any) -> Iterator[float]:
    """Every number in it, and every figure of its texts."""
    if isinstance(document, dict | list):
        for one in document.values() if isinstance(document, dict) else document:
            yield from _numbers(one)
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield float(document)
