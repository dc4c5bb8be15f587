"""The world: one engine behind one link, as discrete events.

How to drive it::

    world = World(compute, order=Fifo(), release=First())       # settings=EngineSettings(...): budget, poll, delay
    request = Request(cached_tokens=15_152, new_tokens=768, output_tokens=50, load=load)
    world.arrive_at(instant_ns, request)                        # open arrivals, or
    world.loop_closed(users=4, requests=[request] * 100)        # each user asks again when its answer is complete
    records = world.run()

- `load` comes from `plan_load(plan_slices(num_layers, width), layer_bytes, bytes_per_s, fixed_ns)`. Chunk-major is one
  slice of all layers with `Whole()`; recomputing is `cached_tokens=0` and no load.
- `compute` is any `ComputeModel`; `lamella.reference.profile` has measured ones.
- Several engines on one clock: `World(..., clock=clock)` each, `world.arrive(request)` from an action of that clock (a
  router), then `clock.run()` once; each world's `records` has its own. `world.backlog_tokens` says how busy one is.
- `records` are in order of completion, one `RequestRecord` a request. `on_finish(record)` is called at that instant,
  and may let new requests arrive; a store that is still on its way enters `stored_ns` in `records` later.
- `hardware` names what is on the way besides one link, `settings` how the engine behaves; both say what each part is.

What happens follows the rules stated in `lamella.reference.timeline`, plus decoding: a step also decodes one token of
each request that has its first. With prefill only, the recursion must agree to the nanosecond
(tests/sim/test_exact.py); the two share the policies, the gate's slices and these rules, and no line of machinery.
Stretches in which only decoding happens run as one event, cut at the step boundary where something arrives; the result
is the same to the nanosecond as step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lamella.reference.ordering import OrderPolicy
from lamella.reference.release import ReleasePolicy
from lamella.sim.clock import Clock, Phase
from lamella.sim.engine import Engine
from lamella.sim.hardware import Hardware
from lamella.sim.kv_blocks import KvBlocks
from lamella.sim.loads import Loads
from lamella.sim.paths import TierReader, build_carrier, note_of
from lamella.sim.records import RequestRecord, SliceRecord, Station, StepRecord
from lamella.sim.requests import Job, Request
from lamella.sim.settings import EngineSettings
from lamella.sim.stations import ComputeModel

__all__ = ["RequestRecord", "StepRecord", "World"]


class World:
    """One engine and its link.

    Args:
        compute: how long layers take.
        order: whose slice the link carries next.
        release: when a request may run.
        settings: how the engine forms steps.
        hardware: what a load passes on its way; None for one link and nothing else.
        clock: to share with other worlds; None for an own one.
        on_finish: called with each record at the instant of completion.
        keep_steps: whether `steps` is filled.
        keep_slices: whether `slices` is filled: a record for each occupation of a station.
        fast_forward: False runs every decode step as an event of its own; slower, the same result.
        make_engine: the engine's class, or what makes one with the same arguments.
    """

    def __init__(
        self,
        compute: ComputeModel,
        order: OrderPolicy,
        release: ReleasePolicy,
        settings: EngineSettings | None = None,
        *,
        hardware: Hardware | None = None,
        clock: Clock | None = None,
        on_finish: Callable[[RequestRecord], object] | None = None,
        keep_steps: bool = False,
        keep_slices: bool = False,
        fast_forward: bool = True,
        make_engine: Callable[..., Engine] = Engine,
    ) -> None:
        self.clock = clock or Clock()
        self.records: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self.slices: list[SliceRecord] = []
        self._compute = compute
        self._settings = settings or EngineSettings()
        self._hardware = hardware or Hardware()
        self._on_finish = on_finish
        self._admitted = 0
        self._arrived_tokens = 0
        self._unstored: dict[int, int] = {}  # place in `records` by sequence number
        keep = self.slices.append if keep_slices else None
        self.link, self.back = build_carrier(self.clock, order, self._hardware, lambda: self._engine.computing, keep)
        tiers = {
            tier.name: TierReader(self.clock, tier, note_of(keep, Station.TIER, 0)) for tier in self._hardware.tiers
        }
        loads = Loads(self.clock, self.link, self.back, tiers, self._hardware, release, compute.num_layers)
        self._engine = make_engine(
            self.clock,
            loads,
            compute,
            release,
            self._settings,
            self._finish,
            self.steps.append if keep_steps else None,
            fast_forward=fast_forward,
        )
        self._engine.on_stored = self._note_stored

    @property
    def busy_ns(self) -> int:
        """Time the engine has spent in steps, stalls included."""
        return self._engine.busy_ns

    @property
    def stall_ns(self) -> int:
        """Time steps have stood waiting for a layer."""
        return self._engine.stall_ns

    @property
    def blocks(self) -> KvBlocks | None:
        """The engine's KV blocks; None where they are not counted."""
        return self._engine.blocks

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that have arrived and are not computed yet."""
        return self._arrived_tokens - self._engine.prefilled_tokens

    def arrive_at(self, instant_ns: int, request: Request) -> None:
        """The request will arrive at that instant."""
        self.clock.at(instant_ns, Phase.HAPPEN, lambda: self.arrive(request))

    def loop_closed(
        self, users: int, requests: Iterable[Request], think_ns: int = 0, starts_ns: Sequence[int] | None = None
    ) -> None:
        """`users` users ask, and each again, `think_ns` after its answer is complete, while requests last.

        Args:
            users: requests in flight at most.
            requests: in the order in which they are asked.
            think_ns: from an answer to the same user's next question.
            starts_ns: when each user asks first; None for now.

        Raises:
            ValueError: starts for more or fewer users.
        """
        starts = [self.clock.now_ns] * users if starts_ns is None else starts_ns
        if len(starts) != users:
            raise ValueError(f"starts_ns needs one instant for each of {users} users, got {len(starts)}")
        supply = iter(requests)
        then = self._on_finish

        def ask_again(record: RequestRecord) -> None:
            if then is not None:
                then(record)
            self._ask(supply, self.clock.now_ns + think_ns)

        self._on_finish = ask_again
        for start in starts:
            self._ask(supply, start)

    def _ask(self, supply: Iterator[Request], instant_ns: int) -> None:
        request = next(supply, None)
        if request is not None:
            self.arrive_at(instant_ns, request)

    def run(self) -> list[RequestRecord]:
        """Runs the clock until nothing is left to do; the records, in order of completion."""
        self.clock.run()
        return self.records

    def arrive(self, request: Request) -> None:
        """The request is here now, and in the engine's queue when it has been admitted.

        Raises:
            ValueError: no tokens to compute or to generate, a negative count or time, or a load that does not hold
                every layer.
        """
        self._check(request)
        now = self.clock.now_ns
        self._arrived_tokens += request.new_tokens
        if request.admission_ns:
            own = self._settings.admits_itself
            ready_ns = self._engine.occupy(request.admission_ns) if own else now + request.admission_ns
            self.clock.at(ready_ns, Phase.HAPPEN, lambda: self._admit(request, now))
        else:
            self._admit(request, now)

    def _admit(self, request: Request, arrival_ns: int) -> None:
        job = Job(self._admitted, request, arrival_ns, self.clock.now_ns)
        self._admitted += 1
        self._engine.admit(job)

    def _check(self, request: Request) -> None:
        counts = (request.cached_tokens, request.admission_ns, request.resident_tokens)
        if min(request.new_tokens, request.output_tokens) < 1 or min(counts) < 0:
            raise ValueError(
                f"a request computes and generates at least 1 token over a context of at least 0, got {request}"
            )
        for load in (request.load, request.store):
            if load.slice_layers and sum(load.slice_layers) != self._compute.num_layers:
                raise ValueError(
                    f"a load must hold all {self._compute.num_layers} layers, got slices of {load.slice_layers}"
                )
        if request.resident_tokens > request.cached_tokens:
            raise ValueError(
                f"resident_tokens are some of the {request.cached_tokens} cached ones, got {request.resident_tokens}"
            )
        if request.tier:
            self._hardware.find_tier(request.tier)
        settings, fault = self._settings, request.fault
        if fault is not None:
            if not 0 <= fault.part < len(request.load.slice_layers) or (fault.late_ns or 0) < 0:
                raise ValueError(
                    f"a fault hits one of the load's {len(request.load.slice_layers)} slices, not earlier than it "
                    f"lands; got {fault}"
                )
            if fault.late_ns is None and settings.load_timeout_ns is None:
                raise ValueError("a lost slice without a load_timeout_ns would never end; set one in EngineSettings")
        if settings.kv_blocks is not None:
            tokens = request.cached_tokens + request.new_tokens + request.output_tokens
            if -(-tokens // settings.block_tokens) > settings.kv_blocks:
                raise ValueError(
                    f"a request of {tokens} tokens never fits into {settings.kv_blocks} blocks of "
                    f"{settings.block_tokens}; leave it out, or give the engine more"
                )

    def _finish(self, job: Job) -> None:
        job.ended = True
        caused_since = job.caused_ns - job.caused_before_start_ns
        victim_ns = self._engine.stall_ns - job.victim_from_ns - caused_since if job.first_started_ns >= 0 else 0
        record = job.record(self.clock.now_ns, victim_ns)
        if job.storing:
            self._unstored[job.sequence] = len(self.records)
        self.records.append(record)
        if self._on_finish is not None:
            self._on_finish(record)

    def _note_stored(self, job: Job) -> None:
        place = self._unstored.pop(job.sequence)
        self.records[place] = self.records[place]._replace(stored_ns=job.stored_ns)
