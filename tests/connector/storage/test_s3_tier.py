"""What the S3 tier does beyond what every tier promises: ranges that are not merged, time-outs, damage, bad wires."""

import itertools
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from lamella.connector.storage.s3_tier import S3Tier
from lamella.connector.storage.tier import DamagedObjectError, TierError
from lamella.reference.layout import ByteRange
from storage_servers import Wire
from tier_objects import RUNS, SIZE, WHOLE, content, key, put, read

TIMEOUT_S = 2.0
LATE_S = 2.0  # what a busy machine may add
_prefixes = itertools.count()


@pytest.fixture
def wire(s3: str) -> Iterator[Wire]:
    port = urlsplit(s3).port
    assert port is not None
    with Wire(port) as made:
        yield made


def tier_of(address: str | Wire, size: int = SIZE, runs: tuple[int, ...] = RUNS, **options: Any) -> S3Tier:
    endpoint = address if isinstance(address, str) else f"http://127.0.0.1:{address.port}"
    url = options.pop("url", f"s3://kv-cache/own-{next(_prefixes)}")
    return S3Tier(url, size, runs, endpoint=endpoint, **{"timeout_s": TIMEOUT_S, **options})


def test_neighbouring_ranges_are_not_merged_over_the_bytes_between_them(wire: Wire) -> None:
    layer = 1 << 16
    tier = tier_of(wire, 8 * layer, (layer,) * 8)  # K and V of 4 layers: 256 KiB apart
    tier.put(key(1), memoryview(bytes(8 * layer)))
    wire.mend()
    into = [memoryview(bytearray(layer)) for _ in range(2)]
    tier.get_ranges(key(1), [ByteRange(layer, layer), ByteRange(5 * layer, layer)], into)
    assert wire.answered < 2 * layer + 4096 + 3 * 2000, "two layers, a header, and what HTTP says around them"
    wire.mend()
    tier.get_ranges(key(1), [ByteRange(2 * layer, layer), ByteRange(6 * layer, layer)], into)
    assert wire.answered < 2 * layer + 2 * 2000, "the header is known by now"
    tier.close()


def test_a_prefix_is_read_side_by_side(s3: str) -> None:
    tier = tier_of(s3, timeout_s=10)
    for number in range(20):
        put(tier, number)
    into = [[memoryview(bytearray(SIZE))] for _ in range(20)]
    assert tier.get_leading([key(number) for number in range(20)], WHOLE, into) == (20, None)
    assert [bytes(view) for (view,) in into] == [content(number) for number in range(20)]
    tier.close()


def test_a_large_object_goes_up_in_parts_and_is_visible_when_it_is_complete(s3: str) -> None:
    size = 12 << 20
    tier = tier_of(s3, size, (), timeout_s=30)
    whole = bytes(range(256)) * (size // 256)
    tier.put(key(1), memoryview(whole))
    into = memoryview(bytearray(size))
    tier.get_ranges(key(1), [ByteRange(0, size)], [into])
    assert into == whole
    tier.close()


# ---- servers that fail


def test_a_server_that_falls_silent_costs_the_time_out_and_then_serves_again(wire: Wire) -> None:
    tier = tier_of(wire)
    put(tier, 1)
    wire.silent = True
    start = time.monotonic()
    with pytest.raises(TierError, match="does not serve"):
        read(tier, 1)
    assert TIMEOUT_S / 2 < time.monotonic() - start < TIMEOUT_S + LATE_S
    wire.mend()
    wire.cut()
    assert read(tier, 1) == content(1)
    tier.close()


def test_a_server_that_is_not_there_is_an_error_and_not_a_failure_to_start() -> None:
    tier = tier_of("http://127.0.0.1:1", url="s3://kv-cache/nobody")
    start = time.monotonic()
    for call in (lambda: tier.exists([key(1)]), lambda: read(tier, 1), lambda: put(tier, 1)):
        with pytest.raises(TierError, match="s3:kv-cache/nobody does not serve"):
            call()
    assert time.monotonic() - start < 3 * TIMEOUT_S + LATE_S
    tier.close()


def test_a_connection_cut_in_an_answer_is_never_half_an_answer(wire: Wire) -> None:
    size = 1 << 20
    tier = tier_of(wire, size, ())
    whole = bytes(range(256)) * (size // 256)
    tier.put(key(1), memoryview(whole))
    into = memoryview(bytearray(size))
    wire.mend()
    wire.cut_after = size // 2
    with pytest.raises(TierError, match="does not serve"):
        tier.get_ranges(key(1), [ByteRange(0, size)], [into])
    wire.mend()
    tier.get_ranges(key(1), [ByteRange(0, size)], [into])
    assert into == whole
    tier.close()


def test_a_bucket_that_is_not_there_is_said_when_something_is_to_be_kept(s3: str) -> None:
    tier = tier_of(s3, url="s3://no-such-bucket/x")
    assert tier.exists([key(1)]) == (False,)
    with pytest.raises(TierError, match="there is no such bucket"):
        put(tier, 1)
    tier.close()


# ---- damage (TIER-4)


def stored(tier: S3Tier, number: int) -> bytearray:
    return bytearray(tier.bucket.get(tier.path_of(key(number)), [(0, tier.format.stored_bytes)])[0])


@pytest.mark.parametrize("place", [0, 8, 40, 4096, 4096 + SIZE - 1])
def test_a_damaged_object_is_refused_removed_and_can_be_put_again(s3: str, place: int) -> None:
    tier = tier_of(s3)
    put(tier, 1)
    value = stored(tier, 1)
    value[place] ^= 1
    tier.bucket.put(tier.path_of(key(1)), bytes(value))
    with pytest.raises(DamagedObjectError):
        read(tier, 1)
    assert tier.exists([key(1)]) == (False,)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    tier.close()


def test_an_object_that_was_cut_off_is_absent_and_is_replaced(s3: str) -> None:
    tier = tier_of(s3)
    put(tier, 1)
    tier.bucket.put(tier.path_of(key(1)), bytes(stored(tier, 1)[:-1]))
    assert tier.exists([key(1)]) == (False,)
    with pytest.raises(DamagedObjectError, match="gave 63 of 64 bytes"):
        read(tier, 1)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    tier.close()


def test_an_object_that_was_put_anew_with_other_bytes_is_served_with_them(s3: str) -> None:
    url = f"s3://kv-cache/anew-{next(_prefixes)}"
    one, two = tier_of(s3, url=url), tier_of(s3, url=url)
    put(one, 1)
    assert read(one, 1) == content(1)
    two.delete(key(1))
    two.put(key(1), memoryview(content(2)))
    assert read(one, 1) == content(2)
    one.close()
    two.close()


def test_an_object_that_outlived_its_time_is_a_miss_and_is_replaced(s3: str) -> None:
    now = time.time_ns()
    tier = tier_of(s3, ttl_s=3600, clock_ns=lambda: now)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    now += 3602 * 10**9
    assert tier.exists([key(1)]) == (False,)
    with pytest.raises(KeyError, match="outlived"):
        read(tier, 1)
    tier.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "http://kv-cache/x"}, "an S3 URL is s3://"),
        ({"timeout_s": 0}, "timeout_s must be between"),
        ({"timeout_s": 10**400}, "timeout_s must be between"),
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"retries": float("nan")}, "retries must be a whole number"),
        ({"ttl_s": 0}, "ttl_s must be between"),
        ({"ttl_s": float("nan")}, "ttl_s must be between .* got nan"),
        ({"ttl_s": 1e300}, "ttl_s must be between"),
        ({"endpoint": "localhost:9000"}, "endpoint is http://host:port or https://host:port, got 'localhost:9000'"),
        ({"endpoint": "http://"}, "got 'http://'"),
        ({"connections": 0}, "connections must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], reason: str) -> None:
    options = dict(options)
    with pytest.raises((TypeError, ValueError), match=reason):
        tier_of(options.pop("endpoint", "http://127.0.0.1:1"), **options)
