"""`/metrics` and `/healthz` over HTTP, on a thread that only reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class StatusPages:
    """Served until `close`.

    Args:
        host, port: where; port 0 takes a free one.
        metrics: the page of figures.
        health: (whether it serves, one line about it).

    Raises:
        OSError: the address is taken or not to be had.
    """

    def __init__(
        self, host: str, port: int, metrics: Callable[[], str], health: Callable[[], tuple[bool, str]]
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._send(200, metrics())
                elif self.path == "/healthz":
                    serves, line = health()
                    self._send(200 if serves else 503, line + "\n")
                else:
                    self._send(404, "/metrics and /healthz\n")

            def _send(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", _TEXT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                """Scrapes are not worth a line each."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A scraper that went away is not the server's trouble."""

        try:
            self._server = Server((host, port), Handler)
        except OSError as refused:
            raise OSError(refused.errno, f"{host}:{port} cannot be served: {refused.strerror}") from None
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="lamella-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is served any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
