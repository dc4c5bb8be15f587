"""Objects in a bucket of an S3-compatible store; slices by ranged GET, those of a prefix side by side.

    {prefix}/{format's tag}/{key space}/{prefix hash}-{tokens}.kv = header and object, as `object_format` says

The client is obstore (Apache's object_store in Rust): it reads without the interpreter's lock, has no dependencies, and
lets its merging of neighbouring ranges be switched off, which by default would fetch what lies between K and V as well.

An upload becomes visible when it is complete (TIER-1). What the store keeps and for how long is a matter of its
lifecycle rules; give it one that ends incomplete multipart uploads. `ttl_s` makes older objects misses, and
`lamella cache clear --older-than` removes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from lamella.connector.storage.header_cache import HeaderCache
from lamella.connector.storage.object_format import Header, ObjectFormat, RunRead, take
from lamella.connector.storage.tier import (
    DamagedObjectError,
    Leading,
    TierError,
    check_patience,
    check_ranges,
    check_seconds,
)
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

if TYPE_CHECKING:
    from obstore.store import S3Store

SUFFIX: Final = ".kv"
_NS: Final = 1_000_000_000

_log = logging.getLogger(__name__)


class S3Tier:
    """A bucket's objects of one layout, shared by every process and host that may use it.

    Credentials come from where AWS clients look for them (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, roles).

    Args:
        url: `s3://bucket/prefix`.
        object_bytes: length of every object.
        run_bytes: runs of an object that are verified alone, see `layer_runs`.
        endpoint: of a store that is not Amazon's; None: the environment's, or Amazon's.
        region: None: the environment's.
        ttl_s: objects written longer ago are misses; None: none are.
        timeout_s: bound on reading a slice of an object, retries included.
        retries: attempts after the first one that failed.
        connections: requests at once.
        clock_ns: wall clock.

    Raises:
        ImportError: obstore is missing.
        ValueError: sizes, times or a URL that cannot be.
    """

    def __init__(
        self,
        url: str,
        object_bytes: int,
        run_bytes: Sequence[int] = (),
        *,
        endpoint: str | None = None,
        region: str | None = None,
        ttl_s: float | None = None,
        timeout_s: float = 10.0,
        retries: int = 1,
        connections: int = 16,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.format = ObjectFormat(object_bytes, run_bytes)
        if ttl_s is not None:
            check_seconds("ttl_s", ttl_s)
        if connections < 1:
            raise ValueError(f"connections must be at least 1, got {connections}")
        self._ttl_ns = None if ttl_s is None else int(ttl_s * _NS)
        self._clock_ns = clock_ns
        self.bucket = S3Bucket(url, endpoint=endpoint, region=region, timeout_s=timeout_s, retries=retries)
        self._headers: HeaderCache[None] = HeaderCache()
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="lamella-s3")

    @property
    def name(self) -> str:
        """`s3`, bucket and prefix."""
        return self.bucket.name

    def path_of(self, key: ChunkKey) -> str:
        """Where the object is, below the prefix."""
        return f"{self.format.tag}/{key.space.hex()}/{key.prefix.hex()}-{key.num_tokens}{SUFFIX}"

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """As `Tier.exists`; an object of another length, or that has outlived its time, counts as absent."""
        return tuple(self._threads.map(self._is_there, keys))

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        check_ranges(ranges, into, self.format.object_bytes)
        if ranges:
            self._get(key, ranges, into)

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`, as many at once as there are connections."""
        for buffers in into:
            check_ranges(ranges, buffers, self.format.object_bytes)
        if not ranges:
            return Leading(len(keys))
        reads: list[Future[None]] = [
            self._threads.submit(self._get, key, ranges, buffers) for key, buffers in zip(keys, into, strict=True)
        ]
        errors = [read.exception() for read in reads]  # all have ended: the buffers are the caller's again
        for done, error in enumerate(errors):
            if isinstance(error, KeyError | TierError):
                return Leading.cut_short(done, error)
            if error is not None:
                raise error
        return Leading(len(keys))

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        header = self.format.header(key, data, self._clock_ns())
        if not self._is_there(key):
            self._headers.forget(key)
            self.bucket.put(self.path_of(key), b"".join((header, data.cast("B"))))

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`."""
        self._headers.forget(key)
        path = self.path_of(key)
        there = self.bucket.look(path) is not None
        self.bucket.delete([path])
        return there

    def close(self) -> None:
        """As `Tier.close`: its threads end with their work."""
        self._threads.shutdown(wait=False)

    def _is_there(self, key: ChunkKey) -> bool:
        found = self.bucket.look(self.path_of(key))
        return found is not None and found[0] == self.format.stored_bytes and not self._is_expired(found[1])

    def _is_expired(self, written_ns: int) -> bool:
        return self._ttl_ns is not None and self._clock_ns() - written_ns >= self._ttl_ns

    def _get(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        path, where = self.path_of(key), f"{self.name}/{self.path_of(key)}"
        header = self._headers.get(key, None)
        reads = self.format.reads(ranges, into)
        first = self.format.header_bytes
        spans = [(first + read.source.offset, read.source.num_bytes) for read in reads]
        try:
            if header is None:
                head, *parts = self.bucket.get(path, [(0, first), *spans])
                header = self.format.parse_header(key, head, where)
                self._take(header, reads, parts, where)
            else:
                parts = self.bucket.get(path, spans)
                header = self._take_known(key, header, reads, parts, where)
        except DamagedObjectError as damage:
            _log.warning("%s; it is removed", damage)
            self.delete(key)
            raise
        except KeyError:
            self._headers.forget(key)
            raise
        if self._is_expired(header.written_ns):
            raise KeyError(f"{where} has outlived its time")
        self._headers.keep(key, None, header)

    def _take_known(
        self, key: ChunkKey, header: Header, reads: Sequence[RunRead], parts: Sequence[memoryview], where: str
    ) -> Header:
        try:
            self._take(header, reads, parts, where)
        except DamagedObjectError:  # removed and put again since its header was read?
            anew = self.bucket.get(self.path_of(key), [(0, self.format.header_bytes)])[0]
            header = self.format.parse_header(key, anew, where)
            self._take(header, reads, parts, where)
        return header

    def _take(self, header: Header, reads: Sequence[RunRead], parts: Sequence[memoryview], where: str) -> None:
        for read, part in zip(reads, parts, strict=True):
            if part.nbytes != read.source.num_bytes:
                raise DamagedObjectError(f"{where} gave {part.nbytes} of {read.source.num_bytes} bytes: cut off")
            take(read, part, self.format.verifier(read, header, where))


class S3Bucket:
    """Requests to one bucket below one prefix, bounded in time. Thread-safe.

    Args: as of `S3Tier`.
    """

    def __init__(self, url: str, *, endpoint: str | None, region: str | None, timeout_s: float, retries: int) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise ValueError(f"an S3 URL is s3://bucket/prefix, got {url!r}")
        if endpoint is not None and not (endpoint.startswith(("http://", "https://")) and urlsplit(endpoint).hostname):
            raise ValueError(f"an S3 endpoint is http://host:port or https://host:port, got {endpoint!r}")
        check_patience(timeout_s, retries)
        try:
            from obstore.store import S3Store
        except ImportError as missing:
            raise ImportError("the S3 tier needs obstore: pip install 'lamella[s3]'") from missing
        self.name = f"s3:{parts.netloc}/{parts.path.strip('/')}".rstrip("/")
        config = {name: value for name, value in (("endpoint", endpoint), ("region", region)) if value is not None}
        bound = timedelta(seconds=timeout_s)
        self._store: S3Store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "timeout": bound / (retries + 1),
                "connect_timeout": bound / (retries + 1),
                "allow_http": (endpoint or "").startswith("http://"),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": bound,
                "backoff": {"init_backoff": timedelta(milliseconds=20), "max_backoff": timedelta(milliseconds=200)},
            },
            config=config,  # type: ignore[arg-type]  # a TypedDict, of which only what was given is passed on
        )

    def get(self, path: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (start, length); fewer where the object ends before.

        Raises:
            KeyError: there is no such object.
            TierError: it cannot be read.
        """
        import obstore

        with self._said(path):
            found = obstore.get_ranges(
                self._store,
                path,
                starts=[start for start, _ in spans],
                lengths=[length for _, length in spans],
                coalesce=0,
            )
        return [memoryview(part) for part in found]

    def look(self, path: str) -> tuple[int, int] | None:
        """The object's length and when it was written (ns), or None if there is none.

        Raises:
            TierError: the store cannot say.
        """
        import obstore

        try:
            with self._said(path):
                found = obstore.head(self._store, path)
        except KeyError:
            return None
        return found["size"], int(found["last_modified"].timestamp() * _NS)

    def put(self, path: str, value: bytes) -> None:
        """The object is there.

        Raises:
            TierError: it could not be kept.
        """
        import obstore

        try:
            with self._said(path):
                obstore.put(self._store, path, value)
        except KeyError:
            raise TierError(f"{self.name} does not serve: there is no such bucket") from None

    def delete(self, paths: Sequence[str]) -> None:
        """None of these is there.

        Raises:
            TierError: the store refuses.
        """
        import obstore

        try:
            with self._said(paths[0]):
                obstore.delete(self._store, paths)
        except KeyError:
            return

    def list(self) -> Iterator[tuple[str, int, int]]:
        """Path, length and time written (ns) of everything below the prefix.

        Raises:
            TierError: the store refuses.
        """
        import obstore

        with self._said(""):
            for batch in obstore.list(self._store, chunk_size=1000):
                for found in batch:
                    yield found["path"], found["size"], int(found["last_modified"].timestamp() * _NS)

    @contextmanager
    def _said(self, path: str) -> Iterator[None]:
        """Whatever the client raises becomes a KeyError or a TierError that names the object."""
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise KeyError(f"{self.name}/{path} is not there (any more)") from None
        except (BaseError, OSError, ValueError) as refused:
            raise TierError(f"{self.name} does not serve: {str(refused).splitlines()[0]}") from refused
