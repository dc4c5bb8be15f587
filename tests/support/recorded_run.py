"""A recorded run as the benchmark would write it, made by the world with known overheads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lamella.sim.ahead import AheadEngine, Pass
from lamella.sim.overheads import Overheads
from lamella.sim.recorded import read_recorded
from lamella.sim.recorded_arms import Modelled, model_of, predict
from lamella.sim.requests import Job
from lamella.sim.strategies import Device

ARMS: dict[str, dict[str, Any] | None] = {
    "chunk_bounded": {"layers_per_slice": 0, "release": "whole"},
    "interleaved_first": {"order": "round_robin", "release": "first"},
    "fifo_first": {"order": "fifo", "release": "first"},
    "sync": {"use_layerwise": True},
    "auto": {"layers_per_slice": "auto"},
    "recompute": None,
}
TRUE = Overheads(
    pass_ns=1_400_000,
    launch_ns=6_000_000,
    full_launch_ns=0,
    prefill_launch_ns=18_000_000,
    gate_ns=30_000,
    tail_ns=900_000,
    report_ns=400_000,
    first_token_ns=500_000,
    after_join_ns=600_000,
    idle_ns=1_600_000,
    order_ns=300_000,
    ask_ns=900_000,
    ask_ns_per_1000_tokens=60_000,
    join_ns=2_000_000,
    join_ns_per_1000_tokens=200_000,
    submit_ns=400_000,
    first_slice_ns=100_000,
    load_ns_per_mib=700,
    prefill_rows=((768, 1110), (2048, 1030)),
    beside_permille=1070,
    scatter_permille=40,
    drift_permille=30,
)
ENGINE = {"async_scheduling": True, "cudagraph_mode": "PIECEWISE", "max_num_batched_tokens": 8192}
ADMITTED_US = 3_000


def cell(name: str, concurrency: int, hit: int = 15_360, new: int = 768, **more: Any) -> dict[str, Any]:
    base = {
        "name": name,
        "concurrency": concurrency,
        "hit": hit,
        "new": new,
        "requests": 3 * concurrency + 2,
        "chunk": 256,
        "output": 16,
        "width": 1,
        "bystanders": 0,
        "rate_per_s": None,
        "mix": [],
        "stores": False,
        "miss_every": 0,
        "tier_gb_per_s": None,
    }
    return {**base, **more}


CELLS = [
    cell("a", 3),
    cell("b", 3, hit=4_096, new=256),
    cell("c", 4, new=2048),
    cell("d", 1),
    cell("e", 3, new=2048),
    cell("f", 2, hit=8_192, new=768),
]


def engine_row(**more: Any) -> dict[str, Any]:
    return {"schema": 1, "group": "core", "kind": "engine", "engine": {**ENGINE, **more}, "vllm": "0.26.0"}


def repeat_row(
    of: dict[str, Any], arm: str, repeat: int, requests: Sequence[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    return {
        "schema": 1,
        "group": "core",
        "kind": "repeat",
        "cell": of,
        "arm": arm,
        "settings": ARMS[arm],
        "repeat": repeat,
        "requests": list(requests),
        **more,
    }


def request_row(ttft_us: int, queued_us: int = ADMITTED_US, outputs: int = 16, **more: Any) -> dict[str, Any]:
    first = queued_us + ttft_us
    return {
        "at_us": 0,
        "queued_us": queued_us,
        "token_us": [first + 6_000 * n for n in range(outputs)],
        "tokens": [],
        "cached": 0,
        **more,
    }


class Noted:
    """What the benchmark's probe would have seen of a world."""

    def __init__(self) -> None:
        self.passes: list[tuple[Pass, int]] = []
        self.jobs: dict[int, Job] = {}
        self.asked: dict[int, int] = {}
        self.ordered: dict[int, int] = {}
        self.landed: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.starts: dict[Pass, int] = {}
        """Loads begun with it."""
        self.members: dict[Pass, list[Job]] = {}
        """Who decodes in it."""


@contextmanager
def noting() -> Iterator[Noted]:
    """Everything of the worlds that run meanwhile is noted."""
    noted = Noted()
    plan, begin, end, hand_out, land, submit = (
        getattr(AheadEngine, name) for name in ("_plan", "_begin_pass", "_end_pass", "_hand_out", "_land", "_submit")
    )

    def plans(self: AheadEngine, made: Pass) -> None:
        noted.members[made] = self._scheduler.decoding()
        plan(self, made)

    def begin_pass(self: AheadEngine, made: Pass) -> None:
        noted.starts[made] = len(self._starting)
        for job in self._starting:
            noted.ordered[job.sequence] = self._clock.now_ns
        begin(self, made)

    def end_pass(self: AheadEngine) -> None:
        assert self._pass is not None
        noted.passes.append((self._pass, self._clock.now_ns))
        end(self)

    def hands_out(self: AheadEngine, made: Pass, last: Pass) -> None:
        members = [job for job in [*made.firsts, *noted.members.get(made, ())] if job.request.tag >= 0]
        for job in members:
            noted.tokens.setdefault(job.sequence, []).append(self._clock.now_ns)
            noted.jobs[job.sequence] = job
        hand_out(self, made, last)

    def lands(self: AheadEngine, job: Job, part: int) -> None:
        width = job.request.load.slice_layers[part]
        noted.landed.setdefault(job.sequence, []).extend([self._clock.now_ns] * width)
        land(self, job, part)

    def submits(self: AheadEngine, job: Job) -> None:
        noted.asked[job.sequence] = self._clock.now_ns + len(self._starting) * self._overheads.asking_ns(
            job.prompt_tokens
        )
        submit(self, job)

    patches = {"_plan": plans, "_begin_pass": begin_pass, "_end_pass": end_pass, "_hand_out": hands_out, "_land": lands}
    with mock.patch.multiple(AheadEngine, _submit=submits, **patches):
        yield noted


def noted_rows(noted: Noted, overheads: Overheads, num_layers: int) -> dict[str, Any]:
    """The repeat's requests, steps and waits, in microseconds."""
    requests, waited = [], [0] * num_layers
    for sequence, job in sorted(noted.jobs.items(), key=lambda one: one[1].request.tag):
        asked_at = job.admitted_ns - 1_000 * ADMITTED_US  # the loop hands requests over one after another

        def since(instant: int, begin: int = asked_at) -> int:
            return round((instant - begin) / 1e3)

        row: dict[str, Any] = {
            "at_us": round(asked_at / 1e3),
            "queued_us": ADMITTED_US,
            "token_us": [since(at) for at in noted.tokens[sequence]],
        }
        if sequence in noted.landed:
            landed, load = noted.landed[sequence], job.request.load
            row |= {
                "asked_us": since(noted.asked[sequence]),
                "ordered_us": since(noted.ordered[sequence]),
                "started_us": since(landed[0] - load.slice_ns[0]),
                "released_us": since(job.ready_ns) if job.ready_ns > job.submitted_ns else None,
                "landed_us": [since(at) for at in landed],
                "bytes": sum(load.slice_bytes),
                "loadable": job.request.cached_tokens - job.request.resident_tokens,
            }
        requests.append(row)
    steps = []
    for made, end_ns in noted.passes:
        orders_ns = noted.starts[made] * overheads.submit_ns
        device_ns = made.end_ns - made.start_ns if made.num_tokens else None
        steps.append(
            [
                round(made.began_ns / 1e3),
                round((end_ns - made.began_ns) / 1e3),
                made.num_tokens,
                made.decode_batch,
                round(orders_ns / 1e3),
                None if device_ns is None else round(device_ns / 1e3),
            ]
        )
        for layer in range(num_layers):
            stood_ns, _ = made.stalls.get(layer, (0, None))
            waited[layer] += len(made.loads) * overheads.gate_ns + stood_ns
    return {
        "requests": requests,
        "steps": steps,
        "host_stall_us": {str(layer): round(ns / 1e3) for layer, ns in enumerate(waited)},
    }


def lines_of(*rows: dict[str, Any]) -> list[str]:
    """The lines of a file of these rows."""
    return [json.dumps(row) for row in rows]


def recorded_lines(
    cells: Sequence[dict[str, Any]],
    device: Device,
    overheads: Overheads,
    repeats: int = 3,
    arms: Sequence[str] = tuple(ARMS),
) -> list[str]:
    """What an engine with those overheads would have been recorded as; each repeat is another draw of its times."""
    rows = [engine_row()]
    for of in cells:
        for arm in arms:
            blank = repeat_row(of, arm, 0, [request_row(1)] * of["requests"])
            run = read_recorded(map(json.dumps, (rows[0], blank)), "blank")
            (first,) = run.repeats
            model = model_of(first)
            assert isinstance(model, Modelled)
            for repeat in range(repeats):
                with noting() as noted:
                    predict(first, model, run, device, overheads, 100 + repeat)
                rows.append(repeat_row(of, arm, repeat, **noted_rows(noted, overheads, device.profile.num_layers)))
    return lines_of(*rows)
