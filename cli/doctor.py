"""`lamella doctor`: what this machine can do, and why not the rest."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

import lamella
from lamella.cuda_ext import executors, machine
from lamella.cuda_ext.machine import Finding, State

SCHEMA_VERSION = 1


def examine() -> list[Finding]:
    """Everything looked at, in the order in which one thing leads to the next."""
    return [
        machine.find_compiler(os.environ),
        machine.find_native_library("lamella_cpu"),
        _chosen_executor(),
        machine.find_nvcc(os.environ),
        machine.find_native_library("lamella_cuda"),
        machine.find_driver(),
        machine.find_pinned_memory_limit(),
        machine.find_shared_memory(),
        machine.find_cores(),
        machine.find_numa_nodes(),
        machine.find_torch(),
        machine.find_package(
            "vLLM", distribution="vllm", package="vllm", remedy="needed only to serve: pip install vllm"
        ),
        machine.find_package("cache server", distribution="pyzmq", remedy="pip install 'lamella[server]'"),
        machine.find_package("plotting", distribution="matplotlib", remedy="pip install 'lamella[plot]'"),
    ]


def _chosen_executor() -> Finding:
    choice = executors.choose_executor(threads=len(os.sched_getaffinity(0)))
    if isinstance(choice.executor, executors.NativeExecutor):
        return Finding("executor", State.YES, f"{choice.executor.name}: {choice.reason}")
    remedy = "as for the native CPU library"
    return Finding("executor", State.LIMITED, f"{choice.executor.name}: slower, and holds the interpreter lock", remedy)


def _print_lines(findings: list[Finding]) -> None:
    """One line a finding, and the remedy under it; not wrapped, so that a path can be copied."""
    colours = {State.YES: "green", State.LIMITED: "yellow", State.NO: "red"}
    name_width = max(len(finding.name) for finding in findings)
    for finding in findings:
        state = typer.style(f"{finding.state.value:<8}", fg=colours[finding.state])
        typer.echo(f"{state} {finding.name:<{name_width}}  {finding.detail}")
        if finding.remedy:
            typer.echo(f"{'':<8} {'':<{name_width}}  to change that: {finding.remedy}")


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command()
    def doctor(
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    ) -> None:
        """Say what this machine can do, and why not the rest."""
        findings = examine()
        if as_json:
            rows = [{**asdict(finding), "state": finding.state.value} for finding in findings]
            document = {"schema_version": SCHEMA_VERSION, "lamella": lamella.__version__, "findings": rows}
            typer.echo(json.dumps(document, indent=2))
        else:
            _print_lines(findings)
