"""Many independent cells, computed in one process, on all cores, or on the machines of a Ray cluster.

The result is a matter of the cells, the work and the seed alone (SIM-7): every cell gets a seed of its own, spawned
from the sweep's by position, and results come back in the order of the cells. So a sweep can be stopped, resumed from
its journal, and finished elsewhere, and is the same to the byte. Whatever ends the process that computes it ends its
processes too, even what lets it clean nothing up.

A journal is a file of JSON lines: one that says which sweep it is, then one for each cell that is done. A line that was
cut off by a crash, or does not match its own check, is computed again, and so is what follows it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from lamella.sim.bounds import MOST_WORKERS, check_range, check_seed

JOURNAL_VERSION: Final = 2
BATCHES_A_WORKER: Final = 8
"""Cells travel in batches; so many for each worker keep the last ones from waiting for one."""

Answer = dict[str, Any]
Work = Callable[[Any, Any, int], Answer]
"""`work(shared, cell, seed)`: a function of a module, so that another process can find it; what it returns is JSON."""
Batch = list[tuple[int, Any]]


class JournalError(ValueError):
    """A journal that belongs to another sweep; nothing of it was changed."""


class Runner(Enum):
    """Where cells are computed."""

    SERIAL = "serial"
    PROCESSES = "processes"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class Running:
    """How cells are run.

    Attributes:
        runner: where.
        workers: processes; None for one a core. Ray decides by its cluster.
        journal: a file that keeps what is done; cells found in it are not computed again.
        on_done: called with how many cells have become done, as they do; first with those found in the journal.

    Raises:
        ValueError: fewer than 1 worker, or more than 1,024.
    """

    runner: Runner = Runner.SERIAL
    workers: int | None = None
    journal: Path | None = None
    on_done: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_range("workers", self.workers, 1, MOST_WORKERS)


def cell_seeds(seed: int, count: int) -> list[int]:
    """A seed for each cell, independent of each other and of how many cells follow.

    Raises:
        ValueError: a negative seed.

    >>> cell_seeds(7, 2) == cell_seeds(7, 5)[:2], len(set(cell_seeds(7, 100)))
    (True, 100)
    """
    check_seed(seed)
    return [int(child.generate_state(1, np.uint64)[0]) for child in np.random.SeedSequence(seed).spawn(count)]


def run_cells(work: Work, shared: Any, cells: Sequence[Any], seed: int, how: Running | None = None) -> list[Answer]:
    """The answers, in the order of the cells.

    Args:
        work: computes one cell.
        shared: what all cells need; sent to each worker once. Its `repr`, and that of a cell, must say all that an
            answer depends on.
        cells: what differs.
        seed: of the whole sweep.
        how: where it runs; None for this process.

    Raises:
        ValueError: a negative seed.
        JournalError: a journal of another sweep.
        ImportError: the runner needs a package that is not installed; the message says how to get it.
        OSError: the journal cannot be written.
    """
    how = how or Running()
    seeds = cell_seeds(seed, len(cells))
    answers: list[Answer | None] = [None] * len(cells)
    log: TextIO | None = None
    if how.journal is not None:
        name = _fingerprint(work, shared, cells, seed)
        for position, answer in _open_journal(how.journal, name, len(cells)):
            answers[position] = answer
        log = how.journal.open("a", encoding="utf-8")
    missing = [position for position, answer in enumerate(answers) if answer is None]
    if how.on_done is not None and len(missing) < len(cells):
        how.on_done(len(cells) - len(missing))
    batch: Batch = [(position, (cells[position], seeds[position])) for position in missing]
    runner, workers = _RUNNERS[how.runner], how.workers or os.cpu_count() or 1
    try:
        with closing(runner(work, shared, batch, workers)) as finished:  # whatever stops this stops the runner
            for done in finished:
                for position, answer in done:
                    # Through JSON, so that an answer is the same whether it was computed now or read from a journal.
                    text = json.dumps(answer)
                    answers[position] = json.loads(text)
                    if log is not None:
                        check = _check_of(position, text)
                        log.write(f'{{"cell": {position}, "check": "{check}", "answer": {text}}}\n')
                if log is not None:
                    log.flush()
                if how.on_done is not None:
                    how.on_done(len(done))
    finally:
        if log is not None:
            log.close()
    return [answer for answer in answers if answer is not None]


# ---------------------------------------------------------------- runners

Done = list[tuple[int, Answer]]
Finished = Generator[Done, None, None]
"""What a runner gives, batch by batch; closing it ends what it has begun."""


def _run_batch(work: Work, shared: Any, batch: Batch) -> Done:
    return [(position, work(shared, cell, seed)) for position, (cell, seed) in batch]


def _serially(work: Work, shared: Any, batch: Batch, workers: int) -> Finished:
    return (_run_batch(work, shared, [entry]) for entry in batch)


def _split(batch: Batch, workers: int) -> list[Batch]:
    """Neighbouring cells cost about the same, so each batch takes every n-th."""
    count = min(len(batch), workers * BATCHES_A_WORKER)
    return [batch[start::count] for start in range(count)]


_shared: Any = None
"""In a worker process: what its first message brought."""


def _start_worker(shared: Any, lifeline: Connection) -> None:
    """The process has what all cells need, and ends with the one that started it."""
    global _shared
    _shared = shared
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    """Ends this process, in the midst of a cell, when nobody holds the other end any more."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(0)


def _run_in_worker(work: Work, batch: Batch) -> Done:
    return _run_batch(work, _shared, batch)


def _in_processes(work: Work, shared: Any, batch: Batch, workers: int) -> Finished:
    if len(batch) < 2 or workers < 2:
        yield from _serially(work, shared, batch, workers)
        return
    # spawn: a child that was forked while another thread held a lock would inherit it locked, and the lifeline's end.
    context = multiprocessing.get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)
    with (
        lifeline,
        held,
        ProcessPoolExecutor(min(workers, len(batch)), context, _start_worker, (shared, lifeline)) as pool,
    ):
        try:
            with _deaf_children():
                futures = [pool.submit(_run_in_worker, work, part) for part in _split(batch, workers)]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            held.close()  # they end now; without it the pool would let them finish what they have
            raise


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside hear no ctrl-C, which reaches the whole group: what follows is this one's to say."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_ray(work: Work, shared: Any, batch: Batch, workers: int) -> Finished:
    try:
        import ray
    except ImportError as missing:
        raise ImportError("sweeps on a cluster need Ray: pip install 'lamella[ray]'") from missing
    begun = not ray.is_initialized()
    if begun:
        # RAY_ADDRESS names a cluster; without it this machine is one.
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    try:
        cores = int(ray.cluster_resources().get("CPU", 1))
        everywhere = ray.put(shared)
        remote = ray.remote(max_retries=3)(_run_batch)
        waiting = [remote.remote(work, everywhere, part) for part in _split(batch, cores)]
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(ready)
    finally:
        if begun:
            ray.shutdown()


_RUNNERS: Final = {Runner.SERIAL: _serially, Runner.PROCESSES: _in_processes, Runner.RAY: _on_ray}


# ---------------------------------------------------------------- journal


def _fingerprint(work: Work, shared: Any, cells: Sequence[Any], seed: int) -> str:
    """Which sweep it is: another work, device, list of cells or seed gives another."""
    parts = (f"{work.__module__}.{work.__qualname__}", repr(shared), seed, *map(repr, cells))
    return sha256(json.dumps(parts).encode()).hexdigest()


def _check_of(position: int, text: str) -> str:
    """What a cell's line says of itself, so that a digit that changed on the disk is no answer."""
    return sha256(f"{position} {text}".encode()).hexdigest()[:16]


def _open_journal(path: Path, name: str, count: int) -> list[tuple[int, Answer]]:
    """What the journal holds of this sweep; a fresh one is begun where there is none.

    Raises:
        JournalError: it is another sweep's, or no journal.
    """
    head = json.dumps({"kind": "lamella.journal", "schema_version": JOURNAL_VERSION, "sweep": name})
    if not path.exists() or path.stat().st_size == 0:
        path.write_text(head + "\n", encoding="utf-8")
        return []
    first, *lines = path.read_bytes().split(b"\n")
    if first != head.encode():
        raise JournalError(
            f"{path} is the journal of another sweep (other cells, profile, seed or version); name another file, or "
            "remove it"
        )
    found: list[tuple[int, Answer]] = []
    whole = len(first) + 1
    for line in lines[:-1]:  # what follows the last line end was cut off
        try:
            entry = json.loads(line)
            position, check, answer = entry["cell"], entry["check"], entry["answer"]
        except (ValueError, KeyError, TypeError):
            break
        if type(position) is not int or not 0 <= position < count or not isinstance(answer, dict):
            break
        if check != _check_of(position, json.dumps(answer)):
            break
        found.append((position, answer))
        whole += len(line) + 1
    with path.open("rb+") as file:
        file.truncate(whole)
    return found
