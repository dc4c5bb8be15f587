"""Which memory node is near a device, and pages that prefer it. Machines with one node need none of this."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED: Final = 1  # not MPOL_BIND: a full node should cost speed, not the process
_MASK_BITS: Final = 1024
_libc = ctypes.CDLL(None, use_errno=True)


def online_nodes(sys_folder: Path = Path("/sys")) -> tuple[int, ...]:
    """Memory nodes of this machine; `(0,)` where the kernel names none.

    >>> 0 in online_nodes()
    True
    """
    try:
        text = (sys_folder / "devices/system/node/online").read_text(encoding="ascii").strip()
    except OSError:
        return (0,)
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return tuple(nodes)


def node_of_pci_device(bus_id: str, sys_folder: Path = Path("/sys")) -> int | None:
    """The node a PCI device such as `"0000:1b:00.0"` hangs on; None where the machine does not say."""
    try:
        node = int((sys_folder / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Pages of the range that do not exist yet will come from `node` while it has any.

    Args:
        address: page-aligned.
        num_bytes: whole pages.
        node: one of `online_nodes()`.

    Raises:
        ValueError: a node outside 0 .. 1023.
        OSError: the kernel or the container refuses (docker: `--cap-add SYS_NICE`).
    """
    if not 0 <= node < _MASK_BITS:
        raise ValueError(f"node must be between 0 and {_MASK_BITS - 1}, got {node}")
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"placing memory on a node is not known for {platform.machine()}")
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // word_bits] = 1 << (node % word_bits)
    if _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),
        ctypes.c_uint(0),
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot prefer memory node {node} for the pool ({os.strerror(code)})")
