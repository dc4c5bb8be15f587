"""Prints the mutation suite's verdicts below the test results."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    verdicts = [value for report in reports for name, value in report.user_properties if name == "verdict"]
    if verdicts:
        terminalreporter.section("wrong models, and the property that rejected each after how many examples")
        for verdict in verdicts:
            killer = f"{verdict.examples:5d}  {verdict.killed_by}" if verdict.killed_by else "  SURVIVED"
            terminalreporter.write_line(f"{verdict.mutant.name:58s} {killer}")
