"""A real vLLM engine in this process, stepped by hand, whose connector can freeze a load between two layers."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lamella.connector.auto_choice import AutoChoice
from lamella.connector.observations import Observations, marks_of
from lamella.connector.safety_rules import ALL_RULES
from lamella.connector.slice_width import choose_width
from lamella.connector.step_forecast import forecast_if_needed
from lamella.connector.step_orders import LoadOrder
from lamella.connector.vllm import LamellaConnector
from lamella.connector.worker_loads import Load
from lamella.reference.slices import plan_slices
from with_vllm.answers import Answer, Tolerance, answer_of, tolerance_for
from with_vllm.engine_parts import EngineParts
from with_vllm.gates import NativeGate, SliceGate
from with_vllm.replays import HIT, OWN
from with_vllm.tiny_engine import BEFORE_BATCH, ON_GPU, make_llm, prompt, sampling

_BOUND_S = 60.0
_REST_S = 10.0


class LiveEngine(EngineParts):
    """See the module. With `paced`, a load's windows (a slice each) move only as `land` lets them.

    Attributes:
        broken: why it cannot be used any more, once something could not be ended; "" until then.
    """

    broken = ""

    def __init__(
        self, model: Path, extra: Mapping[str, Any], *, policy: str = "fail", paced: bool = False, **options: Any
    ) -> None:
        # one window in flight: the next is issued, and a planted fault met, when the one before has landed
        native = paced and not ON_GPU and os.environ.get("LAMELLA_TEST_GATE") != "slices"
        LamellaConnector._engine_options = {"paced": True, "in_flight_bytes": 1} if native else {}
        try:
            self.llm = make_llm(model, extra, policy=policy, **options)
        finally:
            LamellaConnector._engine_options = {}
        self.outputs: dict[str, Answer] = {}
        self._paced = paced
        if paced:
            self.gate = NativeGate(self.worker.engine) if native else SliceGate(self.worker.engine)
        if ON_GPU:
            Tolerance.logprob = self.own_deviation()

    # ---- running it

    def add(self, name: str, tokens: list[int], num_new: int = 12) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling(num_new))

    def step_until(self, holds: Callable[[], bool], limit: int = 200) -> None:
        """Steps until it holds; with asynchronous scheduling an answer comes a step later."""
        for _ in range(limit):
            if holds():
                return
            self._step_and_rest()
        raise AssertionError(f"it did not come to hold within {limit} steps")

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.outputs[output.request_id] = answer_of(output)

    def _step_and_rest(self) -> None:
        """As vLLM's own loop: with nothing to compute it waits a millisecond, in which loads move on a busy machine."""
        self.step()
        if not self.scheduler.running:
            threading.Event().wait(0.001)

    def finish(self, *names: str, limit: int = 3000) -> list[Answer]:
        """Steps until these requests have their answers."""
        for _ in range(limit):
            if all(name in self.outputs for name in names):
                return [self.outputs.pop(name) for name in names]
            self._step_and_rest()
        raise AssertionError(f"{names} did not finish within {limit} steps")

    def generate(self, tokens: list[int], num_new: int = 12) -> Answer:
        self.add("alone", tokens, num_new)
        return self.finish("alone")[0]

    def come_to_rest(self) -> None:
        """All that a test left in the air ends: requests, loads, stores.

        Raises:
            Exception: something did not end within a bound, or the device is lost; the engine is `broken` then.
        """
        loads, until = self.worker.loads, time.monotonic() + _REST_S
        wait_s, loads._wait_timeout_s = loads._wait_timeout_s, _REST_S
        try:
            for request in list(self.scheduler.requests.values()):
                if not request.is_finished():
                    self.llm.llm_engine.abort_request([request.request_id], internal=True)
            for load in self.loads if self._paced else ():
                self.wait_until(load.submitted.done, until)
                if load.transfer is not None and not load.transfer.state.is_final:
                    self.land(load, until=until)
            self.outputs.clear()
            self.settle(until + 2 * _REST_S)
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            loads._wait_timeout_s = wait_s

    def settle(self, until: float = math.inf) -> None:
        """Steps until nothing is in flight: an engine with nothing to do does not look at stores."""
        for _ in range(300):
            assert time.monotonic() < until, "something stayed in flight"
            if not (
                self.side.book.num_open or self.worker.loads.num_open or self.worker.stores.num_open or self._batches
            ):
                return
            if not self._batches and not self.llm.llm_engine.has_unfinished_requests():
                self.add("settle", prompt(3, salt=99), 1)
            self.step()
            threading.Event().wait(0.001)
        raise AssertionError("something stayed in flight")

    @property
    def _batches(self) -> int:
        """Steps whose output the scheduler has not seen yet."""
        return len(self.llm.llm_engine.engine_core.engine_core.batch_queue or ())

    def forget_blocks(self) -> None:
        """The engine's own prefix cache is empty, and its blocks hold nothing that could pass for KV."""
        self.outputs.clear()
        self.settle()
        assert self.llm.reset_prefix_cache()
        for tensor in self.worker.tensors.values():
            tensor.fill_(7.0)

    def own_deviation(self) -> float:
        """How far apart the engine's own answers are when it cuts a prompt into other steps; nothing is loaded.

        Alone, as a hit of its own prefix cache from several lengths on, and beside another request; twice that.
        """
        largest = 0.0
        with self.nothing_loaded():
            for salt in (0, 5, 7):
                tokens = prompt(HIT + OWN, salt)
                self.forget_blocks()
                first = self.generate(tokens)
                self.add("again", tokens)
                self.add("beside", prompt(300, salt + 50))
                again, _beside = self.finish("again", "beside")
                answers = [again]
                for length in (HIT, 320, 64):
                    self.forget_blocks()
                    self.generate(tokens[:length], 1)
                    answers.append(self.generate(tokens))
                largest = max([largest, *(answer.deviation(first) for answer in answers)])
        self.side.reset()
        self.forget_blocks()
        return tolerance_for(largest)

    @contextmanager
    def nothing_loaded(self) -> Iterator[None]:
        """Requests find what the engine's own prefix cache holds and nothing else; they are stored all the same."""
        matched = self.side.matched_tokens

        def ask(request: Any, local_hit: int) -> tuple[int, bool]:
            matched(request, local_hit)
            return 0, False

        self.side.matched_tokens = ask
        try:
            yield
        finally:
            self.side.matched_tokens = matched

    def generate_with_kv(self, tokens: list[int], num_tokens: int) -> tuple[Answer, list[torch.Tensor]]:
        """The answer, and the bytes of the first tokens' KV that it was computed from."""
        self.add("kept", tokens)
        self.step_until(lambda: self.request("kept").num_output_tokens > 0, 3000)
        kv = self.kv_of("kept", num_tokens)
        return self.finish("kept")[0], kv

    def stored(self, tokens: list[int], num_new: int = 12) -> Answer:
        """The prompt's answer when everything is computed; its KV is in the host pool afterwards, and nowhere else."""
        self.forget_blocks()
        self.side.reset()
        computed = self.generate(tokens, num_new)
        assert computed.cached == 0
        self.forget_blocks()
        return computed

    def stored_with_kv(self, tokens: list[int], num_tokens: int) -> tuple[Answer, list[torch.Tensor]]:
        """As `stored`, and the KV of its first tokens."""
        self.forget_blocks()
        self.side.reset()
        computed, kv = self.generate_with_kv(tokens, num_tokens)
        assert computed.cached == 0
        self.forget_blocks()
        return computed, kv

    # ---- freezing loads

    def land(self, load: Load, layers: int = 4, until: float | None = None) -> None:
        """So many layers of the load have landed, and every load before it; or the load has ended otherwise."""
        self.wait_until(lambda: load.transfer is not None, until)
        earlier = [one.transfer for one in self.loads if one.order.number < load.order.number]
        pending = [one for one in earlier if one is not None and not one.state.is_final]
        stopped = load.cancelled or load.failed
        needed = self.gate.held_of_a_stopped_load if stopped else layers - load.transfer.query().landed
        needed += sum(one.num_slices - one.query().landed for one in pending)
        self.gate.grant(needed)
        self.wait_until(lambda: load.transfer.query().landed >= layers or load.transfer.state.is_final, until)

    def fail_at(self, layer: int) -> None:
        """The next load's layer of that number fails when the one before it has landed."""
        self.gate.fail_at(layer)

    def fail_next(self, load: Load) -> None:
        """One more layer of the load lands, and the planted fault behind it is met; what it issued drains too."""
        self.gate.grant(2)
        self.wait_until(lambda: load.transfer.state.is_final)

    def wait_until(self, holds: Callable[[], Any], until: float | None = None) -> None:
        """Waits, by default for a minute, `until` a time of `time.monotonic` otherwise."""
        until = time.monotonic() + _BOUND_S if until is None else until
        while not holds():
            assert time.monotonic() < until, "it did not come to hold in time"
            time.sleep(0.001)

    def release(self, name: str, layers: int = 1) -> None:
        """The request's load begins, its first layers land, and it is reported received; the rest is frozen."""
        self.begin(name)
        load = self.load_of(name)
        self.land(load, layers)
        self.step_until(lambda: self.request(name).request_id in self.scheduler.finished_recving_kv_req_ids, 4)
        assert load.reported or load.order.number in self.side._released  # by a look, or by forecast

    def begin(self, name: str) -> None:
        """The request's load is on its worker."""
        self.step_until(lambda: any(one.order.request.startswith(f"{name}-") for one in self.loads), 4)

    @contextmanager
    def landing_on_demand(self) -> Iterator[list[tuple[str, int]]]:
        """A layer lands when it is waited for, and not before; yields what was waited for."""
        waited: list[tuple[str, int]] = []
        loads = self.worker.loads
        original = loads._wait

        def wait(load: Load, layer: int) -> None:
            waited.append((load.order.request, layer))
            self.wait_until(lambda: load.transfer is not None or load.submitted.done())
            if load.transfer is not None and not load.transfer.state.is_final and load.transfer.query().landed <= layer:
                self.land(load, layer + 1)
            original(load, layer)

        loads._wait = wait
        try:
            yield waited
        finally:
            del loads._wait

    @contextmanager
    def landing_on_nothing(self) -> Iterator[None]:
        """Blocks of a load are no numbers until it lands in them: whoever reads a byte too early answers with none.

        By that no rounding passes for an early read, and none for rounding. Whole blocks only, so that no slot behind
        a sequence's end, whose weight is 0, holds one. It holds on a CPU only, see `no_number`.
        """
        loads = self.worker.loads
        original = loads._submit

        def submit(order: LoadOrder) -> Callable[[], Any]:
            blocks = order.blocks[0][order.skip_tokens // self.block_tokens :]
            for tensor in self.tensors:
                tensor[torch.tensor(blocks, device=tensor.device)] = math.nan  # [blocks, ...]
            if ON_GPU:
                torch.cuda.synchronize()
            return original(order)

        loads._submit = submit
        try:
            yield
        finally:
            loads._submit = original

    @contextmanager
    def without(self, *rules: str) -> Iterator[None]:
        """These rules are off."""
        off = replace(ALL_RULES, **dict.fromkeys(rules, False))
        owners = (self.side, self.side.book, self.worker.loads)
        for owner in owners:
            owner._rules = off
        try:
            yield
        finally:
            for owner in owners:
                owner._rules = ALL_RULES
            self.worker.loads.bad_blocks |= self.side._bad_blocks  # what a rule that was off has forgotten

    @contextmanager
    def no_block_for(self, name: str) -> Iterator[None]:
        """The engine finds no free block for the request: it is promoted, and not scheduled."""
        manager = self.scheduler.kv_cache_manager
        original = manager.allocate_slots

        def allocate(request: Any, *arguments: Any, **keywords: Any) -> Any:
            if request.request_id == name or request.request_id.startswith(f"{name}-"):
                return None
            return original(request, *arguments, **keywords)

        manager.allocate_slots = allocate
        try:
            yield
        finally:
            manager.allocate_slots = original

    def configure(
        self,
        width: int | str | tuple[int, ...],
        release: str = "first",
        use_layerwise: bool = False,
        before_batch: bool = BEFORE_BATCH,
    ) -> bool:
        """From now on loads move like this; what an engine's settings would have said at its start.

        Returns whether they move in more than one slice.
        """
        worker, num_layers = self.worker, self.worker.caches.layout.num_layers
        settings = replace(
            self.side._settings,
            layers_per_slice=",".join(map(str, width)) if isinstance(width, tuple) else width,
            release=None if width == "auto" else release,
            use_layerwise=use_layerwise,
            before_batch=before_batch,
        )
        choice = choose_width(settings.layers_per_slice, worker.caches.layout)
        self.side._settings = worker._settings = self.scheduler.connector.settings = settings
        facts = self.side._facts
        self.side._auto = auto = AutoChoice(settings, facts, self.side.metrics) if settings.is_auto else None
        self.side._forecast = forecast_if_needed(settings, facts) if auto is None else auto.forecast
        worker._observations = Observations(marks_of(worker._device)) if settings.needs_forecast else None
        worker.loads._observer = worker._observations
        worker.slices = plan_slices(num_layers, choice.width)
        worker.stores._layerwise = use_layerwise and choice.layerwise
        worker.stores._slices = worker.slices
        worker.stores._slice_ends = {part.end_layer - 1: part for part in worker.slices}
        worker.loads._release = settings.release_policy
        return len(worker.slices) > 1

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([self.request(name).request_id], internal=True)

    def close(self) -> None:
        """Everything is given back; of a broken engine, what comes back within a bound."""
        if not self.broken:
            self._close()
            return
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(_REST_S)

    def _close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()
