"""Real servers on the loopback, each its test's own: Redis alone, with TLS, in a cluster; S3; and a bad wire."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

REDIS_MISSING = None if shutil.which("redis-server") else "redis-server is not installed (apt-get install redis-server)"
READY_S = 20.0
ENVIRONMENT = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}


def free_port() -> int:
    """A port of the loopback that nobody uses; below the ephemeral ones by 10000, for a cluster's bus beside it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        candidate = port - 20000 if port > 40000 else port
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", candidate))
            return candidate


class RedisProcess:
    """A redis-server that keeps nothing on disk unless told to; it can be killed, held still, and started again."""

    def __init__(self, folder: Path, port: int | None = None, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.port = free_port() if port is None else port
        self.options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Ready to accept connections."""
        self.folder.mkdir(exist_ok=True)
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = ["redis-server", *arguments, "--dir", str(self.folder), *self.options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        assert process.stdout is not None
        said = []
        watchdog = threading.Timer(READY_S, process.kill)
        watchdog.start()
        for line in process.stdout:  # ends with the process at the latest
            said.append(line)
            if b"eady to accept connections" in line:
                break
        watchdog.cancel()
        if process.poll() is not None:
            raise RuntimeError(b"".join(said).decode())
        self.cluster_is_up = threading.Event()
        self._reader = threading.Thread(target=self._read_on, args=(process.stdout,), daemon=True)
        self._reader.start()
        self._process = process

    def _read_on(self, output: IO[bytes]) -> None:
        for line in output:  # or the server would block on a full pipe
            if b"Cluster state changed: ok" in line:
                self.cluster_is_up.set()

    def kill(self) -> None:
        """As a crash: SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._reader.join()
            assert process.stdout is not None
            process.stdout.close()

    def hold(self) -> None:
        """It answers nothing any more, but its port is open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisProcess]:
    server = RedisProcess(folder, options=options)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def redis_cluster(folder: Path, nodes: int = 3) -> Iterator[list[RedisProcess]]:
    """Nodes that share the slots between them."""
    servers: list[RedisProcess] = []
    try:
        for node in range(nodes):
            servers.append(RedisProcess(folder / f"node-{node}", options=["--cluster-enabled", "yes"]))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        made = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60, check=False)
        assert made.returncode == 0, (made.stdout + made.stderr).decode()
        assert all(server.cluster_is_up.wait(READY_S) for server in servers)
        yield servers
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def s3_server(bucket: str = "kv-cache") -> Iterator[str]:
    """The address of an S3-compatible server in this process, with one bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")).close()
        urllib.request.urlopen(urllib.request.Request(f"{address}/{bucket}", method="PUT")).close()
        yield address
    finally:
        server.stop()


class Wire:
    """A TCP connection's way to a server, which can be cut, slowed, silenced, or made to lie.

    Faults hold for every connection until `mend`.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._closed = False
        self._due_s = 0.0  # when the wire has carried what it took
        self.cut_after: int | None = None
        """Answer bytes until the connection is cut."""
        self.silent = False
        """Answers are swallowed."""
        self.lie_at: int | None = None
        """Which of the answers' bytes is changed, counted from `mend`."""
        self.bytes_per_s: float | None = None
        self.answered = 0
        """Answer bytes passed on since `mend`."""
        threading.Thread(target=self._accept, daemon=True).start()

    def mend(self) -> None:
        self.cut_after = self.lie_at = self.bytes_per_s = None
        self.silent = False
        self.answered = 0

    def cut(self) -> None:
        """Every connection is cut now; new ones can be made."""
        with self._lock:
            sockets, self._open = self._open, []
        for one in sockets:
            _end(one)

    def close(self) -> None:
        self._closed = True
        _end(self._listener)
        self.cut()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), READY_S)
            except OSError:
                _end(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers:
                    data = self._spoil(data)
                    if data is None:
                        break
                target.sendall(data)
        if answers and self.silent:
            return  # not even the server's end is told
        _end(source)
        _end(target)

    def _spoil(self, data: bytes) -> Any:
        if self.silent:
            return b""
        if self.cut_after is not None and self.answered + len(data) > self.cut_after:
            return None
        if self.lie_at is not None and self.answered <= self.lie_at < self.answered + len(data):
            spoilt = bytearray(data)
            spoilt[self.lie_at - self.answered] ^= 0xFF
            data = bytes(spoilt)
        if self.bytes_per_s is not None:
            self._due_s = max(self._due_s, time.monotonic()) + len(data) / self.bytes_per_s
            time.sleep(max(0.0, self._due_s - time.monotonic()))
        self.answered += len(data)
        return data


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
