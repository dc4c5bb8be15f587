"""KVGeometry: sizes of a kernel group."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.geometry import KVGeometry
from strategies import geometries

LLAMA_8B = KVGeometry(num_layers=32, kv=2, num_heads=8, head_dim=128, element_bytes=2, chunk_tokens=256)


def test_llama_8b_keeps_128_kib_a_token_and_32_mib_a_chunk() -> None:
    assert LLAMA_8B.hidden == 1024
    assert LLAMA_8B.hidden_bytes == 2048
    assert LLAMA_8B.token_layer_bytes == 4096
    assert LLAMA_8B.token_bytes == 128 << 10
    assert LLAMA_8B.layer_bytes == 1 << 20
    assert LLAMA_8B.object_bytes == 32 << 20


@pytest.mark.known_fault(10)
def test_mla_moves_one_run_a_token_not_two() -> None:
    deepseek = KVGeometry(num_layers=61, kv=1, num_heads=1, head_dim=576, element_bytes=2, chunk_tokens=256)
    assert deepseek.token_layer_bytes == 1152
    assert deepseek.object_bytes == 61 * 256 * 1152


@pytest.mark.parametrize(("num_tokens", "chunks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2)])
def test_a_partial_last_chunk_counts_as_a_chunk(num_tokens: int, chunks: int) -> None:
    assert LLAMA_8B.num_chunks(num_tokens) == chunks


@given(geometries())
def test_every_size_is_a_product_of_the_alphabet(geometry: KVGeometry) -> None:
    elements = geometry.kv * geometry.num_layers * geometry.chunk_tokens * geometry.num_heads * geometry.head_dim
    assert geometry.object_bytes == elements * geometry.element_bytes
    assert geometry.object_bytes == geometry.num_layers * geometry.layer_bytes
    assert geometry.object_bytes == geometry.chunk_tokens * geometry.token_bytes


@given(geometries(), st.integers(0, 100))
def test_chunks_hold_all_tokens_and_not_one_chunk_more(geometry: KVGeometry, num_tokens: int) -> None:
    chunks = geometry.num_chunks(num_tokens)
    assert chunks * geometry.chunk_tokens >= num_tokens > (chunks - 1) * geometry.chunk_tokens or chunks == 0


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_heads": -1}, "num_heads must be at least 1, got -1"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"kv": 3}, "kv must be 1 (MLA, packed) or 2 (keys and values apart), got 3"),
        ({"element_bytes": 8}, "element_bytes must be 1, 2 or 4, got 8"),
    ],
)
def test_an_impossible_size_is_refused_with_its_value(wrong: dict[str, int], sentence: str) -> None:
    sizes: dict[str, Any] = {
        "num_layers": 2, "kv": 2, "num_heads": 1, "head_dim": 8, "element_bytes": 2, "chunk_tokens": 16
    }  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(sentence)):
        KVGeometry(**sizes | wrong)
