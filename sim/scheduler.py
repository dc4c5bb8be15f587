"""How a step is filled: the queues of the world's engine, without a clock.

A request goes ``waiting -> ready -> (partly prefilled ->) decoding -> gone``. *Waiting* is not yet released; *ready* is
released and in no step yet. The rules are vLLM's: decoding requests come first with a token each, then prefills that
were cut, then ready ones in order of arrival, each with as many tokens as the budget still has; whoever decodes,
decodes in every step. Where blocks are counted and no more are left, the youngest that runs goes back to the queue.

Decoding is kept as a count, not as a list that every step walks: a request notes the decode step at which it will be
done, so that a stretch of k steps costs the same as one.
"""

from __future__ import annotations

import heapq

from lamella.reference.timeline import Chunk
from lamella.sim.kv_blocks import KvBlocks
from lamella.sim.requests import Job, Request
from lamella.sim.settings import EngineSettings, SubmitAt

__all__ = ["EngineSettings", "Job", "Request", "Scheduler", "SubmitAt"]


class Scheduler:
    """The queues, and the filling of steps."""

    def __init__(self, settings: EngineSettings) -> None:
        self._budget = settings.token_budget
        self._max_batch = settings.max_batch
        self.blocks = None if settings.kv_blocks is None else KvBlocks(settings.kv_blocks, settings.block_tokens)
        self.waiting: dict[int, Job] = {}
        self.loading: dict[int, Job] = {}
        """Of those, the ones whose load was put on its way."""
        self.landing: dict[int, Job] = {}
        """Released, with layers still on the wire: every step waits for these, whoever is in its batch (REL-2)."""
        self._ready: list[tuple[int, Job]] = []  # all that a step asks for is theirs
        self._roomless: list[tuple[int, Job]] = []  # released as well, and without blocks, where those are counted
        self._cut: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []  # may hold jobs that have been preempted
        self._running: dict[int, Job] = {}  # where blocks are counted: all that have been in a step, the youngest last
        self._admits = True  # not at a poll at which somebody lost blocks
        self.queued_before: int | None = None
        """The first request that waits for blocks to load into: no later one may take any before it."""
        self.decode_batch = 0
        """How many requests decode."""
        self.decode_steps = 0
        self.decode_without_load = 0
        """How many of those had nothing to load."""
        self.context_tokens = 0
        """The sum of the contexts of those who decode."""

    @property
    def steps_to_next_end(self) -> int:
        """Decode steps until the next of them is done, or until there are no blocks for one more."""
        while not self._decodes(self._decoding[0]):
            heapq.heappop(self._decoding)
        steps = self._decoding[0][0] - self.decode_steps
        return steps if self.blocks is None else self.blocks.steps_that_fit(steps)

    @staticmethod
    def _decodes(entry: tuple[int, int, Job]) -> bool:
        """Whether the entry is not one that a preemption left behind."""
        return entry[2].decoding and entry[2].done_at_step == entry[0]

    def release(self, job: Job, now_ns: int) -> None:
        """The job may be scheduled from now on."""
        del self.waiting[job.sequence]
        self.loading.pop(job.sequence, None)
        job.released = True
        if job.first_started_ns < 0:
            job.released_ns = now_ns
        needs_room = self.blocks is not None and not job.held_blocks
        heapq.heappush(self._roomless if needs_room else self._ready, (job.sequence, job))
        if not job.landed:
            self.landing[job.sequence] = job

    @property
    def has_unfinished(self) -> bool:
        """Whether a prefill is released or cut."""
        return bool(self._cut or self._ready or self._roomless)

    def unfinished(self) -> list[tuple[int, int]]:
        """(context, tokens left) of each such prefill."""
        return self.cut() + [_left(job) for _, job in (*self._ready, *self._roomless)]

    def steppable(self) -> list[tuple[int, int]]:
        """The same of those that the next step may take: whoever gets no blocks is not among them."""
        found = self.cut() + [_left(job) for _, job in self._ready]
        blocks = self.blocks
        if blocks is None or not self._roomless or not self._may_have_room(self._roomless[0][1], blocks):
            return found
        room = blocks.room
        for sequence, job in sorted(self._roomless):
            room -= blocks.blocks_for(job.prefilled_context)
            if room < 0 or not self._is_next(sequence):
                break
            found.append(_left(job))
        return found

    def cut(self) -> list[tuple[int, int]]:
        """The same of prefills that have had a step."""
        return [_left(job) for job in self._cut]

    def decoding(self) -> list[Job]:
        """Those who decode."""
        return [entry[2] for entry in self._decoding if self._decodes(entry)]

    def first_chunk_tokens(self, job: Job) -> int:
        """Tokens of the job's first step, were it alone there."""
        return job.prefill_tokens if self._budget is None else min(job.prefill_tokens, self._budget)

    # ---------------------------------------------------------------- filling a step

    def fill_step(self) -> list[tuple[Job, Chunk]]:
        """The prefill chunks of the step that forms now; they count as taken."""
        if not self.has_unfinished:
            return []
        left = None if self._budget is None else self._budget - self.decode_batch
        taken: list[tuple[Job, Chunk]] = []
        for job in self._cut:
            left = _take(job, left, taken)
        continued = len(taken)
        while (left is None or left > 0) and self._has_seat(len(taken) - continued):
            chosen = self._next_ready()
            if chosen is None:
                break
            left = _take(chosen, left, taken)
        if self._cut or taken:
            self._cut = [job for job in self._cut if job.computed_tokens < job.prefill_tokens] + [
                job for job, _ in taken[continued:] if job.computed_tokens < job.prefill_tokens
            ]
        return taken

    def _has_seat(self, joined: int) -> bool:
        """Whether one more request may join those that decode, were cut, or have just been taken, so many."""
        return self._max_batch is None or self.decode_batch + len(self._cut) + joined < self._max_batch

    def _next_ready(self) -> Job | None:
        """Takes the first released request that holds its blocks already or may have them; it runs from now on.

        Whoever loaded holds them, and may pass one that waits for room; else the two could wait for each other.
        """
        blocks, chosen = self.blocks, self._ready
        if blocks is not None and not self._admits:
            return None
        if blocks is not None and self._roomless:
            first = self._roomless[0]
            if (not chosen or first < chosen[0]) and self._may_have_room(first[1], blocks):
                chosen = self._roomless
        if not chosen:
            return None
        _, job = heapq.heappop(chosen)
        if blocks is not None:
            blocks.hold(job)
            self._running[job.sequence] = job
        return job

    def _may_have_room(self, job: Job, blocks: KvBlocks) -> bool:
        return self._admits and self._is_next(job.sequence) and blocks.has_room_for(job)

    def _is_next(self, sequence: int) -> bool:
        """Whether no earlier request waits for blocks to load into."""
        return self.queued_before is None or sequence < self.queued_before

    def may_hold(self, job: Job) -> bool:
        """Whether a load may be submitted: its prompt has room, and no earlier request waits for that room."""
        if self.blocks is None:
            return True
        earlier = bool(self._roomless) and self._roomless[0][0] < job.sequence
        if not self._admits or earlier or not self.blocks.has_room_for(job):
            return False
        self.blocks.hold(job)
        return True

    def preempt_for_decoding(self) -> list[tuple[Job, int]]:
        """Those who lose their blocks so that all others can decode one more token, and wait again.

        Each with the tokens that it computes again beyond those it still had to: what was done, and what it generated.
        """
        lost: list[tuple[Job, int]] = []
        if self.blocks is not None:
            while self.blocks.growth(1) > self.blocks.free:
                lost.append(self._preempt(self._running.popitem()[1]))
            self._admits = not lost or not (self.decode_batch or self._cut)
        return lost

    def _preempt(self, job: Job) -> tuple[Job, int]:
        assert self.blocks is not None, "blocks are lost only where they are counted"
        again = job.computed_tokens - job.generated
        if job.decoding:
            left = job.done_at_step - self.decode_steps
            context = job.request.cached_tokens + job.request.new_tokens + job.request.output_tokens - 1 - left
            self.blocks.end(job, context)
            self.context_tokens -= context
            self._decode_less(job)
            job.generated = job.request.output_tokens - left
        else:
            self.blocks.end(job, None)
            self._cut.remove(job)
        job.preemptions += 1
        job.computed_tokens = 0
        job.released = False
        self.waiting[job.sequence] = job
        return job, again + job.generated

    def throw_back(self, job: Job) -> None:
        """The job's prefill begins again, in the next step."""
        job.computed_tokens = 0
        if job in self._cut:
            self._cut.remove(job)
        self._cut.insert(0, job)

    def drop(self, job: Job) -> None:
        """The job is in no queue any more, and holds nothing."""
        for jobs in (self.waiting, self.loading, self.landing):
            jobs.pop(job.sequence, None)
        for ready in (self._ready, self._roomless):
            ready[:] = [entry for entry in ready if entry[1] is not job]
            heapq.heapify(ready)
        self._cut = [other for other in self._cut if other is not job]
        self._running.pop(job.sequence, None)
        if self.blocks is not None:
            self.blocks.end(job, None)

    # ---------------------------------------------------------------- decoding

    def begin_decoding(self, job: Job) -> None:
        """The job's prefill has ended; it decodes its remaining tokens, one in each step."""
        job.done_at_step = self.decode_steps + job.request.output_tokens - job.generated - 1
        job.decoding = True
        heapq.heappush(self._decoding, (job.done_at_step, job.sequence, job))
        self.decode_batch += 1
        self.decode_without_load += not job.request.load.slice_layers
        self.context_tokens += job.prefilled_context
        if self.blocks is not None:
            self.blocks.begin_decoding(job)

    def advance_decoding(self, num_steps: int) -> list[Job]:
        """`num_steps` steps have run, with all decoding requests in each; returns those that are done and leave."""
        self.decode_steps += num_steps
        self.context_tokens += num_steps * self.decode_batch
        if self.blocks is not None:
            self.blocks.advance(num_steps)
        done: list[Job] = []
        while self._decoding and self._decoding[0][0] <= self.decode_steps:
            entry = heapq.heappop(self._decoding)
            if self._decodes(entry):
                job = entry[2]
                context = sum(job.request[:3]) - 1
                self.context_tokens -= context
                self._decode_less(job)
                if self.blocks is not None:
                    self.blocks.stop_growing(job, context)
                done.append(job)
        return done

    def _decode_less(self, job: Job) -> None:
        job.decoding = False
        self.decode_batch -= 1
        self.decode_without_load -= not job.request.load.slice_layers

    def leave(self, job: Job) -> None:
        """The job is done; it holds its blocks as long as it stores them."""
        if self.blocks is not None:
            self._running.pop(job.sequence, None)
            if not job.storing:
                self.blocks.end(job, None)


def _left(job: Job) -> tuple[int, int]:
    return job.request.cached_tokens + job.computed_tokens, job.prefill_tokens - job.computed_tokens


def _take(job: Job, left: int | None, taken: list[tuple[Job, Chunk]]) -> int | None:
    """Gives the job as many tokens as the budget has; returns what is left of it."""
    remaining = job.prefill_tokens - job.computed_tokens
    tokens = remaining if left is None else min(remaining, left)
    if tokens <= 0:
        return left
    taken.append((job, Chunk(job.sequence, job.computed_tokens, tokens)))
    job.computed_tokens += tokens
    return None if left is None else left - tokens
