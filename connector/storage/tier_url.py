"""Tiers by URL: what stands in a setting or on a command line.

| URL | tier |
|---|---|
| `file:///var/cache/kv`, or a plain path | files of a folder |
| `redis://user:password@host:6379/0`, `rediss://...` | a Redis or Valkey server, with TLS for `rediss` |
| `redis+cluster://host:6379`, `rediss+cluster://...` | a cluster, by one of its nodes |
| `s3://bucket/prefix?endpoint=http://host:9000&region=eu-1` | an S3-compatible bucket |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.object_format import layer_runs
from lamella.connector.storage.redis_tier import RedisTier
from lamella.connector.storage.s3_tier import S3Tier
from lamella.connector.storage.tier import Tier
from lamella.reference.layout import ObjectLayout

SCHEMES: Final = ("file", "redis", "rediss", "redis+cluster", "rediss+cluster", "s3")
_S3_OPTIONS: Final = ("endpoint", "region")


@dataclass(frozen=True, slots=True, repr=False)
class TierUrl:
    """A URL of a tier, read but not opened. Its `repr` and `str` have no password.

    Raises:
        ValueError: another scheme than the module's, nothing behind it, or an option of S3 that is none.
    """

    scheme: str
    url: str
    """As the tier takes it."""
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> TierUrl:
        """What the text means; a text without a scheme is a path."""
        if "://" not in text:
            if not text:
                raise ValueError("a tier is a URL or a path, got nothing")
            return cls("file", str(Path(text).expanduser()))
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"a tier's URL begins with one of {', '.join(SCHEMES)}, got {parts.scheme!r}")
        if parts.scheme == "file":
            if parts.netloc or len(parts.path) < 2:
                raise ValueError("a file tier's URL is file:///absolute/path")
            return cls("file", parts.path)
        try:
            _ = parts.port
        except ValueError:
            _, _, port = parts.netloc.rpartition(":")
            raise ValueError(f"a port is a number up to 65535, got {port!r} behind {parts.hostname}") from None
        if not parts.hostname:
            raise ValueError(f"a tier's URL names a host or a bucket behind {parts.scheme}://")
        if parts.scheme != "s3":
            return cls(parts.scheme, text.replace("+cluster", "", 1))
        options = tuple(parse_qsl(parts.query, keep_blank_values=True))
        for name, _ in options:
            if name not in _S3_OPTIONS:
                raise ValueError(f"an S3 tier's URL has the options {' and '.join(_S3_OPTIONS)}, got {name!r}")
        return cls("s3", f"s3://{parts.netloc}{parts.path}", options)

    @property
    def is_cluster(self) -> bool:
        """Whether a cluster is meant."""
        return self.scheme.endswith("+cluster")

    @property
    def shown(self) -> str:
        """The URL without user, password and options."""
        if self.scheme == "file":
            return self.url
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{self.scheme}://{parts.hostname}{port}{parts.path}"

    def __repr__(self) -> str:
        return f"TierUrl({self.shown!r})"


def open_tier(
    url: str,
    layout: ObjectLayout,
    *,
    max_bytes: int | None = None,
    ttl_s: float | None = None,
    timeout_s: float = 5.0,
    retries: int = 1,
) -> Tier:
    """The tier at a URL, for objects of this layout.

    Args:
        max_bytes: the limit of a file tier. A server's limit is its own setting (`maxmemory`, lifecycle rules).
        ttl_s: how long objects are kept.
        timeout_s: bound of every call to a server, retries included.
        retries: attempts after a first one that failed.

    Raises:
        ValueError: a URL or a limit that cannot be, or max_bytes for a server.
        ImportError: the tier's client is missing.
        TierError: a folder that cannot be used.
    """
    where = TierUrl.parse(url)
    runs = layer_runs(layout)
    if where.scheme == "file":
        return FileTier(Path(where.url), layout.object_bytes, runs, max_bytes=max_bytes, ttl_s=ttl_s)
    if max_bytes is not None:
        raise ValueError(f"max_bytes limits a folder; {where.shown} has limits of its own")
    if where.scheme == "s3":
        return S3Tier(
            where.url,
            layout.object_bytes,
            runs,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            retries=retries,
            **dict(where.options),  # type: ignore[arg-type]  # endpoint and region, by name
        )
    return RedisTier(
        where.url,
        layout.object_bytes,
        runs,
        cluster=where.is_cluster,
        ttl_s=ttl_s,
        timeout_s=timeout_s,
        retries=retries,
    )
