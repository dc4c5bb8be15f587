"""A core of its own for the thread that drives an engine, the quickest of those it may have.

A step with piecewise graphs takes as long as its launches, and a thread whose core is shared with another busy one
launches half as fast. Threads inherit the cores of the thread that makes them: what is made inside `shared` gets
the other cores. Linux only; where cores are few or unknown nothing is done, and `facts` says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_PROBE_ROUNDS: Final = 20_000
_FEWEST_CORES: Final = 3


def physical_cores(allowed: Sequence[int], sys_folder: Path = Path("/sys")) -> list[tuple[int, ...]]:
    """The logical cores of each physical one, of those allowed, in their order."""
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for cpu in sorted(allowed):
        if cpu in seen:
            continue
        siblings = _listed(sys_folder / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,)
        together = tuple(one for one in siblings if one in allowed) or (cpu,)
        found.append(together)
        seen.update(together)
    return found


def cores_of_node(node: int | None, sys_folder: Path = Path("/sys")) -> tuple[int, ...]:
    """Logical cores of a memory node; empty where the machine does not say."""
    return () if node is None else _listed(sys_folder / f"devices/system/node/node{node}/cpulist")


def cores_near(device: str) -> tuple[int, ...]:
    """Logical cores of the memory node of a device; empty where that is not known or there is no such device."""
    from lamella.cuda_ext.device import Device

    try:
        return cores_of_node(Device(device).numa_node())
    except (OSError, ValueError, RuntimeError, ImportError):
        return ()


def _listed(path: Path) -> tuple[int, ...]:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return ()
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def share_of(cores: Sequence[tuple[int, ...]], near: Sequence[int], part: int, parts: int) -> list[tuple[int, ...]]:
    """The physical cores of one engine of several: every `parts`-th, of those near its device where they suffice."""
    close = [core for core in cores if set(core) <= set(near)]
    mine = close[part::parts]
    return mine if len(mine) >= _FEWEST_CORES else list(cores[part::parts])


class HostCores:
    """See the module.

    Args:
        part, parts: which of several engines side by side this is.
        near: logical cores near the device; empty: any.
        wanted: false where nothing is to be done.
    """

    def __init__(self, part: int, parts: int, near: Sequence[int] = (), wanted: bool = True) -> None:
        self._cores: list[tuple[int, ...]] = []
        self._main: int | None = None
        self._took_us: dict[int, float] = {}
        if wanted and hasattr(os, "sched_setaffinity"):
            mine = share_of(physical_cores(sorted(os.sched_getaffinity(0))), near, part, parts)
            self._cores = mine if len(mine) >= _FEWEST_CORES else []

    def facts(self) -> dict[str, Any]:
        """What is done, and how long the probe took on each core that was tried, in microseconds."""
        return {
            "cores": [list(core) for core in self._cores],
            "main": self._main,
            "probe_us": {str(cpu): round(us) for cpu, us in self._took_us.items()},
        }

    def choose(self) -> None:
        """The calling thread, the process's first, has the core that is quickest now, and all others the other cores.

        Takes a few milliseconds a core.
        """
        if not self._cores:
            return
        self._took_us = {}
        for core in self._cores:
            os.sched_setaffinity(0, {core[0]})
            self._took_us[core[0]] = min(_probe_us() for _ in range(3))
        self._main = min(self._took_us, key=lambda cpu: self._took_us[cpu])
        self._apply()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Threads that are made meanwhile get the other cores."""
        if self._main is None:
            yield
            return
        os.sched_setaffinity(0, self._others)
        try:
            yield
        finally:
            self._apply()

    @property
    def _others(self) -> set[int]:
        return {cpu for core in self._cores if self._main not in core for cpu in core}

    def _apply(self) -> None:
        assert self._main is not None
        own = os.getpid()
        for name in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(name), {self._main} if int(name) == own else self._others)
            except OSError:  # it has ended meanwhile
                continue


def _probe_us() -> float:
    begin = time.perf_counter()
    total = 0
    for number in range(_PROBE_ROUNDS):
        total += number & 7
    return (time.perf_counter() - begin) * 1e6
