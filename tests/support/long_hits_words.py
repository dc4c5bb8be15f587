"""What the pages say of other hits and objects and of bytes in flight in words, as the recordings would say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from concurrency.figures import ArmFigures, CellFigures
from concurrency.rules import Change, change_of

from concurrency_words import Spoken, pm

Cells = Mapping[str, CellFigures]
BOTH: Final = "auto_both_graphs"
LAYERS: Final = 32


def long_hits(now: Cells) -> list[str]:
    """Of the newest recordings of one GPU, by graphs of prefills."""
    chunks = {(users, size): _spoken(now, f"c{users}_hit12288_new768_chunk{size}")
              for users in (4, 1) for size in (1024, 4096)}  # fmt: skip
    short, short_alone = (_spoken(now, f"c{users}_hit4096_new1024_chunk256") for users in (4, 1))
    two, two_longest = (_spoken(now, f"c2_hit{hit}_new1024_chunk256") for hit in (32_768, 65_536))
    one, longest = (_spoken(now, f"c1_hit{hit}_new{new}_chunk256") for hit, new in ((32_768, 256), (65_536, 1024)))
    again = _spoken(now, "c2_hit65536_new1024_chunk256_in_flight")
    for cell in (chunks[4, 1024], chunks[1, 1024], chunks[1, 4096], short, short_alone, two, one, longest):
        assert cell.change().shown
    assert not any(cell.change().shown for cell in (chunks[4, 4096], two_longest, again))
    peers = now["c8_hit15360_new768_chunk256"].arms
    return [
        f"at eight after {pm(peers['peer_simple'].ttft)} and {pm(peers['peer_offloading'].ttft)} ms",
        f"of 1,024 tokens {chunks[4, 1024].percent_and_error()} at four ({chunks[4, 1024].pair}) and "
        f"{chunks[1, 1024].percent_and_error()} at one; of 4,096 {chunks[4, 4096].percent_and_error()}, not shown, and "
        f"{chunks[1, 4096].percent_and_error()}",
        f"4,096 cached and 1,024 new {short.percent_and_error()} at four ({short.pair}) and "
        f"{short_alone.percent_and_error()} at one",
        f"the GPU, busy for {short.arm().gpu_busy:.0%} of the time, while the link is for {short.arm().link_busy:.0%}",
        f"32,768 cached {two.percent_and_error()} at two with 1,024 new ({two.pair}) and {one.percent_and_error()} at "
        f"one with 256 ({one.pair})",
        f"65,536 and 1,024 new {longest.percent_and_error()} at one ({longest.pair}); at two "
        f"{two_longest.percent_and_error()} and in the other run {again.percent_and_error()}, not shown",
        f"the link alone needs {_floor(longest)} of `auto`'s {longest.ms()} ms at one with 65,536, {_floor(one)} of "
        f"{one.ms()} at one with 32,768, and {_floor(two_longest)} of {two_longest.ms()} at two with 65,536",
    ]


def in_flight(now: Cells) -> list[str]:
    """Of the cells in which some arms have more bytes in flight."""
    two, one, four, large = (
        now[f"{name}_chunk256_in_flight_both"]
        for name in ("c2_hit65536_new1024", "c1_hit65536_new1024", "c4_hit15360_new768", "c4_hit15360_new2048")
    )
    kernel = two.alone.prefill_ms, two.alone.transfer_ms
    assert kernel[0]
    assert kernel[1]
    plain, more = (_arm(two, arm) for arm in ("auto", "auto_four_ms"))
    for cell, shown in ((two, False), (one, True), (four, True), (large, True)):
        assert _change(cell).shown == shown
    return [
        f"`auto`'s first tokens came after {pm(plain.ttft)} ms with 55 MB in flight and {pm(more.ttft)} with 220",
        f"a load took {plain.loads_ms[0]:.1f} instead of {more.loads_ms[0]:.1f} ms in the median, alone "
        f"{kernel[1]:.1f}",
        f"a layer of it computes for {kernel[0] / LAYERS:.1f} ms",
        f"the mean with 55 MB is known to {plain.ttft.relative_error:.1%} only",
        f"At one user it is {_pair(one)}",
        f"four with 15,360 cached: {_pair(four)} with 768 new and {_pair(large)} with 2,048",
        f"{plain.ttft.value:.1f} to {more.ttft.value:.1f} ms with 220 MB in flight instead of 55",
        f"costs four with 15,360 cached {_later(four)} and {_later(large)} ms",
    ]


def _spoken(now: Cells, name: str) -> Spoken:
    return Spoken(now, f"{name}_both", BOTH)


def _floor(cell: Spoken) -> str:
    floor = cell.arm().link_floor
    assert floor is not None
    return f"{floor.value:.1f}"


def _arm(cell: CellFigures, way: str) -> ArmFigures:
    return cell.arms[f"{way}_both_graphs"]


def _change(cell: CellFigures) -> Change:
    """From 55 MB in flight to 220, of `auto`."""
    more, plain = (_arm(cell, way).ttft for way in ("auto_four_ms", "auto"))
    return change_of(more, plain, cell.drift)


def _pair(cell: CellFigures) -> str:
    """With 220 MB instead of 55."""
    more, plain = (_arm(cell, way).ttft.value for way in ("auto_four_ms", "auto"))
    return f"{plain:.1f} and {more:.1f} ms ({_change(cell).value:+.1%})"


def _later(cell: CellFigures) -> str:
    more, plain = (_arm(cell, way).ttft.value for way in ("auto_four_ms", "auto"))
    return f"{more - plain:.1f}"
