"""A real server process and strangers: bytes that are no message, another version, another user, another key."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
import zmq.auth

import lamella
from lamella.reference.keys import chunk_keys
from lamella.server.client import CacheSession
from lamella.server.connection import Connection, ServerLostError
from lamella.server.endpoint import CurveKeys, ipc_endpoint
from lamella.server.frames import RefusedError, decode_answer, encode
from lamella.server.protocol import Found, Ping, Pong, Registered, Role, Stats, StatsReport
from lamella.server.wire import HEADER, MAGIC, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Code, Kind
from server_driver import MISS, ServerProcess, figure, registration, server_process, space_of, tokens


def test_bytes_that_are_no_message_are_answered_and_the_server_goes_on(tidy_server: ServerProcess) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(ipc_endpoint(tidy_server.folder))
        for frames, code in (
            ([b"GET / HTTP/1.1\r\n\r\n"], Code.MALFORMED),
            ([b""], Code.MALFORMED),
            ([b"a", b"b", b"c"], Code.MALFORMED),
            ([HEADER.pack(MAGIC, PROTOCOL_VERSION + 1, Kind.PING, 3)], Code.VERSION),
            ([HEADER.pack(MAGIC, PROTOCOL_VERSION, 99, 3)], Code.UNKNOWN_KIND),
            ([HEADER.pack(MAGIC, PROTOCOL_VERSION, Kind.LOOKUP, 3) + os.urandom(5000)], Code.MALFORMED),
        ):
            socket.send_multipart(frames)
            assert socket.poll(5000)
            with pytest.raises(RefusedError) as refused:
                decode_answer(socket.recv_multipart(), Found)
            assert refused.value.code is code
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(ipc_endpoint(tidy_server.folder))
        socket.send(bytes(MAX_MESSAGE_BYTES + 1))  # libzmq closes the connection before it takes it in
        assert not socket.poll(300)
    assert figure(tidy_server, "lamella_server_refusals_total{code=malformed}") == 4


def test_another_version_is_refused_before_anything_else(tidy_server: ServerProcess) -> None:
    with pytest.raises(RefusedError, match=f"the server is lamella {lamella.__version__}, the client lamella 0.0.7"):
        CacheSession(tidy_server.folder, registration(lamella_version="0.0.7"))


def test_another_protocol_is_told_at_once_and_a_server_that_comes_back_with_one_is_a_miss(
    tidy_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = CacheSession(tidy_server.folder, registration(role=Role.SCHEDULER, alive=""), timeout_s=20.0)
    begun = time.monotonic()
    monkeypatch.setattr("lamella.server.frames.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    assert session.lookup(chunk_keys(space_of(), tokens(1))) == MISS
    assert session.is_lost
    with pytest.raises(RefusedError, match=f"protocol {PROTOCOL_VERSION + 1} .* the other protocol {PROTOCOL_VERSION}"):
        CacheSession(tidy_server.folder, registration(), timeout_s=20.0)
    assert time.monotonic() - begun < 10.0, "nobody waits for an answer that has come"
    monkeypatch.undo()
    session.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("opened", [False, True], ids=["closed folder", "opened folder"])
def test_another_user_cannot_connect_even_where_the_folder_was_opened_to_him(
    opened: bool, tidy_server: ServerProcess
) -> None:
    code = """
import os, sys
import zmq
from lamella.server.frames import encode
from lamella.server.protocol import Ping
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.linger = 0
    socket.connect(sys.argv[1])
    socket.send(encode(1, Ping(1, -1)))
    print("answered" if socket.poll(1500) else "not answered")
"""
    if opened:
        for path in tidy_server.folder.parents:
            if path.stat().st_uid == 0 and path != Path("/") and "pytest" in str(path):
                path.chmod(0o755)
        tidy_server.folder.chmod(0o755)
        (tidy_server.folder / "server.sock").chmod(0o777)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, ipc_endpoint(tidy_server.folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout == "not answered\n", done.stderr
    tidy_server.folder.chmod(0o700)
    assert figure(tidy_server, "lamella_server_sessions") == 0


def test_tcp_lets_in_whoever_has_a_key_that_is_known_and_nobody_else(tmp_path: Path) -> None:
    for name in ("server", "known", "stranger"):
        _public, secret = zmq.auth.create_certificates(tmp_path, name)
        os.chmod(secret, 0o600)
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "known.key").write_bytes((tmp_path / "known.key").read_bytes())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    options = ("--tcp", address, "--tcp-key", str(tmp_path / "server.key_secret"))
    with server_process(tmp_path, *options, "--tcp-clients", str(tmp_path / "clients")) as server:

        def keys(name: str) -> CurveKeys:
            return CurveKeys.load(tmp_path / f"{name}.key_secret", tmp_path / "server.key")

        with Connection(address, keys=keys("known"), timeout_s=15.0) as connection:
            registered = connection.call(registration(role=Role.SCHEDULER), Registered)
            assert connection.call(Ping(registered.session, -1), Pong).known
        with Connection(address, keys=keys("stranger"), timeout_s=1.0) as connection, pytest.raises(ServerLostError):
            connection.call(Stats(), StatsReport)
        with pytest.raises(ValueError, match="TCP needs this client's keys"):
            Connection(address)
        with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
            bare.linger = 0
            bare.connect(address)
            bare.send(encode(1, Ping(1, -1)))
            assert not bare.poll(1000), "without keys there is no connection"
        assert server.stop() == 0
