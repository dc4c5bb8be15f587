"""What docs/concurrency.md says in words, as the recordings would say it: whole phrases, with every figure in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from concurrency.figures import ArmFigures, CellFigures
from concurrency.goals import Line, baseline_of, regret_of
from concurrency.rules import Change, Mean, change_of

Cells = Mapping[str, CellFigures]
AUTO, FIFO = "auto_full_graphs", "fifo_full_graphs"
NAME = "c{}_hit15360_new{}_chunk256_full".format
NUMBERS = {"2": "two", "3": "three", "4": "four", "5": "five", "6": "six"}
SLOW_TIER = "c4_hit15360_new768_chunk256_tier5_full"


class Spoken:
    """One cell's figures as the page writes them; of `mine` where no arm is named."""

    def __init__(self, cells: Cells, name: str, mine: str = AUTO) -> None:
        self.cell, self.mine = cells[name], mine
        self.base = self.cell.arms[baseline_of(self.cell, mine) or ""]

    def arm(self, name: str = "") -> ArmFigures:
        """An arm's figures."""
        return self.cell.arms[name or self.mine]

    def change(self, figure: str = "ttft", arm: str = "") -> Change:
        """Of an arm's mean against the baseline's."""
        return change_of(getattr(self.arm(arm), figure), getattr(self.base, figure), self.cell.drift)

    def percent(self, figure: str = "ttft", arm: str = "") -> str:
        """The same, with its sign."""
        return f"{self.change(figure, arm).value:+.1%}"

    def percent_and_error(self, figure: str = "ttft") -> str:
        """The same with its standard error."""
        change = self.change(figure)
        return f"{change.value:+.1%} ± {change.error:.1%}"

    def ms(self, arm: str = "") -> str:
        """An arm's mean time to first token."""
        return f"{self.arm(arm).ttft.value:.1f}"

    def whole_ms(self, arm: str = "") -> str:
        """The same without decimals."""
        return f"{self.arm(arm).ttft.value:,.0f}"

    def served(self, arm: str = "") -> str:
        """Requests a second."""
        return f"{self.arm(arm).requests_per_s.value:.2f}"

    @property
    def pair(self) -> str:
        """The baseline's and `auto`'s."""
        return f"{self.base.ttft.value:.1f} to {self.ms()} ms"


def pm(mean: Mean) -> str:
    """A mean in ms and its standard error."""
    return f"{mean.value:.1f} ± {mean.error:.1f}"


def phrases(now: Cells, two: Cells, quiet: Cells, over: Mapping[str, Line]) -> list[str]:
    """Of the newest recordings of one GPU, of two, of 4b1f1f9, and of goals over several runs."""
    one, four, eight, small, large = (Spoken(now, NAME(*cell)) for cell in ((1, 768), (4, 768), (8, 768), (4, 256),
                                                                           (4, 2048)))  # fmt: skip
    pair, many = Spoken(now, NAME(2, 768)), Spoken(now, NAME(16, 768))
    small_quiet = Spoken(quiet, NAME(4, 256))
    kinds = ("bystanders_open", "tier20", "tier5", "misses", "mixed", "open", "out128")
    beside, tier20, tier5, misses, mixed, opened, long = (
        Spoken(now, f"c4_hit15360_new768_chunk256_{kind}_full") for kind in kinds
    )
    answer = Spoken(now, "c4_hit15360_new768_chunk256_out50_full")
    both = Spoken(two, "c4_hit15360_new768_chunk256_two_gpus_full")
    peers = {name: pm(arm.ttft) for name, arm in now["c4_hit15360_new768_chunk256"].arms.items()}
    alone = pm(now["c1_hit15360_new768_chunk256"].arms["peer_simple"].ttft)
    piecewise = [Spoken(now, f"c{users}_hit15360_new768_chunk256_piecewise", "auto") for users in (4, 8, 1)]
    runs = {what: re.match(r"\S+ ± \S+", line.measured) for what, line in over.items()}
    together = {what: found.group() for what, found in runs.items() if found}
    regrets = {name: max(0.0, found[0]) for name, cell in now.items() if AUTO in cell.arms
               if (found := regret_of(cell, AUTO))}  # fmt: skip
    others = [value for name, value in regrets.items() if name != SLOW_TIER]
    beyond = {name: value for name, value in regrets.items() if value > 0.08 and name != SLOW_TIER}
    weights = [answer.ms(f"auto{weight}_full_graphs") for weight in ("_light", "", "_heavy")]
    of_weights = [answer.percent("tpot", f"auto{weight}_full_graphs") for weight in ("_light", "", "_heavy")]
    ceiling, fifo, bound = one.cell.alone.ceiling or 0, one.arm(FIFO), small.arm()
    floor, behind = bound.link_floor, bound.link_behind_ms
    assert floor
    assert behind is not None
    assert bound.last_layer_ms
    transfer_ms, prefill_ms = small.cell.alone
    assert transfer_ms
    joined = sum(arm.choices.get("sync", 0) for name, cell in now.items() if cell.cell["new"] in (256, 768)
                 and not re.search("open|tier|misses|mixed|out50", name)
                 for arm in [cell.arms.get(AUTO)] if arm is not None)  # fmt: skip
    wanted = 0.55 * small.base.ttft.value
    counted_anew = tier5.arm().choices["off"], sum(tier5.arm().choices.values())

    return [
        f"768 new: {one.percent()} ({one.pair}), {-one.change().value / ceiling:.0%} of what overlap can save; whole "
        f"answers {one.percent('e2e')}.",
        f"{four.percent()} with 768 new ({four.pair}; whole answers {four.percent('e2e')}, throughput "
        f"{four.percent('requests_per_s')}) and {large.percent()} with 2,048 ({large.pair}).",
        f"{small_quiet.percent()} against a baseline of {small_quiet.base.ttft.value:.1f} ms",
        f"{together['C = 8, new = 768, auto_full_graphs']} over two runs",
        f"two at once {pair.percent()}, sixteen {many.percent()}",
        f"{mean(others)} behind in the mean over {len(others)} cells",
        f"{' and '.join(f'{value:.1%}' for value in sorted(beyond.values()))} behind",
        f"{both.percent()} ({both.pair}) on the busiest host",
        f"early for all with 256 and 768 new but {NUMBERS[str(joined)]}.",
        f"{tier20.percent()} at 20 GB/s, {regrets['c4_hit15360_new768_chunk256_tier20_full']:.1%} behind one request "
        f"after another in first tokens and ahead of it in whole answers ({tier20.percent('e2e')} and "
        f"{tier20.percent('e2e', FIFO)})",
        f"at 5 GB/s `auto`'s first tokens came after {tier5.whole_ms()} ms, those of one request after another after "
        f"{tier5.whole_ms(FIFO)} and chunk-major's after {tier5.base.ttft.value:,.0f}",
        f"{tier5.served()} requests/s instead of {tier5.served(FIFO)} and {tier5.base.requests_per_s.value:.2f}",
        f"computed {counted_anew[0]} of {counted_anew[1]} anew",
        f"{many.ms()} ± {many.arm().ttft.error:.1f} ms beside {many.ms(FIFO)} ± {many.arm(FIFO).ttft.error:.1f}",
        f"with every second request a miss and stores on, {misses.percent()} and whole answers {misses.percent('e2e')}",
        f"mixed sizes {mixed.percent()}, an open loop without bystanders {opened.percent()}, answers of 128 tokens "
        f"{long.percent()}",
        f"`SimpleCPUOffloadConnector` gave first tokens after {peers['peer_simple']} ms and `OffloadingConnector` "
        f"after {peers['peer_offloading']} (",
        f"one user by the former took {alone}",
        f"chunk-major took {pm(piecewise[0].base.ttft)} and `auto` {pm(piecewise[0].arm().ttft)}.",
        f"{piecewise[0].percent_and_error()} at four, {piecewise[1].percent_and_error()} at eight and "
        f"{piecewise[2].percent_and_error()} at one",
        f"longer and its throughput was lower ({piecewise[1].percent('e2e')} and "
        f"{piecewise[1].percent('requests_per_s')})",
        f"Its whole answers came after {tier5.arm().e2e.value:,.0f} ms instead of {tier5.arm(FIFO).e2e.value:,.0f} and "
        f"{tier5.base.e2e.value:,.0f}",
        f"after {weights[0]}, {weights[1]} and {weights[2]} ms and {of_weights[0]}",
        f"{of_weights[0]}, {of_weights[1]} and {of_weights[2]} of TPOT",
        f"{one.ms()} ms, where the ceiling would be {one.base.ttft.value * (1 - ceiling):.1f}. By one request "
        f"after another ({one.ms(FIFO)}): the first layer lands after {fifo.first_layer_ms:.1f}, the request is "
        f"released {fifo.unnoticed_ms:.1f} later and its step begins {fifo.unadmitted_ms:.1f} after that; the rest is "
        f"the prefill, {one.cell.alone.prefill_ms:.1f} ms of the device",
        f"T is {transfer_ms:.1f} ms, {transfer_ms / bound.ttft.value:.0%} of `auto`'s "
        f"{small.ms()}, and the prefill only {prefill_ms:.1f}: the link is busy for {bound.link_busy:.0%} "
        f"of the time. For these arrivals it alone needs {floor.value:.1f} ms in the mean, {behind:.1f} of them behind "
        f"others' loads. The last layer landed after {bound.last_layer_ms:.1f}, and the first token came "
        f"{bound.ttft.value - bound.last_layer_ms:.1f} later. The aim was {wanted:.1f}",
        f"Busy for {eight.arm().gpu_busy:.0%} and {eight.arm().link_busy:.0%} of the time. TPOT is "
        f"{eight.arm().tpot.value:.1f} ms instead of {eight.base.tpot.value:.1f}",
        f"Its steps wait for layers for {beside.arm().host_stall_ms:.1f} ms a repeat, those of one request after "
        f"another for {beside.arm(FIFO).host_stall_ms:.1f}",
        f"{set_aside(two, 'c4_hit15360_new768_chunk256_two_gpus_full')} repeats",
    ]  # fmt: skip


def of_other_runs(quick: Cells, more: Cells, first: Cells) -> list[str]:
    """Of f8adb2c, e6b6de6 and b46f46f, none of which is a cell's last."""
    small, slow = Spoken(quick, NAME(4, 256)), Spoken(quick, SLOW_TIER)
    landed = small.arm().last_layer_ms
    assert landed
    peer = more["c4_hit15360_new768_chunk256"].arms["peer_offloading"]
    longest = max(arm.loads_ms[-1] for cell in first.values() for arm in cell.arms.values() if arm.loads_ms)
    return [
        f"the first token came {small.arm().ttft.value - landed:.1f} after the last layer, and `auto` took "
        f"{small.ms()} of the {0.55 * small.base.ttft.value:.1f} that were the aim",
        f"{slow.whole_ms()} ms beside {slow.whole_ms(FIFO)}.",
        f"e6b6de6, {pm(peer.ttft)})",
        f"loads of 40 ms took up to {longest / 10:.0f}0 at b46f46f",
    ]


def mean(shares: Sequence[float]) -> str:
    """In percent."""
    return f"{sum(shares) / len(shares):.1%}"


def set_aside(cells: Cells, name: str) -> str:
    """How many of a cell's repeats, of all arms."""
    arms = cells[name].arms.values()
    aside = sum(arm.set_aside for arm in arms)
    return f"{aside} of {aside + sum(arm.ttft.repeats for arm in arms)}"


def span(figures: Iterable[str]) -> str:
    """The least and the largest, as the page says it."""
    ordered = sorted(figures, key=lambda figure: abs(float(figure.rstrip("%*"))))
    return f"{ordered[0].rstrip('*')} to {ordered[-1].rstrip('*')}"


def ranges(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """What is said of whole tables, from the rows of each section's."""
    rows = {title: [row.strip("| ").split(" | ") for row in table] for title, table in sections.items()}
    gains = rows["What each arm gains"]
    auto = [row for row in gains if row[2] == AUTO]
    shorter = [row[5] for row in auto if row[5].startswith("-")]
    quicker = [row[7] for row in auto if not row[7].startswith(("-", "+0.0%"))]
    later = [row[6] for row in gains if row[0] != "1" and "tier" not in row[1]]
    turns = [row[4].split(" ")[0] for row in rows["What each thing is worth"] if row[2] == "interleaved_full_graphs"
             and not re.search("open|misses", row[3])]  # fmt: skip
    original = [row for row in auto if row[1].startswith(("12,288", "14,336"))]
    (wrong,) = (row[2].partition(";")[0] for row in rows["Goals and what was measured"] if row[0] == "wrong answers")
    against = [(row[0], float(row[4].split("%")[0])) for row in rows["`auto`"] if row[4] != "-"]
    closed = [-value for name, value in against if name.startswith(("c4", "c8")) and name.endswith(("_full", "_both"))
              and not re.search(r"open|tier|misses", name)]  # fmt: skip
    alone = [value for name, value in against if name.startswith("c1_")]
    foreseen = [int(row[6].rstrip("%")) for row in rows["`auto`"] if row[0].startswith(("c4", "c8"))
                and row[6] != "-" and not re.search(r"tier|misses", row[0])]  # fmt: skip
    return [
        f"shorter in {len(shorter)} of {len(auto)} cells, {span(shorter)};",
        f"higher in {len(quicker)}, by {span(quicker).split(' ')[0]} or more",
        f"shorter in all, {span(row[4].split(' ')[0] for row in original)}; "
        f"{sum('*' in row[4] for row in original)} of the six are shown",
        f"TPOT rose in every line of `auto` and of one request after another, by {span(later)}",
        f"came {span(turns)} later",
        f"{wrong} counts as wrong",
        f"by {min(closed)}% to {max(closed)}%",
        f"between {-min(alone)}% ahead of the best fixed arm and {max(alone)}% behind",
        f"four and eight at once, {min(foreseen)}% to {max(foreseen)}% of what came",
    ]
