"""Settings every test shares: Hypothesis profiles, and how many examples the properties ran."""

import functools
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# dev: a quick look while writing. ci: what every landing runs. nightly: as long as a night allows.
# mutant: as ci, but the first failure is the verdict; nothing is shrunk and no second one is looked for.
# No deadline: two cores shared with a compiler make single examples slow for no fault of theirs.
settings.register_profile("dev", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True, database=None)
settings.register_profile("nightly", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "mutant",
    settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)
# verdict: whether a planted fault is found at all; its smallest example is of no interest.
settings.register_profile(
    "verdict", max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# A shell's background job ignores ctrl-C, and so does all that it starts: commands that a test interrupts would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXAMPLES = pytest.StashKey[Counter[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Counts the examples of every property from here on."""
    counts = config.stash.setdefault(EXAMPLES, Counter())
    for item in items:
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is not None:
            handle.inner_test = _counted(handle.inner_test, item.nodeid, counts)


def _counted(inner: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return inner(*args, **kwargs)

    return counted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(EXAMPLES, Counter())
    if counts:
        terminalreporter.section("examples run by the properties")
        for name, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:7d}  {name}")
        terminalreporter.write_line(f"{counts.total():7d}  in all, {len(counts)} properties")
