"""What docs/concurrency.md says in words, as the recordings would say it: whole phrases, with every figure in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from concurrency_figures import ArmFigures, CellFigures
from concurrency_goals import baseline_of
from concurrency_rules import Change, change_of

Cells = Mapping[str, CellFigures]
AUTO, FIFO = "auto_full_graphs", "fifo_full_graphs"


class Spoken:
    """One cell's figures as the page writes them."""

    def __init__(self, cells: Cells, name: str) -> None:
        self.cell = cells[name]
        self.base = self.cell.arms[baseline_of(self.cell, AUTO) or ""]

    def arm(self, name: str = AUTO) -> ArmFigures:
        """An arm's figures."""
        return self.cell.arms[name]

    def change(self, figure: str = "ttft", arm: str = AUTO) -> Change:
        """Of an arm's mean against the baseline's."""
        return change_of(getattr(self.arm(arm), figure), getattr(self.base, figure), self.cell.drift)

    def percent(self, figure: str = "ttft", arm: str = AUTO) -> str:
        """The same, with its sign."""
        return f"{self.change(figure, arm).value:+.1%}"

    def percent_and_error(self, figure: str) -> str:
        """The same with its standard error."""
        change = self.change(figure)
        return f"{change.value:+.1%} ± {change.error:.1%}"

    def ms(self, arm: str = AUTO) -> str:
        """An arm's mean time to first token."""
        return f"{self.arm(arm).ttft.value:.1f}"

    @property
    def pair(self) -> str:
        """The baseline's and `auto`'s."""
        return f"{self.base.ttft.value:.1f} to {self.ms()} ms"

    @property
    def error(self) -> str:
        """The larger standard error of both."""
        return f"{max(self.base.ttft.relative_error, self.arm().ttft.relative_error):.1%}"


def phrases(now: Cells, given_up: Cells, older: Cells, two: Cells) -> list[str]:
    """Of the newest recordings, of the one whose `auto` was given up, of b0a0d48 and of two GPUs."""
    name = "c{}_hit15360_new{}_chunk256_full".format
    one, four, eight = (Spoken(now, name(users, 768)) for users in (1, 4, 8))
    large, small = Spoken(now, name(4, 2048)), Spoken(now, name(4, 256))
    small_then, small_before = Spoken(given_up, name(4, 256)), Spoken(older, name(4, 256))
    open_loop = "c4_hit15360_new768_chunk256_bystanders_open_full"
    beside, beside_then = Spoken(now, open_loop), Spoken(given_up, open_loop)
    both = Spoken(two, "c4_hit15360_new768_chunk256_two_gpus_full")
    answer = Spoken(now, "c4_hit15360_new768_chunk256_out50_full")
    joined, alone_small = Spoken(now, name(1, 1536)), now[name(1, 256)]
    long = Spoken(now, name(1, 2048))
    late = [f"{(one.arm().predicted_ms or 0) / one.arm().ttft.value:.1f}" for one in (joined, long)]
    deep = [change_of(cell.arms["chunk_deep_full_graphs"].ttft, cell.arms["chunk_full_graphs"].ttft, 0).value
            for cell in given_up.values() if "chunk_deep_full_graphs" in cell.arms]  # fmt: skip
    ceiling, fifo, heavy = one.cell.ceiling or 0, one.arm(FIFO), "auto_heavy_full_graphs"
    of_weights = [answer.change("tpot", f"auto{weight}_full_graphs").value for weight in ("_light", "", "_heavy")]
    weights = [answer.ms(f"auto{weight}_full_graphs") for weight in ("_light", "", "_heavy")]
    half, bound = small.cell, small.arm()
    assert half.transfer_ms
    assert bound.link_floor
    assert bound.link_behind_ms is not None
    assert bound.last_layer_ms
    floor, wanted = bound.link_floor.value, 0.55 * small.base.ttft.value
    assert alone_small.transfer_ms
    assert alone_small.prefill_ms
    return [
        f"768 new: {one.percent()}, {one.pair}, {-one.change().value / ceiling:.0%} of what overlap can save; "
        f"the whole answer {one.percent('e2e')}.",
        f"{four.percent()} with 768 new ({four.pair}; whole answers {four.percent('e2e')}, throughput "
        f"{four.percent('requests_per_s')}) and {large.percent()} with 2,048 ({large.pair}). With 256 new "
        f"{small.percent()}, short",
        f"{eight.percent()} ({eight.pair}, throughput {eight.percent('requests_per_s')})",
        f"the baseline's standard error is {eight.error}",
        f"pay {beside.percent_and_error('bystander_tpot')} a token",
        f"the run before said {beside_then.percent_and_error('bystander_tpot')}. One request after another costs them "
        f"{beside.percent('bystander_tpot', FIFO)}.",
        f"{both.percent()} at four at once ({both.pair}), not shown: the standard error is {both.error}.",
        f"after {Spoken(given_up, name(4, 2048)).ms()} ms with 2,048 new tokens and {small_then.ms()} with 256",
        f"the other chunk-major form was {min(deep):+.1%} to {max(deep):+.1%} away",
        f"{small.base.ttft.value:.1f} ms instead of {small_before.base.ttft.value:.1f} (b0a0d48) and "
        f"{small_then.base.ttft.value:.1f} (53723eb), where `auto` took {small.ms()} instead of {small_before.ms()} "
        "(b0a0d48)",
        f"after {weights[0]}, {weights[1]} and {weights[2]} ms and {of_weights[0]:+.1%}, {of_weights[1]:+.1%} and "
        f"{of_weights[2]:+.1%} of TPOT",
        f"{beside.percent('bystander_tpot', heavy)} of theirs instead of {beside.percent('bystander_tpot')}, and first "
        f"tokens after {beside.ms(heavy)} ms instead of {beside.ms()}; {beside_then.percent('bystander_tpot', heavy)} "
        f"instead of {beside_then.percent('bystander_tpot')} at 53723eb",
        f"landed after {joined.arm().first_layer_ms:.1f} ms instead of "
        f"{joined.arm('sync_full_graphs').first_layer_ms:.1f}",
        f"{late[0]} and {late[1]} times as late as they came",
        f"launches make {alone_small.prefill_ms:.1f} ms long where",
        f"{one.ms()} ms, where the ceiling would be {one.base.ttft.value * (1 - ceiling):.1f}. By `fifo_full_graphs` "
        f"({one.ms(FIFO)}): the first layer lands after {fifo.first_layer_ms:.1f}, the request is released "
        f"{fifo.unnoticed_ms:.1f} later and its step begins {fifo.unadmitted_ms:.1f} after that; the rest is the "
        f"prefill, {one.cell.prefill_ms:.1f} ms of the device",
        f"T is {half.transfer_ms:.1f} ms, {half.transfer_ms / small.arm().ttft.value:.0%} of `auto`'s {small.ms()}, "
        f"and the prefill only {half.prefill_ms:.1f} ({alone_small.prefill_ms:.1f} at one user, T/P "
        f"{alone_small.transfer_ms / alone_small.prefill_ms:.2f}): the link is busy for {small.arm().link_busy:.0%} of "
        f"the time. One request alone could save {half.ceiling:.0%}. For these arrivals the link alone needs "
        f"{floor:.1f} ms in the mean, {floor / small.arm().ttft.value:.0%} of the {small.ms()}, whatever goes first: "
        f"{floor - bound.link_behind_ms:.1f} of a request's own and {bound.link_behind_ms:.1f} behind others', "
        f"where it is {four.arm().link_behind_ms:.1f} with 768 new. Its last "
        f"layer landed after {bound.last_layer_ms:.1f}, and its first token came "
        f"{bound.ttft.value - bound.last_layer_ms:.1f} later. The aim was {wanted:.1f}, which leaves "
        f"{wanted - floor:.1f} for all but the link.",
        f"Busy for {eight.arm().gpu_busy:.0%} and {eight.arm().link_busy:.0%} of the time. TPOT is "
        f"{eight.arm().tpot.value:.1f} ms instead of {eight.base.tpot.value:.1f}",
        f"whole answers are shorter, {eight.percent('e2e')}, not shown",
        f"what is left, {beside.percent_and_error('bystander_tpot')}. Its steps wait for layers for "
        f"{beside.arm().host_stall_ms:.1f} ms a repeat, those of one request after another for "
        f"{beside.arm(FIFO).host_stall_ms:.1f}",
        f"one GPU gained {large.percent()} at {(large.cell.transfer_ms or 0) / (large.cell.prefill_ms or 1):.2f} too",
    ]  # fmt: skip


def span(figures: Iterable[str]) -> str:
    """The least and the largest, as the page says it."""
    ordered = sorted(figures, key=lambda figure: abs(float(figure.rstrip("%*"))))
    return f"{ordered[0].rstrip('*')} to {ordered[-1].rstrip('*')}"


def ranges(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """What is said of whole tables, from the rows of each section's."""
    rows = {title: [row.strip("| ").split(" | ") for row in table] for title, table in sections.items()}
    gains = rows["What each arm gains"]
    auto = [row for row in gains if row[2] == AUTO]
    quicker = [row[7] for row in auto if not row[7].startswith(("-", "+0.0%"))]
    later = [row[6] for row in gains if row[0] != "1" and row[2].startswith(("auto", "fifo"))]
    turns = [row[4].split(" ")[0] for row in rows["What each thing is worth"] if row[2] == "interleaved_full_graphs"]
    original = [row[4].split(" ")[0] for row in auto if row[1].startswith(("12,288", "14,336"))]
    (regret,) = (row[2] for row in rows["Goals and what was measured"] if row[0].startswith(f"{AUTO}'s regret"))
    (wrong,) = (row[2].partition(";")[0] for row in rows["Goals and what was measured"] if row[0] == "wrong answers")
    mean, largest = re.findall(r"\d+\.\d%", regret)
    beside = {row[0]: float(row[3].split("%")[0]) for row in rows["`auto`"]}
    closed = [-value for name, value in beside.items() if not name.startswith("c1") and "open" not in name]
    alone = [value for name, value in beside.items() if name.startswith("c1")]
    todays = [int(row[5].rstrip("%")) for row in rows["`auto`"] if row[1] == "4b1f1f9" and "open" not in row[0]]
    two = [row[2] for row in rows["Two GPUs, tensor parallel 2"] if row[0].endswith(AUTO)]
    points = [re.findall(r": \+(\d+\.\d) ± (\d+\.\d) points", said)[0] for said in two if "points" in said]
    smaller, errors = ([float(one[place]) for one in points] for place in (0, 1))
    return [
        f"in all {len(auto)} cells with full graphs, {span(row[5] for row in auto)}",
        f"those of 50 tokens {span(row[5] for row in auto if '→ 50' in row[1])}",
        f"shorter in all, {span(original)};",
        f"higher in {len(quicker)} of them, by {span(quicker).split(' ')[0]} or more",
        f"TPOT rose in every line of `auto` and of one request after another, by {span(later)}",
        f"came {span(turns)} later",
        f"{mean} behind in the mean over {len(auto)} cells, {largest} at most",
        f"{wrong} counts as wrong",
        f"by {min(closed)}% to {max(closed)}%",
        f"between {-min(alone)}% ahead of the best fixed arm and {max(alone)}% behind",
        f"four and eight at once, {min(todays)}% to {max(todays)}% of what came",
        f"That is {points[0][0]} ± {points[0][1]} points less",
        f"and {points[2][0]} ± {points[2][1]} less than at the same commit",
        f"{min(smaller)} to {max(smaller)} points smaller, with errors of {min(errors)} to {max(errors)}",
    ]
