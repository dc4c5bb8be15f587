"""What `lamella verify` checks: the laws of `reference.laws`, for each executor, on one case of real size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from lamella.cli._verification_case import Width, memory_needed
from lamella.cuda_ext.executors import NumpyExecutor, choose_executor
from lamella.cuda_ext.trial import NamedMove, each_method
from lamella.reference.laws import Difference, Move, TransferCase, Trial, check_landing, check_round_trip
from lamella.reference.plan import Direction
from lamella.reference.shrink import minimal

_SHRINK_TRIALS = 300
_LAWS: Final[tuple[tuple[str, Callable[[TransferCase, Move], object]], ...]] = (
    ("store, then retrieve: the identity", check_round_trip),
    ("slices are reported in order, as they land", check_landing),
)
"""Laws besides the oracle's bytes, of runners that take a plan on host memory."""


class Row(NamedTuple):
    """One law for one executor: how much was checked, and what breaks it in the smallest case found."""

    law: str
    executor: str
    widths: tuple[Width, ...]
    bytes_moved: int
    bytes_compared: int
    wall_ns: int
    broken: str | None
    counterexample: TransferCase | None


class Runner(NamedTuple):
    """An executor by name: what it makes of a trial, and the executor itself where it takes a plan on host memory."""

    name: str
    run: Callable[[Trial], Difference | None]
    move: Move | None


class Choice(NamedTuple):
    """Runners for a device, and why these."""

    runners: tuple[Runner, ...]
    reason: str


def choose_runners(device: str, threads: int) -> Choice:
    """Runners for `--device cpu` (the fastest executor that is installed) and `numpy`.

    Raises:
        ValueError: threads below 1, or another device.
    """
    if device == "numpy":
        return Choice(tuple(map(_on_host, each_method(NumpyExecutor()))), "NumPy, asked for")
    if device != "cpu":
        raise ValueError(f"unknown device {device!r}; known: cpu, numpy, engine, cuda")
    choice = choose_executor(threads)
    return Choice(tuple(map(_on_host, each_method(choice.executor))), f"{choice.executor.name}: {choice.reason}")


def _on_host(named: NamedMove) -> Runner:
    return Runner(named.name, lambda trial: trial.run(named.move), named.move)


def count_rows(runners: Sequence[Runner]) -> int:
    """How many rows `verify` gives where nothing is broken."""
    return len(Direction) * len(runners) + len(_LAWS) * sum(runner.move is not None for runner in runners)


def verify(case: TransferCase, widths: Sequence[Width], runners: Sequence[Runner]) -> Iterator[Row]:
    """Every law, a row as soon as it is done; after the first that is broken nothing more is tried."""
    for direction in Direction:
        trial = Trial(replace(case, direction=direction))
        for runner in runners:
            row = _compare(trial, widths, runner)
            yield row
            if row.broken:
                return
    layer_major = replace(case, width=next((width for width in widths if width is not None), 1))
    for law, check in _LAWS:
        for runner in runners:
            if runner.move is not None:
                row = _check(law, check, layer_major, runner.name, runner.move)
                yield row
                if row.broken:
                    return


def _compare(trial: Trial, widths: Sequence[Width], runner: Runner) -> Row:
    """The oracle's bytes against the runner's, width by width, up to the first that differs."""
    started = time.perf_counter_ns()
    moved = compared = 0
    counterexample = None
    for width in widths:
        case = replace(trial.case, width=width)
        moved += sum(case.plan(request).num_bytes for request in case.requests)
        compared += trial.num_bytes_compared
        if runner.run(trial.moved_as(case)) is not None:
            counterexample = _minimal(case, lambda small: runner.run(Trial(small)))
            break
    broken = None if counterexample is None else str(runner.run(Trial(counterexample)))
    law = f"{trial.case.direction.value}: exactly the oracle's bytes"
    wall_ns = time.perf_counter_ns() - started
    return Row(law, runner.name, tuple(widths), moved, compared, wall_ns, broken, counterexample)


def _check(law: str, check: Callable[[TransferCase, Move], object], case: TransferCase, name: str, move: Move) -> Row:
    started = time.perf_counter_ns()
    counterexample = None
    if check(case, move) is not None:
        counterexample = _minimal(case, lambda small: check(small, move))
    broken = None if counterexample is None else str(check(counterexample, move))
    moved = sum(case.plan(request).num_bytes for request in case.requests)
    return Row(law, name, (case.width,), moved, 0, time.perf_counter_ns() - started, broken, counterexample)


def _minimal(case: TransferCase, broken: Callable[[TransferCase], object | None]) -> TransferCase:
    def fails(candidate: TransferCase) -> bool:
        return memory_needed(candidate) <= memory_needed(case) and broken(candidate) is not None

    return minimal(case, fails, _SHRINK_TRIALS)
