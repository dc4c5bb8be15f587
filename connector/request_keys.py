"""Chunk keys of an engine's requests, made once and continued as tokens come."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lamella.reference.keys import ChunkKey, KeySpace, chunk_keys

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Chain:
    space: KeySpace
    keys: list[ChunkKey] = field(default_factory=list)


class RequestKeys:
    """The chains of the requests an engine knows.

    Args:
        space: what decides an object's bytes beside the tokens and the tenant; the same for every rank.
    """

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self._chains: dict[str, _Chain] = {}
        self._outdated: set[str] = set()  # requests that were under way when keys were renewed

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self._space.chunk_tokens

    def keys(self, request: Any, num_tokens: int) -> tuple[ChunkKey, ...]:
        """Keys of the full chunks among the request's first `num_tokens` tokens; none if it cannot be cached.

        Tenants (`cache_salt`) and adapters (LoRA) have key spaces of their own. A prompt that is not tokens alone
        (images, embeddings) has no keys: its KV does not follow from its token ids.
        """
        if not self.has_keys(request):
            return ()
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = _Chain(self._space_of(request))
        size = self.chunk_tokens
        wanted = min(num_tokens, len(request.all_token_ids)) // size
        if wanted > len(chain.keys):
            fresh: Sequence[int] = request.all_token_ids[len(chain.keys) * size : wanted * size]
            chain.keys += chunk_keys(chain.space, fresh, after=chain.keys[-1] if chain.keys else None)
        return tuple(chain.keys[:wanted])

    def has_keys(self, request: Any) -> bool:
        """Whether the request can be cached; why not is said once."""
        if request.request_id in self._outdated:
            return False
        reason = _why_uncacheable(request)
        if reason:
            _say_once(reason)
        return not reason

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._chains.pop(request_id, None)
        self._outdated.discard(request_id)

    def renew(self) -> None:
        """No key that was ever given is given again, here or by another engine: the same tokens may be other KV now.

        Requests under way have no keys any more, since part of their KV may have been computed before.
        """
        self._space = _salted(self._space, secrets.token_bytes(16))
        self._outdated.update(self._chains)
        self._chains.clear()

    def _space_of(self, request: Any) -> KeySpace:
        salt, adapter = getattr(request, "cache_salt", None), getattr(request, "lora_request", None)
        space = self._space
        if salt:
            space = _salted(space, str(salt).encode(errors="surrogatepass"))
        if adapter is not None:
            space = replace(space, model=f"{space.model} adapter {adapter.lora_name!r} at {adapter.lora_path!r}")
        return space


def _salted(space: KeySpace, salt: bytes) -> KeySpace:
    """The space within `space` that this salt alone gives."""
    return replace(space, salt=b"%d:%b" % (len(space.salt), space.salt) + salt)


def _why_uncacheable(request: Any) -> str | None:
    if getattr(request, "mm_features", None):
        return "prompts with images or other media are not cached: their KV does not follow from token ids"
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompts given as embeddings are not cached: their KV does not follow from token ids"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling requests are not cached: they are computed anew"
    return None


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("%s", reason)
