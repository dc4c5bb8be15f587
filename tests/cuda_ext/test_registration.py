"""Registering in pieces: in the background, never handing out what failed, and saying which limit bit."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from lamella.cuda_ext.registration import (
    LockRegistrar,
    NoRegistrar,
    PieceState,
    Registrar,
    Registration,
    RegistrationError,
    memory_limits,
)
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slots import SlotMemory, SlotShape

PAGE = os.sysconf("SC_PAGESIZE")


class ScriptedRegistrar:
    """Refuses the pieces it is told to, and can be held up; keeps what is registered."""

    name = "scripted"

    def __init__(self, refuse: frozenset[int] = frozenset(), piece_bytes: int = PAGE) -> None:
        self.refuse = refuse
        self.piece_bytes = piece_bytes
        self.held: dict[int, int] = {}
        self.base: int | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def register(self, address: int, num_bytes: int) -> None:
        self.base = self.base or address
        piece = (address - self.base) // self.piece_bytes
        if piece:
            assert self.may_go_on.wait(20)
        if piece in self.refuse:
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        self.held[address] = num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        assert self.held.pop(address) == num_bytes


def _registrars() -> list[Registrar]:
    return [ScriptedRegistrar(), NoRegistrar(), LockRegistrar()]


def _registration(
    registrar: Registrar, total: int, on_ready: Callable[[int], None] = lambda piece: None
) -> Registration:
    return Registration(PAGE, PAGE, total, registrar, lambda offset, num_bytes: None, on_ready)


def test_the_first_piece_is_ready_at_once_and_the_others_follow_beside_the_work() -> None:
    registrar, ready = ScriptedRegistrar(), []
    registrar.may_go_on.clear()
    registration = _registration(registrar, 3 * PAGE - 1, ready.append)
    assert registration.state(0) is PieceState.READY
    assert (ready, registration.report().pending) == ([0], 2)
    registrar.may_go_on.set()
    assert registration.wait(20).ready == 3
    assert ready == [0, 1, 2]
    assert list(registrar.held.values()) == [PAGE, PAGE, PAGE - 1]
    registration.close()
    assert registrar.held == {}, "everything registered is unregistered"
    registration.close()


@pytest.mark.known_fault(83)
def test_a_piece_that_fails_stays_out_is_reported_and_stops_no_other() -> None:
    registrar, ready = ScriptedRegistrar(refuse=frozenset({1})), []
    registration = _registration(registrar, 3 * PAGE, ready.append)
    report = registration.wait(20)
    assert ready == [0, 2]
    assert registration.state(1) is PieceState.FAILED
    (failed,) = report.failed
    assert failed.piece == 1
    assert "offset 4096: cannot allocate memory. RLIMIT_MEMLOCK is" in str(failed.error)
    registration.close()


@pytest.mark.known_fault(82, 83)
def test_a_memory_of_which_nothing_can_be_registered_fails_loudly_with_the_limits() -> None:
    with pytest.raises(
        RegistrationError, match=r"scripted could not register 4096 bytes .* RLIMIT_MEMLOCK is .*ulimit -l"
    ):
        _registration(ScriptedRegistrar(refuse=frozenset({0})), 3 * PAGE)


def test_closing_early_registers_no_further_piece() -> None:
    registrar = ScriptedRegistrar()
    registrar.may_go_on.clear()
    registration = _registration(registrar, 5 * PAGE)
    closing = threading.Thread(target=registration.close)
    closing.start()
    registrar.may_go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    assert registrar.held == {}


def test_waiting_is_bounded() -> None:
    registrar = ScriptedRegistrar()
    registrar.may_go_on.clear()
    registration = _registration(registrar, 2 * PAGE)
    with pytest.raises(TimeoutError, match=r"1 pieces are still being registered after 0\.01 s"):
        registration.wait(0.01)
    registrar.may_go_on.set()
    registration.close()


@pytest.mark.parametrize("registrar", _registrars(), ids=lambda registrar: registrar.name)
def test_every_registrar_takes_and_gives_back_a_piece(registrar: Registrar) -> None:
    memory = HostMemory.anonymous(2 * PAGE)
    registrar.register(memory.address, 2 * PAGE)
    registrar.unregister(memory.address, 2 * PAGE)
    memory.close()


@pytest.mark.known_fault(83)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user whom RLIMIT_MEMLOCK binds")
def test_the_real_limit_keeps_pieces_out_and_is_named() -> None:
    code = """
import os, resource
from lamella.cuda_ext.registration import LockRegistrar
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.cuda_ext.slots import SlotMemory, SlotShape
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
os.setgid(65534); os.setuid(65534)
shape = SlotShape(object_bytes=256 << 10, num_slots=12, target_piece_bytes=256 << 10)
slots = SlotMemory(HostMemory.anonymous(shape.total_bytes), shape, LockRegistrar())
report = slots.wait_registered(20)
print(report.ready, [failed.piece for failed in report.failed])
print(report.failed[0].error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    counts, message = result.stdout.splitlines()
    ready = int(counts.split()[0])
    assert 1 <= ready <= 4
    assert counts == f"{ready} {list(range(ready, 12))}"
    assert "RLIMIT_MEMLOCK is 1048576 bytes" in message


def test_limits_name_the_containers_bound_where_there_is_one(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "memory.max").write_text("1073741824\n")
    assert "the container's memory.max is 1073741824 bytes" in memory_limits(folder)
    assert "memory.max" not in memory_limits(folder / "absent")


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize(
    ("object_bytes", "pitch", "piece_slots"),
    [(32 << 20, 32 << 20, 8), (1, 256, 1 << 20), (700, 768, 349520), (1 << 30, 1 << 30, 1)],
)
def test_a_piece_is_whole_slots_and_whole_pages(object_bytes: int, pitch: int, piece_slots: int) -> None:
    shape = SlotShape(object_bytes, num_slots=3 * piece_slots + 1)
    assert (shape.pitch_bytes, shape.piece_slots, shape.num_pieces) == (pitch, piece_slots, 4)
    assert shape.piece_bytes % PAGE == 0
    assert shape.total_bytes >= shape.num_slots * pitch
    assert [len(shape.slots_of(piece)) for piece in range(4)] == [piece_slots] * 3 + [1]


@pytest.mark.known_fault(83)
def test_a_slot_that_is_not_registered_here_has_no_address() -> None:
    shape = SlotShape(PAGE, num_slots=6, target_piece_bytes=2 * PAGE)
    registrar = ScriptedRegistrar(refuse=frozenset({1}), piece_bytes=shape.piece_bytes)
    slots = SlotMemory(HostMemory.anonymous(shape.total_bytes), shape, registrar)
    slots.wait_registered(20)
    assert slots.addresses([0, 1, 5]) == (slots.base, slots.base + PAGE, slots.base + 5 * PAGE)
    with pytest.raises(RuntimeError, match=r"slots range\(2, 4\) are not registered here: failed"):
        slots.addresses([0, 3])
    with pytest.raises(ValueError, match="slot must be between 0 and 5, got 6"):
        slots.addresses([6])
    slots.close()


def test_an_attached_memory_is_registered_for_the_process_that_attached_it() -> None:
    shape = SlotShape(PAGE, num_slots=4, target_piece_bytes=2 * PAGE)
    owner = SlotMemory(HostMemory.create(shape.total_bytes), shape, NoRegistrar())
    registrar = ScriptedRegistrar(piece_bytes=shape.piece_bytes)
    other = SlotMemory.attach(owner.shared(), registrar)
    other.wait_registered(20)
    assert list(registrar.held.values()) == [2 * PAGE, 2 * PAGE]
    owner.buffer(3)[:2] = b"kv"
    assert bytes(other.buffer(3)[:2]) == b"kv"
    with pytest.raises(RuntimeError, match="only the creator"):
        other.shared()
    other.close()
    assert registrar.held == {}
    owner.close()


def test_a_memory_that_cannot_be_registered_leaves_nothing_behind() -> None:
    shape = SlotShape(PAGE, num_slots=4)
    owner = SlotMemory(HostMemory.create(shape.total_bytes), shape, NoRegistrar())
    with pytest.raises(RegistrationError):
        SlotMemory.attach(owner.shared(), ScriptedRegistrar(refuse=frozenset({0})))
    assert owner.shared().path.exists()
    owner.close()
