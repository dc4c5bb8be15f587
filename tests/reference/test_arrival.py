"""The arrival gate: who is released, what a step waits for, whose slices count (ARR-1, ARR-3, SAFE-2)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.slices import Slice, plan_slices


def gate_of(num_layers: int, width: int, **settings: int) -> LayerArrivalGate[str]:
    return LayerArrivalGate(plan_slices(num_layers, width), **settings)


def land(gate: LayerArrivalGate[str], count: int) -> None:
    for _ in range(count):
        index = gate.landed
        if gate.recorded == index:
            gate.record(index, f"e{index}", generation=gate.generation)
        gate.mark_landed(index, generation=gate.generation)


def test_release_counts_layers_while_slices_land() -> None:
    gate = gate_of(8, 2, release_after_layers=3)
    land(gate, 1)
    assert (gate.landed_layers, gate.released) == (2, False)
    land(gate, 1)
    assert (gate.landed_layers, gate.released) == (4, True)


def test_one_layer_is_enough_unless_said_otherwise() -> None:
    gate = gate_of(4, 1)
    assert not gate.released
    land(gate, 1)
    assert gate.released


def test_a_recorded_slice_has_not_landed() -> None:
    gate = gate_of(4, 4)
    gate.record(0, "e0", generation=0)
    assert (gate.recorded, gate.landed, gate.released) == (1, 0, False)


def test_a_step_waits_once_a_slice_and_not_once_a_layer() -> None:
    gate = gate_of(6, 2)
    for index in range(3):
        gate.record(index, f"e{index}", generation=0)
    gate.begin_step()
    assert [gate.wait_for(layer) for layer in range(6)] == ["e0", None, "e1", None, "e2", None]


def test_the_next_step_waits_again() -> None:
    gate = gate_of(2, 2)
    gate.record(0, "e0", generation=0)
    waits = []
    for _ in range(2):
        gate.begin_step()
        waits.append(gate.wait_for(0))
    assert waits == ["e0", "e0"]


def test_a_landed_slice_is_not_waited_for() -> None:
    gate = gate_of(2, 1)
    land(gate, 1)
    gate.record(1, "e1", generation=0)
    gate.begin_step()
    assert [gate.wait_for(0), gate.wait_for(1)] == [None, "e1"]


def test_a_layer_skipped_by_the_reader_is_covered_by_the_later_wait() -> None:
    gate = gate_of(3, 1)
    for index in range(3):
        gate.record(index, f"e{index}", generation=0)
    gate.begin_step()
    assert [gate.wait_for(2), gate.wait_for(0), gate.wait_for(1)] == ["e2", None, None]


def test_the_event_of_an_unrecorded_slice_is_refused() -> None:
    gate = gate_of(4, 2)
    gate.record(0, "e0", generation=0)
    assert gate.event_for(1) == "e0"
    with pytest.raises(RuntimeError, match=r"layer 2 is in slice 1, and only 1 slices are recorded"):
        gate.event_for(2)
    with pytest.raises(RuntimeError, match=r"wait on the host"):
        gate.wait_for(3)


def test_slices_are_recorded_in_order_and_once() -> None:
    gate = gate_of(3, 1)
    with pytest.raises(RuntimeError, match=r"slice 1 cannot be recorded: 0 of 3"):
        gate.record(1, "e1", generation=0)
    gate.record(0, "e0", generation=0)
    with pytest.raises(RuntimeError, match=r"slice 0 cannot be recorded: 1 of 3"):
        gate.record(0, "again", generation=0)
    assert gate.event_for(0) == "e0"


def test_there_is_no_slice_after_the_last() -> None:
    gate = gate_of(2, 2)
    land(gate, 1)
    with pytest.raises(RuntimeError, match=r"slice 1 cannot be recorded: 1 of 1"):
        gate.record(1, "e1", generation=0)
    with pytest.raises(RuntimeError, match=r"slice 1 cannot land"):
        gate.mark_landed(1, generation=0)


def test_nothing_lands_before_it_is_recorded_or_out_of_order() -> None:
    gate = gate_of(2, 1)
    with pytest.raises(RuntimeError, match=r"cannot land before record\(0, event\)"):
        gate.mark_landed(0, generation=0)
    gate.record(0, "e0", generation=0)
    gate.record(1, "e1", generation=0)
    with pytest.raises(RuntimeError, match=r"slice 1 cannot land: 0 of 2"):
        gate.mark_landed(1, generation=0)


@pytest.mark.known_fault(22)
def test_a_late_slice_of_the_former_generation_releases_nothing() -> None:
    gate = gate_of(2, 1)
    gate.record(0, "old", generation=0)
    gate.restart(generation=1)
    assert gate.mark_landed(0, generation=0) is False
    assert gate.record(1, "old", generation=0) is False
    assert (gate.recorded, gate.landed, gate.released) == (0, 0, False)
    gate.record(0, "new", generation=1)
    assert gate.event_for(0) == "new"


def test_a_generation_only_grows() -> None:
    gate = gate_of(2, 1, generation=4)
    with pytest.raises(ValueError, match=r"newer than 4, got 4"):
        gate.restart(generation=4)


@pytest.mark.parametrize("layers", [0, 5, -1])
def test_release_after_more_or_fewer_layers_than_there_are_is_refused(layers: int) -> None:
    with pytest.raises(ValueError, match=rf"between 1 and 4, got {layers}"):
        gate_of(4, 2, release_after_layers=layers)


@pytest.mark.parametrize(
    "slices", [[], [Slice(1, 1)], [Slice(0, 1), Slice(2, 1)], [Slice(0, 0)], [Slice(0, 2), Slice(1, 2)]]
)
def test_slices_with_a_gap_an_overlap_or_nothing_are_refused(slices: list[Slice]) -> None:
    with pytest.raises(ValueError, match=r"slice|at least one"):
        LayerArrivalGate(slices)


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    gate = gate_of(4, 2)
    with pytest.raises(ValueError, match=rf"between 0 and 3, got {layer}"):
        gate.wait_for(layer)


class GateMachine(RuleBasedStateMachine):
    """Senders of several generations, a completer and a reader, against sets of what each of them did."""

    @initialize(num_layers=st.integers(1, 6), width=st.integers(1, 6), needed=st.integers(1, 6))
    def begin(self, num_layers: int, width: int, needed: int) -> None:
        self.needed = min(needed, num_layers)
        self.slices = plan_slices(num_layers, min(width, num_layers))
        self.gate = LayerArrivalGate[tuple[int, int]](self.slices, release_after_layers=self.needed)
        self.events: list[tuple[int, int]] = []
        self.landed = 0
        self.waited: set[int] = set()

    @precondition(lambda self: len(self.events) < len(self.slices))
    @rule()
    def record(self) -> None:
        event = (self.gate.generation, len(self.events))
        assert self.gate.record(len(self.events), event, generation=self.gate.generation)
        self.events.append(event)

    @precondition(lambda self: self.landed < len(self.events))
    @rule()
    def land(self) -> None:
        assert self.gate.mark_landed(self.landed, generation=self.gate.generation)
        self.landed += 1

    @precondition(lambda self: self.gate.generation > 0)
    @rule(data=st.data())
    def hear_from_the_past(self, data: st.DataObject) -> None:
        old = data.draw(st.integers(0, self.gate.generation - 1))
        part = data.draw(st.integers(0, len(self.slices) - 1))
        assert not self.gate.record(part, (old, part), generation=old)
        assert not self.gate.mark_landed(part, generation=old)

    @rule()
    def reuse(self) -> None:
        self.gate.restart(generation=self.gate.generation + 1)
        self.events, self.landed, self.waited = [], 0, set()

    @rule()
    def begin_step(self) -> None:
        self.gate.begin_step()
        self.waited = set()

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        part = data.draw(st.integers(0, len(self.events) - 1))
        layer = data.draw(st.integers(self.slices[part].first_layer, self.slices[part].end_layer - 1))
        covered = part < self.landed or any(part <= earlier for earlier in self.waited)
        assert self.gate.wait_for(layer) == (None if covered else self.events[part])
        if not covered:
            self.waited.add(part)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "gate"):
            return
        layers = sum(part.num_layers for part in self.slices[: self.landed])
        assert (self.gate.recorded, self.gate.landed) == (len(self.events), self.landed)
        assert self.gate.landed_layers == layers
        assert self.gate.released == (layers >= self.needed)
        assert self.gate.all_landed == (self.landed == len(self.slices))


TestGateMachine = GateMachine.TestCase
