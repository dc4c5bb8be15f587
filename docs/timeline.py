"""Draws docs/timeline.svg: the same loads, moved and released in three ways, as the recursion computes them.

Run `python docs/timeline.py` to write the picture anew; a test compares the two. Times are the model's for
Llama-3.1-8B on an H200: 15,152 tokens of a prompt are in host memory (1.99 GB, 35.8 ms at wire speed), 1,024 are
computed (44 ms).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lamella.reference.ordering import Fifo, OrderPolicy, RoundRobin
from lamella.reference.release import First, ReleasePolicy, Whole
from lamella.reference.timeline import Load, StepRule, TimedRequest, TimedStep, Timeline, compute_timeline

NUM_LAYERS = 32
TRANSFER_NS = 35_800_000
COMPUTE_NS = 44_000_000
LAYER_BYTES = 2 * 8 * 128 * 2 * 15_152
STEP_START_DELAY_NS = 1_000_000
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # Paul Tol's bright scheme: told apart by the colour-blind
WIDTH_PX, LEFT_PX, LANE_PX, ARM_PX = 960, 96, 20, 78
STYLE = "<style>text{font:13px sans-serif;fill:#222}.b{stroke:#fff;stroke-width:.4}</style>"


class Arm(NamedTuple):
    """One way of doing it: what it is called, layers a slice, and the two policies."""

    title: str
    width: int
    order: OrderPolicy
    release: ReleasePolicy


CHUNK_MAJOR = Arm("chunk-major: whole requests, released when complete", NUM_LAYERS, Fifo(), Whole())
INTERLEAVED = Arm("layer-major, slices of all requests interleaved, released with the first", 2, RoundRobin(), First())
IN_TURN = Arm("layer-major, one request after another, released with the first slice", 2, Fifo(), First())


def run(arm: Arm, concurrency: int) -> Timeline:
    """The timeline of that many requests that arrive together."""
    slices = NUM_LAYERS // arm.width
    load = Load((arm.width,) * slices, (arm.width * LAYER_BYTES,) * slices, (TRANSFER_NS // slices,) * slices)
    request = TimedRequest(0, load, (COMPUTE_NS // NUM_LAYERS,) * NUM_LAYERS)
    return compute_timeline([request] * concurrency, arm.order, arm.release, StepRule(STEP_START_DELAY_NS))


def mean_ttft_ms(timeline: Timeline) -> float:
    """Mean time to the first token."""
    return sum(times.ttft_ns for times in timeline.requests) / len(timeline.requests) / 1e6


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" class="b"/>'


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def _wire(timeline: Timeline, y: float, px_per_ns: float) -> list[str]:
    landings = sorted({(ns, who) for who, times in enumerate(timeline.requests) for ns in times.landing_ns})
    begins = [0, *(ns for ns, _ in landings)]
    return [
        _box(LEFT_PX + begin * px_per_ns, y, (end - begin) * px_per_ns, LANE_PX, COLOURS[who])
        for begin, (end, who) in zip(begins, landings, strict=False)
    ]


def _step(step: TimedStep, cost_ns: int, y: float, px_per_ns: float) -> list[str]:
    """The layers of a step, its members above one another; where it stalls, nothing is drawn."""
    boxes, at = [], step.start_ns
    height = LANE_PX / len(step.chunks)
    for stall_ns in step.layer_stall_ns:
        at += stall_ns
        for place, chunk in enumerate(step.chunks):
            x = LEFT_PX + at * px_per_ns
            boxes.append(_box(x, y + place * height, cost_ns * px_per_ns, height, COLOURS[chunk.request]))
        at += cost_ns
    return boxes


def _draw_arm(arm: Arm, timeline: Timeline, baseline: Timeline, y: float, px_per_ns: float) -> list[str]:
    mean = mean_ttft_ms(timeline)
    change = (
        f" ({100 * (mean / mean_ttft_ms(baseline) - 1):+.0f}%)".replace("-", "−") if timeline is not baseline else ""
    )
    drawn = [_text(LEFT_PX, y + 12, f"{arm.title}: mean TTFT {mean:.0f} ms{change}")]
    drawn += [_text(LEFT_PX - 8, y + 33, "wire", 'text-anchor="end"'), *_wire(timeline, y + 18, px_per_ns)]
    drawn.append(_text(LEFT_PX - 8, y + 55, "compute", 'text-anchor="end"'))
    for step in timeline.steps:
        drawn += _step(step, COMPUTE_NS // NUM_LAYERS * len(step.chunks), y + 40, px_per_ns)
    for who, times in enumerate(timeline.requests):
        x = LEFT_PX + times.first_token_ns * px_per_ns
        drawn.append(f'<path d="M{x - 1:.1f} {y + 40} v{LANE_PX + 4}" stroke="{COLOURS[who]}" stroke-width="3"/>')
    return drawn


def draw() -> str:
    """The whole picture."""
    parts, y = [], 8.0
    panels = [(1, "One request", (CHUNK_MAJOR, IN_TURN)), (4, "Four at once", (CHUNK_MAJOR, INTERLEAVED, IN_TURN))]
    runs = {(arm, count): run(arm, count) for count, _, arms in panels for arm in arms}
    last_ns = max(times.first_token_ns for timeline in runs.values() for times in timeline.requests)
    px_per_ns = (WIDTH_PX - LEFT_PX - 20) / last_ns
    for count, title, arms in panels:
        parts.append(_text(8, y + 14, title, 'font-weight="bold"'))
        y += 22
        for arm in arms:
            parts += _draw_arm(arm, runs[arm, count], runs[CHUNK_MAJOR, count], y, px_per_ns)
            y += ARM_PX
    for ms in range(0, int(last_ns / 1e6) + 1, 20):
        parts.append(
            _text(LEFT_PX + ms * 1e6 * px_per_ns, y + 8, f"{ms}" + (" ms" if ms == 0 else ""), 'text-anchor="middle"')
        )
    size = f'width="{WIDTH_PX}" height="{y + 18:.0f}" viewBox="0 0 {WIDTH_PX} {y + 18:.0f}"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, background, *parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
