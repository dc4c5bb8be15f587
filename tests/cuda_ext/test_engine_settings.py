"""What an engine is made with, and the structures that Python and the native library share."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_driver import ENGINE_MISSING, SmallCache
from lamella.cuda_ext._engine_library import (
    SUBMISSION,
    EngineOptionsStruct,
    LaneStatusStruct,
    ProgressStruct,
    RatesStruct,
    SubmissionStruct,
)
from lamella.cuda_ext._execution import HostObjects
from lamella.cuda_ext._library import HostObjectsStruct
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.rates import H200_RATES, EngineRates
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice
from native_build import COMPILER, ROOT

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))


# ---- the C ABI


def test_a_submission_is_packed_as_its_structure_lies_in_memory() -> None:
    assert SUBMISSION.size == ctypes.sizeof(SubmissionStruct)
    flat = [(name, kind) for name, kind in SubmissionStruct._fields_ if name != "objects"]
    at = next(index for index, (name, _) in enumerate(SubmissionStruct._fields_) if name == "objects")
    order = [name for name, _ in flat[:at]]
    order += [f"objects.{name}" for name, _ in HostObjectsStruct._fields_]
    order += [name for name, _ in flat[at:]]
    values = list(range(1, len(order) + 1))
    read = SubmissionStruct.from_buffer_copy(SUBMISSION.pack(*values))

    def value_of(path: str) -> int:
        found = read
        for name in path.split("."):
            found = getattr(found, name)
        return ctypes.cast(found, ctypes.c_void_p).value or 0 if not isinstance(found, int) else found

    assert [value_of(path) for path in order] == values


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_python_declares_the_structures_that_the_header_declares(tmp_path: Path) -> None:
    structures = {
        "lm_rates": RatesStruct,
        "lm_engine_options": EngineOptionsStruct,
        "lm_submission": SubmissionStruct,
        "lm_progress": ProgressStruct,
        "lm_lane_status": LaneStatusStruct,
    }
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "lamella/engine.h"', "int main() {"]
    expected = []
    for name, structure in structures.items():
        lines.append(f'std::printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(structure))
        for field, *_ in structure._fields_:
            lines.append(f'std::printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(structure, field).offset)
    (tmp_path / "sizes.cpp").write_text("\n".join([*lines, "}"]))
    command = [str(COMPILER), f"-I{ROOT / 'cuda_ext' / 'csrc' / 'include'}", str(tmp_path / "sizes.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "sizes")], check=True)
    said = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout
    assert [int(word) for word in said.split()] == expected


# ---- the chooser


def test_rates_come_from_a_profile_or_are_refused() -> None:
    with pytest.raises(ValueError, match="run_bytes must ascend"):
        EngineRates(1.0, 1.0, (4, 2), (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(ValueError, match="rates must be positive"):
        EngineRates(1.0, 0.0, (4,), (1.0,), (1.0,))
    with pytest.raises(ValueError, match="strided_bytes_per_s needs 1 rates, got 0"):
        EngineRates(1.0, 1.0, (4,), (1.0,), ())
    assert H200_RATES.wire_bytes_per_s > H200_RATES.batch_bytes_per_s[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, 'a device is "cpu" or "cuda:N", got \'gpu\''),
        ({"window_bytes": 1 << 20, "staging_bytes": 1 << 20}, "staging_bytes must hold 4 windows"),
        ({"in_flight_bytes": 0}, "in_flight_bytes must be at least 1, got 0"),
        ({"deadline_s": 0}, "deadline_s must be positive, got 0"),
    ],
)
def test_impossible_engines_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferEngine(**options)  # type: ignore[arg-type]


WHOLE = ("num_layers", "staging_bytes", "window_bytes", "in_flight_bytes", "turn_bytes", "batch_entries", "kernel_ctas")


@pytest.mark.parametrize("name", [*WHOLE, "batch_flags"])
def test_what_the_native_code_cannot_hold_is_refused_not_cut_to_its_lowest_bits(name: str) -> None:
    for wrong in (-1, (1 << 32) + 2, 1 << 63, (1 << 64) + (1 << 26), 10**30):
        if name.endswith("bytes") and wrong == (1 << 32) + 2:
            continue  # is 4 GiB
        with pytest.raises(ValueError, match=f"{name} must be at (least|most) .*, got {wrong:,}"):
            TransferEngine(**{name: wrong})  # type: ignore[arg-type]
    for wrong in (True, 1.5, "2", None, float("nan")):
        with pytest.raises(TypeError, match=re.escape(f"{name} must be a whole number (an int), got {wrong!r}")):
            TransferEngine(**{name: wrong})  # type: ignore[arg-type]


def test_more_windows_than_the_native_code_counts_are_refused() -> None:
    """It counted 2^32 of them as none: the engine had no ring, and staged transfers waited for their deadline."""
    sentence = "staging_bytes must hold at most 2,147,483,647 windows, got 4,294,967,296 for windows of 1 bytes: lower"
    with pytest.raises(ValueError, match=sentence):
        TransferEngine(staging_bytes=1 << 32, window_bytes=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": None}, 'a device is "cpu" or "cuda:N", got None'),
        ({"device": "cuda:\u0661"}, 'a device is "cpu" or "cuda:N", got'),
        ({"avoid_kernels": 2}, "avoid_kernels must be True or False, got 2"),
        ({"paced": None}, "paced must be True or False, got None"),
        ({"carrier": "event"}, "carrier must be a Carrier such as Carrier.EVENT, got 'event'"),
        ({"rates": None}, "rates must be EngineRates"),
        ({"order": "fifo"}, "order must be a policy of lamella.reference.ordering such as Fifo(), got 'fifo'"),
        ({"gather_factor": -0.5}, "gather_factor must be between 0 and 1,000,000, got -0.5"),
        ({"gather_factor": float("nan")}, "gather_factor must be between 0 and 1,000,000, got nan"),
        ({"gather_factor": 1e30}, "gather_factor must be between 0 and 1,000,000, got 1e+30"),
        ({"deadline_s": float("nan")}, "deadline_s must be at most 1,000,000,000 seconds, got nan"),
        ({"deadline_s": 1e30}, "deadline_s must be at most 1,000,000,000 seconds, got 1e+30"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_its_name(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        TransferEngine(**options)


@pytest.mark.timeout(20)
def test_a_bound_that_is_none_is_refused_and_the_engine_closes_by_another() -> None:
    """The threads' end was waited for without having been asked for: a close within infinity never came back."""
    small = SmallCache()
    engine = TransferEngine("cpu", num_layers=6)
    cache = engine.register_cache(small.layout, small.engines)
    done = engine.retrieve(cache, HostObjects(()), [()], 0)
    for wrong in (float("inf"), float("nan"), -1.0, 1e30):
        sentence = re.escape(f"timeout_s must be between 0 and 1,000,000,000, got {wrong}")
        for call in (engine.close, done.wait, done.wait_final):
            with pytest.raises(ValueError, match=sentence):
                call(wrong)
    engine.retrieve(cache, HostObjects(()), [()], 0).wait(10)
    engine.close()


@pytest.mark.parametrize("wrong", [1.5, float("nan"), 10**30], ids=repr)
@pytest.mark.parametrize("name", ["num_tokens", "skip_tokens", "null_block"])
def test_a_number_that_the_native_code_cannot_hold_is_refused_with_nothing_queued(name: str, wrong: Any) -> None:
    small = SmallCache()
    with TransferEngine("cpu", num_layers=6) as engine:
        cache = engine.register_cache(small.layout, small.engines)
        with pytest.raises(ValueError, match=re.escape(f"{wrong!r}")):
            engine.retrieve(cache, HostObjects(()), [()], **{"num_tokens": 0, name: wrong})
        assert engine.lane(Direction.RETRIEVE).live_transfers == 0
        assert not engine._held


@pytest.mark.parametrize(
    ("slices", "sentence"),
    [
        ((Slice(0, 7),), "slice 0 ends at layer 7, the stage at 6"),
        ((Slice(0, 2), Slice(2, 5)), "slice 1 ends at layer 7, the stage at 6"),
        ((Slice(2, 2**31 - 1),), "slice 0 ends at layer 2147483649, the stage at 6"),
        ((Slice(0, 2**31 - 1), Slice(2**31 - 1, 1)), "slice 0 ends at layer 2147483647, the stage at 6"),
    ],
)
def test_slices_beyond_the_stage_are_refused_however_far_they_go(slices: tuple[Slice, ...], sentence: str) -> None:
    """Their ends were added up in 32 bits: what went round once was inside again, and landed."""
    small = SmallCache()
    with TransferEngine("cpu", num_layers=6) as engine:
        cache = engine.register_cache(small.layout, small.engines)
        with pytest.raises(ValueError, match=sentence):
            engine.retrieve(cache, small.host(), [small.table], 64, slices=slices)
        assert engine.lane(Direction.RETRIEVE).live_transfers == 0


def test_a_call_s_own_deadline_is_bounded_too() -> None:
    small = SmallCache()
    with TransferEngine("cpu", num_layers=6) as engine:
        cache = engine.register_cache(small.layout, small.engines)
        for wrong in (float("nan"), float("inf"), 1e30):
            with pytest.raises(ValueError, match="deadline_s must be at most 1,000,000,000 seconds"):
                engine.retrieve(cache, HostObjects(()), [()], 0, deadline_s=wrong)
        assert engine.lane(Direction.RETRIEVE).live_transfers == 0


def test_a_cache_that_does_not_fit_is_refused() -> None:
    small = SmallCache()
    with TransferEngine("cpu", num_layers=5) as engine, pytest.raises(ValueError, match="made for 5 layers"):
        engine.register_cache(small.layout, small.engines)
    with (
        TransferEngine("cpu", num_layers=6, window_bytes=64, staging_bytes=256) as engine,
        pytest.raises(ValueError, match="window_bytes must be at least 256"),
    ):
        engine.register_cache(small.layout, small.engines)
