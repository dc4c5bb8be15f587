"""Messages to frames and back; whatever bytes come, the answer is a message or a `RefusedError`, never a crash."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import msgspec

import lamella
from lamella.reference.keys import ChunkKey
from lamella.server.protocol import KIND_OF, PROTOCOL, Message, Phase, Refusal, Store
from lamella.server.wire import (
    ERROR,
    HEADER,
    MAGIC,
    MAX_MESSAGE_BYTES,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Code,
    Kind,
)

_encoder = msgspec.msgpack.Encoder()
_make_key = functools.partial(tuple.__new__, ChunkKey)  # `ChunkKey._make` in half the time: look-ups name hundreds
_Answer = TypeVar("_Answer", bound=Message)


class RefusedError(RuntimeError):
    """A request was not obeyed, for a reason that the other side is told."""

    def __init__(self, code: Code, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.number = number
        """Of the request, as far as its header could be read."""


class Request(NamedTuple):
    """A request as it came."""

    kind: Kind
    number: int
    message: Message


@functools.cache
def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def encode(number: int, message: Message, kind: int | None = None) -> bytes:
    """A frame.

    Args:
        number: of the request; its answer has the same.
        kind: of an answer; a request knows its own.

    Raises:
        ValueError: the message is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES - HEADER.size:
        raise ValueError(f"a message may have {MAX_MESSAGE_BYTES} bytes, this {type(message).__name__} has {len(body)}")
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, KIND_OF[type(message)] if kind is None else kind, number) + body


def encode_refusal(refused: RefusedError, number: int | None = None) -> bytes:
    """The frame that answers a request that was refused: `number`, or the one that the refusal itself names."""
    return encode(refused.number if number is None else number, Refusal(refused.code, str(refused)), ERROR)


def decode_request(frames: Sequence[bytes]) -> Request:
    """The request in a message's frames.

    Raises:
        RefusedError: they are none; the error carries the request's number if there was one to read.
    """
    kind, number, body = _open(frames)
    if kind not in PROTOCOL:
        known = ", ".join(f"{one.value} {one.name}" for one in Kind)
        raise RefusedError(Code.UNKNOWN_KIND, f"unknown kind of message {kind}; known: {known}", number)
    found = PROTOCOL[Kind(kind)].request
    return Request(Kind(kind), number, _decode(found, body, number))


def decode_answer(frames: Sequence[bytes], expected: type[_Answer]) -> tuple[int, _Answer]:
    """The number of an answer, and the answer.

    Raises:
        RefusedError: the server refused, or the frames are no answer of this kind.
    """
    kind, number, body = _open(frames)
    if kind == ERROR:
        refusal = _decode(Refusal, body, number)
        raise RefusedError(refusal.code, refusal.message, number)
    return number, _decode(expected, body, number)


def number_of(frames: Sequence[bytes]) -> int:
    """The number of the request that a message answers or is.

    Raises:
        RefusedError: there is no header to read it from.
    """
    return _open(frames)[1]


def _open(frames: Sequence[bytes]) -> tuple[int, int, memoryview]:
    if len(frames) != 1:
        raise RefusedError(Code.MALFORMED, f"a message has one frame, got {len(frames)}")
    frame = memoryview(frames[0])
    if len(frame) > MAX_MESSAGE_BYTES:
        raise RefusedError(Code.MALFORMED, f"a message may have {MAX_MESSAGE_BYTES} bytes, got {len(frame)}")
    if len(frame) < HEADER.size:
        raise RefusedError(Code.MALFORMED, f"a message begins with {HEADER.size} bytes of header, got {len(frame)}")
    magic, version, kind, number = HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise RefusedError(Code.MALFORMED, f"a message begins with {MAGIC!r}, got {magic!r}")
    if version != PROTOCOL_VERSION:
        raise RefusedError(
            Code.VERSION,
            f"this side speaks protocol {PROTOCOL_VERSION} (lamella {lamella.__version__}), the other protocol "
            f"{version}: install the same version on both",
            number,
        )
    return kind, number, frame[HEADER.size :]


def _decode(kind: type[_Answer], body: memoryview, number: int) -> _Answer:
    try:
        found: _Answer = _decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as wrong:
        raise RefusedError(Code.MALFORMED, f"not a {kind.__name__}: {wrong}", number) from None
    return found


# ---- keys


def pack_prefixes(keys: Sequence[ChunkKey]) -> bytes:
    """The keys' prefixes side by side; the key space is the session's, whatever stands in the keys.

    Raises:
        ValueError: another chunk than the last has fewer tokens than the first.
    """
    sizes = {key.num_tokens for key in keys[:-1]}
    if len(sizes) > 1 or (sizes and keys[-1].num_tokens > min(sizes)):
        raise ValueError(f"only a sequence's last chunk can be shorter, got {[key.num_tokens for key in keys]}")
    return b"".join([key.prefix for key in keys])


def allocation(session: int, keys: Sequence[ChunkKey], first_chunk: int, rank: int) -> Store:
    """The message that asks for slots.

    Args:
        session: of the one who asks.
        keys: of the sequence's chunks from chunk 0 on.
        first_chunk: the first that is to be stored.
        rank: for whom; `EVERY_RANK`: for all that lack something.

    Raises:
        ValueError: a first chunk that is not among them.
    """
    if not 0 <= first_chunk <= len(keys):
        raise ValueError(f"first_chunk must be between 0 and {len(keys)}, the sequence's chunks, got {first_chunk}")
    wanted = keys[first_chunk:]
    after, last = keys[first_chunk - 1].prefix if first_chunk else b"", wanted[-1].num_tokens if wanted else 0
    named = pack_prefixes(wanted), last, first_chunk, after
    return Store(session, Phase.ALLOCATE, 0, *named, rank, "", (), 0, 0, -1, None)


def unpack_keys(space: bytes, prefixes: bytes, chunk_tokens: int, last_tokens: int) -> tuple[ChunkKey, ...]:
    """The keys in a key space.

    Args:
        space: digest of a rank's key space, 32 bytes.
        chunk_tokens: of every chunk but the last.
        last_tokens: of the last chunk.

    Raises:
        RefusedError: bytes that are no prefixes, or a last chunk that is none.
    """
    if len(prefixes) % PREFIX_BYTES:
        raise RefusedError(Code.MALFORMED, f"prefixes have {PREFIX_BYTES} bytes each, got {len(prefixes)} in all")
    if not prefixes:
        return ()
    if not 1 <= last_tokens <= chunk_tokens:
        raise RefusedError(
            Code.REFUSED, f"the last chunk has between 1 and {chunk_tokens} tokens, got last_tokens {last_tokens}"
        )
    end = len(prefixes) - PREFIX_BYTES
    cut = [prefixes[start : start + PREFIX_BYTES] for start in range(0, end, PREFIX_BYTES)]
    keys = map(_make_key, zip(repeat(space), cut, repeat(chunk_tokens)))
    return (*keys, ChunkKey(space, prefixes[end:], last_tokens))
