"""Settings of the in-process cache engine: read once, strictly, and refused where they cannot mean anything.

An unknown name or an impossible value fails at load, with the nearest known name or the remedy. A combination that
cannot work is refused with its reason rather than half obeyed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from lamella.reference.slices import Slice, parse_width, plan_slices

_LOADING_TWICE = (
    "enable_async_loading and use_layerwise both decide when a load joins the engine's step: asynchronous loading "
    "parks the request until everything is there, layerwise lets it run at once and gates each layer. Switch one off"
)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How a `CacheEngine` stores and loads.

    Args:
        use_layerwise: loads and stores advance with the forward pass, layer by layer; off: whole objects at once.
        layers_per_slice: layers moved by one transfer, a number or a schedule whose last one repeats ("1,1,2,4"). A
            yield is a layer all the same.
        blend_tokens: tokens that a buffer holds when blending.
        enable_blending: layers arrive in a buffer, where a selective recompute can change them before they are
            scattered into the engine's blocks.
        enable_async_loading: known so that it can be refused; see the reason.
        use_gpu: copies pass through a staging buffer on the device; off: straight between objects and blocks.
        save_partial_chunk: the last, shorter chunk of a sequence is stored too.
        pool_objects: objects that the pinned pool holds.
        layer_buffers: host buffers, each for one chunk's slice, into which slower tiers are read.
        local_file_folder: where the file tier keeps objects; None: no file tier.
        io_threads: threads that read from and write to slower tiers.
        breaker_failures: failures in a row after which a tier is left alone.
        breaker_retry_s: for how long, until it is tried again.
        wait_timeout_s: bound of every wait of the engine's thread (SAFE-5).

    Raises:
        ValueError: a value out of range, or a combination that cannot work.
        TypeError: a value of the wrong type.
    """

    use_layerwise: bool = False
    layers_per_slice: int | str = 1
    enable_blending: bool = False
    blend_tokens: int = 32_768
    enable_async_loading: bool = False
    use_gpu: bool = True
    save_partial_chunk: bool = False
    pool_objects: int = 256
    layer_buffers: int = 64
    local_file_folder: Path | None = None
    io_threads: int = 2
    breaker_failures: int = 3
    breaker_retry_s: float = 30.0
    wait_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("use_layerwise", "enable_blending", "enable_async_loading", "use_gpu", "save_partial_chunk"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("pool_objects", "layer_buffers", "io_threads", "breaker_failures", "blend_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("breaker_retry_s", "wait_timeout_s"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise TypeError(f"{name} must be a number of seconds, got {seconds!r}")
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {seconds}")
        if self.local_file_folder is not None and not isinstance(self.local_file_folder, Path):
            raise TypeError(f"local_file_folder must be a path or None, got {self.local_file_folder!r}")
        parsed = self._parsed_width()
        self._refuse_combinations(parsed)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings by name, as they come from a file or from an engine's extra configuration.

        Raises:
            ValueError, TypeError: an unknown name, or as the constructor.

        >>> CacheSettings.from_mapping({"use_layerwise": True, "layers_per_slice": "1,1,2"}).slices(5)
        (Slice(first_layer=0, num_layers=1), Slice(first_layer=1, num_layers=1), Slice(first_layer=2, num_layers=2), \
Slice(first_layer=4, num_layers=1))
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown setting {name!r}: {hint}")
        given = dict(values)
        if isinstance(given.get("local_file_folder"), str):
            given["local_file_folder"] = Path(given["local_file_folder"])
        return cls(**given)

    def slices(self, num_layers: int) -> tuple[Slice, ...]:
        """What one transfer moves; the whole stage where layerwise is off.

        Raises:
            ValueError: layers_per_slice beyond the stage's layers.
        """
        return plan_slices(num_layers, self._parsed_width() if self.use_layerwise else num_layers)

    def _parsed_width(self) -> int | tuple[int, ...]:
        width = self.layers_per_slice
        if isinstance(width, str):
            return parse_width(width)
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f'layers_per_slice must be a whole number or a schedule such as "1,1,2", got {width!r}')
        if width < 1:
            raise ValueError(f"layers_per_slice must be at least 1, got {width}")
        return width

    def _refuse_combinations(self, width: int | tuple[int, ...]) -> None:
        if self.enable_async_loading and self.use_layerwise:
            raise ValueError(_LOADING_TWICE)
        if self.enable_async_loading:
            raise ValueError(
                "enable_async_loading is not this engine's: its loads join the very next step. Leave it off, or use "
                "the multi-process connector, whose loads are asynchronous"
            )
        if self.enable_blending and not self.use_layerwise:
            raise ValueError("enable_blending recomputes layer by layer: it needs use_layerwise: true")
        if self.enable_blending and not self.use_gpu:
            raise ValueError("enable_blending recomputes in a buffer on the device: it needs use_gpu: true")
        if self.enable_blending and width != 1:
            raise ValueError(f"enable_blending has a buffer for each layer: layers_per_slice must be 1, got {width}")
        if width != 1 and not self.use_layerwise:
            raise ValueError(f"layers_per_slice ({width}) means nothing without use_layerwise: true")
