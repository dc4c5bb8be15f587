"""What a load passes on its way, as an input of the world: ranks, staging, scatter, tiers, and the other direction.

The default is one link that lands a slice when its last byte has crossed, with nothing else on the way; that is the
model of `lamella.reference.timeline`. Each part that is named here makes the way longer, and with FIFO order
`lamella.reference.pathway` still says to the nanosecond when everything lands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Sharing(Enum):
    """How a link divides itself among the loads on it."""

    SERIAL = "serial"
    """A slice at a time, chosen by the order policy."""
    EQUAL = "equal"
    """All loads at once, each with an equal share of the bytes: what independent streams on one link come to. The order
    policy has nothing to decide."""


class Ratio(NamedTuple):
    """A rate relative to the profile's: `Ratio(9, 10)` is a tenth slower."""

    numerator: int
    denominator: int


FULL_SPEED = Ratio(1, 1)


@dataclass(frozen=True, slots=True)
class Staging:
    """A ring of windows on the device; a slice lands in it piece by piece, and each piece is scattered from there.

    Attributes:
        window_bytes: size of a window; a slice larger than it moves in several.
        windows: how many there are. With one, wire and scatter take turns.

    Raises:
        ValueError: a size or number below 1.
    """

    window_bytes: int
    windows: int = 2

    def __post_init__(self) -> None:
        for name in ("window_bytes", "windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Scatter:
    """The kernel that moves a window into the engine's blocks.

    Attributes:
        bytes_per_s: its rate.
        launch_ns: what each launch costs besides.
        foreign_wait_ns: what each launch waits while the engine computes, when the kernel belongs to another process's
            context and must be given a time slice. 0 in the engine's own process.

    Raises:
        ValueError: a rate below 1, or a negative time.
    """

    bytes_per_s: int
    launch_ns: int = 0
    foreign_wait_ns: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or min(self.launch_ns, self.foreign_wait_ns) < 0:
            raise ValueError(f"bytes_per_s must be at least 1 and times at least 0, got {self}")

    def window_ns(self, num_bytes: int) -> int:
        """One launch, without waiting."""
        return self.launch_ns + num_bytes * 1_000_000_000 // self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Tier:
    """A storage tier below the host pool: it brings slices in order, one at a time, each after its latency.

    Attributes:
        name: as `Request.tier` quotes it.
        bytes_per_s: its rate.
        latency_ns: from the end of a slice's reading until the link may take it; readings overlap with it.

    Raises:
        ValueError: a rate below 1, or a negative latency.
    """

    name: str
    bytes_per_s: int
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or self.latency_ns < 0:
            raise ValueError(f"bytes_per_s must be at least 1 and latency_ns at least 0, got {self}")

    def slice_ns(self, num_bytes: int) -> int:
        """How long the tier is busy with a slice of that many bytes."""
        return num_bytes * 1_000_000_000 // self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Hardware:
    """The whole way.

    Attributes:
        ranks: each tensor-parallel rank's link, relative to the profile's; a layer is there when the slowest has it.
        sharing: how a link divides itself.
        staging: the ring; None lands slices whole.
        scatter: the kernel behind the link; None lands a window when its last byte has crossed.
        tiers: what lies below the host pool.
        both_busy: each direction's speed while the other carries something too; stores are what uses the other one.
        first_slice_ns: from a load's submission until its first slice may begin: call, plan, hand-over to the thread.

    Raises:
        ValueError: no rank, a speed that is not in (0, 1], two tiers of one name, a negative time, or staging or
            scatter on a link that is shared equally, where a slice has no window of its own.
    """

    ranks: tuple[Ratio, ...] = (FULL_SPEED,)
    sharing: Sharing = Sharing.SERIAL
    staging: Staging | None = None
    scatter: Scatter | None = None
    tiers: tuple[Tier, ...] = ()
    both_busy: Ratio = FULL_SPEED
    first_slice_ns: int = 0

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("ranks needs at least one speed, got none")
        for speed in (*self.ranks, self.both_busy):
            if not 0 < speed.numerator <= speed.denominator:
                raise ValueError(f"a speed must be above 0 and at most 1, got {speed.numerator}/{speed.denominator}")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers need different names, got {', '.join(names)}")
        if self.first_slice_ns < 0:
            raise ValueError(f"first_slice_ns must be at least 0, got {self.first_slice_ns}")
        if self.sharing is Sharing.EQUAL and (self.staging or self.scatter):
            raise ValueError(
                "an equally shared link lands whole slices: leave staging and scatter out, or share serially"
            )

    @property
    def plain(self) -> bool:
        """Whether a slice passes nothing but a serial link at full speed."""
        return self.staging is None and self.scatter is None and self.both_busy == FULL_SPEED

    def find_tier(self, name: str) -> Tier:
        """The tier of that name.

        Raises:
            ValueError: there is none; the message lists those there are.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.tiers) or "none"
        raise ValueError(f"no tier {name!r} in this hardware; it has {known}")


class Fault(NamedTuple):
    """What goes wrong with a load.

    Attributes:
        part: the slice that is hit, from 0; those behind it land no earlier than it does.
        late_ns: how much later than it should the slice lands; None: never.
    """

    part: int
    late_ns: int | None = None
