"""Every option that takes a number refuses one without sense, before any work: negative, huge, infinite, none at all.

The options are read from the command itself: one that is added is tried too, or must be put among the words.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner

from lamella.cli.main import build_app

HUGE: Final = "9" * 40
ENDLESS: Final = "9" * 400
"""More than a float holds."""
NUMBERS: Final = {"int": ("-1", HUGE), "float": ("-1", "nan", "inf", "-inf", "1e300", ENDLESS)}
TIMES: Final = ("-1s", "0s", "nan", "inf", f"{HUGE}s", f"{ENDLESS}s", "0.0000001us")
SPANS: Final = ("-1s", "nan", f"{HUGE}w", f"{ENDLESS}w")
SIZES: Final = ("-1", "0", "nan", f"{HUGE}GiB", f"{ENDLESS}GiB")
RATES: Final = ("-1GB/s", "0GB/s", "nanGB/s", f"{HUGE}GB/s", f"{ENDLESS}GB/s", "0.0000001GB/s")
COUNTS: Final = ("-1", "nan", "inf", HUGE, ENDLESS)
"""Of a text that is a number, or a list of them."""

TEXTS: Final = {
    "think": TIMES,
    "slo_ttft": TIMES,
    "slo_tpot": TIMES,
    "older_than": SPANS,
    "tier_ttl": SPANS,
    "lease": (*SPANS, "0s"),
    "drain": (*SPANS, "0s"),
    "size": SIZES,
    "memory": (*SIZES[:3], f"{HUGE}GiB", f"{ENDLESS}GiB"),
    "staging": SIZES,
    "tier_size": SIZES,
    "link": (*RATES, "pcie4x0", "pcie4x999"),
    "prompt_tokens": COUNTS,
    "hit": (*COUNTS, "100%", f"{ENDLESS}%"),
    "width": (*COUNTS, "0"),
    "widths": ("-1", "nan", HUGE, "1,99"),
    "ranks": (*COUNTS, "0", "1,nan", "1,-1", "٣"),
    "concurrencies": COUNTS,
    "ratios": COUNTS,
    "release": ("first:-1", "first:0", f"first:{HUGE}", "jit:-1ms", "jit:nanms", f"jit:{ENDLESS}ms"),
    "strategy": (f"fifo/{HUGE}/first", "fifo/-1/first", "fifo/1/jit:infms"),
    "block_ids": ("-1", "nan", HUGE),
    "http": ("127.0.0.1:-1", f"127.0.0.1:{HUGE}", "127.0.0.1:nan", "127.0.0.1:٣"),
    "request": ("-1", "nan", HUGE),
}
TIERS: Final = (*RATES, "5GB/s:-1s", "5GB/s:0s", f"5GB/s:{HUGE}s", f"5GB/s:{ENDLESS}s")
WORDS: Final = frozenset(
    {
        *("order", "sharing", "model", "profile", "overheads", "engine", "trace_arm", "inputs_wait", "layout", "form"),
        *("device", "beside", "side", "base", "url", "space", "tcp", "log_level"),
        "full_graphs",
    }
)
"""Options that hold no number."""
SENSIBLE: Final = {
    ("simulate", "seed", HUGE),
    ("sweep", "seed", HUGE),
    ("replay", "seed", HUGE),
    ("verify", "seed", HUGE),
    ("verify", "memory", HUGE),
    ("verify", "null_block", "-1"),
    ("verify", "null_block", HUGE),
    ("cache ls", "limit", HUGE),
    ("replay", "limit", HUGE),
}
"""Large, and yet what they say: any seed, an id that no block has, all there are."""

POINT: Final = ("--requests", "1", "--concurrency", "1", "--output-tokens", "2", "--out", "OUT")
GEOMETRY: Final = ("--layers", "2", "--heads", "1", "--head-dim", "64")
TABLE: Final = ("--block-ids", "5,11")
BASES: Final[dict[str, tuple[str, ...]]] = {
    "simulate": ("simulate", *POINT),
    "sweep": ("sweep", *POINT, "--repeats", "1", "--concurrencies", "1", "--ratios", "1", "--engine", "serial"),
    "replay": ("replay", "TRACE", "--engine", "serial", "--instances", "1", "--trace-out", "OUT/t.json"),
    "verify": ("verify", *GEOMETRY, *TABLE),
    "bench transfer": ("bench", "transfer", "--device", "cpu", "--size", "1MiB", "--layers", "2", "--beside", "idle"),
    "bench server": ("bench", "server", "--device", "cpu", "--folder", "OUT/none", "--size", "1MiB"),
    "calibrate": ("calibrate", "OUT/p.json", "--device", "cpu", "--size", "1MiB"),
    "cache ls": ("cache", "ls", "OUT/tier"),
    "cache stat": ("cache", "stat", "OUT/tier"),
    "cache clear": ("cache", "clear", "OUT/tier"),
    "serve": ("serve", "--folder", "OUT/server", "--memory", "1MiB", "--tier", "OUT/tier", "--http", "off"),
    "explain": ("explain",),
    "doctor": ("doctor",),
    "validate": ("validate", "OUT/none.jsonl"),
}
"""A line that would do little, were the absurd option left out."""
MORE: Final = {
    "question_tokens": ("--turns", "2"),
    "prompt_tokens": ("--hit", "90%"),
    "hit": ("--prompt-tokens", "16k"),
    "layers": (),
    "tensor_parallel": ("--model", "llama-3.1-8b"),
    "skip_tokens": TABLE,
    "workers": ("--engine", "processes"),
}
"""What else an option needs, to be heard."""


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def _kinds(command: Any) -> dict[str, str]:
    """`int`, `float`, `str`, ... of each option, by its name."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback))
    return {name: _kind(hint) for name, hint in hints.items()}


def _kind(hint: Any) -> str:
    """Of a list or of what may be left out: of what is in it."""
    inside = [one for one in typing.get_args(hint) if one is not NoneType]
    return _kind(inside[0]) if inside else str(hint.__name__)


def _as_number(text: str) -> str:
    """As a message shows a float."""
    try:
        return f"got {float(text):g}"
    except ValueError:
        return text


def _absurd(verb: str, name: str, kind: str) -> tuple[str, ...]:
    if name == "tier":
        return TIERS if verb == "simulate" else ()
    if kind == "str" and name not in WORDS:
        return TEXTS[name]
    return NUMBERS.get(kind, ())


CASES: Final = [
    pytest.param(verb, option, value, id=f"{verb} {option.name}={value[:8]}{'...' if len(value) > 8 else ''}")
    for verb, command in _commands(typer.main.get_command(build_app()))
    for option in command.params
    for value in _absurd(verb, str(option.name), _kinds(command)[str(option.name)])
    if (verb, option.name, value) not in SENSIBLE
]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    result = CliRunner().invoke(build_app(), ["simulate", *POINT[:-1], str(folder)])
    assert result.exit_code == 0, result.output
    return folder / "simulate.trace.json"


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    (tmp_path / "tier").mkdir()
    verb = request.getfixturevalue("verb")
    if verb == "explain":
        return [*BASES[verb], "--trace", str(request.getfixturevalue("recording"))]
    return [part.replace("OUT", str(tmp_path)).replace("TRACE", str(tmp_path / "trace")) for part in BASES[verb]]


@pytest.mark.parametrize(("verb", "option", "value"), CASES)
def test_a_number_without_sense_is_one_sentence_and_exit_2(verb: str, option: Any, value: str, base: list[str]) -> None:
    name = option.opts[0]
    if verb == "verify" and option.name == "tensor_parallel":
        base = ["verify"]
    line = [*base, *MORE.get(option.name, ())]
    while name in line:
        at = line.index(name)
        line[at : at + 2] = []
    line += [f"{name}={value}"] if name.startswith("-") else ["--", value]
    result = CliRunner().invoke(build_app(), line)
    assert result.exit_code == 2, result.output or repr(result.exception)
    assert result.stdout == ""
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence.startswith("Error: ")
    part = value.split(":")[-1]
    parts = value.split("/")[1:] if option.name == "strategy" else (part[:20], value[:20])
    names = (name, str(option.name), str(option.name).removesuffix("s"), "raise --memory")
    assert any(word in sentence for word in (*names, *parts, _as_number(part))), sentence


def test_every_verb_has_a_line_that_would_do_little() -> None:
    assert {verb for verb, _ in _commands(typer.main.get_command(build_app()))} == set(BASES)
