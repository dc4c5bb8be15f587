"""Keys: equal only where the bytes mean the same (KEY-1)."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import MAX_TOKEN_ID, ChunkKey, KeySpace, LayerKey, chunk_keys
from lamella.reference.layout import ByteRange, KernelGroup, ObjectLayout

SPACE = KeySpace(
    model="meta-llama/Llama-3.1-8B@main",
    dtype="bfloat16",
    form=ObjectForm.TOKEN,
    inner_layout="THD",
    chunk_tokens=4,
    tp_rank=0,
    tp_size=1,
    layers=(0, 32),
)
CHANGES: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B@other",
    "dtype": "fp8_e4m3",
    "form": ObjectForm.BLOCK,
    "inner_layout": "HTD",
    "chunk_tokens": 2,
    "tp_rank": 1,
    "tp_size": 2,
    "layers": (0, 16),
    "salt": b"tenant",
}
tokens = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=24)


def test_the_keys_of_a_known_sequence_never_change() -> None:
    first, second = chunk_keys(SPACE, range(8))
    assert SPACE.digest().hex() == "4408541db9b060cd55c008e1cf53ea0e918616b1f593ca9857513de05d16c0a5"
    assert first == ChunkKey(
        SPACE.digest(), bytes.fromhex("e8daf6b3d46233ec9e553dfc7883b3d72b16c10ff06f271a6774a8bfb486895c"), 4
    )
    assert second == ChunkKey(
        SPACE.digest(), bytes.fromhex("384f9c556bc07e95f126d554a83d63b44ea7694f7f028b713c0376308eb6cbf8"), 4
    )


@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_whatever_decides_the_bytes_decides_the_key(field: str, value: Any) -> None:
    other = replace(SPACE, **({"tp_rank": 1, "tp_size": 2} if field == "tp_rank" else {field: value}))
    ours, theirs = chunk_keys(SPACE, range(4)), chunk_keys(other, range(4))
    assert set(ours).isdisjoint(theirs)
    assert {key.prefix for key in ours}.isdisjoint(key.prefix for key in theirs)


def test_every_field_of_a_key_space_is_tried_above() -> None:
    assert set(CHANGES) == set(KeySpace.__slots__)


@pytest.mark.known_fault(74)
def test_objects_stored_by_another_number_of_ranks_are_a_miss() -> None:
    stored = {key for rank in range(2) for key in chunk_keys(replace(SPACE, tp_rank=rank, tp_size=2), range(8))}
    wanted = {key for rank in range(4) for key in chunk_keys(replace(SPACE, tp_rank=rank, tp_size=4), range(8))}
    assert len(stored) == 4
    assert len(wanted) == 8
    assert stored.isdisjoint(wanted)


@pytest.mark.known_fault(31)
def test_a_salt_gives_the_same_keys_on_both_sides_and_no_others() -> None:
    def keys(salt: bytes) -> tuple[ChunkKey, ...]:
        return chunk_keys(replace(SPACE, salt=salt), range(8))

    assert keys(b"one") == keys(b"one")
    assert set(keys(b"one")).isdisjoint(keys(b"two"))
    assert set(keys(b"one")).isdisjoint(keys(b""))


@pytest.mark.known_fault(13, 14, 16)
def test_stages_of_uneven_size_have_their_own_keys_and_count_layers_from_zero() -> None:
    stages = [replace(SPACE, layers=layers) for layers in ((0, 21), (21, 44))]
    first, second = (chunk_keys(stage, range(4))[0] for stage in stages)
    assert first != second
    of_second = second.split_layers(44 - 21)
    assert [key.layer for key in of_second] == list(range(23))
    layout = ObjectLayout.single(KVGeometry(23, 1, 1, 1, 1, 4), 2)
    assert of_second[22].ranges(layout) == (ByteRange(22 * 4, 4),)
    with pytest.raises(ValueError, match="layer must be between 0 and 22, got 23"):
        LayerKey(second, 23).ranges(layout)


@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_the_tokens_do(ours: list[int], theirs: list[int]) -> None:
    pairs = list(zip(chunk_keys(SPACE, ours), chunk_keys(SPACE, theirs), strict=False))
    for index, (our_key, their_key) in enumerate(pairs):
        end = 4 * (index + 1)
        assert (our_key == their_key) == (ours[:end] == theirs[:end])


@given(st.lists(st.integers(0, 2), min_size=8, max_size=24), st.data())
def test_a_changed_token_changes_its_chunk_and_all_behind_it(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    for index, pair in enumerate(
        zip(chunk_keys(SPACE, ids, partial=True), chunk_keys(SPACE, changed, partial=True), strict=True)
    ):
        assert (pair[0] == pair[1]) == (index < at // 4)


@given(tokens)
def test_a_longer_sequence_keeps_the_keys_of_its_prefix(ids: list[int]) -> None:
    keys = chunk_keys(SPACE, ids)
    assert chunk_keys(SPACE, [*ids, 1, 2, 3, 4])[: len(keys)] == keys
    assert len(keys) == len(ids) // 4


@pytest.mark.known_fault(55)
def test_a_partial_last_chunk_has_a_key_only_on_request_and_never_a_full_chunks() -> None:
    assert len(chunk_keys(SPACE, range(6))) == 1
    first, last = chunk_keys(SPACE, range(6), partial=True)
    assert first == chunk_keys(SPACE, range(4))[0]
    assert last.num_tokens == 2
    padded = chunk_keys(SPACE, [0, 1, 2, 3, 4, 5, 0, 0])[1]
    assert (last.prefix, last.num_tokens) != (padded.prefix, padded.num_tokens)
    assert last.prefix != padded.prefix


def test_no_tokens_have_no_keys() -> None:
    assert chunk_keys(SPACE, [], partial=True) == ()


def test_two_spaces_never_spell_the_same_bytes() -> None:
    spaces = [replace(SPACE, model="ab", dtype="c"), replace(SPACE, model="a", dtype="bc")]
    assert spaces[0].digest() != spaces[1].digest()


def test_a_layer_of_two_kernel_groups_is_the_ranges_of_both() -> None:
    geometry = KVGeometry(2, 1, 1, 3, 1, 4)
    layout = ObjectLayout((KernelGroup(geometry, (0, 1), 2), KernelGroup(geometry, (1, 2), 2)))
    keys = chunk_keys(replace(SPACE, layers=(0, 3)), range(4))[0].split_layers(3)
    assert [key.ranges(layout) for key in keys] == [
        (ByteRange(0, 12),),
        (ByteRange(12, 12), ByteRange(256, 12)),
        (ByteRange(256 + 12, 12),),
    ]


def test_layer_keys_are_structured_and_hashable() -> None:
    key = chunk_keys(SPACE, range(4))[0]
    layers = key.split_layers(32)
    assert layers[5] == LayerKey(key, 5)
    assert len(set(layers)) == 32
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        key.split_layers(0)


@pytest.mark.parametrize("bad", [-1, MAX_TOKEN_ID + 1])
def test_a_token_id_that_does_not_fit_is_refused_with_its_place(bad: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"between 0 and {MAX_TOKEN_ID}, got {bad} at position 2")):
        chunk_keys(SPACE, [1, 2, bad, 4])


@pytest.mark.parametrize(
    "wrong", [[[1, 2], [3, 4]], [1.5, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], [True] * 4, ["1", "2", "3", "4"], [1, 2, 3, None]]
)
def test_token_ids_are_one_sequence_of_whole_numbers(wrong: Any) -> None:
    with pytest.raises(ValueError, match="token_ids must be one sequence of whole numbers, got "):
        chunk_keys(SPACE, wrong)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_the_type_in_which_ids_are_handed_over_does_not_change_a_key(dtype: Any) -> None:
    assert chunk_keys(SPACE, np.arange(8, dtype=dtype)) == chunk_keys(SPACE, range(8))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"model": ""}, "model must not be empty"),
        ({"dtype": ""}, "dtype must not be empty"),
        ({"inner_layout": ""}, "inner_layout must not be empty"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank must be between 0 and tp_size - 1, got 2 of 2"),
        ({"tp_rank": -1}, "tp_rank must be at least 0, got -1"),
        ({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        ({"chunk_tokens": 1 << 63}, "chunk_tokens must be at most 9,223,372,036,854,775,807"),
        ({"layers": (-1, 3)}, "layers must be at least 0, got -1"),
        ({"layers": (3, 3)}, "layers must be a first and a later end layer, got (3, 3)"),
    ],
)
def test_a_space_that_means_nothing_is_refused_with_its_value(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        replace(SPACE, **wrong)


def test_a_salt_that_is_not_bytes_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match="salt must be bytes, got 'ada': encode it"):
        replace(SPACE, salt="ada")  # type: ignore[arg-type]


def test_a_chain_goes_on_where_it_was_left() -> None:
    tokens = list(range(5 * SPACE.chunk_tokens))
    whole = chunk_keys(SPACE, tokens)
    first = chunk_keys(SPACE, tokens[: 2 * SPACE.chunk_tokens])
    assert first + chunk_keys(SPACE, tokens[2 * SPACE.chunk_tokens :], after=first[-1]) == whole
    with pytest.raises(ValueError, match="goes on behind a full chunk"):
        chunk_keys(SPACE, tokens, after=first[-1]._replace(num_tokens=1))
