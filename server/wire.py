"""Sizes, numbers and field types of the protocol; what each message means stands in `lamella.server.protocol`."""

from __future__ import annotations

import enum
import struct
from typing import Annotated, Final, TypeAlias

try:
    import msgspec
except ImportError as missing:
    raise ImportError("the cache server needs msgspec: pip install 'lamella[server]'") from missing

PROTOCOL_VERSION: Final = 2
MAGIC: Final = b"LMLA"
HEADER: Final = struct.Struct("<4sHHQ")
"""Magic, protocol version, kind, number of the request."""
MAX_MESSAGE_BYTES: Final = 8 << 20
MAX_CHUNKS: Final = 1 << 16
"""Of one lookup or store."""
PREFIX_BYTES: Final = 32
EVERY_RANK: Final = -1

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Bytes64: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Address: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Offset: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=EVERY_RANK, lt=1 << 16)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
Blob: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4096)]
Prefix: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=PREFIX_BYTES)]
Prefixes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=PREFIX_BYTES * MAX_CHUNKS)]
Tables: TypeAlias = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=1 << 20)], ...], msgspec.Meta(max_length=64)
]
"""Block ids of a sequence from its first token on, 32-bit little-endian, one table a kernel group."""
Events: TypeAlias = Annotated[tuple[Blob, ...], msgspec.Meta(max_length=4096)]
Width: TypeAlias = Count | Annotated[tuple[Count, ...], msgspec.Meta(max_length=1024)]


class Kind(enum.IntEnum):
    """What a message asks; its answer has the same number."""

    REGISTER = 1
    LOOKUP = 2
    RETRIEVE = 3
    STORE = 4
    RELEASE = 5
    ABORT = 6
    STATS = 7
    PING = 8


ERROR: Final = 0xFFFF
"""Number of the answer that is a `Refusal`."""


class Code(enum.Enum):
    """Why a request was refused."""

    MALFORMED = "malformed"
    VERSION = "version"
    UNKNOWN_KIND = "unknown_kind"
    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_LEASE = "unknown_lease"
    REFUSED = "refused"
    DRAINING = "draining"
    FAILED = "failed"
    INTERNAL = "internal"
