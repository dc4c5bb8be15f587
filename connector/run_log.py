"""What one process saw of a run, as JSON lines: the raw material of a measured recording.

Instants are `time.monotonic_ns`, which all processes of a host share. A line is written at once, so what a crash leaves
is whole but for its last line.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

RECORD_VARIABLE: Final = "LAMELLA_RECORD"
"""The environment variable that names the folder of a run's logs."""
SCHEDULER_LOG: Final = "scheduler.jsonl"
WORKER_LOGS: Final = "worker-*.jsonl"


class RunLog:
    """Lines of one process.

    Args:
        path: of the file, which is not there yet: of another run's logs some would stay, and be read as this one's.

    Raises:
        ValueError: it is there.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = path.open("x", encoding="utf-8")
        except FileExistsError as there:
            raise ValueError(
                f"{path} is of a run that was recorded before: name another folder by {RECORD_VARIABLE}, or move that "
                "one away"
            ) from there

    def write(self, event: str, **values: Any) -> None:
        """A line with the present instant."""
        line = {"event": event, "at_ns": time.monotonic_ns(), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()


def record_folder() -> Path:
    """The folder that the environment names.

    Raises:
        ValueError: it names none.
    """
    folder = os.environ.get(RECORD_VARIABLE)
    if not folder:
        raise ValueError(f"a recording connector writes to the folder that {RECORD_VARIABLE} names; set it")
    return Path(folder)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that was cut off is left out.

    Raises:
        ValueError: a line that is no event.
        OSError: the file cannot be read.
    """
    *lines, _cut_off = path.read_text("utf-8").split("\n")
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            event["event"], event["at_ns"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no event of a run: {error!r}") from error
        events.append(event)
    return events
