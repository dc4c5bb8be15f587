"""The circuit breaker, and the tier behind it."""

import pytest

from cache_driver import MemoryTier
from lamella.connector.storage.circuit import CircuitBreaker, CircuitState, GuardedTier
from lamella.connector.storage.tier import TierError
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange

KEY = ChunkKey(b"s" * 32, b"p" * 32, 4)


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def test_it_opens_after_failures_in_a_row_and_tries_again_after_a_while() -> None:
    clock = Clock()
    breaker = CircuitBreaker("disk", 2, 100, clock)
    breaker.failed("first")
    breaker.succeeded()
    breaker.failed("second")
    assert breaker.state is CircuitState.CLOSED, "a success in between starts the count anew"
    breaker.failed("third")
    assert (breaker.state, breaker.allows()) == (CircuitState.OPEN, False)
    clock.ns = 100
    assert breaker.state is CircuitState.HALF_OPEN
    assert [breaker.allows(), breaker.allows()] == [True, False], "one try at a time"
    breaker.failed("still down")
    assert breaker.state is CircuitState.OPEN
    clock.ns = 200
    assert breaker.allows()
    breaker.succeeded()
    assert (breaker.state, breaker.allows()) == (CircuitState.CLOSED, True)


def test_an_open_circuit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    breaker = CircuitBreaker("disk", 1, 100, Clock())
    for _ in range(5):
        breaker.failed("no space left")
    assert [record.message for record in caplog.records] == ["disk is left alone after 1 failures: no space left"]


def test_a_guarded_tier_is_not_asked_while_its_circuit_is_open() -> None:
    clock, memory = Clock(), MemoryTier(8)
    tier = GuardedTier(memory, CircuitBreaker("memory", 2, 100, clock))
    memory.down = True
    for _ in range(2):
        with pytest.raises(TierError, match="is down"):
            tier.exists([KEY])
    memory.down = False
    with pytest.raises(TierError, match="left alone"):
        tier.exists([KEY])
    clock.ns = 100
    assert tier.exists([KEY]) == (False,)
    assert tier.breaker.state is CircuitState.CLOSED


def test_a_missing_object_and_a_wrong_call_are_no_failures_of_the_tier() -> None:
    tier = GuardedTier(MemoryTier(8), CircuitBreaker("memory", 1, 100, Clock()))
    with pytest.raises(KeyError):
        tier.get_ranges(KEY, [ByteRange(0, 8)], [memoryview(bytearray(8))])
    with pytest.raises(ValueError, match="8 bytes, got 3"):
        tier.put(KEY, memoryview(b"abc"))
    assert tier.breaker.state is CircuitState.CLOSED


@pytest.mark.parametrize(("failures", "retry_ns", "reason"), [(0, 1, "max_failures"), (1, -1, "retry_after_ns")])
def test_impossible_settings_are_refused(failures: int, retry_ns: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CircuitBreaker("disk", failures, retry_ns, Clock())
