"""Strict reading: parsed JSON becomes frozen dataclasses, or one sentence says which key is wrong.

The dataclass is the schema: every field must be there, nothing else may be, and a value has exactly the annotated type.
Understood are ``int``, ``float`` (an int will do), ``str``, ``bool``, ``None`` in a union, enums by value,
``tuple[X, ...]``, ``tuple[X, Y]``, ``Mapping[str or enum, X]`` and other dataclasses. What a class checks itself in
``__post_init__`` is reported under the key it was read from.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, TypeVar

RecordT = TypeVar("RecordT")


def read_record(record: type[RecordT], mapping: object, key: str) -> RecordT:
    """The dataclass that the mapping describes.

    Args:
        record: a dataclass.
        mapping: parsed JSON.
        key: what the mapping is called in messages.

    Raises:
        ValueError: an unknown or missing key, or an impossible value; the message names the key.
        TypeError: a value of another type; the message names the key.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: int
    >>> read_record(Point, {"x": 1, "y": 2}, "point")
    Point(x=1, y=2)
    >>> read_record(Point, {"x": 1, "z": 2}, "point")
    Traceback (most recent call last):
    ValueError: point has an unknown key 'z'; known: x, y
    """
    values = _as_mapping(mapping, key)
    names = [field.name for field in fields(typing.cast("Any", record))]
    for name in values:
        if name not in names:
            raise ValueError(f"{key} has an unknown key {name!r}; known: {', '.join(names)}")
    for name in names:
        if name not in values:
            raise ValueError(f"{key} lacks the key {name!r}")
    hints = typing.get_type_hints(record)
    arguments = {name: _read(hints[name], values[name], f"{key}.{name}") for name in names}
    try:
        return record(**arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def write_record(record: object) -> dict[str, object]:
    """The mapping that `read_record` reads back to an equal dataclass; JSON can hold it.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: tuple[int, ...]
    >>> write_record(Point(1, (2, 3)))
    {'x': 1, 'y': [2, 3]}
    """
    return {field.name: _write(getattr(record, field.name)) for field in fields(typing.cast("Any", record))}


def _write(value: object) -> object:
    if is_dataclass(value):
        return write_record(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {typing.cast("str", _write(name)): _write(item) for name, item in value.items()}
    return [_write(item) for item in value] if isinstance(value, tuple) else value


def _read(hint: Any, value: object, key: str) -> object:
    """The value as the annotated type."""
    if is_dataclass(hint):
        return read_record(typing.cast("type[object]", hint), value, key)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _read_enum(hint, value, key)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _read_tuple(arguments, value, key)
    if origin is Mapping:
        key_hint, value_hint = arguments
        return {
            _read(key_hint, name, f"{key}.{name}"): _read(value_hint, item, f"{key}.{name}")
            for name, item in _as_mapping(value, key).items()
        }
    if origin in (typing.Union, UnionType):
        if value is None and type(None) in arguments:
            return None
        (only,) = [argument for argument in arguments if argument is not type(None)]
        return _read(only, value, key)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{key} must be {hint.__name__}, got {value!r}")
    return value


def _read_enum(hint: type[Enum], value: object, key: str) -> Enum:
    try:
        return hint(value)
    except ValueError:
        raise ValueError(f"{key} must be one of {[member.value for member in hint]}, got {value!r}") from None


def _read_tuple(arguments: tuple[Any, ...], value: object, key: str) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{key} must be a list, got {value!r}")
    hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(hints) != len(value):
        raise ValueError(f"{key} must have {len(hints)} entries, got {len(value)}")
    return tuple(_read(hint, item, f"{key}[{i}]") for i, (hint, item) in enumerate(zip(hints, value, strict=True)))


def _as_mapping(value: object, key: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{key} must be a JSON object, got {value!r}")
    return value
