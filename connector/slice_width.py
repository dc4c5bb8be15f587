"""Which width a deployment's setting means for its objects, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from lamella.connector.vllm_settings import resolve_layers_per_slice
from lamella.cuda_ext.rates import H200_RATES, EngineRates
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import ObjectLayout
from lamella.reference.slices import Slice, plan_slices

_NEAR_WIRE: Final = 0.95


class WidthChoice(NamedTuple):
    """A width or schedule; `layerwise` is false where everything moves as one slice."""

    width: int | tuple[int, ...]
    layerwise: bool
    reason: str


def choose_width(setting: object, layout: ObjectLayout, rates: EngineRates = H200_RATES) -> WidthChoice:
    """What `layers_per_slice` means for these objects.

    `auto` takes the narrowest slices whose runs in host memory still copy at 95% of the wire, by the measured rates of
    batched copies, because the first layer then lands soonest at the price of almost nothing; chunk-major where only
    the whole model is wide enough.
    """
    num_layers = layout.num_layers
    resolved = resolve_layers_per_slice(setting, num_layers)
    if resolved == 0:
        return WidthChoice(num_layers, False, "chunk-major: layers_per_slice is off")
    if resolved != "auto":
        widths = resolved if isinstance(resolved, tuple) else (resolved,)
        return WidthChoice(widths, widths[0] < num_layers, f"layers_per_slice = {setting!r}")
    geometry = layout.groups[0].geometry
    layer_bytes = geometry.layer_bytes if layout.form is ObjectForm.BLOCK else geometry.layer_bytes // geometry.kv
    wanted = _shortest_run(rates)
    width = min(num_layers, -(-wanted // layer_bytes))
    run = f"runs of {width * layer_bytes} bytes, {wanted} copy at {_NEAR_WIRE:.0%} of the wire"
    if width == num_layers:
        return WidthChoice(width, False, f"auto: chunk-major, {run}")
    return WidthChoice(width, True, f"auto: {width} layers a slice, {run}")


def _shortest_run(rates: EngineRates) -> int:
    """The shortest measured run that copies near the wire's rate; the longest one if none does."""
    for run_bytes, rate in zip(rates.run_bytes, rates.batch_bytes_per_s, strict=True):
        if rate >= _NEAR_WIRE * rates.wire_bytes_per_s:
            return run_bytes
    return rates.run_bytes[-1]


def planned_slices(num_layers: int, width: int | Sequence[int]) -> tuple[Slice, ...]:
    """The slices of this rank's layers, where width or schedule were planned for the model's: it may have fewer.

    A stage has only its own, and layers that share the KV of others have none.

    Args:
        num_layers: of this rank.
        width: layers a slice, or a schedule.

    Raises:
        ValueError: as `plan_slices`, but none of the widths is too wide.
    """
    widths = (width,) if isinstance(width, int) else tuple(width)
    return plan_slices(num_layers, [min(one, num_layers) for one in widths])
