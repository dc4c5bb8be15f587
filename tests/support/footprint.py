"""What this process holds of memory, files and threads, counted from outside and not by our own counters."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from lamella.cuda_ext.device import Device
from lamella.cuda_ext.shared_memory import PREFIX


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds, as the system counts it. `device_bytes` is -1 where nobody says."""

    rss_bytes: int
    device_bytes: int
    shared_files: int
    descriptors: int
    threads: int


def resident_bytes() -> int:
    """Memory of this process that is in use, garbage apart."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def footprint(device: Device) -> Footprint:
    own = f"{PREFIX}{os.getpid()}-"
    return Footprint(
        rss_bytes=resident_bytes(),
        device_bytes=_device_bytes(device),
        shared_files=sum(path.name.startswith(own) for path in Path("/dev/shm").iterdir()),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
    )


def _device_bytes(device: Device) -> int:
    """This process's device memory by the driver's own list; the whole device's where that names no process."""
    if not device.is_cuda:
        return -1
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    for line in lines:
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdecimal():
            return int(used) << 20
    facts = device.facts()
    return facts.total_bytes - facts.free_bytes
