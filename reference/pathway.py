"""When slices land that pass more than a link: a tier, staging windows, a scatter, several ranks; under FIFO.

A chain of serial stations with a ring between two of them is max-plus-linear, so its landings have a recursion. With w
the windows of all slices in the order of submission, on one rank::

    read(i)    = max(read(i-1), submitted(i)) + tier(i)                    the tier, slice by slice
    begin(w)   = max(crossed(w-1), read(slice of w) + latency, free(w))    the link
    free(w)    = scattered(w - windows in the ring)                        a window to land in
    crossed(w) = begin(w) + wire(w)
    scattered(w) = max(scattered(w-1), crossed(w)) + scatter(w)            the kernels, one after another
    landed(slice) = the largest scattered(its last window) over the ranks

Without a scatter a window has landed when it has crossed, and its place in the ring is free at once.

Law: with nothing named, `schedule_way` is `lamella.reference.timeline.schedule_link` under FIFO. `lamella.sim` carries
the same stations out as events, and must agree to the nanosecond (tests/sim/test_ways.py).

Source: blocking after service in a tandem of stations as a recursion, Baccelli, Cohen, Olsder, Quadrat,
"Synchronization and Linearity" (1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lamella.reference.timeline import TimedRequest

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Way:
    """What a slice passes.

    Attributes:
        tier_bytes_per_s: rate of the tier that every load comes from; None for the host pool.
        tier_latency_ns: from the end of a slice's reading until the link may take it.
        window_bytes: size of a staging window; None lands slices whole.
        windows: how many there are.
        scatter_bytes_per_s: rate of the kernel behind the link; None for no kernel.
        launch_ns: what each of its launches costs besides.
        speeds: each rank's link, as (numerator, denominator) of the speed that the loads' times are for.

    Raises:
        ValueError: a rate, size or number below 1, a negative time, or no rank.
    """

    tier_bytes_per_s: int | None = None
    tier_latency_ns: int = 0
    window_bytes: int | None = None
    windows: int = 2
    scatter_bytes_per_s: int | None = None
    launch_ns: int = 0
    speeds: tuple[tuple[int, int], ...] = ((1, 1),)

    def __post_init__(self) -> None:
        for name in ("tier_bytes_per_s", "window_bytes", "windows", "scatter_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if min(self.tier_latency_ns, self.launch_ns) < 0 or not self.speeds or min(map(min, self.speeds)) < 1:
            raise ValueError(f"times must be at least 0 and speeds positive, got {self}")


def split_windows(slice_bytes: int, slice_ns: int, window_bytes: int | None) -> list[tuple[int, int]]:
    """(wire time, bytes) of each window of a slice: full windows and a rest, times by bytes, none lost in rounding.

    >>> split_windows(10, 100, 4)
    [(40, 4), (40, 4), (20, 2)]
    """
    if window_bytes is None or slice_bytes <= window_bytes:
        return [(slice_ns, slice_bytes)]
    ends = [*range(window_bytes, slice_bytes, window_bytes), slice_bytes]
    instants = [slice_ns * end // slice_bytes for end in ends]
    return [
        (end_ns - begin_ns, end - begin)
        for (begin, end), (begin_ns, end_ns) in zip(pairwise([0, *ends]), pairwise([0, *instants]), strict=True)
    ]


def schedule_way(requests: Sequence[TimedRequest], way: Way) -> list[tuple[int, ...]]:
    """The landing instant of every slice of every request, one request after another by arrival.

    >>> from lamella.reference.timeline import Load
    >>> one = TimedRequest(0, Load((1, 1), (8, 8), (10, 10)), (1, 1))
    >>> schedule_way([one], Way(scatter_bytes_per_s=10**9, window_bytes=8, windows=1))
    [(18, 36)]
    """
    available = _read(requests, way)
    ranks = [_cross(requests, available, way, speed) for speed in way.speeds]
    return [tuple(map(max, zip(*(rank[index] for rank in ranks), strict=True))) for index in range(len(requests))]


def _read(requests: Sequence[TimedRequest], way: Way) -> list[list[int]]:
    """When the link may take each slice."""
    if way.tier_bytes_per_s is None:
        return [[request.arrival_ns] * len(request.load.slice_ns) for request in requests]
    free_ns = 0
    available: list[list[int]] = []
    for request in requests:
        instants: list[int] = []
        for num_bytes in request.load.slice_bytes:
            free_ns = max(free_ns, request.arrival_ns) + num_bytes * NS_PER_S // way.tier_bytes_per_s
            instants.append(free_ns + way.tier_latency_ns)
        available.append(instants)
    return available


def _cross(
    requests: Sequence[TimedRequest], available: list[list[int]], way: Way, speed: tuple[int, int]
) -> list[list[int]]:
    """The landings on one rank."""
    numerator, denominator = speed
    crossed_ns = 0
    scattered: list[int] = []  # of every window so far
    landings: list[list[int]] = []
    for request, instants in zip(requests, available, strict=True):
        landed: list[int] = []
        for may_begin_ns, num_bytes, wire_ns in zip(
            instants, request.load.slice_bytes, request.load.slice_ns, strict=True
        ):
            on_this_rank_ns = -(-wire_ns * denominator // numerator)
            for window_ns, window_bytes in split_windows(num_bytes, on_this_rank_ns, way.window_bytes):
                begin_ns = max(crossed_ns, may_begin_ns)
                if way.window_bytes is not None and len(scattered) >= way.windows:
                    begin_ns = max(begin_ns, scattered[-way.windows])
                crossed_ns = begin_ns + window_ns
                done_ns = crossed_ns
                if way.scatter_bytes_per_s is not None:
                    kernel_ns = way.launch_ns + window_bytes * NS_PER_S // way.scatter_bytes_per_s
                    done_ns = max(crossed_ns, scattered[-1] if scattered else 0) + kernel_ns
                scattered.append(done_ns)
            landed.append(scattered[-1])
        landings.append(landed)
    return landings
