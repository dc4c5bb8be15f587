"""The engine's KV blocks: who holds how many, and how many a stretch of decode steps will ask for."""

from __future__ import annotations

from bisect import bisect_right

from lamella.sim.requests import Job


class KvBlocks:
    """A count of equal blocks.

    A prompt's blocks are held from submission on. Whoever decodes asks for a block each time its context fills one; so
    that a long stretch costs no more than a step, decoding requests are counted by how full their last block is.

    >>> blocks = KvBlocks(capacity=10, block_tokens=4)
    >>> blocks.blocks_for(9)
    3
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self.least_free = capacity
        """What was free when most was held."""
        self._block_tokens = block_tokens
        self._fill = [0] * block_tokens  # decoding requests by (context when they began - step) mod block
        self._growing = 0  # how many decode
        self._step = 0

    @property
    def held(self) -> int:
        """Blocks in use, reservations included."""
        return self.capacity - self.free

    @property
    def room(self) -> int:
        """Free blocks, but one for each who decodes."""
        return self.free - self._growing

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill, the last perhaps in part."""
        return -(-tokens // self._block_tokens)

    def has_room_for(self, job: Job) -> bool:
        """Whether the job's prompt fits beside what is held, and a block for each who decodes.

        So room appears when somebody leaves, and never in the midst of a stretch of decode steps.
        """
        return self.blocks_for(job.prefilled_context) - job.held_blocks <= self.room

    def hold(self, job: Job) -> None:
        """The job holds the blocks of its prompt; `has_room_for` has said that it may."""
        more = self.blocks_for(job.prefilled_context) - job.held_blocks
        job.held_blocks += more
        self.free -= more
        self.least_free = min(self.least_free, self.free)
        assert self.free >= 0, "blocks are given out only where there are any"

    def begin_decoding(self, job: Job) -> None:
        """The job's context grows by a token in each step from now on."""
        self._fill[(job.prefilled_context - self._step) % self._block_tokens] += 1
        self._growing += 1

    def end(self, job: Job, context_tokens: int | None) -> None:
        """The job holds nothing any more.

        Args:
            job: it.
            context_tokens: its context if it decodes, None if it does not.
        """
        held = job.held_blocks
        if context_tokens is not None:
            self._grows_no_more(context_tokens)
            held = self.blocks_for(context_tokens)
        job.held_blocks = 0
        self.free += held
        assert self.free <= self.capacity, "a block is given back once"

    def stop_growing(self, job: Job, context_tokens: int) -> None:
        """The job decodes no longer, and holds its blocks until they have been stored."""
        self._grows_no_more(context_tokens)
        job.held_blocks = self.blocks_for(context_tokens)

    def _grows_no_more(self, context_tokens: int) -> None:
        self._fill[(context_tokens - self._step) % self._block_tokens] -= 1
        self._growing -= 1

    def growth(self, num_steps: int) -> int:
        """Blocks that all who decode will ask for in so many steps."""
        size = self._block_tokens
        rounds, rest = divmod(num_steps, size)
        # Beyond whole blocks, whoever has room for fewer than `rest` tokens asks for one more.
        return rounds * self._growing + sum(self._fill[(-self._step - have) % size] for have in range(rest))

    def steps_that_fit(self, most: int) -> int:
        """Decode steps, at most so many, for which there are blocks."""
        if self.growth(most) <= self.free:
            return most
        return bisect_right(range(1, most + 1), self.free, key=self.growth)

    def advance(self, num_steps: int) -> None:
        """So many decode steps have run, with all who decode in each."""
        self.free -= self.growth(num_steps)
        self.least_free = min(self.least_free, self.free)
        self._step += num_steps
        assert self.free >= 0, "blocks are given out only where there are any"
