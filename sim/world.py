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
  and may let new requests arrive.

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
from lamella.sim.records import RequestRecord, StepRecord
from lamella.sim.scheduler import EngineSettings, Job, Request
from lamella.sim.stations import ComputeModel, Link

__all__ = ["RequestRecord", "StepRecord", "World"]


class World:
    """One engine and its link.

    Args:
        compute: how long layers take.
        order: whose slice the link carries next.
        release: when a request may run.
        settings: how the engine forms steps.
        clock: to share with other worlds; None for an own one.
        on_finish: called with each record at the instant of completion.
        keep_steps: whether `steps` is filled.
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
        clock: Clock | None = None,
        on_finish: Callable[[RequestRecord], object] | None = None,
        keep_steps: bool = False,
        fast_forward: bool = True,
        make_engine: Callable[..., Engine] = Engine,
    ) -> None:
        self.clock = clock or Clock()
        self.link = Link(self.clock, order)
        self.records: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self._compute = compute
        self._on_finish = on_finish
        self._admitted = 0
        self._arrived_tokens = 0
        self._engine = make_engine(
            self.clock,
            self.link,
            compute,
            release,
            settings or EngineSettings(),
            self._finish,
            self.steps.append if keep_steps else None,
            fast_forward=fast_forward,
        )

    @property
    def busy_ns(self) -> int:
        """Time the engine has spent in steps, stalls included."""
        return self._engine.busy_ns

    @property
    def stall_ns(self) -> int:
        """Time steps have stood waiting for a layer."""
        return self._engine.stall_ns

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
            self.clock.at(now + request.admission_ns, Phase.HAPPEN, lambda: self._admit(request, now))
        else:
            self._admit(request, now)

    def _admit(self, request: Request, arrival_ns: int) -> None:
        job = Job(self._admitted, request, arrival_ns)
        self._admitted += 1
        self._engine.admit(job)

    def _check(self, request: Request) -> None:
        if min(request.new_tokens, request.output_tokens) < 1 or min(request.cached_tokens, request.admission_ns) < 0:
            raise ValueError(
                f"a request computes and generates at least 1 token over a context of at least 0, got {request}"
            )
        layers = request.load.slice_layers
        if layers and sum(layers) != self._compute.num_layers:
            raise ValueError(f"a load must hold all {self._compute.num_layers} layers, got slices of {layers}")

    def _finish(self, job: Job) -> None:
        request = job.request
        caused_since = job.caused_ns - job.caused_before_start_ns
        record = RequestRecord(
            job.sequence,
            request.tag,
            request.cached_tokens,
            request.new_tokens,
            request.output_tokens,
            sum(request.load.slice_bytes),
            job.arrival_ns,
            job.submitted_ns,
            job.first_layer_ns,
            job.all_landed_ns,
            job.released_ns,
            job.started_ns,
            job.first_token_ns,
            self.clock.now_ns,
            job.caused_ns,
            self._engine.stall_ns - job.stall_before_start_ns - caused_since,
            job.prefill_stall_ns,
            tuple(job.layer_stall_ns or ()),
            job.arrival_ns + request.admission_ns,
            job.ready_ns,
            job.first_started_ns,
            tuple(job.suffered or ()),
            job.rank,
            job.preemptions,
            job.failure,
            job.ending,
            0,
            job.stored_ns,
            job.prefill_steps,
        )
        self.records.append(record)
        if self._on_finish is not None:
            self._on_finish(record)
