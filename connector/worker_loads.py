"""Loads on one rank: begun, released, waited for layer by layer, failed by block, ended.

    order ──► submitted ──► slices land ──released by policy──► gated: every layer of every step waits
                                              └──all landed──► ended
    a wait's bound, a failed copy, a passed-over hook ──► failed: its blocks are bad until they are computed anew

Everything here runs on the model runner's thread. No wait is without a bound (SAFE-5).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor
from typing import Final

from lamella.connector.at_once import AtOnce
from lamella.connector.captured_waits import CapturedWaits
from lamella.connector.connector_metrics import Metrics
from lamella.connector.load_in_flight import Load, LoadObserver, Polled, cancel_transfer, count_landed
from lamella.connector.release_look import may_run
from lamella.connector.safety_rules import SafetyRules
from lamella.connector.step_orders import Ended, LoadOrder, StepOrders
from lamella.connector.turns import Turns
from lamella.cuda_ext._engine_library import TransferStopped
from lamella.cuda_ext.transfer import Arriving, TransferState
from lamella.reference.ordering import ahead_of_batch
from lamella.reference.release import ReleasePolicy

_log = logging.getLogger(__name__)
_DRAIN_S: Final = 2.0


class WorkerLoads:
    """See the module.

    Args:
        submit: hands an order to the transfer engine; called by `executor`.
        num_layers: of this stage.
        release: when a request may run; whole once the hook was passed over.
        block_tokens: of the first KV cache group.
        token_bytes: of a token in all layers.
        wait_timeout_s: bound on each wait.
        stream: the stream that is computing now.
        rules: all of them, outside tests.
        metrics: counts and times.
        by_request: the engine takes no part of a load back: errors are reported by request, before release.
        executor: begins loads; by default the caller's thread does.
        observer: measures loads; None if nobody asks.
        captured: waits inside captured graphs, where they are asked for.
    """

    def __init__(
        self,
        submit: Callable[[LoadOrder], Callable[[], Arriving]],
        num_layers: int,
        release: ReleasePolicy,
        block_tokens: int,
        token_bytes: int,
        wait_timeout_s: float,
        stream: Callable[[], int],
        rules: SafetyRules,
        metrics: Metrics,
        by_request: bool = False,
        executor: Executor | None = None,
        observer: LoadObserver | None = None,
        captured: CapturedWaits | None = None,
    ) -> None:
        self._submit = submit
        self._num_layers = num_layers
        self._release = release
        self._block_tokens = block_tokens
        self._token_bytes = token_bytes
        self._wait_timeout_s = wait_timeout_s
        self._stream = stream
        self._rules = rules
        self._metrics = metrics
        self._by_request = by_request
        self._observer = observer
        self._captured = captured
        self._executor = executor or AtOnce()
        self._loads: dict[int, Load] = {}
        self.gated: list[Load] = []
        self.bad_blocks: set[int] = set()
        self._late_bad: set[int] = set()  # kept for the next step where report_in_same_step is off
        self._unreleased_bad: set[int] = set()
        self._orders = StepOrders()
        self._turns = Turns(metrics)
        self._hooked: set[int] = set()
        self.hooks_bypassed = False
        """Whether a step has passed over the hook; releases are whole from then on."""
        self.replayed = False
        """Whether the present step computes something, and that by one captured graph."""
        self._began_ns = self._computed_ns = 0

    # ---- a step begins

    def begin_joining(self, orders: StepOrders) -> None:
        """Loads up to the last whose request joins the step begin ahead of `begin_step`: the link keeps their order."""
        for order in orders.loads[: ahead_of_batch([order.joins_step for order in orders.loads])]:
            self.begin(order, time.monotonic_ns())

    def begin_step(self, orders: StepOrders) -> None:
        """Orders are taken in, loads begin if they have not, and it is settled what this step's layers wait for."""
        now_ns = time.monotonic_ns()
        if self._orders.num_tokens:
            self._computed_ns = now_ns - self._began_ns
        self._began_ns, self._orders = now_ns, orders
        if self.is_quiet and not (orders.loads or orders.cancels):
            return  # whatever was released has ended
        self._turns.step_begins(orders)
        self._hooked.clear()
        self.replayed = False
        self.bad_blocks |= self._late_bad
        self._late_bad = set()
        self.bad_blocks -= orders.rewritten_blocks - self._undrained()
        for number in orders.cancels:
            self.cancel(number)
        for order in orders.loads:
            if order.number not in self._loads:
                self.begin(order, now_ns)
        for number in orders.released:
            self._let_run(number, now_ns)
        readable = (load for load in self._loads.values() if load.released and load.may_be_read_by(orders))
        self.gated = [load for load in readable if self._outstanding(load)]
        for load in self.gated:
            load.ready_layer, load.waited_whole = 0, False
        if self._captured is not None and self.gated and not self.hooks_bypassed:
            self._captured_wait(orders)

    @property
    def is_quiet(self) -> bool:
        """Whether there is no load and no error that a step, or a look at its end, could have to do with."""
        return not (self._loads or self.gated or self.bad_blocks or self._late_bad or self._unreleased_bad)

    def begin(self, order: LoadOrder, now_ns: int) -> None:
        """The load is on its way; steps wait for it once it was released and the next of them has begun."""
        submitted = self._executor.submit(self._submit(order))  # first of all: the copy runs beside the rest of this
        blocks = frozenset(order.blocks[0][order.skip_tokens // self._block_tokens :]) - {0}
        load = Load(order, submitted, now_ns, blocks, released=order.joins_step, reported=order.joins_step)
        load.readers = load.readers if self._observer is None else self._observer.load_ordered()
        self.bad_blocks -= blocks - self._undrained()  # this load writes them anew
        self._loads[order.number] = load

    def _let_run(self, number: int, now_ns: int) -> None:
        """The scheduler side lets the load's request run: steps wait for it from here on; the next look tells."""
        load = self._loads.get(number)
        if load is not None and not load.released:
            load.released = True
            if not load.failed:
                self._note_release(load, now_ns, early=self._outstanding(load))

    def _note_release(self, load: Load, now_ns: int, *, early: bool) -> None:
        self._metrics.observe("release_ns", now_ns - load.ordered_ns)
        self._metrics.count("released_early", early)

    def _captured_wait(self, orders: StepOrders) -> None:
        """Graphs that this step may replay wait for its released loads inside."""
        assert self._captured is not None, "called only where waits are captured"
        why = self._captured.why_useless
        if why:
            self._bypassed(why)
        elif self._captured.may_replay(orders) and self._rules.wait_for_released:
            for load in self.gated:
                try:
                    load.in_graphs = self._captured.gate(load.transfer, self._stream())
                except TimeoutError as error:  # the wait at the step's end, or the hook's, is bounded by itself
                    _log.error("load %d is not waited for inside graphs: %s", load.order.number, error)

    def _outstanding(self, load: Load) -> bool:
        """Whether something of the load has still to land that a reader must wait for."""
        if load.failed or load.cancelled:
            return False
        if not load.landed:
            transfer = load.transfer
            load.landed = transfer is not None and transfer.state is TransferState.LANDED
        return not load.landed

    # ---- the forward pass

    def wait_layer(self, layer: int) -> None:
        """Every released load has landed in the layer, or has failed and is reported in this step (REL-2)."""
        self._hooked.add(layer)
        if not self._rules.wait_for_released:
            return
        for load in tuple(self.gated):
            if layer >= load.ready_layer:
                self._wait(load, layer)

    def wait_whole(self) -> None:
        """As `wait_layer` for every layer: where no hook will be called."""
        for load in tuple(self.gated) if self._rules.wait_for_released else ():
            self._wait(load, self._num_layers - 1)
            load.waited_whole = True

    def replays(self) -> None:
        """The step, if it computes anything, is one captured graph: no hook will be called."""
        self.replayed = self._orders.num_tokens > 0

    def settle(self) -> None:
        """Every load that this step's layers waited for has landed, or has failed and is reported in this step.

        An enqueued wait, or one inside a graph, is not the host's: what the step computed is right only if the copy
        ends well, and that must be known before its tokens are taken (SAFE-3).
        """
        for load in tuple(self.gated) if self._rules.wait_for_released else ():
            if (self.replayed and load.in_graphs) or load.ready_layer == self._num_layers:
                self._wait_final(load)

    def _wait(self, load: Load, layer: int) -> None:
        """The load has landed in the layer, or the stream waits until it has, or it has failed."""

        def wait(transfer: Arriving, left_s: float) -> None:
            transfer.wait_layer(layer, self._stream(), left_s)
            load.ready_layer = next(part.end_layer for part in transfer.slices if layer < part.end_layer)
            self._metrics.count("layer_waits")

        self._bounded(load, layer, wait)

    def _wait_final(self, load: Load) -> None:
        """All of the load has landed, or it has failed."""

        def wait(transfer: Arriving, left_s: float) -> None:
            if transfer.wait_final(left_s) is not TransferState.LANDED:
                raise TransferStopped(transfer.error)
            load.ready_layer = self._num_layers

        self._bounded(load, self._num_layers - 1, wait)

    def _bounded(self, load: Load, layer: int, wait: Callable[[Arriving, float], None]) -> None:
        start_ns = time.monotonic_ns()
        try:
            transfer = load.submitted.result(self._wait_timeout_s)
            wait(transfer, max(0.0, self._wait_timeout_s - (time.monotonic_ns() - start_ns) / 1e9))
        except TimeoutError:
            self._metrics.count("wait_timeouts")
            self._fail(load, f"layer {layer} had not landed after {self._wait_timeout_s:g} s")
        except CancelledError:
            pass  # nobody reads a cancelled load
        except (TransferStopped, ValueError, RuntimeError, OSError) as error:
            if not load.cancelled:
                self._fail(load, str(error))
        self._metrics.count("stall_ns", time.monotonic_ns() - start_ns)

    # ---- the step's end

    def poll(self) -> Polled:
        """What may be released, what has failed and what has ended since the last look."""
        self._find_bypass()
        found = Polled()
        for number, load in list(self._loads.items()):
            load.readers.look()
            submitted = load.submitted.done()  # looked at before the transfer: it can become so at any moment
            transfer = load.transfer if submitted else None
            state = transfer.state if transfer is not None else None  # read once, for the same reason
            if submitted and transfer is None and not load.failed and not load.cancelled:
                self._fail(load, str(load.submitted.exception()))
            if transfer is not None and not load.failed and not load.cancelled:
                if state is TransferState.LANDED:
                    load.landed = True
                elif state is not None and state.is_final:
                    self._fail(load, transfer.error)
            ended = load.landed or (submitted and (state is None or state.is_final))
            self._report(load, transfer, ended, found)
            if ended and load.reported:
                del self._loads[number]
                found.ended[number] = Ended(1, load.landed and not load.failed)
                self._observe(load, transfer)
        return found

    def _report(self, load: Load, transfer: Arriving | None, ended: bool, found: Polled) -> None:
        if load.reported:
            return
        if not load.released:  # else the scheduler side has let it run, and each rank is still to report it once
            if not ended and (load.failed or load.cancelled or transfer is None or not self._may_run(load, transfer)):
                return
            if not load.failed and not load.cancelled:
                if self._turns.is_left(load, self._loads.values()):
                    return
                self._note_release(load, time.monotonic_ns(), early=not ended)
        load.reported = load.released = True
        found.received.add(load.order.request)
        if load.failed:
            found.failed.add(load.order.request)

    def _may_run(self, load: Load, transfer: Arriving) -> bool:
        if self.hooks_bypassed or self._by_request:
            return False
        policy = self._release if load.order.plan is None else load.order.plan.release
        number = load.order.number  # the link has what was ordered later still to carry
        plans = (one.order.plan for one in self._loads.values() if one.order.number > number and not one.landed)
        busy_ns = sum(plan.load_ns for plan in plans if plan is not None)
        return may_run(policy, load.order.plan, transfer, self._orders, self._num_layers, self._computed_ns, busy_ns)

    def errors(self) -> set[int]:
        """Blocks to report in this step: bad ones that its batch takes for computed, and those of parked requests."""
        reported, self._unreleased_bad = self._unreleased_bad, set()
        reported |= self.bad_blocks & self._orders.held_blocks
        if not self._rules.keep_errors:
            reported, self.bad_blocks = reported | self.bad_blocks, set()
        if reported:
            self._metrics.count("errors_reported")
        return set() if self._by_request else reported

    def spoils(self, tables: tuple[tuple[int, ...], ...]) -> bool:
        """Whether something computed over these blocks may be wrong."""
        bad = self.bad_blocks | self._late_bad
        return bool(bad) and not bad.isdisjoint(tables[0])

    def close(self) -> None:
        """Nothing more is submitted."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def find(self, number: int) -> Load | None:
        """The load; None once its end was polled."""
        return self._loads.get(number)

    @property
    def num_open(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    # ---- failure

    def _fail(self, load: Load, reason: str) -> None:
        """The load has failed: its blocks are bad, nothing more of it is issued, and what is in flight has drained."""
        load.failed = reason or "the copy failed"
        _log.error("load %d of request %s failed: %s", load.order.number, load.order.request, load.failed)
        if load in self.gated:
            self.gated.remove(load)
        if not load.released:
            self._unreleased_bad |= load.blocks
        (self.bad_blocks if self._rules.report_in_same_step else self._late_bad).update(load.blocks)
        self._drain(load)

    def cancel(self, number: int) -> None:
        """Nobody can be reading the load: what was not issued of it never will be; its end is still reported."""
        load = self._loads.get(number)
        if load is not None:
            load.cancelled = True
            self._drain(load, timeout_s=0.0)

    def _drain(self, load: Load, timeout_s: float = _DRAIN_S) -> None:
        if load.submitted.cancel():
            return
        transfer = load.transfer
        if transfer is None:
            load.submitted.add_done_callback(cancel_transfer)
            return
        transfer.cancel()
        try:
            transfer.wait_final(timeout_s)
        except TimeoutError:
            if timeout_s:
                _log.error("load %d has not drained within %g s; its blocks stay bad", load.order.number, timeout_s)

    def _undrained(self) -> frozenset[int]:
        """Blocks that a failed load may still write."""
        return frozenset().union(*(load.blocks for load in self._loads.values() if load.failed))

    def _find_bypass(self) -> None:
        """A step that passed over a layer's hook read what may not have landed: those loads fail (SAFE-4).

        One layer is enough, the last or not: its reader did not wait, whatever layers behind it did.
        """
        if not self._orders.num_tokens or not self.gated or not self._rules.wait_for_released:
            return
        unhooked = self._num_layers - len(self._hooked)
        read = [
            load
            for load in self.gated
            if not load.waited_whole
            and not (self.replayed and load.in_graphs)
            and not load.blocks.isdisjoint(self._orders.held_blocks)
        ]
        if not unhooked or not read:
            return
        self._bypassed(
            f"{unhooked} of {self._num_layers} layers ran without their hook while a load was landing, which fails. A "
            "captured full graph, or a model whose attention does not call the hook, does this"
        )
        self._metrics.count("hook_bypasses")
        for load in read:
            self._fail(load, "the step did not call the per-layer hook")

    def _bypassed(self, why: str) -> None:
        if not self.hooks_bypassed:
            _log.error("%s. From now on requests are released when all of their KV has landed", why)
        self.hooks_bypassed = True

    def _observe(self, load: Load, transfer: Arriving | None) -> None:
        if transfer is None or load.failed or load.cancelled:
            return
        landed = transfer.timestamps_ns().landed_ns
        num_bytes = (load.order.num_tokens - load.order.skip_tokens) * self._token_bytes
        if self._observer is not None:
            parts = [num_bytes * part.num_layers // self._num_layers for part in transfer.slices]
            self._observer.load_landed(parts, transfer.query().started_ns, landed, load.readers)
        count_landed(self._metrics, transfer.num_slices, num_bytes, [at - load.ordered_ns for at in landed])
