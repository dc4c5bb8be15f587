"""What every tier promises (TIER-1 to TIER-4), each kind with its real server."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamella.connector.storage.circuit import CircuitBreaker, GuardedTier
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.s3_tier import S3Tier
from lamella.connector.storage.tier import Tier, TierError
from lamella.reference.layout import ByteRange
from tier_objects import RUNS, SIZE, TIERS, WHOLE, content, key, make_tier, put, read


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = make_tier(request.param, tmp_path, request.getfixturevalue)
    yield made
    made.close()


@pytest.fixture(params=TIERS, scope="module")
def full_tier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    """Holds objects 1 to 3 and is only read."""
    made = make_tier(request.param, tmp_path_factory.mktemp("full"), request.getfixturevalue)
    for number in (1, 2, 3):
        put(made, number)
    yield made
    made.close()


def test_what_was_put_is_there_and_nothing_else(tier: Tier) -> None:
    assert tier.exists([key(1), key(2)]) == (False, False)
    put(tier, 1)
    assert tier.exists([key(2), key(1)]) == (False, True)
    assert tier.exists([key(1)._replace(num_tokens=3)]) == (False,), "a shorter chunk is another object"
    assert read(tier, 1) == content(1)


def test_putting_again_changes_nothing(tier: Tier) -> None:
    put(tier, 1)
    tier.put(key(1), memoryview(content(2)))
    assert read(tier, 1) == content(1)


def test_a_missing_object_is_a_key_error_and_deleting_it_is_false(tier: Tier) -> None:
    with pytest.raises(KeyError):
        read(tier, 1)
    assert tier.delete(key(1)) is False
    put(tier, 1)
    assert tier.delete(key(1)) is True
    assert tier.exists([key(1)]) == (False,)


def test_an_error_keeps_no_buffer_alive(tier: Tier) -> None:
    """Memory that an engine gives back as it ends was not to be unmapped, after one file that had gone."""

    def asked() -> weakref.ref[memoryview]:
        buffer = memoryview(bytearray(SIZE))
        with pytest.raises(KeyError):
            tier.get_ranges(key(1), WHOLE, [buffer])
        return weakref.ref(buffer)

    gc.collect()
    gc.disable()
    try:
        assert asked()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("wanted", "num_bytes"),
    [(ByteRange(SIZE - 1, 2), 2), (ByteRange(-1, 1), 1), (ByteRange(0, 0), 0), (ByteRange(0, 4), 3)],
)
def test_a_range_outside_or_a_buffer_of_another_length_is_refused(
    tier: Tier, wanted: ByteRange, num_bytes: int
) -> None:
    put(tier, 1)
    with pytest.raises(ValueError, match=r"outside an object|holds 3 bytes"):
        tier.get_ranges(key(1), [wanted], [memoryview(bytearray(num_bytes))])
    with pytest.raises(ValueError, match="1 ranges and 0 buffers"):
        tier.get_ranges(key(1), WHOLE, [])


def test_data_of_another_length_is_refused(tier: Tier) -> None:
    with pytest.raises(ValueError, match="64 bytes, got 3"):
        tier.put(key(1), memoryview(b"abc"))


def test_closing_twice_does_nothing(tier: Tier) -> None:
    tier.close()
    tier.close()


wanted_ranges = st.lists(
    st.integers(0, SIZE - 1).flatmap(
        lambda start: st.integers(1, SIZE - start).map(lambda count: ByteRange(start, count))
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=max(10, settings.default.max_examples // 4), suppress_health_check=[HealthCheck.too_slow])
@given(ranges=wanted_ranges)
def test_ranges_are_the_objects_bytes_in_any_order_and_overlap(full_tier: Tier, ranges: list[ByteRange]) -> None:
    expected = b"".join(content(1)[wanted.offset : wanted.offset + wanted.num_bytes] for wanted in ranges)
    assert read(full_tier, 1, ranges) == expected


def buffers_for(count: int, ranges: list[ByteRange]) -> list[list[memoryview]]:
    return [[memoryview(bytearray(wanted.num_bytes)) for wanted in ranges] for _ in range(count)]


def test_a_slice_of_a_prefix_is_read_up_to_the_first_object_that_is_missing(full_tier: Tier) -> None:
    ranges = [ByteRange(0, RUNS[0]), ByteRange(32, 32)]
    into = buffers_for(4, ranges)
    found = full_tier.get_leading([key(number) for number in (2, 1, 9, 3)], ranges, into)
    assert found.num_objects == 2
    assert isinstance(found.error, KeyError)
    for number, buffers in zip((2, 1), into, strict=False):
        assert b"".join(buffers) == content(number)[:8] + content(number)[32:]


def test_a_whole_prefix_is_read_without_an_error(full_tier: Tier) -> None:
    into = buffers_for(3, WHOLE)
    assert full_tier.get_leading([key(number) for number in (1, 2, 3)], WHOLE, into) == (3, None)
    assert [bytes(buffers[0]) for buffers in into] == [content(1), content(2), content(3)]
    assert full_tier.get_leading([], WHOLE, []) == (0, None)


def test_what_a_read_of_a_prefix_gives_back_keeps_no_buffer_alive(full_tier: Tier) -> None:
    memory = bytearray(2 * SIZE)
    with memoryview(memory) as whole:
        views = [[whole[:SIZE]], [whole[SIZE:]]]
        found = full_tier.get_leading([key(1), key(9)], WHOLE, views)
        for (view,) in views:
            view.release()
    memory.append(0)  # BufferError if a view were alive
    assert found.num_objects == 1


def test_a_range_outside_is_refused_for_a_prefix_too(full_tier: Tier) -> None:
    with pytest.raises(ValueError, match="outside an object"):
        full_tier.get_leading([key(1)], [ByteRange(SIZE, 1)], buffers_for(1, [ByteRange(SIZE, 1)]))


def test_objects_of_another_tenant_model_or_adapter_are_misses(full_tier: Tier) -> None:
    assert full_tier.exists([key(1), key(1, space=b"t" * 32)]) == (True, False)


@pytest.mark.parametrize("kind", ["file", "redis", "s3"])
def test_objects_of_another_layout_are_misses_beside_which_one_lives(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def opened(runs: tuple[int, ...]) -> Tier:
        if kind == "file":
            return FileTier(tmp_path / "kv", SIZE, runs)
        if kind == "redis":
            return RedisTier(request.getfixturevalue("redis").url, SIZE, runs, namespace="layouts")
        return S3Tier("s3://kv-cache/layouts", SIZE, runs, endpoint=request.getfixturevalue("s3"))

    mine = opened(RUNS)
    put(mine, 1)
    for runs in ((SIZE,), (8, 8, 32, 16)):
        other = opened(runs)
        assert other.exists([key(1)]) == (False,)
        with pytest.raises(KeyError):
            read(other, 1)
        other.close()
    assert read(mine, 1) == content(1)
    mine.close()


def test_while_the_circuit_is_open_a_prefix_is_not_asked_for(tmp_path: Path) -> None:
    memory = make_tier("memory", tmp_path, lambda name: None)
    put(memory, 1)
    guarded = GuardedTier(memory, CircuitBreaker("memory", 1, 10**9, lambda: 0))
    memory.down = True  # type: ignore[attr-defined]
    assert isinstance(guarded.get_leading([key(1)], WHOLE, buffers_for(1, WHOLE)).error, TierError)
    memory.down = False  # type: ignore[attr-defined]
    found = guarded.get_leading([key(1)], WHOLE, buffers_for(1, WHOLE))
    assert found.num_objects == 0
    assert "left alone" in str(found.error)
