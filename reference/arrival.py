"""The arrival gate: which layers of one load are recorded and landed, and what a reader of a layer must wait for.

The life of a slice, always in slice order::

    planned --record(slice, event)--> recorded --mark_landed(slice)--> landed

*Recorded* means that the sender has enqueued the copy and its event; only from then on may that event be waited on,
since an unrecorded event reads as complete. *Landed* means that the event has completed: the layers are visible in the
engine's blocks. A request is released once enough **layers** have landed, while recording and waiting count in
**slices**.

The gate is pure state: no clock, no lock, and the event is whatever the owner uses (a CUDA event, a simulated instant).
A sender thread records, an engine thread asks; whoever owns the gate brings the one lock.

Contracts: ARR-1, ARR-3 and SAFE-2 of `lamella.reference`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

from lamella.reference.slices import Slice

EventT = TypeVar("EventT")


class LayerArrivalGate(Generic[EventT]):
    """Arrival state of one load.

    Args:
        slices: the load's slices, in layer order and without a gap, as `plan_slices` gives them.
        release_after_layers: how many layers must have landed before `released`.
        generation: which use of the slot this is; every record and landing must quote it.

    Raises:
        ValueError: slices that do not start at layer 0 or leave a gap, release_after_layers outside 1 .. number of
            layers, or a negative generation.

    >>> gate = LayerArrivalGate[str]([Slice(0, 1), Slice(1, 2)], release_after_layers=1)
    >>> gate.record(0, "event 0", generation=0), gate.released
    (True, False)
    >>> gate.mark_landed(0, generation=0), gate.released
    (True, True)
    >>> gate.record(1, "event 1", generation=0), gate.event_for(2)
    (True, 'event 1')
    >>> gate.begin_step()
    >>> gate.wait_for(0), gate.wait_for(1), gate.wait_for(2)
    (None, 'event 1', None)
    """

    def __init__(self, slices: Sequence[Slice], *, release_after_layers: int = 1, generation: int = 0) -> None:
        ends: list[int] = []
        for index, part in enumerate(slices):
            expected = ends[-1] if ends else 0
            if part.first_layer != expected or part.num_layers < 1:
                raise ValueError(f"slice {index} must start at layer {expected} and hold at least 1 layer, got {part}")
            ends.append(part.end_layer)
        if not ends:
            raise ValueError("a gate needs at least one slice; a load of nothing has landed and needs no gate")
        if not 1 <= release_after_layers <= ends[-1]:
            raise ValueError(f"release_after_layers must be between 1 and {ends[-1]}, got {release_after_layers}")
        if generation < 0:
            raise ValueError(f"generation must be at least 0, got {generation}")
        self._ends = ends
        self._release_after_layers = release_after_layers
        self._generation = generation
        self._events: list[EventT] = []
        self._landed = 0
        self._waited = -1

    @property
    def generation(self) -> int:
        """Which use of the slot this is."""
        return self._generation

    @property
    def num_layers(self) -> int:
        """Layers of the whole load."""
        return self._ends[-1]

    @property
    def recorded(self) -> int:
        """Slices recorded so far."""
        return len(self._events)

    @property
    def landed(self) -> int:
        """Slices landed so far."""
        return self._landed

    @property
    def landed_layers(self) -> int:
        """Layers landed so far."""
        return self._ends[self._landed - 1] if self._landed else 0

    @property
    def released(self) -> bool:
        """Whether so many layers have landed that the request may run."""
        return self.landed_layers >= self._release_after_layers

    @property
    def all_landed(self) -> bool:
        """Whether nothing of the load is on the wire any more."""
        return self._landed == len(self._ends)

    def record(self, slice_index: int, event: EventT, *, generation: int) -> bool:
        """The slice counts as recorded, and its layers may be waited for through `event`.

        The sender calls it after it enqueued the slice's last copy and its event, never before.

        Returns:
            False if the generation is not the present one; nothing changed then.

        Raises:
            RuntimeError: not the next slice in order: recorded before, skipped, or beyond the last.
        """
        if generation != self._generation:
            return False
        if slice_index != len(self._events) or slice_index >= len(self._ends):
            raise RuntimeError(
                f"slice {slice_index} cannot be recorded: {len(self._events)} of {len(self._ends)} slices are, and "
                "they must be recorded in order, each once"
            )
        self._events.append(event)
        return True

    def mark_landed(self, slice_index: int, *, generation: int) -> bool:
        """The slice counts as landed; the owner has seen its event complete.

        Returns:
            False if the generation is not the present one; nothing changed then.

        Raises:
            RuntimeError: not the next slice in order, or a slice that `record` has not been called for.
        """
        if generation != self._generation:
            return False
        if slice_index != self._landed:
            raise RuntimeError(
                f"slice {slice_index} cannot land: {self._landed} of {len(self._ends)} slices have, and they land in "
                "order, each once"
            )
        if slice_index >= len(self._events):
            raise RuntimeError(f"slice {slice_index} cannot land before record({slice_index}, event) was called")
        self._landed += 1
        return True

    def land(self, slice_index: int, event: EventT) -> int:
        """The slice is recorded and has landed in one: for an owner who sees both in the same instant.

        Returns:
            Layers landed so far.

        Raises:
            RuntimeError: not the next slice in order, or one that has been recorded before.
        """
        if slice_index != len(self._events) or slice_index != self._landed or slice_index >= len(self._ends):
            raise RuntimeError(
                f"slice {slice_index} cannot land: {self._landed} of {len(self._ends)} slices have, and they land in "
                "order, each once"
            )
        self._events.append(event)
        self._landed = slice_index + 1
        return self._ends[slice_index]

    def slice_of(self, layer: int) -> int:
        """The index of the slice that holds the layer.

        Raises:
            ValueError: layer outside 0 .. num_layers - 1.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be between 0 and {self.num_layers - 1}, got {layer}")
        return bisect_right(self._ends, layer)

    def event_for(self, layer: int) -> EventT:
        """The event after which the layer is visible.

        Raises:
            ValueError: no such layer.
            RuntimeError: its slice is not recorded yet; wait on the host, bounded, until `recorded` says so.
        """
        index = self.slice_of(layer)
        if index >= len(self._events):
            raise RuntimeError(
                f"layer {layer} is in slice {index}, and only {len(self._events)} slices are recorded: an unrecorded "
                "event reads as complete, so wait on the host for record() first"
            )
        return self._events[index]

    def begin_step(self) -> None:
        """A new step begins: nothing has been waited for in it."""
        self._waited = -1

    def wait_for(self, layer: int) -> EventT | None:
        """What the present step must wait for before it reads the layer; None if nothing (more).

        Slices complete in order, so a wait for one covers all before it: a step waits once a slice, not once a layer,
        and not at all for what has landed.

        Raises:
            ValueError: no such layer.
            RuntimeError: its slice is not recorded yet, as in `event_for`.
        """
        index = self.slice_of(layer)
        if index < self._landed or index <= self._waited:
            return None
        event = self.event_for(layer)
        self._waited = index
        return event

    def restart(self, *, generation: int) -> None:
        """The slot serves a new load of the same slices; whatever still arrives for the old one is ignored.

        Raises:
            ValueError: a generation that is not newer than the present one.
        """
        if generation <= self._generation:
            raise ValueError(f"generation must be newer than {self._generation}, got {generation}")
        self._generation = generation
        self._events.clear()
        self._landed = 0
        self._waited = -1
