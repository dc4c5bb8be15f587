"""Cells of a concurrency run, and groups of them that one engine runs; which there are: groups.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from concurrency.arms import Arm

MOST_HIT_TOKENS: Final = 700_000
"""Of all requests of a cell at once, so that the engine's memory holds them."""

_SHRINK: Final = 32
PREFILL_GRAPHS: Final = (256, 264, 272, 768, 776, 784, 792, 1536, 1544, 1552)
"""Steps of one or two prefills of the middle cells and some that decode beside them."""
_REQUESTS: Final = {1: 6, 2: 12, 4: 16, 8: 28, 16: 44}


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
    arms: tuple[str, ...] = ()
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
        mps: the engine and the process beside some arms share the device through MPS, see `second_process`.
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
    mps: bool = False

    @property
    def pool_bytes(self) -> int:
        """Host memory for the documents and what a run stores beside them, at 128 KiB a token."""
        spare = 131_072 if any(cell.stores for cell in self.cells) else 4_096
        return (self.documents * self.document_tokens + spare) * 131_072


def closed(concurrency: int, hit: int, new: int, **more: Any) -> Cell:
    """A closed loop, named for its numbers; `more` are other attributes of `Cell`."""
    name = f"c{concurrency}_hit{hit}_new{new}_chunk{more.get('chunk', 256)}"
    requests = more.pop("requests", _REQUESTS[concurrency])
    return Cell(name, concurrency, hit, new, requests, **more)


def named(cell: Cell, suffix: str, **changes: Any) -> Cell:
    """The cell with changes, under a name that says so."""
    return dataclasses.replace(cell, name=f"{cell.name}_{suffix}", **changes)


def joined(names: str, groups: Mapping[str, Group]) -> Group:
    """The cells of several groups, joined by `+`, in one engine.

    Raises:
        ValueError: an unknown group, or groups that need different engines.
    """
    wanted = list(dict.fromkeys(names.split("+")))  # each once: a cell's repeats are told apart by their number
    unknown = [name for name in wanted if name not in groups]
    if unknown:
        raise ValueError(f"there is no group {', '.join(unknown)}; there are {', '.join(sorted(groups))}")
    chosen = [groups[name] for name in wanted]
    cells = tuple(cell for group in chosen for cell in group.cells)
    graphs = tuple(sorted({size for group in chosen for size in group.prefill_graphs}))
    like = [dataclasses.replace(group, cells=cells, prefill_graphs=graphs) for group in chosen]
    if any(other != like[0] for other in like):
        raise ValueError(f"{names} do not run in one engine: documents, caching, graphs, connector or MPS differ")
    return like[0]


def shrunk(group: Group, repeats: int = 2) -> Group:
    """The group with 1/32 of the tokens, for a tiny model on a CPU."""
    cells = tuple(
        dataclasses.replace(
            cell,
            hit=cell.hit // _SHRINK,
            new=max(2, cell.new // _SHRINK),
            mix=tuple((hit // _SHRINK // 32 * 32, new // _SHRINK) for hit, new in cell.mix),
            chunk=max(32, cell.chunk // _SHRINK),
            output=min(cell.output, 4),
            width=min(cell.width, 4),
            requests=cell.concurrency + 3,
            most_repeats=min(cell.most_repeats, repeats),
            bystanders=min(cell.bystanders, 2),
            rate_per_s=cell.rate_per_s and 20.0,
            repeats=min(cell.repeats, repeats),
        )
        for cell in group.cells
    )
    return dataclasses.replace(group, cells=cells, document_tokens=group.document_tokens // _SHRINK)
