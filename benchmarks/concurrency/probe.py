"""What a repeat leaves beside the requests' times: landings, releases, steps, waits. All times by `monotonic_ns`.

The connector's sides are made anew for every arm, and their methods are wrapped on the instance, so nothing of this is
in the product. A wrapped call costs less than a microsecond; the events on the compute stream cost the device two a
step. `RankProbe` watches in each worker process, whose clocks are the host's one clock; `Probe` watches the scheduler's
side and puts together what all have seen.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lamella.reference.plan import Direction


class RankProbe:
    """Everything one rank has seen since `clear`.

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

    def attach(self, worker: Any) -> None:
        """The worker side's calls are noted from now on."""
        self._watch_steps(worker)
        self._watch_loads(worker.loads)
        if self._torch is not None:
            self._watch_layers(worker)

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
        wait, observe, poll, release = loads._wait, loads._observe, loads.poll, loads._let_run

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
                if "by_forecast" not in self.loads[name]:
                    self.loads[name]["released_ns"] = now_ns
            return polled

        def watched_release(number: int, now_ns: int) -> None:
            load = loads.find(number)
            release(number, now_ns)
            if load is not None:  # let run by the scheduler side, ahead of a look
                self.loads[load.order.request].update(released_ns=now_ns, by_forecast=True)

        loads._wait, loads._observe, loads.poll, loads._let_run = (
            watched_wait,
            watched_observe,
            watched_poll,
            watched_release,
        )

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
            "loads": {name: dict(seen) for name, seen in self.loads.items()},
            "steps": steps,
            "host_stall_us": {str(layer): ns // 1000 for layer, ns in sorted(self.stall_ns.items())},
            "stream_stall_us": {str(layer): round(us) for layer, us in sorted(layers.items())},
            "peak_live_transfers": self.peak_live,
        }


class Probe:
    """What the scheduler's side has seen since `clear`, and what every rank has."""

    def __init__(self) -> None:
        self.layers_timed = False
        """As `RankProbe.layers_timed`, of every connector that is exchanged from now on."""
        self.clear()

    def clear(self) -> None:
        """Nothing has been seen."""
        self.loads: dict[str, dict[str, Any]] = defaultdict(dict)

    def attach(self, side: Any) -> None:
        """The scheduler side's look-ups are noted from now on."""
        matched, auto = side.matched_tokens, getattr(side, "_auto", None)

        def matched_tokens(request: Any, local_hit: int) -> Any:
            begin_ns = time.monotonic_ns()
            answer = matched(request, local_hit)
            end_ns = time.monotonic_ns()
            seen = self.loads[request.request_id]
            seen.setdefault("asked_ns", begin_ns)
            seen["lookup_ns"] = seen.get("lookup_ns", 0) + end_ns - begin_ns
            seen["lookups"] = seen.get("lookups", 0) + 1
            seen["local_hit"], seen["loadable"] = local_hit, answer[0]
            chosen = None if auto is None else auto.chosen(request.request_id)
            if chosen is not None:
                seen["arm"], seen["predicted_us"] = chosen.arm.value, chosen.chosen.ttft_ns // 1000
                seen["regret"] = round(chosen.regret, 4)
            return answer

        side.matched_tokens = matched_tokens

    def taken(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All of it, with `ranks` as each rank's `RankProbe.taken`; steps are those of rank 0."""
        loads = {name: dict(seen) for name, seen in self.loads.items()}
        for name in sorted({name for rank in ranks for name in rank["loads"]}):
            of_ranks = [rank["loads"][name] for rank in ranks if name in rank["loads"]]
            loads.setdefault(name, {}).update(load_of_ranks(of_ranks))
        found = {
            "loads": loads,
            "steps": ranks[0]["steps"],
            "peak_live_transfers": max(rank["peak_live_transfers"] for rank in ranks),
        }
        for name in ("host_stall_us", "stream_stall_us"):
            layers = sorted({layer for rank in ranks for layer in rank[name]}, key=int)
            found[name] = {layer: max(rank[name].get(layer, 0) for rank in ranks) for layer in layers}
        return found


def load_of_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One request's load, of which each rank brought its part.

    It began with the first rank; a layer has landed when it has on the slower one, and the request may run once the
    slower has said so. `landed_by_rank_ns` keeps every rank's landings where there are several.
    """
    found: dict[str, Any] = {}
    for name, chosen in (("ordered_ns", min), ("started_ns", min), ("released_ns", max), ("bytes", sum)):
        if values := [seen[name] for seen in ranks if name in seen]:
            found[name] = chosen(values)
    if any("by_forecast" in seen for seen in ranks):
        found["by_forecast"] = True
    if methods := sorted({seen["method"] for seen in ranks if "method" in seen}):
        found["method"] = "+".join(methods)
    if landed := [seen["landed_ns"] for seen in ranks if "landed_ns" in seen]:
        found["landed_ns"] = [max(layer) for layer in zip(*landed, strict=False)]
        if len(ranks) > 1:
            found["landed_by_rank_ns"] = landed
    return found
