"""The bytes that tiers keep of an object: a header that says what it is, then the object.

    | magic, version, sizes, key, time written | one checksum a run | BLAKE3 of all that | 0 ... | object bytes |
    └────────────────────────── header, whole pages ─────────────────────────────────────┘

A run is what a layer occupies in one piece: a slice is a few neighbouring runs. Each run has its own checksum, so a
slice is verified alone, without the rest of its object (FMT-1). Ranges that cut a run are served by reading the whole
run; no byte is served that was not verified (FMT-2).

What decides how an object is read, the format version and the lengths of its runs, makes up the `tag`, and tiers keep
objects under it. Entries of another version or layout are therefore not found, like those of another model, adapter,
element type or tenant, which are other key spaces (FMT-3).

XXH3 (64 bits) finds damage, at the speed of memory; it is no defence against an adversary who can write to the store.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from blake3 import blake3
from xxhash import xxh3_64, xxh3_64_intdigest

from lamella.connector.storage.tier import DamagedObjectError
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ByteRange, ObjectLayout

FORMAT_VERSION: Final = 2
PAGE_BYTES: Final = 4096
_KNOWN_SLICES: Final = 512
_MAGIC: Final = b"LAMELLA\0"
_FIELDS: Final = struct.Struct("<8sIIQQ32s32sQ")  # magic, version, runs, object bytes, tokens, space, prefix, written
_DIGEST_BYTES: Final = 32
_PREAMBLE: Final = struct.Struct("<8sI")
checksum_of: Final = xxh3_64_intdigest
"""The checksum of a run that is in hand as a whole."""


class Header(NamedTuple):
    """What a header says beyond what its reader knew: when the object was written, and its runs' checksums."""

    written_ns: int
    checksums: tuple[int, ...]


class Span(NamedTuple):
    """The whole runs around a range: where they lie, the first of them, and where in them the range begins."""

    source: ByteRange
    first_run: int
    inset: int
    is_whole: bool
    """Whether the range cuts no run."""
    is_run: bool
    """Whether the range is one run, neither more nor less."""


class RunRead(NamedTuple):
    """Whole runs to read: object bytes `source` into `target`; then `copies` from parts of it to where they belong."""

    source: ByteRange
    target: memoryview
    first_run: int
    copies: tuple[tuple[memoryview, memoryview], ...]


def layer_runs(layout: ObjectLayout) -> tuple[int, ...]:
    """Lengths of the runs that a layout's objects consist of, in order: each layer's pieces, and the padding between.

    >>> from lamella.reference.geometry import KVGeometry
    >>> layer_runs(ObjectLayout.single(KVGeometry(3, 2, 2, 4, 2, 8), 4))
    (128, 128, 128, 128, 128, 128)
    """
    ranges = sorted(
        found
        for index, group in enumerate(layout.groups)
        for layer in range(group.geometry.num_layers)
        for found in layout.ranges(index, layer, 1, 0, layout.chunk_tokens)
    )
    runs, end = [], 0
    for found in ranges:
        if found.offset > end:
            runs.append(found.offset - end)
        runs.append(found.num_bytes)
        end = found.offset + found.num_bytes
    return tuple(runs)


class ObjectFormat:
    """How objects of one layout are kept. A value: nothing of it changes.

    Args:
        object_bytes: length of an object.
        run_bytes: lengths of its runs, in order; empty: the object is one run.

    Raises:
        ValueError: object_bytes below 1, an empty run, or runs that do not add up to the object.
    """

    def __init__(self, object_bytes: int, run_bytes: Sequence[int] = ()) -> None:
        if object_bytes < 1:
            raise ValueError(f"object_bytes must be at least 1, got {object_bytes}")
        runs = tuple(run_bytes) or (object_bytes,)
        if min(runs) < 1 or sum(runs) != object_bytes:
            raise ValueError(f"runs must be positive and add up to {object_bytes} bytes, got {sum(runs)}")
        self.object_bytes = object_bytes
        self.run_bytes = runs
        self._starts = (0, *itertools.accumulate(runs))  # of each run, and the object's end
        self._spans = lru_cache(_KNOWN_SLICES)(self._spans_of)  # a prefix asks for one slice of many objects
        described = struct.pack(f"<II{len(runs)}Q", FORMAT_VERSION, len(runs), *runs)
        self.tag = blake3(described).hexdigest()[:16]
        """16 hexadecimal digits, equal for formats that can read each other's objects."""
        self.header_bytes = -(-(_FIELDS.size + 8 * len(runs) + _DIGEST_BYTES) // PAGE_BYTES) * PAGE_BYTES
        """Whole pages; the object begins behind them."""

    @classmethod
    def of(cls, layout: ObjectLayout) -> ObjectFormat:
        """The format of a layout's objects, with a run a layer."""
        return cls(layout.object_bytes, layer_runs(layout))

    @property
    def stored_bytes(self) -> int:
        """Header and object."""
        return self.header_bytes + self.object_bytes

    # ---- writing

    def header(self, key: ChunkKey, data: memoryview, written_ns: int) -> bytes:
        """The header of an object with these bytes.

        Raises:
            ValueError: data that is not one object long.
        """
        if data.nbytes != self.object_bytes:
            raise ValueError(f"an object has {self.object_bytes} bytes, got {data.nbytes}")
        whole = data.cast("B")
        sums = [checksum_of(whole[start:end]) for start, end in itertools.pairwise(self._starts)]
        count = len(sums)
        packed = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, count, self.object_bytes, key.num_tokens, key.space, key.prefix, written_ns
        ) + struct.pack(f"<{count}Q", *sums)
        return (packed + blake3(packed).digest()).ljust(self.header_bytes, b"\0")

    # ---- reading

    def parse_header(self, key: ChunkKey, header: bytes | bytearray | memoryview, where: str) -> Header:
        """What an object's header says, once it is whole and that of this key.

        Args:
            where: names the object in errors.

        Raises:
            DamagedObjectError: anything else than a header that `header` made for this key.
        """
        known = self._known(bytes(header), where)
        num_runs, object_bytes, num_tokens, space, prefix, written_ns = known
        if object_bytes != self.object_bytes or num_runs != len(self.run_bytes):
            raise DamagedObjectError(
                f"{where} is an object of {object_bytes} bytes in {num_runs} runs, the layout says "
                f"{self.object_bytes} in {len(self.run_bytes)}"
            )
        if ChunkKey(space, prefix, num_tokens) != key:
            raise DamagedObjectError(f"{where} holds another key than its name says")
        return Header(written_ns, struct.unpack_from(f"<{num_runs}Q", header, _FIELDS.size))

    def _known(self, header: bytes, where: str) -> tuple[int, int, int, bytes, bytes, int]:
        magic, version = _PREAMBLE.unpack_from(header) if len(header) >= _PREAMBLE.size else (b"", 0)
        if magic != _MAGIC:
            raise DamagedObjectError(f"{where} is not an object of Lamella's")
        if version != FORMAT_VERSION:
            raise DamagedObjectError(f"{where} has format version {version}, this program reads {FORMAT_VERSION}")
        if len(header) < _FIELDS.size:
            raise DamagedObjectError(f"{where} has a header of {len(header)} bytes")
        _, _, num_runs, object_bytes, num_tokens, space, prefix, written_ns = _FIELDS.unpack_from(header)
        end = _FIELDS.size + 8 * num_runs
        if blake3(header[:end]).digest() != header[end : end + _DIGEST_BYTES]:
            raise DamagedObjectError(f"{where} has a damaged header")
        return num_runs, object_bytes, num_tokens, space, prefix, written_ns

    def spans(self, ranges: Sequence[ByteRange]) -> tuple[Span, ...]:
        """What has to be read for each of these ranges."""
        return self._spans(tuple(ranges))

    def reads(self, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> list[RunRead]:
        """What to read for these ranges, and where to."""
        spans = self.spans(ranges)
        return [self.read(*one) for one in zip(spans, ranges, into, strict=True)]

    def read(self, span: Span, wanted: ByteRange, buffer: memoryview) -> RunRead:
        """How one range is read: into the caller's buffer itself where it is whole runs."""
        if span.is_whole:
            return RunRead(wanted, buffer if buffer.format == "B" else buffer.cast("B"), span.first_run, ())
        target = memoryview(bytearray(span.source.num_bytes))
        copy = (target[span.inset : span.inset + wanted.num_bytes], buffer.cast("B"))
        return RunRead(span.source, target, span.first_run, (copy,))

    def _spans_of(self, ranges: tuple[ByteRange, ...]) -> tuple[Span, ...]:
        spans: list[Span] = []
        for wanted in ranges:
            first = bisect_right(self._starts, wanted.offset) - 1
            end = wanted.offset + wanted.num_bytes
            start, stop = self._starts[first], self._starts[bisect_right(self._starts, end - 1)]
            whole = (start, stop) == (wanted.offset, end)
            source = wanted if whole else ByteRange(start, stop - start)
            is_run = whole and end == self._starts[first + 1]
            spans.append(Span(source, first, wanted.offset - start, whole, is_run))
        return tuple(spans)

    def verifier(self, read: RunRead | Span, header: Header, where: str) -> RunVerifier:
        """Checks the bytes of one read as they come."""
        return RunVerifier(self.run_bytes, header.checksums, read.first_run, where)


class RunVerifier:
    """Compares neighbouring runs with their checksums, fed piece by piece in order."""

    __slots__ = ("_checksums", "_hash", "_left", "_run", "_run_bytes", "_where")

    def __init__(self, run_bytes: Sequence[int], checksums: Sequence[int], first_run: int, where: str) -> None:
        self._run_bytes = run_bytes
        self._checksums = checksums
        self._where = where
        self._hash: xxh3_64 | None = None  # of a run that began in an earlier piece
        self._run = first_run
        self._left = run_bytes[first_run]

    def feed(self, data: memoryview) -> None:
        """The next bytes.

        Raises:
            DamagedObjectError: a run that ends in them is not what was put.
        """
        done, size = 0, data.nbytes
        while done < size:
            take = min(self._left, size - done)
            part = data[done : done + take] if take < size else data
            done += take
            if take < self._left:
                self._hash = self._hash or xxh3_64()
                self._hash.update(part)
                self._left -= take
                return
            if self._hash is None:
                found = checksum_of(part)
            else:
                self._hash.update(part)
                found, self._hash = self._hash.intdigest(), None
            if found != self._checksums[self._run]:
                raise damage(self._run, self._where)
            self._run += 1
            self._left = self._run_bytes[self._run] if self._run < len(self._run_bytes) else 0


def damage(run: int, where: str) -> DamagedObjectError:
    """What is raised for a run whose bytes are not those that were put."""
    return DamagedObjectError(f"{where} is damaged in run {run}: its checksum differs")


def take(read: RunRead, data: memoryview, verifier: RunVerifier) -> None:
    """The bytes that came for a read are where they belong, once they are verified.

    Raises:
        DamagedObjectError: they are not what was put; nothing was copied.
    """
    verifier.feed(data)
    read.target[:] = data
    if read.copies:
        deliver(read)


def deliver(read: RunRead) -> None:
    """Parts of the whole runs that were read are where they were asked for; called once the runs are verified."""
    for source, target in read.copies:
        target[:] = source
