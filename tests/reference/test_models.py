"""Shipped cache shapes, against the figures that their publishers' configurations imply."""

import pytest

from lamella.reference.geometry import ObjectForm
from lamella.reference.models import MODELS, find_model


@pytest.mark.parametrize(
    ("name", "num_layers", "token_bytes"),
    [
        ("llama-3.1-8b", 32, 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-70b", 80, 80 * 2 * 8 * 128 * 2),
        ("qwen3-32b", 64, 64 * 2 * 8 * 128 * 2),
        ("deepseek-v3", 61, 61 * (512 + 64) * 2),
        ("gemma-3-27b", 62, 62 * 2 * 16 * 128 * 2),
        ("deepseek-v3.2", 61, 61 * ((512 + 64) * 2 + 128 + 4)),
    ],
)
def test_a_token_costs_what_the_published_configuration_implies(name: str, num_layers: int, token_bytes: int) -> None:
    model = find_model(name)
    assert (model.num_layers, model.token_bytes) == (num_layers, token_bytes)


def test_every_shipped_model_is_checked_above_and_makes_objects_in_both_forms() -> None:
    assert len(MODELS) == 6
    for name, model in MODELS.items():
        assert model.name == name
        for form in ObjectForm:
            layout = model.object_layout(256, form=form)
            assert layout.num_layers == model.num_layers
            assert layout.object_bytes >= 256 * model.token_bytes


def test_heads_are_divided_over_ranks_and_repeated_beyond_their_number() -> None:
    model = find_model("Llama-3.1-8B")
    heads = [model.object_layout(256, ranks).groups[0].geometry.num_heads for ranks in (1, 2, 8, 16)]
    assert heads == [8, 4, 1, 1]


def test_an_mla_latent_is_on_every_rank() -> None:
    assert find_model("deepseek-v3").object_layout(256, 8).object_bytes == 256 * 61 * 576 * 2


@pytest.mark.parametrize("ranks", [0, -1, 3, 12])
def test_ranks_that_do_not_share_the_heads_evenly_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"must divide the 8 KV heads or be a multiple of them, got {ranks}"):
        find_model("llama-3.1-8b").object_layout(256, ranks)


def test_a_hybrid_model_has_a_group_for_each_kind_of_layer() -> None:
    full, sliding = find_model("gemma-3-27b").object_layout(256).groups
    assert len(full.layers) == 10
    assert full.layers[0] == 5
    assert sorted(full.layers + sliding.layers) == list(range(62))


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-9'; known: deepseek-v3, deepseek-v3\.2, gemma-3-27b"):
        find_model("gpt-9")
