"""What vllm_concurrency.py measures: its cells by group, in the order in which they matter; the arms are beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from concurrency_arms import ARMS, BASELINE, CHUNK_MAJOR, DEEP, DIFFERENCES, Arm

__all__ = ["ARMS", "BASELINE", "CHUNK_MAJOR", "DEEP", "DIFFERENCES", "GROUPS", "Arm", "Cell", "Group", "joined"]

MOST_HIT_TOKENS: Final = 700_000
"""Of all requests of a cell at once, so that the engine's memory holds them."""
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


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload.

    Attributes:
        concurrency: requests at once in the closed loop; in the open loop only a bound for memory.
        hit, new: tokens of each request that are in the host pool, and that are to be computed.
        chunk: tokens of an object.
        output: tokens each request decodes, the first included.
        requests: of a repeat; the first `concurrency` start together and are left out of the figures.
        width: what `layers_per_slice` is where the arm does not say.
        bystanders: requests that decode all the while.
        rate_per_s: open loop with that many arrivals a second; None: closed loop.
        mix: (hit, new) of the requests in turn, instead of `hit` and `new`.
        stores: whether new chunks are stored while the cell runs.
        miss_every: every so-many-th request has a prompt of its own, nothing of which is in the pool; 0: none.
        tier_gb_per_s: the host pool answers only at that rate; None: at the wire's.
        arms: what runs.
        repeats: rounds that run whatever they show; each has every arm once and the baseline twice.
        most_repeats: rounds that run at most, as long as the cell's figures are not shown.
    """

    name: str
    concurrency: int
    hit: int
    new: int
    requests: int
    chunk: int = 256
    output: int = 16
    width: int = 1
    bystanders: int = 0
    rate_per_s: float | None = None
    mix: tuple[tuple[int, int], ...] = ()
    stores: bool = False
    miss_every: int = 0
    tier_gb_per_s: float | None = None
    arms: tuple[str, ...] = _ALL
    repeats: int = 4
    most_repeats: int = 14

    def __post_init__(self) -> None:
        at_once = self.concurrency * max(hit for hit, _new in self.shapes)
        if at_once > MOST_HIT_TOKENS:
            raise ValueError(
                f"{self.name}: {self.concurrency} requests of {at_once // self.concurrency} cached tokens are "
                f"{at_once} at once, more than {MOST_HIT_TOKENS}: lower concurrency or hit"
            )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(hit, new) of the requests, in turn."""
        return self.mix or ((self.hit, self.new),)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(hit + new for hit, new in self.shapes) + self.output

    def requests_of(self, arm: Arm) -> int:
        """Requests of one of the arm's repeats."""
        return min(self.requests, self.concurrency + arm.counted_requests) if arm.counted_requests else self.requests


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that one engine runs, and the documents they draw on.

    Attributes:
        documents, document_tokens: what the host pool is filled with; every hit is the beginning of a document.
        prefix_caching: the engine's own.
        full_graphs: the engine captures whole steps too; only arms that say so replay them.
        prefill_graphs: steps of so many tokens are captured piecewise too; only arms that say so replay them.
        peer: one of vLLM's own connectors instead of Lamella.
        engine_options: of vLLM's engine, over those of every group.
    """

    cells: tuple[Cell, ...]
    documents: int = 20
    document_tokens: int = 15_360
    prefix_caching: bool = True
    full_graphs: bool = False
    prefill_graphs: tuple[int, ...] = ()
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    peer: str | None = None
    peer_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> int:
        """Host memory for the documents and what a run stores beside them, at 128 KiB a token."""
        spare = 131_072 if any(cell.stores for cell in self.cells) else 4_096
        return (self.documents * self.document_tokens + spare) * 131_072


def joined(names: str, groups: Mapping[str, Group]) -> Group:
    """The cells of several groups, joined by `+`, in one engine.

    Raises:
        ValueError: an unknown group, or groups that need different engines.
    """
    unknown = [name for name in names.split("+") if name not in groups]
    if unknown:
        raise ValueError(f"there is no group {', '.join(unknown)}; there are {', '.join(sorted(groups))}")
    chosen = [groups[name] for name in names.split("+")]
    cells = tuple(cell for group in chosen for cell in group.cells)
    graphs = tuple(sorted({size for group in chosen for size in group.prefill_graphs}))
    like = [dataclasses.replace(group, cells=cells, prefill_graphs=graphs) for group in chosen]
    if any(other != like[0] for other in like):
        raise ValueError(f"{names} do not run in one engine: they differ in documents, caching, graphs or connector")
    return like[0]


_REQUESTS: Final = {1: 6, 2: 12, 4: 16, 8: 28, 16: 44}
_PREFILL_GRAPHS: Final = (256, 264, 272, 768, 776, 784, 792, 1536, 1544, 1552)
"""Steps of one or two prefills of the middle cells and some that decode beside them."""


def _closed(concurrency: int, hit: int, new: int, **more: Any) -> Cell:
    name = f"c{concurrency}_hit{hit}_new{new}_chunk{more.get('chunk', 256)}"
    requests = more.pop("requests", _REQUESTS[concurrency])
    return Cell(name, concurrency, hit, new, requests, **more)


def _named(cell: Cell, suffix: str, **changes: Any) -> Cell:
    return dataclasses.replace(cell, name=f"{cell.name}_{suffix}", **changes)


_CORE: Final = (
    _closed(4, 15_360, 768),
    _closed(1, 15_360, 768, arms=_ALONE, repeats=3),
    _closed(8, 15_360, 768, arms=(*_FEW, "auto_ahead", "recompute"), repeats=3),
    *(_closed(4, 15_360, new, arms=(*_FEW, "recompute"), repeats=3) for new in (256, 2048)),
    *(
        _closed(1, 15_360, new, arms=(BASELINE, "chunk_deep", "fifo_first", "sync", "auto", "recompute"), repeats=3)
        for new in (256, 1536, 2048)
    ),
)
_ORIGINAL_REQUESTS: Final = {1: 4, 4: 11, 8: 20}
_ORIGINAL: Final = tuple(
    _closed(
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
_MIDDLE: Final = dataclasses.replace(_CORE[0], arms=_FEW)
_ONE: Final = dataclasses.replace(_CORE[1], arms=(BASELINE, "fifo_first", "auto"))
_EIGHT: Final = dataclasses.replace(_CORE[2], arms=_FEW)
_RANKS_ARMS: Final = (BASELINE, "chunk_deep", "interleaved_first", "fifo_first", "sync", "auto", "recompute")
_ONE_THING: Final = (
    BASELINE, "fifo_first", "interleaved_first", "fifo_deep_first", "fifo_no_turns", "chunk_no_turns", "chunk_deep",
    "interleaved_deep_no_turns", "fifo_whole", "fifo_jit", "fifo_first8", "fifo_width8", "fifo_width32", "fifo_thread",
    "fifo_value",
)  # fmt: skip
_ONE_THING_ALONE: Final = (
    BASELINE, "fifo_first", "fifo_deep_first", "fifo_no_turns", "chunk_no_turns", "fifo_whole", "fifo_width8",
    "fifo_thread",
)  # fmt: skip


def _peer(arm: str, connector: str) -> Group:
    """The three middle cells by one of vLLM's own connectors, which store whatever they see."""
    cells = tuple(
        dataclasses.replace(cell, arms=(arm,), stores=True, repeats=6, most_repeats=6) for cell in (*_CORE[:3],)
    )
    return Group(cells, peer=connector)


GROUPS: Final[dict[str, Group]] = {
    "core": Group(_CORE, prefill_graphs=_PREFILL_GRAPHS),
    "original": Group(_ORIGINAL),
    "finding": Group(
        (
            _named(_MIDDLE, "finding", arms=_ONE_THING, repeats=2, most_repeats=8),
            _named(_ONE, "finding", arms=_ONE_THING_ALONE, repeats=2, most_repeats=6),
        )
    ),
    "graphs": Group(
        (
            _named(
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
            _named(
                _MIDDLE,
                "graphs",
                arms=(BASELINE, "fifo_first", *(f"{arm}_prefill_graphs" for arm in ("chunk", "fifo", "auto"))),
                repeats=2,
            ),
        ),
        prefill_graphs=_PREFILL_GRAPHS,
    ),
    "extra": Group(
        (
            _named(
                _MIDDLE,
                "bystanders",
                bystanders=8,
                arms=(BASELINE, "fifo_first", "fifo_jit", "auto", "auto_heavy"),
                repeats=3,
            ),
            _named(_MIDDLE, "tier5", tier_gb_per_s=5.0, requests=6, arms=_FOUR, repeats=2, most_repeats=4),
            _named(_MIDDLE, "tier20", tier_gb_per_s=20.0, requests=12, arms=_FOUR, repeats=2, most_repeats=6),
            _named(
                _MIDDLE,
                "out50",
                output=50,
                requests=14,
                arms=(BASELINE, "fifo_first", "auto", "auto_light", "auto_heavy", "fifo_first16"),
                repeats=2,
            ),
            _named(_EIGHT, "out50", output=50, requests=22, arms=(BASELINE, "fifo_first", "auto"), repeats=2),
            _closed(16, 15_360, 768, requests=36, arms=_FOUR, repeats=2),
            _named(_MIDDLE, "open", rate_per_s=9.0, requests=16, arms=_FOUR, repeats=2),
            _named(
                _MIDDLE,
                "mixed",
                mix=((15_360, 768), (4_096, 256), (8_192, 2_048), (15_360, 256)),
                requests=20,
                arms=(*_FOUR, "shortest_first"),
                repeats=2,
            ),
            _named(
                _MIDDLE,
                "misses",
                miss_every=2,
                stores=True,
                requests=10,
                arms=(BASELINE, "fifo_first", "auto"),
                repeats=2,
                most_repeats=6,
            ),
            _named(_MIDDLE, "out128", output=128, requests=8, arms=_FOUR, repeats=2, most_repeats=6),
            _named(_MIDDLE, "stores", stores=True, arms=(BASELINE, "fifo_first", "auto"), repeats=2, most_repeats=6),
            _closed(2, 15_360, 768, arms=_FOUR, repeats=2),
            *(_closed(8, 15_360, new, arms=_FOUR, repeats=2) for new in (256, 2048)),
            *(_closed(concurrency, 4_096, 256, arms=_FOUR, repeats=2) for concurrency in (4, 1)),
        )
    ),
    "chunks": Group(
        tuple(
            _closed(concurrency, 12_288, 768, chunk=chunk, arms=_FEW, repeats=3)
            for chunk in (1024, 4096)
            for concurrency in (4, 1)
        ),
        documents=12,
    ),
    "long": Group(
        (
            _closed(1, 65_536, 1_024, requests=4, arms=_FEW),
            _closed(2, 65_536, 1_024, requests=6, arms=_FEW, repeats=3),
            _closed(2, 32_768, 1_024, requests=8, arms=_FEW),
            _closed(1, 32_768, 256, requests=6, arms=_FEW),
        ),
        documents=5,
        document_tokens=65_536,
    ),
    "no_prefix_caching": Group(
        tuple(_named(cell, "no_prefix_caching", arms=_FEW, repeats=3) for cell in _CORE[:2]), prefix_caching=False
    ),
    "no_async": Group(
        tuple(
            _named(cell, "no_async", arms=(BASELINE, "fifo_first", "sync", "auto", "auto_ahead"), repeats=3)
            for cell in _CORE[:2]
        ),
        engine_options={"async_scheduling": False},
    ),
    "full_graphs": Group(
        tuple(
            _named(cell, "full_graphs", arms=arms, repeats=3)
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
            _named(_closed(concurrency, 15_360, 768, arms=_RANKS_ARMS, repeats=2, **more), "two_gpus")
            for concurrency, more in ((4, {"requests": 12}), (1, {"requests": 5}), (8, {"requests": 20}))
        ),
        documents=12,
    ),
    "peer_offloading": _peer("peer_offloading", "OffloadingConnector"),
    "peer_simple": _peer("peer_simple", "SimpleCPUOffloadConnector"),
}
