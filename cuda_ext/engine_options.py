"""What a transfer engine is made with, checked: C would take the lowest 32 or 64 bits of what has more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lamella.cuda_ext._engine_library import EngineOptionsStruct
from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.rates import EngineRates
from lamella.reference.ordering import OrderPolicy
from lamella.reference.whole import MOST_SECONDS, check_whole

MOST_LAYERS: Final = 1 << 16
"""More than any model has; the engine keeps a word and an event for each."""
MOST_GATHER_FACTOR: Final = 1_000_000
_MOST_COUNT: Final = (1 << 31) - 1
_MOST: Final = {
    "num_layers": MOST_LAYERS,
    "batch_entries": _MOST_COUNT,
    "kernel_ctas": _MOST_COUNT,
    "batch_flags": _MOST_COUNT,
}
_MOST_BYTES: Final = (1 << 63) - 1
_MAY_BE_NONE_AT_ALL: Final = ("turn_bytes", "batch_flags")


def engine_options(
    device: str,
    *,
    order: OrderPolicy | None,
    carrier: Carrier,
    rates: EngineRates,
    gather_factor: float,
    switches: Mapping[str, bool],
    sizes: Mapping[str, int],
) -> tuple[EngineOptionsStruct, object]:
    """The options as the C side takes them, and what they point to, to be kept as long.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of its range, or a device that is none.
    """
    kind, ordinal = _parse_device(device)
    for name, size in sizes.items():
        check_whole(name, size, 0 if name in _MAY_BE_NONE_AT_ALL else 1, _MOST.get(name, _MOST_BYTES))
    if sizes["staging_bytes"] // sizes["window_bytes"] > _MOST_COUNT:
        raise ValueError(
            f"staging_bytes must hold at most {_MOST_COUNT:,} windows, got {sizes['staging_bytes']:,} for windows of "
            f"{sizes['window_bytes']:,} bytes: lower it, or raise window_bytes"
        )
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name} must be True or False, got {switch!r}")
    if not isinstance(carrier, Carrier):
        raise TypeError(f"carrier must be a Carrier such as Carrier.EVENT, got {carrier!r}")
    if not isinstance(rates, EngineRates):
        raise TypeError(f"rates must be EngineRates, such as those from_profile gives, got {rates!r}")
    if order is not None and not callable(getattr(order, "keys", None)):
        raise TypeError(f"order must be a policy of lamella.reference.ordering such as Fifo(), got {order!r}")
    if not 0 <= gather_factor <= MOST_GATHER_FACTOR:
        raise ValueError(f"gather_factor must be between 0 and {MOST_GATHER_FACTOR:,}, got {gather_factor}")
    native_rates, kept = rates.to_struct()
    options: dict[str, Any] = {**sizes, **switches}
    return (
        EngineOptionsStruct(
            device=int(kind == "cuda"),
            ordinal=ordinal,
            carrier=carrier.value,
            gather_factor_percent=round(gather_factor * 100),
            rates=native_rates,
            **options,
        ),
        kept,
    )


def deadline_ns(deadline_s: float) -> int:
    """The time in ns.

    Raises:
        ValueError: no number, or more than a clock of 64 bits of ns is good for.
    """
    if not abs(deadline_s) <= MOST_SECONDS:
        raise ValueError(f"deadline_s must be at most {MOST_SECONDS:,} seconds, got {deadline_s}")
    return int(deadline_s * 1e9)


def _parse_device(device: object) -> tuple[str, int]:
    kind, colon, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if (kind, colon) == ("cpu", ""):
        return "cpu", 0
    if kind == "cuda" and ((number.isascii() and number.isdecimal() and len(number) < 6) if colon else True):
        return "cuda", int(number or 0)
    raise ValueError(f'a device is "cpu" or "cuda:N", got {device!r}')
