"""What is written down of a world: a record a request, and a record a step."""

from __future__ import annotations

from typing import NamedTuple

from lamella.reference.timeline import Chunk


class RequestRecord(NamedTuple):
    """What happened to one request; instants in ns.

    Attributes:
        caused_stall_ns: how long the engine stood waiting for this request's layers.
        victim_stall_ns: how long this request stood in its steps because of others' layers, decoding included.
        prefill_stall_ns: how long this request stood between its start and its first token, whoever was the cause.
        layer_stall_ns: `caused_stall_ns` by layer; empty if there was none.
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

    @property
    def ttft_ns(self) -> int:
        """From arrival to first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> float:
        """Mean time of an output token after the first; 0 if there is none."""
        return (self.end_ns - self.first_token_ns) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class StepRecord(NamedTuple):
    """What happened in one step, or in a stretch of `num_steps` decode steps."""

    polled_ns: int
    start_ns: int
    end_ns: int
    chunks: tuple[Chunk, ...]
    layer_stall_ns: tuple[int, ...]
    culprits: tuple[int | None, ...]
    decode_batch: int
    num_steps: int
