"""When layers land and requests get their first token: the max-plus recursion, in integer nanoseconds.

One link and one engine. Three rules are the whole model, and a simulator that follows them must agree to the
nanosecond:

1. **The link** is serial and never idle while a slice waits. Whenever it is free it takes, among the next slices of the
   submitted requests, the smallest (key, sequence, slice index), and carries that slice to its end. Landings therefore
   do not depend on computing, and the *forecast* at instant t is the schedule of the requests submitted by t.
2. **The engine** polls when it is free: at the end of every step, and when idle as below. A poll at t releases every
   submitted request whose release instant (its policy's answer, given the forecast at t) is at most t. Then a step
   forms: requests whose prefill was cut come first, then released ones by sequence; each takes the tokens it still has
   to compute, as far as the token budget reaches. If nothing is ready the engine looks again after every `idle_poll_ns`
   (0: whenever something changes); with no request at all it sleeps until the next arrival.
3. **A step** formed at t starts at S = t + start delay. Layer l begins when layer l-1 has ended and layer l of *every*
   released request has landed, in the batch or not, since others may read its blocks (REL-2). With c_l the time of
   layer l and A_l the latest landing, `end = max(S + sum(c), max over l (A_l + sum of c_j, j >= l))`.

At equal instants arrivals and landings come first, then the link's choice, then the step.

Laws (tests/reference/test_timeline.py): for one request alone `max(T, P) <= TTFT <= T + P` plus overheads; the width of
all layers with whole release is chunk-major; without a request, no other's *landing* is later under FIFO (its first
token may be: batches form differently); bytes in = bytes out; same input, same output.

Source: synchronisation and delay as max and plus, Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity"
(1992).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from lamella.reference.ordering import OrderPolicy, Submission, slice_keys
from lamella.reference.release import ReleasePolicy, ReleaseView


class Load(NamedTuple):
    """What one request has on the link, slice by slice; three empty tuples if its KV is already there.

    Attributes:
        slice_layers: layers that land with each slice.
        slice_bytes: bytes of each slice.
        slice_ns: how long the link is busy with each slice.
    """

    slice_layers: tuple[int, ...]
    slice_bytes: tuple[int, ...]
    slice_ns: tuple[int, ...]


NOTHING_TO_LOAD = Load((), (), ())


class Chunk(NamedTuple):
    """Tokens `[first_token, first_token + num_tokens)` of a request's uncached prompt, computed in one step."""

    request: int
    first_token: int
    num_tokens: int


StepCost = Callable[[Sequence[Chunk]], Sequence[int]]
"""Computing time of each layer, in ns, of a step that runs these chunks."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request of the recursion.

    Attributes:
        arrival_ns: when its load is submitted.
        load: its slices; together they hold all layers, or none.
        layer_compute_ns: per layer, how long its whole prefill computes.
        new_tokens: tokens to compute, at least 1; they count against a step's token budget.
        deadline_ns: for the deadline order.
    """

    arrival_ns: int
    load: Load
    layer_compute_ns: tuple[int, ...]
    new_tokens: int = 1
    deadline_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepRule:
    """How steps form.

    Attributes:
        start_delay_ns: from a poll to the first layer of the step it formed.
        idle_poll_ns: how often an idle engine with waiting requests looks; 0 means at every change.
        token_budget: most new tokens in a step, None for no limit.

    Raises:
        ValueError: a negative time, or a budget below 1: no step would ever compute anything.
    """

    start_delay_ns: int = 0
    idle_poll_ns: int = 0
    token_budget: int | None = None

    def __post_init__(self) -> None:
        if min(self.start_delay_ns, self.idle_poll_ns) < 0 or (self.token_budget is not None and self.token_budget < 1):
            raise ValueError(f"times must be at least 0 and token_budget at least 1, got {self}")


class TimedStep(NamedTuple):
    """One step. `layer_stall_ns[l]` is how long layer l stood waiting, `culprits[l]` whose slice it waited for."""

    polled_ns: int
    start_ns: int
    end_ns: int
    chunks: tuple[Chunk, ...]
    layer_stall_ns: tuple[int, ...]
    culprits: tuple[int | None, ...]


class RequestTimes(NamedTuple):
    """One request: when each layer landed, when it was released, began to compute, and gave its first token."""

    arrival_ns: int
    landing_ns: tuple[int, ...]
    released_ns: int
    started_ns: int
    first_token_ns: int

    @property
    def ttft_ns(self) -> int:
        """From arrival to first token."""
        return self.first_token_ns - self.arrival_ns


class Timeline(NamedTuple):
    """What happened: one entry a request, in the order given, and every step in time order."""

    requests: tuple[RequestTimes, ...]
    steps: tuple[TimedStep, ...]


def schedule_link(requests: Sequence[TimedRequest], order: OrderPolicy) -> list[tuple[int, ...]]:
    """The landing instant of every slice of every request, by rule 1.

    Args:
        requests: by arrival; a request's index is its sequence number.
        order: gives the keys, once, at each submission.

    >>> from lamella.reference.ordering import Fifo, RoundRobin
    >>> two = [TimedRequest(0, Load((1, 1), (8, 8), (10, 10)), (1, 1))] * 2
    >>> schedule_link(two, Fifo()), schedule_link(two, RoundRobin())
    ([(10, 20), (30, 40)], [(10, 30), (20, 40)])
    """
    landings: list[list[int]] = [[] for _ in requests]
    keys: list[tuple[int, ...]] = []
    start_rounds: list[int] = []
    heads: list[tuple[int, int, int]] = []  # (key, request, slice): the next slice of every submitted request
    free_ns = 0
    service_round = 0
    while heads or len(keys) < len(requests):
        if not heads:
            free_ns = max(free_ns, requests[len(keys)].arrival_ns)
        while len(keys) < len(requests) and requests[len(keys)].arrival_ns <= free_ns:
            index = len(keys)
            submission = _submission(index, requests[index], service_round)
            keys.append(slice_keys(order, submission))
            start_rounds.append(service_round)
            if keys[index]:
                heapq.heappush(heads, (keys[index][0], index, 0))
        if not heads:
            continue
        _, index, part = heads[0]
        service_round = start_rounds[index] + part
        free_ns += requests[index].load.slice_ns[part]
        landings[index].append(free_ns)
        if part + 1 < len(keys[index]):
            heapq.heapreplace(heads, (keys[index][part + 1], index, part + 1))
        else:
            heapq.heappop(heads)
    return [tuple(landed) for landed in landings]


def compute_timeline(
    requests: Sequence[TimedRequest],
    order: OrderPolicy,
    release: ReleasePolicy,
    rule: StepRule | None = None,
    step_cost: StepCost | None = None,
    landing_ns: Sequence[Sequence[int]] | None = None,
) -> Timeline:
    """Landings, steps and first tokens of all requests, by rules 1 to 3.

    Args:
        requests: by arrival; a request's index is its sequence number. All have the same number of layers.
        order: whose slice the link carries next.
        release: when a request may run.
        rule: how steps form; None for no delay, no poll interval and no budget.
        step_cost: time of a step's layers; None adds up the members' own times, a cut prefill in proportion to its
            tokens.
        landing_ns: per request, when each slice lands, in place of rule 1; also what is forecast.

    Raises:
        ValueError: arrivals out of order or negative, a load whose slices do not hold every layer, layers that differ
            between requests, no tokens to compute, or a negative time.
    """
    _check(requests)
    return _Engine(requests, order, release, rule or StepRule(), step_cost or add_members(requests), landing_ns).run()


def add_members(requests: Sequence[TimedRequest]) -> StepCost:
    """The step cost that is the sum of the members' own times.

    The parts of a cut prefill add up to the whole exactly.
    """

    def cost(chunks: Sequence[Chunk]) -> list[int]:
        layers = [0] * len(requests[0].layer_compute_ns)
        for chunk in chunks:
            request = requests[chunk.request]
            end = chunk.first_token + chunk.num_tokens
            for layer, whole_ns in enumerate(request.layer_compute_ns):
                layers[layer] += (
                    whole_ns * end // request.new_tokens - whole_ns * chunk.first_token // request.new_tokens
                )
        return layers

    return cost


class _Engine:
    """Rules 2 and 3 over the link's schedule: polls in time order, each step in closed form."""

    def __init__(
        self,
        requests: Sequence[TimedRequest],
        order: OrderPolicy,
        release: ReleasePolicy,
        rule: StepRule,
        step_cost: StepCost,
        landing_ns: Sequence[Sequence[int]] | None,
    ) -> None:
        self._requests = requests
        self._given_ns = landing_ns
        self._arrivals_ns = [request.arrival_ns for request in requests]
        self._order = order
        self._release = release
        self._rule = rule
        self._step_cost = step_cost
        self._forecasts: dict[int, list[tuple[int, ...]]] = {}
        self._landing = self._forecast(len(requests))
        self._instants: dict[tuple[int, int], int] = {}  # by request and number submitted, unless they change
        self._alone: dict[int, tuple[int, ...]] = {}
        self._released_ns: dict[int, int] = {}
        self._started_ns: dict[int, int] = {}
        self._first_token_ns: dict[int, int] = {}
        self._computed = [0] * len(requests)  # tokens whose prefill is done

    def run(self) -> Timeline:
        steps: list[TimedStep] = []
        waiting = set(range(len(self._requests)))  # not released
        ready: list[int] = []  # released, prefill unfinished
        t = 0
        away_ns = self._rule.idle_poll_ns
        while waiting or ready:
            submitted = bisect_right(self._arrivals_ns, t)
            for index in sorted(waiting):
                if index < submitted and self._release_instant(index, t, submitted, away_ns) <= t:
                    waiting.remove(index)
                    ready.append(index)
                    self._released_ns[index] = t
            if not ready:
                away_ns = self._rule.idle_poll_ns
                t = self._next_look(t, submitted, [i for i in waiting if i < submitted])
                continue
            ready.sort(key=lambda index: (self._computed[index] == 0, index))
            step = self._step(t, ready)
            steps.append(step)
            for chunk in step.chunks:
                self._started_ns.setdefault(chunk.request, step.start_ns)
                self._computed[chunk.request] += chunk.num_tokens
                if self._computed[chunk.request] == self._requests[chunk.request].new_tokens:
                    self._first_token_ns[chunk.request] = step.end_ns
                    ready.remove(chunk.request)
            away_ns = step.end_ns - t
            t = step.end_ns
        return Timeline(tuple(map(self._times, range(len(self._requests)))), tuple(steps))

    def _forecast(self, submitted: int) -> list[tuple[int, ...]]:
        """Per request, the landing of each layer if nobody came after the first `submitted` requests."""
        if submitted not in self._forecasts:
            chosen = self._requests[:submitted]
            landings = schedule_link(chosen, self._order) if self._given_ns is None else self._given_ns[:submitted]
            self._forecasts[submitted] = list(map(_spread_over_layers, chosen, landings))
        return self._forecasts[submitted]

    def _release_instant(self, index: int, t: int, submitted: int, away_ns: int) -> int:
        known = self._instants.get((index, submitted))
        if known is not None:
            return known
        view = ReleaseView(
            now_ns=t,
            arrival_ns=self._forecast(submitted)[index],
            layer_compute_ns=self._alone_ns(index),
            start_delay_ns=self._rule.start_delay_ns,
            step_ns=away_ns,
        )
        instant = self._release.release_ns(view)
        if not self._release.weighs_steps:
            self._instants[index, submitted] = instant
        return instant

    def _alone_ns(self, index: int) -> tuple[int, ...]:
        """The layers' times in the request's first step, were it alone there."""
        if index not in self._alone:
            tokens, budget = self._requests[index].new_tokens, self._rule.token_budget
            first_chunk = Chunk(index, 0, tokens if budget is None else min(tokens, budget))
            self._alone[index] = tuple(self._step_cost([first_chunk]))
        return self._alone[index]

    def _next_look(self, t: int, submitted: int, waiting: list[int]) -> int:
        """When an engine that found nothing ready at t looks again."""
        poll = self._rule.idle_poll_ns
        changes = [self._release_instant(index, t, submitted, poll) for index in waiting]
        if submitted < len(self._requests):
            changes.append(self._requests[submitted].arrival_ns)
        if poll == 0 or not waiting:
            return min(changes)
        return t + max(1, -(-(min(changes) - t) // poll)) * poll

    def _step(self, t: int, ready: list[int]) -> TimedStep:
        chunks: list[Chunk] = []
        left = self._rule.token_budget
        for index in ready:
            remaining = self._requests[index].new_tokens - self._computed[index]
            tokens = remaining if left is None else min(remaining, left)
            if tokens:
                chunks.append(Chunk(index, self._computed[index], tokens))
                left = None if left is None else left - tokens
        costs = self._step_cost(chunks)
        start = t + self._rule.start_delay_ns
        # Layers that landed by the start hold nobody up, so only the other loads take part in the maximum.
        landing = [(self._landing[index], index) for index in ready if self._landing[index][-1] > start]
        stalls = [0] * len(costs)
        culprits: list[int | None] = [None] * len(costs)
        end = start + sum(costs)
        if landing:
            latest = [max((landed[layer], -index) for landed, index in landing) for layer in range(len(costs))]
            from_layer = list(accumulate(reversed(costs)))[::-1]  # the costs from each layer to the last, added up
            end = max(end, *(arrival + rest for (arrival, _), rest in zip(latest, from_layer, strict=True)))
            reached = start
            for layer, (arrival, negated) in enumerate(latest):
                if arrival > reached:
                    stalls[layer], culprits[layer] = arrival - reached, -negated
                reached = max(reached, arrival) + costs[layer]
            assert end == reached, "the closed form and the layer-by-layer recursion are the same thing"
        return TimedStep(t, start, end, tuple(chunks), tuple(stalls), tuple(culprits))

    def _times(self, index: int) -> RequestTimes:
        return RequestTimes(
            self._requests[index].arrival_ns,
            self._landing[index],
            self._released_ns[index],
            self._started_ns[index],
            self._first_token_ns[index],
        )


def _submission(index: int, request: TimedRequest, service_round: int) -> Submission:
    return Submission(index, request.arrival_ns, request.load.slice_bytes, request.deadline_ns, service_round)


def _spread_over_layers(request: TimedRequest, landed: Sequence[int]) -> tuple[int, ...]:
    """Per layer, its slice's landing; the arrival for a request with nothing to load."""
    if not landed:
        return (request.arrival_ns,) * len(request.layer_compute_ns)
    return tuple(
        instant for instant, layers in zip(landed, request.load.slice_layers, strict=True) for _ in range(layers)
    )


def _check(requests: Sequence[TimedRequest]) -> None:
    num_layers = len(requests[0].layer_compute_ns) if requests else 0
    before = 0
    for index, request in enumerate(requests):
        layers, sizes, times = request.load
        if request.arrival_ns < before:
            raise ValueError(
                f"requests must come by arrival: number {index} arrives at {request.arrival_ns}, after {before}"
            )
        if len(request.layer_compute_ns) != num_layers or num_layers < 1:
            raise ValueError(f"request {index} has {len(request.layer_compute_ns)} layers, the first one {num_layers}")
        if not len(layers) == len(sizes) == len(times) or (layers and sum(layers) != num_layers):
            raise ValueError(f"request {index}: its slices must hold {num_layers} layers, or none, got {request.load}")
        if request.new_tokens < 1:
            raise ValueError(f"request {index} must compute at least 1 token, got {request.new_tokens}")
        if min((*layers, *sizes, *times, *request.layer_compute_ns)) < 0:
            raise ValueError(f"request {index} has a negative time, size or count of layers")
        before = request.arrival_ns
