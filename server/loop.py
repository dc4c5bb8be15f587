"""The server's loop: frames in, answers out, and nothing that waits for anything else.

One thread runs every rule (`CacheService`), so that no rule needs a lock. What takes long runs elsewhere and is brought
back by `later`: a queue and an event descriptor that wakes the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import zmq

from lamella.server.endpoint import SOCKET, ServerLock, ipc_endpoint, make_folder, reclaim_marks
from lamella.server.frames import RefusedError, decode_request, encode, encode_refusal
from lamella.server.handlers import Peer
from lamella.server.mover import Movement
from lamella.server.protocol import Message
from lamella.server.service import CacheService
from lamella.server.settings import ServerSettings
from lamella.server.tcp import TcpDoor
from lamella.server.wire import MAX_MESSAGE_BYTES, Code

_log = logging.getLogger(__name__)
_TICK_S: Final = 0.25
_SWEEP_S: Final = 1.0
_LAST_ANSWERS_NS: Final = 300_000_000
"""A peer takes in its last answer before it sees the connection end: libzmq drops what was not read by then."""
_BURST: Final = 64
"""Messages of one socket before the others have a turn."""


class CacheServer:
    """A server on its folder's socket and, if asked for, on TCP. `run` serves until `stop`.

    Args:
        settings: the server's.
        tcp: a door for peers of other hosts.
        movement: as `CacheService`.

    Raises:
        RuntimeError: another server has the folder.
        PermissionError, OSError, ValueError: the folder or an address cannot be used.
    """

    def __init__(
        self, settings: ServerSettings, *, tcp: TcpDoor | None = None, movement: Movement | None = None
    ) -> None:
        self.settings = settings
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_lock = threading.RLock()  # a signal comes between any two steps of its holder
        self._opened = contextlib.ExitStack()
        self._stop_after_ns: int | None = None
        self._idle_since_ns: int | None = None
        self.lost_folder = False
        """Whether it stopped because its folder was removed, in which alone it can be found."""
        address = ipc_endpoint(settings.folder)  # before the folder is made, so that a path too long leaves none
        with contextlib.ExitStack() as opened:
            make_folder(settings.folder)
            self._folder = settings.folder.stat()
            opened.callback(ServerLock(settings.folder).close)
            reclaim_marks(settings.folder)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(self._close_wake)
            self.service = CacheService(settings, self._later, movement=movement)
            opened.callback(self.service.close, settings.drain_s)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            opened.callback(context.term)
            self._local = _socket(context)
            opened.callback(self._local.close)
            _admit_own_user(self._local)
            self._local.bind(address)
            opened.callback(self._remove_socket)
            self._sockets = {self._local: Peer(is_local=True)}
            if tcp is not None:
                remote = _socket(context)
                opened.callback(remote.close)
                opened.callback(tcp.open(context, remote))
                self._sockets[remote] = Peer(is_local=False)
            self._opened = opened.pop_all()

    # ---- any thread

    def stop(self) -> None:
        """The server drains and then `run` returns; called a second time, it returns without waiting further."""
        self._later(self._begin_stop)

    def health(self) -> tuple[bool, str]:
        """Whether new requests are served, and a line about it."""
        return (False, "draining") if self.service.draining else (True, "serving")

    def metrics(self) -> str:
        """The page of figures."""
        return self.service.metrics.text(self.service.places.all())

    def _later(self, job: Callable[[], None]) -> None:
        self._queue.put(job)
        with self._wake_lock:
            if self._wake >= 0:  # otherwise it is closed, and nobody is left to run the job
                os.eventfd_write(self._wake, 1)

    def _close_wake(self) -> None:
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    # ---- the loop's thread

    def run(self) -> None:
        """Serves until stopped, or its folder is gone, and drained; then closes everything."""
        try:
            poller = zmq.Poller()
            for socket in self._sockets:
                poller.register(socket, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            next_tick = next_sweep = time.monotonic()
            while not self._may_return():
                now = time.monotonic()
                if now >= next_tick:
                    self._look_for_folder()  # before anything that the marks in it say of clients
                    self.service.tick()
                    next_tick = now + _TICK_S
                    if now >= next_sweep:
                        self.service.sweep()
                        next_sweep = now + _SWEEP_S
                ready = dict(poller.poll(max(1, int((next_tick - now) * 1000))))
                self._run_jobs()
                for socket in self._sockets:
                    if socket in ready:
                        self._receive(socket)
        finally:
            self.close()

    def close(self) -> None:
        """Sockets, memory and the folder are let go of. A second call does nothing."""
        self._opened.close()

    def _has_folder(self) -> bool:
        try:
            return os.path.samestat(self._folder, self.settings.folder.stat())
        except FileNotFoundError:
            return False

    def _remove_socket(self) -> None:
        if self._has_folder():  # in another of that name it is another server's
            (self.settings.folder / SOCKET).unlink(missing_ok=True)

    def _look_for_folder(self) -> None:
        if not self.lost_folder and not self._has_folder():
            self.lost_folder = True
            _log.error(
                "the folder %s was removed, so that no engine finds this server: it stops; start it again, in a folder "
                "that nothing cleans",
                self.settings.folder,
            )
            if self._stop_after_ns is None:
                self._begin_stop()

    def _begin_stop(self) -> None:
        if self._stop_after_ns is None:
            _log.info("draining: no new work is taken")
            self.service.drain()
            self._stop_after_ns = time.monotonic_ns() + int(self.settings.drain_s * 1e9)
        else:
            self._stop_after_ns = 0

    def _may_return(self) -> bool:
        if self._stop_after_ns is None:
            return False
        now_ns = time.monotonic_ns()
        if not self.service.lending.is_idle:
            self._idle_since_ns = None
        elif self._idle_since_ns is None:
            self._idle_since_ns = now_ns
        elif now_ns - self._idle_since_ns > _LAST_ANSWERS_NS:
            return True
        if now_ns < self._stop_after_ns:
            return False
        if self._idle_since_ns is None:
            _log.warning("stopping with transfers under way: their peers will find their leases gone")
        return True

    def _run_jobs(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                try:
                    job()
                except Exception:  # one peer's trouble is not the others'
                    _log.exception("something that had ended could not be settled")

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _turn in range(_BURST):
            try:
                identity, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(socket, identity, frames)

    def _answer(self, socket: zmq.Socket[bytes], identity: bytes, frames: list[bytes]) -> None:
        began_ns = time.perf_counter_ns()
        try:
            request = decode_request(frames)
        except RefusedError as refused:
            self._refuse(socket, identity, refused)
            return
        kind, number = request.kind, request.number
        try:
            answer = self.service.handlers.answer(request, self._sockets[socket])
        except Exception as error:
            self._fail(socket, identity, error, number)
            return
        if isinstance(answer, Future):
            answer.add_done_callback(
                lambda done: self._later(lambda: self._settle(socket, identity, number, kind, done.result))
            )
        else:
            self._settle(socket, identity, number, kind, lambda: answer)
        self.service.metrics.answered(kind, time.perf_counter_ns() - began_ns)  # while the answer is on its way

    def _settle(
        self, socket: zmq.Socket[bytes], identity: bytes, number: int, kind: int, answer: Callable[[], Message]
    ) -> None:
        try:
            self._send(socket, identity, encode(number, answer(), kind))
        except Exception as error:  # also an answer that is too large for a frame
            self._fail(socket, identity, error, number)

    def _fail(self, socket: zmq.Socket[bytes], identity: bytes, error: Exception, number: int) -> None:
        """One peer's request is refused; whatever was wrong with it, the others are served."""
        if not isinstance(error, RefusedError):
            _log.error("a request could not be answered", exc_info=error)
            error = RefusedError(Code.INTERNAL, f"the server failed: {error!r}")
        self._refuse(socket, identity, error, number)

    def _refuse(
        self, socket: zmq.Socket[bytes], identity: bytes, refused: RefusedError, number: int | None = None
    ) -> None:
        """As `encode_refusal`."""
        self._send(socket, identity, encode_refusal(refused, number))
        self.service.metrics.refusals.labels(refused.code.value).inc()

    @staticmethod
    def _send(socket: zmq.Socket[bytes], identity: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a peer that is gone, or takes nothing any more
            socket.send_multipart([identity, frame], zmq.NOBLOCK)


def _socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.linger = 500
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    return socket


def _admit_own_user(socket: zmq.Socket[bytes]) -> None:
    """The kernel's word on the peer's user is asked at each connection (SRV-5).

    Raises:
        OSError: this build of libzmq cannot ask.
    """
    try:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    except zmq.ZMQError as refused:
        raise OSError(
            refused.errno, f"libzmq {zmq.zmq_version()} does not check the peers' user: install another pyzmq"
        ) from None
