"""The laws of a transfer, as code: one description of a case, and the check that an executor obeys the oracle on it.

`Trial(case).run(move)` lays a case out in memory, lets `move` carry out its plans, and compares every byte of both
buffers (what moved, what had to stay, the source, the gaps) with what the oracle leaves. The property tests draw
cases at random, `lamella verify` builds them from a user's geometry; both run exactly this code.

Source bytes have the top bit clear and the destination's have it set, so that a byte that did not move can never pass
for one that did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lamella.reference import oracle
from lamella.reference.arena import Arena, Bytes, CacheCase, Place
from lamella.reference.geometry import ObjectForm
from lamella.reference.layout import EngineLayout, ObjectLayout
from lamella.reference.plan import (
    Direction,
    TransferPlan,
    TransferRequest,
    check_request,
    plan_chunk_major,
    plan_layer_major,
)

_COMPARED_AT_ONCE = 1 << 26
_PATTERN_BYTES = 16381  # prime, so that what repeats never repeats at a stride


class Transfer(NamedTuple):
    """What an executor is asked to carry out, on live memory.

    `object_addresses` are by absolute chunk. Host memory counts as registered in pieces of `registered_piece_bytes`
    from `registered_base` on, or in one piece where that is None. `on_slice`, where given, wants each slice's index in
    the plan, in order, once its last byte has landed.
    """

    plan: TransferPlan
    engines: tuple[EngineLayout, ...]
    object_addresses: tuple[int, ...]
    registered_piece_bytes: int | None
    registered_base: int
    direction: Direction
    on_slice: Callable[[int], None] | None = None


Move = Callable[[Transfer], None]
"""An executor with its method and threads chosen; returns when every byte has landed."""


@dataclass(frozen=True, slots=True)
class TransferCase:
    """Everything that decides what a transfer does.

    Args:
        caches: one for each kernel group, in the object's order.
        form, chunk_tokens: of the objects.
        requests: their destinations (blocks for a retrieve, objects for a store) are disjoint.
        direction: of all requests.
        width: layers per slice, a schedule, or None for chunk-major.
        staging_bytes, num_windows: the staging ring.
        registered_piece_bytes: size of the pieces in which host memory is registered, or None.
        turns: with several requests, whose next slice moves: each entry picks among the requests that have slices
            left (modulo their number); what remains afterwards moves in order.
        seed: of the bytes and of where tensors and objects lie.
    """

    caches: tuple[CacheCase, ...]
    form: ObjectForm
    chunk_tokens: int
    requests: tuple[TransferRequest, ...]
    direction: Direction
    width: int | tuple[int, ...] | None
    staging_bytes: int
    num_windows: int = 2
    registered_piece_bytes: int | None = None
    turns: tuple[int, ...] = ()
    seed: int = 0

    @property
    def layout(self) -> ObjectLayout:
        """Of the objects."""
        return ObjectLayout(tuple(cache.group(self.chunk_tokens) for cache in self.caches), self.form)

    def check(self) -> None:
        """Settles whatever a transfer may be refused for.

        Raises:
            ValueError: as `check_request` and `plan_layer_major`.
        """
        arena = _arena(self)
        engines = arena.engines(np.empty(arena.engine_bytes, dtype=np.uint8))
        for request in self.requests:
            check_request(self.layout, engines, request, self.direction)
            self.plan(request)

    def plan(self, request: TransferRequest) -> TransferPlan:
        """The request's plan.

        Raises:
            ValueError: as `plan_layer_major`.
        """
        if self.width is None:
            return plan_chunk_major(self.layout, request, self.staging_bytes, self.num_windows)
        return plan_layer_major(self.layout, request, self.width, self.staging_bytes, self.num_windows)

    def in_turns(self) -> Iterator[tuple[int, TransferPlan]]:
        """(request, plan) in the order in which they are carried out."""
        plans = [self.plan(request) for request in self.requests]
        if len(plans) == 1:
            yield 0, plans[0]
            return
        waiting = {index: list(plan.per_slice()) for index, plan in enumerate(plans)}
        for turn in self.turns:
            if not waiting:
                return
            index = sorted(waiting)[turn % len(waiting)]
            yield index, waiting[index].pop(0)
            if not waiting[index]:
                del waiting[index]
        for index, left in waiting.items():
            yield from ((index, plan) for plan in left)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte that is not the oracle's.

    `place` is None for a byte that belongs to nobody (a gap, a margin, an object's padding); `num_bytes` counts all
    bytes that differ in that buffer.
    """

    buffer: str
    offset: int
    place: Place | None
    expected: int
    found: int
    num_bytes: int

    def __str__(self) -> str:
        """One sentence."""
        at = (
            f"{self.place.memory} group {self.place.group} layer {self.place.layer} kv {self.place.kv} "
            f"{'block' if self.place.memory == 'engine' else 'chunk'} {self.place.block} token {self.place.token} "
            f"head {self.place.head} dim {self.place.dim}"
            if self.place
            else f"byte {self.offset} of the {self.buffer}'s buffer, which belongs to no element"
        )
        return f"{self.num_bytes} bytes differ, first at {at}: expected {self.expected:#04x}, found {self.found:#04x}"


class Trial:
    """One case in memory: the bytes before, and the bytes the oracle leaves.

    Raises:
        ValueError: as `TransferCase.check`.
    """

    def __init__(self, case: TransferCase) -> None:
        case.check()
        self.case = case
        self.arena = _arena(case)
        self._source_is_host = case.direction is Direction.RETRIEVE
        source, poison = _buffers(self.arena, case.seed, source_is_host=self._source_is_host)
        self.source, self.poison = source, poison
        self.expected = poison.copy()
        self._own: tuple[Bytes, Bytes] | None = None
        engine, host = (self.expected, source) if self._source_is_host else (source, self.expected)
        move = oracle.retrieve if self._source_is_host else oracle.store
        for index, request in enumerate(case.requests):
            move(
                self.arena.objects(host, index),
                self.arena.planes(engine),
                request.block_ids,
                num_tokens=request.num_tokens,
                chunk_tokens=case.chunk_tokens,
                skip_tokens=request.skip_tokens,
                null_block=request.null_block,
            )

    @property
    def num_bytes_compared(self) -> int:
        """Bytes of both buffers, each compared after a run."""
        return self.arena.engine_bytes + self.arena.host_bytes

    def run(self, move: Move) -> Difference | None:
        """None if `move` left exactly the oracle's bytes."""
        if self._own is None:
            self._own = self.buffers()
        else:  # memory that is there already costs no page faults
            for own, before in zip(self._own, self._before(), strict=True):
                np.copyto(own, before)
        engine, host = self._own
        carry_out(self.case, self.arena, engine, host, move)
        return self.compare(engine, host)

    def moved_as(self, case: TransferCase) -> Trial:
        """The same bytes in the same places for a case that differs only in width, budget, windows, pieces or turns."""
        if self._own is None:
            self._own = self.buffers()
        other = copy.copy(self)
        other.case = case
        return other

    def buffers(self) -> tuple[Bytes, Bytes]:
        """(engine, host) as they are before the transfer; fresh copies, for one run."""
        engine, host = self._before()
        return engine.copy(), host.copy()

    def _before(self) -> tuple[Bytes, Bytes]:
        return (self.poison, self.source) if self._source_is_host else (self.source, self.poison)

    def compare(self, engine: Bytes, host: Bytes) -> Difference | None:
        """None if these are the oracle's bytes, in the buffer written and in the one read."""
        expected = (self.expected, self.source) if self._source_is_host else (self.source, self.expected)
        for name, found, wanted in zip(("engine", "host"), (engine, host), expected, strict=True):
            difference = _first_difference(self.arena, name, found, wanted)
            if difference:
                return difference
        return None


def check(case: TransferCase, move: Move) -> Difference | None:
    """XFER-1: `move` leaves exactly the oracle's bytes in both buffers; None if it does."""
    return Trial(case).run(move)


def check_landing(case: TransferCase, move: Move) -> str | None:
    """XFER-5: when a slice is reported, it has landed, those before it too, and nothing of those behind it has moved.

    Returns None if that holds, else a sentence. The case must be a retrieve; its first request alone is carried out.
    """
    case = replace(case, requests=case.requests[:1], turns=())
    trial = Trial(case)
    plan = case.plan(case.requests[0])
    landed: list[int] = []
    wrong: list[str] = []

    def on_slice(index: int) -> None:
        landed.append(index)
        end_layer = plan.slices[index].end_layer
        for group, cache in enumerate(case.caches):
            for own, layer in enumerate(cache.layers):
                wanted = after if layer < end_layer else before
                for kv in range(cache.kv):
                    if not np.array_equal(now[group][own][kv], wanted[group][own][kv]):
                        state = "has not landed" if layer < end_layer else "has moved already"
                        wrong.append(f"slice {index} reported: layer {layer} of group {group}, kv {kv} {state}")

    result, source = trial.poison.copy(), trial.source.copy()
    before, now, after = (trial.arena.planes(buffer) for buffer in (trial.poison, result, trial.expected))
    carry_out(case, trial.arena, result, source, move, on_slice)
    if landed != list(range(len(plan.slices))):
        return f"slices reported as {landed}, the plan has {len(plan.slices)}"
    return wrong[0] if wrong else None


def check_round_trip(case: TransferCase, move: Move) -> Difference | None:
    """A store, and then a retrieve into a poisoned cache, is the identity on every token that the requests name.

    The expectation is the source cache itself, token by token; no oracle.

    Raises:
        ValueError: a case that is no legal retrieve.
    """
    replace(case, direction=Direction.RETRIEVE).check()
    arena = _arena(case)
    source, host = _buffers(arena, case.seed, source_is_host=False)
    poison = _buffers(arena, case.seed, source_is_host=True)[1]
    expected, result = poison.copy(), poison.copy()
    for request in case.requests:
        for ours, theirs, ids in zip(arena.planes(expected), arena.planes(source), request.block_ids, strict=True):
            tokens = np.arange(request.skip_tokens, request.num_tokens)
            size = ours[0][0].shape[1]
            blocks = np.asarray(ids, dtype=np.int64)[tokens // size] if len(tokens) else tokens
            named = blocks != (-1 if request.null_block is None else request.null_block)
            at = blocks[named], tokens[named] % size
            for our_kv, their_kv in zip(ours, theirs, strict=True):
                for our_plane, their_plane in zip(our_kv, their_kv, strict=True):
                    our_plane[at] = their_plane[at]
    carry_out(replace(case, direction=Direction.STORE), arena, source, host, move)
    carry_out(replace(case, direction=Direction.RETRIEVE), arena, result, host, move)
    return _first_difference(arena, "engine", result, expected)


def carry_out(
    case: TransferCase,
    arena: Arena,
    engine: Bytes,
    host: Bytes,
    move: Move,
    on_slice: Callable[[int], None] | None = None,
) -> None:
    """Lets `move` carry out the case's plans on these two buffers."""
    engines = arena.engines(engine)
    for index, plan in case.in_turns():
        addresses, base = arena.object_addresses(host, index), int(host.ctypes.data)
        move(Transfer(plan, engines, addresses, case.registered_piece_bytes, base, case.direction, on_slice))


def _arena(case: TransferCase) -> Arena:
    objects = [-(-request.num_tokens // case.chunk_tokens) for request in case.requests]
    return Arena.lay_out(case.caches, case.form, case.chunk_tokens, objects, case.seed)


def _buffers(arena: Arena, seed: int, *, source_is_host: bool) -> tuple[Bytes, Bytes]:
    """(source, poisoned destination)."""
    random = np.random.default_rng([seed, source_is_host])
    sizes = (arena.host_bytes, arena.engine_bytes)[:: 1 if source_is_host else -1]
    source, poison = (np.resize(random.integers(0, 128, _PATTERN_BYTES, dtype=np.uint8), size) for size in sizes)
    poison |= 0x80
    return source, poison


def _first_difference(arena: Arena, buffer: str, found: Bytes, expected: Bytes) -> Difference | None:
    first, count = -1, 0
    for start in range(0, len(found), _COMPARED_AT_ONCE):
        part = slice(start, start + _COMPARED_AT_ONCE)
        if not np.array_equal(found[part], expected[part]):
            wrong = np.flatnonzero(found[part] != expected[part])
            first = start + int(wrong[0]) if first < 0 else first
            count += len(wrong)
    if not count:
        return None
    place = arena.place_in_engine(first, found) if buffer == "engine" else arena.place_in_host(first, found)
    return Difference(buffer, first, place, int(expected[first]), int(found[first]), count)
