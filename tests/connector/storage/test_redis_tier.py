"""What the Redis tier does beyond what every tier promises: authentication, TLS, time-outs, restarts, damage."""

import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamella.connector.storage.redis_server import Question, RedisServer
from lamella.connector.storage.redis_tier import MAX_VALUE_BYTES, RedisTier
from lamella.connector.storage.tier import DamagedObjectError, TierError
from lamella.reference.layout import ByteRange
from storage_servers import REDIS_MISSING, RedisProcess, Wire, redis_server
from tier_objects import RUNS, SIZE, WHOLE, content, key, put, read

pytestmark = pytest.mark.skipif(REDIS_MISSING is not None, reason=str(REDIS_MISSING))

TIMEOUT_S = 1.0
LATE_S = 1.0  # what a busy machine may add


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server that the test may kill."""
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def wire(own: RedisProcess) -> Iterator[Wire]:
    with Wire(own.port) as made:
        yield made


def tier_of(server: RedisProcess | Wire, **options: Any) -> RedisTier:
    return RedisTier(f"redis://127.0.0.1:{server.port}/0", SIZE, RUNS, **{"timeout_s": TIMEOUT_S, **options})


def client_of(server: RedisProcess) -> Any:
    import redis

    return redis.Redis(port=server.port)


def test_a_slice_costs_its_own_bytes_on_the_wire_and_one_question(own: RedisProcess, wire: Wire) -> None:
    tier = RedisTier(f"redis://127.0.0.1:{wire.port}/0", 1 << 20, (1 << 17,) * 8)
    tier.put(key(1), memoryview(bytes(1 << 20)))
    into = [[memoryview(bytearray(1 << 17))]]
    assert tier.get_leading([key(1)], [ByteRange(0, 1 << 17)], into).error is None
    wire.mend()
    with client_of(own) as client:
        before = client.info("commandstats")["cmdstat_getrange"]["calls"]
        assert tier.get_leading([key(1)], [ByteRange(1 << 17, 1 << 17)], into).error is None
        assert client.info("commandstats")["cmdstat_getrange"]["calls"] == before + 1
    assert 1 << 17 <= wire.answered < (1 << 17) + 64, "neither the header again nor a neighbour"
    tier.close()


def test_a_prefix_is_one_round_trip_whatever_its_length(wire: Wire) -> None:
    tier = tier_of(wire)
    for number in range(50):
        put(tier, number)
    into = [[memoryview(bytearray(SIZE))] for _ in range(50)]
    wire.bytes_per_s = 50 * 5000 / 0.5  # 50 objects with their headers take half a second, in whatever pieces they come
    start = time.monotonic()
    assert tier.get_leading([key(number) for number in range(50)], WHOLE, into) == (50, None)
    assert time.monotonic() - start < 0.5 + LATE_S
    assert [bytes(view) for (view,) in into] == [content(number) for number in range(50)]
    tier.close()


@pytest.mark.parametrize("size", [1 << 16, 1 << 19, 1 << 21])
def test_the_next_answer_is_under_way_before_this_one_is_used_however_long_it_is(own: RedisProcess, size: int) -> None:
    server = RedisServer(f"redis://127.0.0.1:{own.port}/0", cluster=False, timeout_s=10, retries=0)
    with client_of(own) as client:
        client.set("value", bytes(size))
        answers = server.ask_in_turn([Question(("GETRANGE", "value", 0, size - 1), size)] * 4)
        assert next(answers) == bytes(size)
        deadline = time.monotonic() + 5
        while client.info("commandstats")["cmdstat_getrange"]["calls"] < 2:
            assert time.monotonic() < deadline, "the second question waits for whoever takes the first answer"
            time.sleep(0.01)
        assert list(answers) == [bytes(size)] * 3
    server.close()


# ---- who may ask


def test_authentication_is_the_urls_and_stays_out_of_names_and_errors(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--requirepass", "sesame") as server:
        known = RedisTier(f"redis://:sesame@127.0.0.1:{server.port}/0", SIZE)
        put(known, 1)
        assert read(known, 1) == content(1)
        assert known.name == f"redis:127.0.0.1:{server.port}/0"
        wrong = RedisTier(f"redis://:guess@127.0.0.1:{server.port}/0", SIZE)
        for stranger in (wrong, tier_of(server)):
            with pytest.raises(TierError, match="does not serve") as refused:
                stranger.exists([key(1)])
            assert "guess" not in str(refused.value)
            stranger.close()
        known.close()


def test_tls_is_verified(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme", reason="trustme is not installed (it comes with the dev extra)")
    authority, other = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "other", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    other.cert_pem.write_to_path(files["other"])
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    from storage_servers import free_port

    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(files["ca"])]
    options += ["--tls-cert-file", str(files["cert"]), "--tls-key-file", str(files["key"])]
    with redis_server(tmp_path / "redis", *options):
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs="
        tier = RedisTier(url + str(files["ca"]), SIZE)
        put(tier, 1)
        assert read(tier, 1) == content(1)
        tier.close()
        deceived = RedisTier(url + str(files["other"]), SIZE, timeout_s=TIMEOUT_S)
        with pytest.raises(TierError, match="does not serve") as refused:
            deceived.exists([key(1)])
        cause: BaseException | None = refused.value
        while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
            cause = cause.__cause__ or cause.__context__
        assert cause is not None
        deceived.close()


# ---- servers that fail


def test_a_killed_server_is_an_error_at_once_and_its_restart_serves_again(own: RedisProcess) -> None:
    tier = tier_of(own)
    put(tier, 1)
    own.kill()
    start = time.monotonic()
    for call in (lambda: tier.exists([key(1)]), lambda: read(tier, 1), lambda: put(tier, 2)):
        with pytest.raises(TierError, match="does not serve"):
            call()
    assert time.monotonic() - start < 3 * TIMEOUT_S + LATE_S
    own.start()
    assert tier.exists([key(1)]) == (False,), "it keeps nothing on disk"
    put(tier, 1)
    assert read(tier, 1) == content(1)
    tier.close()


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_server_that_falls_silent_costs_the_time_out_and_no_more(own: RedisProcess, retries: int) -> None:
    tier = tier_of(own, retries=retries)
    put(tier, 1)
    own.hold()
    start = time.monotonic()
    with pytest.raises(TierError, match=r"does not serve: .*[Tt]ime"):
        read(tier, 1)
    assert time.monotonic() - start < TIMEOUT_S + LATE_S
    own.go_on()
    assert read(tier, 1) == content(1)
    tier.close()


def test_a_server_that_was_never_there_is_an_error_and_not_a_failure_to_start() -> None:
    tier = RedisTier("redis://127.0.0.1:1/0", SIZE, timeout_s=TIMEOUT_S)
    clustered = RedisTier("redis://127.0.0.1:1/0", SIZE, cluster=True, timeout_s=TIMEOUT_S)
    for one in (tier, clustered):
        with pytest.raises(TierError, match=r"redis:127\.0\.0\.1:1/0 does not serve"):
            one.exists([key(1)])
        one.close()


def test_a_connection_cut_in_an_answer_is_tried_again_and_then_an_error(own: RedisProcess, wire: Wire) -> None:
    tier = RedisTier(f"redis://127.0.0.1:{wire.port}/0", 1 << 20, timeout_s=TIMEOUT_S)
    whole = bytes(range(256)) * (1 << 12)
    tier.put(key(1), memoryview(whole))
    into = memoryview(bytearray(1 << 20))
    wire.mend()
    wire.cut_after = 1 << 19
    with pytest.raises(TierError, match="does not serve"):
        tier.get_ranges(key(1), [ByteRange(0, 1 << 20)], [into])
    wire.mend()
    tier.get_ranges(key(1), [ByteRange(0, 1 << 20)], [into])
    assert bytes(into) == whole
    wire.cut()
    tier.get_ranges(key(1), [ByteRange(0, 1 << 20)], [into])  # a cut between two questions costs nothing
    tier.close()


def test_a_full_server_refuses_and_nothing_of_the_object_is_visible(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        tier = RedisTier(f"redis://127.0.0.1:{server.port}/0", 1 << 20)
        kept, refusal = 0, None
        for number in range(10):
            try:
                tier.put(key(number), memoryview(bytes(1 << 20)))
            except TierError as error:
                refusal = error
                break
            kept += 1
        assert "memory" in str(refusal)
        assert tier.exists([key(number) for number in range(10)]) == tuple(number < kept for number in range(10))
        tier.close()


def test_an_object_is_kept_for_its_time(own: RedisProcess) -> None:
    tier = tier_of(own, ttl_s=30)
    put(tier, 1)
    with client_of(own) as client:
        assert 29_000 < client.pttl(tier.name_of(key(1))) <= 30_000
        client.pexpire(tier.name_of(key(1)), 0)
    assert tier.exists([key(1)]) == (False,)
    with pytest.raises(KeyError):
        read(tier, 1)
    tier.close()


# ---- damage (TIER-4)


@pytest.mark.parametrize("place", [0, 8, 40, 4096, 4096 + SIZE - 1])
@pytest.mark.parametrize("known", [True, False], ids=["header-read-before", "first-read"])
def test_a_damaged_value_is_refused_removed_and_can_be_put_again(own: RedisProcess, place: int, known: bool) -> None:
    tier = tier_of(own)
    put(tier, 1)
    if known:
        read(tier, 1)
    with client_of(own) as client:
        byte = client.getrange(tier.name_of(key(1)), place, place)
        client.setrange(tier.name_of(key(1)), place, bytes([byte[0] ^ 1]))
    if known and place < 4096:
        assert read(tier, 1) == content(1), "the header was verified before, and the bytes are good"
        tier = tier_of(own)
    with pytest.raises(DamagedObjectError):
        read(tier, 1)
    assert tier.exists([key(1)]) == (False,)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    tier.close()


def test_a_value_of_another_length_is_absent_and_is_replaced(own: RedisProcess) -> None:
    tier = tier_of(own)
    with client_of(own) as client:
        client.set(tier.name_of(key(1)), b"half an obj")
    assert tier.exists([key(1)]) == (False,)
    put(tier, 1)
    assert read(tier, 1) == content(1)
    tier.close()


def test_an_object_that_was_put_anew_with_other_bytes_is_served_with_them(own: RedisProcess) -> None:
    one, two = tier_of(own), tier_of(own)
    put(one, 1)
    assert read(one, 1) == content(1)
    two.delete(key(1))
    two.put(key(1), memoryview(content(2)))
    assert read(one, 1) == content(2)
    one.close()
    two.close()


def test_bytes_that_change_on_the_wire_are_not_served(wire: Wire) -> None:
    tier = tier_of(wire)
    for number in range(20):
        put(tier, number)
        wire.mend()
        wire.lie_at = 4096 + 300 - number * 15
        try:
            assert read(tier, number) == content(number)
        except TierError:
            pass
        finally:
            wire.mend()
            wire.cut()
    tier.close()


# ---- a cluster


def test_a_prefix_is_spread_over_the_nodes(cluster: list[RedisProcess]) -> None:
    tier = RedisTier(cluster[0].url, SIZE, RUNS, cluster=True, namespace="spread")
    for number in range(60):
        put(tier, number)
    into = [[memoryview(bytearray(SIZE))] for _ in range(60)]
    assert tier.get_leading([key(number) for number in range(60)], WHOLE, into) == (60, None)
    assert [bytes(view) for (view,) in into] == [content(number) for number in range(60)]
    for node in cluster:
        with client_of(node) as client:
            assert len(client.keys("spread:*")) > 5
    tier.close()


def test_a_dead_node_costs_its_own_objects_within_the_time_out_and_comes_back(tmp_path: Path) -> None:
    from storage_servers import redis_cluster

    with redis_cluster(tmp_path) as nodes:
        tier = RedisTier(nodes[0].url, SIZE, RUNS, cluster=True, timeout_s=TIMEOUT_S)
        for number in range(30):
            put(tier, number)
        nodes[2].kill()
        start = time.monotonic()
        served = refused = 0
        for number in range(4):
            try:
                assert read(tier, number) == content(number)
                served += 1
            except TierError:
                refused += 1
        assert served + refused == 4
        assert refused, "object 0 to 3 lie on all nodes"
        assert time.monotonic() - start < 4 * (TIMEOUT_S + LATE_S)
        tier.close()


# ---- arguments


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("http://host", {}, "a Redis URL is redis://"),
        ("redis:///0", {}, "got scheme 'redis' and host None"),
        ("redis://host/x", {}, "ends with the number of a database, got '/x'"),
        ("redis://:sesame@host/0?foo=1", {}, "options for host must be redis-py's.*'foo'"),
        ("rediss://host/0?ssl_ca_certs=/nowhere/ca.pem", {}, "ssl_ca_certs in the URL for host names /nowhere/ca.pem"),
        ("redis://host/0?ssl_ca_certs=ca.pem", {}, "those of TLS behind rediss://.*ssl_ca_certs"),
        ("redis://host", {"ttl_s": float("nan")}, "ttl_s must be between .* got nan"),
        ("redis://host", {"timeout_s": 0}, "timeout_s must be between 0.001 and 1,000,000,000 s, got 0"),
        ("redis://host", {"timeout_s": 10**400}, "timeout_s must be between"),
        ("redis://host", {"retries": -1}, "retries must be at least 0, got -1"),
        ("redis://host", {"retries": float("nan")}, "retries must be a whole number"),
        ("redis://host", {"ttl_s": 0}, "ttl_s must be between"),
        ("redis://host", {"ttl_s": 1e300}, "ttl_s must be between"),
        ("redis://host", {"object_bytes": MAX_VALUE_BYTES}, "store smaller chunks"),
    ],
)
def test_what_cannot_be_is_refused(url: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        RedisTier(url, **{"object_bytes": SIZE, **options})


def test_many_threads_may_ask_at_once(own: RedisProcess) -> None:
    tier = tier_of(own, timeout_s=10)
    for number in range(8):
        put(tier, number)
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(20):
            if read(tier, number) != content(number):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    tier.close()
