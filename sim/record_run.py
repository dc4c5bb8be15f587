"""A simulated run as a recording, to be explained, drawn, or opened beside a measured one."""

from __future__ import annotations

from lamella.reference.recording import (
    LEFT_OUT,
    Landing,
    LayerStall,
    Occupation,
    Recording,
    RequestSpan,
    RunSource,
    StepSpan,
)
from lamella.sim.records import Ending, RequestRecord, SliceRecord, Station, StepRecord
from lamella.sim.world import World


def record_world(world: World, system: str, strategy: str, num_layers: int, notes: tuple[str, ...] = ()) -> Recording:
    """The recording of a world that has run with `keep_steps=True, keep_slices=True`.

    Requests whose load failed for good are left out, and a note says how many.

    Raises:
        ValueError: the world kept no steps or no slices.
    """
    if world.records and not world.steps:
        raise ValueError("the world kept no steps; build it with keep_steps=True")
    if any(record.load_bytes and not record.failure for record in world.records) and not world.slices:
        raise ValueError("the world kept no slices; build it with keep_slices=True")
    landed: dict[tuple[int, int], int] = {}
    for busy in world.slices:
        if busy.station in (Station.H2D, Station.SCATTER):
            key = (busy.sequence, busy.part)
            landed[key] = max(landed.get(key, 0), busy.end_ns)
    done = {record.sequence for record in world.records if record.ending is Ending.DONE}
    failed = len(world.records) - len(done)
    if failed:
        notes += (f"{failed} requests whose load failed are left out",)
    return Recording(
        RunSource.SIMULATED,
        system,
        strategy,
        num_layers,
        tuple(
            _request(record, landed)
            for record in sorted(world.records, key=lambda record: record.sequence)
            if record.sequence in done
        ),
        tuple(_step(step, done) for step in world.steps),
        tuple(_occupation(busy) for busy in world.slices if busy.sequence in done),
        notes,
    )


def _request(record: RequestRecord, landed: dict[tuple[int, int], int]) -> RequestSpan:
    landings: list[Landing] = []
    layer, before = 0, record.submitted_ns
    if not record.failure:  # what a failed load brought was thrown away
        for part, width in enumerate(record.slice_layers):
            # Slices land in order: one that is late holds up those behind it.
            before = max(before, landed[record.sequence, part])
            if part + 1 == len(record.slice_layers):
                before = max(before, record.all_landed_ns)
            landings.append(Landing(layer, width, before))
            layer += width
    return RequestSpan(
        record.sequence,
        record.cached_tokens,
        record.new_tokens,
        record.output_tokens,
        record.arrival_ns,
        record.admitted_ns,
        record.submitted_ns,
        record.ready_ns,
        record.released_ns,
        record.first_started_ns,
        record.started_ns,
        record.first_token_ns,
        record.end_ns,
        tuple(landings),
    )


def _step(step: StepRecord, done: set[int]) -> StepSpan:
    stalls = tuple(
        LayerStall(layer, stall_ns, culprit if culprit in done else LEFT_OUT)
        for layer, (stall_ns, culprit) in enumerate(zip(step.layer_stall_ns, step.culprits, strict=True))
        if stall_ns and culprit is not None
    )
    chunks = tuple(chunk for chunk in step.chunks if chunk.request in done)
    return StepSpan(step.polled_ns, step.start_ns, step.end_ns, chunks, stalls, step.decode_batch, step.num_steps)


def _occupation(busy: SliceRecord) -> Occupation:
    return Occupation(
        busy.station.value, busy.rank, busy.sequence, busy.part, busy.begin_ns, busy.end_ns, busy.num_bytes
    )
