"""CUDA memory and events of one process, opened by another."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lamella.cuda_ext.peer_memory import PeerEvent, export_caches
from lamella.reference.layout import TensorView, engine_layout

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch with CUDA"),
]
SHAPE = (2, 4, 2, 3, 8)  # K, N, T, H, D
_PEER = """
import sys
from lamella.cuda_ext.arrival import AfterEvent
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.peer_memory import *
from lamella.reference.layout import EngineLayout
import ctypes, numpy as np
opened = OpenedCaches(eval(sys.argv[1]))
event = PeerEvent("cuda:0", bytes.fromhex(sys.argv[2]))
values = np.full(8, 4711, np.uint16)
device = Device("cuda:0")
print("open", flush=True)
sys.stdin.readline()
device._call("lm_memory_copy", opened.engines[0].address(2, 1, 3, 1, 2, 0), values.ctypes.data, 16)
print(device.facts().free_bytes, flush=True)
event.close()
opened.close()
print(device.facts().free_bytes, flush=True)
"""


def test_another_process_writes_this_ones_gpu_memory_and_lets_go_of_it() -> None:
    tensors = torch.zeros((3, *SHAPE), dtype=torch.int16, device="cuda:0")
    views = [TensorView(t.data_ptr(), SHAPE, tuple(2 * s for s in t.stride()), 2) for t in tensors]
    exported = export_caches("cuda:0", [engine_layout("KNTHD", views)])
    event = PeerEvent("cuda:0")
    event.record(torch.cuda.current_stream().cuda_stream)
    assert event.export() == event.export()
    torch.cuda.synchronize()
    with subprocess.Popen(
        [sys.executable, "-c", _PEER, repr(exported), event.export().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as peer:
        assert peer.stdout is not None
        assert peer.stdin is not None
        assert peer.stdout.readline().strip() == "open"
        peer.stdin.write("\n")
        peer.stdin.flush()
        for _ in range(2):
            assert int(peer.stdout.readline()) > 0
    found = torch.nonzero(tensors.cpu()).tolist()
    assert found == [[2, 1, 3, 1, 2, dim] for dim in range(8)]
    event.close()
