"""What the connector costs a step of real vLLM in which there is nothing to load or store, counted in Python calls.

Time is measured by `benchmarks/vllm_host_cost.py`; this is what keeps it as it is.
"""

from __future__ import annotations

from collections import Counter

from python_calls import counted_calls
from with_vllm.live_engine import LiveEngine
from with_vllm.tiny_engine import prompt

MOST_CALLS = 50
"""Of both sides and four layers, an engine that can be told of failed loads included."""


def calls_of_a_decode_step(engine: LiveEngine, num_requests: int) -> Counter[str]:
    """The calls of one step in which so many requests decode, none of them at the end of a block."""
    engine.forget_blocks()
    names = [f"q{number}" for number in range(num_requests)]
    for number, name in enumerate(names):
        engine.add(name, prompt(9, salt=number), 12)
    engine.step_until(lambda: all(engine.request(name).num_output_tokens >= 3 for name in names))
    with counted_calls() as calls:
        engine.step()
    engine.finish(*names)
    return calls


def test_a_decode_step_calls_as_little_with_seven_requests_as_with_one_and_no_hook_of_a_layer(
    engine: LiveEngine,
) -> None:
    one, seven = calls_of_a_decode_step(engine, 1), calls_of_a_decode_step(engine, 7)
    assert one == seven
    assert one.total() <= MOST_CALLS, sorted(one.items())
    assert one["LamellaConnector.has_connector_metadata"] == len(engine.worker.caches.layers)
    assert not {"LamellaConnector.wait_for_layer_load", "LamellaConnector.save_kv_layer"} & one.keys()


def test_control_a_step_beside_a_landing_load_calls_the_hooks_of_every_layer(engine: LiveEngine) -> None:
    tokens = prompt(500, salt=3)
    engine.stored(tokens)
    engine.add("r1", tokens)
    engine.release("r1")
    with engine.landing_on_demand(), counted_calls() as calls:
        engine.finish("r1")
    assert calls["LamellaConnector.wait_for_layer_load"] >= len(engine.worker.caches.layers)
    assert calls["LamellaConnector.save_kv_layer"] == calls["LamellaConnector.wait_for_layer_load"]
