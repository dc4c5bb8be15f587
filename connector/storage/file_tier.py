"""Objects as files of a folder: one file an object, written beside its place and renamed into it.

A file is a header page and the object's bytes, so that payloads are page-aligned. The header carries magic, format
version, object size and the whole key, closed by a BLAKE3 of these fields; a file of another version, size or key is
refused with its path, never read.

`put` writes to a name that no reader looks for, flushes it to the device, renames it and flushes the folder: a crash
at any moment leaves a whole object or a leftover (TIER-1). The writer holds a lock on its unfinished file, which the
kernel drops with the process, so a leftover is an unfinished file that nobody locks; opening a tier removes those.

Files are 0600 and folders 0700: KV caches are the users' prompts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blake3 import blake3

from lamella.connector.storage.tier import TierError, check_ranges
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

HEADER_BYTES: Final = 4096
FORMAT_VERSION: Final = 1
_MAGIC: Final = b"LAMELLA\0"
_FIELDS: Final = struct.Struct("<8sIIQQ32s32s")  # magic, version, header bytes, object bytes, tokens, space, prefix
_SUFFIX: Final = ".kv"
_UNFINISHED: Final = ".unfinished"

_log = logging.getLogger(__name__)


class FileTier:
    """A folder of objects, for this process and for every other of the same user.

    Args:
        folder: made if it is not there; its file system must know atomic renames.
        object_bytes: length of every object.

    Raises:
        ValueError: object_bytes below 1, or a folder that others than its owner can enter.
        TierError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, object_bytes: int) -> None:
        if object_bytes < 1:
            raise ValueError(f"object_bytes must be at least 1, got {object_bytes}")
        self._folder = folder
        self._object_bytes = object_bytes
        with _said(f"cannot use {folder} as a file tier"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & 0o077:
                raise ValueError(f"{folder} is open to others (mode {mode:04o}): chmod 700 it, caches are prompts")
            self._remove_leftovers()

    @property
    def name(self) -> str:
        """`file` and the folder."""
        return f"file:{self._folder}"

    def path_of(self, key: ChunkKey) -> Path:
        """Where the object is, or would be."""
        prefix = key.prefix.hex()
        return self._folder / key.space.hex() / prefix[:2] / f"{prefix}-{key.num_tokens}{_SUFFIX}"

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """As `Tier.exists`; a file of the wrong length, which no `put` leaves, counts as absent."""
        return tuple(self._size(key) == HEADER_BYTES + self._object_bytes for key in keys)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        check_ranges(ranges, into, self._object_bytes)
        path = self.path_of(key)
        with _said(f"cannot read {path}"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise KeyError(f"{path} is not there (any more)") from None
            try:
                self._check_header(descriptor, key, path)
                for wanted, buffer in zip(ranges, into, strict=True):
                    _read(descriptor, buffer, HEADER_BYTES + wanted.offset, path)
            finally:
                os.close(descriptor)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        if data.nbytes != self._object_bytes:
            raise ValueError(f"an object has {self._object_bytes} bytes, got {data.nbytes}")
        path = self.path_of(key)
        with _said(f"cannot keep {path}"):
            if self.exists([key])[0]:
                return
            for folder in (path.parent.parent, path.parent):  # mkdir's own parents would get another mode
                folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, unfinished = _open_unfinished(path.parent)
            try:
                _write(descriptor, memoryview(self._header(key)))
                _write(descriptor, data.cast("B"))
                os.fsync(descriptor)
                unfinished.rename(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            _flush_folder(path.parent)

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`."""
        path = self.path_of(key)
        with _said(f"cannot delete {path}"):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            _flush_folder(path.parent)
            return True

    def close(self) -> None:
        """As `Tier.close`: nothing is held open between calls."""

    def _size(self, key: ChunkKey) -> int | None:
        path = self.path_of(key)
        with _said(f"cannot look for {path}"):
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None

    def _header(self, key: ChunkKey) -> bytes:
        packed = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, HEADER_BYTES, self._object_bytes, key.num_tokens, key.space, key.prefix
        )
        return (packed + blake3(packed).digest()).ljust(HEADER_BYTES, b"\0")

    def _check_header(self, descriptor: int, key: ChunkKey, path: Path) -> None:
        """The file is what its name says, or TierError with what it is instead."""
        header = bytearray(_FIELDS.size + 32)
        _read(descriptor, memoryview(header), 0, path)
        packed = bytes(header[: _FIELDS.size])
        magic, version, header_bytes, object_bytes, num_tokens, space, prefix = _FIELDS.unpack(packed)
        if magic != _MAGIC:
            raise TierError(f"{path} is not an object of this tier: delete it")
        if (version, header_bytes) != (FORMAT_VERSION, HEADER_BYTES):
            raise TierError(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}: use another folder"
            )
        if blake3(packed).digest() != bytes(header[_FIELDS.size :]):
            raise TierError(f"{path} has a damaged header: delete it")
        if object_bytes != self._object_bytes:
            raise TierError(
                f"{path} holds an object of {object_bytes} bytes, the layout says {self._object_bytes}: "
                "two models share a key space; name them apart"
            )
        if ChunkKey(space, prefix, num_tokens) != key:
            raise TierError(f"{path} holds another key than its name says: delete it")

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f"*/*/*{_UNFINISHED}"):
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
        code = errno.errorcode.get(refused.errno or 0, "no code")
        raise TierError(f"{what}: {refused.strerror or refused} ({code})") from refused


def _open_unfinished(folder: Path) -> tuple[int, Path]:
    """A new file and its name, locked; the lock says that its writer lives."""
    while True:
        path = folder / f"{secrets.token_hex(8)}{_UNFINISHED}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # another process took it for a leftover before the lock was ours


def _read(descriptor: int, buffer: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < buffer.nbytes:
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise TierError(f"{path} ends at byte {offset + done}: cut off by someone else; delete it")
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
