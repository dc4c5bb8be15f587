"""Results as JSON documents and pictures. Units are in the names; every document says where its numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lamella.reference.profile import DeviceProfile
from lamella.sim.regimes import RegimeMap
from lamella.sim.serving import Outcome
from lamella.sim.strategies import OFF, Device, Regime, Strategy

SCHEMA_VERSION: Final = 1

BURST: Final = (
    "C requests arrive together, alone on the device; answers are computed by the max-plus recursion",
    "requests are identical; the link is serial and carries nothing else; KV fits",
)
CLOSED_LOOP: Final = (
    "C users ask again as soon as they are answered; first questions at seeded random instants",
    "requests are identical, each with its own hit; nothing is stored; KV fits; no prefix is in the engine's own cache",
    "early release decodes with piecewise graphs, the others with full ones",
)

Document = dict[str, Any]


def describe_profile(profile: DeviceProfile, *, extrapolate: bool) -> Document:
    """The profile's name, what it covers and where it was measured."""
    return {
        "name": profile.name,
        "device": profile.device,
        "model": profile.model,
        "covers": profile.regimes(),
        "extrapolated": extrapolate,
        "sources": [asdict(source) for source in profile.sources],
    }


def map_document(device: Device, regime_map: RegimeMap, seed: int, checked: int) -> Document:
    """A sweep's result."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lamella.sweep",
        "profile": describe_profile(device.profile, extrapolate=device.extrapolate),
        "assumptions": list(BURST),
        "seed": seed,
        "cells_checked_in_world": checked,
        "strategies": [str(strategy) for strategy in regime_map.strategies],
        "cells": [
            {
                "hit_tokens": cell.regime.hit_tokens,
                "new_tokens": cell.regime.new_tokens,
                "hit_fraction": _hit_fraction(cell.regime),
                "concurrency": cell.regime.concurrency,
                "transfer_ns": cell.transfer_ns,
                "prefill_ns": cell.prefill_ns,
                "transfer_to_prefill": cell.ratio,
                "overlap_ceiling": cell.ceiling,
                "mean_ttft_ns": dict(zip(map(str, regime_map.strategies), cell.mean_ttft_ns, strict=True)),
                "best": str(regime_map.best(cell)),
            }
            for cell in regime_map.cells
        ],
        "recommended": str(regime_map.recommended()),
        "verdict": regime_map.verdict(),
    }


def loop_document(
    device: Device, regime: Regime, outcomes: Sequence[Outcome], requests_per_user: int, seed: int, verdict: str
) -> Document:
    """A simulation's result."""
    transfer, prefill = (
        device.transfer_ns(regime.hit_tokens),
        device.prefill_ns(regime.hit_tokens, regime.new_tokens),
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lamella.simulate",
        "profile": describe_profile(device.profile, extrapolate=device.extrapolate),
        "assumptions": list(CLOSED_LOOP),
        "seed": seed,
        "requests_per_user": requests_per_user,
        "regime": {
            **asdict(regime),
            "hit_fraction": _hit_fraction(regime),
            "transfer_ns": transfer,
            "prefill_ns": prefill,
            "transfer_to_prefill": transfer / prefill,
            "overlap_ceiling": min(transfer, prefill) / (transfer + prefill),
        },
        "outcomes": [{**outcome._asdict(), "strategy": str(outcome.strategy)} for outcome in outcomes],
        "verdict": verdict,
    }


def _hit_fraction(regime: Regime) -> float:
    return regime.hit_tokens / (regime.hit_tokens + regime.new_tokens)


# ---------------------------------------------------------------- pictures


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as missing:
        raise ImportError("pictures need matplotlib: pip install 'lamella[plot]'") from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_map(regime_map: RegimeMap, path: Path) -> None:
    """A PNG: TTFT change over concurrency and T/P, of interleaving if it was tried, and of the recommended strategy.

    Raises:
        ImportError: no matplotlib; the message says how to get it.
    """
    pyplot = _pyplot()
    control = [one for one in regime_map.strategies if one.order.name == "round_robin"][:1]
    shown = list(dict.fromkeys([*control, regime_map.recommended()]))
    rows = sorted({cell.regime.concurrency for cell in regime_map.cells})
    columns = sorted({cell.ratio for cell in regime_map.cells})
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(1.5 + 5.2 * len(shown), 4.4), squeeze=False, layout="constrained"
    )
    for axis, strategy in zip(axes[0], shown, strict=True):
        shares = [[0.0] * len(columns) for _ in rows]
        for cell in regime_map.cells:
            row, column = rows.index(cell.regime.concurrency), columns.index(cell.ratio)
            shares[row][column] = 100 * regime_map.change(cell, strategy)
        image = axis.imshow(shares, cmap="RdBu_r", vmin=-60, vmax=60, origin="lower", aspect="auto")
        crosses_zero = min(map(min, shares)) < 0 < max(map(max, shares))
        if crosses_zero and len(rows) > 1 and len(columns) > 1:
            axis.contour(shares, levels=[0], colors="black", linewidths=1)
        ticks = range(0, len(columns), max(1, len(columns) // 7))
        axis.set_xticks(list(ticks), [f"{columns[tick]:.2g}" for tick in ticks])
        axis.set_yticks(range(len(rows)), [str(row) for row in rows])
        axis.set_xlabel("transfer / computing time of a request")
        axis.set_ylabel("requests that arrive together")
        axis.set_title(str(strategy))
    figure.colorbar(image, ax=list(axes[0]), label="mean TTFT against the best without, %", extend="both")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_outcomes(regime: Regime, outcomes: Sequence[Outcome], path: Path) -> None:
    """A PNG: where each strategy's mean TTFT goes.

    Raises:
        ImportError: no matplotlib; the message says how to get it.
    """
    pyplot = _pyplot()
    parts = {
        "admission": "admission_ns",
        "waits to be submitted": "submission_ns",
        "transfer wait": "transfer_wait_ns",
        "release wait": "release_wait_ns",
        "queue": "queue_ns",
        "stall": "stall_ns",
        "steps computing": "computing_ns",
    }
    figure, axis = pyplot.subplots(figsize=(8.5, 1.2 + 0.42 * len(outcomes)), layout="constrained")
    names = [str(outcome.strategy) for outcome in outcomes]
    begin = [0.0] * len(outcomes)
    for (label, field), colour in zip(
        parts.items(), ("#bbbbbb", "#66ccee", "#4477aa", "#aa3377", "#ccbb44", "#ee6677", "#228833"), strict=True
    ):
        lengths = [getattr(outcome, field) / 1e6 for outcome in outcomes]
        axis.barh(names, lengths, left=begin, label=label, color=colour)
        begin = [left + length for left, length in zip(begin, lengths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("mean TTFT, ms")
    axis.set_title(f"{regime.concurrency} users, {regime.hit_tokens:,} cached + {regime.new_tokens:,} new tokens")
    axis.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def chosen_strategies(asked: Sequence[Strategy], candidates: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """What is off first, then the candidates, then what was asked for and is not among them."""
    return tuple(dict.fromkeys([*OFF, *candidates, *asked]))
