"""What a rank asks of the stream that computes, before it takes a load's time for the link's."""

import pytest

from lamella.connector.observations import CudaMarks

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reaches no GPU here"),
]

SLOW_CYCLES = 60_000_000  # some 30 ms


def test_a_stream_has_computed_all_before_it_is_given_anything_and_once_that_is_done() -> None:
    marks = CudaMarks("cuda:0")
    torch.cuda.synchronize()
    assert marks.all_computed()
    torch.cuda._sleep(SLOW_CYCLES)
    behind = marks.mark()
    assert not marks.all_computed()
    assert not marks.reached(behind)
    torch.cuda.synchronize()
    assert marks.all_computed()
    assert marks.reached(behind)
