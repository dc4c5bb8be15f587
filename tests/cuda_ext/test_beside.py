"""What a transfer runs beside, here and in another process: it multiplies only while told to; its end is noticed."""

import threading
import time
from pathlib import Path

import pytest

from lamella.cuda_ext import beside
from lamella.cuda_ext.beside import OtherProcess, Products, ThisProcess, torch_reason

pytestmark = pytest.mark.skipif(torch_reason("cpu") is not None, reason=str(torch_reason("cpu")))


def _cpu_ticks(process: OtherProcess) -> int:
    fields = Path(f"/proc/{process._child.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_it_works_while_told_to_and_rests_otherwise() -> None:
    with OtherProcess("cpu", 16) as other:
        resting = _cpu_ticks(other)
        time.sleep(0.3)
        assert _cpu_ticks(other) - resting <= 2
        with other.multiplying():
            before, end = _cpu_ticks(other), time.monotonic() + 30
            while _cpu_ticks(other) - before < 10:
                assert time.monotonic() < end, "it does not work"
                time.sleep(0.05)
        resting = _cpu_ticks(other)
        time.sleep(0.3)
        assert _cpu_ticks(other) - resting <= 2
    assert other._child.returncode == 0


def test_its_death_is_an_error_and_not_a_quiet_machine() -> None:
    with OtherProcess("cpu", 16) as other:
        other._child.kill()
        other._child.wait()
        with pytest.raises(RuntimeError, match="process beside"), other.multiplying():
            pass


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_products_of_this_process_run_beside_its_other_work_and_end_with_the_block() -> None:
    here = ThisProcess("cpu", 16)
    turns = 0
    with here.multiplying():
        assert "lamella-products" in _threads()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            turns += 1
            time.sleep(0)  # gives the interpreter's lock away, and gets it back at once
    assert "lamella-products" not in _threads()
    (ran,) = here.ran
    assert ran.products >= 8
    assert ran.duration_ns >= 0.2e9
    assert turns > 300, "the products keep the interpreter's lock"  # 50 to 60 where each keeps it


def test_products_of_this_process_that_fail_are_an_error_and_not_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = ThisProcess("cpu", 16)

    def fail(self: Products, count: int) -> Products:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Products, "enqueue", fail)
    with pytest.raises(RuntimeError, match="ended early: out of memory"), here.multiplying():
        pass
    assert here.ran == []


def test_products_are_timed_behind_the_back_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    products, run, may_run = Products("cpu", 16), Products.run, threading.Event()

    def held_back(self: Products, count: int) -> int:
        assert may_run.wait(30), "the block never came"
        return run(self, count)

    monkeypatch.setattr(Products, "run", held_back)
    with products.timed(20) as taken:
        assert taken == [], "still running"
        may_run.set()
    assert taken[0] > 0


def test_a_device_without_its_torch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "reaches no GPU" in str(beside.torch_reason("cuda:0"))
    assert beside.torch_reason("cpu") is None
