"""Two ranks and a server, each killed at any moment (`worker_machine`), and faults that this must find."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from engine_driver import ENGINE_MISSING
from rank_process import GRANTED
from worker_machine import FLEETS, Machine

pytestmark = [pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING)), pytest.mark.slow]

SEEDS, STEPS = 8, 150


@pytest.fixture(autouse=True, scope="module")
def _end_fleets() -> Iterator[None]:
    yield
    for fleet in FLEETS.values():
        fleet.close()
    FLEETS.clear()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_ranks_and_a_server_killed_at_any_moment_keep_every_invariant(seed: int) -> None:
    Machine(seed).run(STEPS)


# ---- planted faults: each in a run of its own in which it must show, and which holds without it


def _retrieve(machine: Machine, index: int, chunks: int = 4, request: str = "r0") -> None:
    """A retrieve of what was just stored has begun."""
    machine.store_prompt(index, 0, chunks)
    machine.look_up_prompt(index, 0, chunks)
    (name,) = machine.engines[index].lookups
    machine.retrieve_looked_up(index, name, request)


def _grant(machine: Machine, windows: int) -> None:
    machine.fleet.ranks[0].ask("grant", windows=windows)
    machine.poll_rank(0)


def a_step_beside_a_frozen_load(machine: Machine) -> None:
    _retrieve(machine, 0)
    _grant(machine, 5)
    machine.step_rank(0, frozen=True)


def a_load_to_its_end(machine: Machine) -> None:
    _retrieve(machine, 0)
    _grant(machine, 5)
    _grant(machine, GRANTED)


def an_abort_of_a_frozen_load(machine: Machine) -> None:
    _retrieve(machine, 0)
    _grant(machine, 5)
    (load,) = machine.engines[0].loads.values()
    machine.fleet.ranks[0].ask("abort", number=load.number)
    load.aborted = True
    machine.poll_rank(0)
    _grant(machine, GRANTED)
    machine.blocks_that_are_nobodys_are_as_they_were()


def an_entry_used_again_while_the_server_stands_still(machine: Machine) -> None:
    _retrieve(machine, 1)
    while machine.engines[1].loads:
        machine.poll_rank(1)
    for _entry in range(3):  # the pool hands out what came back last, whichever that is
        machine.look_up_prompt(1, 0, 4)
    names = list(machine.engines[1].lookups)
    os.kill(machine.fleet.server.process.pid, signal.SIGSTOP)
    try:
        machine.retrieve_looked_up(1, names[0], "r1")
        machine.poll_rank(1)
        machine.step_rank(1, frozen=True)
    finally:
        os.kill(machine.fleet.server.process.pid, signal.SIGCONT)


def others_fill_the_pool_beside_a_frozen_load(machine: Machine) -> None:
    _retrieve(machine, 0)
    machine.store_others(1, 12)
    _grant(machine, GRANTED)


def a_retrieve_under_a_lease_that_has_ended(machine: Machine) -> None:
    machine.store_prompt(0, 0, 4)
    machine.look_up_prompt(0, 0, 4)
    (name,) = machine.engines[0].lookups
    machine.fleet.ranks[0].ask("give_back", number=name, keep=True)
    machine.retrieve_looked_up(0, name, "r0")
    (load,) = machine.engines[0].loads.values()
    load.expired = True
    _grant(machine, GRANTED)


FAULTS: dict[str, tuple[str, Callable[[Machine], None]]] = {
    "no_wait": ("REL-2", a_step_beside_a_frozen_load),
    "errors_forgotten": ("SAFE-3", a_step_beside_a_frozen_load),
    "no_bound": ("SAFE-5", a_step_beside_a_frozen_load),
    "reported_twice": ("REL-1", a_load_to_its_end),
    "slot_leaked": ("no arrival slot is lost", a_load_to_its_end),
    "lease_leaked": ("SRV-2", a_load_to_its_end),
    "ended_before_drained": ("SAFE-1", an_abort_of_a_frozen_load),
    "generation_ignored": ("REL-2", an_entry_used_again_while_the_server_stands_still),
    "landed_when_recorded": ("REL-2", an_entry_used_again_while_the_server_stands_still),
    "unlocked_at_once": ("XFER-1", others_fill_the_pool_beside_a_frozen_load),
    "refusal_ignored": ("SRV-6", a_retrieve_under_a_lease_that_has_ended),
}
"""Faults of `rank_process.plant`: the invariant that each breaks, and the run in which it shows."""


@pytest.mark.parametrize("scenario", dict.fromkeys(scenario for _, scenario in FAULTS.values()))
def test_each_of_those_runs_holds_without_its_fault(scenario: Callable[[Machine], None]) -> None:
    machine = Machine(0)
    scenario(machine)
    machine.come_to_rest()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_its_invariant(fault: str) -> None:
    broken, scenario = FAULTS[fault]
    try:
        machine = Machine(0, fault)
        with pytest.raises((AssertionError, TimeoutError), match=broken):
            scenario(machine)
            machine.come_to_rest()
    finally:
        if fault in FLEETS:
            FLEETS.pop(fault).close()
