"""The four calls of a layerwise step, as an engine's model runner makes them.

    start_load_kv ─► for each layer: wait_for_layer_load ─► attention ─► save_kv_layer ─► ... ─► wait_for_save
    setup, layer 0   next layer on its way, this one awaited    this layer on its way            finished, cleaned up

Every request of the batch has a retriever and a storer; a layer advances all of them. The last request that loads makes
the compute stream wait for loads, the first that stores makes the store stream wait for what was computed.

A load that comes short is known in the same step (`failed_loads`): what was computed on it is wrong, so nothing of that
request is stored, and the caller computes the tokens again. A model that skips a call of a layer is found out (SAFE-4).

Source: names and order of the calls are those of vLLM's connector interface, and what happens in each those of LMCache.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lamella.connector.cache_engine import CacheEngine, Mask, RetrieveYield


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request of a step.

    Args:
        request_id: unique in the step.
        tokens: the sequence from its first token to the last one that this step computes.
        block_ids: the block table of each kernel group.
        num_computed_tokens: leading tokens whose KV the engine has.
        num_matched_tokens: tokens behind those that this step loads, as `CacheEngine.num_new_matched_tokens` said.
        save: whether the step's KV is stored.
        tenant: whose objects; None: the key space's.

    Raises:
        ValueError: counts that are negative or go beyond the tokens.
    """

    request_id: str
    tokens: Sequence[int]
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int = 0
    num_matched_tokens: int = 0
    save: bool = True
    tenant: bytes | None = None

    def __post_init__(self) -> None:
        for name in ("num_computed_tokens", "num_matched_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.loaded_tokens > len(self.tokens):
            raise ValueError(
                f"{self.num_computed_tokens} computed and {self.num_matched_tokens} matched tokens are more than the "
                f"sequence's {len(self.tokens)}"
            )

    @property
    def loaded_tokens(self) -> int:
        """Leading tokens whose KV is there before this step computes."""
        return self.num_computed_tokens + self.num_matched_tokens


class StepReport(NamedTuple):
    """What a step did, by request id."""

    loaded: dict[str, int]
    """Tokens that were loaded, of requests that had some to load."""
    failed: dict[str, int]
    """First token that cannot be relied on, of requests whose load came short: compute from there again."""
    stored: dict[str, int]
    """Tokens whose objects are new, of requests that were to be saved."""


class _Retriever:
    """One request's load in this step."""

    def __init__(self, request: StepRequest, generator: Generator[RetrieveYield, None, None]) -> None:
        self.request = request
        self.generator = generator
        self.num_tokens = request.num_matched_tokens
        self.ended = False

    def advance(self) -> None:
        """One yield further."""
        found = next(self.generator)
        self.ended = isinstance(found, np.ndarray)
        self.num_tokens = int(found.sum()) if isinstance(found, np.ndarray) else found

    @property
    def came_short(self) -> bool:
        """Whether less came than the step counts on."""
        return self.num_tokens < self.request.num_matched_tokens


class LayerwiseHooks:
    """The calls of a step, over one cache engine. For the thread that runs the model.

    Args:
        cache_engine: loads and stores.
    """

    def __init__(self, cache_engine: CacheEngine) -> None:
        self._engine = cache_engine
        self._open = False
        self._requests: tuple[StepRequest, ...] = ()
        self._retrievers: list[_Retriever] = []
        self._storers: dict[str, Generator[int, None, None]] = {}
        self._waited = self._saved = 0  # layers

    def start_load_kv(self, requests: Sequence[StepRequest]) -> None:
        """The step begins: each load is set up and its layer 0 on its way. Called before the forward pass.

        Raises:
            ValueError: what `CacheEngine.retrieve_layer` refuses, or a request id named twice.
            RuntimeError: `wait_for_save` or `abort` was not called for the step before.
        """
        if self._open:
            raise RuntimeError("the step before is still open: call wait_for_save() or abort() first")
        if len({request.request_id for request in requests}) != len(requests):
            raise ValueError(f"request ids must be unique in a step, got {[one.request_id for one in requests]}")
        self._requests, self._open = tuple(requests), True
        loading = [request for request in requests if request.num_matched_tokens]
        try:
            for request in loading:
                last = request is loading[-1]
                self._retrievers.append(_Retriever(request, self._retrieve(request, sync=last)))
            for _ in range(2):  # setup of all, then layer 0 of all
                for retriever in self._retrievers:
                    retriever.advance()
        except BaseException:
            self.abort()
            raise

    def wait_for_layer_load(self, layer: int) -> None:
        """The compute stream goes on once `layer` has landed for every load; the next layer is on its way.

        Called in each layer before its attention, bounded by the connector's time-out. It does not raise for a load
        that fails: see `failed_loads`.

        Raises:
            RuntimeError: no open step, or not the next layer.
        """
        self._check(layer, self._waited, "start_load_kv")
        for retriever in self._retrievers:
            retriever.advance()
        self._waited += 1

    def save_kv_layer(self, layer: int) -> None:
        """`layer`, just computed, is on its way to host memory; the first layer takes room for all.

        Raises:
            RuntimeError: no open step, not the next layer, or a layer whose load was not waited for.
        """
        self._check(layer, self._saved, "start_load_kv")
        if self._retrievers and self._waited <= layer:
            raise RuntimeError(f"layer {layer} is saved before wait_for_layer_load({layer})")
        if layer == 0:
            failed = self.failed_loads()
            saving = [one for one in self._requests if one.save and one.request_id not in failed]
            for request in saving:
                self._storers[request.request_id] = self._store(request, sync=request is saving[0])
        for storer in self._storers.values():
            next(storer)
        self._saved += 1

    def failed_loads(self) -> dict[str, int]:
        """First token that cannot be relied on, for each load that came short so far in this step."""
        return {
            one.request.request_id: one.request.num_computed_tokens + one.num_tokens
            for one in self._retrievers
            if one.came_short
        }

    def wait_for_save(self) -> StepReport:
        """The step ends: stores have landed and can be found, and nothing of the step is held or moves any more.

        Loads whose layers were not all waited for have failed wholly: the model read layers that had perhaps not
        landed.

        Raises:
            RuntimeError: no open step.
        """
        if not self._open:
            raise RuntimeError("no step is open: call start_load_kv() first")
        try:
            for retriever in self._retrievers:
                if retriever.ended:
                    next(retriever.generator, None)
                else:
                    retriever.num_tokens = 0
            failed = self.failed_loads()
            for request_id in failed:
                self._close_storer(request_id)
            whole = self._saved == self._engine.num_layers
            stored = {one.request_id: 0 for one in self._requests if one.save}
            for request_id, storer in self._storers.items():
                if whole:
                    stored[request_id] = next(storer)
            loaded = {one.request.request_id: one.num_tokens for one in self._retrievers}
            if self._retrievers and not failed:  # landed, but their objects are let go by the engine's own thread
                self._engine.let_go_of_loads()
            return StepReport(loaded, failed, stored)
        finally:
            self.abort()

    def abort(self) -> None:
        """The step is over, whatever was reached: nothing of it moves or is held. Does nothing without an open step."""
        for retriever in self._retrievers:
            retriever.generator.close()
        for request_id in tuple(self._storers):
            self._close_storer(request_id)
        self._requests, self._open = (), False
        self._retrievers, self._storers = [], {}
        self._waited = self._saved = 0

    def _retrieve(self, request: StepRequest, *, sync: bool) -> Generator[RetrieveYield, None, None]:
        mask: Mask = np.zeros(len(request.tokens), dtype=np.bool_)
        mask[request.num_computed_tokens : request.loaded_tokens] = True
        return self._engine.retrieve_layer(request.tokens, request.block_ids, mask, tenant=request.tenant, sync=sync)

    def _store(self, request: StepRequest, *, sync: bool) -> Generator[int, None, None]:
        mask: Mask = np.ones(len(request.tokens), dtype=np.bool_)
        if request.num_matched_tokens:  # the cache holds everything up to here
            mask[: request.loaded_tokens] = False
        return self._engine.store_layer(request.tokens, request.block_ids, mask, tenant=request.tenant, sync=sync)

    def _close_storer(self, request_id: str) -> None:
        storer = self._storers.pop(request_id, None)
        if storer is not None:
            storer.close()

    def _check(self, layer: int, expected: int, missing: str) -> None:
        if not self._open:
            raise RuntimeError(f"no step is open: call {missing}() first")
        if layer != expected or layer >= self._engine.num_layers:
            raise RuntimeError(f"layers come in order, each once: layer {expected} is next, got {layer}")
