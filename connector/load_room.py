"""Whether one more load may be in flight, and whom that makes wait: nobody for ever, and at little cost a step.

An engine asks for every request in its queue, step after step. One that waits for room is not looked up and weighed
anew before there is some: with hundreds that wait, that would take longer than the step. Small loads find room where a
large one does not, and go ahead of it, but only so many: then all wait until it has begun, or loads come one at a time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lamella.connector.connector_metrics import Metrics
from lamella.connector.loads import WorkBook
from lamella.connector.vllm_settings import ConnectorSettings

_GIB: Final = 1 << 30


class _Waiting(NamedTuple):
    """What a request asked for, and how many loads had begun when it first did."""

    local_hit: int
    num_tokens: int
    since: int


class LoadRoom:
    """See the module. On the scheduler's thread.

    Args:
        settings: the connector's.
        token_bytes: of a token on one rank.
        book: loads in flight.
        metrics: counts.
    """

    def __init__(self, settings: ConnectorSettings, token_bytes: int, book: WorkBook, metrics: Metrics) -> None:
        self._most_loads = settings.max_loads
        self._most_bytes = settings.max_load_gib * _GIB
        self._token_bytes = token_bytes
        self._book = book
        self._metrics = metrics
        self._waiting: dict[str, _Waiting] = {}  # in the order in which they began to wait
        self._num_begun = 0

    def is_refused_again(self, request: str, local_hit: int) -> bool:
        """Whether a request that was refused room, and of which the engine has no more than then, is so again."""
        waiting = self._waiting.get(request)
        return waiting is not None and waiting.local_hit == local_hit and self._has_none(request, waiting.num_tokens)

    def is_refused(self, request: str, local_hit: int, num_tokens: int) -> bool:
        """Whether the request must wait until other loads have ended."""
        if not self._has_none(request, num_tokens):
            return False
        before = self._waiting.get(request)
        self._waiting[request] = _Waiting(local_hit, num_tokens, self._num_begun if before is None else before.since)
        return True

    def _has_none(self, request: str, num_tokens: int) -> bool:
        loads = self._book.open_loads()
        if not loads:
            return False
        num_bytes = sum(work.num_bytes for work in loads) + num_tokens * self._token_bytes
        if len(loads) < self._most_loads and num_bytes <= self._most_bytes and not self._is_behind(request):
            return False
        self._metrics.count("bound_waits")
        return True

    def _is_behind(self, request: str) -> bool:
        """Whether another has waited for so long that nobody goes ahead of it any more."""
        first = next(iter(self._waiting), request)
        return first != request and self._num_begun - self._waiting[first].since >= self._most_loads

    def begun(self, request: str) -> None:
        """The request's load is in flight."""
        self._num_begun += 1
        self.forget(request)

    def forget(self, request: str) -> None:
        """The request waits for no room: it is gone, or has nothing to load."""
        self._waiting.pop(request, None)
