"""What docs/concurrency.md says of the finding in words, as the recordings would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from concurrency.arms import by_both
from concurrency.figures import ArmFigures, CellFigures
from concurrency.rules import Change, change_of

FOUR, ONE, BESIDE, BESIDE_ONE, SHARED, _SHARED_ONE = (
    f"c{users}_hit15360_new768_chunk256_{group}" for group in ("finding", "beside", "beside_mps") for users in (4, 1)
)
ORIGINAL, FIFO_LIKE_IT = "interleaved_deep_no_turns", "fifo_deep_no_turns"
LOOKED_SLOW = 1.3


class Cell:
    """A cell of arms that differ in one thing, called as with piecewise graphs; by prefills' graphs where `both`."""

    def __init__(self, figures: CellFigures, both: bool = False) -> None:
        self.figures = figures
        self.both = both

    def arm(self, name: str) -> ArmFigures:
        """An arm's figures."""
        return self.figures.arms[by_both(name) if self.both else name]

    def ms(self, arm: str) -> str:
        """Mean time to first token."""
        return f"{self.ttft(arm):.1f}"

    def ttft(self, arm: str) -> float:
        """The same as a number."""
        return self.arm(arm).ttft.value

    def longer(self, arm: str, than: str = "fifo_first") -> str:
        """By how many ms one arm is longer than another."""
        return f"{self.ttft(arm) - self.ttft(than):.1f}"

    def change(self, arm: str, than: str = "fifo_first", figure: str = "ttft") -> Change:
        """From one arm to another."""
        before, after = (getattr(self.arm(name), figure) for name in (than, arm))
        return change_of(after, before, self.figures.drift)

    def percent(self, arm: str, than: str = "fifo_first", figure: str = "ttft") -> str:
        """The same with its error."""
        change = self.change(arm, than, figure)
        return f"{change.value:+.1%} ± {change.error:.1%}"

    def word(self, arm: str, than: str = "fifo_first") -> str:
        """What is known of the change."""
        change = self.change(arm, than)
        return "shown" if change.shown else how(change)

    def known(self, arm: str, than: str = "fifo_first") -> str:
        """The change with its error and what is known of it."""
        return f"{self.percent(arm, than)}, {self.word(arm, than)}"

    def until_its_step(self, arm: str) -> str:
        """From the landing that allows a release to the begin of the step that it joins, ms."""
        figures = self.arm(arm)
        assert figures.unnoticed_ms is not None
        assert figures.unadmitted_ms is not None
        return f"{figures.unnoticed_ms + figures.unadmitted_ms:.1f}"


def how(*changes: Change) -> str:
    """Where all of them lie; two that lie otherwise have no such word."""
    (where,) = {"beyond" if abs(change.value) > 2 * change.error else "within" for change in changes}
    return f"{where} two errors"


def finding(cells: Mapping[str, CellFigures]) -> list[str]:
    """Of the newest recordings of the groups `finding`, `beside` and `beside_mps`."""
    four, one, beside, beside_one, shared = (Cell(cells[name]) for name in (FOUR, ONE, BESIDE, BESIDE_ONE, SHARED))
    chunk = "chunk_bounded"
    throughput, of_shared = (
        [
            f"{cell.change(f'{arm}_beside', than, 'requests_per_s').value:+.1%}"
            for arm, than in (("chunk", chunk), ("fifo", "fifo_first"))
        ]
        for cell in (beside, shared)
    )
    return [
        *_in_short(four, shared),
        f"the baseline drifted by {one.figures.drift:.1%} and, beside the second process, by "
        f"{beside_one.figures.drift:.1%}",
        f"no turns: {four.ms(ORIGINAL)} ms where chunk-major takes {four.ms(chunk)} ({four.percent(ORIGINAL, chunk)}). "
        f"The same with one request after another takes {four.ms(FIFO_LIKE_IT)} ({four.percent(FIFO_LIKE_IT, chunk)}). "
        f"So the order alone costs {four.longer(ORIGINAL, FIFO_LIKE_IT)} ms, more than the "
        f"{four.longer(ORIGINAL, chunk)} that are lost. With turns and little in flight it costs "
        f"{four.longer('interleaved_first')}: {four.ms('fifo_first')} to {four.ms('interleaved_first')} ms.",
        f"gains {four.longer(chunk)} ms on chunk-major with turns and 50 MB in flight, and "
        f"{four.longer(chunk, FIFO_LIKE_IT)} without either.",
        f"Without turns alone it takes "
        f"{four.longer('fifo_no_turns')} longer (at one user {one.longer('fifo_no_turns')}); everything at once alone "
        f"{four.longer('fifo_deep_first')}, {how(four.change('fifo_deep_first'))}. A chunk-major load takes "
        f"{four.longer('chunk_no_turns', chunk)} longer without turns.",
        f"({four.ms('interleaved_first')} to {four.ms(ORIGINAL)} ms)",
        f"released when its last one landed: {four.ms('fifo_whole')} ms, no better than chunk-major "
        f"({four.percent('fifo_whole', chunk)}). Released with the first: {four.ms('fifo_first')}. With the eighth: "
        f"{four.ms('fifo_first8')}.",
        f"takes {four.until_its_step(chunk)} ms of chunk-major's {four.ms(chunk)} and "
        f"{four.until_its_step('fifo_first')} of {four.ms('fifo_first')} released with the first layer; at one user "
        f"{one.until_its_step(chunk)} and {one.until_its_step('fifo_first')}.",
        f"first tokens come after {four.ms('sync')} ms instead of {four.ms('fifo_first')}; for a load of one slice it "
        f"is {four.ms('sync_width32')} instead of {four.ms('fifo_width32')}. Released just in time, the batch stands "
        f"for less, and they come {four.longer('fifo_first', 'fifo_jit')} ms sooner ({four.percent('fifo_jit')}). At "
        f"one user nobody else stands: {one.longer('sync')} ms.",
        f"released alike, {four.percent('fifo_width32', 'fifo_whole')}; slices of eight layers, "
        f"{four.percent('fifo_width8')}; both "
        f"{how(four.change('fifo_width32', 'fifo_whole'), four.change('fifo_width8'))}.",
        f"a thread in Python, {four.percent('fifo_thread')}, {how(four.change('fifo_thread'))}.",
        f"{four.percent('fifo_value')} in first tokens and "
        f"{four.percent('fifo_value', figure='requests_per_s')} in throughput, both "
        f"{how(four.change('fifo_value'), four.change('fifo_value', figure='requests_per_s'))}.",
        f"chunk-major {beside.ms(chunk)} to {beside.ms('chunk_beside')} ms, one request after another "
        f"{beside.ms('fifo_first')} to {beside.ms('fifo_beside')}, throughput {' and '.join(throughput)}. Beside it "
        f"layer by layer is still sooner, by {-beside.change('fifo_beside', 'chunk_beside').value:.1%}.",
        f"chunk-major {shared.ms(chunk)} to {shared.ms('chunk_beside')} ms, one request after another "
        f"{shared.ms('fifo_first')} to {shared.ms('fifo_beside')}, throughput {' and '.join(of_shared)}. Layer by "
        f"layer is sooner by {shared.percent('fifo_beside', 'chunk_beside').lstrip('-')}, {_still(shared)}",
    ]


def _in_short(four: Cell, shared: Cell) -> list[str]:
    """On the page of what was found."""
    return [
        f"through MPS {shared.percent('fifo_beside', 'chunk_beside')}, {_still(shared)}",
        f"just in time came sooner by piecewise graphs ({four.percent('fifo_jit')}, {how(four.change('fifo_jit'))})",
    ]


def _still(shared: Cell) -> str:
    """What is known of layer by layer beside a second process through MPS."""
    change = shared.change("fifo_beside", "chunk_beside")
    assert not change.shown
    return how(change)


def finding_by_graphs(cells: Mapping[str, CellFigures]) -> list[str]:
    """Of the newest recording of the group `finding_both`, on either page."""
    four, one, beside = (
        Cell(cells[f"c{users}_hit15360_new768_chunk256_{group}_both"], both=True)
        for users, group in ((4, "finding"), (1, "finding"), (4, "beside"))
    )
    chunk, first = "chunk_bounded", "fifo_first"
    throughput = [beside.change(f"{arm}_beside", than, "requests_per_s").value
                  for arm, than in (("chunk", chunk), ("fifo", first))]  # fmt: skip
    return [
        f"the original's way: {four.known(ORIGINAL, chunk)} against chunk-major. The same with one request after "
        f"another gains ({four.known(FIFO_LIKE_IT, chunk)}). So the order alone costs "
        f"{four.longer(ORIGINAL, FIFO_LIKE_IT)} ms, more than the {four.longer(ORIGINAL, chunk)} that are lost.",
        f"{four.ms(ORIGINAL)} ms where chunk-major takes {four.ms(chunk)} ({four.known(ORIGINAL, chunk)}). The same "
        f"with one request after another takes {four.ms(FIFO_LIKE_IT)} ({four.known(FIFO_LIKE_IT, chunk)}). So the "
        f"order alone costs {four.longer(ORIGINAL, FIFO_LIKE_IT)} ms, more than the {four.longer(ORIGINAL, chunk)} "
        f"that are lost. With turns and little in flight it costs {four.longer('interleaved_first')}: {four.ms(first)} "
        f"to {four.ms('interleaved_first')} ms, {four.word('interleaved_first')}",
        f"no better than chunk-major ({four.percent('fifo_whole', chunk)})",
        f"released when its last one landed: {four.ms('fifo_whole')} ms, no better than chunk-major "
        f"({four.percent('fifo_whole', chunk)}). Released with the first: {four.ms(first)}. With the eighth: "
        f"{four.ms('fifo_first8')}.",
        f"gains {four.longer(chunk, first)} ms on chunk-major with turns and 50 MB in flight, and "
        f"{four.longer(chunk, FIFO_LIKE_IT)} without turns and with everything enqueued",
        f"Without turns alone it takes {four.longer('fifo_no_turns')} longer ({four.word('fifo_no_turns')}; at one "
        f"user {one.longer('fifo_no_turns')}, {one.word('fifo_no_turns')}); everything at once alone "
        f"{four.longer('fifo_deep_first')}, {four.word('fifo_deep_first')}. A chunk-major load takes "
        f"{four.longer('chunk_no_turns', chunk)} longer without turns, {four.word('chunk_no_turns', chunk)}.",
        f"without turns, one request after another took {four.longer('fifo_no_turns')} ms longer",
        f"they come {four.longer('fifo_jit', first)} ms later ({four.known('fifo_jit')})",
        f"first tokens come after {four.ms('sync')} ms instead of {four.ms(first)} ({four.known('sync')}), "
        f"{four.change('sync', chunk).value:+.1%} against chunk-major; at one user {one.longer('sync')} ms longer",
        f"released alike, {four.known('fifo_width32', 'fifo_whole')}",
        f"Slices of eight layers cost {four.longer('fifo_width8')} ms ({four.known('fifo_width8')}; at one user "
        f"{one.known('fifo_width8')})",
        f"a thread in Python, {four.longer('fifo_thread')} ms ({four.known('fifo_thread')}; at one user "
        f"{one.known('fifo_thread')})",
        f"chunk-major {beside.ms(chunk)} to {beside.ms('chunk_beside')} ms, one request after another "
        f"{beside.ms(first)} to {beside.ms('fifo_beside')}, throughput {throughput[0]:+.1%} and {throughput[1]:+.1%}",
        f"still sooner, by {beside.known('fifo_beside', 'chunk_beside').lstrip('-')}",
        f"At one user the whole of it gains {one.known(first, chunk)}",
        f"takes {four.until_its_step(chunk)} ms of chunk-major's {four.ms(chunk)} and {four.until_its_step(first)} of "
        f"{four.ms(first)} released with the first layer; at one user {one.until_its_step(chunk)} and "
        f"{one.until_its_step(first)}.",
    ]


def slow_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Which share of cores took `LOOKED_SLOW` times the quickest's time or longer, over all looks at all of them."""
    slow = seen = 0
    for row in rows:
        of_start = row.get("cores") or {}
        looks = [of_start.get("probe_us", {}), *(rank["probe_us"] for rank in of_start.get("ranks", ()))]
        looks.append((row.get("choosing") or {}).get("last_probes_us", {}))
        us = [one for look in looks for one in look.values()]
        if us:
            seen += len(us)
            slow += sum(one >= LOOKED_SLOW * min(us) for one in us)
    return slow / seen
