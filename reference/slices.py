"""Slices: how a model's layers are cut into units of transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lamella.reference.whole import check_int, check_whole


class Slice(NamedTuple):
    """Layers `[first_layer, first_layer + num_layers)`, moved together and landed together."""

    first_layer: int
    num_layers: int

    @property
    def end_layer(self) -> int:
        """One past the slice's last layer."""
        return self.first_layer + self.num_layers


def plan_slices(num_layers: int, width: int | Sequence[int]) -> tuple[Slice, ...]:
    """Cuts layers `0 .. num_layers-1` into slices, in layer order and without a gap.

    Args:
        num_layers: layers of the model on this stage, at least 1.
        width: layers per slice, 1 .. num_layers; or a schedule of widths whose last one repeats, such as
            `[1, 1, 2, 4]`. The last slice is shorter where the widths do not divide num_layers.

    Raises:
        TypeError: num_layers or a width is no whole number.
        ValueError: num_layers < 1, an empty schedule, or a width outside 1 .. num_layers.

    >>> plan_slices(5, 2)
    (Slice(first_layer=0, num_layers=2), Slice(first_layer=2, num_layers=2), Slice(first_layer=4, num_layers=1))
    >>> [s.num_layers for s in plan_slices(9, [1, 1, 2, 4])]
    [1, 1, 2, 4, 1]
    """
    check_whole("num_layers", num_layers, 1)
    given: object = width
    if isinstance(given, str) or not isinstance(given, int | Sequence):
        raise TypeError(f"a width is an int or a list of them such as [1, 1, 2], got {width!r}; parse_width reads text")
    schedule = (width,) if isinstance(width, int) else tuple(width)
    if not schedule:
        raise ValueError("a schedule of widths needs at least one width, got none")
    for layers_per_slice in schedule:
        check_int("layers_per_slice", layers_per_slice)
        if not 1 <= layers_per_slice <= num_layers:
            raise ValueError(f"layers_per_slice must be between 1 and {num_layers}, got {layers_per_slice}")
    slices: list[Slice] = []
    layer = 0
    while layer < num_layers:
        wanted = schedule[min(len(slices), len(schedule) - 1)]
        slices.append(Slice(layer, min(wanted, num_layers - layer)))
        layer += slices[-1].num_layers
    return tuple(slices)


def parse_width(text: str) -> int | tuple[int, ...]:
    """Reads a width (`"8"`) or a schedule (`"1,1,2,4"`).

    Raises:
        ValueError: anything that is not one or more positive decimal numbers between commas.

    >>> parse_width("8"), parse_width("1,1,2,4")
    (8, (1, 1, 2, 4))
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"a width is a positive number or a schedule such as 1,1,2,4; got {text!r}")
    widths = tuple(int(part) for part in parts)
    return widths[0] if len(widths) == 1 else widths


def by_layer(landings: Sequence[int], slice_layers: Sequence[int]) -> tuple[int, ...]:
    """Per layer, the landing of its slice.

    >>> by_layer([10, 20], [1, 3])
    (10, 20, 20, 20)
    """
    return tuple(landing for landing, layers in zip(landings, slice_layers, strict=True) for _ in range(layers))
