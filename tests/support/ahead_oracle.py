"""An engine that schedules ahead, told again as one loop without events: what `lamella.sim.ahead` must equal.

For one serial FIFO link, whose landings are known as soon as a load is submitted, for whole and first-layer release,
and for an idle time above 0. Instants come out in the order of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamella.sim.overheads import Overheads
from lamella.sim.requests import Request
from rich_world import LAYERS, LinearCompute


class Told(NamedTuple):
    submitted_ns: int
    landed_ns: tuple[int, ...]
    started_ns: int
    first_token_ns: int
    end_ns: int


@dataclass
class _One:
    request: Request
    arrival_ns: int
    submitted_ns: int = -1
    landed_ns: list[int] = field(default_factory=list)
    reported: bool = False
    known: bool = False
    joined: bool = False
    started_ns: int = -1
    left: int = 0  # tokens to be scheduled
    context: int = 0
    tokens_ns: list[int] = field(default_factory=list)


@dataclass
class _Pass:
    members: list[_One]
    gives: list[_One]
    computes: bool
    device_end_ns: int = 0
    reports: list[_One] = field(default_factory=list)


def tell(
    coming: Sequence[tuple[int, Request]],
    overheads: Overheads,
    *,
    whole: bool,
    budget: int,
    every: bool = False,
    full: bool = False,
) -> list[Told]:
    """Each request's instants. A prompt fits into a step, and all prompts that join one fit together.

    `every`: each step waits for every released load. `full`: graphs replay steps that only decode.
    """
    compute, ones = LinearCompute(), [_One(request, instant) for instant, request in coming]
    now = link_free = device_free = 0
    queue: list[_Pass] = [_Pass([], [], False)]
    joined_before = False

    def needed(one: _One) -> int:
        return one.landed_ns[-1 if whole else 0]

    while any(len(one.tokens_ns) < one.request.output_tokens for one in ones):
        here = [one for one in ones if one.arrival_ns <= now]
        if all(len(one.tokens_ns) == one.request.output_tokens for one in here):
            now = min(one.arrival_ns for one in ones if one.arrival_ns > now)
            continue
        asks = [one for one in here if one.request.load.slice_ns and one.submitted_ns < 0]
        ready = [one for one in here if not one.joined and (one.known or not one.request.load.slice_ns)]
        decoding = [one for one in here if one.joined and one.left]
        left = budget - len(decoding)
        joins = []
        for one in ready:
            if left <= 0:
                break
            assert one.request.new_tokens <= left, "the oracle knows no chunks"
            joins.append(one)
            left -= one.request.new_tokens
        computes = bool(joins or decoding)
        cost = sum(overheads.asking_ns(one.request.cached_tokens + one.request.new_tokens) for one in asks)
        cost += sum(overheads.joining_ns(one.request.cached_tokens + one.request.new_tokens) for one in joins)
        if computes:
            cost += overheads.pass_ns + (overheads.after_join_ns if joined_before else 0)
        elif asks:
            cost += overheads.order_ns
        joined_before = bool(joins)
        begin = at = now + cost
        for one in asks:
            at += overheads.submit_ns
            one.submitted_ns, begun = at, max(at, link_free, device_free)  # blocks may be read by what it computes
            for slice_ns, width in zip(one.request.load.slice_ns, one.request.load.slice_layers, strict=True):
                begun += slice_ns
                one.landed_ns += [begun] * width
            link_free = begun
        made = _Pass(joins + decoding, [], computes)
        if computes:
            batch, context = len(decoding), sum(one.context for one in decoding)
            if joins:
                prefills = [(one.request.cached_tokens, one.request.new_tokens) for one in joins]
                costs = compute.step_layers_ns(prefills, batch, context)
            else:
                step = compute.decode_ns(batch, context, 1)
                costs = [step * (layer + 1) // LAYERS - step * layer // LAYERS for layer in range(LAYERS)]
            tokens = sum(one.request.new_tokens for one in joins) + batch
            gates = [
                one for one in ones if one.reported and one.landed_ns[-1] > begin and (every or one in made.members)
            ]
            graph = full and not joins and tokens <= overheads.captured_tokens
            if graph:  # it waits in front
                at = max([at, *(one.landed_ns[-1] for one in gates)])
            if tokens <= overheads.captured_tokens:
                launch = overheads.full_launch_ns if graph else overheads.launch_ns
            elif tokens <= overheads.prefill_graph_tokens:
                launch = overheads.prefill_graph_launch_ns
            else:
                launch = overheads.prefill_launch_ns
            launch += LAYERS * len(gates) * overheads.gate_ns
            tail = min(overheads.tail_ns, launch)
            device = device_free
            # The thread is at a layer; it launches all that have landed, spread evenly, and looks again behind them.
            layer = 0
            while layer < LAYERS:
                landed = min([LAYERS, *(sum(instant <= at for instant in one.landed_ns) for one in gates)])
                if landed <= layer:
                    at = min(one.landed_ns[layer] for one in gates if one.landed_ns[layer] > at)
                    continue
                busy = max([at, *(one.landed_ns[-1] for one in ones if one.landed_ns and one.submitted_ns <= at)])
                for number in range(layer, landed):
                    through = LAYERS if graph else number + 1
                    launched = at + (launch - tail) * through // LAYERS - (launch - tail) * layer // LAYERS
                    device = max(device, launched)
                    if number == 0:
                        starts = device
                    device += costs[number] * (overheads.beside_permille if device < busy else 1000) // 1000
                at += (launch - tail) * landed // LAYERS - (launch - tail) * layer // LAYERS
                layer = landed
            at += tail
            device_free = made.device_end_ns = device
            for one in joins:
                one.joined, one.started_ns = True, starts
                one.left = one.request.output_tokens
                one.context = one.request.cached_tokens + one.request.new_tokens - 1
            for one in made.members:
                one.left -= 1
                one.context += 1
                made.gives.append(one)
        for one in ones:
            if one.submitted_ns >= 0 and not one.reported and needed(one) <= at:
                one.reported = True
                made.reports.append(one)
        queue.append(made)
        oldest = queue.pop(0)
        report = overheads.report_ns if oldest.computes else 0
        if any(not one.tokens_ns for one in oldest.gives):
            report += overheads.first_token_ns
        now = max(at, oldest.device_end_ns) + report
        for one in oldest.gives:
            one.tokens_ns.append(now)
        for one in oldest.reports:
            one.known = True
        if not (oldest.computes or made.computes):
            now += overheads.idle_ns
    return [
        Told(one.submitted_ns, tuple(one.landed_ns), one.started_ns, one.tokens_ns[0], one.tokens_ns[-1])
        for one in ones
    ]
