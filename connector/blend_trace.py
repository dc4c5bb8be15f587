"""A blend's spans as a Chrome trace, in the form of all our traces: link, engine, and what goes on beside both.

The link's track shows loads, the engine's what is recomputed, a third what is scattered; a slice's track is its
layer's place among the buffers, so that three layers in work are three rows. Exact nanoseconds stand in `args`.

Source: the Trace Event Format, complete events (`ph` X) and metadata events (`ph` M).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lamella.connector.streams import Span

KIND: Final = "lamella.blend"
SCHEMA_VERSION: Final = 1
_TRACKS: Final = {"recompute": (1, "engine: recompute"), "load": (2, "link: load"), "scatter": (3, "blocks: scatter")}


def to_chrome_trace(spans: Sequence[Span], *, system: str) -> dict[str, Any]:
    """The document to write as JSON; instants count from the first span's start.

    Args:
        spans: of one blend, as the recorders took them; other kinds are left out.
        system: on what it ran.

    Raises:
        ValueError: no span of a blend.
    """
    own = sorted((span for span in spans if span.kind in _TRACKS), key=lambda span: span.start_ns)
    if not own:
        raise ValueError(f"no span of a blend among {len(spans)}: give the blender and the cache engine a recorder")
    zero_ns = own[0].start_ns
    names = [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
        for process, name in _TRACKS.values()
    ]
    events = [
        {
            "name": f"{span.kind} {span.first_layer}",
            "cat": KIND,
            "ph": "X",
            "pid": _TRACKS[span.kind][0],
            "tid": span.first_layer % 3 + 1,
            "ts": (span.start_ns - zero_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": {
                "kind": span.kind,
                "first_layer": span.first_layer,
                "num_layers": span.num_layers,
                "start_ns": span.start_ns - zero_ns,
                "end_ns": span.end_ns - zero_ns,
            },
        }
        for span in own
    ]
    return {
        "traceEvents": [*names, *events],
        "displayTimeUnit": "ms",
        "otherData": {"kind": KIND, "schema_version": SCHEMA_VERSION, "source": "measured", "system": system},
    }
