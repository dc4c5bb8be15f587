"""The arrival board: how far each retrieve in flight has come, in shared memory, between one writer and one reader.

    writer, whoever moves the bytes                       reader, whoever runs the model
    record the slice's event, then raise `recorded`  ─►   counted: its event may be asked
    see the slice in place,   then raise `landed`    ─►   counted: its layers may be read
    nothing is in flight any more: write `ended`     ─►   blocks and objects are their owners' again

An entry is one cache line of three words, each `generation << 32 | number`, written by the writer alone and published
last (ARR-2). Within a generation a number never falls. The reader draws the generation when it hands out the entry, so
a late word of an earlier use counts for nothing (SAFE-2).

The reader creates the board and the writer attaches it; then the name goes (`unlink`), and whichever side is killed,
nothing stays behind (SHM-1). Where both are one process it never has one (`private`). A board serves one reader and one
writer: whoever starts anew makes another.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from lamella.cuda_ext.shared_memory import HostMemory

LINE_BYTES: Final = 64
_WORDS: Final = LINE_BYTES // 8
_RECORDED, _LANDED, _ENDED = range(3)
_NUMBER: Final = (1 << 32) - 1


class End(enum.IntEnum):
    """How a retrieve ended, as the board says it; 0 while it has not."""

    LANDED = 1
    CANCELLED = 2
    FAILED = 3


class Arrival(NamedTuple):
    """One entry at one moment. `landed <= recorded`, and neither falls; `end` is None while something is in flight."""

    recorded: int
    landed: int
    end: End | None


class LayerArrivalBoard:
    """`num_entries` entries in shared memory; made by `create` and `attach`.

    Words are aligned and eight bytes wide, so that a reader sees the old or the new one, never a mixture.
    """

    def __init__(self, memory: HostMemory, num_entries: int) -> None:
        self._memory = memory
        self._words: memoryview | None = memoryview(memory.buffer).cast("B")[: num_entries * LINE_BYTES].cast("Q")
        self.num_entries = num_entries

    @classmethod
    def create(cls, num_entries: int) -> LayerArrivalBoard:
        """A new board under a random name, mode 0600, every entry at generation 0.

        Raises:
            ValueError: num_entries < 1.
            OSError: as `HostMemory.create`.
        """
        return cls(HostMemory.create(_size(num_entries)), num_entries)

    @classmethod
    def private(cls, num_entries: int) -> LayerArrivalBoard:
        """A new board whose writer is in this process; it has no name.

        Raises:
            ValueError: num_entries < 1.
            OSError: as `HostMemory.anonymous`.
        """
        return cls(HostMemory.anonymous(_size(num_entries)), num_entries)

    @classmethod
    def attach(cls, source: Path | int, num_entries: int) -> LayerArrivalBoard:
        """The board another process created; its name stays as it is (SHM-2).

        Raises:
            ValueError: it is not a board of so many entries.
            OSError: it is gone, or not this user's alone.
        """
        return cls(HostMemory.attach(source, _size(num_entries)), num_entries)

    @property
    def path(self) -> Path | None:
        """Where the writer finds a board that this process created; None once unlinked, or where it was attached."""
        return self._memory.path

    def unlink(self) -> None:
        """The name is gone. The creator calls it once the writer has attached."""
        self._memory.unlink()

    def address(self, entry: int) -> int:
        """Address of the entry's first word, which `TransferEngine.submit` takes as `board`.

        Raises:
            ValueError: no such entry.
        """
        self._check(entry)
        return self._memory.address + entry * LINE_BYTES

    # ---- the writer

    def publish_landed(self, entry: int, generation: int, slices: int) -> None:
        """So many slices of this use are in place. They are, before this is called."""
        self._write(entry, _LANDED, generation, slices)

    def publish_end(self, entry: int, generation: int, end: End) -> None:
        """Nothing of this use is in flight any more; the last word that is written for it."""
        self._write(entry, _ENDED, generation, end)

    def publish_recorded(self, entry: int, generation: int, slices: int) -> None:
        """So many slices of this use have been enqueued with their events; native engines write the word themselves."""
        self._write(entry, _RECORDED, generation, slices)

    # ---- the reader

    def read(self, entry: int, generation: int) -> Arrival:
        """How far this use of the entry has come; nothing at all where its words are of another use.

        Raises:
            ValueError: no such entry.
            RuntimeError: the board is closed.
        """
        self._check(entry)
        words, first = self._open(), entry * _WORDS
        ended, landed, recorded = (
            _of(words[first + word], generation) for word in (_ENDED, _LANDED, _RECORDED)
        )  # last published, first read: what an end covers has been counted
        return Arrival(max(recorded, landed), landed, End(ended) if ended else None)

    # ---- both

    def close(self) -> None:
        """Unmapped here; the name too is gone if this process created it. A second call does nothing."""
        if self._words is not None:
            self._words.release()
            self._words = None
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, entry: int, word: int, generation: int, number: int) -> None:
        self._check(entry)
        self._open()[entry * _WORDS + word] = generation << 32 | number

    def _check(self, entry: int) -> None:
        if not 0 <= entry < self.num_entries:
            raise ValueError(f"entry must be between 0 and {self.num_entries - 1}, got {entry}")

    def _open(self) -> memoryview:
        if self._words is None:
            raise RuntimeError("this board is closed: its owner has gone")
        return self._words


class ArrivalSlot(NamedTuple):
    """One use of a board entry.

    Attributes:
        entry: of the board.
        generation: which use of the entry; both sides quote it.
    """

    entry: int
    generation: int


class BoardPlace(NamedTuple):
    """One use of an entry of a board by that path, as it is sent to the writer.

    >>> str(BoardPlace(Path("/dev/shm/lamella-1-ab"), 16, 3, 7))
    '/dev/shm/lamella-1-ab:16:3:7'
    >>> BoardPlace.parse("/dev/shm/lamella-1-ab:16:3:7").entry
    3
    """

    path: Path
    num_entries: int
    entry: int
    generation: int

    def __str__(self) -> str:
        return f"{self.path}:{self.num_entries}:{self.entry}:{self.generation}"

    @classmethod
    def parse(cls, text: str) -> BoardPlace:
        """The place that `str` wrote.

        Raises:
            ValueError: it wrote another thing, or an entry that no such board has.
        """
        path, *numbers = text.rsplit(":", 3)
        if not path.startswith("/") or len(numbers) != 3 or not all(part.isdecimal() for part in numbers):
            raise ValueError(f"an arrival board's place is /path:entries:entry:generation, got {text!r}")
        num_entries, entry, generation = map(int, numbers)
        if not entry < num_entries or not 0 < generation <= _NUMBER:
            raise ValueError(f"entry must be below {num_entries} and generation 1 .. {_NUMBER}, got {text!r}")
        return cls(Path(path), num_entries, entry, generation)


class LayerArrivalPool:
    """Hands out board entries, each to one retrieve at a time, and says once why a retrieve gets none.

    The reader owns it. An entry goes back when nothing of its retrieve is in flight; one whose writer died first never
    does, and the next writer gets a board of its own. Thread-safe.

    Args:
        board: whose entries are handed out.
        reason: why no retrieve may have one (no layers registered, no way to signal an arrival); None: they may.
    """

    def __init__(self, board: LayerArrivalBoard, reason: str | None = None) -> None:
        self.board = board
        self._lock = threading.Lock()
        self._free = list(range(board.num_entries))[::-1]
        self._generations = [0] * board.num_entries
        self._reason = reason
        self._said: set[str] = set()

    def take(self) -> ArrivalSlot | None:
        """An entry under a new generation; None: the retrieve runs chunk-major, for `why_none()`."""
        with self._lock:
            if self._reason is not None or not self._free:
                return None
            entry = self._free.pop()
            self._generations[entry] = self._generations[entry] % _NUMBER + 1
            return ArrivalSlot(entry, self._generations[entry])

    def give(self, slot: ArrivalSlot) -> None:
        """Nothing of the slot's retrieve is in flight; the entry can be handed out again.

        Raises:
            RuntimeError: the slot was given back before.
        """
        with self._lock:
            if slot.entry in self._free or self._generations[slot.entry] != slot.generation:
                raise RuntimeError(f"entry {slot.entry} of generation {slot.generation} was given back before")
            self._free.append(slot.entry)

    def why_none(self) -> tuple[str, bool]:
        """(why a retrieve gets no entry now, whether this is the first time that it is said)."""
        with self._lock:
            reason = self._reason or f"all {self.board.num_entries} arrival slots are in use: raise the number of slots"
            first = reason not in self._said
            self._said.add(reason)
            return reason, first

    @property
    def num_free(self) -> int:
        """Entries that can be handed out now."""
        with self._lock:
            return len(self._free)


def layers_landed(arrival: Arrival, ends: Sequence[int]) -> int:
    """Layers in place.

    Args:
        arrival: of the retrieve.
        ends: one past the last layer of each of its slices.

    >>> layers_landed(Arrival(3, 2, None), (1, 2, 4))
    2
    """
    return ends[arrival.landed - 1] if arrival.landed else 0


def _size(num_entries: int) -> int:
    if num_entries < 1:
        raise ValueError(f"num_entries must be at least 1, got {num_entries}")
    return num_entries * LINE_BYTES


def _of(word: int, generation: int) -> int:
    return word & _NUMBER if word >> 32 == generation else 0
