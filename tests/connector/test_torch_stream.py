"""The compute stream of a torch engine, as far as a machine without a GPU can tell."""

import gc
import weakref
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="no CPU build of torch on this machine")

from lamella.connector.torch_stream import TorchStream  # noqa: E402 - torch may be missing
from lamella.cuda_ext.arrival import AfterEvent  # noqa: E402


def test_a_moment_is_an_event_recorded_on_the_present_stream_and_keeps_it_alive() -> None:
    stream = mock.create_autospec(torch.cuda.Stream, instance=True, cuda_stream=17)
    event = mock.create_autospec(torch.cuda.Event, instance=True, cuda_event=23)
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream) as current,
        mock.patch.object(torch.cuda, "Event", return_value=event),
    ):
        compute = TorchStream("cuda:1")
        moment = compute.record()
        assert compute.handle == 17
    current.assert_called_with(torch.device("cuda:1"))
    event.record.assert_called_once_with(stream)
    assert moment.fence == AfterEvent(23)
    alive = weakref.ref(event)
    del event
    gc.collect()
    assert alive() is not None, "the fence is only a number: somebody must keep the event"


def test_the_cpu_has_no_torch_stream() -> None:
    with pytest.raises(ValueError, match="got 'cpu': use HostStream"):
        TorchStream("cpu")
