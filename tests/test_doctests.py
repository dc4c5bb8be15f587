"""Every example in a docstring runs, found by the installed name, and prints what it says it prints."""

import doctest
import importlib
import pkgutil

import pytest

import lamella
from extras import NEEDS_AN_EXTRA

# A native library beside the modules looks like an extension module to pkgutil.
MODULES = [
    found.name
    for found in pkgutil.walk_packages(lamella.__path__, "lamella.")
    if not found.name.startswith("lamella.cuda_ext.lib")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    if name in NEEDS_AN_EXTRA:
        pytest.importorskip(NEEDS_AN_EXTRA[name])
    assert doctest.testmod(importlib.import_module(name)).failed == 0
