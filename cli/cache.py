"""`lamella cache`: what a storage tier holds, and clearing it."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lamella.cli._durations import parse_duration_s
from lamella.cli._refusal import refuse_bad_input
from lamella.connector.storage.catalog import Catalog, Entry, open_catalog
from lamella.connector.storage.tier import TierError
from lamella.connector.storage.tier_url import TierUrl

_NS = 1_000_000_000
_SPACE = re.compile(r"[0-9a-fA-F]{1,64}")
_SHOWN_DIGITS = 12  # of a hash, as long as they are unambiguous in practice

UrlArgument = Annotated[
    str,
    typer.Argument(metavar="URL", help="Folder, redis://..., rediss://..., redis+cluster://... or s3://bucket/prefix."),
]
SpaceOption = Annotated[
    str | None, typer.Option(help="Only this key space: a model, layout, rank and tenant; its first digits do.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]


@dataclass(slots=True)
class _Group:
    """Objects of one format and key space."""

    objects: int = 0
    stored_bytes: int = 0
    oldest_ns: int | None = None
    newest_ns: int | None = None

    def add(self, entry: Entry) -> None:
        self.objects += 1
        self.stored_bytes += entry.stored_bytes
        if entry.written_ns is not None:
            self.oldest_ns = min(entry.written_ns, self.oldest_ns or entry.written_ns)
            self.newest_ns = max(entry.written_ns, self.newest_ns or entry.written_ns)


def register(app: typer.Typer) -> None:
    """Adds the verb and its three actions."""
    cache = typer.Typer(help="Looks into a storage tier, or clears it.", no_args_is_help=True)
    app.add_typer(cache, name="cache")

    @cache.command("ls")
    def list_objects(
        url: UrlArgument,
        space: SpaceOption = None,
        limit: Annotated[int, typer.Option(min=1, help="Objects to list.")] = 1000,
        as_json: JsonOption = False,
    ) -> None:
        """Lists a tier's objects: key space, prefix, tokens, bytes and age."""
        with _said():
            catalog = _open(url)
            rows: list[Entry] = []
            more = False
            for entry in _chosen(catalog, space, None):
                if len(rows) == limit:
                    more = True
                    break
                rows.append(entry)
        if as_json:
            typer.echo(json.dumps({"tier": TierUrl.parse(url).shown, "complete": not more, "objects": _json(rows)}))
            return
        now_ns = time.time_ns()
        for entry in sorted(rows, key=lambda entry: (entry.space, entry.prefix)):
            typer.echo(
                f"{entry.space[:_SHOWN_DIGITS]}  {entry.prefix[:_SHOWN_DIGITS]}  {entry.num_tokens:>6} tokens  "
                f"{_size(entry.stored_bytes):>10}  {_age(entry.written_ns, now_ns)}"
            )
        if more:
            typer.echo(f"only the first {limit} are listed; --limit lists more", err=True)

    @cache.command("stat", short_help="Says how many objects and bytes a tier holds.")
    def summarize(url: UrlArgument, as_json: JsonOption = False) -> None:
        """Says how many objects and bytes a tier holds, by format and key space."""
        groups: dict[tuple[str, str], _Group] = defaultdict(_Group)
        with _said():
            for entry in _chosen(_open(url), None, None):
                groups[entry.tag, entry.space].add(entry)
        objects = sum(group.objects for group in groups.values())
        stored_bytes = sum(group.stored_bytes for group in groups.values())
        if as_json:
            rows = [
                {"format": tag, "space": space, "objects": group.objects, "bytes": group.stored_bytes}
                | {"oldest_written_ns": group.oldest_ns, "newest_written_ns": group.newest_ns}
                for (tag, space), group in sorted(groups.items())
            ]
            shown = TierUrl.parse(url).shown
            typer.echo(json.dumps({"tier": shown, "objects": objects, "bytes": stored_bytes, "spaces": rows}))
            return
        now_ns = time.time_ns()
        for (tag, space), group in sorted(groups.items()):
            typer.echo(
                f"format {tag}  space {space[:_SHOWN_DIGITS]}  {group.objects:>8} objects  "
                f"{_size(group.stored_bytes):>10}  {_written(group.oldest_ns, group.newest_ns, now_ns)}"
            )
        typer.echo(f"{TierUrl.parse(url).shown}: {objects} objects, {_size(stored_bytes)}")

    @cache.command("clear", short_help="Removes a tier's objects: some of them, or with --all every one.")
    def clear(
        url: UrlArgument,
        space: SpaceOption = None,
        older_than: Annotated[
            str | None, typer.Option("--older-than", help="Only objects written longer ago, such as 12h or 7d.")
        ] = None,
        everything: Annotated[bool, typer.Option("--all", help="Every object of Lamella's.")] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
    ) -> None:
        """Removes a tier's objects: some of them, or with --all every one. Whoever wants one then computes it anew."""
        with refuse_bad_input():
            if everything == (space is not None or older_than is not None):
                raise ValueError("say which objects: --space and --older-than, or --all")
            age_ns = None if older_than is None else parse_duration_s(older_than) * _NS
        with _said():
            catalog = _open(url)
            chosen = list(_chosen(catalog, space, age_ns))
            removed = len(chosen) if dry_run else catalog.remove(chosen)
        freed = _size(sum(entry.stored_bytes for entry in chosen))
        typer.echo(
            f"{TierUrl.parse(url).shown}: {removed} objects, {freed}, {'would be removed' if dry_run else 'removed'}"
        )


def _open(url: str) -> Catalog:
    with refuse_bad_input():
        if "://" not in url and Path(url).is_file():
            raise ValueError(f"{url} is a file, and a tier is a folder or a URL: name the folder it lies in")
        return open_catalog(url)


def _chosen(catalog: Catalog, space: str | None, older_than_ns: int | None) -> Iterator[Entry]:
    if space is not None and not _SPACE.fullmatch(space):
        raise typer.BadParameter(
            f"--space takes the first digits of a key space's hash (0 .. 9, a .. f), got {space!r}"
        )
    now_ns = time.time_ns()
    for entry in catalog.entries():
        if space is not None and not entry.space.startswith(space.lower()):
            continue
        if older_than_ns is not None:
            if entry.written_ns is None:
                raise typer.BadParameter("this store does not tell when an object was written: give it a time to live")
            if now_ns - entry.written_ns < older_than_ns:
                continue
        yield entry


@contextmanager
def _said() -> Iterator[None]:
    """A store that does not answer, or whose client is missing, is one sentence on stderr and exit code 1."""
    try:
        yield
    except (TierError, ImportError) as failure:
        typer.echo(f"Error: {failure}", err=True)
        raise typer.Exit(1) from failure


def _json(rows: list[Entry]) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in rows]


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _written(oldest_ns: int | None, newest_ns: int | None, now_ns: int) -> str:
    if oldest_ns is None or newest_ns is None:
        return "written: this store does not tell"
    return f"written {_age(oldest_ns, now_ns)} .. {_age(newest_ns, now_ns)} ago"


def _age(then_ns: int | None, now_ns: int) -> str:
    if then_ns is None:
        return "age unknown"
    seconds = max(0, now_ns - then_ns) // _NS
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
