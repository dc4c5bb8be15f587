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

from lamella.connector.storage.file_reads import FileReader, fill, refusal, remove_damaged
from lamella.connector.storage.file_space import OBJECT_SUFFIX, FileSpace, mark_used
from lamella.connector.storage.header_cache import HeaderCache
from lamella.connector.storage.object_format import Header, ObjectFormat
from lamella.connector.storage.open_files import OpenFiles, OpenObject, close_all
from lamella.connector.storage.tier import (
    DamagedObjectError,
    Leading,
    TierError,
    check_ranges,
    check_seconds,
    get_alone,
)
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

_UNFINISHED: Final = ".unfinished"
_MOST_OPEN: Final = 32
"""Files that are opened before the first of them is read."""
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
        TypeError: a folder that is not a Path.
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
        if not isinstance(folder, Path):
            raise TypeError(f"folder must be a pathlib.Path, got {folder!r}: pass Path({folder!r})")
        self.format = ObjectFormat(object_bytes, run_bytes)
        if ttl_s is not None:
            check_seconds("ttl_s", ttl_s)
        self._folder = folder
        self._root = f"{folder}/{self.format.tag}/"
        self._clock_ns = clock_ns
        self._headers: HeaderCache[tuple[int, int]] = HeaderCache()
        self._reader = FileReader(self.format)
        self._held = OpenFiles()
        with _said(f"cannot use {folder} as a file tier, give a folder that this user can make and write"):
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
        self._held.close_idle()
        return tuple(self._is_there(self.path_of(key)) for key in keys)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        get_alone(self, key, ranges, into)

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`; a few files are opened at a time, before the first of these is read."""
        ranges = tuple(ranges)
        self._check(keys, ranges, into)
        ends = any(wanted.offset + wanted.num_bytes == self.format.object_bytes for wanted in ranges)
        self._held.close_idle()
        done, error = 0, None
        while done < len(keys) and error is None:
            batch = keys[done : done + _MOST_OPEN]
            objects: list[OpenObject] = []
            keep = False
            try:
                error = self._open_all(batch, objects)
                read = self._reader.read_leading(objects, ranges, into[done : done + len(objects)])
                error = read.error or error
                keep = error is None and not ends
            finally:
                if keep:
                    self._held.give(zip(batch, objects, strict=False))
                else:
                    close_all(objects)
            done += read.num_objects
        return Leading(done) if error is None else Leading.cut_short(done, error)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        path = self.path_of(key)
        self._held.close_idle()
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
        close_all(self._held.take([key]).values())
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
        """As `Tier.close`: its files are closed and its threads end; a read that goes on closes those it has."""
        self._held.close()
        self._reader.close()

    def _is_there(self, path: Path) -> bool:
        with _said(f"cannot look for {path}"):
            try:
                found = path.stat()
            except FileNotFoundError:
                return False
        return found.st_size == self.format.stored_bytes and not self._space.is_expired(found.st_mtime_ns)

    def _check(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> None:
        """As `check_ranges`, of every object; the ranges themselves are looked at once."""
        sizes: list[int] | None = None
        for _, buffers in zip(keys, into, strict=True):
            if sizes is None or [buffer.nbytes for buffer in buffers] != sizes:
                check_ranges(ranges, buffers, self.format.object_bytes)
                sizes = [wanted.num_bytes for wanted in ranges]

    def _open_all(self, keys: Sequence[ChunkKey], objects: list[OpenObject]) -> KeyError | TierError | None:
        """`objects` are the files of these up to the first that cannot be opened; returned is why that cannot."""
        held = self._held.take(keys)
        try:
            for key in keys:
                one = held.get(key)
                is_usable = one is not None and self._is_as_it_was(one)
                objects.append(held.pop(key) if is_usable else self._open(key))
        except FileNotFoundError:
            return KeyError(f"{self._place(key)} is not there (any more)")
        except (KeyError, TierError) as error:
            return error
        except OSError as refused:
            if refused.errno in (errno.EMFILE, errno.ENFILE) and (objects or held or self._held.make_room()):
                return None  # once those that are open now are closed
            return refusal(f"cannot read {self._place(key)}", refused)
        finally:
            close_all(held.values())
        return None

    def _is_as_it_was(self, one: OpenObject) -> bool:
        """Whether the file still is the object that was opened: neither removed nor changed nor too old."""
        found = os.fstat(one.descriptor)
        return (
            found.st_nlink > 0
            and (found.st_ino, found.st_mtime_ns) == one.identity
            and found.st_size == self.format.stored_bytes
            and not self._space.is_expired(found.st_mtime_ns)
        )

    def _open(self, key: ChunkKey) -> OpenObject:
        place = self._place(key)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header, identity = self._header_of(descriptor, key, place)
            return OpenObject(place, descriptor, header, identity)
        except BaseException as error:
            if isinstance(error, DamagedObjectError):
                remove_damaged(descriptor, place, error)
            os.close(descriptor)
            raise

    def _header_of(self, descriptor: int, key: ChunkKey, place: str) -> tuple[Header, tuple[int, int]]:
        """The header of an object that has its length and has not expired, and for which file; it is used now."""
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
            page = bytearray(self.format.header_bytes)
            fill(descriptor, memoryview(page), 0, place)
            header = self.format.parse_header(key, page, place)
            self._headers.keep(key, identity, header)
        return header, identity

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
        raise refusal(what, refused) from refused


def _open_unfinished(folder: Path) -> tuple[int, Path]:
    """A new file and its name, locked; the lock says that its writer lives."""
    while True:
        path = folder / f"{secrets.token_hex(8)}{_UNFINISHED}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # another process took it for a leftover before the lock was ours


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
