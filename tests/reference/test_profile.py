"""A device profile: read strictly, honest about what it covers, and the judge of how to copy."""

import copy
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.reference.profile import CopyMethod, Graphs, choose_copy_method, profile_from_mapping
from lamella.sim.profiles import DEFAULT_PROFILE, load_profile, parse_profile, shipped_profiles

PROFILE = load_profile()


def shipped() -> dict[str, Any]:
    mapping: dict[str, Any] = json.loads((files("lamella.sim.profiles") / f"{DEFAULT_PROFILE}.json").read_text())
    return mapping


def keys(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every key of every object in the document."""
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in [(*path, key), *keys(item, (*path, key))]]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in keys(item, (*path, i))]
    return []


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_shipped_profile_reads_and_says_where_it_was_measured(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    covered = " ".join(source.covers for source in profile.sources)
    for part in ("prefill", "decode.full", "decode.piecewise", "wire", "engine", "copies"):
        assert part in covered, f"no source for {part}"
    for source in profile.sources:
        assert len(source.measured) == 10
        assert source.system
        assert source.program


@pytest.mark.parametrize("path", keys(shipped()), ids=lambda path: ".".join(map(str, path)))
def test_every_key_is_needed(path: tuple[Any, ...]) -> None:
    mapping = copy.deepcopy(shipped())
    del at(mapping, path[:-1])[path[-1]]
    with pytest.raises(
        ValueError,
        match=r"decode needs full|schema_version"
        if path[-1] in ("full", "piecewise", "schema_version")
        else f"lacks the key '{path[-1]}'",
    ):
        profile_from_mapping(mapping)


@given(st.sampled_from(keys(shipped())))
def test_no_other_key_is_taken(path: tuple[Any, ...]) -> None:
    mapping = copy.deepcopy(shipped())
    at(mapping, path[:-1])["typo"] = 1
    with pytest.raises(ValueError, match="typo"):
        profile_from_mapping(mapping)


@given(st.sampled_from(keys(shipped())), st.sampled_from([True, "text", [], {}, None, 1.5]))
def test_no_value_of_another_type_is_taken(path: tuple[Any, ...], value: object) -> None:
    mapping = copy.deepcopy(shipped())
    if type(at(mapping, path)) is type(value):
        return
    at(mapping, path[:-1])[path[-1]] = value
    with pytest.raises((TypeError, ValueError)) as refused:
        profile_from_mapping(mapping)
    assert str(path[-1]) in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema_version",), 2, "schema_version must be 1, got 2"),
        (("num_layers",), 0, "token_bytes must be a positive multiple of num_layers"),
        (("token_bytes",), 131_073, "token_bytes must be a positive multiple of num_layers, got 131073 and 32"),
        (("sources",), [], "sources must name at least one measurement"),
        (("wire", "h2d_bytes_per_s"), 0, "h2d_bytes_per_s must be positive, got 0"),
        (("wire", "both_bytes_per_s"), 10**12, "cannot exceed a direction alone"),
        (("wire", "slice_fixed_ns"), -1, "slice_fixed_ns must be at least 0, got -1"),
        (("copies",), [], "copies needs each of"),
        (("copies", 0, "slowdown"), [0.5, 0.1], "slowdown must be two rising numbers"),
        (("copies", 0, "slowdown"), [0.1, float("inf")], "slowdown must be two rising numbers, at least 0 and finite"),
        (("copies", 0, "entry_ns"), -5, "entry_ns at least 0"),
        (("copies", 0, "bytes_per_s"), [1], "bytes_per_s needs 8 rates, got 1"),
        (("engine", "token_budget"), 0, "token_budget must be at least 1, got 0"),
        (("engine", "idle_poll_ns"), -1, "idle_poll_ns must be at least 0, got -1"),
        (("prefill", "cached_tokens"), [0, 0], "profile.prefill: cached_tokens must rise"),
        (("decode", "full", "step_ns"), [[1]], "profile.decode.full: step_ns must have"),
    ],
)
def test_an_impossible_value_is_refused_by_name(path: tuple[Any, ...], value: object, message: str) -> None:
    mapping = shipped()
    at(mapping, path[:-1])[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        profile_from_mapping(mapping)


# ---------------------------------------------------------------- the domain


@pytest.mark.parametrize(
    ("cached", "new", "output", "inside"),
    [
        (0, 1, 1, True),
        (131_072, 8192, 1, True),  # one step on the last node
        (131_072, 8193, 1, False),  # a second step would begin beyond it
        (0, 131_072, 16, True),  # sixteen steps
        (0, 131_073, 1, False),
        (100_000, 31_072, 17, False),  # decodes beyond the last context
        (0, 0, 1, False),
        (0, 5, 0, False),
        (-1, 5, 1, False),
    ],
)
def test_a_request_is_covered_if_every_step_of_it_was_measured(
    cached: int, new: int, output: int, inside: bool
) -> None:
    assert PROFILE.covers(cached, new, output) is inside


@given(st.integers(0, 140_000), st.integers(1, 140_000), st.integers(1, 100))
def test_no_step_of_a_covered_request_is_refused(cached: int, new: int, output: int) -> None:
    if not PROFILE.covers(cached, new, output):
        return
    compute, budget = PROFILE.compute(), PROFILE.engine.token_budget
    while new:
        tokens = min(new, budget)
        assert compute.step_ns([(cached, tokens)], 0, 0) > 0
        cached, new = cached + tokens, new - tokens
    assert compute.decode_ns(1, cached, output) > 0


def test_the_regimes_are_said_in_numbers() -> None:
    said = PROFILE.regimes()
    for number in ("8,192 new", "131,072 cached", "1 .. 128", "131,088", "919,856"):
        assert number in said


def test_admission_grows_with_the_prompt() -> None:
    engine = PROFILE.engine
    assert engine.admit_ns(0) == engine.admission_ns
    assert engine.admit_ns(100_000) - engine.admit_ns(0) == 100 * engine.admission_ns_per_1000_tokens


def test_piecewise_graphs_cost_small_batches_more() -> None:
    full, piecewise = (PROFILE.compute(graphs) for graphs in (Graphs.FULL, Graphs.PIECEWISE))
    assert piecewise.decode_ns(1, 1000, 100) > 1.1 * full.decode_ns(1, 1000, 100)
    assert piecewise.decode_ns(32, 32 * 10_000, 100) == pytest.approx(full.decode_ns(32, 32 * 10_000, 100), rel=0.01)


# ---------------------------------------------------------------- how to copy


@pytest.mark.parametrize(
    ("run_bytes", "uniform_stride", "busy", "method"),
    [
        (2048, True, True, CopyMethod.COPY_2D),
        (2048, True, False, CopyMethod.COPY_2D),
        (2048, False, False, CopyMethod.SM_GATHER),
        (2048, False, True, CopyMethod.BATCH_DMA),  # twenty times slower, but the gather would double the compute
        (32_768, False, False, CopyMethod.SM_GATHER),
        (65_536, False, False, CopyMethod.BATCH_DMA),
        (524_288, False, True, CopyMethod.BATCH_DMA),
        (1 << 30, False, False, CopyMethod.BATCH_DMA),
    ],
)
def test_the_copy_method_follows_run_length_stride_and_company(
    run_bytes: int, uniform_stride: bool, busy: bool, method: CopyMethod
) -> None:
    assert choose_copy_method(PROFILE, run_bytes, uniform_stride=uniform_stride, busy=busy) is method


@pytest.mark.parametrize(("percent", "method"), [(91, CopyMethod.BATCH_DMA), (89, CopyMethod.SM_GATHER)])
def test_a_copy_engine_within_a_tenth_of_the_gather_is_preferred_to_it(percent: int, method: CopyMethod) -> None:
    mapping = shipped()
    for curve in mapping["copies"]:
        rate = 10**10 if curve["method"] == CopyMethod.SM_GATHER.value else percent * 10**8
        curve["bytes_per_s"] = [rate] * len(curve["run_bytes"])
    assert choose_copy_method(profile_from_mapping(mapping), 4096, uniform_stride=False, busy=False) is method


@given(st.integers(1, 1 << 24), st.booleans(), st.booleans())
def test_the_method_chosen_is_allowed_and_within_a_tenth_of_the_fastest_allowed(
    run_bytes: int, uniform_stride: bool, busy: bool
) -> None:
    chosen = choose_copy_method(PROFILE, run_bytes, uniform_stride=uniform_stride, busy=busy)
    allowed = {CopyMethod.BATCH_DMA}
    if uniform_stride:
        allowed.add(CopyMethod.COPY_2D)
    if not busy:
        allowed.add(CopyMethod.SM_GATHER)
    assert chosen in allowed
    rates = {method: PROFILE.curve(method).rate(run_bytes) for method in allowed}
    assert rates[chosen] >= 0.9 * max(rates.values())


@given(st.sampled_from(list(CopyMethod)), st.integers(1, 1 << 24))
def test_a_rate_lies_between_those_of_the_neighbouring_nodes(method: CopyMethod, run_bytes: int) -> None:
    curve = PROFILE.curve(method)
    i = max([0, *(index for index, node in enumerate(curve.run_bytes) if node <= run_bytes)])
    neighbours = curve.bytes_per_s[i : i + 2]
    assert min(neighbours) * 0.999 <= curve.rate(run_bytes) <= max(neighbours) * 1.001


@pytest.mark.parametrize("method", CopyMethod)
def test_a_rate_on_a_node_is_the_measured_one(method: CopyMethod) -> None:
    curve = PROFILE.curve(method)
    assert [curve.rate(run) for run in curve.run_bytes] == pytest.approx(list(curve.bytes_per_s))


def test_a_run_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="run_bytes must be at least 1, got 0"):
        PROFILE.curve(CopyMethod.BATCH_DMA).rate(0)


# ---------------------------------------------------------------- files


def test_a_profile_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**shipped(), "name": "mine"}))
    assert load_profile(str(path)).name == "mine"


def test_an_unknown_profile_is_refused_with_those_that_are_shipped() -> None:
    with pytest.raises(ValueError, match=f"no profile 'h300'; shipped: .*{DEFAULT_PROFILE}"):
        load_profile("h300")


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the profile"):
        load_profile(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ('{"schema_version": ' + "9" * 5_000 + "}", "it is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "schema_version"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_profile(text, "it")


def test_the_shipped_profile_is_what_the_measurements_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy
    import sys

    script = Path(__file__).parents[2] / "benchmarks" / "make_profile.py"
    out = tmp_path / "made.json"
    monkeypatch.setattr(sys, "argv", [str(script), str(out)])
    runpy.run_path(str(script), run_name="__main__")
    assert json.loads(out.read_text()) == shipped()


def test_steps_larger_than_were_measured_are_not_covered() -> None:
    """A prompt is computed in steps of the token budget: one beyond the table leaves long prompts outside."""
    larger = replace(PROFILE, engine=replace(PROFILE.engine, token_budget=10**12))
    longest = PROFILE.prefill.new_tokens[-1]
    assert (larger.covers(0, longest), larger.covers(0, longest + 1)) == (True, False)
    assert PROFILE.covers(0, longest + 1)
