"""The device a verb works on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamella.cuda_ext.device import Device


def open_device(name: str) -> Device:
    """The device of that name, present and usable.

    Raises:
        ValueError: another kind of name, a native library that was not built, no driver, or no such device; the message
            says what would change that.
    """
    from lamella.cuda_ext.device import Device

    try:
        device = Device(name)
        device.facts()
    except (ImportError, RuntimeError) as missing:
        remedy = "" if name == "cpu" else "; lamella doctor says what this machine has, and --device cpu needs no GPU"
        raise ValueError(f"{name} cannot be used: {missing}{remedy}") from missing
    return device
