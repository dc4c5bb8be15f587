"""Settings of the cache engine: read strictly, refused with a reason."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lamella.connector.config import CacheSettings
from lamella.reference.slices import Slice


def test_defaults_are_chunk_major_with_no_tier() -> None:
    settings = CacheSettings()
    assert settings.slices(32) == (Slice(0, 32),)
    assert settings.local_file_folder is None


def test_use_layerwise_cuts_by_width_or_schedule() -> None:
    assert len(CacheSettings(use_layerwise=True).slices(32)) == 32
    assert CacheSettings(use_layerwise=True, layers_per_slice="1,2").slices(4) == (
        Slice(0, 1),
        Slice(1, 2),
        Slice(3, 1),
    )


def test_a_mapping_is_read_by_name_and_text_becomes_a_path() -> None:
    read = CacheSettings.from_mapping({"use_layerwise": True, "local_file_folder": "/var/kv", "io_threads": 4})
    assert read == CacheSettings(use_layerwise=True, local_file_folder=Path("/var/kv"), io_threads=4)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ValueError, match="unknown setting 'use_layerwize': did you mean use_layerwise"):
        CacheSettings.from_mapping({"use_layerwize": True})
    with pytest.raises(ValueError, match="known: use_layerwise, "):
        CacheSettings.from_mapping({"zzz": 1})


@pytest.mark.known_fault(8)
def test_asynchronous_and_layerwise_loading_together_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="gates each layer"):
        CacheSettings.from_mapping({"use_layerwise": True, "enable_async_loading": True})
    assert CacheSettings.from_mapping({"use_layerwise": True, "enable_async_loading": False}).use_layerwise


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"enable_async_loading": True}, "multi-process connector"),
        ({"enable_blending": True}, "needs use_layerwise"),
        ({"enable_blending": True, "use_layerwise": True, "use_gpu": False}, "needs use_gpu"),
        ({"enable_blending": True, "use_layerwise": True, "layers_per_slice": 2}, "must be 1, got 2"),
        ({"layers_per_slice": 4}, "means nothing without use_layerwise"),
        ({"use_layerwise": True, "layers_per_slice": 0}, "at least 1, got 0"),
        ({"use_layerwise": True, "layers_per_slice": "1,x"}, "got '1,x'"),
        ({"use_layerwise": True, "layers_per_slice": "auto"}, "is the vLLM connector's alone"),
        ({"io_threads": 0}, "io_threads must be at least 1, got 0"),
        ({"local_file_folder": ""}, "local_file_folder must be a folder, got an empty name; leave it out for none"),
        ({"wait_timeout_s": 0}, "wait_timeout_s must be positive and finite, got 0"),
        ({"wait_timeout_s": 1e10}, "wait_timeout_s must be at most 1,000,000,000, got 1"),
        ({"remote_timeout_s": 10**400}, "remote_timeout_s must be at most 1,000,000,000, got 1"),
        ({"local_file_max_bytes": 0, "local_file_folder": "/kv"}, "local_file_max_bytes must be at least 1, got 0"),
        ({"local_file_ttl_s": 60}, "give local_file_folder"),
        ({"remote_ttl_s": 60}, "means nothing without remote_tier"),
        ({"remote_retries": -1}, "remote_retries must be at least 0"),
        ({"remote_tier": "ftp://host"}, "a tier's URL begins with one of"),
        ({"breaker_retry_s": float("inf")}, "breaker_retry_s must be positive and finite, got inf"),
    ],
)
def test_what_cannot_work_is_refused_with_its_value(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CacheSettings.from_mapping(values)


@pytest.mark.parametrize("name", [field.name for field in fields(CacheSettings)])
def test_a_value_of_another_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be"):
        CacheSettings.from_mapping({name: [1]})


def test_a_folder_given_as_text_is_told_how_to_give_it() -> None:
    with pytest.raises(TypeError, match=r"must be a pathlib.Path or None, got '/x': as in Path\('/kv'\)"):
        CacheSettings(local_file_folder="/x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pool_objects", "layers_per_slice", "wait_timeout_s"])
def test_true_is_no_number(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be"):
        CacheSettings.from_mapping({name: True})


def test_a_width_beyond_the_stage_is_refused_when_the_layers_are_known() -> None:
    with pytest.raises(ValueError, match="between 1 and 4, got 8"):
        CacheSettings(use_layerwise=True, layers_per_slice=8).slices(4)


def test_a_password_stays_out_of_what_is_printed() -> None:
    assert "sesame" not in repr(CacheSettings(remote_tier="redis://:sesame@host:6379/0"))
