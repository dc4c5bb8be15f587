"""What the scheduler side tells the workers each step, and what each of them answers.

Plain values that pickle: with several ranks, or an engine core of its own, the two sides share no memory. Numbers of
loads, stores and fetches are the scheduler side's; slots are numbers of host-memory slots, the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lamella.reference.keys import ChunkKey
from lamella.reference.release import ReleasePolicy, StallPrice

BlockTables = tuple[tuple[int, ...], ...]
"""For each KV cache group the block ids of a sequence, from its first token on."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How one load moves and is released, where that is chosen for each.

    Attributes:
        width: layers a slice, or a schedule; None: as the settings say.
        release: when its request may run.
        compute_ns: its prefill's first step, as predicted.
        load_ns: its time on the link, as predicted.
    """

    width: int | tuple[int, ...] | None
    release: ReleasePolicy
    compute_ns: int
    load_ns: int


@dataclass(frozen=True, slots=True)
class StepWeights:
    """What a release during this step is weighed against.

    Attributes:
        price: what a stall of the next step costs others; its `busy_ns` is the worker's to fill in.
        full: whether the next step has no room for anybody who is released now.
        prefills: of each prefill that goes on in the next step, the last load that had been ordered when it began.
        step_fixed_ns: what a step costs besides its tokens.
    """

    price: StallPrice
    full: bool
    prefills: tuple[int, ...]
    step_fixed_ns: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Bring tokens `[skip_tokens, num_tokens)` of a request from slots into its blocks.

    Attributes:
        number: of the load.
        request: whose.
        slots: of chunks `first_chunk`, `first_chunk + 1`, ...
        blocks: the request's block tables, up to `num_tokens`.
        joins_step: the request runs in this very step (synchronous); otherwise it waits to be released.
        plan: how it moves; None: as the settings say for all.
    """

    number: int
    request: str
    slots: tuple[int, ...]
    first_chunk: int
    blocks: BlockTables
    num_tokens: int
    skip_tokens: int
    joins_step: bool
    plan: LoadPlan | None = None


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Keep chunks of a request whose KV is complete once this step's forward has run.

    Attributes:
        keys: of the chunks, for a tier behind the host pool; each rank puts its own key space in. None: no tier is to
            keep them.
        (others): as `LoadOrder`.
    """

    number: int
    request: str
    slots: tuple[int, ...]
    first_chunk: int
    blocks: BlockTables
    num_tokens: int
    skip_tokens: int
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Bring objects from the file tier into slots."""

    number: int
    slots: tuple[int, ...]
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """One step's orders.

    Attributes:
        loads, stores, fetches: what to begin.
        cancels: loads nobody can be reading; what has not been issued of them never will be.
        released: loads whose requests run from this step on, though no rank has reported them received.
        flushes: stores that must have ended before this step writes to its blocks.
        num_tokens: tokens the step computes; 0: no forward pass.
        num_decoding: requests of the batch that stand still in a stall.
        held_blocks: blocks of loads that have not ended well which the batch takes for computed (SAFE-3).
        held_is_known: `held_blocks` are all that there are, so that a load of which the batch holds none is not waited
            for; false: the batch may hold any.
        rewritten_blocks: blocks of failed loads that this step computes anew.
        wants_report: answer even if there is nothing new.
        weights: for releases; None where the settings' release does without.
        expected_ns: the profile's time of this step, where that is to be measured; else 0.
        runner_writes: the model runner itself writes blocks for this step, behind its orders and before its forward
            pass: no load may begin ahead of that.
    """

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    fetches: tuple[FetchOrder, ...] = ()
    cancels: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    flushes: tuple[int, ...] = ()
    num_tokens: int = 0
    num_decoding: int = 0
    held_blocks: frozenset[int] = frozenset()
    held_is_known: bool = False
    rewritten_blocks: frozenset[int] = frozenset()
    wants_report: bool = False
    weights: StepWeights | None = None
    expected_ns: int = 0
    runner_writes: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How a piece of work ended on some ranks: on how many, and whether well on all of them."""

    ranks: int
    ok: bool

    def merged(self, other: Ended) -> Ended:
        """On both sets of ranks."""
        return Ended(self.ranks + other.ranks, self.ok and other.ok)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a rank has measured since its last report, added up; on several ranks, of the slowest.

    Attributes:
        loads, slices, load_bytes, load_ns: loads that landed, and the time the link had for them.
        bounded, bounded_bytes, least_ns, most_ns: loads in one slice of whose time only that is known.
        steps, step_expected_ns, step_ns: steps in which no layer waited, what was expected of them, and their time.
    """

    loads: int = 0
    slices: int = 0
    load_bytes: int = 0
    load_ns: int = 0
    bounded: int = 0
    bounded_bytes: int = 0
    least_ns: int = 0
    most_ns: int = 0
    steps: int = 0
    step_expected_ns: int = 0
    step_ns: int = 0

    def with_load(self, slices: int, num_bytes: int, took_ns: int) -> Observed:
        """And one more load."""
        return replace(
            self,
            loads=self.loads + 1,
            slices=self.slices + slices,
            load_bytes=self.load_bytes + num_bytes,
            load_ns=self.load_ns + took_ns,
        )

    def with_bounded_load(self, num_bytes: int, least_ns: int, most_ns: int) -> Observed:
        """And one more load, of which is known that it took no less and no more than so long."""
        return replace(
            self,
            bounded=self.bounded + 1,
            bounded_bytes=self.bounded_bytes + num_bytes,
            least_ns=self.least_ns + least_ns,
            most_ns=self.most_ns + most_ns,
        )

    def with_step(self, expected_ns: int, took_ns: int) -> Observed:
        """And one more step."""
        return replace(
            self,
            steps=self.steps + 1,
            step_expected_ns=self.step_expected_ns + expected_ns,
            step_ns=self.step_ns + took_ns,
        )

    def merged(self, other: Observed) -> Observed:
        """The rank whose loads, and the rank whose steps, took longer."""
        loads = max((self, other), key=lambda one: (one.loads, one.load_ns))
        bounds = max((self, other), key=lambda one: (one.bounded, one.most_ns))
        steps = max((self, other), key=lambda one: (one.steps, one.step_ns))
        return Observed(
            loads.loads,
            loads.slices,
            loads.load_bytes,
            loads.load_ns,
            bounds.bounded,
            bounds.bounded_bytes,
            max(one.least_ns for one in (self, other) if one.bounded == bounds.bounded),
            bounds.most_ns,
            steps.steps,
            steps.step_expected_ns,
            steps.step_ns,
        )


@dataclass(slots=True)
class StepReport:
    """What has ended since the last report, on one rank or, merged, on several.

    Attributes:
        loads, stores: by number; a store has ended when its blocks are not read any more.
        puts: stores whose slots a tier does not read any more, by number.
        fetches: by number, one `Ended` an object.
        ready_slots: slots from 0 on that can be used, by rank; a rank that has nothing to tell is not in the report.
        observed: what was measured, where it is used.
        releases_whole: a rank of the report releases loads only when all of them has landed.
    """

    loads: dict[int, Ended] = field(default_factory=dict)
    stores: dict[int, Ended] = field(default_factory=dict)
    puts: dict[int, Ended] = field(default_factory=dict)
    fetches: dict[int, tuple[Ended, ...]] = field(default_factory=dict)
    ready_slots: dict[int, int] = field(default_factory=dict)
    observed: Observed = Observed()
    releases_whole: bool = False

    def merged(self, other: StepReport) -> StepReport:
        """Both reports as one."""
        merged = StepReport(
            _merged(self.loads, other.loads),
            _merged(self.stores, other.stores),
            _merged(self.puts, other.puts),
            dict(self.fetches),
            {**self.ready_slots, **other.ready_slots},
            self.observed.merged(other.observed),
            self.releases_whole or other.releases_whole,
        )
        for number, ends in other.fetches.items():
            mine = merged.fetches.get(number)
            merged.fetches[number] = tuple(a.merged(b) for a, b in zip(mine, ends, strict=True)) if mine else ends
        return merged

    @property
    def is_empty(self) -> bool:
        """Whether nothing has ended or been measured."""
        measured = self.observed.loads or self.observed.bounded or self.observed.steps
        return not (self.loads or self.stores or self.puts or self.fetches or measured)


def _merged(left: dict[int, Ended], right: dict[int, Ended]) -> dict[int, Ended]:
    both = dict(left)
    for number, end in right.items():
        both[number] = both[number].merged(end) if number in both else end
    return both
