"""A door for peers of other hosts: TCP, and only with keys (SRV-5).

The server has a key pair, every client its own, and the server a folder with the public keys that it lets in; a peer
with another key, or none, gets no connection. Keys are made by `zmq.auth.create_certificates`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from lamella.server.endpoint import CurveKeys

_DOMAIN: Final = "lamella"


@dataclass(frozen=True, slots=True)
class TcpDoor:
    """Where to listen, and for whom.

    Args:
        address: such as `tcp://0.0.0.0:5570`.
        keys: of the server.
        clients: folder of the public keys (`*.key`) that are let in; read when the door opens.

    Raises:
        ValueError: no TCP address, or no such folder.
    """

    address: str
    keys: CurveKeys
    clients: Path

    def __post_init__(self) -> None:
        if not self.address.startswith("tcp://"):
            raise ValueError(f"an address of other hosts begins with tcp://, got {self.address!r}")
        if not self.clients.is_dir():
            raise ValueError(f"there is no folder {self.clients} of clients' public keys")

    def open(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> Callable[[], None]:
        """The socket listens there; the function that is returned ends the check of keys."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        try:
            authenticator.configure_curve(domain=_DOMAIN, location=self.clients)
            socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
            socket.curve_server = True
            socket.bind(self.address)
        except BaseException:
            authenticator.stop()
            raise
        return authenticator.stop
