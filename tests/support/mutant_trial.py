"""Runs the properties of the named files against a copy of the packages: a process of its own for each mutant.

    python mutant_trial.py COPY REPORT FILE...

REPORT is JSON and is written before each example, so that it says where a crash happened: the property, how many
examples have begun, which property failed and how. The first failure ends the run; nothing is shrunk.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class FromCopy:
    """Finds `lamella` in the copy, before any installed one and before an editable install's own finder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "lamella":
            return None
        return importlib.machinery.PathFinder.find_spec(name, path or [self._folder], target)


class Recorder:
    """The pytest plugin that keeps only properties, counts their examples and writes the report."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._state: dict[str, Any] = {"property": None, "examples": 0, "failed": None, "how": ""}
        self._failed_already = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]
        for item in items:
            handle = item.obj.hypothesis  # type: ignore[attr-defined]
            handle.inner_test = self._counted(handle.inner_test, item.name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._write(failed=report.nodeid.partition("::")[2], how=crash.message.splitlines()[0] if crash else "")

    def _counted(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self._failed_already:  # Hypothesis runs a failing example again before it reports it
                self._write(property=name, examples=self._state["examples"] + 1)
            try:
                return inner(*args, **kwargs)
            except BaseException as error:
                self._failed_already = self._failed_already or isinstance(error, Exception)
                raise

        return counted

    def _write(self, **changes: Any) -> None:
        self._state |= changes
        self._report.write_text(json.dumps(self._state), encoding="utf-8")


def main(copy: str, report: str, *files: str) -> int:
    sys.meta_path.insert(0, FromCopy(copy))
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files], plugins=[Recorder(Path(report))])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
