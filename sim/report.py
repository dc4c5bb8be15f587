"""Results as JSON documents. Units are in the names; every document says where its numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from lamella.reference.profile import DeviceProfile, Graphs
from lamella.sim.alone import alone
from lamella.sim.hardware import Hardware
from lamella.sim.regimes import RegimeMap
from lamella.sim.serving import Outcome, Slo
from lamella.sim.strategies import FULL_GRAPHS, OFF, Device, Regime, Strategy
from lamella.sim.study import Study, answer_lines
from lamella.sim.what_if import derivations

SCHEMA_VERSION: Final = 2

BURST: Final = (
    "in the map C requests arrive together, alone on the bare device; answers are computed by the max-plus recursion",
    "requests are identical; the link is serial and carries nothing else; KV fits",
)
SERVING: Final = (
    "requests are alike, each with its own hit; nothing is stored; KV fits; no prefix is in the engine's own cache",
    "± is the standard error over repeats with other seeds; it does not contain the model's own error",
)

ONE_RUN: Final = "one run by seed {}: another --seed gives other times, and lamella sweep says how much they differ"
ONE_REPEAT: Final = "one repeat has no standard error, so ± is 0 and says nothing: --repeats 3 gives one"

DECODING: Final = {
    Graphs.FULL: "decoding steps replay full graphs (full_graphs: before); one that must wait for a load waits in "
    "front of its graph",
    Graphs.PIECEWISE: "early release decodes with piecewise graphs (full_graphs: never), the others with full ones",
}

BEFORE_BATCH: Final = (
    "loads that their own step waits for begin before the host prepares its batch (before_batch); auto alone has such; "
    "on the busy hosts where it was recorded they landed sooner, and no first token was shown to come sooner"
)

Document = dict[str, Any]


def profile_lines(device: Device, beside: str = "--overheads adds an engine's host thread") -> list[str]:
    """What the reader must know of the device: the profile, what it covers, what of it was derived, how it decodes.

    Args:
        device: of the model.
        beside: of a bare device, what is said of the host thread that it lacks.
    """
    profile = device.profile
    lines = [f"profile {profile.name}, measured {profile.sources[0].measured}: {profile.regimes()}"]
    lines += derivations(profile)
    if device.overheads is None:
        lines.append(f"steps follow each other on the bare device: {beside}")
    else:
        lines.append(device.overheads_said)
    lines.append(DECODING[device.graphs])
    if device.overheads is not None and device.before_batch:
        lines.append(BEFORE_BATCH)
    lines.append(
        "outside what was measured it goes on in straight lines, as --extrapolate asked"
        if device.extrapolate
        else "nothing is extrapolated: outside what was measured there would be no answer"
    )
    return lines


def study_lines(study: Study) -> tuple[str, ...]:
    """What the reader must know of a study of a point."""
    return SERVING if len(study.outcomes[0]) > 1 else (SERVING[0], ONE_REPEAT)


def _engine_settings(device: Device) -> Document:
    """What the engine and the vLLM connector call the device's graphs, and when its loads begin."""
    host = device.overheads
    return {
        "full_graphs": next(name for name, graphs in FULL_GRAPHS.items() if graphs is device.graphs),
        "before_batch": device.before_batch and host is not None,
        "prefill_graphs": 0 if host is None else host.prefill_graph_tokens,
    }


def describe_profile(profile: DeviceProfile, *, extrapolate: bool) -> Document:
    """The profile's name, what it covers and where it was measured."""
    return {
        "name": profile.name,
        "device": profile.device,
        "model": profile.model,
        "covers": profile.regimes(),
        "extrapolated": extrapolate,
        "derived": derivations(profile),
        "sources": [asdict(source) for source in profile.sources],
    }


def sweep_document(device: Device, regime_map: RegimeMap, study: Study, slo: Slo, seed: int, checked: int) -> Document:
    """A sweep's result: the map, the study of the user's point, the answer."""
    found = study.recommend()
    here = study.regime.concurrency
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lamella.sweep",
        "profile": describe_profile(device.profile, extrapolate=device.extrapolate),
        **_engine_settings(device),
        "assumptions": [*profile_lines(device), *BURST, *study_lines(study)],
        "seed": seed,
        "cells_checked_in_world": checked,
        "strategies": [str(strategy) for strategy in regime_map.strategies],
        "cells": [
            {
                "hit_tokens": cell.regime.hit_tokens,
                "new_tokens": cell.regime.new_tokens,
                "hit_fraction": hit_fraction(cell.regime),
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
        "map_verdict": regime_map.verdict(),
        "point": _regime_document(device, study.regime),
        "slo": asdict(slo),
        "study": [
            {
                "concurrency": concurrency,
                "strategy": str(strategy),
                "ttft_change": study.change(concurrency, strategy)._asdict(),
                "latency_change": study.change(concurrency, strategy, "mean_end_ns")._asdict(),
                "repeats": [outcome_document(one) for one in study.at(concurrency, strategy)],
            }
            for concurrency in study.concurrencies
            for strategy in study.strategies
        ],
        "recommended": {
            "strategy": str(found.strategy),
            "turn_on": found.strategy.layerwise,
            "width": found.strategy.width,
            "order": found.strategy.order.name,
            "release": str(found.strategy.release),
            "off": str(found.off),
            "best_layerwise": str(found.best_layerwise),
            "ttft_change": found.change._asdict(),
            "latency_change": found.price._asdict(),
            "next_best": str(found.next_best),
            "margin_over_next_best": found.margin,
            "goodput_per_s": {
                str(one): study.mean(here, one, "goodput_per_s") for one in (found.best_layerwise, found.off)
            },
        },
        "break_even": {
            "tried": list(study.concurrencies),
            "pays_at": list(found.pays_at),
            "interleaving_pays_at": list(found.control_pays_at),
        },
        "answer": answer_lines(study, slo),
    }


def simulate_document(
    device: Device,
    regime: Regime,
    outcomes: Sequence[Outcome],
    requests_per_user: int,
    seed: int,
    arrivals: str,
    way: Sequence[str],
    slo: Slo,
    verdict: str,
    hardware: Hardware | None = None,
) -> Document:
    """A simulation's result."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "lamella.simulate",
        "profile": describe_profile(device.profile, extrapolate=device.extrapolate),
        **_engine_settings(device),
        "assumptions": [*profile_lines(device), arrivals, *way, SERVING[0], ONE_RUN.format(seed)],
        "seed": seed,
        "requests_per_user": requests_per_user,
        "arrivals": arrivals,
        "way": list(way),
        "slo": asdict(slo),
        "regime": _regime_document(device, regime, hardware),
        "outcomes": [outcome_document(outcome) for outcome in outcomes],
        "verdict": verdict,
    }


def outcome_document(outcome: Outcome) -> Document:
    """An outcome, its strategy as text."""
    return {**outcome._asdict(), "strategy": str(outcome.strategy)}


def _regime_document(device: Device, regime: Regime, hardware: Hardware | None = None) -> Document:
    one = alone(device, regime, hardware)
    return {
        **asdict(regime),
        "hit_fraction": hit_fraction(regime),
        "transfer_ns": one.transfer_ns,
        "prefill_ns": one.prefill_ns,
        "transfer_to_prefill": one.ratio,
        "overlap_ceiling": one.ceiling,
    }


def hit_fraction(regime: Regime) -> float:
    """Cached prompt tokens over all prompt tokens."""
    return regime.hit_tokens / (regime.hit_tokens + regime.new_tokens)


def chosen_strategies(asked: Sequence[Strategy], candidates: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """What is off first, then the candidates, then what was asked for and is not among them."""
    return tuple(dict.fromkeys([*OFF, *candidates, *asked]))
