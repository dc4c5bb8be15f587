"""The parts of a blend on their own: turning keys, tensors over a buffer's memory, the trace."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.blend_trace import KIND, to_chrome_trace
from lamella.connector.streams import Span
from lamella.reference.layout import TensorView

torch: Any = pytest.importorskip("torch", reason="no CPU build of torch on this machine")

from lamella.connector.blend_rotation import Rotation  # noqa: E402
from lamella.connector.blend_tensors import ReadBack, layer_kv, tensor_over  # noqa: E402

# ---- turning


@given(
    old=st.integers(0, 20_000),
    moved=st.integers(-20_000, 20_000),
    interleaved=st.booleans(),
    pairs=st.sampled_from((1, 3, 8)),
)
def test_keys_turned_by_a_difference_are_keys_of_the_new_position(
    old: int, moved: int, interleaved: bool, pairs: int
) -> None:
    rotation = Rotation.from_base(10_000, 2 * pairs, interleaved=interleaved)
    random = torch.Generator().manual_seed(old)
    keys = torch.randn(3, 2, 16, generator=random)  # heads of 16, of which 2 * pairs turn
    stored, expected = keys.clone(), keys.clone()
    rotation.turn(stored, rotation.turns(torch.full((3,), old)))
    rotation.turn(expected, rotation.turns(torch.full((3,), old + moved)))
    rotation.turn(stored, rotation.turns(torch.full((3,), moved)))
    assert torch.allclose(stored, expected, atol=2e-5)
    assert torch.equal(stored[..., 2 * pairs :], keys[..., 2 * pairs :])


def test_pairs_and_direction_are_the_models() -> None:
    """By a quarter turn a position: (1, 0) goes to (0, 1)."""
    for interleaved, expected in ((True, [0, 1, 0, 1]), (False, [0, 0, 1, 1])):
        rotation = Rotation((math.pi / 2, math.pi / 2), interleaved)
        keys = torch.tensor([[[1.0, 0, 1, 0] if interleaved else [1.0, 1, 0, 0]]])
        rotation.turn(keys, rotation.turns(torch.tensor([1])))
        assert torch.allclose(keys, torch.tensor([[expected]], dtype=torch.float32), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype: str) -> None:
    rotation = Rotation.from_base(500_000, 16)
    keys = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    turns = rotation.turns(torch.arange(64) * 97)
    exact = keys.float()
    rotation.turn(exact, turns)
    rotation.turn(keys, turns)
    assert torch.equal(keys, exact.to(keys.dtype))


def test_a_turn_by_nothing_changes_no_bit() -> None:
    rotation = Rotation.from_base(500_000, 16)
    keys = torch.randn(5, 2, 16).to(torch.bfloat16)
    before = keys.clone()
    rotation.turn(keys, rotation.turns(torch.zeros(5, dtype=torch.int64)))
    assert torch.equal(keys, before)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Rotation(()), "one a pair of elements"),
        (lambda: Rotation((math.nan,)), "must be finite"),
        (lambda: Rotation.from_base(0, 8), "base must be positive"),
        (lambda: Rotation.from_base(10, 7), "rotary_dim even, got 10 and 7"),
        (
            lambda: Rotation.from_base(10, 8).turn(
                torch.zeros(1, 1, 6), Rotation.from_base(10, 8).turns(torch.ones(1))
            ),
            "4 pairs need heads of at least 8 elements, got 6",
        ),
    ],
)
def test_a_rotation_that_cannot_be_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


# ---- tensors


def test_a_tensor_over_memory_is_that_memory() -> None:
    memory = np.arange(2 * 6 * 2 * 4, dtype=np.float32).reshape(2, 6, 2, 4)
    view = TensorView(memory[:, 1:5].ctypes.data, (2, 4, 2, 4), memory.strides, 4)
    tensor = tensor_over(view, torch.float32, "cpu")
    assert torch.equal(tensor, torch.from_numpy(memory[:, 1:5]))
    keys, values = layer_kv(tensor, packed=False)
    values[0] = -1
    assert (memory[1, 1] == -1).all()
    keys, values = layer_kv(tensor[:1], packed=True)
    keys[3] = -2
    assert (memory[0, 4, :, :2] == -2).all()
    assert (memory[0, 4, :, 2:] > 0).all()


def test_a_dtype_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="elements of 4 bytes, got torch.bfloat16 of 2"):
        tensor_over(TensorView(0, (1,), (4,), 4), torch.bfloat16, "cpu")


def test_a_number_is_read_back() -> None:
    assert ReadBack(torch.tensor(2.5)).value() == 2.5


# ---- the trace

SPANS = [Span("load", 1, 1, 500, 900), Span("load", 0, 1, 100, 400), Span("recompute", 0, 1, 450, 950)]


def test_a_trace_has_a_track_for_each_stage_and_exact_instants_from_the_first_on() -> None:
    document = to_chrome_trace([*SPANS, Span("store", 0, 1, 0, 50), Span("scatter", 0, 1, 960, 990)], system="here")
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["args"]["start_ns"], event["args"]["end_ns"]) for event in events] == [
        ("load 0", 0, 300),
        ("recompute 0", 350, 850),
        ("load 1", 400, 800),
        ("scatter 0", 860, 890),
    ]
    assert len({event["pid"] for event in events}) == 3
    assert (events[1]["ts"], events[1]["dur"]) == (0.35, 0.5)
    assert document["otherData"]["kind"] == KIND


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no span of a blend among 1"):
        to_chrome_trace([Span("store", 0, 1, 0, 1)], system="here")
