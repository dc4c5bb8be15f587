"""A request as it comes to the world, and as a job inside it."""

from __future__ import annotations

from typing import NamedTuple

from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.ordering import Submission
from lamella.reference.timeline import NOTHING_TO_LOAD, Load
from lamella.sim.hardware import Fault
from lamella.sim.records import Ending, RequestRecord, Suffered
from lamella.sim.stations import Transfer


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
        resident_tokens: how many of the cached tokens are in the engine's blocks already; the others are computed if
            the load fails.
        tier: the storage tier its load must come from first; empty for the host pool.
        store: what is carried back when its prefill is done.
        fault: what goes wrong with its load.
    """

    cached_tokens: int
    new_tokens: int
    output_tokens: int = 1
    load: Load = NOTHING_TO_LOAD
    due_after_ns: int | None = None
    tag: int = 0
    admission_ns: int = 0
    resident_tokens: int = 0
    tier: str = ""
    store: Load = NOTHING_TO_LOAD
    fault: Fault | None = None


class Job:
    """A request inside the world, with everything that happened to it."""

    __slots__ = (
        "admitted_ns",
        "all_landed_ns",
        "arrival_ns",
        "began_ns",
        "caused_before_start_ns",
        "caused_ns",
        "computed_tokens",
        "decoding",
        "done_at_step",
        "due",
        "ended",
        "ending",
        "failure",
        "first_layer_ns",
        "first_started_ns",
        "first_token_ns",
        "gate",
        "generated",
        "held_blocks",
        "layer_stall_ns",
        "preemptions",
        "prefill_stall_ns",
        "prefill_steps",
        "rank",
        "ready_ns",
        "released",
        "released_ns",
        "request",
        "sequence",
        "stall_before_start_ns",
        "started_ns",
        "stored_ns",
        "storing",
        "submitted_ns",
        "suffered",
        "thrown_back",
        "transfer",
        "victim_from_ns",
    )

    def __init__(self, sequence: int, request: Request, arrival_ns: int, admitted_ns: int) -> None:
        self.sequence = sequence
        self.request = request
        self.arrival_ns = arrival_ns
        self.admitted_ns = self.submitted_ns = self.ready_ns = admitted_ns
        self.first_layer_ns = self.all_landed_ns = admitted_ns
        self.released_ns = self.started_ns = self.first_started_ns = self.first_token_ns = self.stored_ns = -1
        self.began_ns = -1
        self.gate: LayerArrivalGate[int] | None = None  # its events are landing instants
        self.transfer: Transfer | None = None
        self.due = False  # enough layers have landed; the next poll releases it
        self.released = False  # may run, or runs
        self.decoding = False
        self.thrown_back = False  # its load failed in the step under way
        self.storing = False
        self.ended = False  # its last token is there, or it has failed
        self.computed_tokens = 0
        self.generated = 0  # output tokens whose KV must be computed again, after a preemption
        self.held_blocks = 0
        self.done_at_step = 0
        self.caused_ns = 0
        self.prefill_stall_ns = 0
        self.caused_before_start_ns = 0
        self.stall_before_start_ns = self.victim_from_ns = 0
        self.layer_stall_ns: list[int] | None = None
        self.suffered: list[Suffered] | None = None
        self.prefill_steps = self.preemptions = self.rank = 0
        self.failure = ""
        self.ending = Ending.DONE

    @property
    def landed(self) -> bool:
        """Whether nothing of it is on the wire or yet to be."""
        return self.gate is None or self.gate.all_landed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return self.request.cached_tokens + self.request.new_tokens

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before the next one is generated."""
        return self.request.new_tokens + self.generated

    @property
    def prefilled_context(self) -> int:
        """The context at that point."""
        return self.request.cached_tokens + self.request.new_tokens + self.generated

    def submission(self, now_ns: int) -> Submission:
        """The load as the link's order policy sees it when submitted now."""
        due = self.request.due_after_ns
        deadline = None if due is None else self.arrival_ns + due
        return Submission(self.sequence, now_ns, self.request.load.slice_bytes, deadline)

    def record(self, end_ns: int, victim_stall_ns: int) -> RequestRecord:
        """What is written down of it when it leaves."""
        request = self.request
        return RequestRecord(
            self.sequence,
            request.tag,
            request.cached_tokens,
            request.new_tokens,
            request.output_tokens,
            sum(request.load.slice_bytes),
            self.arrival_ns,
            self.submitted_ns,
            self.first_layer_ns,
            self.all_landed_ns,
            self.released_ns,
            self.started_ns,
            self.first_token_ns,
            end_ns,
            self.caused_ns,
            victim_stall_ns,
            self.prefill_stall_ns,
            tuple(self.layer_stall_ns or ()),
            self.admitted_ns,
            self.ready_ns,
            self.first_started_ns,
            tuple(self.suffered or ()),
            self.rank,
            self.preemptions,
            self.failure,
            self.ending,
            sum(request.store.slice_bytes),
            self.stored_ns,
            self.prefill_steps,
            request.load.slice_layers,
            self.began_ns,
        )
