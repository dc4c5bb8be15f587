"""Objects as values of a Redis or Valkey server, or of a cluster of them; slices by GETRANGE, in pipelines.

    {namespace}:{format's tag}:{key space}:{prefix}:{tokens} = header and object, as `object_format` says

A value is set whole (TIER-1) with its time to live; how much the server keeps, and what leaves first, is its own
`maxmemory` and `maxmemory-policy` (allkeys-lru is a good one for a server that does nothing else).

Authentication and TLS are the URL's: `rediss://user:password@host:6380/0?ssl_ca_certs=/path/ca.pem`. Passwords appear
neither in the tier's name nor in its errors.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from lamella.connector.storage.header_cache import HeaderCache
from lamella.connector.storage.object_format import Header, ObjectFormat, RunRead, take
from lamella.connector.storage.tier import DamagedObjectError, Leading, TierError, check_ranges
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

NAMESPACE: Final = "lamella"
MAX_VALUE_BYTES: Final = 512 << 20
"""Redis' own limit of a value (`proto-max-bulk-len`)."""
_AHEAD_BYTES: Final = 1 << 20
"""Answers that are under way at once on one connection, two at least; half of them are asked for together.

Source: measured on the loopback with Redis 7.0 and hiredis (2026-11-29), ranges of 16 KiB .. 4 MiB: a server that works
on the next answers while this one is checked and copied gives 1.1 to 1.7 times what whole pipelines of 512 KiB gave;
2 MiB give no more, and a refill at every answer costs a third at 16 KiB. Answers of 2 MiB asked for one by one came to
0.8 times the client's own loop, two by two to 1.05 (least times: 0.87 and 1.24).
"""
_TLS_FILES: Final = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"})
_BACKOFF_S: Final = (0.02, 0.2)  # first and longest wait between attempts

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
        if ttl_s is not None and not 0.001 <= ttl_s < float("inf"):
            raise ValueError(f"ttl_s must be at least a millisecond and finite, got {ttl_s}")
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
        read = self.get_leading([key], ranges, [into])
        try:
            if read.error is not None:
                raise read.error
        finally:
            del read  # an error that its own frame holds keeps the buffers alive until a collection of garbage

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


class Question(NamedTuple):
    """A command, and how many bytes its answer may have."""

    command: tuple[Any, ...]
    num_bytes: int


class RedisServer:
    """Questions to a server or a cluster, in pipelines, bounded in time. Thread-safe; connects when first asked.

    Args: as of `RedisTier`.
    """

    def __init__(self, url: str, *, cluster: bool, timeout_s: float, retries: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError(
                f"a Redis URL is redis://host:port/db or rediss://..., got scheme {parts.scheme!r} and host "
                f"{parts.hostname!r}"
            )
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        try:
            import redis
        except ImportError as missing:
            raise ImportError("the Redis tier needs redis-py: pip install 'lamella[redis]'") from missing
        if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
            raise ValueError(f"a Redis URL ends with the number of a database, got {parts.path!r}")
        try:
            redis.ConnectionPool.from_url(url).make_connection()  # knows the options; connects to nothing
        except (TypeError, ValueError) as unknown:
            raise ValueError(
                f"the URL's options for {parts.hostname} must be redis-py's, those of TLS behind rediss://: {unknown}"
            ) from None
        for option, path in parse_qsl(parts.query):
            if option in _TLS_FILES and not Path(path).exists():
                raise ValueError(f"{option} in the URL for {parts.hostname} names {path}, which is not there")
        self._redis = redis
        self.name = f"redis:{parts.hostname}:{parts.port or 6379}{parts.path.rstrip('/')}"
        self._url = url
        self._cluster = cluster
        self._wait_s = max(0.001, timeout_s / (2 * (retries + 1)) - _BACKOFF_S[1] / 2)  # to connect, and to be answered
        self._retries = retries
        self._lock = threading.Lock()
        self._client: Any = None

    def ask(self, questions: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers, in order; one round trip to each node.

        Raises:
            TierError: not answered in time, refused, or an answer is an error.
        """
        if not questions:
            return []
        with self._said():
            client = self._connected()
            if len(questions) == 1:
                return [client.execute_command(*questions[0])]
            pipeline = client.pipeline(**({} if self._cluster else {"transaction": False}))
            try:
                for question in questions:
                    pipeline.execute_command(*question)
                return list(pipeline.execute())
            finally:
                pipeline.reset()

    def ask_in_turn(self, questions: Iterable[Question]) -> Iterator[Any]:
        """The answers, in order; the next questions are under way before the answers to the last ones are taken.

        A node of a cluster is asked in whole pipelines instead, since the client alone knows which node that is.

        Raises:
            TierError: as `ask`.
        """
        if self._cluster:
            yield from self._ask_in_batches(questions)
            return
        with self._said():
            stream = _AnswerStream(self._connected())
        try:
            for question in questions:
                stream.add(question)
                while stream.is_full:
                    with self._said():
                        answer = stream.next()
                    yield answer
                    del answer  # its memory serves the next one
            while stream.waiting:
                with self._said():
                    answer = stream.next()
                yield answer
                del answer
        finally:
            stream.close()

    def _ask_in_batches(self, questions: Iterable[Question]) -> Iterator[Any]:
        batch: list[tuple[Any, ...]] = []
        num_bytes = 0
        for question in questions:
            if batch and num_bytes + question.num_bytes > _AHEAD_BYTES // 2:
                yield from self.ask(batch)
                batch, num_bytes = [], 0
            batch.append(question.command)
            num_bytes += question.num_bytes
        yield from self.ask(batch)

    def scan(self, pattern: str) -> Iterator[bytes]:
        """Every key that matches, over all nodes.

        Raises:
            TierError: as `ask`.
        """
        with self._said():
            yield from self._connected().scan_iter(match=pattern, count=1000)

    def close(self) -> None:
        """The connections are closed; the next question opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                from redis.backoff import ExponentialWithJitterBackoff
                from redis.retry import Retry

                kind = self._redis.RedisCluster if self._cluster else self._redis.Redis
                self._client = kind.from_url(
                    self._url,
                    socket_timeout=self._wait_s,
                    socket_connect_timeout=self._wait_s,
                    retry=Retry(ExponentialWithJitterBackoff(base=_BACKOFF_S[0], cap=_BACKOFF_S[1]), self._retries),
                )
            return self._client

    @contextmanager
    def _said(self) -> Iterator[None]:
        """Whatever the client raises becomes a TierError that names the server."""
        exceptions = self._redis.exceptions
        try:
            yield
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as refused:
            reason = str(refused).splitlines()[0] if str(refused) else type(refused).__name__
            raise TierError(f"{self.name} does not serve: {reason}") from refused


class _AnswerStream:
    """Questions and answers on one connection of the pool, some ahead; a lost connection is asked again what it owes.

    Args:
        client: whose pool and whose rule of retries.
    """

    def __init__(self, client: Any) -> None:
        self._pool = client.connection_pool
        self._connection: Any = self._pool.get_connection()
        self.waiting: deque[Question] = deque()
        self._sent = 0  # of `waiting`, on the connection as it is now
        self._bytes = 0
        self._unsent_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether an answer is to be taken before the next question; never while it is the only one, however long."""
        return len(self.waiting) > 1 and self._bytes >= _AHEAD_BYTES

    def add(self, question: Question) -> None:
        """To be asked, in its turn."""
        self.waiting.append(question)
        self._bytes += question.num_bytes
        self._unsent_bytes += question.num_bytes

    def next(self) -> Any:
        """The answer to the oldest question.

        Raises:
            RedisError: its answer is an error, or none came in time and the retries are used up.
        """
        answer = self._connection.retry.call_with_retry(self._answer, self._lose)
        self._bytes -= self.waiting.popleft().num_bytes
        self._sent -= 1
        return answer

    def close(self) -> None:
        """The connection is the pool's again; with answers outstanding it is cut, since they would be somebody's."""
        if self._sent:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def _answer(self) -> Any:
        is_due = self._unsent_bytes >= _AHEAD_BYTES // 2 or not self.is_full  # not full: no question will follow
        if not self._sent or (is_due and self._sent < len(self.waiting)):
            unsent = itertools.islice(self.waiting, self._sent, None)
            packed = self._connection.pack_commands([question.command for question in unsent])
            self._connection.send_packed_command(packed)
            self._sent, self._unsent_bytes = len(self.waiting), 0
        return self._connection.read_response()

    def _lose(self, _error: Exception) -> None:
        self._connection.disconnect()
        self._sent = 0
