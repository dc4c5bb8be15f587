"""Every size of the public values is a whole number: nothing else passes, under its own name, by its value.

The fields are read from the classes themselves: one that is added is tried too.
"""

import re
import typing
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import numpy as np
import pytest

from lamella.cuda_ext.slots import SlotShape
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import EngineLayout, KernelGroup, ObjectLayout
from lamella.reference.slices import plan_slices

NO_WHOLE_NUMBER: Final = (True, 2.0, 1.5, float("nan"), float("inf"), "2", b"2", None, [2], np.int64(2))
GEOMETRY: Final = KVGeometry(2, 2, 2, 8, 2, 16)
SPACE: Final = KeySpace("m", "float16", ObjectForm.TOKEN, "THD", 16, 0, 1, (0, 2))
VALUES: Final = (
    GEOMETRY,
    KernelGroup(GEOMETRY, (0, 1), 4),
    EngineLayout(((0, 4096), (8192, 12288)), 128, 32, 16, 2, 32, 4, 2, 8, 2),
    SPACE,
    SlotShape(4096, 2),
)


def whole_fields(value: object) -> list[str]:
    """The fields that the class itself calls an int."""
    assert is_dataclass(value)
    hints = typing.get_type_hints(type(value))
    return [one.name for one in fields(value) if hints[one.name] is int]


SIZES: Final = [(value, name) for value in VALUES for name in whole_fields(value)]


def test_there_are_sizes_to_try() -> None:
    assert len(SIZES) > 20


@pytest.mark.parametrize(("value", "name"), SIZES, ids=[f"{type(value).__name__}-{name}" for value, name in SIZES])
@pytest.mark.parametrize("wrong", NO_WHOLE_NUMBER, ids=repr)
def test_a_size_that_is_no_whole_number_is_refused_under_its_name(value: Any, name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name} must be a whole number (an int), got {wrong!r}")):
        replace(value, **{name: wrong})


@pytest.mark.parametrize("wrong", ["token", "block", None, 1], ids=repr)
def test_the_name_of_a_form_is_no_form(wrong: Any) -> None:
    """It would pass for the token form, whatever it names."""
    sentence = re.escape(f"form must be ObjectForm.TOKEN or ObjectForm.BLOCK, got {wrong!r}")
    with pytest.raises(TypeError, match=sentence):
        ObjectLayout.single(GEOMETRY, 4, wrong)
    with pytest.raises(TypeError, match=sentence):
        replace(SPACE, form=wrong)


@pytest.mark.parametrize("name", ["model", "dtype", "inner_layout"])
@pytest.mark.parametrize("wrong", [None, 5, b"m"], ids=repr)
def test_a_name_in_a_key_space_is_text(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{name} must be a str, got {wrong!r}")):
        replace(SPACE, **{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 2, "02", [0, 2], (0, 1, 2), (0, 2.0), (False, True)], ids=repr)
def test_the_layers_of_a_key_space_are_two_whole_numbers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="layers must be a"):
        replace(SPACE, layers=wrong)


@pytest.mark.parametrize(
    "wrong", [True, 2.0, float("nan"), None, "2", "1,1", {1, 2}, [1.5, 2], [True], [1, "2"]], ids=repr
)
def test_a_width_is_whole_numbers_in_order(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"got (True|1\.5|'2'|" + re.escape(repr(wrong)) + ")"):
        plan_slices(4, wrong)


@pytest.mark.parametrize("wrong", NO_WHOLE_NUMBER, ids=repr)
def test_the_layers_that_are_cut_are_a_whole_number(wrong: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"num_layers must be a whole number (an int), got {wrong!r}")):
        plan_slices(wrong, 1)
