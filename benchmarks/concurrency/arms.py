"""The arms of measure.py: ways to bring a request's KV, and those that differ from another in one thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

BASELINE: Final = "chunk_bounded"
"""The arm that runs twice a round; the figures are taken against the better of the chunk-major arms."""

CHUNK_MAJOR_FULL: Final = ("chunk_full_graphs", "chunk_deep_full_graphs")
CHUNK_MAJOR_BOTH: Final = ("chunk_both_graphs", "chunk_deep_both_graphs")
CHUNK_MAJOR: Final[Mapping[str, tuple[str, ...]]] = {
    "piecewise": (BASELINE, "chunk_deep"),
    "prefill": ("chunk_prefill_graphs",),
    "full": CHUNK_MAJOR_FULL,
    "both": CHUNK_MAJOR_BOTH,
}
"""The chunk-major forms, bounded and deep, by the graphs that they replay, see `Arm`."""


def chunk_major_of(arms: Collection[str]) -> tuple[str, ...]:
    """The chunk-major forms, bounded and deep, of the first kind of graphs that a cell with such arms has."""
    return next((forms for forms in CHUNK_MAJOR.values() if forms[0] in arms), CHUNK_MAJOR["piecewise"])


def graphs_of(arm: str) -> str:
    """Which graphs the arm replays; arms of a recording that are not known here replay the usual ones."""
    return ARMS[arm].graphs if arm in ARMS else "piecewise"


DEEP: Final[dict[str, Any]] = {"in_flight_mb": 8192, "staging_mib": 2048, "window_mib": 16}
"""Everything is enqueued at the device at once; the ring holds a whole load of 16 k tokens."""
AHEAD: Final[dict[str, Any]] = {"in_flight_mb": 768, "staging_mib": 1024}
"""As much as moves in 14 ms is enqueued: a wait for a layer on its way need not stop the model runner's thread."""
TWO_MS: Final[dict[str, Any]] = {"in_flight_mb": 110}
FOUR_MS: Final[dict[str, Any]] = {"in_flight_mb": 220, "staging_mib": 256}
"""So long can a load's scatter wait for a kernel that has every multiprocessor before the link lies idle. Since 256 MiB
are the ring's default and what waits for its scatter is not in flight, a scatter can wait so long in any case."""
SMALL_RING: Final[dict[str, Any]] = {"staging_mib": 64}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to bring a request's KV.

    Attributes:
        settings: of the connector, over the cell's; None: nothing is loaded, everything is computed.
        repeats: the most it takes part in; 0: as many as the cell has rounds.
        obeys_waits: false only in the control that reads early on purpose.
        counted_requests: of a repeat, beside the first ones that do not count; 0: all that the cell has.
        graphs: which steps replay captured graphs: `piecewise`, those the engine captures by its defaults; `prefill`,
            piecewise ones of prefills too; `full`, whole decoding steps; `both`.
        begins_in_thread: a thread in Python begins the loads, not the model runner's.
        beside: a second process multiplies on the same device all the while.
    """

    name: str
    settings: Mapping[str, Any] | None
    repeats: int = 0
    obeys_waits: bool = True
    counted_requests: int = 0
    graphs: str = "piecewise"
    begins_in_thread: bool = False
    beside: bool = False


def _layerwise(order: str = "fifo", release: str = "first", **more: Any) -> dict[str, Any]:
    return {"order": order, "release": release, **more}


_CHUNK: Final = {"layers_per_slice": 0, "release": "whole"}
_AUTO: Final = {"layers_per_slice": "auto"}
_NO_TURNS: Final[dict[str, Any]] = {"turn_mib": 0}
_BEFORE: Final[dict[str, Any]] = {"full_graphs": "before"}
_BEFORE_BATCH: Final[dict[str, Any]] = {**_BEFORE, "before_batch": True}
_BY_ONE_KIND: Final = (
    Arm("recompute", None, repeats=2, counted_requests=2),
    Arm("chunk_bounded", _CHUNK),
    Arm("chunk_deep", {**_CHUNK, **DEEP}),
    Arm("interleaved_first", _layerwise("round_robin")),
    Arm("fifo_first", _layerwise()),
    Arm("fifo_first8", _layerwise(release="first:8")),
    Arm("fifo_first16", _layerwise(release="first:16")),
    Arm("fifo_deep_first", _layerwise(**DEEP)),
    Arm("fifo_ahead", _layerwise(**AHEAD)),
    Arm("fifo_two_ms", _layerwise(**TWO_MS)),
    Arm("fifo_four_ms", _layerwise(**FOUR_MS)),
    Arm("fifo_small_ring", _layerwise(**SMALL_RING)),
    Arm("fifo_whole", _layerwise(release="whole")),
    Arm("fifo_jit", _layerwise(release="jit:step")),
    Arm("fifo_value", _layerwise(carrier="value")),
    Arm("fifo_width8", _layerwise(layers_per_slice=8)),
    Arm("fifo_width32", _layerwise(layers_per_slice=32)),
    Arm("fifo_thread", _layerwise(), begins_in_thread=True),
    Arm("fifo_beside", _layerwise(), beside=True),
    Arm("chunk_beside", _CHUNK, beside=True),
    Arm("shortest_first", _layerwise("shortest_remaining")),
    Arm("sync", {"use_layerwise": True}),
    Arm("sync_ahead", {"use_layerwise": True, **AHEAD}),
    Arm("sync_width32", {"use_layerwise": True, "layers_per_slice": 32}),
    Arm("auto", _AUTO),
    Arm("auto_ahead", {**_AUTO, **AHEAD}),
    Arm("auto_two_ms", {**_AUTO, **TWO_MS}),
    Arm("auto_four_ms", {**_AUTO, **FOUR_MS}),
    Arm("auto_small_ring", {**_AUTO, **SMALL_RING}),
    Arm("auto_light", {**_AUTO, "bystander_weight": 0.0}),
    Arm("auto_heavy", {**_AUTO, "bystander_weight": 2.0}),
    Arm("chunk_no_turns", {**_CHUNK, **_NO_TURNS}),
    Arm("fifo_no_turns", _layerwise(**_NO_TURNS)),
    Arm("fifo_deep_no_turns", _layerwise(**DEEP, **_NO_TURNS)),
    Arm("interleaved_deep_no_turns", _layerwise("round_robin", **DEEP, **_NO_TURNS)),
    Arm("early_read", _layerwise(), repeats=1, obeys_waits=False),
    Arm("chunk_prefill_graphs", _CHUNK, graphs="prefill"),
    Arm("fifo_prefill_graphs", _layerwise(), graphs="prefill"),
    Arm("sync_prefill_graphs", {"use_layerwise": True}, graphs="prefill"),
    Arm("auto_prefill_graphs", _AUTO, graphs="prefill"),
    Arm("chunk_full_graphs", _CHUNK, graphs="full"),
    Arm("chunk_deep_full_graphs", {**_CHUNK, **DEEP}, graphs="full"),
    Arm("interleaved_full_graphs", _layerwise("round_robin", **_BEFORE), graphs="full"),
    Arm("fifo_full_graphs", _layerwise(**_BEFORE), graphs="full"),
    Arm("jit_full_graphs", _layerwise(release="jit:step", **_BEFORE), graphs="full"),
    Arm("shortest_full_graphs", _layerwise("shortest_remaining", **_BEFORE), graphs="full"),
    Arm("sync_full_graphs", {"use_layerwise": True, **_BEFORE}, graphs="full"),
    Arm("sync_before_batch_full_graphs", {"use_layerwise": True, **_BEFORE_BATCH}, graphs="full"),
    Arm("auto_full_graphs", {**_AUTO, **_BEFORE}, graphs="full"),
    Arm("auto_before_batch_full_graphs", {**_AUTO, **_BEFORE_BATCH}, graphs="full"),
    Arm("auto_light_full_graphs", {**_AUTO, **_BEFORE, "bystander_weight": 0.0}, graphs="full"),
    Arm("auto_heavy_full_graphs", {**_AUTO, **_BEFORE, "bystander_weight": 2.0}, graphs="full"),
    Arm("recompute_full_graphs", None, repeats=1, counted_requests=2, graphs="full"),
    Arm("peer_offloading", {}),
    Arm("peer_simple", {}),
)
_BY_BOTH_TOO: Final = (
    "chunk_bounded", "chunk_deep", "chunk_no_turns", "chunk_beside", "interleaved_first", "interleaved_deep_no_turns",
    "fifo_first", "fifo_first8", "fifo_deep_first", "fifo_no_turns", "fifo_deep_no_turns", "fifo_whole", "fifo_jit",
    "fifo_width8", "fifo_width32", "fifo_thread", "fifo_beside", "fifo_two_ms", "fifo_four_ms", "fifo_ahead",
    "fifo_small_ring", "sync", "sync_width32", "auto", "auto_two_ms", "auto_four_ms", "auto_ahead", "auto_small_ring",
)  # fmt: skip


def by_both(name: str) -> str:
    """The arm that differs from a piecewise one in that decoding steps and prefills replay captured graphs."""
    return f"{name.removesuffix('_first').removesuffix('_bounded')}_both_graphs"


def _of_both(arm: Arm) -> Arm:
    assert arm.settings is not None
    waits = {} if arm.settings.get("layers_per_slice") == 0 else _BEFORE  # chunk-major: no step waits for layers
    return dataclasses.replace(arm, name=by_both(arm.name), settings={**arm.settings, **waits}, graphs="both")


ARMS: Final[dict[str, Arm]] = {
    arm.name: arm for arm in (*_BY_ONE_KIND, *(_of_both(arm) for arm in _BY_ONE_KIND if arm.name in _BY_BOTH_TOO))
}
"""A cell's width is put in where an arm says nothing about `layers_per_slice`."""

_DIFFERENCES: Final[tuple[tuple[str, str, str], ...]] = (
    ("slices of all requests in turn, instead of one request after another", "fifo_first", "interleaved_first"),
    ("the same with full graphs", "fifo_full_graphs", "interleaved_full_graphs"),
    ("the same where all is enqueued at once without turns", "fifo_deep_no_turns", "interleaved_deep_no_turns"),
    ("everything enqueued at the device at once", "fifo_first", "fifo_deep_first"),
    (
        "768 MB enqueued instead of 55: the model runner does not stop for what is not enqueued",
        "fifo_first",
        "fifo_ahead",
    ),
    ("the same, joining the next step", "sync", "sync_ahead"),
    ("the same, chosen", "auto", "auto_ahead"),
    ("110 MB enqueued instead of 55", "fifo_first", "fifo_two_ms"),
    ("the same, chosen", "auto", "auto_two_ms"),
    ("220 MB enqueued instead of 55", "fifo_first", "fifo_four_ms"),
    ("the same, chosen", "auto", "auto_four_ms"),
    ("a staging ring of 256 MiB instead of 64", "fifo_small_ring", "fifo_first"),
    ("the same, chosen", "auto_small_ring", "auto"),
    ("copies that leave the engine's own no turn", "fifo_first", "fifo_no_turns"),
    ("the same, and then everything enqueued at once: the engine's copies wait", "fifo_no_turns", "fifo_deep_no_turns"),
    ("both, instead of neither", "fifo_first", "fifo_deep_no_turns"),
    ("both, of slices of all requests in turn", "interleaved_first", "interleaved_deep_no_turns"),
    ("no turns, of a chunk-major load", "chunk_bounded", "chunk_no_turns"),
    ("a chunk-major load enqueued at once", "chunk_bounded", "chunk_deep"),
    ("the same with full graphs", "chunk_full_graphs", "chunk_deep_full_graphs"),
    ("interleaved, at once, and no turns: together", "fifo_first", "interleaved_deep_no_turns"),
    ("release with the last slice: what it does not overlap and a step's wait", "fifo_first", "fifo_whole"),
    ("slices instead of chunks, released alike", "chunk_bounded", "fifo_whole"),
    ("release just in time: fewer shared stalls", "fifo_first", "fifo_jit"),
    ("the same with full graphs", "fifo_full_graphs", "jit_full_graphs"),
    ("release with the eighth layer", "fifo_first", "fifo_first8"),
    ("release with the sixteenth layer", "fifo_first", "fifo_first16"),
    ("the whole batch stands from the request's admission on", "fifo_first", "sync"),
    ("no release to be noticed: the load of one slice inside its step", "fifo_width32", "sync_width32"),
    ("slices of eight layers", "fifo_first", "fifo_width8"),
    ("one slice of all layers", "fifo_first", "fifo_width32"),
    ("one launch a load instead of 32, released alike", "fifo_whole", "fifo_width32"),
    ("words that the device writes, instead of events", "fifo_first", "fifo_value"),
    ("a thread in Python begins the loads", "fifo_first", "fifo_thread"),
    ("a second process multiplies on the device", "fifo_first", "fifo_beside"),
    ("the same beside a chunk-major load", "chunk_bounded", "chunk_beside"),
    ("beside it: layer by layer instead of chunk-major", "chunk_beside", "fifo_beside"),
    ("prefills replay captured graphs, chunk-major", "chunk_bounded", "chunk_prefill_graphs"),
    ("prefills replay captured graphs", "fifo_first", "fifo_prefill_graphs"),
    ("prefills replay captured graphs, chosen", "auto", "auto_prefill_graphs"),
    ("whole decoding steps replay captured graphs, chunk-major", "chunk_bounded", "chunk_full_graphs"),
    ("whole decoding steps replay captured graphs", "fifo_first", "fifo_full_graphs"),
    ("whole decoding steps replay captured graphs, chosen", "auto", "auto_full_graphs"),
    ("prefills replay captured graphs too, chunk-major", "chunk_full_graphs", "chunk_both_graphs"),
    ("prefills replay captured graphs too", "fifo_full_graphs", "fifo_both_graphs"),
    ("prefills replay captured graphs too, chosen", "auto_full_graphs", "auto_both_graphs"),
    ("both replay captured graphs: chosen instead of chunk-major", "chunk_both_graphs", "auto_both_graphs"),
    (
        "a load that joins its step begins before the batch is prepared",
        "sync_full_graphs",
        "sync_before_batch_full_graphs",
    ),
    ("the same, chosen", "auto_full_graphs", "auto_before_batch_full_graphs"),
)
DIFFERENCES: Final = (
    *_DIFFERENCES,
    *(
        (f"{what}, by prefills' graphs", by_both(without), by_both(with_it))
        for what, without, with_it in _DIFFERENCES
        if {without, with_it} <= set(_BY_BOTH_TOO)
    ),
)
"""What one thing changes: (the thing, the arm without it, the arm with it)."""
