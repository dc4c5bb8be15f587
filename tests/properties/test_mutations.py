"""The mutation suite: every planted wrong model is rejected by the ordinary properties (`mutants.py`)."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lamella.cuda_ext._library import find_library
from mutants import HEADER, MUTANTS, Mutant, Verdict, plant, try_mutant
from native_build import COMPILER, NATIVE_MISSING

RUNS_AT_ONCE = min(4, os.cpu_count() or 1)


def _can_run(mutant: Mutant) -> bool:
    return not mutant.is_native or (COMPILER is not None and NATIVE_MISSING is None)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Verdict]]]:
    """Every mutant that this machine can build, being tried; an error waits in its future for the test that asks."""
    folder = None if NATIVE_MISSING else find_library("lamella_cpu").parent
    with ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        yield {
            mutant.name: pool.submit(try_mutant, mutant, tmp_path_factory.mktemp("mutant"), folder)
            for mutant in MUTANTS
            if _can_run(mutant)
        }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_model_is_rejected(
    mutant: Mutant, verdicts: Mapping[str, Future[Verdict]], record_property: Callable[[str, object], None]
) -> None:
    if not _can_run(mutant):
        pytest.skip(f"it has to be compiled: {NATIVE_MISSING or 'no C++ compiler'}")
    verdict = verdicts[mutant.name].result()
    record_property("verdict", verdict)
    assert verdict.killed_by, f"{mutant.name}: survived {verdict.examples} examples of the ordinary properties"


def test_there_are_enough_wrong_models_and_half_a_dozen_in_the_shared_header() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    assert sum(mutant.path == HEADER for mutant in MUTANTS) >= 6


def test_a_mutant_whose_text_is_gone_is_an_error_and_not_a_pass(tmp_path: Path) -> None:
    stale = Mutant("stale", HEADER, "text that is not there", "")
    with pytest.raises(LookupError, match=r"'stale': its text stands 0 times in .*address\.cuh; write it anew"):
        plant(stale, tmp_path)


def test_code_that_is_not_mutated_survives(tmp_path: Path) -> None:
    # The whole set passes in the ordinary run; a few files show that the trial itself rejects nothing.
    line = "from typing import NamedTuple\n"
    nothing = Mutant("nothing", "reference/slices.py", line, line)
    folder = None if NATIVE_MISSING else find_library("lamella_cpu").parent
    files = ("tests/properties/test_selector.py", "tests/reference/test_slices.py")
    verdict = try_mutant(nothing, tmp_path, folder, files)
    assert verdict.killed_by is None, verdict.how
    assert verdict.examples >= 400
