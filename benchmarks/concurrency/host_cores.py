"""A core of its own for each thread that drives an engine, the quickest of those it may have.

A step with piecewise graphs takes as long as its launches, and a thread whose core is shared with another busy one
launches half as fast. With one rank that thread is this process's first; with tensor parallelism the first thread of
this process schedules and that of each worker process launches, and each has a share of the cores: one for itself, the
rest for the other threads of its process. Threads inherit the cores of the thread that makes them: what is made inside
`shared` gets the other cores. A quick core is quick for a second or so, so `EngineCores.keep_quick` looks before each
repeat, and goes on choosing for a bounded time where one is slow.
Linux only; where cores are few or unknown nothing is done, and `facts` says why.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

_PROBE_ROUNDS: Final = 20_000
_FEWEST_CORES: Final = 3
SLOW_CORE: Final = 1.2
"""Times the quickest probe of any process: that core is given up. Quick ones differ by 4%, slow ones by 40% or more."""
MOST_CHOICES: Final = 6
CHOOSING_S: Final = 1.0
"""Before a repeat slow cores are given up at most so often, and no choice begins later than that."""
PAUSE_S: Final = 0.1
"""Between two choices: at times no core is quick, and some are again within a second."""


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


def dealt(cores: Sequence[tuple[int, ...]], nears: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """The physical cores of several processes, of each only those near its device where they suffice; no core twice.

    Args:
        cores: physical ones, each as its logical ones.
        nears: for each process the logical cores near its device; empty: any.
    """
    wanted = [set(near) for near in nears]
    while True:
        shares = _in_turn(cores, wanted)
        short = [number for number, share in enumerate(shares) if len(share) < _FEWEST_CORES and wanted[number]]
        if not short:
            return shares
        for number in short:
            wanted[number] = set()


def _in_turn(cores: Sequence[tuple[int, ...]], wanted: Sequence[set[int]]) -> list[list[tuple[int, ...]]]:
    left, shares, took = list(cores), [list[tuple[int, ...]]() for _ in wanted], True
    while took:
        took = False
        for share, near in zip(shares, wanted, strict=True):
            core = next((one for one in left if not near or set(one) <= near), None)
            if core is not None:
                left.remove(core)
                share.append(core)
                took = True
    return shares


class HostCores:
    """The cores of one process's threads; see the module.

    Args:
        cores: physical ones, each as its logical ones; empty: nothing is done.
        why_not: why there are none.
    """

    def __init__(self, cores: Sequence[tuple[int, ...]], why_not: str = "") -> None:
        self._cores = list(cores)
        self._why_not = why_not
        self._main: int | None = None
        self._looked_us: float | None = None
        self._took_us: dict[int, float] = {}

    def facts(self) -> dict[str, Any]:
        """What is done or why nothing is, and how long the probe took on each core that was tried, in microseconds."""
        return {
            "cores": [list(core) for core in self._cores],
            "main": self._main,
            "probe_us": {str(cpu): round(us) for cpu, us in self._took_us.items()},
            **({} if self._cores else {"why_not": self._why_not}),
        }

    def choose(self) -> None:
        """The calling thread, the process's first, has the core that is quickest now, and all others the other cores.

        Takes a few milliseconds a core. Cores that were taken away meanwhile are left out; with fewer than two left the
        thread may have any.
        """
        if not self._cores:
            return
        had, self._cores, self._took_us, self._main = self._cores, [], {}, None
        for core in had:
            try:
                os.sched_setaffinity(0, {core[0]})
            except OSError:
                continue
            self._cores.append(core)
            self._took_us[core[0]] = _shortest_us()
        if len(self._cores) < 2:
            self._why_not = f"{len(self._cores)} of {len(had)} physical cores are left"
            self._cores, self._took_us = [], {}
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            return
        self._main = min(self._took_us, key=lambda cpu: self._took_us[cpu])
        self._apply()

    def look(self) -> float | None:
        """How long the probe takes now on the calling thread's own core, in microseconds; None: it has none."""
        self._looked_us = None if self._main is None else _shortest_us()
        return self._looked_us

    def give_up_slow(self, limit_us: float) -> None:
        """As `choose`, where the last look took longer than that."""
        if self._looked_us is not None and self._looked_us > limit_us:
            self.choose()

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


class EngineCores:
    """Cores for every process of one engine: this one, and with tensor parallelism each rank's.

    Args:
        ranks: calls a method of every `rank.Rank`, by name; replies in rank order.
        part, parts: which of several engines side by side this is.
        wanted: false where nothing is to be done.
        clock, sleep: seconds.
    """

    def __init__(
        self,
        ranks: Callable[..., list[Any]],
        part: int,
        parts: int,
        wanted: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._ranks: Callable[..., list[Any]] | None = None
        self._quickest_us = math.inf
        self.chosen_anew = 0
        """How often slow cores were given up."""
        if not (wanted and hasattr(os, "sched_setaffinity")):
            self._own = HostCores((), "not wanted" if not wanted else "this system gives no thread cores of its own")
            return
        near: list[Sequence[int]] = ranks("near_cores")
        processes = near if len(near) == 1 else [near[0], *near]
        cores = physical_cores(sorted(os.sched_getaffinity(0)))
        first = part * len(processes)
        shares = dealt(cores, processes * parts)[first : first + len(processes)]
        why_not = ""
        if min(map(len, shares)) < _FEWEST_CORES:
            why_not = f"{len(cores)} physical cores, fewer than {_FEWEST_CORES} for each of {len(processes) * parts}"
            shares = [[] for _ in shares]
        self._own = HostCores(shares[0], why_not)
        if len(near) > 1:
            self._ranks = ranks
            ranks("take_cores", shares[1:], why_not)

    def facts(self) -> dict[str, Any]:
        """As `HostCores.facts` of this process, and of each rank in a process of its own under `ranks`."""
        return self._own.facts() | ({} if self._ranks is None else {"ranks": self._ranks("facts_of_cores")})

    def choose(self) -> None:
        """As `HostCores.choose`, in every process; nothing is in flight."""
        if self._ranks is not None:
            self._ranks("choose_cores")
        self._own.choose()

    def look(self) -> list[float]:
        """As `HostCores.look`, rounded: this process, then each rank in a process of its own. Nothing is in flight.

        vLLM's idle workers poll for a second, so every process is looked at while the others' own cores are busy.
        """
        ranks: list[float | None] = [] if self._ranks is None else self._ranks("look_at_core")
        seen = [round(us, 1) for us in (self._own.look(), *ranks) if us is not None]
        self._quickest_us = min([self._quickest_us, *seen])
        return seen

    def keep_quick(self) -> list[list[float]]:
        """Cores that have become slow are given up until none is, or for a bounded time; every `look`, the last as now.

        Each process whose core is slow chooses anew, the others keep theirs. The same before any arm.
        """
        begin, seen = self._clock(), [self.look()]
        while len(seen) <= MOST_CHOICES and self._clock() - begin < CHOOSING_S:
            limit_us = SLOW_CORE * self._quickest_us
            if max(seen[-1], default=0.0) <= limit_us:
                break
            if len(seen) > 1:
                self._sleep(PAUSE_S)
            self.chosen_anew += 1
            if self._ranks is not None:
                self._ranks("give_up_slow_core", limit_us)
            self._own.give_up_slow(limit_us)
            seen.append(self.look())
        return seen

    def probes_us(self) -> dict[str, int]:
        """How long the probe took on each core of this process when it last chose; see `HostCores.facts`."""
        found: dict[str, int] = self._own.facts()["probe_us"]
        return found

    def shared(self) -> AbstractContextManager[None]:
        """As `HostCores.shared`, in this process; a rank does so itself."""
        return self._own.shared()


def _shortest_us() -> float:
    return min(_probe_us() for _ in range(3))


def _probe_us() -> float:
    begin = time.perf_counter()
    total = 0
    for number in range(_PROBE_ROUNDS):
        total += number & 7
    return (time.perf_counter() - begin) * 1e6
