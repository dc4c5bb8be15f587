"""The cells of measure.py by group, in the order in which they matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from concurrency.arms import BASELINE, CHUNK_MAJOR_BOTH, CHUNK_MAJOR_FULL
from concurrency.cells import PREFILL_GRAPHS, Cell, Group, closed, named
from concurrency.finding_groups import FINDING

_FEW: Final = (BASELINE, "chunk_deep", "interleaved_first", "fifo_first", "auto")
_FOUR: Final = (BASELINE, "interleaved_first", "fifo_first", "auto")
_ALONE: Final = (
    BASELINE, "chunk_deep", "fifo_first", "fifo_jit", "fifo_ahead", "fifo_value", "sync", "sync_ahead", "auto",
    "auto_ahead", "chunk_prefill_graphs", "auto_prefill_graphs", "recompute",
)  # fmt: skip
"""One request at a time: there is nobody to interleave with, and no other order."""
_ALL: Final = (
    BASELINE, "chunk_deep", "interleaved_first", "fifo_first", "fifo_jit", "shortest_first", "sync", "auto",
    "auto_ahead", "recompute",
)  # fmt: skip

_MORE_PREFILL_GRAPHS: Final = (*PREFILL_GRAPHS, 512, 520, 824, 832, 1024, 1032, 1040, 1640, 1648, 2048, 2056, 2064)
"""The same of other prompts too."""

_CORE: Final = (
    closed(4, 15_360, 768, arms=_ALL),
    closed(1, 15_360, 768, arms=_ALONE, repeats=3),
    closed(8, 15_360, 768, arms=(*_FEW, "auto_ahead", "recompute"), repeats=3),
    *(closed(4, 15_360, new, arms=(*_FEW, "recompute"), repeats=3) for new in (256, 2048)),
    *(
        closed(1, 15_360, new, arms=(BASELINE, "chunk_deep", "fifo_first", "sync", "auto", "recompute"), repeats=3)
        for new in (256, 1536, 2048)
    ),
)
_ORIGINAL_REQUESTS: Final = {1: 4, 4: 11, 8: 20}
_ORIGINAL: Final = tuple(
    closed(
        concurrency,
        hit,
        new,
        chunk=chunk,
        width=width,
        output=50,
        requests=_ORIGINAL_REQUESTS[concurrency],
        arms=(BASELINE, "chunk_deep", "fifo_first", "sync", "auto", "recompute")
        if concurrency == 1
        else (*_FEW, "recompute"),
        repeats=3,
    )
    for hit, new, chunk, width in ((12_288, 2_866, 4096, 1), (14_336, 818, 2048, 8))
    for concurrency in (4, 1, 8)
)
_TWO: Final = (BASELINE, "chunk_deep", "fifo_first", "auto")
_FULL_GRAPHS: Final = ("chunk_full_graphs", "fifo_full_graphs", "auto_full_graphs")
_FULL_FEW: Final = (*CHUNK_MAJOR_FULL, "interleaved_full_graphs", "fifo_full_graphs", "auto_full_graphs")
_FULL_FOUR: Final = (CHUNK_MAJOR_FULL[0], *_FULL_FEW[2:])
_FULL_LEAST: Final = (*CHUNK_MAJOR_FULL, "fifo_full_graphs", "auto_full_graphs")
_FULL_ALONE: Final = (*CHUNK_MAJOR_FULL, "fifo_full_graphs", "sync_full_graphs", "auto_full_graphs")
_BEFORE_BATCH: Final = ("auto_full_graphs", "auto_before_batch_full_graphs")
_BOTH_GRAPHS: Final = ("chunk_full_graphs", "auto_full_graphs", "chunk_both_graphs", "auto_both_graphs")
_BOTH_LEAST: Final = (*CHUNK_MAJOR_BOTH, "fifo_both_graphs", "auto_both_graphs")
_BOTH_ALONE: Final = (*_BOTH_LEAST, "sync_both_graphs")
_BOTH_IN_FLIGHT: Final = (
    CHUNK_MAJOR_BOTH[0], "fifo_both_graphs", "fifo_small_ring_both_graphs", "fifo_two_ms_both_graphs",
    "fifo_four_ms_both_graphs", "fifo_ahead_both_graphs", "auto_both_graphs", "auto_small_ring_both_graphs",
    "auto_two_ms_both_graphs", "auto_four_ms_both_graphs", "auto_ahead_both_graphs",
)  # fmt: skip
_RECOMPUTE: Final = "recompute_full_graphs"
_MIDDLE: Final = dataclasses.replace(_CORE[0], arms=_FEW)
_OPEN: Final = named(_CORE[0], "bystanders_open", bystanders=8, rate_per_s=9.0, requests=16)
_ONE: Final = dataclasses.replace(_CORE[1], arms=(BASELINE, "fifo_first", "auto"))
_EIGHT: Final = dataclasses.replace(_CORE[2], arms=_FEW)
_RANKS_ARMS: Final = (BASELINE, "chunk_deep", "interleaved_first", "fifo_first", "sync", "auto", "recompute")


def _peer(arm: str, connector: str) -> Group:
    """The three middle cells by one of vLLM's own connectors, which store whatever they see."""
    cells = tuple(
        dataclasses.replace(cell, arms=(arm,), stores=True, repeats=6, most_repeats=6) for cell in (*_CORE[:3],)
    )
    return Group(cells, peer=connector)


def _by_default(cells: Sequence[Cell], arms: Mapping[int, tuple[str, ...]], repeats: int = 3) -> tuple[Cell, ...]:
    """The cells as engine and connector run them by their defaults, decoding steps by full graphs.

    Args:
        cells: with whatever arms.
        arms: by concurrency.
        repeats: rounds that run whatever they show.
    """
    return tuple(named(cell, "full", arms=arms[cell.concurrency], repeats=repeats) for cell in cells)


def _by_both(cells: Sequence[tuple[Cell, tuple[str, ...], int]], **more: Any) -> Group:
    """Where whole decoding steps and prefills replay graphs: cells, their arms, and rounds that run in any case."""
    both = (named(cell, "both", arms=arms, repeats=repeats, most_repeats=16) for cell, arms, repeats in cells)
    return Group(tuple(both), full_graphs=True, prefill_graphs=_MORE_PREFILL_GRAPHS, **more)


_FULL_ARMS: Final = {
    1: (*_FULL_ALONE, _RECOMPUTE),
    4: (*_FULL_FEW, "sync_full_graphs", _RECOMPUTE),
    8: (*_FULL_FEW, _RECOMPUTE),
}
_PIECEWISE: Final = tuple(named(cell, "piecewise", arms=_FEW, repeats=3) for cell in (_CORE[0], _CORE[2], _CORE[1]))

GROUPS: Final[dict[str, Group]] = {
    "full": Group(
        (
            named(
                _CORE[0],
                "full",
                arms=(*_FULL_FEW, "jit_full_graphs", "shortest_full_graphs", "sync_full_graphs", _RECOMPUTE),
                repeats=3,
            ),
            *_by_default((_CORE[2], _CORE[1], _CORE[4], _CORE[3], *_CORE[5:]), _FULL_ARMS),
            named(closed(4, 15_360, 1_024, arms=_FULL_LEAST, repeats=6), "full"),
        ),
        full_graphs=True,
    ),
    "full_original": Group(
        _by_default(_ORIGINAL, {**_FULL_ARMS, 8: (*CHUNK_MAJOR_FULL, *_FULL_FEW[3:], _RECOMPUTE)}), full_graphs=True
    ),
    "full_bystanders": Group(
        (
            named(
                _OPEN,
                "full",
                arms=(CHUNK_MAJOR_FULL[0], "fifo_full_graphs", "auto_full_graphs", "auto_heavy_full_graphs"),
                repeats=6,
                most_repeats=12,
            ),
            named(
                _CORE[0],
                "bystanders_full",
                bystanders=8,
                arms=(*_FULL_FOUR, "auto_heavy_full_graphs"),
                repeats=3,
                most_repeats=6,
            ),
        ),
        full_graphs=True,
    ),
    "full_before_batch": Group(
        tuple(
            named(cell, "before_batch_full", arms=(CHUNK_MAJOR_FULL[0], *_BEFORE_BATCH, *more), repeats=4)
            for cell, more in (
                (closed(4, 15_360, 1_024), ()),
                (_CORE[1], ("sync_full_graphs", "sync_before_batch_full_graphs")),
                (_CORE[0], ()),
                (_CORE[3], ()),
                (_CORE[2], ()),
            )
        ),
        full_graphs=True,
    ),
    "both": _by_both(
        (
            (_CORE[0], (*_BOTH_ALONE, *_FULL_GRAPHS), 4),
            (_CORE[1], (*_BOTH_ALONE, *_FULL_GRAPHS), 6),
            (_CORE[3], _BOTH_LEAST, 4),
            (closed(4, 15_360, 1_024), _BOTH_LEAST, 4),
            (_CORE[2], _BOTH_LEAST, 3),
            (_ORIGINAL[5], _BOTH_LEAST, 3),
            (_CORE[4], _BOTH_LEAST, 3),
            (_OPEN, (CHUNK_MAJOR_BOTH[0], *_BOTH_LEAST[2:]), 6),
        )
    ),
    "piecewise": Group(_PIECEWISE, full_graphs=True),
    "full_extra": Group(
        (
            named(
                _CORE[0],
                "out50_full",
                output=50,
                requests=14,
                arms=(*_FULL_FOUR, "auto_light_full_graphs", "auto_heavy_full_graphs"),
                repeats=2,
                most_repeats=5,
            ),
            named(_CORE[2], "out50_full", output=50, requests=22, arms=_FULL_FOUR, repeats=2, most_repeats=4),
            named(_CORE[0], "tier5_full", tier_gb_per_s=5.0, requests=12, arms=_FULL_FOUR, repeats=2, most_repeats=4),
            named(_CORE[0], "tier20_full", tier_gb_per_s=20.0, requests=12, arms=_FULL_FOUR, repeats=2, most_repeats=6),
            named(closed(16, 15_360, 768, requests=36), "full", arms=_FULL_FOUR, repeats=2, most_repeats=4),
            named(_CORE[0], "open_full", rate_per_s=9.0, requests=16, arms=_FULL_FOUR, repeats=2, most_repeats=6),
            named(
                _CORE[0],
                "mixed_full",
                mix=((15_360, 768), (4_096, 256), (8_192, 2_048), (15_360, 256)),
                requests=20,
                arms=(*_FULL_FOUR, "shortest_full_graphs"),
                repeats=2,
                most_repeats=6,
            ),
            named(
                _CORE[0],
                "misses_full",
                miss_every=2,
                stores=True,
                requests=10,
                arms=_FULL_FOUR,
                repeats=2,
                most_repeats=4,
            ),
            named(_CORE[0], "out128_full", output=128, requests=8, arms=_FULL_FOUR, repeats=2, most_repeats=4),
            named(closed(2, 15_360, 768), "full", arms=_FULL_FOUR, repeats=2, most_repeats=6),
            *(
                named(closed(concurrency, 4_096, 256), "full", arms=_FULL_FOUR, repeats=2, most_repeats=6)
                for concurrency in (4, 1)
            ),
        ),
        full_graphs=True,
    ),
    "core": Group(_CORE, prefill_graphs=PREFILL_GRAPHS),
    "original": Group(_ORIGINAL),
    **FINDING,
    "graphs": Group(
        (
            named(
                _ONE,
                "graphs",
                arms=(
                    BASELINE,
                    "fifo_first",
                    "auto",
                    *(f"{arm}_prefill_graphs" for arm in ("chunk", "fifo", "sync", "auto")),
                ),
                repeats=3,
            ),
            named(
                _MIDDLE,
                "graphs",
                arms=(BASELINE, "fifo_first", *(f"{arm}_prefill_graphs" for arm in ("chunk", "fifo", "auto"))),
                repeats=2,
            ),
        ),
        prefill_graphs=PREFILL_GRAPHS,
    ),
    "extra": Group(
        (
            named(
                _MIDDLE,
                "bystanders",
                bystanders=8,
                arms=(BASELINE, "fifo_first", "fifo_jit", "auto", "auto_heavy"),
                repeats=3,
            ),
            named(_MIDDLE, "tier5", tier_gb_per_s=5.0, requests=12, arms=_FOUR, repeats=2, most_repeats=4),
            named(_MIDDLE, "tier20", tier_gb_per_s=20.0, requests=12, arms=_FOUR, repeats=2, most_repeats=6),
            named(
                _MIDDLE,
                "out50",
                output=50,
                requests=14,
                arms=(BASELINE, "fifo_first", "auto", "auto_light", "auto_heavy", "fifo_first16"),
                repeats=2,
            ),
            named(_EIGHT, "out50", output=50, requests=22, arms=(BASELINE, "fifo_first", "auto"), repeats=2),
            closed(16, 15_360, 768, requests=36, arms=_FOUR, repeats=2),
            named(_MIDDLE, "open", rate_per_s=9.0, requests=16, arms=_FOUR, repeats=2),
            named(
                _MIDDLE,
                "mixed",
                mix=((15_360, 768), (4_096, 256), (8_192, 2_048), (15_360, 256)),
                requests=20,
                arms=(*_FOUR, "shortest_first"),
                repeats=2,
            ),
            named(
                _MIDDLE,
                "misses",
                miss_every=2,
                stores=True,
                requests=10,
                arms=(BASELINE, "fifo_first", "auto"),
                repeats=2,
                most_repeats=6,
            ),
            named(_MIDDLE, "out128", output=128, requests=8, arms=_FOUR, repeats=2, most_repeats=6),
            named(_MIDDLE, "stores", stores=True, arms=(BASELINE, "fifo_first", "auto"), repeats=2, most_repeats=6),
            closed(2, 15_360, 768, arms=_FOUR, repeats=2),
            *(closed(8, 15_360, new, arms=_FOUR, repeats=2) for new in (256, 2048)),
            *(closed(concurrency, 4_096, 256, arms=_FOUR, repeats=2) for concurrency in (4, 1)),
        )
    ),
    "both_chunks": _by_both(
        [
            (closed(concurrency, hit, new, chunk=chunk), _BOTH_LEAST, 3)
            for hit, new, chunk in ((4_096, 1_024, 256), (12_288, 768, 1024), (12_288, 768, 4096))
            for concurrency in (4, 1)
        ],
        documents=12,
    ),
    "both_in_flight": _by_both(
        [
            (named(closed(4, 15_360, new), "in_flight"), _BOTH_IN_FLIGHT, repeats)
            for new, repeats in ((768, 5), (2048, 4))
        ]
    ),
    "both_in_flight_long": _by_both(
        [
            (named(closed(concurrency, hit, new, requests=requests), "in_flight"), _BOTH_IN_FLIGHT, 5)
            for concurrency, hit, new, requests in ((1, 65_536, 1_024, 4), (2, 65_536, 1_024, 6), (1, 15_360, 768, 6))
        ],
        documents=5,
        document_tokens=65_536,
    ),
    "both_long": _by_both(
        [
            (closed(concurrency, hit, new, requests=requests), _BOTH_LEAST, 3)
            for concurrency, hit, new, requests in (
                (2, 32_768, 1_024, 8),
                (1, 32_768, 256, 6),
                (2, 65_536, 1_024, 6),
                (1, 65_536, 1_024, 4),
            )
        ],
        documents=5,
        document_tokens=65_536,
    ),
    "no_prefix_caching": Group(
        tuple(named(cell, "no_prefix_caching", arms=_FEW, repeats=3) for cell in _CORE[:2]), prefix_caching=False
    ),
    "no_async": Group(
        tuple(
            named(cell, "no_async", arms=(BASELINE, "fifo_first", "sync", "auto", "auto_ahead"), repeats=3)
            for cell in _CORE[:2]
        ),
        engine_options={"async_scheduling": False},
    ),
    "full_graphs": Group(
        tuple(
            named(cell, "full_graphs", arms=arms, repeats=3)
            for cell, arms in (
                (_CORE[0], (*_FEW, "fifo_jit", *_FULL_GRAPHS, "recompute_full_graphs")),
                (_CORE[1], (*_TWO, "sync", *_FULL_GRAPHS, "sync_full_graphs")),
                (_CORE[2], (*_TWO, *_FULL_GRAPHS)),
                (_ORIGINAL[0], (*_TWO, *_FULL_GRAPHS)),
                (_CORE[4], _TWO),
                (_CORE[3], _TWO),
            )
        ),
        full_graphs=True,
    ),
    "two_gpus": Group(
        tuple(
            named(closed(concurrency, 15_360, 768, arms=_RANKS_ARMS, repeats=2, **more), "two_gpus")
            for concurrency, more in ((4, {"requests": 12}), (1, {"requests": 5}), (8, {"requests": 20}))
        ),
        documents=12,
    ),
    "two_gpus_full": Group(
        tuple(
            named(closed(concurrency, hit, 768, arms=arms, requests=requests, repeats=6), "two_gpus_full")
            for concurrency, hit, requests, arms in (
                (4, 15_360, 12, (*_FULL_FEW, "auto_before_batch_full_graphs")),
                (4, 18_432, 12, _FULL_LEAST),  # transfer over prefill as one GPU has it with 15,360 and 768
                (1, 15_360, 5, _FULL_ALONE),
                (8, 15_360, 20, _FULL_LEAST),
            )
        ),
        documents=12,
        document_tokens=18_432,
        full_graphs=True,
    ),
    "two_gpus_prefill_graphs": Group(
        tuple(
            named(
                closed(concurrency, 15_360, 768, arms=_BOTH_GRAPHS, requests=requests, repeats=6),
                "two_gpus_prefill_graphs",
            )
            for concurrency, requests in ((4, 12), (1, 5))
        ),
        documents=12,
        document_tokens=18_432,
        full_graphs=True,
        prefill_graphs=PREFILL_GRAPHS,
    ),
    "peer_offloading": _peer("peer_offloading", "OffloadingConnector"),
    "peer_simple": _peer("peer_simple", "SimpleCPUOffloadConnector"),
}
