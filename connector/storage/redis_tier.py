"""Objects as values of a Redis or Valkey server, or of a cluster of them; slices by GETRANGE, in pipelines.

    {namespace}:{format's tag}:{key space}:{prefix}:{tokens} = header and object, as `object_format` says

A value is set whole (TIER-1) with its time to live; how much the server keeps, and what leaves first, is its own
`maxmemory` and `maxmemory-policy` (allkeys-lru is a good one for a server that does nothing else).

Authentication and TLS are the URL's: `rediss://user:password@host:6380/0?ssl_ca_certs=/path/ca.pem`. Passwords appear
neither in the tier's name nor in its errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from lamella.connector.storage.header_cache import HeaderCache
from lamella.connector.storage.object_format import Header, ObjectFormat, RunRead, take
from lamella.connector.storage.redis_server import Question, RedisServer
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

NAMESPACE: Final = "lamella"
MAX_VALUE_BYTES: Final = 512 << 20
"""Redis' own limit of a value (`proto-max-bulk-len`)."""

_log = logging.getLogger(__name__)


class RedisTier:
    """A server's objects of one layout, shared by every process and host that can reach it.

    Args:
        url: `redis://` or `rediss://` (TLS), with user, password and database where needed.
        object_bytes: length of every object.
        run_bytes: runs of an object that are verified alone, see `layer_runs`.
        cluster: the URL is one node of a cluster.
        namespace: what the server's keys begin with; deployments that share a server and nothing else need their own.
        ttl_s: how long the server keeps an object; None: as long as its memory policy does.
        timeout_s: a call to a server that has fallen silent ends within it, retries included.
        retries: attempts after the first one that failed to connect, to send or to be answered.

    Raises:
        ImportError: redis-py is missing.
        ValueError: sizes, times or a URL that cannot be.
    """

    def __init__(
        self,
        url: str,
        object_bytes: int,
        run_bytes: Sequence[int] = (),
        *,
        cluster: bool = False,
        namespace: str = NAMESPACE,
        ttl_s: float | None = None,
        timeout_s: float = 5.0,
        retries: int = 1,
    ) -> None:
        self.format = ObjectFormat(object_bytes, run_bytes)
        if self.format.stored_bytes > MAX_VALUE_BYTES:
            raise ValueError(
                f"a Redis value holds {MAX_VALUE_BYTES} bytes, an object with its header {self.format.stored_bytes}: "
                "store smaller chunks"
            )
        if ttl_s is not None:
            check_seconds("ttl_s", ttl_s)
        self._namespace = namespace
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._server = RedisServer(url, cluster=cluster, timeout_s=timeout_s, retries=retries)
        self._headers: HeaderCache[None] = HeaderCache()

    @property
    def name(self) -> str:
        """`redis` and the host."""
        return self._server.name

    def name_of(self, key: ChunkKey) -> str:
        """The Redis key of an object."""
        return f"{self._namespace}:{self.format.tag}:{key.space.hex()}:{key.prefix.hex()}:{key.num_tokens}"

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """As `Tier.exists`; a value of another length counts as absent."""
        lengths = self._server.ask([("STRLEN", self.name_of(key)) for key in keys])
        return tuple(length == self.format.stored_bytes for length in lengths)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """As `Tier.get_ranges`."""
        get_alone(self, key, ranges, into)

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """As `Tier.get_leading`; small slices of many objects take one round trip."""
        for buffers in into:
            check_ranges(ranges, buffers, self.format.object_bytes)
        done = 0
        try:
            headers = [self._headers.get(key, None) for key in keys]
            plans = [self.format.reads(ranges, buffers) for buffers in into]
            answers = self._server.ask_in_turn(self._questions(keys, headers, plans))
            for key, header, reads in zip(keys, headers, plans, strict=True):
                self._accept(key, header, reads, answers)
                done += 1
        except DamagedObjectError as damage:
            _log.warning("%s; it is removed", damage)
            with suppress(TierError):
                self.delete(keys[done])
            return Leading.cut_short(done, damage)
        except (KeyError, TierError) as error:
            return Leading.cut_short(done, error)
        return Leading(done)

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """As `Tier.put`."""
        written_ns = 0  # the server's own expiry counts
        value = b"".join((self.format.header(key, data, written_ns), data.cast("B")))
        if self.exists([key])[0]:
            return
        expiry = ("PX", self._ttl_ms) if self._ttl_ms is not None else ()
        self._server.ask([("SET", self.name_of(key), value, *expiry)])

    def delete(self, key: ChunkKey) -> bool:
        """As `Tier.delete`."""
        self._headers.forget(key)
        return bool(self._server.ask([("DEL", self.name_of(key))])[0])

    def close(self) -> None:
        """As `Tier.close`: the connections are closed."""
        self._server.close()

    def _questions(
        self, keys: Sequence[ChunkKey], headers: Sequence[Header | None], plans: Sequence[Sequence[RunRead]]
    ) -> Iterator[Question]:
        first = self.format.header_bytes
        for key, header, reads in zip(keys, headers, plans, strict=True):
            name = self.name_of(key)
            if header is None:
                yield Question(("GETRANGE", name, 0, first - 1), first)
            for read in reads:
                start = first + read.source.offset
                yield Question(("GETRANGE", name, start, start + read.source.num_bytes - 1), read.source.num_bytes)

    def _accept(self, key: ChunkKey, header: Header | None, reads: Sequence[RunRead], answers: Iterator[bytes]) -> None:
        """What comes is what was put, and in the caller's buffers; no answer is kept longer than that takes."""
        where = f"{self.name} {self.name_of(key)}"
        is_fresh = header is None
        if header is None:
            header = self._parsed(key, next(answers), where)
        for read in reads:
            part = next(answers)
            if not part:
                self._headers.forget(key)
                raise KeyError(f"{where} is not there (any more)")
            if len(part) != read.source.num_bytes:
                raise DamagedObjectError(f"{where} gave {len(part)} of {read.source.num_bytes} bytes: cut off")
            try:
                take(read, memoryview(part), self.format.verifier(read, header, where))
            except DamagedObjectError:
                if is_fresh:
                    raise
                anew = self._server.ask([("GETRANGE", self.name_of(key), 0, self.format.header_bytes - 1)])[0]
                header, is_fresh = self._parsed(key, anew, where), True  # put again since its header was read?
                take(read, memoryview(part), self.format.verifier(read, header, where))
            del part  # its memory serves the next answer
        if is_fresh:
            self._headers.keep(key, None, header)

    def _parsed(self, key: ChunkKey, head: bytes, where: str) -> Header:
        if not head:
            self._headers.forget(key)
            raise KeyError(f"{where} is not there (any more)")
        return self.format.parse_header(key, head, where)
