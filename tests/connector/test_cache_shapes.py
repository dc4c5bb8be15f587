"""Cache tensors as engines hand them out, and what Lamella makes of them."""

from __future__ import annotations

import pytest

from lamella.connector.cache_shapes import GroupShape, axes_of, describe_caches
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("shape", "group", "axes"),
    [
        ((8192, 2, 32, 128), (32, 2, 64), "NHTD"),  # vLLM 0.32, CPU: packed
        ((1000, 8, 16, 256), (16, 8, 128), "NHTD"),  # vLLM 0.26, H200: packed
        ((2, 1000, 16, 8, 128), (16, 8, 128), "KNTHD"),
        ((1000, 2, 16, 8, 128), (16, 8, 128), "NKTHD"),
        ((1000, 2, 8, 16, 128), (16, 8, 128), "NKHTD"),
        ((1000, 64, 576), (64, 1, 576), "NTD"),  # MLA
        ((4000, 2, 16, 128), (64, 2, 64), "NHTD"),  # the kernel's block is a quarter of the engine's
    ],
)
@pytest.mark.known_fault(67)
def test_axes_follow_from_the_shape(shape: tuple[int, ...], group: tuple[int, int, int], axes: str) -> None:
    assert axes_of(shape, GroupShape(("a",), *group)) == axes


@pytest.mark.parametrize("shape", [(8, 3, 32, 128), (8, 2, 33, 128), (8,), (8, 2, 32, 100), (2, 2, 2, 2, 2, 2)])
def test_a_shape_that_fits_nothing_is_refused_with_its_sizes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="fits no known layout"):
        axes_of(shape, GroupShape(("a",), 32, 2, 64))


@pytest.mark.known_fault(73)
def test_a_strided_view_is_described_by_its_strides_and_never_copied() -> None:
    storage = torch.zeros(10, 4, 2, 16)  # [N, T, H, 2D]
    views = {f"layer.{index}": storage.permute(0, 2, 1, 3) for index in range(3)}  # logical [N, H, T, 2D]
    described = describe_caches(views, [GroupShape(tuple(views), 4, 2, 8)], 8, "auto")
    engine = described.engines[0]
    assert engine.bases[0] == (storage.data_ptr(),)
    assert (engine.token_stride, engine.head_stride) == (2 * 16 * 4, 16 * 4)
    assert described.layout.form is ObjectForm.BLOCK
    assert described.inner == "NHTD:THD of 4"


def test_blocks_with_gaps_make_objects_of_tokens() -> None:
    storage = torch.zeros(10, 2, 8, 16)
    gaps = {"layer.0": storage[:, :, ::2]}  # every second token: a block is not one run
    group = GroupShape(("layer.0",), 4, 2, 8)
    assert describe_caches(gaps, [group], 8, "auto").layout.form is ObjectForm.TOKEN
    with pytest.raises(ValueError, match="contiguous"):
        describe_caches(gaps, [group], 8, "block")


@pytest.mark.known_fault(62, 71)
def test_ids_of_logical_blocks_become_ids_of_the_kernels_blocks_and_the_null_block_stays_null() -> None:
    caches = {"layer.0": torch.zeros(40, 2, 4, 16)}
    described = describe_caches(caches, [GroupShape(("layer.0",), 16, 2, 8)], 16, "auto")
    assert described.kernel_tables([(0, 3, 1)]) == [(0, 0, 0, 0, 12, 13, 14, 15, 4, 5, 6, 7)]


def test_groups_share_the_stages_layers_in_order() -> None:
    caches = {f"layer.{index}": torch.zeros(10, 2, 4, 16) for index in range(4)}
    groups = [GroupShape(("layer.2", "layer.0"), 4, 2, 8), GroupShape(("layer.1", "layer.3"), 4, 2, 8)]
    layout = describe_caches(caches, groups, 8, "auto").layout
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]


@pytest.mark.known_fault(70)
def test_layers_grouped_otherwise_make_objects_of_other_names() -> None:
    """An engine that groups its layers anew, for one more layer or another kind, never reads the old objects."""
    caches = {f"layer.{index}": torch.zeros(10, 2, 4, 16) for index in range(4)}
    names = tuple(caches)
    groupings = [
        [GroupShape(names, 4, 2, 8)],
        [GroupShape(names[:2], 4, 2, 8), GroupShape(names[2:], 4, 2, 8)],
        [GroupShape(names[::2], 4, 2, 8), GroupShape(names[1::2], 4, 2, 8)],
        [GroupShape(names[:1], 4, 2, 8), GroupShape(names[1:], 4, 2, 8)],
    ]
    digests = set()
    for groups in groupings:
        described = describe_caches(caches, groups, 8, "auto")
        space = KeySpace("m", "float32", described.layout.form, described.inner, 8, 0, 1, (0, 4))
        digests.add(space.digest())
    assert len(digests) == len(groupings)


def test_layers_of_another_precision_make_objects_of_other_names() -> None:
    """vLLM can leave layers out of a cache's type (`kv_cache_dtype_skip_layers`): as many, and others, are as long."""
    inner = set()
    for halves in ((0, 1), (1, 2), (2, 3)):
        types = [torch.float16 if index in halves else torch.float32 for index in range(4)]
        caches = {f"layer.{index}": torch.zeros(10, 2, 4, 16, dtype=one) for index, one in enumerate(types)}
        names = [tuple(f"layer.{index}" for index, one in enumerate(types) if one is kind) for kind in set(types)]
        names.sort()  # as vLLM: by the first layer
        described = describe_caches(caches, [GroupShape(group, 4, 2, 8) for group in names], 8, "auto")
        inner.add((described.inner, described.layout.object_bytes))
    assert len({size for _inner, size in inner}) == 1
    assert len({text for text, _size in inner}) == 3
