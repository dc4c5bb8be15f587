"""Two engines of two ranks on one server, against dictionaries (`server_machine`), and faults that this must find."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from lamella.connector.storage.storage_manager import StorageManager
from lamella.server.frames import RefusedError
from lamella.server.leases import LeaseBook, Part, PartState
from lamella.server.lending import Lending, Loan
from server_machine import ServerMachine

ServerMachine.TestCase.settings = settings(stateful_step_count=40)
TestServerMachine = ServerMachine.TestCase


# ---- the faults that the machine must find


def moving_by_the_clock(patched: pytest.MonkeyPatch) -> None:
    def begin(self: LeaseBook[Loan], part: Part[Loan], session: int) -> None:
        if part.state is not PartState.LOCKED:
            raise RuntimeError(f"{part.state.value}")
        part.state, part.session = PartState.MOVING, session

    patched.setattr(LeaseBook, "begin", begin)


def no_quarantine(patched: pytest.MonkeyPatch) -> None:
    def session_ended(self: LeaseBook[Loan], session: int) -> tuple[Part[Loan], ...]:
        return tuple(part for part in self.all() if part.session == session)

    patched.setattr(LeaseBook, "session_ended", session_ended)


def locks_outlive_their_process(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LeaseBook, "session_ended", lambda self, session: ())


def more_locked_than_answered(patched: pytest.MonkeyPatch) -> None:
    patched.setattr("lamella.server.lending._shortened", lambda place, lease, length: lease)


def first_rank_alone(patched: pytest.MonkeyPatch) -> None:
    original = Lending._ranks

    def ranks_of(self: Lending, session: Any, rank: int) -> Any:
        found = original(self, session, rank)
        return found if found is None else found[:1]

    patched.setattr(Lending, "_ranks", ranks_of)


def an_abort_keeps_what_was_written(patched: pytest.MonkeyPatch) -> None:
    original = Lending._close_part
    patched.setattr(Lending, "_close_part", lambda self, part, *, keep: original(self, part, keep=True))


def any_engine_s_lease(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LeaseBook, "part", lambda self, lease, rank, engine: self._leases[lease].parts[rank])


def half_an_allocation(patched: pytest.MonkeyPatch) -> None:
    patched.setattr("lamella.server.lending._abandon", lambda loans: None)


def heads_are_forgotten(patched: pytest.MonkeyPatch) -> None:
    original = StorageManager.allocate
    patched.setattr(StorageManager, "allocate", lambda self, keys, after=None: original(self, keys))


def tails_are_stored_without_heads(patched: pytest.MonkeyPatch) -> None:
    patched.setattr("lamella.server.lending._may_reach", lambda place, head: True)


FAULTS = [
    moving_by_the_clock,
    no_quarantine,
    locks_outlive_their_process,
    more_locked_than_answered,
    first_rank_alone,
    an_abort_keeps_what_was_written,
    any_engine_s_lease,
    half_an_allocation,
    heads_are_forgotten,
    tails_are_stored_without_heads,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_machine_finds_a_planted_fault(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # half an allocation takes 140 runs on average, so that one time in 17 four hundred of them would miss it
    chosen = settings(settings.get_profile("verdict"), max_examples=2000, stateful_step_count=40)
    with pytest.raises((AssertionError, KeyError, RuntimeError, RefusedError)):
        run_state_machine_as_test(ServerMachine, settings=chosen)
