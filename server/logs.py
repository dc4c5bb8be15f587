"""Log lines that a machine reads: one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Final

_LEVELS: Final = ("debug", "info", "warning", "error")
_PLAIN: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Time (UTC), level, logger, message, and whatever a call gave as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def level_of(name: str) -> int:
    """The level of that name.

    Raises:
        ValueError: there is none.
    """
    if name.lower() not in _LEVELS:
        raise ValueError(f"a log level is {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}, got {name!r}")
    return logging.getLevelNamesMapping()[name.upper()]


def log_json(level: int, stream: IO[str] = sys.stderr) -> None:
    """Everything that this process logs from the level on goes to the stream as JSON lines, and nowhere else."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
