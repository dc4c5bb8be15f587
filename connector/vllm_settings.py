"""Settings of the vLLM connector: `kv_connector_extra_config`, read once, strictly.

What the three settings of the layerwise path mean together ("async": the request is parked until it is released;
"sync": it joins the very next step; a dash: no meaning):

| use_layerwise | layers_per_slice | release | what happens |
|---|---|---|---|
| false | 0 | - | async, chunk-major: released when all of the KV has landed |
| false | n | whole | async, slice by slice, released when all has landed; no waits in the forward pass |
| false | n | first, first:k, jit ... | async, released early; a layer's attention waits for what has not landed there |
| true | 0 | - | sync: the step starts when all has landed |
| true | n | - | sync: a layer's attention waits for its layer |
| - | auto | - | chosen for each request by `lamella.reference.auto`: one of these, or not to load at all |
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

from lamella.cuda_ext.arrival import Carrier
from lamella.reference.auto import BYSTANDER_WEIGHT
from lamella.reference.ordering import parse_order
from lamella.reference.release import ReleasePolicy, WeighedRelease, Whole, parse_release
from lamella.reference.slices import parse_width
from lamella.reference.whole import MOST_SECONDS

_log = logging.getLogger(__name__)

LayersPerSlice: TypeAlias = "int | tuple[int, ...] | Literal['auto']"
"""0: off (chunk-major); a width; a schedule of widths; or `"auto"`."""

_FORMS: Final = ("auto", "token", "block")
_FULL_GRAPHS: Final = ("never", "before", "inside")
_SIDES: Final = ("worker", "server")
_SERVER_SOCKET: Final = "server.sock"
_MOST: Final = {
    "chunk_tokens": 10_000_000,
    "max_loads": 1_000_000,
    "io_threads": 1024,
    **dict.fromkeys(("staging_mib", "window_mib", "turn_mib", "in_flight_mb"), 1 << 20),
    **dict.fromkeys(("host_pool_gib", "max_load_gib", "file_tier_gib"), 1 << 30),
    **dict.fromkeys(("load_timeout_s", "wait_timeout_s"), MOST_SECONDS),
    "bystander_weight": 1_000_000,
}
"""Of each number: more is a slip, and would end in a wait or a request for memory that the machine cannot express."""


def resolve_layers_per_slice(value: object, num_layers: int | None = None) -> LayersPerSlice:
    """What `layers_per_slice` means; anything else than the forms below warns and is off, and never stops an engine.

    Args:
        value: 0, false or "off"; true (= 1) or a number; either as a decimal string; "auto"; a schedule "1,1,2,4".
        num_layers: layers of the model on this stage; None where it is not known yet.

    >>> [resolve_layers_per_slice(value) for value in (0, "off", True, "8", "1,1,2", "auto")]
    [0, 0, 1, 8, (1, 1, 2), 'auto']
    """
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("off", "false", "0", ""):
            return 0
        if text == "true":
            return 1
        if text == "auto":
            return "auto"
        try:
            found: int | tuple[int, ...] = parse_width(text)
        except ValueError:
            return _off(value, "it is neither a number, a schedule, auto nor off")
    elif isinstance(value, int):
        found = value
    else:
        return _off(value, f"it is a {type(value).__name__}")
    widths = found if isinstance(found, tuple) else (found,)
    if min(widths) < 0:
        return _off(value, "it is negative")
    if num_layers is not None and max(widths) > num_layers:
        return _off(value, f"the model has {num_layers} layers on this stage")
    return found


def _off(value: object, reason: str) -> LayersPerSlice:
    _log.warning("layers_per_slice = %r reads as off (chunk-major): %s", value, reason)
    return 0


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How the connector stores, loads and releases.

    Args:
        use_layerwise: loads join the very next step (synchronous) instead of parking the request until it is released.
        layers_per_slice: as `resolve_layers_per_slice`; 0, the default, is chunk-major.
        release: when an asynchronously loaded request may run, as `lamella.reference.release.parse_release`; None: with
            its first slice. `auto` chooses it, and `use_layerwise`, itself.
        order: whose slice moves next, as `lamella.reference.ordering.parse_order`.
        host_pool_gib: host memory for objects, each rank; no meaning with `server`, whose memory it is then.
        server: folder of a running cache server (`lamella serve`) that keeps the objects; None: this process does.
        transfer_side: with `server`, whose process moves the bytes: `worker` or `server`.
        chunk_tokens: tokens of an object; rounded down to whole blocks of the engine, at least one.
        object_form: `token`, `block`, or `auto`: block where the engine's blocks are contiguous.
        max_loads: loads in flight; a request beyond waits in the engine's queue.
        max_load_gib: the bytes in flight that loads may claim together, each rank; one load may always run.
        load_timeout_s: a load that has not landed by then has failed.
        wait_timeout_s: bound on each wait of the model runner's thread (SAFE-5); then that load has failed.
        file_tier: a folder of objects that outlives the process and is shared by processes of one user; None: none.
        file_tier_gib: size limit of that folder, all ranks and processes together; None: none.
        io_threads: threads that read and write the file tier.
        salt: tenants with different salts never share an object; vLLM's `cache_salt` of a request comes on top.
        carrier: `event` or `value`, how streams learn of landings (CUDA); `value` where `full_graphs` is `inside`.
        full_graphs: `before`: vLLM keeps full CUDA graphs for steps that only decode, and such a step waits before its
            graph for the whole of what is landing; `never`: where layers wait, it is asked for piecewise ones;
            `inside`: layers' waits are captured into its full graphs, and a load has `wait_timeout_s` in all.
        before_batch: a load that its request's own step waits for (`use_layerwise`, or where `auto` chose so) begins
            before the model runner prepares that step's batch, not behind it; see `lamella.connector.before_batch`.
        staging_mib, window_mib, in_flight_mb, turn_mib: bounds of the transfer engine, see `TransferEngine`.
        profile: what `auto`, and a release just in time, know of the device before they have observed any: a shipped
            profile, or a file that `lamella calibrate` wrote.
        bystander_weight: for `auto`, how much a ns for which a decoding request stands still counts against a ns of
            time to first token.

    Raises:
        ValueError: an unknown name, or a value that cannot mean anything.
        TypeError: a value of the wrong type.
    """

    use_layerwise: bool = False
    layers_per_slice: Any = 0
    release: str | None = None
    order: str = "fifo"
    host_pool_gib: float = 4.0
    server: Path | None = None
    transfer_side: str = "worker"
    chunk_tokens: int = 256
    object_form: str = "auto"
    max_loads: int = 8
    max_load_gib: float = 8.0
    load_timeout_s: float = 30.0
    wait_timeout_s: float = 10.0
    file_tier: Path | None = None
    file_tier_gib: float | None = None
    io_threads: int = 2
    salt: str = ""
    carrier: str = "event"
    full_graphs: str = "before"
    before_batch: bool = False
    staging_mib: int = 256
    window_mib: int = 16
    turn_mib: int = 32
    in_flight_mb: int = 55
    profile: str = "h200-llama-3.1-8b"
    bystander_weight: float = BYSTANDER_WEIGHT

    def __post_init__(self) -> None:
        for name in ("use_layerwise", "before_batch"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("chunk_tokens", "max_loads", "io_threads", "staging_mib", "window_mib", "in_flight_mb"):
            _check_number(name, getattr(self, name), int)
        _check_number("turn_mib", self.turn_mib, int, least=0)
        for name in ("host_pool_gib", "max_load_gib", "load_timeout_s", "wait_timeout_s"):
            _check_number(name, getattr(self, name), int | float)
        if self.file_tier_gib is not None:
            _check_number("file_tier_gib", self.file_tier_gib, int | float)
            if self.file_tier is None:
                raise ValueError(f"file_tier_gib {self.file_tier_gib} limits a folder: give file_tier, or leave it out")
            if not self.file_tier_bytes:
                raise ValueError(f"file_tier_gib {self.file_tier_gib} is less than a byte: raise it, or leave it out")
        _check_number("bystander_weight", self.bystander_weight, int | float, least=0)
        texts = ("order", "object_form", "salt", "carrier", "profile", "transfer_side", "full_graphs")
        for name in texts if self.release is None else (*texts, "release"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be text, got {getattr(self, name)!r}")
        if self.object_form not in _FORMS:
            raise ValueError(f"object_form must be one of {', '.join(_FORMS)}, got {self.object_form!r}")
        if self.full_graphs not in _FULL_GRAPHS:
            raise ValueError(f"full_graphs must be one of {', '.join(_FULL_GRAPHS)}, got {self.full_graphs!r}")
        if self.carrier not in ("event", "value"):
            raise ValueError(f"carrier must be event or value, got {self.carrier!r}")
        for name in ("file_tier", "server"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Path):
                raise TypeError(f"{name} must be a pathlib.Path or None, got {given!r}: as in Path('/kv')")
        self._check_server()
        if self.staging_mib < 4 * self.window_mib:
            narrower = f", or lower window_mib to {self.staging_mib // 4}" if self.staging_mib >= 4 else ""
            raise ValueError(
                f"staging_mib ({self.staging_mib}) must hold four windows of {self.window_mib} MiB, two each way: "
                f"raise it to {4 * self.window_mib}{narrower}"
            )
        if self.release is not None:
            parse_release(self.release)
        parse_order(self.order)
        for name, given in (("release", self.release), ("use_layerwise", self.use_layerwise)):
            if self.is_auto and given:
                raise ValueError(
                    f"layers_per_slice auto chooses {name} for each request: leave {name} out, or name a width; got "
                    f"{given!r}"
                )

    def _check_server(self) -> None:
        if self.transfer_side not in _SIDES:
            raise ValueError(f"transfer_side must be one of {', '.join(_SIDES)}, got {self.transfer_side!r}")
        if self.server is None:
            if self.transfer_side != "worker":
                raise ValueError(f"transfer_side {self.transfer_side!r} needs a server: name its folder as server")
            return
        if self.file_tier is not None:
            raise ValueError(
                f"file_tier ({self.file_tier}) and server ({self.server}): the tiers are the server's then; start it "
                f"with --tier {self.file_tier}, and leave file_tier out"
            )
        if self.full_graphs == "inside":
            raise ValueError(
                f"full_graphs inside cannot wait for loads from a server ({self.server}): set full_graphs to before"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Settings by name, as `kv_connector_extra_config` brings them.

        Raises:
            ValueError, TypeError: an unknown name with the nearest known one, or as the constructor.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown setting {name!r} in kv_connector_extra_config: {hint}")
        given = dict(values)
        if isinstance(given.get("file_tier"), str):
            given["file_tier"] = _file_tier_folder(given["file_tier"])
        if isinstance(given.get("server"), str):
            given["server"] = _server_folder(given["server"])
        return cls(**given)

    @property
    def is_auto(self) -> bool:
        """Whether the arm is chosen for each request."""
        return isinstance(self.layers_per_slice, str) and self.layers_per_slice.strip().lower() == "auto"

    @property
    def wants_slices(self) -> bool:
        """Whether loads move slice by slice; false where `layers_per_slice` is off or reads as off."""
        return resolve_layers_per_slice(self.layers_per_slice) != 0

    @property
    def waits_in_forward(self) -> bool:
        """Whether a forward pass waits layer by layer, so that it must not be replayed as one captured graph (B8)."""
        return self.wants_slices and (self.use_layerwise or not isinstance(self.release_policy, Whole))

    @property
    def release_policy(self) -> ReleasePolicy:
        """When a request may run; whole where nothing arrives before the rest, and without a plan under `auto`."""
        if not self.wants_slices:
            return Whole()
        return WeighedRelease() if self.is_auto else parse_release(self.release or "first")

    @property
    def needs_forecast(self) -> bool:
        """Whether it must be known beforehand how long a prefill takes: to choose, or to release just in time."""
        return self.release_policy.needs_forecast

    @property
    def load_deadline_s(self) -> float:
        """When a load that has not landed has failed. Where graphs wait for it, that is before the host gives up, for
        the deadline is what frees a device whose graph waits for a write that never comes.
        """  # noqa: D205 - one sentence more than a line
        return min(self.load_timeout_s, self.wait_timeout_s) if self.full_graphs == "inside" else self.load_timeout_s

    @property
    def file_tier_bytes(self) -> int | None:
        """The folder's size limit."""
        return None if self.file_tier_gib is None else int(self.file_tier_gib * (1 << 30))

    @property
    def carrier_kind(self) -> Carrier:
        """The carrier as the transfer engine takes it; captured graphs wait for words only."""
        return Carrier.VALUE if self.full_graphs == "inside" else Carrier[self.carrier.upper()]


def _folder(name: str, text: str) -> Path:
    if not text.strip():
        raise ValueError(f"{name} must be a folder, got an empty name; leave it out for none")
    if "\0" in text:
        raise ValueError(f"{name} must be a folder, got {text!r}, which none can be called")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} {text!r}: {error} Write the folder out") from error


def _file_tier_folder(text: str) -> Path:
    if "://" in text:
        raise ValueError(
            f"file_tier must be a folder, got {text!r}: other tiers are a cache server's; start one with --tier {text}"
            ", and name its folder as server"
        )
    return _folder("file_tier", text)


def _server_folder(text: str) -> Path:
    """The folder of a server that is named by its folder, or by its socket in it."""
    scheme, colon, rest = text.partition("://")
    if not colon:
        return _folder("server", text)
    if scheme != "ipc":
        raise ValueError(
            f"server must be the folder of a server on this host, whose memory can be mapped, got {text!r}: over "
            f"{scheme} it can only be asked"
        )
    path = _folder("server", rest)
    return path.parent if path.name == _SERVER_SOCKET else path


def _check_number(name: str, value: object, kind: Any, least: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} must be a {'whole ' if kind is int else ''}number, got {value!r}")
    if not (0 < value if least is None else least <= value) or value == float("inf"):  # type: ignore[operator]
        wanted = "positive" if least is None else f"at least {least:g}"
        raise ValueError(f"{name} must be {wanted} and finite, got {value}")
    if not value <= _MOST[name]:  # type: ignore[operator]
        raise ValueError(f"{name} must be at most {_MOST[name]:,}, got {value}")
