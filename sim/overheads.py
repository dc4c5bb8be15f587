"""What an engine's host side adds to the device's times: few physical times, measured in a recorded run.

A profile has the times of the device. These are of the thread around it, which schedules, launches and hands out tokens
(`lamella.sim.ahead` says in what order), and of loads beside computing. They differ between engines, versions and
machines; nothing is known of them until somebody has measured (`lamella validate --overheads-out`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from lamella.reference.records import read_record
from lamella.sim.bounds import MOST_TOKENS, check_range

SCHEMA_VERSION: Final = 1
WHOLE: Final = 1000
"""A thousand permille: as the profile says."""

TIMES: Final = (0, 10 * 10**9)
"""In ns: a thread that stands ten seconds for one pass serves nobody."""
SHARES: Final = (100, 10_000)
"""In permille: from a tenth to ten times."""
RANGES: Final = {
    "idle_ns": (1, TIMES[1]),
    "captured_tokens": (1, MOST_TOKENS),
    "prefill_graph_tokens": (0, MOST_TOKENS),
    "beside_permille": SHARES,
    "scatter_permille": (0, SHARES[1]),
    "drift_permille": (0, SHARES[1]),
}
"""The least and the most of the parts that are not of `TIMES`."""
LATER_PARTS: Final = ("prefill_graph_launch_ns", "prefill_graph_tokens")
"""A file from before they were parts has none of them: they were not measured."""
LEAST_IDLE_NS: Final = 10_000
"""That was measured: no engine polls more often, and a model that did would never end."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times in ns, shares in permille.

    Attributes:
        pass_ns: from a token's hand-out to the begin of the next pass's forward: scheduling, inputs.
        launch_ns: launching a forward of at most `captured_tokens` tokens with piecewise graphs.
        full_launch_ns: the same as one captured graph, where nothing waits for layers; 0 where it was not measured.
        prefill_launch_ns: launching a forward of more tokens.
        prefill_graph_launch_ns: the same where it replays piecewise graphs; 0 where it was not measured.
        captured_tokens: up to so many the engine replays captured graphs.
        prefill_graph_tokens: of more than that, up to so many it replays piecewise graphs too; 0: none.
        gate_ns: launching a layer takes so much longer for each released load that had not landed when the pass began.
        tail_ns: of each launch, what comes behind its last layer.
        report_ns: from the end of what a hand-out waits for until the token is seen.
        first_token_ns: a hand-out with first tokens in it takes so much longer.
        after_join_ns: the pass behind one that a request joined begins so much later.
        idle_ns: from the end of a pass with nothing to compute to the next one's begin.
        order_ns: a pass that begins loads and computes nothing begins so much later: its orders.
        ask_ns: a pass in which a request with a load asks begins so much later: look-up, blocks.
        ask_ns_per_1000_tokens: the same for each thousand tokens of its prompt.
        join_ns: a pass that a request joins begins so much later: tables, sampling, inputs.
        join_ns_per_1000_tokens: the same for each thousand tokens of its prompt.
        submit_ns: beginning a load takes the host so long.
        first_slice_ns: from there until its first slice may begin.
        load_ns_per_mib: what each MiB of a load takes longer than on the profile's wire.
        prefill_rows: (new tokens, permille): device time of a prefill of so many new tokens, of what the profile says.
        beside_permille: device time of layers beside a load, of that without.
        scatter_permille: standard deviation of the thread's times from pass to pass, of their mean.
        drift_permille: the same of their means from one run to the next.

    Raises:
        ValueError: a part outside its `RANGES`, or rows of the same number of tokens; the message names part and value.
    """

    pass_ns: int = 0
    launch_ns: int = 0
    full_launch_ns: int = 0
    prefill_launch_ns: int = 0
    prefill_graph_launch_ns: int = 0
    captured_tokens: int = 128
    prefill_graph_tokens: int = 0
    gate_ns: int = 0
    tail_ns: int = 0
    report_ns: int = 0
    first_token_ns: int = 0
    after_join_ns: int = 0
    idle_ns: int = 1_000_000
    order_ns: int = 0
    ask_ns: int = 0
    ask_ns_per_1000_tokens: int = 0
    join_ns: int = 0
    join_ns_per_1000_tokens: int = 0
    submit_ns: int = 0
    first_slice_ns: int = 0
    load_ns_per_mib: int = 0
    prefill_rows: tuple[tuple[int, int], ...] = ()
    beside_permille: int = WHOLE
    scatter_permille: int = 0
    drift_permille: int = 0

    def __post_init__(self) -> None:
        for tokens, permille in self.prefill_rows:
            check_range("tokens of prefill_rows", tokens, 1, MOST_TOKENS)
            check_range("permille of prefill_rows", permille, *SHARES)
        if len(dict(self.prefill_rows)) < len(self.prefill_rows):
            raise ValueError(f"prefill_rows are for different numbers of new tokens, got {self.prefill_rows}")
        for name in self.names():
            if name != "prefill_rows":
                check_range(name, getattr(self, name), *RANGES.get(name, TIMES))

    def asking_ns(self, prompt_tokens: int) -> int:
        """What a request with a load costs the pass in which it asks."""
        return self.ask_ns + self.ask_ns_per_1000_tokens * prompt_tokens // 1000

    def joining_ns(self, prompt_tokens: int) -> int:
        """What a request costs the pass that it joins."""
        return self.join_ns + self.join_ns_per_1000_tokens * prompt_tokens // 1000

    def forward_ns(self, num_tokens: int, *, full_graphs: bool, prefills: bool) -> int:
        """How long launching a forward of so many tokens takes."""
        if num_tokens > self.captured_tokens:
            return self.prefill_graph_launch_ns if num_tokens <= self.prefill_graph_tokens else self.prefill_launch_ns
        return self.full_launch_ns if full_graphs and not prefills else self.launch_ns

    def least_prefill_ns(self, num_tokens: int) -> int:
        """What a step of so many tokens with a prefill in it takes at least: its layers' launches."""
        return max(0, self.forward_ns(num_tokens, full_graphs=False, prefills=True) - self.tail_ns)

    def with_prefill_graphs(self, tokens: int) -> Overheads:
        """The engine as it is where graphs of steps of up to so many tokens are captured; 0: as it is.

        Raises:
            ValueError: steps that replay graphs anyway, or launching those of prefills was not measured.
        """
        if tokens == 0:
            return self
        if tokens <= self.captured_tokens:
            raise ValueError(
                f"prefill_graphs must be 0 or more than {self.captured_tokens}, got {tokens}: steps of up to so many "
                "tokens replay graphs anyway"
            )
        check_range("prefill_graphs", tokens, 0, MOST_TOKENS)
        if not self.prefill_graph_launch_ns:
            raise ValueError(
                "launching graphs of prefills was not measured with these overheads: take a shipped set, or measure "
                "prefill_graph_launch_ns in a recording whose prefills replay graphs"
            )
        return replace(self, prefill_graph_tokens=tokens)

    def with_parts_of(self, other: Overheads, names: Iterable[str]) -> Overheads:
        """These, with the named parts of the others, and their rows where both have one of as many tokens."""
        rows = dict(self.prefill_rows) | dict(other.prefill_rows)
        parts = {name: getattr(other, name) for name in names if name != "prefill_rows"}
        return replace(self, **parts, prefill_rows=tuple(sorted(rows.items())))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Its parts."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True)
class MeasuredOverheads:
    """Overheads with where they come from.

    Attributes:
        engine: the engine and the machine.
        source: the recorded cells, and when.
        overheads: the values.
        errors: standard error by part, in its unit; parts that nothing showed are not in it.

    Raises:
        ValueError: an error that is negative or larger than any part, or an idle time that no engine has.
    """

    engine: str
    source: str
    overheads: Overheads
    errors: Mapping[str, int]

    def __post_init__(self) -> None:
        for name, error in self.errors.items():
            check_range(f"the error of {name}", error, 0, TIMES[1])
        check_range("idle_ns", self.overheads.idle_ns, LEAST_IDLE_NS, TIMES[1])

    def document(self) -> dict[str, Any]:
        """What `read_overheads` reads back, as JSON can hold it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "lamella.overheads",
            "engine": self.engine,
            "source": self.source,
            "overheads": asdict(self.overheads),
            "errors": dict(self.errors),
        }

    def assumption(self) -> str:
        """What an answer that uses them says."""
        one = self.overheads
        return (
            f"overheads of {self.engine}, measured ({self.source}): a step takes the host {one.launch_ns / 1e6:.1f} ms "
            f"to launch, one with a prefill {one.prefill_launch_ns / 1e6:.1f}, and {one.pass_ns / 1e6:.1f} to prepare; "
            "it schedules a step ahead, so a token is handed out only when the next step is launched"
            + (
                f"; steps with prefills of up to {one.prefill_graph_tokens:,} tokens replay captured graphs and take "
                f"{one.prefill_graph_launch_ns / 1e6:.1f} ms to launch; padding to the captured sizes is not counted"
                if one.prefill_graph_tokens
                else ""
            )
            + ("" if one.full_launch_ns else "; launching a captured step that waits for no layer was not measured: 0")
        )


def read_overheads(text: str, name: str) -> MeasuredOverheads:
    """The overheads that the JSON holds.

    Args:
        text: of the file.
        name: what it is called in messages.

    Raises:
        ValueError: not JSON, another schema version, an unknown key or an impossible value; named.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("kind") != "lamella.overheads":
            raise ValueError('it is no object of kind "lamella.overheads"; lamella validate --overheads-out writes one')
        version = found.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ValueError(f"schema_version must be {SCHEMA_VERSION}, got {version!r}")
        rest = {key: value for key, value in found.items() if key not in ("kind", "schema_version")}
        if isinstance(rest.get("overheads"), dict):
            rest["overheads"] = dict.fromkeys(LATER_PARTS, 0) | rest["overheads"]
        return read_record(MeasuredOverheads, rest, "overheads")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from error


def open_overheads(name: str) -> MeasuredOverheads:
    """Those shipped under that name, or in the file of that path.

    Raises:
        ValueError: as `read_overheads`, or neither such a set, with those that are shipped, nor such a file.
    """
    if not name.endswith(".json") and name not in shipped_overheads():
        raise ValueError(f"no overheads {name!r}; shipped: {', '.join(shipped_overheads())}; or name a .json file")
    path = Path(name) if name.endswith(".json") else Path(__file__).parent / "overhead_sets" / f"{name}.json"
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a text file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read the overheads {name}: {error.strerror}") from error
    return read_overheads(text, name)


def shipped_overheads() -> tuple[str, ...]:
    """Names of the sets that come with the package."""
    return tuple(sorted(path.stem for path in (Path(__file__).parent / "overhead_sets").glob("*.json")))
