"""The process that a transfer runs beside: it multiplies only while told to, and its end is noticed."""

import time
from pathlib import Path

import pytest

from lamella.cuda_ext import beside
from lamella.cuda_ext.beside import OtherProcess, Products, torch_reason

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


def test_products_that_fill_a_time_take_that_time() -> None:
    products = Products("cpu", 16)
    with products.timed(20) as taken:
        assert taken == [], "still running"
    assert taken[0] > 0


def test_a_device_without_its_torch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "reaches no GPU" in str(beside.torch_reason("cuda:0"))
    assert beside.torch_reason("cpu") is None
