"""A device by name: memory, raw copies and facts, the same on every device; CUDA where there is one."""

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.device import Device, FactsStruct, ProbeMethod, ProbeStruct, ProbeTimeStruct, RawCopy
from lamella.cuda_ext.numa import node_of_pci_device, online_nodes, prefer_node
from lamella.cuda_ext.pool import HostPool
from lamella.cuda_ext.registration import RegistrationError
from lamella.cuda_ext.shared_memory import HostMemory
from lamella.reference.geometry import KVGeometry
from lamella.reference.layout import ObjectLayout
from lamella.reference.plan import Direction

KIB = 1024


def _open(name: str) -> Device:
    try:
        device = Device(name)
        device.facts()
    except (LibraryMissingError, RuntimeError) as missing:
        pytest.skip(f"no {name} device here: {missing}")
    return device


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return _open(request.param)


@pytest.fixture
def host(device: Device) -> Iterator[HostMemory]:
    memory = HostMemory.anonymous(256 * KIB)
    device.registrar().register(memory.address, 256 * KIB)
    yield memory
    device.registrar().unregister(memory.address, 256 * KIB)
    memory.close()


def _bytes(memory: HostMemory) -> np.ndarray:
    return np.frombuffer(memory.buffer, dtype=np.uint8)


def test_bytes_written_are_the_bytes_read(device: Device) -> None:
    sent = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    back = np.zeros_like(sent)
    with device.allocate(5000) as memory:
        memory.write(sent.ctypes.data)
        memory.read(back.ctypes.data)
        assert np.array_equal(sent, back)
        memory.fill(0xA5)
        memory.read(back.ctypes.data, 4999)
        assert (back[:4999] == 0xA5).all()
        assert back[4999] == sent[4999]
        with pytest.raises(ValueError, match="num_bytes must be between 0 and 5000, got 5001"):
            memory.write(sent.ctypes.data, 5001)
    with pytest.raises(RuntimeError, match="was freed"):
        memory.fill(0)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("method", ProbeMethod)
def test_a_raw_copy_moves_exactly_its_runs(
    device: Device, host: HostMemory, direction: Direction, method: ProbeMethod
) -> None:
    run, count = KIB, 64
    order = np.random.default_rng(2).permutation(128)[:count]
    places = {
        ProbeMethod.WHOLE: [(i, i) for i in range(count)],
        ProbeMethod.BATCH: [(int(slot), i) for i, slot in enumerate(order)],
        ProbeMethod.STRIDED: [(2 * i, i) for i in range(count)],
    }[method]
    _bytes(host)[:] = np.random.default_rng(3).integers(0, 256, 256 * KIB, dtype=np.uint8)
    there = np.random.default_rng(4).integers(0, 256, 256 * KIB, dtype=np.uint8)
    with device.allocate(256 * KIB) as memory:
        memory.write(there.ctypes.data)
        expected_host, expected_device = _bytes(host).copy(), there.copy()
        for at_host, at_device in places:
            ours = slice(at_host * run, (at_host + 1) * run)
            theirs = slice(at_device * run, (at_device + 1) * run)
            if direction is Direction.RETRIEVE:
                expected_device[theirs] = expected_host[ours]
            else:
                expected_host[ours] = expected_device[theirs]
        (time,) = device.copy(
            RawCopy(
                direction,
                method,
                host.address,
                memory.address,
                count,
                run,
                [a * run for a, _ in places],
                [b * run for _, b in places],
                2 * run,
                run,
                batch_entries=7,
            )
        )
        assert time.copy_ns > 0
        memory.read(there.ctypes.data)
    assert np.array_equal(there, expected_device)
    assert np.array_equal(_bytes(host), expected_host)


def test_two_copies_started_together_both_arrive(device: Device, host: HostMemory) -> None:
    _bytes(host)[:] = 7
    with device.allocate(64 * KIB) as down, device.allocate(64 * KIB) as up:
        up.fill(9)
        times = device.copy(
            RawCopy(Direction.RETRIEVE, ProbeMethod.WHOLE, host.address, down.address, 1, 64 * KIB),
            RawCopy(Direction.STORE, ProbeMethod.WHOLE, host.address + 128 * KIB, up.address, 1, 64 * KIB),
        )
        assert len(times) == 2
        back = np.zeros(64 * KIB, dtype=np.uint8)
        down.read(back.ctypes.data)
    assert (back == 7).all()
    assert (_bytes(host)[128 * KIB : 192 * KIB] == 9).all()


def test_impossible_copies_are_refused_with_their_numbers(device: Device, host: HostMemory) -> None:
    with device.allocate(KIB) as memory:
        common = (host.address, memory.address)
        with pytest.raises(ValueError, match="0 runs of 4 bytes"):
            device.copy(RawCopy(Direction.RETRIEVE, ProbeMethod.WHOLE, *common, 0, 4))
        with pytest.raises(ValueError, match="host_offsets must have 2 entries, one a run, got 1"):
            device.copy(RawCopy(Direction.RETRIEVE, ProbeMethod.BATCH, *common, 2, 4, [0], [0]))
        with pytest.raises(ValueError, match="pitches 3 and 4 below its run of 4"):
            device.copy(RawCopy(Direction.RETRIEVE, ProbeMethod.STRIDED, *common, 2, 4, host_pitch=3, device_pitch=4))
        with pytest.raises(ValueError, match="at least one probe"):
            device.copy()


def test_a_device_says_what_it_is(device: Device) -> None:
    facts = device.facts()
    assert facts.name
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert bool(facts.pci_bus_id) == device.is_cuda


def test_a_pool_is_registered_for_its_device(device: Device) -> None:
    layout = ObjectLayout.single(KVGeometry(2, 2, 2, 4, 2, chunk_tokens=16), block_tokens=4)
    pool = HostPool(layout, 40, registrar=device.registrar(), numa_node=device.numa_node(), piece_bytes=4096)
    report = pool.memory.wait_registered(30)
    assert (report.pending, report.failed) == (0, ())
    assert report.ready == pool.memory.shape.num_pieces > 1
    pool.close()


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1", "", "cuda:-1"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match='a device is "cpu" or "cuda:N", got'):
        Device(name)


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_is_a_registration_error_with_cudas_own_words() -> None:
    device = _open("cuda:0")
    layout = ObjectLayout.single(KVGeometry(1, 1, 1, 8, 1, chunk_tokens=512), block_tokens=16)
    pool = HostPool(layout, 1, registrar=device.registrar())
    with pytest.raises(OSError, match="cudaErrorHostMemoryAlreadyRegistered"):
        device.registrar().register(pool.memory.base, 4096)
    pool.close()


@pytest.mark.gpu
@pytest.mark.known_fault(49)
def test_a_device_that_does_not_exist_is_named_and_no_other_is_touched() -> None:
    _open("cuda:0")
    with pytest.raises(RuntimeError, match="cudaSetDevice"):
        Device("cuda:99").facts()
    layout = ObjectLayout.single(KVGeometry(1, 1, 1, 8, 1, chunk_tokens=512), block_tokens=16)
    with pytest.raises(RegistrationError, match="cudaSetDevice"):
        HostPool(layout, 1, registrar=Device("cuda:99").registrar())


def test_structures_are_as_large_as_the_headers() -> None:
    assert ctypes.sizeof(FactsStruct) == 256 + 32 + 8 + 8 + 4 + 4
    assert ctypes.sizeof(ProbeStruct) == 4 + 4 + 8 * 4 + 8 * 2 + 8 * 2 + 4 + 4
    assert ctypes.sizeof(ProbeTimeStruct) == 16


# ---------------------------------------------------------------- memory nodes


def test_nodes_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-2,5\n")
    assert online_nodes(tmp_path) == (0, 1, 2, 5)
    assert online_nodes(tmp_path / "absent") == (0,)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_a_devices_node_is_its_own_or_none(tmp_path: Path, text: str, node: int | None) -> None:
    folder = tmp_path / "bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    assert node_of_pci_device("0000:1B:00.0", tmp_path) == node
    assert node_of_pci_device("0000:1c:00.0", tmp_path) is None


def test_a_memory_can_prefer_a_node_of_this_machine() -> None:
    memory = HostMemory.anonymous(64 * KIB)
    with contextlib.suppress(PermissionError):  # a container without the right to place memory
        prefer_node(memory.address, 64 * KIB, online_nodes()[0])
    memory.populate(0, 64 * KIB)
    assert bytes(memory.buffer[:4]) == bytes(4)
    with pytest.raises(ValueError, match=r"node must be between 0 and 1023, got 1024"):
        prefer_node(memory.address, 64 * KIB, 1024)
    memory.close()


def test_a_placement_that_is_refused_costs_a_warning_and_not_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    layout = ObjectLayout.single(KVGeometry(1, 1, 1, 8, 1, chunk_tokens=512), block_tokens=16)
    pool = HostPool(layout, 1, numa_node=1000)
    assert pool.report().numa_node is None
    assert "not placed on memory node 1000" in caplog.text
    pool.close()


OUT_OF_THREADS = """
import ctypes, resource
from lamella.cuda_ext.device import Device, ProbeMethod, RawCopy
from lamella.reference.plan import Direction
kept = ctypes.create_string_buffer(8192)
memory = ctypes.addressof(kept)
copy = RawCopy(Direction.RETRIEVE, ProbeMethod.WHOLE, memory, memory + 4096, 1, 4096)
device = Device("cpu")
device.copy(copy)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (24 << 20),) * 2)
try:
    device.copy(*[copy] * 500)
except MemoryError:
    print("refused", device.copy(copy)[0].copy_ns > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_raw_copies_for_which_there_are_too_few_threads_are_refused() -> None:
    """Those that had started waited for ever, and the process was aborted."""
    try:
        Device("cpu")
    except LibraryMissingError as missing:
        pytest.skip(str(missing))
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_THREADS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("refused True", 0), done.stderr
