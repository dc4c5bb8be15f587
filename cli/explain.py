"""`lamella explain REQUEST`: where one request's time to first token went, and who caused it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from lamella.cli._outputs import check_outputs, write_text
from lamella.cli._refusal import refuse_bad_input

if TYPE_CHECKING:
    from lamella.reference.recording import Recording

DEFAULT_TRACE: Final = Path("lamella-out/simulate.trace.json")


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(short_help="Says why a request took so long, and who caused it.")(explain)


def explain(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            help="Its number in the recording, or slowest, fastest or median by time to first token.",
        ),
    ],
    trace: Annotated[
        Path, typer.Option(help="A recording by simulate or replay, or the folder of a measured run's logs.")
    ] = DEFAULT_TRACE,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the parts there, in ns.")] = None,
    trace_out: Annotated[
        Path | None, typer.Option(help="Write the recording there as a Chrome trace, for Perfetto.")
    ] = None,
) -> None:
    """Decomposes a time to first token: admission, transfer wait, release wait, queue, stalls by layer, computing.

    The parts add up to the time to first token exactly. Each stall and each wait on the link names whose slice it was.
    """
    from lamella.connector.run_log import SCHEDULER_LOG, WORKER_LOGS
    from lamella.reference.chrome_trace import to_chrome_trace
    from lamella.sim.explain import explain as explain_request
    from lamella.sim.explain import explanation_document, explanation_lines

    with refuse_bad_input():
        if trace == DEFAULT_TRACE and not trace.exists():
            raise ValueError(f"{trace} is not there; run lamella simulate first, or name a recording with --trace")
        recording = read_recording(trace)
        number = _number(request, {one.request: one.ttft_ns for one in recording.requests})
        explanation = explain_request(recording, number)
        check_outputs((json_path, trace_out), (trace, trace / SCHEDULER_LOG, *trace.glob(WORKER_LOGS)))
    if trace_out is not None:
        write_text(trace_out, json.dumps(to_chrome_trace(recording)) + "\n")
    if json_path is not None:
        document = {
            "schema_version": 1,
            "kind": "lamella.explain",
            "source": recording.source.value,
            "system": recording.system,
            "strategy": recording.strategy,
            **explanation_document(explanation),
            "notes": list(recording.notes),
        }
        write_text(json_path, json.dumps(document, indent=1) + "\n")
    for line in explanation_lines(recording, explanation):
        typer.echo(line)


def read_recording(path: Path) -> Recording:
    """The recording in the file, or of the run whose logs lie in the folder.

    Raises:
        ValueError: not a recording, or an impossible one.
        OSError: it cannot be read.
    """
    from lamella.connector.recorded_run import read_run
    from lamella.reference.chrome_trace import from_chrome_trace

    if path.is_dir():
        return read_run(path)
    try:
        parsed = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        return from_chrome_trace(parsed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _number(request: str, ttft_ns: dict[int, int]) -> int:
    """The request that the word or number means.

    Raises:
        ValueError: neither, or an empty recording.
    """
    if request.isascii() and request.isdecimal():
        return int(request)
    ranked = sorted(ttft_ns, key=lambda number: (ttft_ns[number], number))
    if not ranked:
        raise ValueError("the recording holds no request")
    places = {"fastest": 0, "median": (len(ranked) - 1) // 2, "slowest": len(ranked) - 1}
    if request not in places:
        raise ValueError(f"a request is a number, or one of {', '.join(places)}; got {request!r}")
    return ranked[places[request]]
