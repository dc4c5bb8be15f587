"""Logs of a run become a recording: members, landings, stalls and instants; what does not fit is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lamella.connector.recorded_run import assemble, read_run
from lamella.connector.run_log import SCHEDULER_LOG, RunLog, read_log, record_folder
from lamella.reference.recording import Landing, LayerStall, Occupation, RunSource
from lamella.reference.timeline import Chunk

Log = list[dict[str, Any]]


def event(name: str, at_ns: int, **values: Any) -> dict[str, Any]:
    return {"event": name, "at_ns": at_ns, **values}


SCHEDULER: Log = [
    event("engine", 100, system="a model in an engine", strategy="fifo/1/first"),
    event("admitted", 1_010, request="a", prompt_tokens=20, arrived_ns=1_000),
    event("scheduled", 1_020, batch=[]),
    event("admitted", 1_030, request="b", prompt_tokens=6, arrived_ns=1_025),
    event("scheduled", 1_040, batch=[["b", 0, 4]]),
    event("released", 1_130, requests=["a"]),
    event("scheduled", 1_140, batch=[["b", 4, 2], ["a", 16, 4]]),
    event("scheduled", 1_310, batch=[["a", 20, 1]]),
    event("admitted", 1_350, request="never", prompt_tokens=5, arrived_ns=1_349),
]
WORKER: Log = [
    event("caches", 200, num_layers=2),
    event("step_empty", 1_046),
    event("step", 1_151, began_ns=1_045, ended_ns=1_120, waits=[]),
    event("step", 1_321, began_ns=1_150, ended_ns=1_300, waits=[[0, 1_152, 1_153], [1, 1_180, 1_212]]),
    event(
        "load",
        1_301,
        request="a",
        tokens=16,
        state="LANDED",
        submitted_ns=1_024,
        started_ns=1_030,
        num_bytes=64,
        slices=[[0, 1], [1, 1]],
        landed_ns=[1_100, 1_210],
    ),
    event("step", 1_401, began_ns=1_320, ended_ns=1_400, waits=[]),
]


def logs() -> list[Log]:
    return copy.deepcopy([SCHEDULER, WORKER])


def test_a_run_that_can_be_followed_by_hand() -> None:
    recording = assemble(logs())
    assert (recording.source, recording.system) == (RunSource.MEASURED, "a model in an engine")
    a, b = recording.requests
    assert (a.cached_tokens, a.new_tokens, a.output_tokens) == (16, 4, 2)
    assert a[4:13] == (0, 10, 24, 100, 130, 150, 150, 300, 400), "ns from the first arrival"
    assert a.landings == (Landing(0, 1, 100), Landing(1, 1, 210))
    assert (b.cached_tokens, b.new_tokens, b.output_tokens, b.landings) == (0, 6, 1, ())
    assert (b.arrival_ns, b.released_ns, b.started_ns, b.first_token_ns) == (25, 40, 45, 300)
    assert [step.chunks for step in recording.steps] == [(Chunk(1, 0, 4),), (Chunk(1, 4, 2), Chunk(0, 0, 4)), ()]
    assert [step.decode_batch for step in recording.steps] == [0, 0, 1]
    assert recording.steps[1].stalls == (LayerStall(1, 32, 0),), "layer 0 had landed, so its wait is no stall"
    assert recording.occupations == (Occupation("h2d", 0, 0, 0, 30, 100, 32), Occupation("h2d", 0, 0, 1, 100, 210, 32))
    assert recording.notes[-1] == "1 requests without a first token are left out"


def test_with_several_ranks_a_layer_is_there_when_the_slowest_has_it() -> None:
    scheduler, worker = logs()
    other = copy.deepcopy(worker)
    (load,) = [entry for entry in other if entry["event"] == "load"]
    load["landed_ns"], load["submitted_ns"] = [1_090, 1_250], 1_023
    recording = assemble([scheduler, worker, other])
    assert recording.requests[0].landings == (Landing(0, 1, 100), Landing(1, 1, 250))
    assert recording.requests[0].submitted_ns == 23
    assert {busy.rank for busy in recording.occupations} == {0, 1}


def test_a_preempted_request_starts_again() -> None:
    scheduler, worker = logs()
    scheduler[6]["batch"] = [["b", 0, 6], ["a", 16, 4]]
    b = assemble([scheduler, worker]).requests[1]
    assert (b.first_started_ns, b.started_ns, b.first_token_ns) == (45, 150, 300)


def test_a_load_that_failed_brought_nothing() -> None:
    scheduler, worker = logs()
    next(entry for entry in worker if entry["event"] == "load")["state"] = "FAILED"
    recording = assemble([scheduler, worker])
    assert recording.requests[0].landings == ()
    assert recording.occupations == ()


def test_what_the_workers_did_not_see_the_end_of_is_left_out() -> None:
    scheduler, worker = logs()
    worker = [entry for entry in worker if entry["event"] != "step"]
    assert assemble([scheduler, worker]).requests == ()


@pytest.mark.parametrize("drop", ["caches", "engine", "admitted"])
def test_logs_that_do_not_fit_together_are_refused(drop: str) -> None:
    found = [[entry for entry in log if entry["event"] != drop] for log in logs()]
    with pytest.raises(ValueError, match="the logs do not fit together"):
        assemble(found)


def write(folder: Path, found: list[Log]) -> None:
    for name, log in zip((SCHEDULER_LOG, "worker-0.jsonl"), found, strict=True):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in log))


def test_logs_are_read_from_a_folder_and_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, logs())
    whole = read_run(tmp_path)
    with (tmp_path / SCHEDULER_LOG).open("a") as file:
        file.write('{"event": "sched')
    assert read_run(tmp_path) == whole == assemble(logs())


def test_a_folder_without_logs_or_with_a_broken_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run: it needs scheduler.jsonl and worker-"):
        read_run(tmp_path)
    write(tmp_path, logs())
    with (tmp_path / "worker-0.jsonl").open("a") as file:
        file.write("nonsense\n{}\n")
    with pytest.raises(ValueError, match="line 7 is no event of a run"):
        read_run(tmp_path)


def test_a_log_is_written_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "folder" / "worker-0.jsonl")
    log.write("caches", num_layers=3)
    ((found),) = read_log(tmp_path / "folder" / "worker-0.jsonl")
    assert (found["event"], found["num_layers"], found["at_ns"] > 0) == ("caches", 3, True)
    log.close()


def test_a_run_that_was_recorded_before_is_kept(tmp_path: Path) -> None:
    """A run of one rank in a folder of two would be read with the other's second rank."""
    write(tmp_path, logs())
    before = (tmp_path / "worker-0.jsonl").read_bytes()
    with pytest.raises(ValueError, match="worker-0.jsonl is of a run that was recorded before: name another folder by"):
        RunLog(tmp_path / "worker-0.jsonl")
    assert (tmp_path / "worker-0.jsonl").read_bytes() == before


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAMELLA_RECORD", raising=False)
    with pytest.raises(ValueError, match="the folder that LAMELLA_RECORD names; set it"):
        record_folder()
    monkeypatch.setenv("LAMELLA_RECORD", str(tmp_path))
    assert record_folder() == tmp_path
