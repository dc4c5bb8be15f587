"""What vLLM makes of the connector by its own defaults on a GPU, and what is refused there with what makes it right."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from lamella.connector.vllm import LamellaConnector
from lamella.connector.vllm_engine import check_engine
from lamella.connector.vllm_settings import ConnectorSettings
from with_vllm.live_engine import LiveEngine
from with_vllm.replays import replays
from with_vllm.tiny_engine import ON_GPU, PLAIN_STEPS, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="these are the defaults of an engine on a GPU, and there is none here"),
]
P = prompt(500)


def config_of(engine: LiveEngine) -> Any:
    return engine.llm.llm_engine.vllm_config


@pytest.mark.skipif(PLAIN_STEPS, reason="not the defaults: VLLM_USE_V2_MODEL_RUNNER=0")
def test_layer_waits_run_in_the_second_runner_ahead_of_time_and_decoding_steps_in_full_graphs(
    engine: LiveEngine,
) -> None:
    config = config_of(engine)
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling
    assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"  # the connector demands no other
    before = engine.worker.metrics.total("loads_layerwise")
    computed = engine.stored(P)
    engine.gate.grant(4)
    with replays(engine) as seen:
        assert engine.generate(P).same(computed)
    assert len(seen) >= 11  # all tokens but the first, whose step computes the rest of the prompt
    assert engine.worker.metrics.total("loads_layerwise") == before + 1


@pytest.mark.known_fault(17)
def test_full_graphs_beside_layer_waits_are_refused_with_what_makes_them_right(engine: LiveEngine) -> None:
    from vllm.config import CUDAGraphMode

    config = copy(config_of(engine))
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    with pytest.raises(ValueError, match="set full_graphs to before, or use PIECEWISE, or set"):
        check_engine(config, ConnectorSettings(layers_per_slice=1, full_graphs="never"))
    check_engine(config, ConnectorSettings(layers_per_slice=1))
    check_engine(config, ConnectorSettings(layers_per_slice=1, release="whole"))
    check_engine(config, ConnectorSettings(layers_per_slice=0))


@pytest.mark.skipif(PLAIN_STEPS, reason="not the defaults: VLLM_USE_V2_MODEL_RUNNER=0")
def test_the_policy_recompute_beside_layer_waits_is_refused_with_what_makes_it_right(engine: LiveEngine) -> None:
    config = copy(config_of(engine))
    config.kv_transfer_config = copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_load_failure_policy = "recompute"
    with pytest.raises(ValueError, match="use the policy fail, or async_scheduling=False with VLLM_USE_V2"):
        check_engine(config, ConnectorSettings(layers_per_slice=1))


def test_only_settings_that_say_so_and_whose_steps_wait_ask_for_piecewise_graphs() -> None:
    asks = LamellaConnector.requires_piecewise_for_cudagraph
    assert asks({"layers_per_slice": 1, "full_graphs": "never"})
    assert not asks({"layers_per_slice": 1})
    assert not asks({"layers_per_slice": 0, "full_graphs": "never"})
    assert not asks({"layers_per_slice": 1, "release": "whole", "full_graphs": "never"})
