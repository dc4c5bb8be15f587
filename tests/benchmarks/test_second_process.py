"""The process that multiplies beside some arms, and whether a daemon of MPS answers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from concurrency import second_process
from concurrency.arms import ARMS
from concurrency.groups import GROUPS
from concurrency.second_process import MPS_CONTROL, SecondProcess, mps_servers

from lamella.cuda_ext.beside import torch_reason


class Other:
    """In the place of `OtherProcess`; notes what happens."""

    seen: list[str]
    fails = ""

    def __init__(self, device: str, rows: int, timeout_s: float) -> None:
        assert (device, rows > 0, timeout_s <= 60) == ("cuda:0", True, True)
        self.seen.append("begins")

    @contextmanager
    def multiplying(self) -> Iterator[None]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.seen.append("multiplies")
        yield
        self.seen.append("pauses")

    def close(self) -> None:
        self.seen.append("ends")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Other, "seen", [], raising=False)
    monkeypatch.setattr("concurrency.second_process.OtherProcess", Other)
    return Other.seen


@contextmanager
def _shared() -> Iterator[None]:
    Other.seen.append("others' cores")
    yield
    Other.seen.append("own core")


def test_it_begins_with_the_first_arm_that_wants_it_and_rests_between_them(seen: list[str]) -> None:
    second = SecondProcess("cuda:0", _shared)
    with second.multiplying(False):
        assert seen == []
    for _ in range(2):
        with second.multiplying(True):
            seen.append("repeat")
        with second.multiplying(False):
            seen.append("another")
    began = ["others' cores", "begins", "own core"]
    turn = ["multiplies", "repeat", "pauses", "another"]
    assert seen == [*began, *turn, *turn]
    second.close()
    second.close()
    assert seen[-1] == "ends"
    assert seen.count("ends") == 1
    with second.multiplying(True):
        pass
    assert seen.count("begins") == 2


def test_none_goes_on_multiplying_after_an_error(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    second = SecondProcess("cuda:0", _shared)
    with pytest.raises(TimeoutError), second.multiplying(True):
        raise TimeoutError("a request has no answer")
    assert seen[-2:] == ["multiplies", "ends"]
    monkeypatch.setattr(Other, "fails", "the process beside should have said 'multiplying', it said ''")
    with pytest.raises(RuntimeError, match="process beside"), second.multiplying(True):
        pytest.fail("it never began")
    assert seen[-1] == "ends"


@pytest.mark.skipif(torch_reason("cpu") is not None, reason=str(torch_reason("cpu")))
def test_a_real_one_is_there_until_it_is_closed() -> None:
    @contextmanager
    def shared() -> Iterator[None]:
        yield

    second = SecondProcess("cpu", shared)
    with second.multiplying(True):
        assert second._other is not None
        child = second._other._child
        assert child.poll() is None
    second.close()
    assert child.poll() == 0


def test_what_is_beside_is_the_only_difference_of_its_arms() -> None:
    for mine, other in (("fifo_beside", "fifo_first"), ("chunk_beside", "chunk_bounded")):
        assert (ARMS[mine].beside, ARMS[other].beside) == (True, False)
        assert (ARMS[mine].settings, ARMS[mine].graphs) == (ARMS[other].settings, ARMS[other].graphs)
    assert [cell.arms for cell in GROUPS["beside"].cells] == [cell.arms for cell in GROUPS["beside_mps"].cells]
    assert (GROUPS["beside"].mps, GROUPS["beside_mps"].mps) == (False, True)


def control(folder: Path, script: str) -> None:
    (folder / MPS_CONTROL).write_text(f"#!/bin/sh\n{script}\n")
    (folder / MPS_CONTROL).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "servers"),
    [
        ('read asked; [ "$asked" = get_server_list ] && printf "4711\\n4712\\n"', [4711, 4712]),
        ("cat > /dev/null", []),
        ("echo 'Cannot find MPS control daemon process'; exit 1", None),
        ("exec sleep 60", None),
        ("", []),
    ],
)
def test_a_daemon_says_its_servers_or_there_is_none(
    script: str, servers: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    bound_s = 0.5 if "sleep" in script else 30.0
    monkeypatch.setattr(second_process, "MPS_ANSWER_S", bound_s)
    begin = time.monotonic()
    assert mps_servers() == servers
    assert time.monotonic() - begin < 20


def test_where_nothing_of_mps_is_installed_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mps_servers() is None
