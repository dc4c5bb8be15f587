"""Which function answers which message, checked against the protocol when it is entered, not when a peer calls."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from lamella.server.frames import Request
from lamella.server.protocol import PROTOCOL, Message
from lamella.server.wire import Kind


class Peer(NamedTuple):
    """Where a message came from."""

    is_local: bool
    """Through the folder's socket: the peer is a process of this host and user."""


Answer = Message | Future[Any]
"""A future's result is the answer; its RefusedError the refusal."""
Handler = Callable[[Any, Peer], Answer]


class Handlers:
    """One handler a kind of message."""

    def __init__(self) -> None:
        self._handlers: Final[dict[Kind, Handler]] = {}

    def enter(self, kind: Kind, handler: Handler) -> None:
        """The handler answers this kind from now on.

        Raises:
            TypeError: its annotations are not what the protocol says of the kind; the message names both.
            RuntimeError: the kind has a handler.
        """
        wanted = PROTOCOL[kind]
        name = getattr(handler, "__qualname__", repr(handler))
        if kind in self._handlers:
            other = getattr(self._handlers[kind], "__qualname__", "another")
            raise RuntimeError(f"{kind.name} is answered by {other} already, so not by {name}")
        hints = typing.get_type_hints(handler)
        returned = hints.pop("return", None)
        parameters = list(inspect.signature(handler).parameters)
        taken = [hints.get(parameter) for parameter in parameters]
        allowed = (wanted.answer, wanted.answer | Future[wanted.answer], Future[wanted.answer])  # type: ignore[name-defined]
        if taken != [wanted.request, Peer] or returned not in allowed:
            raise TypeError(
                f"the protocol says that {kind.name} takes ({wanted.request.__name__}, Peer) and is answered by "
                f"{wanted.answer.__name__}; the handler {name} takes ({', '.join(map(_name, taken))}) and returns "
                f"{_name(returned)}"
            )
        self._handlers[kind] = handler

    def check_complete(self) -> None:
        """Every kind has a handler.

        Raises:
            RuntimeError: the kinds that have none.
        """
        missing = [kind.name for kind in Kind if kind not in self._handlers]
        if missing:
            raise RuntimeError(f"no handler answers {', '.join(missing)}")

    def answer(self, request: Request, peer: Peer) -> Answer:
        """What the kind's handler says.

        Raises:
            RefusedError: it refuses.
        """
        return self._handlers[request.kind](request.message, peer)


def _name(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation)) if isinstance(annotation, type) else str(annotation)
