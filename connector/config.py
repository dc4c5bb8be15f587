"""Settings of the in-process cache engine: read once, strictly, and refused where they cannot mean anything.

An unknown name or an impossible value fails at load, with the nearest known name or the remedy. A combination that
cannot work is refused with its reason rather than half obeyed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from lamella.connector.storage.tier_url import TierUrl
from lamella.reference.slices import Slice, parse_width, plan_slices
from lamella.reference.whole import MOST_SECONDS

_LOADING_TWICE = (
    "enable_async_loading and use_layerwise both decide when a load joins the engine's step: asynchronous loading "
    "parks the request until everything is there, layerwise lets it run at once and gates each layer. Switch one off"
)

_SWITCHES = ("use_layerwise", "enable_blending", "enable_async_loading", "use_gpu", "save_partial_chunk", "promote")
_WHOLE_NUMBERS = {
    "pool_objects": 1,
    "layer_buffers": 1,
    "io_threads": 1,
    "breaker_failures": 1,
    "blend_tokens": 1,
    "max_pending_put_bytes": 1,
    "local_file_max_bytes": 1,
    "remote_retries": 0,
}
_SECONDS = ("breaker_retry_s", "wait_timeout_s", "remote_timeout_s", "local_file_ttl_s", "remote_ttl_s")
_MAY_BE_NONE = ("local_file_max_bytes", "local_file_ttl_s", "remote_ttl_s")


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
        promote: what a load brings from a slower tier stays in the pool and goes to nearer tiers.
        max_pending_put_bytes: of the objects that wait for one tier; what is stored beyond is not sent there.
        local_file_folder: where the file tier keeps objects; None: no file tier.
        local_file_max_bytes: limit of that folder; None: the disk's.
        local_file_ttl_s: how long an object is kept there; None: without end.
        remote_tier: URL of a tier behind the files, see `lamella.connector.storage.tier_url`; None: none.
        remote_ttl_s: how long an object is kept there; None: as long as the server does.
        remote_timeout_s: bound of each call to it, retries included.
        remote_retries: attempts after one that failed.
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
    promote: bool = True
    max_pending_put_bytes: int = 1 << 30
    local_file_folder: Path | None = None
    local_file_max_bytes: int | None = None
    local_file_ttl_s: float | None = None
    remote_tier: str | None = field(default=None, repr=False)  # may hold a password
    remote_ttl_s: float | None = None
    remote_timeout_s: float = 5.0
    remote_retries: int = 1
    io_threads: int = 2
    breaker_failures: int = 3
    breaker_retry_s: float = 30.0
    wait_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name, least in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in _SECONDS:
            seconds = getattr(self, name)
            if seconds is None and name in _MAY_BE_NONE:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise TypeError(f"{name} must be a number of seconds, got {seconds!r}")
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {seconds}")
            if seconds > MOST_SECONDS:
                raise ValueError(f"{name} must be at most {MOST_SECONDS:,}, got {seconds}")
        if self.remote_tier is not None:
            if not isinstance(self.remote_tier, str):
                raise TypeError(f"remote_tier must be a URL or None, got a {type(self.remote_tier).__name__}")
            TierUrl.parse(self.remote_tier)
        given: object = self.local_file_folder
        if given is not None and not isinstance(given, Path):
            raise TypeError(f"local_file_folder must be a pathlib.Path or None, got {given!r}: as in Path('/kv')")
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
        known = [one.name for one in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown setting {name!r}: {hint}")
        given = dict(values)
        if isinstance(given.get("local_file_folder"), str):
            if not given["local_file_folder"].strip():
                raise ValueError("local_file_folder must be a folder, got an empty name; leave it out for none")
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
        if width == "auto":
            raise ValueError(
                'layers_per_slice "auto" is the vLLM connector\'s alone: give a number, or a schedule such as "1,1,2"'
            )
        if isinstance(width, str):
            return parse_width(width)
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f'layers_per_slice must be a whole number or a schedule such as "1,1,2", got {width!r}')
        if width < 1:
            raise ValueError(f"layers_per_slice must be at least 1, got {width}")
        return width

    def _refuse_combinations(self, width: int | tuple[int, ...]) -> None:
        if self.local_file_folder is None and (self.local_file_max_bytes or self.local_file_ttl_s):
            raise ValueError("local_file_max_bytes and local_file_ttl_s limit a folder: give local_file_folder")
        if self.remote_tier is None and self.remote_ttl_s:
            raise ValueError("remote_ttl_s means nothing without remote_tier")
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
