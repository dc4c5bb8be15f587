"""`--config FILE.toml`: options of a verb from a file, strictly.

The file has `schema_version = 1` and a table a verb; keys are the verb's options, with underscores, and what is given
several times is a list. What the command line says goes before what the file says. A key that does not exist is
refused, with the nearest that does.
"""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any

import typer

SCHEMA_VERSION = 1


def _load(context: typer.Context, path: Path | None) -> Path | None:
    if path is None or context.resilient_parsing:
        return path
    command: Any = context.command
    kinds = typing.get_type_hints(inspect.unwrap(command.callback))
    keys = [name for name in kinds if name not in ("config", "return")]
    verbs: Any = getattr(context.find_root().command, "commands", {command.name: command})
    try:
        options = read_config(path, str(command.name), {name: kinds[name] for name in keys}, sorted(verbs))
    except OSError as mistake:
        raise typer.BadParameter(f"{path}: {mistake.strerror or mistake}") from mistake
    except ValueError as mistake:
        raise typer.BadParameter(str(mistake)) from mistake
    context.default_map = {**(context.default_map or {}), **options}
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", is_eager=True, callback=_load, help="TOML file with options of this verb; docs/model.md."),
]


def read_config(path: Path, verb: str, kinds: Mapping[str, Any], verbs: Sequence[str]) -> dict[str, Any]:
    """The verb's options in the file.

    Args:
        path: the file.
        verb: whose table is read.
        kinds: the verb's options and their types.
        verbs: all tables that the file may have.

    Raises:
        ValueError: not TOML of this schema, an unknown table or key, or a value of another type; the message names it.
        OSError: the file cannot be read.
    """
    try:
        parsed = tomllib.loads(path.read_text("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    version = parsed.pop("schema_version", None)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version must be {SCHEMA_VERSION}, got {version!r}")
    for name, table in parsed.items():
        if name not in verbs or not isinstance(table, Mapping):
            raise ValueError(f"{path}: no verb {name!r}; {_nearest(name, verbs)}")
    options: dict[str, Any] = {}
    for key, value in parsed.get(verb, {}).items():
        if key not in kinds:
            raise ValueError(f"{path}: [{verb}] has an unknown key {key!r}; {_nearest(key, list(kinds))}")
        options[key] = _checked(f"{path}: {verb}.{key}", kinds[key], value)
    return options


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _checked(key: str, kind: Any, value: object) -> object:
    """The value, if it is of that type exactly: no text for a number, no fraction for a whole one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        (kind,) = [argument for argument in arguments if argument is not NoneType]
        return _checked(key, kind, value)
    if origin is list:
        if not isinstance(value, list):
            raise ValueError(f"{key} must be a list, got {value!r}")
        return [_checked(key, arguments[0], entry) for entry in value]
    kinds = {int: ((int,), "a whole number"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}
    wanted, words = kinds.get(kind, ((str,), "text in quotes"))
    if type(value) not in wanted:
        raise ValueError(f"{key} must be {words}, got {value!r}")
    return value
