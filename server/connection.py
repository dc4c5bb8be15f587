"""One socket to the cache server: requests out, answers back, every wait bounded (SAFE-5)."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import zmq

from lamella.server.endpoint import CurveKeys, check_folder, ipc_endpoint
from lamella.server.frames import RefusedError, decode_answer, encode, number_of
from lamella.server.protocol import KIND_OF, PROTOCOL, Message
from lamella.server.wire import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", bound=Message)
_LOOK_S: Final = 0.05
"""How often one who waits looks whether there still is a connection; a server needs longer to start anew."""


class ServerLostError(RuntimeError):
    """The server is not there, does not answer in time, or does not know the session (any more)."""


class Connection:
    """One socket to the server. Thread-safe; a call that waits holds others up, so give each thread its own.

    Args:
        where: the server's folder, or a `tcp://` address with `keys`.
        keys: of this client and of the server, for TCP.
        timeout_s: bound of each call.
        context: to share one; by default the connection's own.

    Raises:
        FileNotFoundError, PermissionError: no server's folder, or another user's.
        ValueError: TCP without keys.
    """

    def __init__(
        self,
        where: Path | str,
        *,
        keys: CurveKeys | None = None,
        timeout_s: float = 2.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        if isinstance(where, Path):
            check_folder(where)
            address = ipc_endpoint(where)
        elif keys is None or not keys.server:
            raise ValueError(f"{where}: TCP needs this client's keys and the server's public key")
        else:
            address = where
        self.timeout_s = timeout_s
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[type[Message], Future[Any]]] = {}
        self._was_connected = False
        self._given_up = ""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a server that may be another by then
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms, always: a server that is back is found at once
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
                keys.public,
                keys.secret,
                keys.server,
            )
        socket.connect(address)
        self._socket: zmq.Socket[bytes] = socket

    def request(self, message: Message) -> Future[Any]:
        """The message is on its way; the future has the answer, or RefusedError, at a later `poll` or `call`.

        Raises:
            ServerLostError: there is no connection.
            ValueError: a message too large for a frame.
        """
        answer = PROTOCOL[KIND_OF[type(message)]].answer
        with self._lock:
            if self._socket.closed:
                raise ServerLostError("this connection is closed")
            number = next(self._numbers)
            frame = encode(number, message)
            if not self._send(frame):
                # Once there was a server, waiting for the next one is not this call's business.
                deadline = time.monotonic() + (0.0 if self._was_connected else self.timeout_s)
                while not (self._ready(zmq.POLLOUT, self._slice_ms(deadline)) and self._send(frame)):
                    if self._given_up or time.monotonic() >= deadline:
                        raise ServerLostError(self._given_up or "no server answers there")
            self._was_connected = True
            future: Future[Any] = Future()
            self._open[number] = (answer, future)
            return future

    def _send(self, frame: bytes) -> bool:
        """Whether there is a connection, on which the frame is on its way now."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as refused:
            raise ServerLostError(f"the message cannot be sent: {refused}") from None
        return True

    def _ready(self, event: int, wait_ms: int) -> bool:
        """Whether the socket has the event, now or within so many milliseconds; without a `Poller` for each look."""
        return bool(zmq.zmq_poll([(self._socket, event)], wait_ms))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Answers that have come are in their futures; waits for one if none has."""
        with self._lock:
            if self._socket.closed:
                return
            wait_ms = int(timeout_s * 1000)
            while self._ready(zmq.POLLIN, wait_ms):
                self._take(self._socket.recv_multipart())
                wait_ms = 0

    def call(
        self,
        message: Message,
        answer: type[_Answer],
        timeout_s: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> _Answer:
        """The answer to a message.

        Args:
            message: what is asked.
            answer: what is expected.
            timeout_s: bound of this call; None: the connection's.
            meanwhile: called once, while the answer is on its way.

        Raises:
            ServerLostError: none within the bound.
            RefusedError: the server refused.
        """
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + bound_s
        with self._lock:
            future = self.request(message)
            if meanwhile is not None:
                meanwhile()
            while not future.done():
                self.poll(self._slice_ms(deadline) / 1000)
                if future.done():
                    break
                given_up = self._given_up or ("" if self._ready(zmq.POLLOUT, 0) else "the connection was cut")
                if given_up or time.monotonic() >= deadline:
                    self.poll()  # it may have come just before
                    if future.done():
                        break
                    self.forget(future)
                    reason = given_up or f"none within {bound_s} s"
                    raise ServerLostError(f"no answer to {type(message).__name__}: {reason}")
        found = future.result()
        assert isinstance(found, answer), "answers are decoded as what the protocol says"
        return found

    def give_up(self, reason: str) -> None:
        """Who waits here does so no longer, for this reason. From any thread, and for good: make another connection."""
        self._given_up = reason

    def _slice_ms(self, deadline: float) -> int:
        return int(min(max(deadline - time.monotonic(), 0.0), _LOOK_S) * 1000)

    def forget(self, future: Future[Any]) -> None:
        """The answer is not wanted any more; one that still comes is dropped."""
        with self._lock:
            for number, (_answer, found) in list(self._open.items()):
                if found is future:
                    del self._open[number]
        future.cancel()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.closed

    @property
    def num_open(self) -> int:
        """Requests without an answer."""
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """The socket is closed; what was not answered fails. A second call does nothing."""
        with self._lock:
            self._socket.close()
            for _answer, future in self._open.values():
                future.set_exception(ServerLostError("this connection was closed"))
            self._open.clear()
            if self._own_context:
                self._context.term()

    def _take(self, frames: list[bytes]) -> None:
        try:
            number = number_of(frames)
        except RefusedError as wrong:
            _answer, asked = self._open.pop(wrong.number, (None, None))
            if asked is not None:  # of another version, which is told to whoever waits
                asked.set_exception(wrong)
            else:
                _log.warning("an answer cannot be read: %s", wrong)
            return
        answer, future = self._open.pop(number, (None, None))
        if answer is None or future is None:
            return  # its caller has given up
        try:
            future.set_result(decode_answer(frames, answer)[1])
        except RefusedError as refused:
            future.set_exception(refused)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
