"""The second model runner of the vLLM that is installed: what it is told of a step first of all, and who is told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from lamella.connector.before_batch import tell_second_runner_first
from lamella.connector.vllm import LamellaConnector
from lamella.connector.vllm_settings import ConnectorSettings


class Told:
    """A connector that notes what it is told."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def handle_preemptions(self, metadata: Any) -> None:
        self.seen.append(metadata)


class ToldToo(Told):
    """As a connector that records."""


class Other:
    """Another connector, which may not bear being told twice."""

    def handle_preemptions(self, metadata: Any) -> None:
        raise AssertionError("vLLM itself tells it")


class Runner:
    """A runner whatever of which is touched notes that a step is being prepared."""

    def __init__(self, seen: list[Any]) -> None:
        self.__dict__["seen"] = seen

    def __getattr__(self, name: str) -> Any:
        self.seen.append("prepares")
        raise InterruptedError(name)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happened, with the runner's class as vLLM has it behind the test."""
    monkeypatch.setattr(GPUModelRunner, "execute_model", GPUModelRunner.execute_model)
    for _engine in range(2):  # of one process, one after another
        tell_second_runner_first(Told)
    return []


def execute(seen: list[Any], metadata: Any, **options: Any) -> None:
    with pytest.raises(InterruptedError):
        GPUModelRunner.execute_model(Runner(seen), SimpleNamespace(kv_connector_metadata=metadata), **options)


@pytest.mark.parametrize("kind", [Told, ToldToo])
def test_a_step_is_told_once_before_the_runner_touches_it(
    seen: list[Any], kind: type[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", kind(seen))
    execute(seen, "orders")
    execute(seen, "more", intermediate_tensors=None, dummy_run=False)
    assert seen == ["orders", "prepares", "more", "prepares"]


def test_nobody_is_told_where_there_is_no_connector_or_another_one_or_no_orders(
    seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it captures graphs vLLM hides the connector; and the class outlives an engine."""
    for connector, metadata in ((None, "orders"), (Other(), "orders"), (Told(seen), None)):
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        execute(seen, metadata)
    assert seen == ["prepares"] * 3


@pytest.mark.parametrize(
    ("settings", "groups", "why"),
    [
        ({}, 1, "unless use_layerwise is set, or auto chooses it"),
        ({"release": "whole"}, 1, "unless use_layerwise is set"),
        ({"layers_per_slice": "auto"}, 2, "where loads are released whole"),
        ({"use_layerwise": True}, 2, "where loads are released whole"),
        ({"use_layerwise": True}, 1, ""),
        ({"use_layerwise": True, "layers_per_slice": 0}, 1, ""),
        ({"layers_per_slice": "auto"}, 1, ""),
    ],
    ids=str,
)
def test_where_no_load_can_join_its_step_that_is_said_and_nothing_is_wrapped(
    settings: dict[str, Any], groups: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = list[type]()
    monkeypatch.setattr("lamella.connector.vllm.tell_second_runner_first", wrapped.append)
    side = object.__new__(LamellaConnector)
    side.settings = ConnectorSettings.from_mapping({"layers_per_slice": 1, **settings, "before_batch": True})
    side._vllm_config = SimpleNamespace(use_v2_model_runner=True)
    with caplog.at_level(logging.WARNING, "lamella"):
        side._hear_first(released_whole=groups > 1)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(why)
    assert all(one.startswith("before_batch changes nothing: ") and why in one for one in said)
    assert wrapped == ([] if why else [LamellaConnector])
