"""How the world's engine behaves: when it polls and submits, what fits into a step, what happens if a load fails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SubmitAt(Enum):
    """When a load reaches the link."""

    ARRIVAL = "arrival"
    """At once: a look-up outside the engine's loop, or a thread of its own."""
    POLL = "poll"
    """At the engine's next poll, before the forward of the step formed there: vLLM 0.26, or a connector with a thread
    of its own."""
    AFTER_FORWARD = "after_forward"
    """Behind the launch of the step formed at that poll: what vLLM 0.32 does with asynchronous loads. A launch that
    waits for layers ends with the last of its waits."""


class StepsWait(Enum):
    """Which released loads the layers of a step wait for, where an engine schedules ahead."""

    BATCH = "batch"
    """Those of requests in its batch: nobody else reads their blocks."""
    EVERY = "every"
    """All that are landing, whoever is in the batch: the connector until 2026-11-29."""


class OnLoadFailure(Enum):
    """What becomes of a request whose load failed."""

    RECOMPUTE = "recompute"
    """It computes what it should have loaded; a step that used it is thrown away for it."""
    FAIL = "fail"
    """It ends there."""


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
        launch_ns: how long the host takes to launch a forward, which loads follow with `SubmitAt.AFTER_FORWARD`.
        submit_ns: what each submission costs the engine's thread; the step formed at that poll begins so much later.
        kv_blocks: blocks of the engine's cache; None: enough. A request holds those of its whole prompt from its
            submission on, and grows while it decodes; the youngest that runs loses its blocks if there are no more.
        block_tokens: tokens in a block.
        load_timeout_ns: a load that has not landed so long after its submission has failed; None: no bound.
        on_failure: what becomes of its request.
        wake_ns: from a landing until a step that stood waiting for it goes on.
        admits_itself: whether a request's admission is done by the engine's own thread, which polls only afterwards;
            False where another process does it.

    Raises:
        ValueError: a negative time, or a budget, batch, block or number of blocks below 1.
    """

    start_delay_ns: int = 0
    idle_poll_ns: int = 0
    token_budget: int | None = 8192
    max_batch: int | None = 256
    submit_at: SubmitAt = SubmitAt.ARRIVAL
    launch_ns: int = 0
    submit_ns: int = 0
    kv_blocks: int | None = None
    block_tokens: int = 16
    load_timeout_ns: int | None = None
    on_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    wake_ns: int = 0
    admits_itself: bool = False

    def __post_init__(self) -> None:
        times = ("start_delay_ns", "idle_poll_ns", "launch_ns", "submit_ns", "wake_ns")
        counts = ("token_budget", "max_batch", "kv_blocks", "block_tokens", "load_timeout_ns")
        for name, least in (*((name, 0) for name in times), *((name, 1) for name in counts)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
