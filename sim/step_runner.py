"""Steps of the world's engine: prefills with decoding beside them, layer by layer where a load lands, and stretches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from lamella.reference.release import ReleasePolicy
from lamella.reference.timeline import Chunk
from lamella.sim.clock import Clock, Phase
from lamella.sim.kv_blocks import KvBlocks
from lamella.sim.loads import Loads
from lamella.sim.records import Ending, StepRecord, Suffered
from lamella.sim.requests import Job
from lamella.sim.scheduler import Scheduler
from lamella.sim.settings import EngineSettings
from lamella.sim.stations import ComputeModel
from lamella.sim.steps import DecodeStretch, RunningStep, split_evenly


class StepRunner(ABC):
    """Runs the steps that a poll has formed; `lamella.sim.engine.Engine` polls.

    Args:
        clock: gives the instants.
        loads: puts the jobs' loads on their way.
        compute: how long layers take.
        release: when a job may run.
        settings: how steps form.
        on_done: called with each job when its last token is there, or when it has failed.
        on_step: called with each step or stretch when it ends; None if nobody keeps them.
        fast_forward: False runs every decode step as an event of its own.
        full_graphs: whether steps that only decode replay one graph, and wait in front of it; how long they take, the
            compute model says.
    """

    def __init__(
        self,
        clock: Clock,
        loads: Loads,
        compute: ComputeModel,
        release: ReleasePolicy,
        settings: EngineSettings,
        on_done: Callable[[Job], object],
        on_step: Callable[[StepRecord], object] | None,
        *,
        fast_forward: bool,
        full_graphs: bool = False,
    ) -> None:
        self._clock = clock
        self._loads = loads
        self._compute = compute
        self._release = release
        self._settings = settings
        self._on_done = on_done
        self._on_step = on_step
        self._fast_forward = fast_forward
        self._full_graphs = full_graphs
        self.busy_ns = 0
        """Time in steps, stalls included."""
        self.stall_ns = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed, those of the present step included."""
        self._scheduler = Scheduler(settings)
        self._unsubmitted: list[Job] = []
        self._behind: list[Job] = []  # submitted behind the launch of the step under way
        self._behind_ns: int | None = None  # the end of that launch, for a step that still waits for layers
        self._due: list[Job] = []  # so many layers landed that a policy without forecast releases at the next poll
        self._dropped: list[Job] = []  # failed beside the step under way; they leave with its end
        self._step: RunningStep | None = None
        self._stretch: DecodeStretch | None = None
        self._looked_ns: int | None = None  # last poll of an engine that is waiting; None in the other states
        self._poll_scheduled = False
        self._step_ended = False  # the next poll is the end of a step
        self._occupied_ns = 0  # the engine's thread admits requests until then
        self._delay_ns = 0  # from the present poll to the first layer of the step it forms
        self._preempted: tuple[int, ...] = ()  # at the poll that formed the step or stretch under way
        self._timer = 0  # only the latest armed timer counts
        self.on_stored: Callable[[Job], object] = lambda _: None
        """Told of each job whose store left the device after its last token."""

    @property
    def blocks(self) -> KvBlocks | None:
        """Its KV blocks; None where they are not counted."""
        return self._scheduler.blocks

    @property
    def computing(self) -> bool:
        """Whether a step is under way, or has ended in this instant and the next is not formed yet."""
        return self._step is not None or self._stretch is not None or self._step_ended

    # ---------------------------------------------------------------- what the engine around it does

    @abstractmethod
    def _look_soon(self) -> None:
        """Something may be ready."""

    @abstractmethod
    def _poll_soon(self, away_ns: int) -> None:
        """A step has ended."""

    @abstractmethod
    def _arm_timer(self, away_ns: int) -> None:
        """A release instant may lie ahead."""

    @abstractmethod
    def _submit_behind(self) -> None:
        """The launch has ended."""

    @abstractmethod
    def _drop(self, job: Job) -> None:
        """The job has failed and leaves."""

    # ---------------------------------------------------------------- a step runs

    def _begin_step(self, taken: list[tuple[Job, Chunk]]) -> None:
        now, scheduler = self._clock.now_ns, self._scheduler
        start = now + self._delay_ns
        for job, chunk in taken:
            self.prefilled_tokens += chunk.num_tokens
            job.prefill_steps += 1
            if chunk.first_token == 0 and job.first_token_ns < 0:
                job.started_ns = start
                if job.first_started_ns < 0:
                    job.first_started_ns = start
                    job.caused_before_start_ns = job.caused_ns
                    job.victim_from_ns = self.stall_ns
                job.stall_before_start_ns = self.stall_ns
                job.suffered = None
        if taken:
            prefills = [(job.request.cached_tokens + chunk.first_token, chunk.num_tokens) for job, chunk in taken]
            costs = self._compute.step_layers_ns(prefills, scheduler.decode_batch, scheduler.context_tokens)
        else:
            decode_ns = self._compute.decode_ns(scheduler.decode_batch, scheduler.context_tokens, 1)
            costs = split_evenly(decode_ns, self._compute.num_layers)
        loads = list(scheduler.landing.values())
        whole = self._full_graphs and not taken
        batch, context = scheduler.decode_batch, scheduler.context_tokens
        self._step = RunningStep(now, start, taken, costs, batch, context, loads, whole=whole)
        if loads:
            self._clock.at(start, Phase.HAPPEN, self._advance_layers)
        else:
            self._clock.at(start + sum(costs), Phase.HAPPEN, self._end_step)
        if self._behind:
            self._behind_ns = start + self._settings.launch_ns
            if not loads:
                self._clock.at(self._behind_ns, Phase.HAPPEN, self._submit_behind)

    def _advance_layers(self) -> None:
        """The step has reached a layer: runs all layers that have landed, or blocks until the next one does."""
        step = self._step
        assert step is not None, "layers advance only in a step"
        now = self._clock.now_ns
        num_layers = len(step.costs)
        landing = self._scheduler.landing.values()
        ready = step.runnable(job.gate.landed_layers for job in landing if job.gate is not None)
        if ready <= step.layer < num_layers:
            if not step.blocked:
                step.blocked = True
                step.reached_ns = now
            return
        if step.blocked:
            step.blocked = False
            self._charge_stall(step, step.layer, now - step.reached_ns)
        begun, step.layer = step.layer, ready
        end = now + sum(step.costs[begun:ready])
        if ready == num_layers and self._behind_ns is not None:
            self._clock.at(max(now, self._behind_ns), Phase.HAPPEN, self._submit_behind)
        self._clock.at(end, Phase.HAPPEN, self._end_step if ready == num_layers else self._advance_layers)

    def _charge_stall(self, step: RunningStep, layer: int, stall_ns: int) -> None:
        """Notes who kept the step waiting in front of that layer: the load whose slice landed last, or never did."""
        if stall_ns == 0:
            return
        layer = step.awaited(layer)

        def landed_ns(job: Job) -> int:
            if job.gate is None:
                return self._clock.now_ns  # it has failed in this instant
            return job.gate.event_for(layer)

        culprit = max(step.loads, key=lambda job: (landed_ns(job), -job.sequence))
        if culprit.layer_stall_ns is None:
            culprit.layer_stall_ns = [0] * len(step.costs)
        culprit.layer_stall_ns[layer] += stall_ns
        culprit.caused_ns += stall_ns
        self.stall_ns += stall_ns
        step.stalls[layer] = (stall_ns, culprit.sequence)
        suffered = Suffered(layer, culprit.sequence, stall_ns)
        for job, _ in step.taken:
            if job.first_token_ns < 0:
                if job.suffered is None:
                    job.suffered = []
                job.suffered.append(suffered)

    def _end_step(self) -> None:
        step, now = self._step, self._clock.now_ns
        assert step is not None, "only a step that began can end"
        self._step = None
        self.busy_ns += now - step.polled_ns
        self._step_took(step, now - step.start_ns)
        if self._on_step is not None:
            self._note_step(self._on_step, step, now)
        done = self._scheduler.advance_decoding(1) if step.decode_batch else []
        for job, chunk in step.taken:
            if job.thrown_back:
                self._throw_back(job)
            elif chunk.first_token + chunk.num_tokens == job.prefill_tokens:
                if job.first_token_ns < 0:
                    job.first_token_ns = now
                    job.prefill_stall_ns = self.stall_ns - job.stall_before_start_ns
                if job.generated == 0 and job.request.store.slice_layers:
                    self._store(job)
                if job.request.output_tokens - job.generated == 1:
                    done.append(job)
                else:
                    self._scheduler.begin_decoding(job)
        while self._dropped:
            self._drop(self._dropped.pop(0))
        self._finish(done)
        self._step_ended = True
        self._poll_soon(now - step.polled_ns)

    @abstractmethod
    def _step_took(self, step: RunningStep, took_ns: int) -> None:
        """Told of each step with prefills, or beside loads, when it has ended."""

    def _note_step(self, on_step: Callable[[StepRecord], object], step: RunningStep, end_ns: int) -> None:
        stalls = [step.stalls.get(layer, (0, None)) for layer in range(len(step.costs))]
        layer_stall_ns, culprits = zip(*stalls, strict=True)
        on_step(
            StepRecord(
                step.polled_ns,
                step.start_ns,
                end_ns,
                tuple(chunk for _, chunk in step.taken),
                layer_stall_ns,
                culprits,
                step.decode_batch,
                1,
                len(self._scheduler.waiting),
                self._held_blocks,
                self._preempted,
            )
        )

    @property
    def _held_blocks(self) -> int:
        return 0 if self._scheduler.blocks is None else self._scheduler.blocks.held

    def _throw_back(self, job: Job) -> None:
        """What the step computed for a job whose load failed in it is worth nothing."""
        job.thrown_back = False
        if job.ending is Ending.FAILED:
            self._drop(job)
        else:
            self.prefilled_tokens -= job.computed_tokens
            self._scheduler.throw_back(job)

    # ---------------------------------------------------------------- only decoding happens

    def _begin_stretch(self) -> None:
        scheduler = self._scheduler
        # While a load is on its way, a policy that weighs the last step's length is asked at every poll.
        asked = self._release.weighs_steps and scheduler.loading
        # Nobody is admitted at a poll at which blocks were lost, so the next one is a step later.
        singly = asked or self._preempted
        planned = scheduler.steps_to_next_end if self._fast_forward and not singly else 1
        now = self._clock.now_ns
        extra = self._delay_ns - self._settings.start_delay_ns
        stretch = DecodeStretch(
            self._compute,
            now,
            now + extra,
            self._settings.start_delay_ns,
            scheduler.decode_batch,
            scheduler.context_tokens,
            planned,
        )
        self._stretch = stretch
        self._schedule_stretch_end(stretch)
        if self._behind:
            launched = now + extra + self._settings.start_delay_ns + self._settings.launch_ns
            self._clock.at(launched, Phase.HAPPEN, self._submit_behind)
        self._arm_timer(0)

    def _schedule_stretch_end(self, stretch: DecodeStretch) -> None:
        planned = stretch.num_steps
        self._clock.at(stretch.boundary_ns(planned), Phase.HAPPEN, lambda: self._end_stretch(stretch, planned))

    def _cut_stretch(self) -> None:
        """The engine looks at the next step boundary: no later step of the stretch will have run by then."""
        stretch = self._stretch
        assert stretch is not None, "only a running stretch can be cut"
        boundary = stretch.next_boundary(self._clock.now_ns)
        if boundary < stretch.num_steps:
            stretch.num_steps = boundary
            self._schedule_stretch_end(stretch)

    def _end_stretch(self, stretch: DecodeStretch, planned: int) -> None:
        if self._stretch is not stretch or planned != stretch.num_steps:
            return  # the stretch was cut after this end had been scheduled
        now = self._clock.now_ns
        self._stretch = None
        self.busy_ns += now - stretch.polled_ns
        if self._on_step is not None:
            waiting, held = len(self._scheduler.waiting), self._held_blocks
            start, batch = stretch.start_ns, stretch.batch
            self._on_step(
                StepRecord(stretch.polled_ns, start, now, (), (), (), batch, planned, waiting, held, self._preempted)
            )
        self._finish(self._scheduler.advance_decoding(planned))
        self._step_ended = True
        before = stretch.boundary_ns(planned - 1) if planned > 1 else stretch.polled_ns
        self._poll_soon(now - before)

    # ---------------------------------------------------------------- jobs go

    def _finish(self, done: Sequence[Job]) -> None:
        for job in done:
            self._scheduler.leave(job)
            self._on_done(job)

    def _store(self, job: Job) -> None:
        """The job's blocks are held until what it stores has left the device."""
        job.storing = True
        self._loads.store(job, lambda: self._stored(job))

    def _stored(self, job: Job) -> None:
        job.storing = False
        job.stored_ns = self._clock.now_ns
        if job.ended:
            self._scheduler.leave(job)
            self.on_stored(job)
            if self._scheduler.blocks is not None:
                self._look_soon()
