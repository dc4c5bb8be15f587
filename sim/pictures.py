"""Pictures of results, drawn with matplotlib (the extra `plot`), into a file or a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from lamella.sim.regimes import RegimeMap
from lamella.sim.serving import Outcome
from lamella.sim.strategies import INTERLEAVED, OFF, Regime
from lamella.sim.study import Study

Target = Path | IO[bytes]
_PARTS: Final = {
    "admission": ("admission_ns", "#bbbbbb"),
    "waits to be submitted": ("submission_ns", "#66ccee"),
    "transfer wait": ("transfer_wait_ns", "#4477aa"),
    "release wait": ("release_wait_ns", "#aa3377"),
    "queue": ("queue_ns", "#ccbb44"),
    "stall": ("stall_ns", "#ee6677"),
    "steps computing": ("computing_ns", "#228833"),
}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as missing:
        raise ImportError("pictures need matplotlib: pip install 'lamella[plot]'") from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, target: Target) -> None:
    figure.savefig(target, dpi=120, format="png", metadata={"Software": None})
    pyplot.close(figure)


def draw_map(regime_map: RegimeMap, target: Target, point: Regime | None = None) -> None:
    """TTFT change over concurrency and T/P, of interleaving if it was tried, and of the recommended strategy.

    Colour is the change, the line is where it is 0, the star is the user's own point.

    Raises:
        ImportError: no matplotlib; the message says how to get it.
    """
    pyplot = _pyplot()
    control = [one for one in regime_map.strategies if one == INTERLEAVED]
    shown = list(dict.fromkeys([*control, regime_map.recommended()]))
    rows = sorted({cell.regime.concurrency for cell in regime_map.cells})
    columns = sorted({cell.ratio for cell in regime_map.cells})
    row_of = {value: index for index, value in enumerate(rows)}
    column_of = {value: index for index, value in enumerate(columns)}
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(1.5 + 5.2 * len(shown), 4.4), squeeze=False, layout="constrained"
    )
    for axis, strategy in zip(axes[0], shown, strict=True):
        shares = [[0.0] * len(columns) for _ in rows]
        for cell in regime_map.cells:
            shares[row_of[cell.regime.concurrency]][column_of[cell.ratio]] = 100 * regime_map.change(cell, strategy)
        image = axis.imshow(shares, cmap="RdBu_r", vmin=-60, vmax=60, origin="lower", aspect="auto")
        crosses_zero = min(map(min, shares)) < 0 < max(map(max, shares))
        if crosses_zero and len(rows) > 1 and len(columns) > 1:
            axis.contour(shares, levels=[0], colors="black", linewidths=1)
        mine = [cell for cell in regime_map.cells if point is not None and _same(cell.regime, point)]
        if mine:
            place = (column_of[mine[0].ratio], row_of[mine[0].regime.concurrency])
            axis.plot(*place, marker="*", markersize=16, color="gold", markeredgecolor="black", linestyle="none")
        for ticks, values, name, text in (
            (axis.set_xticks, columns, "transfer / computing time of a request", "{:.2g}"),
            (axis.set_yticks, rows, "requests that arrive together", "{}"),
        ):
            places = range(0, len(values), max(1, len(values) // 8))
            ticks(list(places), [text.format(values[index]) for index in places])
            (axis.set_xlabel if ticks == axis.set_xticks else axis.set_ylabel)(name)
        axis.set_title(f"{strategy}" + (", ★ is your point" if mine else ""))
    figure.colorbar(image, ax=list(axes[0]), label="mean TTFT against the best without, %", extend="both")
    _save(pyplot, figure, target)


def _same(one: Regime, other: Regime) -> bool:
    """What a map tells apart: it gives everybody one token."""
    return (one.hit_tokens, one.new_tokens, one.concurrency) == (other.hit_tokens, other.new_tokens, other.concurrency)


def draw_study(study: Study, target: Target) -> None:
    """The change of mean TTFT by concurrency, a line a strategy, and p50 to p99 of the recommended one beside off.

    Raises:
        ImportError: no matplotlib; the message says how to get it.
    """
    pyplot = _pyplot()
    found = study.recommend()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    rows = study.concurrencies
    for one in study.strategies:
        if one in OFF:
            continue
        changes = [study.change(row, one) for row in rows]
        heavy = one == found.best_layerwise
        style: Mapping[str, Any] = {"linewidth": 2.5 if heavy else 1, "linestyle": "--" if one == INTERLEAVED else "-"}
        left.errorbar(
            rows, [100 * c.mean for c in changes], [200 * c.error for c in changes], label=str(one), marker=".", **style
        )
    left.axhline(0, color="black", linewidth=1)
    left.axvline(study.regime.concurrency, color="gold", linewidth=3, alpha=0.5)
    left.set(xlabel="users", ylabel="mean TTFT against the better of what is off, %")
    left.legend(fontsize="x-small", ncols=2)
    for one, colour in ((found.off, "#bb5566"), (found.best_layerwise, "#004488")):
        for field, line in (("p50_ttft_ns", "-"), ("p90_ttft_ns", "--"), ("p99_ttft_ns", ":")):
            values = [study.mean(row, one, field) / 1e6 for row in rows]
            right.plot(rows, values, line, color=colour, label=f"{one} {field[:3]}")
    right.set(xlabel="users", ylabel="TTFT, ms")
    right.legend(fontsize="x-small")
    _save(pyplot, figure, target)


def draw_outcomes(regime: Regime, outcomes: Sequence[Outcome], target: Target) -> None:
    """Where each strategy's mean TTFT goes.

    Raises:
        ImportError: no matplotlib; the message says how to get it.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(10, 1.2 + 0.42 * len(outcomes)), layout="constrained")
    names = [str(outcome.strategy) for outcome in outcomes]
    begin = [0.0] * len(outcomes)
    for label, (field, colour) in _PARTS.items():
        lengths = [getattr(outcome, field) / 1e6 for outcome in outcomes]
        axis.barh(names, lengths, left=begin, label=label, color=colour)
        begin = [left + length for left, length in zip(begin, lengths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("mean TTFT, ms")
    axis.set_title(f"{regime.concurrency} users, {regime.hit_tokens:,} cached + {regime.new_tokens:,} new tokens")
    figure.legend(loc="outside right upper", fontsize="small")  # beside the bars: within it would hide some of them
    _save(pyplot, figure, target)


def draw_distributions(times_ns: Mapping[str, Sequence[int]], what: str, target: Target) -> None:
    """The share of requests that had it within a time, a line an arm.

    Raises:
        ImportError: no matplotlib; the message says how to get it.
    """
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8.5, 4.2), layout="constrained")
    for name, values in times_ns.items():
        ranked = sorted(values)
        axis.step([value / 1e6 for value in ranked], [(i + 1) / len(ranked) for i in range(len(ranked))], label=name)
    axis.set(xscale="log", xlabel=f"{what}, ms", ylabel="share of requests")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    _save(pyplot, figure, target)
