"""Tiers by URL."""

from pathlib import Path

import pytest

from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.tier_url import TierUrl, open_tier
from storage_driver import LAYOUT
from tier_objects import key


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/var/kv", "/var/kv"),
        ("file:///var/kv", "/var/kv"),
        ("redis://user:secret@host:6380/2", "redis://host:6380/2"),
        ("rediss://:secret@host", "rediss://host"),
        ("redis+cluster://:secret@host:7000", "redis+cluster://host:7000"),
        ("s3://bucket/a/b?endpoint=http://user:secret@minio:9000", "s3://bucket/a/b"),
    ],
)
def test_a_url_is_shown_without_its_secrets(text: str, shown: str) -> None:
    read = TierUrl.parse(text)
    assert read.shown == shown
    assert "secret" not in repr(read) + str(read)


@pytest.mark.parametrize("text", ["", "ftp://host", "file://host/kv", "file:///", "redis://", "s3://", "s3://b?x=1"])
def test_a_url_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tier"):
        TierUrl.parse(text)


def test_a_folder_is_opened_with_its_limits_and_a_run_a_layer(tmp_path: Path) -> None:
    tier = open_tier(str(tmp_path / "kv"), LAYOUT, max_bytes=1 << 20, ttl_s=60)
    assert isinstance(tier, FileTier)
    assert len(tier.format.run_bytes) == 2 * LAYOUT.num_layers
    tier.put(key(1), memoryview(bytes(LAYOUT.object_bytes)))
    assert tier.used_bytes > 0


def test_servers_are_opened_without_being_asked() -> None:
    for url in ("redis://nobody:1", "redis+cluster://nobody:1", "s3://bucket/x?endpoint=http://nobody:1&region=x"):
        tier = open_tier(url, LAYOUT)
        assert tier.name.split(":")[0] in ("redis", "s3")
        tier.close()
        with pytest.raises(ValueError, match="limits of its own"):
            open_tier(url, LAYOUT, max_bytes=1)
