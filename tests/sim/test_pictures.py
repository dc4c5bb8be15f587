"""What a picture of a result shows is not hidden by what explains it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from lamella.sim import pictures
from lamella.sim.profiles import load_profile
from lamella.sim.serving import serve
from lamella.sim.strategies import CHUNK_MAJOR, RECOMPUTE, Device, Regime

pyplot = pytest.importorskip("matplotlib.pyplot")


def test_the_legend_of_where_time_goes_lies_beside_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "_save", lambda pyplot, figure, target: drawn.append(figure))
    regime = Regime(hit_tokens=15_152, new_tokens=768, concurrency=2)
    found = [serve(Device(load_profile()), regime, strategy, 1, seed=0) for strategy in (CHUNK_MAJOR, RECOMPUTE)]
    outcomes = sorted(found, key=lambda one: one.mean_ttft_ns)  # the longest bar lies lowest
    pictures.draw_outcomes(regime, outcomes, io.BytesIO())
    (figure,) = drawn
    figure.draw_without_rendering()
    (axis,) = figure.axes
    legends = [*figure.legends, *([axis.get_legend()] if axis.get_legend() else [])]
    assert len(legends) == 1
    bars = [bar.get_window_extent() for bar in axis.patches]
    assert bars
    hidden = [bar for bar in bars if legends[0].get_window_extent().overlaps(bar)]
    pyplot.close(figure)
    assert not hidden
