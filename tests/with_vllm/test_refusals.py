"""Engines in which layer waits could not be right are refused at start, with remedies of which each is enough."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lamella.connector.vllm import LamellaConnector
from lamella.connector.vllm_engine import TRY_GRAPH_WAITS, check_engine
from lamella.connector.vllm_settings import ConnectorSettings
from with_vllm.live_engine import LiveEngine

WAITS: list[dict[str, Any]] = [
    {"layers_per_slice": 1},
    {"layers_per_slice": "1,2", "release": "jit"},
    {"layers_per_slice": 1, "use_layerwise": True},
    {"layers_per_slice": "auto", "release": None},
]
NO_WAITS: list[dict[str, Any]] = [
    {"layers_per_slice": 0},
    {"layers_per_slice": 1, "release": "whole"},
    {"layers_per_slice": 0, "use_layerwise": True},
]
REFUSED = {  # whoever waits in the forward pass; nobody else, and nothing else
    ("FULL", "never"): "replays whole steps and passes over the layers' waits",
    ("FULL_DECODE_ONLY", "never"): "replays whole steps and passes over the layers' waits",
    ("FULL_AND_PIECEWISE", "never"): "replays whole steps and passes over the layers' waits",
    ("FULL", "before"): "replays prefills as whole graphs too",
    ("FULL", "inside"): "has not been shown right on a GPU",
    ("FULL_DECODE_ONLY", "inside"): "has not been shown right on a GPU",
    ("FULL_AND_PIECEWISE", "inside"): "has not been shown right on a GPU",
}
REMEDIES: dict[str, tuple[str | None, dict[str, Any]]] = {  # (cudagraph_mode, settings)
    "use FULL_AND_PIECEWISE and set full_graphs to before": ("FULL_AND_PIECEWISE", {"full_graphs": "before"}),
    "set full_graphs to before": (None, {"full_graphs": "before"}),
    "set full_graphs to never": ("PIECEWISE", {"full_graphs": "never"}),  # which vLLM is asked for then
    "use FULL_AND_PIECEWISE": ("FULL_AND_PIECEWISE", {}),
    "use PIECEWISE": ("PIECEWISE", {}),
    "set layers_per_slice to 0": (None, {"layers_per_slice": 0}),
    "release to whole": (None, {"release": "whole"}),
}


def why_refused(engine: LiveEngine, mode: CUDAGraphMode, settings: dict[str, Any]) -> str:
    config = copy(engine.llm.llm_engine.vllm_config)
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = mode
    try:
        check_engine(config, ConnectorSettings.from_mapping(settings))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("waits", [*WAITS, *NO_WAITS], ids=str)
@pytest.mark.parametrize("full_graphs", ["never", "before", "inside"])
@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
@pytest.mark.known_fault(17)
def test_graphs_of_whole_steps_beside_waits_are_refused_with_remedies_of_which_each_is_enough(
    engine: LiveEngine,
    monkeypatch: pytest.MonkeyPatch,
    mode: CUDAGraphMode,
    full_graphs: str,
    waits: dict[str, Any],
) -> None:
    monkeypatch.delenv(TRY_GRAPH_WAITS, raising=False)
    settings = {**waits, "full_graphs": full_graphs}
    said = why_refused(engine, mode, settings)
    expected = REFUSED.get((mode.name, full_graphs), "") if waits in WAITS else ""
    assert (expected in said) if expected else said == ""
    rest, used = said, 0
    for remedy, (other, changed) in REMEDIES.items():  # the longest first: what is named is taken out
        if remedy in rest:
            rest, used = rest.replace(remedy, ""), used + 1
            assert why_refused(engine, CUDAGraphMode[other] if other else mode, {**settings, **changed}) == "", remedy
    assert (used > 0) == bool(said)
    if said and full_graphs == "inside":
        monkeypatch.setenv(TRY_GRAPH_WAITS, "1")
        assert why_refused(engine, mode, settings) == ""


FORWARDS: list[tuple[str, dict[str, Any], str]] = [  # (part of the configuration, what it says, what is refused)
    ("parallel_config", {"enable_dbo": True}, "enable_dbo computes each layer of a step in parts"),
    ("parallel_config", {"ubatch_size": 4}, "ubatch_size 4 computes each layer of a step in parts"),
    ("parallel_config", {"ubatch_size": 1}, ""),
    ("parallel_config", {"data_parallel_size": 2}, ""),
    ("scheduler_config", {"async_scheduling": False}, ""),
    ("speculative_config", {"method": "eagle3"}, "speculative decoding by eagle3 runs layers with KV of their own"),
    ("speculative_config", {"method": "mtp"}, "speculative decoding by mtp runs"),
    ("speculative_config", {"method": "draft_model"}, "speculative decoding by draft_model runs"),
    ("speculative_config", {"method": "custom_class"}, "speculative decoding by custom_class runs"),
    ("speculative_config", {"method": "ngram"}, ""),
    ("speculative_config", {"method": "suffix"}, ""),
    ("speculative_config", {"method": "medusa"}, ""),
]


PARALLEL = ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]


@pytest.mark.parametrize("waits", [*WAITS, *NO_WAITS], ids=str)
@pytest.mark.parametrize(("part", "values", "expected"), FORWARDS, ids=lambda one: str(one)[:40])
def test_steps_that_do_not_call_each_hook_once_are_refused_beside_waits(
    engine: LiveEngine, part: str, values: dict[str, Any], expected: str, waits: dict[str, Any]
) -> None:
    config = copy(engine.llm.llm_engine.vllm_config)
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE  # an engine's own may be refused by itself
    changed = copy(getattr(config, part)) or SimpleNamespace()
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    object.__setattr__(config, part, changed)

    def said_of(settings: dict[str, Any]) -> str:
        try:
            check_engine(config, ConnectorSettings.from_mapping(settings))
        except ValueError as error:
            return str(error)
        return ""

    said = said_of(waits)
    assert (expected in said) if expected and waits in WAITS else said == ""
    if said:
        assert said_of({**waits, "layers_per_slice": 0}) == ""
    if "release to whole" in said:
        assert said_of({**waits, "release": "whole"}) == ""


@pytest.mark.parametrize("role", list(KVConnectorRole), ids=lambda role: role.name)
@pytest.mark.parametrize("settings", [*WAITS, *NO_WAITS, {"server": "/run/lamella"}], ids=str)
@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("size", [2, 3])
def test_a_way_to_spread_an_engine_that_is_not_built_is_refused_as_it_is_made(
    engine: LiveEngine, size: int, name: str, settings: dict[str, Any], role: KVConnectorRole
) -> None:
    made = engine.llm.llm_engine.vllm_config
    config, transfer = copy(made), copy(made.kv_transfer_config)
    transfer.kv_connector_extra_config = settings
    config.parallel_config, config.kv_transfer_config = copy(made.parallel_config), transfer
    config.compilation_config = copy(made.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE  # an engine's own may be refused by itself
    object.__setattr__(config.parallel_config, name, size)
    with pytest.raises(ValueError, match=rf"^{name} {size}.* set it to 1"):
        LamellaConnector(config, role, engine.connector._kv_cache_config)
    object.__setattr__(config.parallel_config, name, 1)
    check_engine(config, ConnectorSettings.from_mapping(settings))


@pytest.mark.parametrize("kept", [{}, {"file_tier": "/kv"}, {"server": "/run/lamella"}], ids=str)
@pytest.mark.parametrize("calculated", [False, True])
def test_scales_of_one_process_are_refused_where_another_would_read_what_it_keeps(
    engine: LiveEngine, calculated: bool, kept: dict[str, Any]
) -> None:
    config = copy(engine.llm.llm_engine.vllm_config)
    caches = copy(config.cache_config)
    object.__setattr__(caches, "calculate_kv_scales", calculated)
    object.__setattr__(config, "cache_config", caches)
    settings = ConnectorSettings.from_mapping({"layers_per_slice": 0, **kept})
    if calculated and kept:
        with pytest.raises(ValueError, match=rf"calculate_kv_scales .*: leave it out, or leave {next(iter(kept))} out"):
            check_engine(config, settings)
    else:
        check_engine(config, settings)


def test_below_another_connector_it_is_refused_at_start_with_what_to_do(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector is the engine's connector then, and hands the caches down."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    above = MultiConnector.__new__(MultiConnector)
    above._connectors = [engine.connector]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", above)
    with pytest.raises(ValueError, match="below MultiConnector: name it as kv_connector itself"):
        above.register_kv_caches({})
