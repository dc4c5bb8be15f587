"""Strict reading of JSON into dataclasses: what does not fit is refused, and the message names the key."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from lamella.reference.records import read_record


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Leaf:
    size: int
    share: float

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be at least 0, got {self.size}")


@dataclass(frozen=True, slots=True)
class Tree:
    name: str
    colour: Colour
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str]
    by_colour: Mapping[Colour, Leaf]
    note: str | None


def document(**changes: Any) -> dict[str, Any]:
    leaf = {"size": 1, "share": 0.5}
    whole = {"name": "t", "colour": "red", "leaves": [leaf, leaf], "pair": [1, "x"], "by_colour": {"red": leaf}}
    return {**whole, "note": None, **changes}


def test_a_whole_document_becomes_the_record_it_describes() -> None:
    leaf = Leaf(1, 0.5)
    assert read_record(Tree, document(), "t") == Tree("t", Colour.RED, (leaf, leaf), (1, "x"), {Colour.RED: leaf}, None)


def test_a_whole_number_will_do_where_a_fraction_is_meant() -> None:
    assert read_record(Leaf, {"size": 1, "share": 1}, "leaf") == Leaf(1, 1.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nmae": 1}, ValueError, "t has an unknown key 'nmae'; known: name, colour"),
        ({"name": 3}, TypeError, "t.name must be str, got 3"),
        ({"colour": "blue"}, ValueError, r"t.colour must be one of \['red'\], got 'blue'"),
        ({"leaves": [{"size": 1}]}, ValueError, r"t.leaves\[0\] lacks the key 'share'"),
        ({"leaves": [{"size": True, "share": 0.5}]}, TypeError, r"t.leaves\[0\].size must be int, got True"),
        ({"leaves": [{"size": -1, "share": 0.5}]}, ValueError, r"t.leaves\[0\]: size must be at least 0, got -1"),
        ({"leaves": 5}, TypeError, "t.leaves must be a list, got 5"),
        ({"pair": [1]}, ValueError, "t.pair must have 2 entries, got 1"),
        ({"by_colour": {"green": {}}}, ValueError, r"t.by_colour.green must be one of"),
        ({"by_colour": []}, TypeError, "t.by_colour must be a JSON object"),
        ({"note": 4}, TypeError, "t.note must be str, got 4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_record(Tree, document(**changes), "t")


def test_a_missing_key_is_named() -> None:
    whole = document()
    del whole["name"]
    with pytest.raises(ValueError, match="t lacks the key 'name'"):
        read_record(Tree, whole, "t")
