"""What is written down of a world: a record a request, a step, and each occupation of a station.

Everything that explains or draws a run is computed from these three. Instants are integer ns of the world's clock, and
-1 stands for what never happened.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from lamella.reference.timeline import Chunk


class Ending(Enum):
    """How a request left."""

    DONE = "done"
    """With its last token."""
    FAILED = "failed"
    """Its load failed and the engine's policy is to fail such requests; what came after the failure did not happen."""


class Station(Enum):
    """What a slice occupies on its way."""

    TIER = "tier"
    """The storage below the host pool: file, network store."""
    H2D = "h2d"
    """The link to the device."""
    SCATTER = "scatter"
    """The kernel from staging into the engine's blocks."""
    D2H = "d2h"
    """The link from the device: stores."""


class Suffered(NamedTuple):
    """A stall that a request stood in between its start and its first token.

    Attributes:
        layer: the layer that the step had reached.
        culprit: sequence number of the request whose slice landed last; the request itself where it waited for its own.
        stall_ns: how long.
    """

    layer: int
    culprit: int
    stall_ns: int


class TtftParts(NamedTuple):
    """Where a request's time to first token went; the parts add up to it exactly.

    Attributes:
        admission_ns: on the host, before the engine knew the request.
        blocks_ns: in the engine's queue until its load was submitted: the poll it waited for, and room for its KV.
        transfer_ns: until so much had landed that the release policy was content; under a policy with forecast, until
            release.
        poll_ns: from then to the poll that released it.
        queue_ns: released and not started: budget, seats, blocks.
        redone_ns: from the first start to the last one, where a preemption or a failed load threw work away.
        stall_ns: in its steps, waiting for layers, whoever was the cause.
        compute_ns: in its steps, computing, with all others in them.
    """

    admission_ns: int
    blocks_ns: int
    transfer_ns: int
    poll_ns: int
    queue_ns: int
    redone_ns: int
    stall_ns: int
    compute_ns: int


class RequestRecord(NamedTuple):
    """What happened to one request; instants in ns.

    Attributes:
        sequence: its number in its world, by admission.
        tag: the caller's own number.
        cached_tokens: context that was not computed; what a failed load should have brought counts as new.
        load_bytes: what the link was to carry.
        admitted_ns: the engine has it in its queue.
        submitted_ns: its load reached the link, the last time; without a load, when the engine could have taken it.
        first_layer_ns: its first slice landed.
        all_landed_ns: its last slice landed.
        ready_ns: so much had landed that the release policy was content.
        released_ns: the poll that released it.
        started_ns: first layer of the step with its first token; of the last start after a preemption or a failed load.
        first_started_ns: the same, of the first start.
        caused_stall_ns: how long the engine stood waiting for this request's layers.
        victim_stall_ns: how long this request stood in its steps because of others' layers, decoding included.
        prefill_stall_ns: how long this request stood between its start and its first token, whoever was the cause.
        layer_stall_ns: `caused_stall_ns` by layer; empty if there was none.
        suffered: `prefill_stall_ns` by layer and culprit, in order of time.
        rank: the tensor-parallel rank whose last slice landed last; 0 with one rank.
        preemptions: how often it lost its blocks to others and began again.
        failure: why its load failed; empty if it did not.
        ending: how it left.
        store_bytes: what it stored, the other way over the link.
        stored_ns: the last of that had left the device.
        prefill_steps: steps that computed its prompt.
        slice_layers: layers of each slice of its load.
        began_ns: the host began the pass with its first step; -1 in an engine whose steps follow each other.
    """

    sequence: int
    tag: int
    cached_tokens: int
    new_tokens: int
    output_tokens: int
    load_bytes: int
    arrival_ns: int
    submitted_ns: int
    first_layer_ns: int
    all_landed_ns: int
    released_ns: int
    started_ns: int
    first_token_ns: int
    end_ns: int
    caused_stall_ns: int
    victim_stall_ns: int
    prefill_stall_ns: int
    layer_stall_ns: tuple[int, ...]
    admitted_ns: int
    ready_ns: int
    first_started_ns: int
    suffered: tuple[Suffered, ...]
    rank: int
    preemptions: int
    failure: str
    ending: Ending
    store_bytes: int
    stored_ns: int
    prefill_steps: int
    slice_layers: tuple[int, ...]
    began_ns: int = -1

    @property
    def ttft_ns(self) -> int:
        """From arrival to first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> float:
        """Mean time of an output token after the first; 0 if there is none."""
        return (self.end_ns - self.first_token_ns) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def ttft_parts(self) -> TtftParts:
        """Where the time to first token went.

        Raises:
            ValueError: the request failed before it had a first token.
        """
        if self.first_token_ns < 0:
            raise ValueError(f"request {self.sequence} has no first token: {self.failure}")
        return TtftParts(
            self.admitted_ns - self.arrival_ns,
            self.submitted_ns - self.admitted_ns,
            self.ready_ns - self.submitted_ns,
            self.released_ns - self.ready_ns,
            self.first_started_ns - self.released_ns,
            self.started_ns - self.first_started_ns,
            self.prefill_stall_ns,
            self.first_token_ns - self.started_ns - self.prefill_stall_ns,
        )


class StepRecord(NamedTuple):
    """What happened in one step, or in a stretch of `num_steps` decode steps.

    Attributes:
        polled_ns: the poll that formed it.
        start_ns: its first layer.
        end_ns: the end of its last.
        chunks: the prefills in it; `Chunk.request` is a sequence number.
        layer_stall_ns: how long each layer waited; empty for a stretch.
        culprits: for whose slice; None where nobody waited.
        decode_batch: requests that decoded a token in each of its steps.
        num_steps: 1, or a stretch's length.
        waiting: requests in the queue that were not released.
        held_blocks: KV blocks in use at the poll, reservations of loads included; 0 where blocks are not counted.
        preempted: sequence numbers that lost their blocks at this poll.
    """

    polled_ns: int
    start_ns: int
    end_ns: int
    chunks: tuple[Chunk, ...]
    layer_stall_ns: tuple[int, ...]
    culprits: tuple[int | None, ...]
    decode_batch: int
    num_steps: int
    waiting: int
    held_blocks: int
    preempted: tuple[int, ...]


class SliceRecord(NamedTuple):
    """One occupation of one station by a slice, or by the part of it that fits a staging window.

    Attributes:
        station: where.
        rank: of which tensor-parallel rank.
        sequence: of which request.
        part: which slice of its load, or of its store.
        begin_ns: the station took it.
        end_ns: the station let it go; on a shared link, its last byte.
        num_bytes: how much.
    """

    station: Station
    rank: int
    sequence: int
    part: int
    begin_ns: int
    end_ns: int
    num_bytes: int
