"""What a tier's store holds, whatever layouts it is of: for listing and clearing, not for serving.

The store is read by names alone, so a catalogue needs neither a model nor a layout, and shows entries of other
versions, models and tenants too. A name is format's tag, key space, prefix and tokens; whose they are stands in no
store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from lamella.connector.storage.file_space import stored_files
from lamella.connector.storage.redis_server import RedisServer
from lamella.connector.storage.redis_tier import NAMESPACE
from lamella.connector.storage.s3_tier import S3Bucket
from lamella.connector.storage.tier import TierError
from lamella.connector.storage.tier_url import TierUrl

_NAME: Final = re.compile(
    r"(?P<tag>[0-9a-f]{16})[/:](?P<space>[0-9a-f]{64})[/:](?:[0-9a-f]{2}/)?"
    r"(?P<prefix>[0-9a-f]{64})[-:](?P<tokens>\d+)(?:\.kv)?"
)
_BATCH: Final = 500

_Item = TypeVar("_Item")


class Entry(NamedTuple):
    """One stored object. Times (wall clock, ns) are None where the store does not tell them."""

    name: str
    """As the store knows it."""
    tag: str
    space: str
    prefix: str
    num_tokens: int
    stored_bytes: int
    written_ns: int | None
    used_ns: int | None


class Catalog(Protocol):
    """A store's entries."""

    def entries(self) -> Iterator[Entry]:
        """Every object, in no order; what is not Lamella's is left out.

        Raises:
            TierError: the store does not answer.
        """
        ...

    def remove(self, entries: Iterable[Entry]) -> int:
        """These objects are gone; how many were there.

        Raises:
            TierError: the store does not answer, or refuses.
        """
        ...


def open_catalog(url: str, timeout_s: float = 10.0) -> Catalog:
    """The catalogue of the store at a URL.

    Raises:
        ValueError: a URL that is none, or a folder that is not there.
        ImportError: the store's client is missing.
    """
    where = TierUrl.parse(url)
    if where.scheme == "file":
        return FileCatalog(Path(where.url))
    if where.scheme == "s3":
        options = dict(where.options)
        return S3Catalog(
            S3Bucket(
                where.url,
                endpoint=options.get("endpoint"),
                region=options.get("region"),
                timeout_s=timeout_s,
                retries=1,
            )
        )
    return RedisCatalog(RedisServer(where.url, cluster=where.is_cluster, timeout_s=timeout_s, retries=1))


class FileCatalog:
    """Of a folder.

    Raises:
        ValueError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        self._folder = folder

    def entries(self) -> Iterator[Entry]:
        """As `Catalog.entries`."""
        try:
            for file in stored_files(self._folder):
                entry = _entry(str(file.path.relative_to(self._folder)), file.num_bytes, file.written_ns, file.used_ns)
                if entry is not None:
                    yield entry
        except OSError as refused:
            raise TierError(f"cannot list {self._folder}: {refused}") from refused

    def remove(self, entries: Iterable[Entry]) -> int:
        """As `Catalog.remove`."""
        removed = 0
        for entry in entries:
            path = self._folder / entry.name
            try:
                path.unlink()
                removed += 1
            except FileNotFoundError:
                continue
            except OSError as refused:
                raise TierError(f"cannot remove {path}: {refused}") from refused
        return removed


class RedisCatalog:
    """Of a server or a cluster."""

    def __init__(self, server: RedisServer, namespace: str = NAMESPACE) -> None:
        self._server = server
        self._namespace = namespace

    def entries(self) -> Iterator[Entry]:
        """As `Catalog.entries`; the server tells no times."""
        for names in _batches(self._server.scan(f"{self._namespace}:*")):
            sizes = self._server.ask([("STRLEN", name) for name in names])
            for name, size in zip(names, sizes, strict=True):
                entry = _entry(name.decode(errors="replace"), size, None, None, skip=len(self._namespace) + 1)
                if entry is not None:
                    yield entry

    def remove(self, entries: Iterable[Entry]) -> int:
        """As `Catalog.remove`."""
        return sum(sum(self._server.ask([("UNLINK", entry.name) for entry in batch])) for batch in _batches(entries))


class S3Catalog:
    """Of a bucket, below a prefix."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket

    def entries(self) -> Iterator[Entry]:
        """As `Catalog.entries`."""
        for path, size, written_ns in self._bucket.list():
            entry = _entry(path, size, written_ns, None)
            if entry is not None:
                yield entry

    def remove(self, entries: Iterable[Entry]) -> int:
        """As `Catalog.remove`; counts what it asked for, since the store does not say what was there."""
        removed = 0
        for batch in _batches(entries):
            self._bucket.delete([entry.name for entry in batch])
            removed += len(batch)
        return removed


def _entry(name: str, size: int, written_ns: int | None, used_ns: int | None, skip: int = 0) -> Entry | None:
    found = _NAME.fullmatch(name, skip)
    if found is None:
        return None
    return Entry(name, found["tag"], found["space"], found["prefix"], int(found["tokens"]), size, written_ns, used_ns)


def _batches(items: Iterable[_Item]) -> Iterator[Sequence[_Item]]:
    batch: list[_Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
