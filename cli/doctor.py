"""`lamella doctor`: what this machine can do, and why not the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

import lamella
from lamella.cuda_ext import executors, machine
from lamella.cuda_ext.machine import Finding, State

SCHEMA_VERSION = 1
NAME_WIDTH = 19
"""Of the longest name that `examine` gives."""


def examine() -> Iterator[Finding]:
    """Everything looked at, in the order in which one thing leads to the next; each as soon as it is known."""
    yield machine.find_compiler(os.environ)
    yield machine.find_native_library("lamella_cpu")
    yield _chosen_executor()
    yield machine.find_nvcc(os.environ)
    yield machine.find_native_library("lamella_cuda")
    yield machine.find_driver()
    yield machine.find_pinned_memory_limit()
    yield machine.find_shared_memory()
    yield machine.find_cores()
    yield machine.find_numa_nodes()
    yield machine.find_torch()
    yield machine.find_package(
        "vLLM", distribution="vllm", package="vllm", remedy="needed only to serve: pip install vllm"
    )
    yield machine.find_package("cache server", distribution="pyzmq", remedy="pip install 'lamella[server]'")
    yield machine.find_package("plotting", distribution="matplotlib", remedy="pip install 'lamella[plot]'")


def _chosen_executor() -> Finding:
    choice = executors.choose_executor(threads=len(os.sched_getaffinity(0)))
    if isinstance(choice.executor, executors.NativeExecutor):
        return Finding("executor", State.YES, f"{choice.executor.name}: {choice.reason}")
    remedy = "as for the native CPU library"
    return Finding("executor", State.LIMITED, f"{choice.executor.name}: slower, and holds the interpreter lock", remedy)


def _print_lines(findings: Iterable[Finding]) -> None:
    """One line a finding when it is known, and the remedy under it; not wrapped, so that a path can be copied."""
    colours = {State.YES: "green", State.LIMITED: "yellow", State.NO: "red"}
    for finding in findings:
        state = typer.style(f"{finding.state.value:<8}", fg=colours[finding.state])
        typer.echo(f"{state} {finding.name:<{NAME_WIDTH}}  {finding.detail}")
        if finding.remedy:
            typer.echo(f"{'':<8} {'':<{NAME_WIDTH}}  to change that: {finding.remedy}")


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command(short_help="Says what this machine can do, and why not the rest.")
    def doctor(
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    ) -> None:
        """Says what this machine can do, and why not the rest."""
        if as_json:
            rows = [{**asdict(finding), "state": finding.state.value} for finding in examine()]
            document = {"schema_version": SCHEMA_VERSION, "lamella": lamella.__version__, "findings": rows}
            typer.echo(json.dumps(document, indent=2))
        else:
            _print_lines(examine())
