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


def long_hits(now: Cells, before: Cells) -> list[str]:
    """Of the newest recordings of one GPU, by graphs of prefills.

    Args:
        before: of the last one whose engine counted as in flight what waits for its scatter.
    """
    chunks = {(users, size): _spoken(now, f"c{users}_hit12288_new768_chunk{size}")
              for users in (4, 1) for size in (1024, 4096)}  # fmt: skip
    short, short_alone = (_spoken(now, f"c{users}_hit4096_new1024_chunk256") for users in (4, 1))
    two, two_longest = (_spoken(now, f"c2_hit{hit}_new1024_chunk256") for hit in (32_768, 65_536))
    one, longest = (_spoken(now, f"c1_hit{hit}_new{new}_chunk256") for hit, new in ((32_768, 256), (65_536, 1024)))
    again, since = (_spoken(cells, "c2_hit65536_new1024_chunk256_in_flight") for cells in (before, now))
    for cell in (chunks[4, 1024], chunks[1, 1024], chunks[1, 4096], short, short_alone, two, one, longest):
        assert cell.change().shown
    assert not any(cell.change().shown for cell in (chunks[4, 4096], two_longest, again, since))
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
        f"{two_longest.percent_and_error()} and {again.percent_and_error()}, not shown, and since then "
        f"{since.percent_and_error()}, not shown either",
        f"{two_longest.percent()} at two with 65,536 cached, and {since.percent()} since",
        f"the link alone needs {_floor(longest)} of `auto`'s {longest.ms()} ms at one with 65,536, {_floor(one)} of "
        f"{one.ms()} at one with 32,768, and {_floor(two_longest)} of {two_longest.ms()} at two with 65,536",
    ]


def in_flight(before: Cells) -> list[str]:
    """Of arms with more bytes in flight, by the engine that counts as these what waits for its scatter too."""
    two, one, four, large = (
        before[f"{name}_chunk256_in_flight_both"]
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
        f"it cost four with 15,360 cached {_later(four)} and {_later(large)} ms",
    ]


def wire_alone(since: Cells) -> list[str]:
    """Of the engine that counts as in flight what is on the wire alone: a larger ring, and more in flight."""
    two, four = (since[f"{name}_chunk256_in_flight_both"] for name in ("c2_hit65536_new1024", "c4_hit15360_new768"))
    assert two.alone.transfer_ms
    ring, fewer, more = ("auto", "auto_small_ring", "auto_two_ms")
    one_by_one, small = ("fifo", "fifo_small_ring")
    fifo_more = _arm(four, "fifo_two_ms").ttft
    assert _from_to(two, small, one_by_one).shown
    assert _from_to(four, fewer, ring).shown
    unknown = _from_to(two, ring, more), _from_to(four, one_by_one, "fifo_two_ms")
    assert all(abs(change.value) > 2 * change.error and not change.shown for change in unknown)
    nothing = _from_to(two, fewer, ring), _from_to(four, small, one_by_one), _from_to(four, ring, more)
    assert all(abs(change.value) < 2 * change.error for change in nothing)
    arms = [arm for cell in (two, four) for arm in cell.arms.values()]
    aside = sum(arm.set_aside for arm in arms)
    return [
        f"of its {aside + sum(arm.ttft.repeats for arm in arms)} repeats {aside} are set aside",
        f"took {_arm(two, ring).loads_ms[0]:.1f} ms in the median with a ring of 256 MiB and "
        f"{_arm(two, fewer).loads_ms[0]:.1f} with one of 64, alone {two.alone.transfer_ms:.1f}",
        f"after {pm(_arm(two, ring).ttft)} instead of {pm(_arm(two, fewer).ttft)} ms, within two errors",
        f"{_ms(two, small, one_by_one)} ({_said(two, small, one_by_one)}), shown",
        f"`auto` {_said(four, fewer, ring)} ({_ms(four, fewer, ring)}), shown",
        f"of one request after another {_said(four, small, one_by_one)}, within two errors",
        f"`auto` at two with 65,536 {_said(two, ring, more)} ({_ms(two, ring, more)})",
        f"one request after another at four {_said(four, one_by_one, 'fifo_two_ms')} "
        f"({_ms(four, one_by_one, 'fifo_two_ms')})",
        f"the mean of the first is known to {_arm(two, ring).ttft.relative_error:.1%} without them, that of the second "
        f"to {fifo_more.relative_error:.1%} with them",
        f"`auto` at four {_said(four, ring, more)}, within two errors",
        f"came {-_from_to(two, small, one_by_one).value:.1%} sooner by a ring of 256 MiB",
        f"one request after another {_said(four, one_by_one, 'fifo_two_ms')}, beyond two errors",
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


def _from_to(cell: CellFigures, of: str, to: str) -> Change:
    return change_of(_arm(cell, to).ttft, _arm(cell, of).ttft, cell.drift)


def _said(cell: CellFigures, of: str, to: str) -> str:
    change = _from_to(cell, of, to)
    return f"{change.value:+.1%} ± {change.error:.1%}"


def _ms(cell: CellFigures, of: str, to: str) -> str:
    return f"{_arm(cell, of).ttft.value:.1f} and {_arm(cell, to).ttft.value:.1f} ms"


def _pair(cell: CellFigures) -> str:
    """With 220 MB instead of 55."""
    more, plain = (_arm(cell, way).ttft.value for way in ("auto_four_ms", "auto"))
    return f"{plain:.1f} and {more:.1f} ms ({_change(cell).value:+.1%})"


def _later(cell: CellFigures) -> str:
    more, plain = (_arm(cell, way).ttft.value for way in ("auto_four_ms", "auto"))
    return f"{more - plain:.1f}"
