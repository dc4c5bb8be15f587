"""The oracle itself, against bytes written out by hand: it is what everything else is held to."""

import ast
import inspect

import numpy as np
from numpy.typing import NDArray

from lamella.reference import oracle

# Chunks of 3 tokens, K = 2, 1 layer, 1 head of 1 byte: token t has key 10 + t and value 20 + t.
OBJECTS = [
    [np.array([10, 11, 12, 20, 21, 22], np.uint8).reshape(2, 1, 3, 1, 1)],
    [np.array([13, 14, 15, 23, 24, 25], np.uint8).reshape(2, 1, 3, 1, 1)],
]


def cache() -> tuple[NDArray[np.uint8], list[list[list[NDArray[np.uint8]]]]]:
    storage = np.full((2, 4, 2, 1, 1), 99, np.uint8)  # [K, N, T, H, D]
    return storage, [[[storage[0], storage[1]]]]


def test_tokens_land_in_the_blocks_that_the_table_names() -> None:
    storage, caches = cache()
    oracle.retrieve(OBJECTS, caches, [[3, 0, 2]], num_tokens=5, chunk_tokens=3)
    assert storage[0].reshape(4, 2).tolist() == [[12, 13], [99, 99], [14, 99], [10, 11]]
    assert storage[1].reshape(4, 2).tolist() == [[22, 23], [99, 99], [24, 99], [20, 21]]


def test_skipped_tokens_and_null_blocks_are_left_alone() -> None:
    storage, caches = cache()
    oracle.retrieve(OBJECTS, caches, [[3, 1, 2]], num_tokens=6, chunk_tokens=3, skip_tokens=1, null_block=1)
    assert storage[0].reshape(4, 2).tolist() == [[99, 99], [99, 99], [14, 15], [99, 11]]


def test_a_store_reads_back_what_a_retrieve_wrote() -> None:
    _, caches = cache()
    oracle.retrieve(OBJECTS, caches, [[3, 0, 2]], num_tokens=6, chunk_tokens=3)
    stored = [[np.zeros_like(array) for array in arrays] for arrays in OBJECTS]
    oracle.store(stored, caches, [[3, 0, 2]], num_tokens=6, chunk_tokens=3)
    for ours, theirs in zip(stored, OBJECTS, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])


def test_a_block_form_object_is_the_engines_blocks() -> None:
    storage, caches = cache()
    blocks = np.array([10, 11, 20, 21, 12, 13, 22, 23], np.uint8).reshape(1, 2, 2, 2, 1, 1)  # [L, B, K, T, H, D]
    oracle.retrieve([[blocks]], caches, [[2, 1]], num_tokens=4, chunk_tokens=4)
    assert storage[0].reshape(4, 2).tolist() == [[99, 99], [12, 13], [10, 11], [99, 99]]
    assert storage[1].reshape(4, 2).tolist() == [[99, 99], [22, 23], [20, 21], [99, 99]]


def test_the_oracle_knows_nothing_of_layouts_slices_or_plans() -> None:
    tree = ast.parse(inspect.getsource(oracle))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in imported if name and name.startswith("lamella")]
