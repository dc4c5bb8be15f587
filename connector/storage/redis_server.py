"""A Redis or Valkey server, or a cluster of them: questions in pipelines, bounded in time, some ahead of their answers.

What its objects are called and how they lie in values is `redis_tier`'s.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from lamella.connector.storage.tier import TierError, check_patience

_AHEAD_BYTES: Final = 1 << 20
"""Answers that are under way at once on one connection, two at least; half of them are asked for together.

Source: measured on the loopback with Redis 7.0 and hiredis (2026-11-29), ranges of 16 KiB .. 4 MiB: a server that works
on the next answers while this one is checked and copied gives 1.1 to 1.7 times what whole pipelines of 512 KiB gave;
2 MiB give no more, and a refill at every answer costs a third at 16 KiB. Answers of 2 MiB asked for one by one came to
0.8 times the client's own loop, two by two to 1.05 (least times: 0.87 and 1.24).
"""
_TLS_FILES: Final = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"})
_BACKOFF_S: Final = (0.02, 0.2)  # first and longest wait between attempts


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
        check_patience(timeout_s, retries)
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
