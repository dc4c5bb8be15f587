"""What docs/concurrency.md says of `before_batch` and of a rank's prefill in words, as the recordings would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from concurrency.figures import ArmFigures, CellFigures
from concurrency.rules import change_of

from concurrency_words import pm

Cells = Mapping[str, CellFigures]
TWO: Final = "c4_hit15360_new768_chunk256_two_gpus_full"
CELL: Final = "c{}_hit15360_new{}_chunk256_before_batch_full".format


def before_batch(now: Cells, two: Cells) -> list[str]:
    """Of the newest recordings of one GPU and of two."""
    pairs = [
        _pair(now[CELL(1, 768)], "sync{}_full_graphs"), _pair(now[CELL(4, 1024)], "auto{}_full_graphs"),
        _pair(two[TWO], "auto{}_full_graphs"),
    ]  # fmt: skip
    first = [(_ms(off.first_layer_ms), _ms(on.first_layer_ms)) for off, on in pairs]
    last = [(_ms(off.last_layer_ms), _ms(on.last_layer_ms)) for off, on in pairs]
    sooner = [off - on for off, on in first]
    later = [on.ttft.value - off.ttft.value for off, on in pairs]
    rest = [(on.ttft.value - _ms(on.last_layer_ms), off.ttft.value - _ms(off.last_layer_ms)) for off, on in pairs]
    for off, on in pairs:
        change = change_of(on.ttft, off.ttft, 0.0)
        assert abs(change.value) <= 2 * change.error, "each within two errors"
    off, on = _pair(now[CELL(4, 768)], "auto{}_full_graphs")
    assert off.choices.get("sync", 0) == 0
    alone_off, alone_on = _pair(now[CELL(1, 768)], "auto{}_full_graphs")
    assert set(alone_off.choices) == set(alone_on.choices) == {"early"}
    early = now[CELL(4, 768).replace("_before_batch", "")].arms["auto_full_graphs"]
    return [
        f"(99ca007) early release took {early.ttft.value:.1f}.",
        f"first layers land up to {max(sooner):.1f} ms sooner",
        f"the first layer landed after {_of(first[0])} ms at one user, {_of(first[1])} at four with 1,024 new and "
        f"{_of(first[2])} on two GPUs; the last one after {', '.join(map(_of, last[:2]))} and {_of(last[2])}.",
        f"They came {-later[0]:.1f} ms sooner at one user (`sync`), {later[1]:.1f} later with 1,024 new and "
        f"{-later[2]:.1f} sooner on two GPUs, each within two errors.",
        f"it is {rest[0][0]:.1f} instead of {rest[0][1]:.1f} ms, {rest[1][0]:.1f} instead of {rest[1][1]:.1f}, and "
        f"{rest[2][0]:.1f} instead of {rest[2][1]:.1f}.",
        f"{pm(on.ttft)} ms instead of {pm(off.ttft)}, not shown: the baseline drifted by "
        f"{now[CELL(4, 768)].drift:.1%}, and the mean without it is known to {off.ttft.relative_error:.1%} only.",
        f"{on.choices['sync']} of {sum(on.choices.values())} loads inside their step instead of none",
        f"first tokens came after {alone_on.ttft.value:.1f} and {alone_off.ttft.value:.1f} ms.",
    ]


def ranks(each: Sequence[Cells], one: Cells) -> list[str]:
    """Of the runs of two GPUs in their order, the first of which has one user, and of one GPU's newest recordings."""
    _alone, quick, *_busy, busiest = (cells[TWO].alone for cells in each if TWO in cells)
    single = _ms(each[0][TWO.replace("c4_", "c1_")].alone.prefill_ms)
    mine, theirs = (_ms(one[name].alone.prefill_ms) for name in ("c1_hit15360_new768_chunk256_full", CELL(1, 768)))
    assert (round(mine / 2), round(theirs / 2)) == (15, 16)
    return [
        f"behind {theirs:.0f} ms of computing",
        f"P is {mine:.1f} at one user, {theirs:.1f} on the busiest host), and one user on two GPUs had a step of "
        f"{single:.1f}",
        f"No run came nearer to the 16 ms than the {single:.1f}",
        f"the step of two took {_ms(busiest.prefill_ms):.1f}, as long as one GPU's",
        f"at T/P {_ms(busiest.transfer_over_prefill):.2f} the ceiling of one request is {_ms(busiest.ceiling):.0%}, "
        f"at {_ms(quick.transfer_over_prefill):.2f} it is {_ms(quick.ceiling):.0%}",
    ]


def _pair(cell: CellFigures, arm: str) -> tuple[ArmFigures, ArmFigures]:
    """Without and with it."""
    return cell.arms[arm.format("")], cell.arms[arm.format("_before_batch")]


def _of(pair: tuple[float, float]) -> str:
    return f"{pair[1]:.1f} instead of {pair[0]:.1f}"


def _ms(known: float | None) -> float:
    assert known is not None
    return known
