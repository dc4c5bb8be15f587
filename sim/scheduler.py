"""What the engine knows of its requests, and how a step is filled: the queues of the world, without a clock.

A request goes ``waiting -> ready -> (partly prefilled ->) decoding -> gone``. *Waiting* is not yet released; *ready* is
released and in no step yet. The rules are vLLM's: decoding requests come first with a token each, then prefills that
were cut, then ready ones in order of arrival, each with as many tokens as the budget still has; whoever decodes,
decodes in every step.

Decoding is kept as a count, not as a list that every step walks: a request notes the decode step at which it will be
done, so that a stretch of k steps costs the same as one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.ordering import Submission
from lamella.reference.timeline import NOTHING_TO_LOAD, Chunk, Load
from lamella.sim.records import Ending, Suffered
from lamella.sim.stations import Transfer


class SubmitAt(Enum):
    """When a load reaches the link."""

    ARRIVAL = "arrival"
    """At once: a look-up outside the engine's loop, or a thread of its own."""
    POLL = "poll"
    """At the engine's next poll, behind the launch of the step formed there: what vLLM 0.32 does with asynchronous
    loads."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine forms steps.

    Attributes:
        start_delay_ns: from a poll to the first layer of the step it formed; 0 where measured step times include it.
        idle_poll_ns: how often an idle engine with waiting requests looks; 0 means at every change.
        token_budget: most tokens in a step, decoding ones included; longer prompts run as chunked prefill. None: no
        limit.
        max_batch: most requests that prefill or decode at the same time. None: no limit.
        submit_at: when a load reaches the link.

    Raises:
        ValueError: a negative time, or a budget or batch below 1.
    """

    start_delay_ns: int = 0
    idle_poll_ns: int = 0
    token_budget: int | None = 8192
    max_batch: int | None = 256
    submit_at: SubmitAt = SubmitAt.ARRIVAL

    def __post_init__(self) -> None:
        for name, least in (("start_delay_ns", 0), ("idle_poll_ns", 0), ("token_budget", 1), ("max_batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


class Request(NamedTuple):
    """One request as it comes to the world.

    Attributes:
        cached_tokens: context that need not be computed, because it is loaded or already in the engine's blocks.
        new_tokens: prompt tokens to compute, at least 1.
        output_tokens: tokens to generate, at least 1; the prefill's last step gives the first.
        load: what the link carries before the request is complete.
        due_after_ns: how long after arrival its first token is due, for the deadline order.
        tag: the caller's own number, handed back in the record.
        admission_ns: from arrival until the engine has it in its queue: the host's tokenising, hashing, copying.
    """

    cached_tokens: int
    new_tokens: int
    output_tokens: int = 1
    load: Load = NOTHING_TO_LOAD
    due_after_ns: int | None = None
    tag: int = 0
    admission_ns: int = 0


class Job:
    """A request inside the world, with everything that happened to it."""

    __slots__ = (
        "all_landed_ns",
        "arrival_ns",
        "caused_before_start_ns",
        "caused_ns",
        "computed_tokens",
        "done_at_step",
        "due",
        "ending",
        "failure",
        "first_layer_ns",
        "first_started_ns",
        "first_token_ns",
        "gate",
        "layer_stall_ns",
        "preemptions",
        "prefill_stall_ns",
        "prefill_steps",
        "rank",
        "ready_ns",
        "released_ns",
        "request",
        "sequence",
        "stall_before_start_ns",
        "started_ns",
        "stored_ns",
        "submitted_ns",
        "suffered",
        "transfer",
    )

    def __init__(self, sequence: int, request: Request, arrival_ns: int) -> None:
        self.sequence = sequence
        self.request = request
        self.arrival_ns = arrival_ns
        self.submitted_ns = self.first_layer_ns = self.all_landed_ns = arrival_ns + request.admission_ns
        self.ready_ns = self.submitted_ns
        self.released_ns = self.started_ns = self.first_started_ns = self.first_token_ns = self.stored_ns = -1
        self.gate: LayerArrivalGate[int] | None = None  # its events are landing instants
        self.transfer: Transfer | None = None
        self.due = False  # enough layers have landed; the next poll releases it
        self.computed_tokens = 0
        self.done_at_step = 0
        self.caused_ns = 0
        self.prefill_stall_ns = 0
        self.caused_before_start_ns = 0
        self.stall_before_start_ns = 0
        self.layer_stall_ns: list[int] | None = None
        self.suffered: list[Suffered] | None = None
        self.prefill_steps = self.preemptions = self.rank = 0
        self.failure = ""
        self.ending = Ending.DONE

    @property
    def landed(self) -> bool:
        """Whether nothing of it is on the wire or yet to be."""
        return self.gate is None or self.gate.all_landed

    def submission(self, now_ns: int) -> Submission:
        """The load as the link's order policy sees it when submitted now."""
        due = self.request.due_after_ns
        deadline = None if due is None else self.arrival_ns + due
        return Submission(self.sequence, now_ns, self.request.load.slice_bytes, deadline)


class Scheduler:
    """The queues, and the filling of steps."""

    def __init__(self, settings: EngineSettings) -> None:
        self._budget = settings.token_budget
        self._max_batch = settings.max_batch
        self.waiting: dict[int, Job] = {}
        self.landing: dict[int, Job] = {}
        """Released, with layers still on the wire: every step waits for these, whoever is in its batch (REL-2)."""
        self._ready: list[tuple[int, Job]] = []
        self._cut: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []
        self.decode_steps = 0
        self.context_tokens = 0
        """The sum of the contexts of those who decode."""

    @property
    def decode_batch(self) -> int:
        """How many requests decode."""
        return len(self._decoding)

    @property
    def steps_to_next_end(self) -> int:
        """Decode steps until the next of them is done."""
        return self._decoding[0][0] - self.decode_steps

    def release(self, job: Job, now_ns: int) -> None:
        """The job may be scheduled from now on."""
        del self.waiting[job.sequence]
        job.released_ns = now_ns
        heapq.heappush(self._ready, (job.sequence, job))
        if not job.landed:
            self.landing[job.sequence] = job

    def unfinished(self) -> list[tuple[int, int]]:
        """(context, tokens left) of every prefill that is released or cut."""
        jobs = [*self._cut, *(job for _, job in self._ready)]
        return [
            (job.request.cached_tokens + job.computed_tokens, job.request.new_tokens - job.computed_tokens)
            for job in jobs
        ]

    def first_chunk_tokens(self, job: Job) -> int:
        """Tokens of the job's first step, were it alone there."""
        return job.request.new_tokens if self._budget is None else min(job.request.new_tokens, self._budget)

    def fill_step(self) -> list[tuple[Job, Chunk]]:
        """The prefill chunks of the step that forms now; they count as taken."""
        left = None if self._budget is None else self._budget - self.decode_batch
        taken: list[tuple[Job, Chunk]] = []
        for job in self._cut:
            left = _take(job, left, taken)
        while self._ready and (left is None or left > 0) and self._has_seat(taken):
            left = _take(heapq.heappop(self._ready)[1], left, taken)
        self._cut = [job for job in self._cut if job.computed_tokens < job.request.new_tokens] + [
            job for job, chunk in taken if chunk.first_token == 0 and job.computed_tokens < job.request.new_tokens
        ]
        return taken

    def _has_seat(self, taken: list[tuple[Job, Chunk]]) -> bool:
        """Whether one more request may join those that decode, were cut, or have just been taken."""
        if self._max_batch is None:
            return True
        newly = sum(chunk.first_token == 0 for _, chunk in taken)
        return self.decode_batch + len(self._cut) + newly < self._max_batch

    def begin_decoding(self, job: Job) -> None:
        """The job's prefill has ended; it decodes its remaining tokens, one in each step."""
        job.done_at_step = self.decode_steps + job.request.output_tokens - 1
        heapq.heappush(self._decoding, (job.done_at_step, job.sequence, job))
        self.context_tokens += job.request.cached_tokens + job.request.new_tokens

    def advance_decoding(self, num_steps: int) -> list[Job]:
        """`num_steps` steps have run, with all decoding requests in each; returns those that are done and leave."""
        self.decode_steps += num_steps
        self.context_tokens += num_steps * len(self._decoding)
        done: list[Job] = []
        while self._decoding and self._decoding[0][0] <= self.decode_steps:
            job = heapq.heappop(self._decoding)[2]
            self.context_tokens -= sum(job.request[:3]) - 1
            done.append(job)
        return done


def _take(job: Job, left: int | None, taken: list[tuple[Job, Chunk]]) -> int | None:
    """Gives the job as many tokens as the budget has; returns what is left of it."""
    remaining = job.request.new_tokens - job.computed_tokens
    tokens = remaining if left is None else min(remaining, left)
    if tokens <= 0:
        return left
    taken.append((job, Chunk(job.sequence, job.computed_tokens, tokens)))
    job.computed_tokens += tokens
    return None if left is None else left - tokens
