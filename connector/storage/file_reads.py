"""Slices of open files, verified: at once where the page cache has them, of several files together where it has not.

A slice that is cached is copied and verified on its caller's thread, in pieces that the checksum still finds in the
core's cache. `RWF_NOWAIT` tells: such a read gives what is cached and waits for nothing.

The first slice that is not cached ends that, and the files that are left are shared among a few threads. A disk serves
several requests at once, and one file is verified while another's bytes come. They ask for less at a time: how far the
operating system reads ahead of a file grows with every request that follows the last one, so a slice that is one large
request is read without.

Source: `benchmarks/tiers.py` with the page cache dropped; the figures are in `docs/tiers.md`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from lamella.connector.storage.object_format import (
    ObjectFormat,
    RunVerifier,
    Span,
    checksum_of,
    damage,
    deliver,
)
from lamella.connector.storage.open_files import OpenObject
from lamella.connector.storage.tier import DamagedObjectError, Leading, NoSpaceError, TierError
from lamella.reference.layout import ByteRange

_CACHED_PIECE_BYTES: Final = 1 << 20
_AWAITED_PIECE_BYTES: Final = 256 << 10
_log = logging.getLogger(__name__)


_Step = tuple[int, int, int, tuple[memoryview], int, int, RunVerifier | None, int]
"""Which object, descriptor, offset, buffer, its size; what verifies it: a run's checksum, or a verifier; the run."""


class FileReader:
    """Reads slices of open files. Thread-safe.

    Args:
        form: of the objects in the files.
        num_threads: that read what is not cached, the caller's among them.
    """

    def __init__(self, form: ObjectFormat, num_threads: int = 4) -> None:
        self._format = form
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lamella-file")  # starts none before a use

    def read_leading(
        self, objects: Sequence[OpenObject], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`, of open files; a damaged one is removed."""
        spans = self._format.spans(ranges)
        done = 0
        if all(span.is_whole for span in spans):
            read = self._read_cached(objects, spans, into)
            if read.error is not None or read.num_objects == len(objects):
                return read
            done = read.num_objects
        rest = self._read_together(objects[done:], ranges, into[done:])
        return rest._replace(num_objects=done + rest.num_objects)

    def read(self, one: OpenObject, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """The ranges are in their buffers, however long the disk takes.

        Raises:
            TierError: they cannot be read, or are damaged.
        """
        try:
            for read in self._format.reads(ranges, into):
                verifier = self._format.verifier(read, one.header, one.place)
                start = self._format.header_bytes + read.source.offset
                for offset in range(0, read.source.num_bytes, _AWAITED_PIECE_BYTES):
                    piece = read.target[offset : offset + _AWAITED_PIECE_BYTES]
                    fill(one.descriptor, piece, start + offset, one.place)
                    verifier.feed(piece)
                if read.copies:
                    deliver(read)
        except DamagedObjectError as found:
            remove_damaged(one.descriptor, one.place, found)
            raise
        except OSError as refused:
            raise refusal(f"cannot read {one.place}", refused) from refused

    def close(self) -> None:
        """The threads end; reads go on on their callers' alone."""
        self._threads.shutdown(wait=False)

    def _read_cached(
        self, objects: Sequence[OpenObject], spans: Sequence[Span], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """Up to the first object of which something is not cached; that one's buffers hold anything.

        What can be settled beforehand is: between two reads the core's caches hold nothing of this program, and
        whatever Python does there takes several times as long.
        """
        steps: list[_Step] = []
        for place, (one, buffers) in enumerate(zip(objects, into, strict=True)):
            for span, buffer in zip(spans, buffers, strict=True):
                steps.extend(self._steps(place, one, span, buffer))
        preadv, nowait = os.preadv, os.RWF_NOWAIT
        place = 0
        try:
            for place, descriptor, offset, piece, size, checksum, verifier, run in steps:
                if preadv(descriptor, piece, offset, nowait) != size:
                    return Leading(place)
                if verifier is not None:
                    verifier.feed(piece[0])
                elif checksum_of(piece[0]) != checksum:
                    raise damage(run, objects[place].place)
        except DamagedObjectError as found:
            remove_damaged(objects[place].descriptor, objects[place].place, found)
            return Leading.cut_short(place, found)
        except OSError as refused:
            if refused.errno in (errno.EAGAIN, errno.EOPNOTSUPP):  # not there, or a file system that cannot tell
                return Leading(place)
            return Leading.cut_short(place, refusal(f"cannot read {objects[place].place}", refused))
        return Leading(len(objects))

    def _steps(self, place: int, one: OpenObject, span: Span, buffer: memoryview) -> list[_Step]:
        offset, size = self._format.header_bytes + span.source.offset, span.source.num_bytes
        if span.is_run and size <= _CACHED_PIECE_BYTES:  # a slice of one layer
            run = span.first_run
            return [(place, one.descriptor, offset, (buffer,), size, one.header.checksums[run], None, run)]
        verifier = self._format.verifier(span, one.header, one.place)
        whole = buffer if buffer.format == "B" else buffer.cast("B")
        pieces = [whole[done : done + _CACHED_PIECE_BYTES] for done in range(0, size, _CACHED_PIECE_BYTES)]
        return [
            (place, one.descriptor, offset + number * _CACHED_PIECE_BYTES, (piece,), piece.nbytes, 0, verifier, 0)
            for number, piece in enumerate(pieces)
        ]

    def _read_together(
        self, objects: Sequence[OpenObject], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        shared = _SharedReads(self, objects, ranges, into)
        try:
            for _ in range(min(self._num_threads, len(objects)) - 1):
                self._threads.submit(shared.take_part)
        except RuntimeError:  # closed, no more threads to be had, or the interpreter is ending: those there are read
            pass
        try:
            shared.read_on()
        finally:
            shared.end()  # from here on the buffers are the caller's again
        return shared.outcome()


class _SharedReads:
    """Objects that several threads read, each taking the next; after an error none is taken.

    They are taken in order, so all before the first error were read. Who takes part is counted here, not by futures: a
    pool that cannot start a thread raises with the work in its queue, where a thread that becomes free comes to it.
    """

    def __init__(
        self,
        reader: FileReader,
        objects: Sequence[OpenObject],
        ranges: Sequence[ByteRange],
        into: Sequence[Sequence[memoryview]],
    ) -> None:
        self._reader = reader
        self._objects = objects
        self._ranges = ranges
        self._into = into
        self._changed = threading.Condition()
        self._num_objects = len(objects)
        self._next = 0
        self._others = 0  # threads beside the caller's that are reading
        self._errors: dict[int, BaseException] = {}

    def take_part(self) -> None:
        """Called by another thread than the caller's; after the end it reads nothing."""
        with self._changed:
            if self._next == self._num_objects:
                return
            self._others += 1
        try:
            self.read_on()
        finally:
            with self._changed:
                self._others -= 1
                self._changed.notify()

    def read_on(self) -> None:
        """Objects are read until there are none left."""
        while (place := self._take()) is not None:
            try:
                self._reader.read(self._objects[place], self._ranges, self._into[place])
            except BaseException as error:  # the caller's, whichever thread met it
                with self._changed:
                    self._errors[place] = error
                    self._next = self._num_objects

    def end(self) -> None:
        """No more are taken, nobody reads, and no buffer is held."""
        with self._changed:
            self._next = self._num_objects
            self._changed.wait_for(lambda: self._others == 0)
        self._objects, self._into = (), ()

    def outcome(self) -> Leading:
        """How far it came, after the end.

        Raises:
            BaseException: what a read met that says nothing about its object.
        """
        own: dict[int, TierError] = {}
        for place, error in self._errors.items():
            if not isinstance(error, TierError):
                raise error
            own[place] = error
        if not own:
            return Leading(self._num_objects)
        first = min(own)
        return Leading.cut_short(first, own[first])

    def _take(self) -> int | None:
        with self._changed:
            place = self._next
            self._next += place < self._num_objects
        return place if place < self._num_objects else None


def fill(descriptor: int, buffer: memoryview, offset: int, place: str) -> None:
    """The buffer holds the file's bytes from `offset` on.

    Raises:
        DamagedObjectError: the file ends before.
        OSError: the disk refuses.
    """
    done = os.preadv(descriptor, (buffer,), offset)
    while done < buffer.nbytes:
        count = os.preadv(descriptor, (buffer[done:],), offset + done)
        if count == 0:
            raise DamagedObjectError(f"{place} ends at byte {offset + done}: cut off while it was read")
        done += count


def remove_damaged(descriptor: int, place: str, damage: DamagedObjectError) -> None:
    """The open file is not to be found at `place` any more; one that has replaced it is left alone."""
    path = Path(place)
    outcome = "another file has replaced it"
    try:
        there, opened = path.stat(follow_symlinks=False), os.fstat(descriptor)
        if (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino):
            path.unlink()
            outcome = "it was removed"
    except FileNotFoundError:
        outcome = "it is gone already"
    except OSError as refused:
        outcome = f"it cannot be removed: {refused}"
    _log.warning("%s; %s", damage, outcome)


def refusal(what: str, refused: OSError) -> TierError:
    """An operating system's refusal as a TierError that says what could not be done."""
    code = errno.errorcode.get(refused.errno or 0, "no code")
    kind = NoSpaceError if refused.errno in (errno.ENOSPC, errno.EDQUOT) else TierError
    return kind(f"{what}: {refused.strerror or refused} ({code})")
