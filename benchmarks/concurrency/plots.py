"""Pictures of a concurrency run, as SVG: first tokens, what changes in each cell, what later tokens pay, and causes.

Changes are against the better chunk-major form that replays the same graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from concurrency.arms import by_both
from concurrency.figures import CellFigures
from concurrency.finding import NAMES
from concurrency.goals import baseline_of
from concurrency.rules import change_of
from concurrency.two_gpus import on_two_gpus

_COLOURS: Final = {
    "chunk_bounded": "#888888",
    "chunk_deep": "#bbbbbb",
    "interleaved_first": "#c0392b",
    "fifo_first": "#1f77b4",
    "fifo_jit": "#17a2b8",
    "shortest_first": "#6f42c1",
    "sync": "#e0a800",
    "auto": "#2ca02c",
    "interleaved_full_graphs": "#7b241c",
    "fifo_full_graphs": "#0b3d66",
    "sync_full_graphs": "#8a6d00",
    "auto_full_graphs": "#145214",
    "auto_light_full_graphs": "#58b368",
    "auto_heavy_full_graphs": "#a3d9a5",
    "fifo_both_graphs": "#5dade2",
    "sync_both_graphs": "#f4d03f",
    "auto_both_graphs": "#00c853",
}

_AT_A_GLANCE: Final = (
    ("c1_hit15360_new768_chunk256_full", "full"),
    ("c2_hit15360_new768_chunk256_full", "full"),
    ("c4_hit15360_new256_chunk256_full", "full"),
    ("c4_hit15360_new256_chunk256_both", "both"),
    ("c4_hit15360_new768_chunk256_full", "full"),
    ("c4_hit15360_new768_chunk256_both", "both"),
    ("c4_hit15360_new2048_chunk256_full", "full"),
    ("c8_hit15360_new768_chunk256_full", "full"),
    ("c16_hit15360_new768_chunk256_full", "full"),
    ("c4_hit15360_new768_chunk256_two_gpus_prefill_graphs", "full"),
    ("c4_hit15360_new768_chunk256_two_gpus_prefill_graphs", "both"),
)
"""The cells and kinds of graphs that a reader sees first."""
_PREFILLS: Final = {"full": "", "both": ", prefills' graphs"}
_WAYS: Final = (
    ("chunk", "chunk-major", "#888888"),
    ("fifo", "one request after another, released with the first layer", "#1f77b4"),
    ("auto", "auto", "#2ca02c"),
)

_WHY_CELLS: Final = {
    "c4_hit15360_new768_chunk256_finding_both": "four at once, prefills' graphs",
    "c4_hit15360_new768_chunk256_finding": "four at once, piecewise graphs",
}
_WHY: Final = {
    "chunk_bounded": "chunk-major",
    "fifo_first": "one after another, released with the first layer",
    "fifo_first8": "one after another, released with the eighth",
    "fifo_whole": "one after another, released with the last",
    "fifo_jit": "one after another, released just in time",
    "fifo_deep_no_turns": "one after another, all enqueued at once, no turns",
    "interleaved_first": "slices of all in turn",
    "interleaved_deep_no_turns": "slices of all in turn, all enqueued at once, no turns",
    "sync": "every step waits from a request's admission on",
}
"""The arms in which the loss and the gain are seen, in plain words."""


def draw(cells: Mapping[str, CellFigures], folder: Path) -> list[Path]:
    """The pictures are in the folder; returns their paths. Cells of which no arm has a colour are left out.

    Cells in which one thing at a time was switched have a picture of their own, where there are any.

    Raises:
        ImportError: matplotlib is missing: pip install 'lamella[plot]'.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "concurrency", "font.size": 8})  # the same bytes each time
    import matplotlib.pyplot as plt

    switched = {name: cell for name, cell in cells.items() if name in NAMES}
    cells = {name: cell for name, cell in cells.items() if name not in NAMES and cell.arms.keys() & _COLOURS.keys()}
    folder.mkdir(parents=True, exist_ok=True)
    found = [_causes(plt, switched, folder / "one-thing.svg")] if switched else []
    why = {title: switched[name] for name, title in _WHY_CELLS.items() if name in switched}
    if why:
        words = _WHY | {by_both(arm): text for arm, text in _WHY.items()}
        found.append(_causes(plt, why, folder / "why.svg", words))
    glance = [(cells[name], kind) for name, kind in _AT_A_GLANCE if name in cells]
    if glance:
        found.append(_first_tokens(plt, glance, folder / "first-tokens.svg"))
    if cells:
        found += [_changes(plt, cells, folder / "ttft-change.svg"), _trade(plt, cells, folder / "ttft-and-tpot.svg")]
    return found


def _first_tokens(plt: Any, glance: Sequence[tuple[CellFigures, str]], path: Path) -> Path:
    """Mean times to first token of chunk-major, one request after another and `auto`; pale: not shown."""
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.42 * len(glance)), layout="constrained")
    labels = []
    for place, (cell, kind) in enumerate(glance):
        facts, base = cell.cell, baseline_of(cell, f"auto_{kind}_graphs")
        where = ", two GPUs" if on_two_gpus(facts["name"]) else ""
        labels.append(f"{facts['concurrency']} at once, {facts['new']:,} new{where}{_PREFILLS[kind]}")
        for offset, (way, _text, colour) in zip((-0.27, 0.0, 0.27), _WAYS, strict=True):
            arm = base if way == "chunk" else f"{way}_{kind}_graphs"
            if base is None or arm not in cell.arms:
                continue
            ttft = cell.arms[arm].ttft
            change = change_of(ttft, cell.arms[base].ttft, cell.drift)
            axes.barh(
                place + offset,
                ttft.value,
                0.25,
                xerr=2 * ttft.error if ttft.repeats > 1 else None,
                color=colour,
                alpha=1.0 if way == "chunk" or change.shown else 0.35,
            )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("mean time to first token, ms (bars: two standard errors; pale: the change is not shown)")
    axes.legend([plt.Rectangle((0, 0), 1, 1, color=colour) for *_, colour in _WAYS], [text for _, text, _ in _WAYS])
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _changes(plt: Any, cells: Mapping[str, CellFigures], path: Path) -> Path:
    arms = [name for name in _COLOURS if any(name in cell.arms for cell in cells.values())]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.55 * len(cells)), layout="constrained")
    height = 0.85 / max(1, len(arms))
    named: set[str] = set()
    for place, cell in enumerate(cells.values()):
        for index, name in enumerate(arms):
            base = baseline_of(cell, name)
            if name not in cell.arms or name == cell.baseline or base is None:
                continue
            change = change_of(cell.arms[name].ttft, cell.arms[base].ttft, cell.drift)
            axes.barh(
                place + (index - (len(arms) - 1) / 2) * height,
                100 * change.value,
                height,
                xerr=200 * change.error if change.error < 1 else None,
                color=_COLOURS[name],
                alpha=1.0 if change.shown else 0.35,
                label=None if name in named else name,
            )
            named.add(name)
        if cell.alone.ceiling is not None and cell.cell["concurrency"] == 1:
            axes.plot([-100 * cell.alone.ceiling] * 2, [place - 0.45, place + 0.45], "k--", lw=0.8)
    axes.axvline(0, color="black", lw=0.6)
    axes.set_yticks(range(len(cells)), list(cells))
    axes.invert_yaxis()
    axes.set_xlabel("change of mean TTFT, %\n(bars: two standard errors; pale: not shown)")
    axes.legend(fontsize=7, loc="best")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _trade(plt: Any, cells: Mapping[str, CellFigures], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    seen: set[str] = set()
    for cell in cells.values():
        for name, colour in _COLOURS.items():
            base_name = baseline_of(cell, name)
            if name not in cell.arms or name == cell.baseline or base_name is None:
                continue
            arm, base = cell.arms[name], cell.arms[base_name]
            if not base.tpot.value:
                continue
            axes.scatter(
                100 * (arm.ttft.value / base.ttft.value - 1),
                100 * (arm.tpot.value / base.tpot.value - 1),
                s=6 + 5 * cell.cell["concurrency"],
                color=colour,
                label=None if name in seen else name,
            )
            seen.add(name)
    axes.axvline(0, color="black", lw=0.6)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_xlabel("change of the mean time to first token, %")
    axes.set_ylabel("change of the time per token after it, %")
    axes.set_title("larger dots: more requests at once", fontsize=8)
    if seen:
        axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _causes(plt: Any, cells: Mapping[str, CellFigures], path: Path, words: Mapping[str, str] | None = None) -> Path:
    """Each arm's mean time to first token, the quickest first, a panel a cell; the line: the baseline's.

    Args:
        words: what each arm is called; arms without a word are left out, and panels stand as they come. None: all arms,
            by their names, and the cell with the most of them first.
    """
    shown = {
        name: sorted((arm for arm in cell.arms if not words or arm in words), key=lambda arm: cell.arms[arm].ttft.value)
        for name, cell in cells.items()
    }
    ordered = list(cells.items()) if words else sorted(cells.items(), key=lambda item: (-len(item[1].arms), item[0]))
    sizes = [len(shown[name]) for name, _cell in ordered]
    figure, panels = plt.subplots(
        len(sizes),
        figsize=(7, 0.7 * len(sizes) + 0.19 * sum(sizes)),
        layout="constrained",
        height_ratios=sizes,
        squeeze=False,
    )
    for axes, (name, cell) in zip(panels[:, 0], ordered, strict=True):
        arms = shown[name]
        base = cell.arms[cell.baseline].ttft
        for place, arm in enumerate(arms):
            ttft = cell.arms[arm].ttft
            change = change_of(ttft, base, cell.drift)
            sure = arm != cell.baseline and change.beyond_two_errors
            axes.barh(
                place,
                ttft.value,
                0.75,
                xerr=2 * ttft.error if ttft.repeats > 1 else None,
                color=_COLOURS["chunk_bounded"]
                if arm == cell.baseline
                else "#1f77b4"
                if change.value < 0
                else "#c0392b",
                alpha=1.0 if sure or arm == cell.baseline else 0.35,
            )
        axes.axvline(base.value, color="black", lw=0.6)
        axes.set_yticks(range(len(arms)), [words[arm] if words else arm for arm in arms])
        axes.invert_yaxis()
        axes.set_title(name, fontsize=8)
    panels[-1, 0].set_xlabel("mean TTFT, ms\n(bars: two standard errors; pale: within two of chunk-major's)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
