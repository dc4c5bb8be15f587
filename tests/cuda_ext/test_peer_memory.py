"""Caches of one process, opened and written by another."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lamella.cuda_ext.peer_memory import Allocation, ExportedCaches, OpenedCaches, PeerEvent, export_caches
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.reference.layout import EngineLayout, TensorView, engine_layout

SHAPE = (2, 4, 2, 3, 8)  # K, N, T, H, D
LAYER_BYTES = 2 * int(np.prod(SHAPE))


def _engine(address: int, layers: int = 3) -> EngineLayout:
    strides = tuple(int(stride) for stride in np.empty(SHAPE, np.uint16).strides)
    views = [TensorView(address + layer * LAYER_BYTES, SHAPE, strides, 2) for layer in range(layers)]
    return engine_layout("KNTHD", views)


def test_another_process_writes_exactly_the_element_it_means() -> None:
    memory = HostMemory.create(3 * LAYER_BYTES)
    assert memory.path is not None
    engine = _engine(memory.address)
    exported = export_caches("cpu", [engine], [(memory.path, memory.address, memory.num_bytes)])
    code = (
        "import ctypes, sys\nfrom pathlib import Path, PosixPath\n"
        "from lamella.cuda_ext.peer_memory import *\nfrom lamella.reference.layout import EngineLayout\n"
        "caches = eval(sys.argv[1])\nopened = OpenedCaches(caches)\n"
        "at = opened.engines[0].address(2, 1, 3, 1, 2, 7)\n"
        "ctypes.c_uint16.from_address(at).value = 4711\nopened.close()"
    )
    subprocess.run([sys.executable, "-c", code, repr(exported)], check=True, timeout=60)
    view = np.frombuffer(memory.buffer, np.uint16).reshape(3, *SHAPE)
    assert np.argwhere(view).tolist() == [[2, 1, 3, 1, 2, 7]]
    assert view[2, 1, 3, 1, 2, 7] == 4711
    del view
    assert memory.path.exists(), "SHM-2: opening does not unlink"
    memory.close()


def test_caches_outside_shared_memory_are_refused_with_the_remedy() -> None:
    private = np.zeros(3 * LAYER_BYTES, np.uint8)
    with pytest.raises(ValueError, match="transfer side 'worker'"):
        export_caches("cpu", [_engine(private.ctypes.data)])


def test_a_base_that_no_allocation_holds_is_refused_and_nothing_stays_mapped() -> None:
    memory = HostMemory.create(3 * LAYER_BYTES)
    assert memory.path is not None
    engine = _engine(memory.address, layers=4)  # the last layer lies behind the memory
    caches = ExportedCaches("cpu", (Allocation(bytes(memory.path), memory.address, memory.num_bytes),), (engine,))
    before = _mappings(memory.path)
    with pytest.raises(ValueError, match="no exported memory"):
        OpenedCaches(caches)
    assert _mappings(memory.path) == before
    memory.close()


@pytest.mark.parametrize(
    "said",
    [
        {"num_blocks": 1000},
        {"num_blocks": 5},
        {"block_stride": 1 << 40},
        {"block_stride": -96},
        {"head_dim": 1 << 20, "dim_stride": 1 << 12},
    ],
    ids=str,
)
def test_a_cache_that_would_reach_beyond_its_memory_is_refused(said: dict[str, int]) -> None:
    """What a peer says of its cache is not believed: a copy beyond it ends the server, or its device, for everybody."""
    memory = HostMemory.create(3 * LAYER_BYTES)
    assert memory.path is not None
    engine = replace(_engine(memory.address), **said)
    caches = ExportedCaches("cpu", (Allocation(bytes(memory.path), memory.address, memory.num_bytes),), (engine,))
    before = _mappings(memory.path)
    with pytest.raises(ValueError, match="its sizes or strides are not those of the memory"):
        OpenedCaches(caches)
    assert _mappings(memory.path) == before
    memory.close()


def test_a_cache_may_fill_its_memory_to_the_last_byte_in_either_direction() -> None:
    memory = HostMemory.create(3 * LAYER_BYTES)
    assert memory.path is not None
    forward = _engine(memory.address)
    last = [tuple(base + 3 * forward.block_stride for base in layer) for layer in forward.bases]
    backward = replace(forward, bases=tuple(last), block_stride=-forward.block_stride)
    exported = export_caches("cpu", [forward, backward], [(memory.path, memory.address, memory.num_bytes)])
    OpenedCaches(exported).close()
    memory.close()


@pytest.mark.known_fault(46)
def test_what_was_opened_is_unmapped_again() -> None:
    memory = HostMemory.create(3 * LAYER_BYTES)
    assert memory.path is not None
    exported = export_caches("cpu", [_engine(memory.address)], [(memory.path, memory.address, memory.num_bytes)])
    before = _mappings(memory.path)
    opened = OpenedCaches(exported)
    assert _mappings(memory.path) == before + 1
    opened.close()
    opened.close()
    assert _mappings(memory.path) == before
    memory.close()


def test_an_owner_that_has_gone_is_an_error_not_a_crash() -> None:
    memory = HostMemory.create(3 * LAYER_BYTES)
    assert memory.path is not None
    exported = export_caches("cpu", [_engine(memory.address)], [(memory.path, memory.address, memory.num_bytes)])
    memory.close()
    with pytest.raises(OSError, match="No such file"):
        OpenedCaches(exported)


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    with pytest.raises(OSError, match="no NVIDIA driver here"):
        PeerEvent("cuda:0")


def _mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(path.name)
