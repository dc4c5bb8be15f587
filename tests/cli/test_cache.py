"""`lamella cache` against real stores: what is there is listed, and what is to go is gone, and nothing else."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lamella.cli.main import build_app
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.s3_tier import S3Tier
from lamella.connector.storage.tier import Tier
from storage_servers import REDIS_MISSING, redis_server, s3_server
from tier_objects import RUNS, SIZE, content, key

A, B = b"\xaa" * 32, b"\xbb" * 32


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["cache", *arguments])


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(params=["file", "redis", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Tier]]:
    """A store's URL and a tier on it: two objects of space A, one of space B, one of another format."""
    if request.param == "file":
        yield from filled(str(tmp_path / "kv"), FileTier(tmp_path / "kv", SIZE, RUNS), FileTier(tmp_path / "kv", SIZE))
    elif request.param == "redis":
        if REDIS_MISSING:
            pytest.skip(REDIS_MISSING)
        with redis_server(tmp_path / "redis") as server:
            yield from filled(server.url, RedisTier(server.url, SIZE, RUNS), RedisTier(server.url, SIZE))
    else:
        pytest.importorskip("moto", reason="moto is not installed (it comes with the dev extra)")
        patched = pytest.MonkeyPatch()
        for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")):
            patched.setenv(name, value)
        with s3_server() as address:
            options: dict[str, Any] = {"endpoint": address, "region": "us-east-1"}
            url = "s3://kv-cache/cli"
            tiers = S3Tier(url, SIZE, RUNS, **options), S3Tier(url, SIZE, **options)
            yield from filled(f"{url}?endpoint={address}&region=us-east-1", *tiers)
        patched.undo()


def filled(url: str, tier: Tier, other_format: Tier) -> Iterator[tuple[str, Tier]]:
    for space, number in ((A, 1), (A, 2), (B, 3)):
        tier.put(key(number, space=space), memoryview(content(number)))
    other_format.put(key(4, space=A), memoryview(content(4)))
    yield url, tier
    tier.close()
    other_format.close()


def there(tier: Tier) -> tuple[bool, ...]:
    return tier.exists([key(1, space=A), key(2, space=A), key(3, space=B)])


def test_every_object_is_listed_and_counted(store: tuple[str, Tier]) -> None:
    url, _ = store
    lines = output("ls", url).splitlines()
    assert len(lines) == 4
    assert all("4 tokens" in line for line in lines)
    assert [line[:12] for line in lines] == ["a" * 12] * 3 + ["b" * 12]
    summary = json.loads(output("stat", url, "--json"))
    assert summary["objects"] == 4
    assert summary["bytes"] == 4 * (4096 + SIZE)
    assert [space["objects"] for space in summary["spaces"]].count(2) == 1, "two of one format and space"
    told = output("stat", url)
    assert "4 objects, 16.2 KiB" in told
    assert told.count("written: this store does not tell" if url.startswith("redis") else "s .. ") == 3


def test_a_space_is_cleared_by_its_first_digits_in_every_format(store: tuple[str, Tier]) -> None:
    url, tier = store
    assert "3 objects, 12.2 KiB, would be removed" in output("clear", url, "--space", "AAAA", "--dry-run")
    assert there(tier) == (True, True, True)
    assert "3 objects, 12.2 KiB, removed" in output("clear", url, "--space", "AAAA")
    assert there(tier) == (False, False, True)


def test_everything_is_cleared_only_when_asked_for(store: tuple[str, Tier]) -> None:
    url, tier = store
    refused = run("clear", url)
    assert refused.exit_code == 2
    assert "say which objects" in refused.output
    assert there(tier) == (True, True, True)
    for space in ("", "everything", "a" * 65):  # the beginning of every hash, or of none
        for action in ("clear", "ls"):
            refused = run(action, url, f"--space={space}")
            assert refused.exit_code == 2
            assert "first digits of a key space's hash" in " ".join(refused.output.replace("│", " ").split())
    assert there(tier) == (True, True, True)
    output("clear", url, "--all")
    assert there(tier) == (False, False, False)
    assert output("ls", url) == ""


def test_the_listing_says_when_it_is_cut(store: tuple[str, Tier]) -> None:
    url, _ = store
    result = run("ls", url, "--limit", "3")
    assert len(result.stdout.splitlines()) == 3
    assert "only the first 3" in result.stderr
    document = json.loads(output("ls", url, "--limit", "3", "--json"))
    assert document["complete"] is False
    assert len(document["objects"]) == 3


def test_old_objects_are_cleared_by_age(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", SIZE)
    for number in (1, 2):
        tier.put(key(number), memoryview(content(number)))
    old = time.time() - 3 * 86_400
    os.utime(tier.path_of(key(1)), (old, old))
    assert "1 objects" in output("clear", str(tmp_path / "kv"), "--older-than", "2d")
    assert tier.exists([key(1), key(2)]) == (False, True)


def test_files_that_are_not_objects_are_left_alone(tmp_path: Path) -> None:
    FileTier(tmp_path / "kv", SIZE).put(key(1), memoryview(content(1)))
    for name in ("notes.txt", "strange.kv"):
        (tmp_path / "kv" / name).write_text("mine")
    output("clear", str(tmp_path / "kv"), "--all")
    assert sorted(path.name for path in (tmp_path / "kv").iterdir() if path.is_file()) == ["notes.txt", "strange.kv"]


@pytest.mark.parametrize(
    ("url", "code", "reason"),
    [
        ("/no/such/folder", 2, "there is no folder"),
        (__file__, 2, "is a file, and a tier is a folder or a URL: name the folder it lies in"),
        ("ftp://host/kv", 2, "a tier's URL begins with one of"),
        ("s3://bucket?colour=blue", 2, "got 'colour'"),
        ("s3://bucket?endpoint=host:9000", 2, "got 'host:9000'"),
        ("redis://:secret@host:99999/0", 2, "a port is a number up to 65535, got '99999' behind host"),
        ("redis://:secret@host/first", 2, "the number of a database, got '/first'"),
        ("redis://:secret@127.0.0.1:1/0", 1, "redis:127.0.0.1:1/0 does not serve"),
    ],
)
def test_a_store_that_cannot_be_is_one_sentence(url: str, code: int, reason: str) -> None:
    for action in (["ls"], ["stat"], ["clear", "--all"]):
        result = run(action[0], url, *action[1:])
        assert result.exit_code == code, result.output
        assert reason in " ".join(result.output.replace("│", " ").split())
        assert "secret" not in result.output
        assert "Traceback" not in result.output
