"""Settings of the vLLM connector: strict, but for the one that never stops an engine."""

from __future__ import annotations

import json
import logging
import re
import shlex
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.connector.slice_width import choose_width
from lamella.connector.step_orders import LoadOrder, LoadPlan
from lamella.connector.vllm_settings import ConnectorSettings, resolve_layers_per_slice
from lamella.connector.vllm_worker import WorkerSide
from lamella.reference.auto import AutoPolicy
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.layout import ObjectLayout
from lamella.reference.release import WeighedRelease
from lamella.reference.slices import plan_slices
from lamella.sim.profiles import load_profile

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


@pytest.mark.parametrize(
    ("value", "means"),
    [
        (0, 0),
        ("0", 0),
        ("off", 0),
        (False, 0),
        (True, 1),
        ("true", 1),
        (1, 1),
        ("8", 8),
        (" 2 ", 2),
        ("auto", "auto"),
        ("1,1,2,4", (1, 1, 2, 4)),
        ("AUTO", "auto"),
    ],
)
def test_layers_per_slice_takes_numbers_words_and_schedules(value: object, means: object) -> None:
    assert resolve_layers_per_slice(value, 8) == means


@pytest.mark.parametrize("value", [-1, "-1", "1,,2", "three", 1.5, None, [1], {}, 9, "9", "1,9", "0x2", "٣"])
def test_anything_else_warns_and_is_off(value: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_layers_per_slice(value, 8) == 0
    assert "reads as off" in caplog.text


@given(st.one_of(st.integers(), st.text(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_no_value_of_layers_per_slice_stops_an_engine(value: Any) -> None:
    resolved = resolve_layers_per_slice(value, 32)
    assert resolved == "auto" or all(
        0 <= width <= 32 for width in ([resolved] if isinstance(resolved, int) else resolved)
    )
    assert isinstance(ConnectorSettings(layers_per_slice=value).waits_in_forward, bool)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"layer_per_slice": 1}, ValueError, "did you mean layers_per_slice"),
        ({"release": "soon"}, ValueError, "soon"),
        ({"order": "random"}, ValueError, "order must be one of"),
        ({"host_pool_gib": 0}, ValueError, "host_pool_gib must be positive"),
        ({"max_loads": "many"}, TypeError, "max_loads must be a whole number, got 'many'"),
        ({"in_flight_mb": 1.5}, TypeError, "in_flight_mb must be a whole number, got 1.5"),
        ({"max_load_gib": "8"}, TypeError, "max_load_gib must be a number, got '8'"),
        ({"use_layerwise": 1}, TypeError, "use_layerwise must be true or false"),
        ({"full_graphs": "yes"}, ValueError, "full_graphs must be one of never, before, inside"),
        ({"object_form": "blob"}, ValueError, "object_form must be one of"),
        ({"staging_mib": 8, "window_mib": 8}, ValueError, "raise it to 32, or lower window_mib to 2"),
        ({"carrier": "pigeon"}, ValueError, "carrier must be event or value"),
        ({"file_tier": ""}, ValueError, "file_tier must be a folder, got an empty name; leave it out for none"),
        ({"server": " "}, ValueError, "server must be a folder, got an empty name; leave it out for none"),
        ({"server": "ipc://"}, ValueError, "server must be a folder, got an empty name; leave it out for none"),
        ({"file_tier": "~nobody-is-called-so/kv"}, ValueError, "file_tier '~nobody-is.* Write the folder out"),
        ({"server": "~nobody-is-called-so/kv"}, ValueError, "server '~nobody-is.* Write the folder out"),
        ({"file_tier": "a\0b"}, ValueError, r"file_tier must be a folder, got 'a\\x00b', which none can be called"),
        ({"server": "a\0b"}, ValueError, r"server must be a folder, got 'a\\x00b'"),
        (
            {"file_tier": "s3://bucket/kv"},
            ValueError,
            "start one with --tier s3://bucket/kv, and name its folder as server",
        ),
        ({"file_tier_gib": 5}, ValueError, "file_tier_gib 5 limits a folder: give file_tier"),
        ({"file_tier": "/kv", "file_tier_gib": 1e-12}, ValueError, "file_tier_gib 1e-12 is less than a byte: raise it"),
    ],
)
@pytest.mark.known_fault(8)
def test_every_other_setting_is_refused_with_its_value(values: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        ConnectorSettings.from_mapping(values)


NUMBERS = [one.name for one in fields(ConnectorSettings) if str(one.type).split(" ")[0] in ("int", "float")]


@pytest.mark.parametrize("value", [10**400, 10**30, 1e300, float("inf"), float("nan"), -(10**30)])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_taken_that_could_only_fail_later(name: str, value: float) -> None:
    """A wait of 1e10 s cannot be expressed: it was taken at start and ended the engine at its first wait."""
    assert {"load_timeout_s", "wait_timeout_s", "io_threads", "host_pool_gib", "file_tier_gib"} <= set(NUMBERS)
    with pytest.raises((ValueError, TypeError), match=name):
        ConnectorSettings.from_mapping({name: value})


@pytest.mark.parametrize("name", ["load_timeout_s", "wait_timeout_s"])
def test_the_longest_time_that_is_taken_can_be_waited_for(name: str) -> None:
    longest = getattr(ConnectorSettings(**{name: 10**9}), name)
    done: Future[int] = Future()
    Timer(0.01, done.set_result, [1]).start()
    assert done.result(longest) == 1
    assert int(longest * 1e9) < 2**63
    with pytest.raises(ValueError, match=f"{name} must be at most 1,000,000,000, got 10000000000"):
        ConnectorSettings(**{name: 10**10})


@pytest.mark.parametrize(
    ("values", "waits"),
    [
        ({}, False),
        ({"layers_per_slice": 0, "use_layerwise": True}, False),
        ({"layers_per_slice": 1, "release": "whole"}, False),
        ({"layers_per_slice": 1}, True),
        ({"layers_per_slice": "auto"}, True),
        ({"layers_per_slice": "1,2", "release": "jit"}, True),
        ({"layers_per_slice": 1, "release": "whole", "use_layerwise": True}, True),
        ({"layers_per_slice": "nonsense"}, False),
    ],
)
@pytest.mark.known_fault(17)
def test_only_layer_waits_ask_for_piecewise_graphs(values: dict[str, Any], waits: bool) -> None:
    assert ConnectorSettings.from_mapping(values).waits_in_forward is waits


@pytest.mark.parametrize("named", ["/run/lamella", "ipc:///run/lamella/server.sock", "ipc:///run/lamella"])
def test_a_server_is_named_by_its_folder_or_its_socket(named: str) -> None:
    assert ConnectorSettings.from_mapping({"server": named}).server == Path("/run/lamella")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"server": "tcp://host:5570"}, "over tcp it can only be asked"),
        ({"server": "/run/s", "file_tier": "/data"}, "start it with --tier /data"),
        ({"server": "/run/s", "full_graphs": "inside"}, "set full_graphs to before"),
        ({"server": "/run/s", "transfer_side": "both"}, "one of worker, server, got 'both'"),
        ({"transfer_side": "server"}, "name its folder as server"),
    ],
)
def test_what_a_server_cannot_do_is_refused_with_the_remedy(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ConnectorSettings.from_mapping(values)


def test_auto_takes_the_narrowest_slices_that_copy_near_the_wire() -> None:
    llama = ObjectLayout.single(KVGeometry(32, 1, 8, 256, 2, 256), 16, ObjectForm.BLOCK)  # 1 MiB a layer
    choice = choose_width("auto", llama)
    assert (choice.width, choice.layerwise) == (1, True)
    assert "auto: 1 layers a slice" in choice.reason
    tiny = ObjectLayout.single(KVGeometry(4, 1, 1, 64, 2, 16), 16, ObjectForm.BLOCK)  # 2 KiB a layer
    assert choose_width("auto", tiny).layerwise is False


def settings_table() -> dict[str, str]:
    """Name and default of each setting, as the document for users has them."""
    section = DOCUMENT.read_text("utf-8").split("\n## All settings\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, defaults = (re.split(r", ?", cell.strip()) for cell in line.split("|")[1:3])
            found |= dict(zip((name.strip("`") for name in names), defaults, strict=True))
    return found


def test_the_document_has_every_setting_with_its_default() -> None:
    written = {None: "none", "": "none", True: "true", False: "false"}
    own = ConnectorSettings()
    expected = {}
    for field in fields(ConnectorSettings):
        value = getattr(own, field.name)
        name = value if isinstance(value, str) and value else None
        expected[field.name] = f"`{name}`" if name else written.get(value) if value in written else f"{value:g}"
    expected |= {"use_layerwise": "false", "layers_per_slice": "0", "release": "`first`"}
    assert settings_table() == expected


@pytest.mark.parametrize("name", ["file_tier", "server"])
def test_a_folder_given_as_text_is_told_how_to_give_it(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a pathlib.Path or None, got '/x': as in Path\('/kv'\)"):
        ConnectorSettings(**{name: "/x"})  # type: ignore[arg-type]


def test_the_documents_example_can_be_pasted() -> None:
    command = DOCUMENT.read_text("utf-8").split("```\n")[1]
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "LamellaConnector",
        "lamella.connector.vllm",
    )
    settings = ConnectorSettings.from_mapping(config["kv_connector_extra_config"])
    assert (settings.layers_per_slice, settings.release, settings.host_pool_gib) == (1, "first", 32)
    assert settings.full_graphs == "before", "decoding keeps full graphs"


@given(planned=st.integers(1, 128), own=st.integers(1, 128))
def test_whatever_auto_plans_for_the_model_moves_on_a_rank_with_fewer_layers(planned: int, own: int) -> None:
    """A stage has its own layers only; a rising schedule ends in slices that may be wider than all of them."""
    layers = min(planned, own)
    rank: Any = SimpleNamespace(caches=SimpleNamespace(layout=SimpleNamespace(num_layers=layers)))
    for width, slices in AutoPolicy(load_profile(), planned)._schedules:
        order = LoadOrder(0, "r", (0,), 0, ((1,),), 16, 0, False, LoadPlan(width, WeighedRelease(), 1, 1))
        parts = WorkerSide._slices_of(rank, order)
        assert sum(part.num_layers for part in parts) == layers
        assert parts[0].num_layers == min(slices[0], layers)
        if layers == planned:
            assert parts == plan_slices(planned, width)
