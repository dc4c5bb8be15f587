"""What vllm_concurrency.py measures: its arms, and its cells by group, in the order in which they matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

BASELINE: Final = "chunk_bounded"
"""The arm that opens and closes every cell; the figures are taken against the better of the chunk-major arms."""

CHUNK_MAJOR: Final = ("chunk_bounded", "chunk_deep")
DEEP: Final[dict[str, Any]] = {"in_flight_mb": 8192, "staging_mib": 2048, "window_mib": 16}
"""Everything is enqueued at the device at once; the ring holds a whole load of 16 k tokens."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to bring a request's KV.

    Attributes:
        settings: of the connector, over the cell's; None: nothing is loaded, everything is computed.
        repeats: rounds of the cell it takes part in; 0: all.
        obeys_waits: false only in the control that reads early on purpose.
        counted_requests: of a repeat, beside the first ones that do not count; 0: all that the cell has.
    """

    name: str
    settings: Mapping[str, Any] | None
    repeats: int = 0
    obeys_waits: bool = True
    counted_requests: int = 0

    def requests_of(self, cell: Cell) -> int:
        """Requests of one of its repeats."""
        return min(cell.requests, cell.concurrency + self.counted_requests) if self.counted_requests else cell.requests


def _layerwise(order: str = "fifo", release: str = "first", **more: Any) -> dict[str, Any]:
    return {"order": order, "release": release, **more}


_CHUNK: Final = {"layers_per_slice": 0, "release": "whole"}
ARMS: Final[dict[str, Arm]] = {
    arm.name: arm
    for arm in (
        Arm("recompute", None, repeats=1, counted_requests=4),
        Arm("chunk_bounded", _CHUNK),
        Arm("chunk_deep", {**_CHUNK, **DEEP}, repeats=3),
        Arm("interleaved_first", _layerwise("round_robin"), repeats=4),
        Arm("interleaved_deep_first", _layerwise("round_robin", **DEEP), repeats=3),
        Arm("fifo_first", _layerwise()),
        Arm("fifo_deep_first", _layerwise(**DEEP), repeats=3),
        Arm("fifo_whole", _layerwise(release="whole"), repeats=3),
        Arm("fifo_jit", _layerwise(release="jit:step"), repeats=4),
        Arm("fifo_value", _layerwise(carrier="value"), repeats=4),
        Arm("shortest_first", _layerwise("shortest_remaining"), repeats=4),
        Arm("sync", {"use_layerwise": True}, repeats=4),
        Arm("auto", {"layers_per_slice": "auto"}),
        Arm("early_read", _layerwise(), repeats=1, obeys_waits=False),
        Arm("peer_offloading", {}),
        Arm("peer_simple", {}),
    )
}
"""A cell's width is put in where an arm says nothing about `layers_per_slice`."""

CORE_ARMS: Final = (
    "chunk_bounded",
    "chunk_deep",
    "interleaved_first",
    "fifo_first",
    "fifo_jit",
    "auto",
    "recompute",
)
WAIT_FREE_ARMS: Final = ("chunk_bounded", "chunk_deep", "recompute")
"""Those that captured full graphs allow."""


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
        arms, repeats: what runs.
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
    arms: tuple[str, ...] = CORE_ARMS
    repeats: int = 5

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(hit, new) of the requests, in turn."""
        return self.mix or ((self.hit, self.new),)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(hit + new for hit, new in self.shapes) + self.output


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that one engine runs, and the documents they draw on.

    Attributes:
        documents, document_tokens: what the host pool is filled with; every hit is the beginning of a document.
        prefix_caching: the engine's own.
        full_graphs: the engine captures whole steps too, which no arm that waits in the forward pass allows.
        peer: one of vLLM's own connectors instead of Lamella.
    """

    cells: tuple[Cell, ...]
    documents: int = 20
    document_tokens: int = 15_360
    prefix_caching: bool = True
    full_graphs: bool = False
    peer: str | None = None
    peer_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> int:
        """Host memory for the documents and what a run stores beside them, at 128 KiB a token."""
        spare = 131_072 if any(cell.stores for cell in self.cells) else 4_096
        return (self.documents * self.document_tokens + spare) * 131_072


_REQUESTS: Final = {1: 6, 2: 10, 4: 14, 8: 26, 16: 44}


def _closed(concurrency: int, hit: int, new: int, **more: Any) -> Cell:
    name = f"c{concurrency}_hit{hit}_new{new}_chunk{more.get('chunk', 256)}"
    requests = more.pop("requests", _REQUESTS[concurrency])
    return Cell(name, concurrency, hit, new, requests, **more)


def _named(cell: Cell, suffix: str, **changes: Any) -> Cell:
    return dataclasses.replace(cell, name=f"{cell.name}_{suffix}", **changes)


_CORE: Final = tuple(
    _closed(concurrency, 15_360, new)
    for new, concurrency in (
        (768, 4), (768, 1), (768, 8), (256, 4), (2048, 4), (256, 1), (2048, 1), (256, 8), (2048, 8),
    )
)  # fmt: skip
_ORIGINAL_REQUESTS: Final = {1: 5, 4: 10, 8: 18}
_ORIGINAL: Final = tuple(
    _closed(concurrency, hit, new, chunk=chunk, width=width, output=50, requests=_ORIGINAL_REQUESTS[concurrency])
    for hit, new, chunk, width in ((12_288, 2_866, 4096, 1), (14_336, 818, 2048, 8))
    for concurrency in (4, 1, 8)
)
_MIDDLE: Final = _CORE[0]
_RANKS_ARMS: Final = ("chunk_bounded", "chunk_deep", "interleaved_first", "fifo_first", "sync", "auto", "recompute")
_FEW: Final = ("chunk_bounded", "interleaved_first", "fifo_first", "auto")
_STEPS_OF_THE_FINDING: Final = (
    "chunk_bounded", "fifo_whole", "fifo_first", "fifo_deep_first", "interleaved_first", "interleaved_deep_first",
    "sync", "fifo_value",
)  # fmt: skip


def _peer(arm: str, connector: str) -> Group:
    """The three middle cells by one of vLLM's own connectors, which store whatever they see."""
    cells = tuple(dataclasses.replace(cell, arms=(arm,), stores=True) for cell in _CORE[:3])
    return Group(cells, peer=connector)


GROUPS: Final[dict[str, Group]] = {
    "core": Group(_CORE),
    "original": Group(_ORIGINAL),
    "extra": Group(
        (
            _named(_MIDDLE, "finding", arms=_STEPS_OF_THE_FINDING, repeats=4),
            _named(_MIDDLE, "out50", output=50, requests=12, arms=_FEW, repeats=4),
            _named(_CORE[2], "out50", output=50, requests=20, arms=_FEW, repeats=4),
            _named(_MIDDLE, "bystanders", bystanders=8, arms=_FEW, repeats=4),
            _named(_MIDDLE, "open", rate_per_s=9.0, requests=24, arms=_FEW, repeats=4),
            _named(
                _MIDDLE,
                "mixed",
                mix=((15_360, 768), (4_096, 256), (8_192, 2_048), (15_360, 256)),
                requests=18,
                arms=(*_FEW, "shortest_first"),
                repeats=4,
            ),
            _named(_MIDDLE, "tier5", tier_gb_per_s=5.0, arms=_FEW, requests=8, repeats=3),
            _named(_MIDDLE, "tier20", tier_gb_per_s=20.0, arms=_FEW, repeats=4),
            _named(_MIDDLE, "stores", stores=True, arms=_FEW, repeats=4),
            _named(_MIDDLE, "misses", miss_every=2, stores=True, arms=_FEW, repeats=4),
            _named(_MIDDLE, "width8", width=8, arms=_FEW, repeats=3),
            _named(_MIDDLE, "width32", width=32, arms=_FEW, repeats=3),
            _closed(2, 15_360, 768, arms=_FEW, repeats=4),
            _closed(16, 15_360, 768, arms=_FEW, repeats=4),
            _closed(4, 4_096, 256, arms=_FEW, repeats=4),
            _closed(1, 4_096, 256, arms=_FEW, repeats=4),
            _named(_MIDDLE, "out128", output=128, requests=8, arms=_FEW, repeats=3),
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
            _closed(1, 65_536, 1_024, requests=4, arms=_FEW, repeats=4),
            _closed(2, 65_536, 1_024, requests=6, arms=_FEW, repeats=3),
            _closed(2, 32_768, 1_024, requests=8, arms=_FEW, repeats=4),
            _closed(1, 32_768, 256, requests=6, arms=_FEW, repeats=4),
        ),
        documents=5,
        document_tokens=65_536,
    ),
    "no_prefix_caching": Group(
        tuple(_named(cell, "no_prefix_caching", arms=_FEW) for cell in _CORE[:2]), prefix_caching=False
    ),
    "full_graphs": Group(
        tuple(_named(cell, "full_graphs", arms=WAIT_FREE_ARMS) for cell in _CORE[:3]), full_graphs=True
    ),
    "two_gpus": Group(
        tuple(
            _named(_closed(concurrency, 15_360, 768, arms=_RANKS_ARMS, repeats=3, **more), "two_gpus")
            for concurrency, more in ((4, {"requests": 12}), (1, {"requests": 5}), (8, {"requests": 20}))
        ),
        documents=12,
    ),
    "peer_offloading": _peer("peer_offloading", "OffloadingConnector"),
    "peer_simple": _peer("peer_simple", "SimpleCPUOffloadConnector"),
}
