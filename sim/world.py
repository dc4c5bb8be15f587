"""The world: one engine behind one link, as discrete events.

How to drive it::

    world = World(compute, order=Fifo(), release=First())      # settings=EngineSettings(...) for budget, poll, delay
    world.arrive_at(instant_ns, Request(cached_tokens=15_152, new_tokens=768, output_tokens=50, load=load))    # open
    arrivals records = world.run()

    world.loop_closed(users=4, requests=iterable_of_requests)  # or: C users, each asks again when its answer is
    complete records = world.run()

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

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.ordering import OrderPolicy
from lamella.reference.release import ReleasePolicy, ReleaseView
from lamella.reference.slices import Slice
from lamella.reference.timeline import Chunk
from lamella.sim.clock import Clock, Phase
from lamella.sim.scheduler import EngineSettings, Job, Request, Scheduler, SubmitAt
from lamella.sim.stations import ComputeModel, Link, Transfer


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
    ) -> None:
        self.clock = clock or Clock()
        self.link = Link(self.clock, order)
        self.records: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self.busy_ns = 0
        """Time in steps, stalls included."""
        self.stall_ns = 0
        self.backlog_tokens = 0
        """Prompt tokens that have arrived and are not computed yet."""
        self._compute = compute
        self._release = release
        self._settings = settings or EngineSettings()
        self._scheduler = Scheduler(self._settings)
        self._on_finish = on_finish
        self._keep_steps = keep_steps
        self._fast_forward = fast_forward
        self._admitted = 0
        self._unsubmitted: list[Job] = []
        self._due: list[Job] = []  # so many layers landed that a policy without forecast releases at the next poll
        self._step: _RunningStep | None = None
        self._stretch: _DecodeStretch | None = None
        self._looked_ns: int | None = None  # last poll of an idle engine with waiting requests; None: asleep
        self._poll_scheduled = False
        self._timer = 0  # only the latest armed timer counts

    # ---------------------------------------------------------------- requests come

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
        self.backlog_tokens += request.new_tokens
        if request.admission_ns:
            self.clock.at(now + request.admission_ns, Phase.HAPPEN, lambda: self._admit(request, now))
        else:
            self._admit(request, now)

    def _admit(self, request: Request, arrival_ns: int) -> None:
        job = Job(self._admitted, request, arrival_ns)
        self._admitted += 1
        self._scheduler.waiting[job.sequence] = job
        if not request.load.slice_layers:
            self._due.append(job)
            self._look_soon()
        elif self._settings.submit_at is SubmitAt.POLL:
            self._unsubmitted.append(job)
            self._look_soon()
        else:
            self._submit(job)
            if self._stretch is None or self._release.weighs_steps:
                self._look_soon()
            else:
                self._arm_timer(0)

    def _check(self, request: Request) -> None:
        if min(request.new_tokens, request.output_tokens) < 1 or min(request.cached_tokens, request.admission_ns) < 0:
            raise ValueError(
                f"a request computes and generates at least 1 token over a context of at least 0, got {request}"
            )
        layers = request.load.slice_layers
        if layers and sum(layers) != self._compute.num_layers:
            raise ValueError(f"a load must hold all {self._compute.num_layers} layers, got slices of {layers}")

    def _submit(self, job: Job) -> None:
        load = job.request.load
        ends = list(accumulate(load.slice_layers))
        slices = [Slice(end - width, width) for end, width in zip(ends, load.slice_layers, strict=True)]
        needed = self._release.layers_needed(self._compute.num_layers)
        job.gate = LayerArrivalGate(slices, release_after_layers=needed)
        job.submitted_ns = self.clock.now_ns
        job.transfer = Transfer(job.submission(job.submitted_ns), load, lambda part: self._land(job, part))
        self.link.submit(job.transfer)

    # ---------------------------------------------------------------- slices land

    def _land(self, job: Job, part: int) -> None:
        gate = job.gate
        assert gate is not None, "only a submitted load lands"
        now = self.clock.now_ns
        was_released = gate.released
        gate.record(part, now, generation=gate.generation)
        gate.mark_landed(part, generation=gate.generation)
        if part == 0:
            job.first_layer_ns = now
        if gate.all_landed:
            job.all_landed_ns = now
        if job.released_ns >= 0:
            if self._step is not None and self._step.blocked:
                self._advance_layers()
            if gate.all_landed:
                self._scheduler.landing.pop(job.sequence, None)
        elif gate.released and not was_released and not self._release.needs_forecast:
            self._due.append(job)
            self._look_soon()

    # ---------------------------------------------------------------- the engine looks

    def _look_soon(self) -> None:
        """Something may be ready: the engine polls as soon as its rule lets it."""
        if self._stretch is not None:
            self._cut_stretch()
        elif self._step is None:
            now, poll = self.clock.now_ns, self._settings.idle_poll_ns
            if self._looked_ns is not None and poll:
                now = self._looked_ns + max(1, -(-(now - self._looked_ns) // poll)) * poll
            self._poll_at(now, poll)

    def _poll_at(self, instant_ns: int, away_ns: int) -> None:
        if not self._poll_scheduled:
            self._poll_scheduled = True
            self.clock.at(instant_ns, Phase.FORM, lambda: self._poll(away_ns))

    def _poll(self, away_ns: int) -> None:
        """Submits, releases, and forms a step of what is ready; without any, the engine is idle."""
        self._poll_scheduled = False
        self._looked_ns = None
        for job in self._unsubmitted:
            self._submit(job)
        self._unsubmitted.clear()
        now = self.clock.now_ns
        for job in self._due:
            self._scheduler.release(job, now)
        self._due.clear()
        if self._release.needs_forecast:
            for job, instant in self._release_instants(away_ns):
                if instant <= now:
                    self._scheduler.release(job, now)
        taken = self._scheduler.fill_step()
        if taken or (self._scheduler.decode_batch and self._scheduler.landing):
            self._begin_step(taken)
        elif self._scheduler.decode_batch:
            self._begin_stretch()
        else:
            self._looked_ns = now if self._scheduler.waiting else None
            self._arm_timer(self._settings.idle_poll_ns)

    def _release_instants(self, away_ns: int) -> list[tuple[Job, int]]:
        """When each waiting request that is on the link may be released, by the forecast of now."""
        forecast = self.link.forecast_ns()
        instants: list[tuple[Job, int]] = []
        for job in self._scheduler.waiting.values():
            if job.transfer is None:
                continue
            landings = job.transfer.landing_ns + forecast.get(job.sequence, [])
            tokens = self._scheduler.first_chunk_tokens(job)
            view = ReleaseView(
                now_ns=self.clock.now_ns,
                arrival_ns=tuple(
                    landing
                    for landing, layers in zip(landings, job.request.load.slice_layers, strict=True)
                    for _ in range(layers)
                ),
                layer_compute_ns=tuple(self._compute.step_layers_ns([(job.request.cached_tokens, tokens)], 0, 0)),
                start_delay_ns=self._settings.start_delay_ns,
                step_ns=away_ns,
                victims=self._scheduler.decode_batch,
            )
            instants.append((job, self._release.release_ns(view)))
        return instants

    def _arm_timer(self, away_ns: int) -> None:
        """An idle or decoding engine will look at the next release instant that the forecast holds."""
        if not self._release.needs_forecast:
            return
        instants = [instant for _, instant in self._release_instants(away_ns)]
        self._timer += 1
        if instants:
            timer = self._timer
            self.clock.at(max(self.clock.now_ns, min(instants)), Phase.HAPPEN, lambda: self._ring(timer))

    def _ring(self, timer: int) -> None:
        if timer == self._timer:
            self._look_soon()

    # ---------------------------------------------------------------- a step runs

    def _begin_step(self, taken: list[tuple[Job, Chunk]]) -> None:
        now, scheduler = self.clock.now_ns, self._scheduler
        start = now + self._settings.start_delay_ns
        for job, chunk in taken:
            self.backlog_tokens -= chunk.num_tokens
            if chunk.first_token == 0:
                job.started_ns = start
                job.stall_before_start_ns = self.stall_ns
                job.caused_before_start_ns = job.caused_ns
        if taken:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in taken]
            costs = self._compute.step_layers_ns(prefills, scheduler.decode_batch, scheduler.context_tokens)
        else:
            whole = self._compute.decode_ns(scheduler.decode_batch, scheduler.context_tokens, 1)
            costs = _split_evenly(whole, self._compute.num_layers)
        self._step = _RunningStep(now, start, taken, costs, scheduler.decode_batch, list(scheduler.landing.values()))
        self.clock.at(start, Phase.HAPPEN, self._advance_layers)

    def _advance_layers(self) -> None:
        """The step has reached a layer: runs all layers that have landed, or blocks until the next one does."""
        step = self._step
        assert step is not None, "layers advance only in a step"
        now = self.clock.now_ns
        landing = self._scheduler.landing.values()
        num_layers = len(step.costs)
        ready = min((job.gate.landed_layers for job in landing if job.gate is not None), default=num_layers)
        if ready <= step.layer < num_layers:
            if not step.blocked:
                step.blocked = True
                step.reached_ns = now
            return
        if step.blocked:
            step.blocked = False
            self._charge_stall(step, now - step.reached_ns)
        begun, step.layer = step.layer, ready
        end = now + sum(step.costs[begun:ready])
        self.clock.at(end, Phase.HAPPEN, self._end_step if ready == num_layers else self._advance_layers)

    def _charge_stall(self, step: _RunningStep, stall_ns: int) -> None:
        """Notes who kept the step waiting at its present layer: the load whose slice landed last."""
        if stall_ns == 0:
            return

        def landed_ns(job: Job) -> int:
            assert job.gate is not None, "only loads land"
            return job.gate.event_for(step.layer)

        culprit = max(step.loads, key=lambda job: (landed_ns(job), -job.sequence))
        if culprit.layer_stall_ns is None:
            culprit.layer_stall_ns = [0] * len(step.costs)
        culprit.layer_stall_ns[step.layer] += stall_ns
        culprit.caused_ns += stall_ns
        self.stall_ns += stall_ns
        step.stalls[step.layer] = (stall_ns, culprit.sequence)

    def _end_step(self) -> None:
        step, now = self._step, self.clock.now_ns
        assert step is not None, "only a step that began can end"
        self._step = None
        self.busy_ns += now - step.polled_ns
        if self._keep_steps:
            stalls = [step.stalls.get(layer, (0, None)) for layer in range(len(step.costs))]
            layer_stall_ns, culprits = zip(*stalls, strict=True)
            chunks = tuple(chunk for _, chunk in step.taken)
            self.steps.append(
                StepRecord(step.polled_ns, step.start_ns, now, chunks, layer_stall_ns, culprits, step.decode_batch, 1)
            )
        done = self._scheduler.advance_decoding(1) if step.decode_batch else []
        for job, chunk in step.taken:
            if chunk.first_token + chunk.num_tokens == job.request.new_tokens:
                job.first_token_ns = now
                job.prefill_stall_ns = self.stall_ns - job.stall_before_start_ns
                if job.request.output_tokens == 1:
                    done.append(job)
                else:
                    self._scheduler.begin_decoding(job)
        self._finish(done)
        self._poll_at(now, now - step.polled_ns)

    # ---------------------------------------------------------------- only decoding happens

    def _begin_stretch(self) -> None:
        scheduler = self._scheduler
        # A policy that weighs the last step's length is asked at every poll while it has something to decide.
        asked = self._release.weighs_steps and any(job.transfer for job in scheduler.waiting.values())
        planned = scheduler.steps_to_next_end if self._fast_forward and not asked else 1
        stretch = _DecodeStretch(
            self._compute,
            self.clock.now_ns,
            self._settings.start_delay_ns,
            scheduler.decode_batch,
            scheduler.context_tokens,
            planned,
        )
        self._stretch = stretch
        self._schedule_stretch_end(stretch)
        self._arm_timer(0)

    def _schedule_stretch_end(self, stretch: _DecodeStretch) -> None:
        planned = stretch.num_steps
        self.clock.at(stretch.boundary_ns(planned), Phase.HAPPEN, lambda: self._end_stretch(stretch, planned))

    def _cut_stretch(self) -> None:
        """The engine looks at the next step boundary: no later step of the stretch will have run by then."""
        stretch = self._stretch
        assert stretch is not None, "only a running stretch can be cut"
        boundary = stretch.next_boundary(self.clock.now_ns)
        if boundary < stretch.num_steps:
            stretch.num_steps = boundary
            self._schedule_stretch_end(stretch)

    def _end_stretch(self, stretch: _DecodeStretch, planned: int) -> None:
        if self._stretch is not stretch or planned != stretch.num_steps:
            return  # the stretch was cut after this end had been scheduled
        now = self.clock.now_ns
        self._stretch = None
        self.busy_ns += now - stretch.start_ns
        if self._keep_steps:
            self.steps.append(StepRecord(stretch.start_ns, stretch.start_ns, now, (), (), (), stretch.batch, planned))
        self._finish(self._scheduler.advance_decoding(planned))
        self._poll_at(now, now - stretch.boundary_ns(planned - 1))

    # ---------------------------------------------------------------- requests end

    def _finish(self, done: Sequence[Job]) -> None:
        for job in done:
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
                self.stall_ns - job.stall_before_start_ns - caused_since,
                job.prefill_stall_ns,
                tuple(job.layer_stall_ns or ()),
            )
            self.records.append(record)
            if self._on_finish is not None:
                self._on_finish(record)


class _RunningStep:
    """A step under way: the layer it has reached, and what it stood waiting for."""

    __slots__ = (
        "blocked",
        "costs",
        "decode_batch",
        "layer",
        "loads",
        "polled_ns",
        "reached_ns",
        "stalls",
        "start_ns",
        "taken",
    )

    def __init__(
        self,
        polled_ns: int,
        start_ns: int,
        taken: list[tuple[Job, Chunk]],
        costs: Sequence[int],
        decode_batch: int,
        loads: list[Job],
    ) -> None:
        self.polled_ns = polled_ns
        self.start_ns = start_ns
        self.taken = taken
        self.costs = costs
        self.decode_batch = decode_batch
        self.loads = loads  # released and not fully landed when it began
        self.layer = 0
        self.blocked = False
        self.reached_ns = start_ns
        self.stalls: dict[int, tuple[int, int | None]] = {}


class _DecodeStretch:
    """Successive decode steps as one event; `num_steps` shrinks when it is cut."""

    __slots__ = ("_compute", "_context_tokens", "_start_delay_ns", "batch", "num_steps", "start_ns")

    def __init__(
        self,
        compute: ComputeModel,
        start_ns: int,
        start_delay_ns: int,
        batch: int,
        context_tokens: int,
        num_steps: int,
    ) -> None:
        self._compute = compute
        self._start_delay_ns = start_delay_ns
        self._context_tokens = context_tokens
        self.start_ns = start_ns
        self.batch = batch
        self.num_steps = num_steps

    def boundary_ns(self, num_steps: int) -> int:
        """When that many of its steps have run."""
        computing_ns = self._compute.decode_ns(self.batch, self._context_tokens, num_steps)
        return self.start_ns + num_steps * self._start_delay_ns + computing_ns

    def next_boundary(self, instant_ns: int) -> int:
        """Steps, at least 1, that have run at the first boundary not before that instant."""
        return 1 + bisect_left(range(1, self.num_steps), instant_ns, key=self.boundary_ns)


def _split_evenly(whole_ns: int, num_layers: int) -> list[int]:
    return [whole_ns * (layer + 1) // num_layers - whole_ns * layer // num_layers for layer in range(num_layers)]
