"""Which recorded cells overheads are measured in, which the model is judged by, and what is known of the recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from lamella.sim.checks import RecordedArm, Where
from lamella.sim.overheads import Overheads
from lamella.sim.recorded import RecordedRun
from lamella.sim.settings import StepsWait


class Known(NamedTuple):
    """What is known of a connector's commit.

    Attributes:
        steps_wait: what its steps wait for.
        slow_lane: its lane could take looks in vain behind a fence for a slow wire, and keep that pace; arms in which
            that shows are not judged by.
        other_auto: its `auto` went by other rules than the model's, which is not judged by those arms.
        held_out: overheads are measured in none of its cells: the model is judged by all of them.
        measured: the parts of the overheads that are measured in its cells of the first list; None: all.
    """

    steps_wait: StepsWait = StepsWait.BATCH
    slow_lane: bool = False
    other_auto: bool = False
    held_out: bool = False
    measured: tuple[str, ...] | None = None


NOTHING_KNOWN: Final[Mapping[str, Known]] = MappingProxyType({})


class Split(NamedTuple):
    """Names of the cells to fit on and of those to be judged by, none in both, and what is known of commits."""

    calibrate: tuple[str, ...]
    test: tuple[str, ...]
    commits: Mapping[str, Known] = NOTHING_KNOWN

    @classmethod
    def parse(cls, text: str) -> Split:
        """The split that JSON describes.

        `{"calibrate": [...], "test": [...], "commits": {"<hash>": {"steps_wait": "every", "slow_lane": true}}}`; a
        commit that is not named waits for its batch's loads, and has no known fault; all that it shows is measured.

        Raises:
            ValueError: anything else, a cell in both lists, or no cell to be judged by.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a split is JSON: {error}") from error
        if not isinstance(found, dict) or set(found) - {"calibrate", "test", "commits", "note"}:
            raise ValueError(
                'a split is an object with the lists "calibrate" and "test", perhaps "commits" and a "note"'
            )
        lists = {name: found.get(name, []) for name in ("calibrate", "test")}
        for name, cells in lists.items():
            if not isinstance(cells, list) or not all(isinstance(cell, str) for cell in cells):
                raise ValueError(f"{name} must be a list of cells' names, got {cells!r}")
        both = set(lists["calibrate"]) & set(lists["test"])
        if both:
            raise ValueError(f"{', '.join(sorted(both))} in both lists: a cell that was fitted on proves nothing")
        if not lists["test"]:
            raise ValueError("the list test is empty: nothing would be judged")
        commits = found.get("commits", {})
        if not isinstance(commits, dict):
            raise ValueError(
                f"commits must be an object, a commit's whole hash to what is known of it; got {commits!r}"
            )
        known = {commit: _known(commit, facts) for commit, facts in commits.items()}
        return cls(tuple(lists["calibrate"]), tuple(lists["test"]), known)

    def tell(self, run: RecordedRun) -> RecordedRun:
        """The run with what is known of each repeat's commit; a repeat of no named commit is left as it is."""
        repeats = [
            replace(
                repeat,
                steps_wait=known.steps_wait,
                slow_lane=known.slow_lane,
                other_auto=known.other_auto,
                shows=None if known.measured is None else frozenset(known.measured),
            )
            if (known := self.commits.get(repeat.commit)) is not None
            else repeat
            for repeat in run.repeats
        ]
        return replace(run, repeats=tuple(repeats))

    def arms_of(self, arms: Mapping[Where, Mapping[str, RecordedArm]]) -> dict[str, list[RecordedArm]]:
        """By list, "calibrate" and "test", the arms of its cells; all of a held-out commit are to be judged by."""
        held_out = {commit for commit, known in self.commits.items() if known.held_out}
        lists: dict[str, list[RecordedArm]] = {"calibrate": [], "test": []}
        for name, cells in (("test", self.test), ("calibrate", self.calibrate)):
            for cell in cells:
                for where in (where for where in arms if where.cell == cell):
                    lists["test" if where.commit in held_out else name].extend(arms[where].values())
        return lists


def _known(commit: str, facts: Any) -> Known:
    ways = [way.value for way in StepsWait]
    if not isinstance(facts, dict) or set(facts) - {*Known._fields}:
        raise ValueError(f"commit {commit}: known are {', '.join(Known._fields)}, got {facts!r}")
    if facts.get("steps_wait", ways[0]) not in ways:
        raise ValueError(f"commit {commit}: steps_wait must be one of {', '.join(ways)}, got {facts['steps_wait']!r}")
    names = ("slow_lane", "other_auto", "held_out")
    for name in names:
        if not isinstance(facts.get(name, False), bool):
            raise ValueError(f"commit {commit}: {name} must be true or false, got {facts[name]!r}")
    measured = facts.get("measured")
    parts = Overheads.names()
    if measured is not None and (not isinstance(measured, list) or not all(one in parts for one in measured)):
        raise ValueError(
            f"commit {commit}: measured must be a list of parts of the overheads, such as {parts[0]}; got {measured!r}"
        )
    slow_lane, other_auto, held_out = (facts.get(name, False) for name in names)
    return Known(
        StepsWait(facts.get("steps_wait", ways[0])),
        slow_lane,
        other_auto,
        held_out,
        None if measured is None else tuple(measured),
    )
