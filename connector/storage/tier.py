"""What a storage tier is: whole objects in, byte ranges out.

A slice of layers is a few ranges of an object (`LayerKey.ranges`), so any store that reads ranges serves layer by
layer: files by offset, Redis by GETRANGE, S3 by ranged GET.

Contracts, which `tests/connector/storage/test_tier_laws.py` checks of every tier:

- TIER-1 an object is visible whole or not at all: `exists` never says yes to one whose `put` has not ended, whatever
  died in between.
- TIER-2 a key's bytes never change: keys name content, so putting a key again changes nothing.
- TIER-3 a range is filled wholly or the call raises; a caller may then not read what it passed.
- TIER-4 bytes that are not those that were put are never served: an object of which a part is damaged, foreign or of
  another format is removed, and is a miss from then on.
- TIER-5 every call ends within the tier's time-out, whatever became of its disk or server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange
from lamella.reference.whole import MOST_SECONDS, check_whole

_SHORTEST_S: Final = 0.001


class TierError(Exception):
    """The tier cannot serve now: unreachable, full, or an object of it is damaged. The message says which and why."""


class NoSpaceError(TierError):
    """The tier serves, but has no room for one more object."""


class DamagedObjectError(TierError):
    """An object's bytes are not those that were put."""


class Leading(NamedTuple):
    """How far a read of several objects came: the first `num_objects` are there, and why not the next one."""

    num_objects: int
    error: KeyError | TierError | None = None

    @classmethod
    def cut_short(cls, num_objects: int, error: KeyError | TierError) -> Leading:
        """A read that ended with an error, which is a value from now on: it keeps no frame, and no buffer, alive."""
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return cls(num_objects, error)


class Tier(Protocol):
    """One store of objects, of one length each. Its methods may be called by several threads at once, and may block.

    The caller owns every buffer it passes and leaves it alone until the call returns; a tier keeps none.
    """

    @property
    def name(self) -> str:
        """Short, for logs and reports."""
        ...

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """Which of these objects could be read now; one round trip for all of them where the store has round trips.

        Raises:
            TierError: the tier cannot say.
        """
        ...

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """`into[i]` holds range `i` of the object.

        Raises:
            KeyError: there is no such object (any more).
            TierError: it cannot be read.
            ValueError: a range outside the object, or a buffer of another length than its range.
        """
        ...

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """`into[i][j]` holds range `j` of object `i`, for the objects up to the first that cannot be had.

        One slice of a prefix: a tier that pays for every question asks for all of them together.

        Raises:
            ValueError: as `get_ranges`.
        """
        ...

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """The object is there, for other processes and after a crash of this one too.

        Raises:
            TierError: it could not be kept; nothing of it is visible then.
            ValueError: data that is not one object long.
        """
        ...

    def delete(self, key: ChunkKey) -> bool:
        """The object is gone; False if there was none.

        Raises:
            TierError: the tier cannot say.
        """
        ...

    def close(self) -> None:
        """What the tier held open is closed. A second call does nothing."""
        ...


def check_ranges(ranges: Sequence[ByteRange], into: Sequence[memoryview], object_bytes: int) -> None:
    """Every range lies in the object and has a buffer of its length.

    Raises:
        ValueError: the first that does not.
    """
    if len(ranges) != len(into):
        raise ValueError(f"each range needs a buffer, got {len(ranges)} ranges and {len(into)} buffers")
    for wanted, buffer in zip(ranges, into, strict=True):
        if wanted.offset < 0 or wanted.num_bytes < 1 or wanted.offset + wanted.num_bytes > object_bytes:
            raise ValueError(f"{wanted} is outside an object of {object_bytes} bytes")
        if buffer.nbytes != wanted.num_bytes:
            raise ValueError(f"the buffer of {wanted} holds {buffer.nbytes} bytes")


def check_patience(timeout_s: float, retries: int) -> None:
    """How long a server is waited for, and how often it is asked again, can be meant.

    Raises:
        TypeError: `retries` is no whole number.
        ValueError: they cannot.
    """
    check_seconds("timeout_s", timeout_s)
    check_whole("retries", retries, 0)


def check_seconds(name: str, seconds: float) -> None:
    """A tier's time is from a millisecond to thirty years, so that it can be counted in nanoseconds.

    Raises:
        ValueError: it is not.
    """
    if not _SHORTEST_S <= seconds <= MOST_SECONDS:
        raise ValueError(f"{name} must be between {_SHORTEST_S:g} and {MOST_SECONDS:,} s, got {seconds}")


def get_alone(tier: Tier, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
    """As `Tier.get_ranges`, of a tier that reads several objects as it reads one."""
    error = tier.get_leading([key], ranges, [into]).error
    try:
        if error is not None:
            raise error
    finally:
        del error  # one that its own frame holds keeps the buffers alive until a collection of garbage


def get_in_turn(
    tier: Tier, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
) -> Leading:
    """`Tier.get_leading` for a tier that gains nothing from several questions at once."""
    for done, (key, buffers) in enumerate(zip(keys, into, strict=True)):
        try:
            tier.get_ranges(key, ranges, buffers)
        except (KeyError, TierError) as error:
            return Leading.cut_short(done, error)
    return Leading(len(keys))
