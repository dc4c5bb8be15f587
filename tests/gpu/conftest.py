"""The devices these tests run on. On the CPU device they run anywhere; the same tests on CUDA need a GPU."""

import pytest

from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.device import Device


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    try:
        found = Device(request.param)
        found.facts()
    except (LibraryMissingError, RuntimeError) as missing:
        pytest.skip(f"no {request.param} device here: {missing}")
    return found
