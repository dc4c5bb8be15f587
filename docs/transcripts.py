"""Runs the commands that documents show, and writes what they print into the documents.

A transcript is a `console` block below a comment that says how many of the last lines it shows:

    <!-- transcript: last 4 -->
    ```console
    $ lamella ...
    ```

Run `python docs/transcripts.py` to write them anew; a test compares.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/model.md")
BLOCK = re.compile(r"<!-- transcript: last (\d+) -->\n```console\n(.*?)```", flags=re.DOTALL)


def run_command(line: str, folder: Path) -> list[str]:
    """What `lamella ...` prints on stdout, line by line.

    Raises:
        RuntimeError: it failed, or is no such command.
    """
    program, *arguments = shlex.split(line)
    if program != "lamella":
        raise RuntimeError(f"a transcript runs lamella, not {program}")
    code = "from lamella.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    if result.returncode:
        raise RuntimeError(f"{line}:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    return result.stdout.rstrip("\n").split("\n")


def renew(text: str, run: Callable[[str], list[str]]) -> str:
    """The document with each transcript as its commands print it now."""

    def renewed(found: re.Match[str]) -> str:
        count, commands = int(found[1]), [line[2:] for line in found[2].splitlines() if line.startswith("$ ")]
        lines: list[str] = []
        for command in commands:
            printed = run(command)
            shown = printed[-count:]
            lines += [f"$ {command}", *(["..."] if len(shown) < len(printed) else []), *shown]
        return f"<!-- transcript: last {count} -->\n```console\n" + "\n".join(lines) + "\n```"

    return BLOCK.sub(renewed, text)


def renew_documents(write: bool) -> list[str]:
    """The documents whose transcripts are not what the commands print today; written anew if asked for."""
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        with (
            tempfile.TemporaryDirectory() as folder
        ):  # one for all commands of a document, which may build on each other
            now = renew(text, lambda line, place=Path(folder): run_command(line, place))  # type: ignore[misc]
        if now != text:
            stale.append(name)
            if write:
                path.write_text(now, encoding="utf-8")
    return stale


if __name__ == "__main__":
    print("\n".join(f"renewed: {name}" for name in renew_documents(write=True)) or "nothing has changed")
