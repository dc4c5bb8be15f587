"""Messages: fixed lengths, versions named to each other, and no bytes that are not answered with an error."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import lamella
from lamella.reference.keys import ChunkKey, chunk_keys
from lamella.server import frames, protocol
from lamella.server.frames import RefusedError, decode_answer, decode_request, encode, pack_prefixes, unpack_keys
from lamella.server.handlers import Handlers, Peer
from lamella.server.protocol import PROTOCOL, Found, Lookup, Message, Ping, Pong, Refusal, Retrieve, Stats
from lamella.server.wire import ERROR, HEADER, MAGIC, MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Code, Kind
from protocol_fuzz import CHUNK_MAJOR, EXAMPLES, LAYERWISE, any_frames, fuzz
from server_driver import space_of, tokens


def raw(
    version: int = PROTOCOL_VERSION, kind: int = Kind.PING, number: int = 7, body: bytes = b"\x92\x01\x05"
) -> bytes:
    return HEADER.pack(MAGIC, version, kind, number) + body


@pytest.mark.parametrize("kind", Kind)
def test_a_message_comes_back_as_it_was_sent(kind: Kind) -> None:
    request = decode_request([encode(9, EXAMPLES[kind])])
    assert request == (kind, 9, EXAMPLES[kind])


def test_a_retrieve_has_the_same_length_whether_it_is_layer_major_or_not() -> None:
    lengths = {len(msgspec.msgpack.decode(encode(1, message)[HEADER.size :])) for message in (LAYERWISE, CHUNK_MAJOR)}
    assert lengths == {len(Retrieve.__struct_fields__)}
    assert msgspec.msgpack.decode(encode(1, CHUNK_MAJOR)[HEADER.size :])[-3:] == [None, None, 0]


@pytest.mark.parametrize("message", [*(one for exchange in PROTOCOL.values() for one in exchange), Refusal])
def test_no_field_of_any_message_can_be_left_out(message: type[Message]) -> None:
    assert all(field.required for field in msgspec.structs.fields(message))


def test_an_exported_handle_goes_on_the_wire_unchanged() -> None:
    handle = bytes(range(64))
    frame = encode(1, msgspec.structs.replace(LAYERWISE, events=(handle,)))
    assert handle in frame
    found = decode_request([frame]).message
    assert isinstance(found, Retrieve)
    assert found.events == (handle,)


@pytest.mark.parametrize("kind", Kind)
def test_one_field_more_or_less_is_refused(kind: Kind) -> None:
    fields = msgspec.msgpack.decode(encode(1, EXAMPLES[kind])[HEADER.size :])
    for wrong in ([*fields, 0], fields[:-1] if fields else [1]):
        with pytest.raises(RefusedError, match=f"not a {type(EXAMPLES[kind]).__name__}") as refused:
            decode_request([raw(kind=kind, body=msgspec.msgpack.encode(wrong))])
        assert (refused.value.code, refused.value.number) == (Code.MALFORMED, 7)


def test_mixed_versions_are_refused_with_both_versions_named() -> None:
    with pytest.raises(RefusedError) as refused:
        decode_request([raw(version=PROTOCOL_VERSION + 3)])
    assert refused.value.code is Code.VERSION
    assert refused.value.number == 7, "the header is the same in every version, so the answer finds its request"
    assert f"protocol {PROTOCOL_VERSION} (lamella {lamella.__version__})" in str(refused.value)
    assert f"protocol {PROTOCOL_VERSION + 3}" in str(refused.value)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RefusedError, match="unknown kind of message 77; known: 1 REGISTER, 2 LOOKUP") as refused:
        decode_request([raw(kind=77)])
    assert refused.value.code is Code.UNKNOWN_KIND


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "one frame, got 0"),
        ([raw(), b""], "one frame, got 2"),
        ([b""], "16 bytes of header, got 0"),
        ([raw()[:15]], "16 bytes of header, got 15"),
        ([b"HTTP" + raw()[4:]], "begins with b'LMLA', got b'HTTP'"),
        ([raw(body=b"")], "not a Ping"),
        ([raw(body=b"\x92\x01")], "not a Ping"),
        ([raw(body=b"\x92\xa1x\x05")], "not a Ping"),
        ([raw(body=b"\x92\x01\xff")], None),
        ([raw(body=b"\x92\x01\xfe")], "not a Ping"),
        ([raw(body=b"\x91" * 5000)], "not a Ping"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_what_is_wrong(bad: list[bytes], says: str | None) -> None:
    if says is None:
        assert decode_request(bad).message == Ping(1, -1)
        return
    with pytest.raises(RefusedError, match=says) as refused:
        decode_request(bad)
    assert refused.value.code is Code.MALFORMED


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(RefusedError, match=f"may have {MAX_MESSAGE_BYTES} bytes"):
        decode_request([raw(body=bytes(MAX_MESSAGE_BYTES))])
    huge = Refusal(Code.FAILED, "x" * MAX_MESSAGE_BYTES)
    with pytest.raises(ValueError, match="this Refusal has"):
        encode(1, huge, ERROR)


def test_more_chunks_than_a_message_may_name_are_refused() -> None:
    too_many = Lookup(1, bytes(32 * (1 << 16) + 32), 4, 0, -1, True)
    with pytest.raises(RefusedError, match="length <= 2097152"):
        decode_request([encode(1, too_many)])


def test_a_refusal_travels_as_an_error_of_the_same_kind() -> None:
    frame = frames.encode_refusal(RefusedError(Code.DRAINING, "stopping", 5))
    with pytest.raises(RefusedError, match="stopping") as refused:
        decode_answer([frame], Pong)
    assert (refused.value.code, refused.value.number) == (Code.DRAINING, 5)


# ---- whatever bytes come


@given(any_frames)
@example([HEADER.pack(MAGIC, PROTOCOL_VERSION, 3, 1) + b"\xdd\xff\xff\xff\xff"])
@example([HEADER.pack(MAGIC, PROTOCOL_VERSION, 2, 1) + b"\x96\x01\xc6\xff\xff\xff\xff"])
def test_any_bytes_are_a_message_or_are_refused(found: list[bytes]) -> None:
    try:
        request = decode_request(found)
    except RefusedError as refused:
        assert frames.encode_refusal(refused)[: len(MAGIC)] == MAGIC
    else:
        assert isinstance(request.message, PROTOCOL[request.kind].request)
        assert decode_request([encode(request.number, request.message)]) == request, "what was read means one thing"


@given(any_frames)
def test_any_bytes_are_an_answer_or_are_refused(found: list[bytes]) -> None:
    try:
        _number, answer = decode_answer(found, Found)
    except RefusedError:
        return
    assert isinstance(answer, Found)


def check_fuzzed(counts: Counter[str]) -> None:
    assert counts["refused: malformed"] > 100
    assert {f"answered: {kind}" for kind in ("REGISTER", "LOOKUP", "STORE", "RELEASE")} <= set(counts), (
        "some get through"
    )


def test_the_server_s_rules_survive_any_bytes(tmp_path: Path) -> None:
    check_fuzzed(fuzz(tmp_path, examples=25))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_server_s_rules_survive_ten_minutes_of_any_bytes(tmp_path: Path) -> None:
    check_fuzzed(fuzz(tmp_path, seconds=600))


# ---- keys


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4))
def test_keys_come_back_in_the_rank_s_own_space(document: list[int], last: int) -> None:
    space, rank = space_of(), space_of(rank=1, ranks=2)
    sent = chunk_keys(space, [*tokens(*document[:-1]), *[document[-1]] * last], partial=True)
    found = unpack_keys(rank.digest(), pack_prefixes(sent), 4, sent[-1].num_tokens)
    assert found == tuple(key._replace(space=rank.digest()) for key in sent)


def test_prefixes_that_are_none_are_refused() -> None:
    with pytest.raises(RefusedError, match="32 bytes each, got 33 in all"):
        unpack_keys(bytes(32), bytes(33), 4, 4)
    for last in (0, 5):
        with pytest.raises(RefusedError, match=f"between 1 and 4 tokens, got last_tokens {last}"):
            unpack_keys(bytes(32), bytes(32), 4, last)
    short = ChunkKey(bytes(32), bytes(32), 2)
    with pytest.raises(ValueError, match="only a sequence's last chunk can be shorter"):
        pack_prefixes([short, replace_tokens(short, 4)])


def replace_tokens(key: ChunkKey, num_tokens: int) -> ChunkKey:
    return key._replace(num_tokens=num_tokens)


# ---- handlers


class Wrong:
    def lookup(self, message: Retrieve, peer: Peer) -> Found:
        raise AssertionError

    def ping(self, message: Ping, peer: Peer) -> Found:
        raise AssertionError

    def stats(self, message: Stats) -> protocol.StatsReport:
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "handler", "says"),
    [
        (Kind.LOOKUP, Wrong().lookup, "LOOKUP takes (Lookup, Peer).*Wrong.lookup takes (Retrieve, Peer)"),
        (Kind.PING, Wrong().ping, "PING takes (Ping, Peer) and is answered by Pong.*Wrong.ping.*returns Found"),
        (Kind.STATS, Wrong().stats, "STATS takes (Stats, Peer).*Wrong.stats takes (Stats)"),
    ],
)
def test_a_handler_that_is_not_the_protocol_s_is_refused_with_both_named(kind: Kind, handler: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says.replace("(", r"\(").replace(")", r"\)")):
        Handlers().enter(kind, handler)


def test_a_kind_has_one_handler_and_every_kind_has_one() -> None:
    def ping(message: Ping, peer: Peer) -> Pong:
        return Pong(True, False, 0)

    handlers = Handlers()
    handlers.enter(Kind.PING, ping)
    with pytest.raises(RuntimeError, match="PING is answered by .*ping already, so not by .*ping"):
        handlers.enter(Kind.PING, ping)
    with pytest.raises(RuntimeError, match="no handler answers REGISTER, LOOKUP"):
        handlers.check_complete()


def test_every_field_has_a_bound(tmp_path: Path) -> None:
    """No message can make the other side hold more than a frame's bytes, nor a number that no field expects."""
    for exchange in PROTOCOL.values():
        for name, hint in get_type_hints(exchange.request, include_extras=True).items():
            assert hint not in (int, str, bytes), f"{exchange.request.__name__}.{name} has no bound"
