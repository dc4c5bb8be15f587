"""A short stress on every device; `python tests/support/stress.py` runs it for minutes."""

from lamella.cuda_ext.device import Device
from stress import run_stress


def test_some_seconds_of_loads_stores_aborts_and_kills_lose_and_leak_nothing(device: Device) -> None:
    report = run_stress(device, seconds=6, seed=3)
    assert report.problems == []
    assert report.kinds["retrieve landed"] > 20
    assert report.kinds["store landed"] > 5
    assert report.kinds["abort"] > 0
