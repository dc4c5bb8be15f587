"""Objects as files of a folder: one file an object, written beside its place and renamed into it.

    folder / format's tag / key space / first byte of the prefix / prefix-tokens.kv

A file is what `object_format` describes: a header of whole pages, so that payloads are page-aligned, and the object.

`put` writes to a name that no reader looks for, flushes it to the device, renames it and flushes the folder: a crash
at any moment leaves a whole object or a leftover (TIER-1). The writer holds a lock on its unfinished file, which the
kernel drops with the process, so a leftover is an unfinished file that nobody locks; opening a tier removes those.

A file that turns out to be damaged is removed by whoever notices (TIER-4). Files are 0600 and folders 0700: KV caches
are the users' prompts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lamella.connector.storage.file_space import OBJECT_SUFFIX, FileSpace, mark_used
from lamella.connector.storage.header_cache import HeaderCache
from lamella.connector.storage.object_format import PIECE_BYTES, Header, ObjectFormat, deliver
from lamella.connector.storage.tier import DamagedObjectError, Leading, TierError, check_ranges, get_in_turn
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

_UNFINISHED: Final = ".unfinished"
_USED_AGAIN_NS: Final = 60 * 1_000_000_000
"""Reads within this time of the last one do not touch the file's access time again."""
_NS: Final = 1_000_000_000

_log = logging.getLogger(__name__)


class FileTier:
    """A folder of objects, for this process and for every other of the same user.

    It is as fast as its disk, and a call takes as long as the disk does: TIER-5 is the operating system's to keep.

    Args:
        folder: made if it is not there; its file system must know atomic renames.
        object_bytes: length of every object.
        run_bytes: runs of an object that are verified alone, see `layer_runs`; empty: only whole objects are.
        max_bytes: the folder's size limit; None: none.
        ttl_s: how long an object is kept after it was written; None: without end.
        clock_ns: wall clock.

    Raises:
        ValueError: object_bytes, runs or limits that cannot be, or a folder that others than its owner can enter.
        TierError: the folder cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        object_bytes: int,
        run_bytes: Sequence[int] = (),
        *,
        max_bytes: int | None = None,
        ttl_s: float | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.format = ObjectFormat(object_bytes, run_bytes)
        if ttl_s is not None and not 0 < ttl_s < float("inf"):
            raise ValueError(f"ttl_s must be positive and finite, got {ttl_s}")
        self._folder = folder
        self._root = f"{folder}/{self.format.tag}/"
        self._clock_ns = clock_ns
        self._headers: HeaderCache[tuple[int, int]] = HeaderCache()
        with _said(f"cannot use {folder} as a file tier"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & 0o077:
                raise ValueError(f"{folder} is open to others (mode {mode:04o}): chmod 700 it, caches are prompts")
            self._remove_leftovers()
            self._space = FileSpace(folder, max_bytes, None if ttl_s is None else int(ttl_s * _NS), clock_ns)

    @property
    def name(self) -> str:
        """`file` and the folder."""
        return f"file:{self._folder}"

    @property
    def used_bytes(self) -> int:
        """What the folder's objects take, as far as this process knows; 0 without a limit."""
        return self._space.used_bytes

    def path_of(self, key: ChunkKey) -> Path:
        """Where the object is, or would be."""
        return Path(self._place(key))

    def _place(self, key: ChunkKey) -> str:
        prefix = key.prefix.hex()
        return f"{self._root}{key.space.hex()}/{prefix[:2]}/{prefix}-{key.num_tokens}{OBJECT_SUFFIX}"

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """As `Tier.exists`; a file of the wrong length, which no `put` leaves, counts as absent."""
        return tuple(self._is_there(self.path_of(key)) for key in keys)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        check_ranges(ranges, into, self.format.object_bytes)
        place = self._place(key)
        descriptor = -1
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._read(descriptor, key, place, ranges, into)
        except DamagedObjectError as damage:
            _remove_same(descriptor, Path(place))
            _log.warning("%s; it was removed", damage)
            raise
        except FileNotFoundError:
            raise KeyError(f"{place} is not there (any more)") from None
        except OSError as refused:
            raise _refusal(f"cannot read {place}", refused) from refused
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`."""
        return get_in_turn(self, keys, ranges, into)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        path = self.path_of(key)
        with _said(f"cannot keep {path}"):
            header = memoryview(self.format.header(key, data, self._clock_ns()))
            if self._is_there(path):
                return
            with self._space.taken(self.format.stored_bytes):
                for folder in (path.parents[2], path.parents[1], path.parent):  # mkdir's own parents: another mode
                    folder.mkdir(mode=0o700, exist_ok=True)
                self._write(path, header, data.cast("B"))

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`."""
        path = self.path_of(key)
        with _said(f"cannot delete {path}"):
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                return False
            self._space.freed(size)
            _flush_folder(path.parent)
            return True

    def close(self) -> None:
        """As `Tier.close`: nothing is held open between calls."""

    def _is_there(self, path: Path) -> bool:
        with _said(f"cannot look for {path}"):
            try:
                found = path.stat()
            except FileNotFoundError:
                return False
        return found.st_size == self.format.stored_bytes and not self._space.is_expired(found.st_mtime_ns)

    def _read(
        self, descriptor: int, key: ChunkKey, place: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]
    ) -> None:
        found = os.fstat(descriptor)
        if self._space.is_expired(found.st_mtime_ns):
            raise KeyError(f"{place} has outlived its time")
        if found.st_size != self.format.stored_bytes:
            raise DamagedObjectError(f"{place} ends at byte {found.st_size}, not {self.format.stored_bytes}: cut off")
        now = self._clock_ns()
        if now - found.st_atime_ns > _USED_AGAIN_NS:
            mark_used(descriptor, now)
        identity = (found.st_ino, found.st_mtime_ns)
        header = self._headers.get(key, identity)
        if header is None:
            header = self._read_header(descriptor, key, place)
            self._headers.keep(key, identity, header)
        reads = self.format.reads(ranges, into)
        for read in reads:
            verifier = self.format.verifier(read, header, place)
            start = self.format.header_bytes + read.source.offset
            for offset in range(0, read.source.num_bytes, PIECE_BYTES):
                piece = read.target[offset : offset + PIECE_BYTES]
                _fill(descriptor, piece, start + offset, place)
                verifier.feed(piece)
            if read.copies:
                deliver(read)

    def _read_header(self, descriptor: int, key: ChunkKey, place: str) -> Header:
        header = bytearray(self.format.header_bytes)
        _fill(descriptor, memoryview(header), 0, place)
        return self.format.parse_header(key, header, place)

    def _write(self, path: Path, *parts: memoryview) -> None:
        descriptor, unfinished = _open_unfinished(path.parent)
        try:
            for part in parts:
                _write(descriptor, part)
            now = self._clock_ns()
            os.utime(descriptor, ns=(now, now))
            os.fsync(descriptor)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        _flush_folder(path.parent)

    def _remove_leftovers(self) -> None:
        for path in self._folder.rglob(f"*{_UNFINISHED}"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # its writer renamed or removed it just now
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                _log.info("removed %s, which a writer that is gone left unfinished", path)
            except BlockingIOError:
                continue  # somebody is writing it
            finally:
                os.close(descriptor)


@contextmanager
def _said(what: str) -> Iterator[None]:
    """An operating system's refusal becomes a TierError that says what could not be done."""
    try:
        yield
    except OSError as refused:
        raise _refusal(what, refused) from refused


def _refusal(what: str, refused: OSError) -> TierError:
    code = errno.errorcode.get(refused.errno or 0, "no code")
    return TierError(f"{what}: {refused.strerror or refused} ({code})")


def _open_unfinished(folder: Path) -> tuple[int, Path]:
    """A new file and its name, locked; the lock says that its writer lives."""
    while True:
        path = folder / f"{secrets.token_hex(8)}{_UNFINISHED}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # another process took it for a leftover before the lock was ours


def _remove_same(descriptor: int, path: Path) -> None:
    """The open file is not to be found at `path` any more; one that has replaced it is left alone."""
    try:
        there, opened = path.stat(follow_symlinks=False), os.fstat(descriptor)
        if (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino):
            path.unlink()
    except OSError as refused:
        _log.warning("%s is damaged and cannot be removed: %s", path, refused)


def _fill(descriptor: int, buffer: memoryview, offset: int, place: str) -> None:
    done = os.preadv(descriptor, (buffer,), offset)
    while done < buffer.nbytes:
        count = os.preadv(descriptor, (buffer[done:],), offset + done)
        if count == 0:
            raise DamagedObjectError(f"{place} ends at byte {offset + done}: cut off while it was read")
        done += count


def _write(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(descriptor, data[done:])


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
