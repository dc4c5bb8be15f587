"""What a repeat leaves beside the requests' times: landings, releases, steps, waits. All times by `monotonic_ns`.

The connector's worker is made anew for every arm, and its methods are wrapped on the instance, so nothing of this is in
the product. A wrapped call costs less than a microsecond; the events on the compute stream cost the device two a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from lamella.reference.plan import Direction


class Probe:
    """Everything seen since `clear`.

    Args:
        torch: the module where steps are timed on a CUDA device; None: by the host's clock alone.
    """

    def __init__(self, torch: Any | None) -> None:
        self._torch = torch
        self.layers_timed = False
        """Whether events are put around each layer's wait; two more a layer, so only in repeats kept for that."""
        self.clear()

    def clear(self) -> None:
        """Nothing has been seen."""
        self.loads: dict[str, dict[str, Any]] = defaultdict(dict)
        self.steps: list[dict[str, Any]] = []
        self.stall_ns: dict[int, int] = defaultdict(int)
        self.peak_live = 0
        self._layers: list[tuple[int, Any, Any]] = []

    def attach(self, connector: Any, side: Any) -> None:
        """Both sides' calls are noted from now on."""
        worker = connector.worker
        self._watch_steps(worker)
        self._watch_loads(worker.loads)
        if self._torch is not None:
            self._watch_layers(worker)
        matched = side.matched_tokens

        def matched_tokens(request: Any, local_hit: int) -> Any:
            begin_ns = time.monotonic_ns()
            answer = matched(request, local_hit)
            end_ns = time.monotonic_ns()
            seen = self.loads[request.request_id]
            seen.setdefault("asked_ns", begin_ns)
            seen["lookup_ns"] = seen.get("lookup_ns", 0) + end_ns - begin_ns
            seen["lookups"] = seen.get("lookups", 0) + 1
            seen["local_hit"], seen["loadable"] = local_hit, answer[0]
            return answer

        side.matched_tokens = matched_tokens

    def _event(self) -> Any:
        if self._torch is None:
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _watch_steps(self, worker: Any) -> None:
        begin, computed, engine = worker.begin_step, worker.step_computed, worker.engine

        def begin_step(orders: Any) -> None:
            step = {"begin_ns": time.monotonic_ns(), "tokens": orders.num_tokens, "decoding": orders.num_decoding}
            begin(orders)
            step["orders_ns"] = time.monotonic_ns() - step["begin_ns"]
            if orders.num_tokens:
                step["begin"] = self._event()
                self.peak_live = max(self.peak_live, engine.lane(Direction.RETRIEVE).live_transfers)
            self.steps.append(step)

        def step_computed() -> None:
            if self.steps and self.steps[-1]["tokens"] and "end_ns" not in self.steps[-1]:
                self.steps[-1]["end"] = self._event()
                self.steps[-1]["end_ns"] = time.monotonic_ns()
            computed()

        worker.begin_step, worker.step_computed = begin_step, step_computed

    def _watch_loads(self, loads: Any) -> None:
        wait, observe, poll = loads._wait, loads._observe, loads.poll

        def watched_wait(load: Any, layer: int) -> None:
            begin_ns = time.monotonic_ns()
            wait(load, layer)
            self.stall_ns[layer] += time.monotonic_ns() - begin_ns

        def watched_observe(load: Any, transfer: Any) -> None:
            observe(load, transfer)
            if transfer is None:
                return
            seen = self.loads[load.order.request]
            seen["ordered_ns"] = load.ordered_ns
            seen["started_ns"] = transfer.query().started_ns
            seen["landed_ns"] = list(transfer.timestamps_ns().landed_ns)
            seen["bytes"] = transfer.num_bytes
            seen["method"] = transfer.query().method.name

        def watched_poll() -> Any:
            polled = poll()
            now_ns = time.monotonic_ns()
            for name in polled.received:
                self.loads[name]["released_ns"] = now_ns
            return polled

        loads._wait, loads._observe, loads.poll = watched_wait, watched_observe, watched_poll

    def _watch_layers(self, worker: Any) -> None:
        wait = worker.wait_layer

        def wait_layer(name: str) -> None:
            if not (self.layers_timed and worker.loads.gated):
                wait(name)
                return
            before = self._event()
            wait(name)
            self._layers.append((worker.caches.layers.get(name, -1), before, self._event()))

        worker.wait_layer = wait_layer

    def taken(self) -> dict[str, Any]:
        """All of it as plain values; waits for the device."""
        if self._torch is not None:
            self._torch.cuda.synchronize()
        steps = []
        for step in self.steps:
            begin, end = step.get("begin"), step.get("end")
            gpu_us = round(begin.elapsed_time(end) * 1e3) if begin is not None and end is not None else None
            end_ns = step.get("end_ns", step["begin_ns"] + step["orders_ns"])
            steps.append(
                [step["begin_ns"], end_ns, step["tokens"], step["decoding"], step["orders_ns"] // 1000, gpu_us]
            )
        layers: dict[int, float] = defaultdict(float)
        for layer, before, after in self._layers:
            layers[layer] += before.elapsed_time(after) * 1e3
        return {
            "loads": dict(self.loads),
            "steps": steps,
            "host_stall_us": {str(layer): ns // 1000 for layer, ns in sorted(self.stall_ns.items())},
            "stream_stall_us": {str(layer): round(us) for layer, us in sorted(layers.items())},
            "peak_live_transfers": self.peak_live,
        }
