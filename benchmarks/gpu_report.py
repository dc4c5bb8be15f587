#!/usr/bin/env python3
"""Everything that only a GPU can show, in one run: tests, a memory checker, planted faults, stress, figures.

  gpu_report.py [--device cuda:0] [--out out] [--steps tests,sanitizer,mutants,stress,bench,calibrate]
                [--stress-seconds 240] [--arch native] [--faults out/faults]

Run it from the root of a checkout, in an environment that has Lamella with its CUDA library, torch and the dev extra.
Writes OUT/gpu-report.json, OUT/bench-transfer.json and OUT/profile.json. The report carries a digest of the native
sources; copied to benchmarks/results/gpu-report.json it is what `make test` compares with the sources it finds.

Steps that must have the GPU to themselves (bench, calibrate) come last; before them stress runs beside the others.
The step build-faults needs no GPU: it leaves libraries with planted faults in FAULTS; mutants builds what is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from result_file import write_json

from lamella.cuda_ext.device import Device
from lamella.cuda_ext.provenance import provenance_of, source_digest

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("tests", "sanitizer", "mutants", "stress", "bench", "calibrate")
BUILD = "build-faults"
LAWS = "tests/gpu/test_engine_laws.py"
SANITIZED = {
    "memcheck": "each_method or left_to_itself or straight_into_blocks",
    # initcheck does not see what cudaMemcpyBatchAsync writes, and would call every byte of it uninitialised.
    "initcheck": "one_by_one",
}


def run(command: list[str], log: Path, timeout_s: float, **variables: str) -> int:
    """Exit code, 124 past the limit; output goes to `log`."""
    with log.open("w") as output:
        try:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124
    return done.returncode


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *arguments]


def junit(path: Path) -> dict[str, Any]:
    """Counts and names out of a junit file; a file that was not written counts as a failure of its own."""
    if not path.is_file():
        return {"passed": 0, "failed": ["no report was written"], "skipped": []}
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(name)
        elif (skip := case.find("skipped")) is not None:
            found["skipped"].append(f"{name}: {skip.get('message')}")
        else:
            found["passed"] += 1
    return found


def step_tests(out: Path, _: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    path = out / "gpu-tests.xml"
    code = run(
        pytest_command("tests/gpu", "tests/cuda_ext", f"--junitxml={path}", "--timeout=120", "--timeout-method=thread"),
        out / "gpu-tests.log",
        400,
        HYPOTHESIS_PROFILE="ci",
    )
    return {**junit(path), "exit_code": code, "seconds": round(time.monotonic() - start, 1)}


def tried_alone(first: dict[str, Any], out: Path) -> dict[str, Any]:
    """The tests' result, with those that failed run once more when nothing else has the device.

    The first run is beside the stress, where a bound on time can be missed. What fails again has failed; what passes
    alone is listed under `passed_alone`.
    """
    if not all("::" in name for name in first["failed"]):
        return first  # the first run left no report: there is no name to go by
    places = [f"{name.split('::')[0].replace('.', '/')}.py::{name.split('::', 1)[1]}" for name in first["failed"]]
    path = out / "gpu-tests-alone.xml"
    run(
        pytest_command(*places, f"--junitxml={path}", "--timeout=60", "--timeout-method=thread"),
        out / "gpu-tests-alone.log",
        120,
        HYPOTHESIS_PROFILE="ci",
    )
    again = junit(path)
    still = [name for name in first["failed"] if name in again["failed"] or not path.is_file()]
    alone = [name for name in first["failed"] if name not in still]
    return {**first, "passed": first["passed"] + len(alone), "failed": still, "passed_alone": alone}


def step_sanitizer(out: Path, _: argparse.Namespace) -> dict[str, Any]:
    """The laws' own properties, fewer examples, under compute-sanitizer."""
    found = {}
    for tool, tests in SANITIZED.items():
        log, path = out / f"{tool}.log", out / f"{tool}.xml"
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        code = run(
            command + pytest_command(LAWS, "-k", tests, f"--junitxml={path}"), log, 300, HYPOTHESIS_PROFILE="dev"
        )
        summaries = re.findall(r"ERROR SUMMARY: (\d+) error", log.read_text())
        found[tool] = {"exit_code": code, "errors": sum(map(int, summaries)) if summaries else None, **junit(path)}
    return found


def planted_faults() -> list[Any]:
    """Those of the header that kernels and planner share."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from mutants import HEADER, MUTANTS  # type: ignore[import-not-found]

    return [mutant for mutant in MUTANTS if mutant.path == HEADER]


def at_once() -> int:
    """Builds side by side; each takes two cores."""
    return max(1, min(16, len(os.sched_getaffinity(0)) // 2))


def fault_library(mutant: Any, options: argparse.Namespace) -> Path:
    """The folder of the CUDA library with the fault in it, built unless it is there for exactly these sources.

    Raises:
        RuntimeError: it does not build.
    """
    from mutants import plant

    with tempfile.TemporaryDirectory() as temporary:
        package = plant(mutant, Path(temporary))
        folder = options.faults / re.sub(r"[^a-z0-9]+", "-", mutant.name.lower())
        digest, stamp = source_digest(package / "cuda_ext" / "csrc"), folder / "sources"
        if stamp.is_file() and stamp.read_text() == digest:
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        build, log = Path(temporary) / "build", folder / "build.log"
        configure = ["cmake", "-S", str(package / "cuda_ext"), "-B", str(build), "-DLAMELLA_CUDA=ON"]
        configure += [f"-DCMAKE_CUDA_ARCHITECTURES={options.arch}", "-DCMAKE_BUILD_TYPE=Release"]
        if run(configure, log, 60) or run(
            ["cmake", "--build", str(build), "--target", "lamella_cuda", "-j2"], log, 900
        ):
            raise RuntimeError(f"{mutant.name} does not build: {log.read_text()[-600:]}")
        shutil.copy(build / "liblamella_cuda.so", folder)
        stamp.write_text(digest)
        return folder


def step_mutants(out: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each planted fault, tried with the laws on the GPU until one of them fails."""

    def try_one(mutant: Any) -> dict[str, Any]:
        try:
            folder = fault_library(mutant, options)
        except RuntimeError as failure:
            return {"name": mutant.name, "killed": False, "why": str(failure)}
        path = out / f"{folder.name}.xml"
        run(
            pytest_command(LAWS, "-x", f"--junitxml={path}"),
            out / f"{folder.name}.log",
            200,
            LAMELLA_LIBRARY_DIR=str(folder.resolve()),
            HYPOTHESIS_PROFILE="verdict",
        )
        failed = junit(path)["failed"]
        return {"name": mutant.name, "killed": bool(failed), "why": failed[0] if failed else "every law held"}

    with ThreadPoolExecutor(at_once()) as pool:
        return list(pool.map(try_one, planted_faults()))


def step_stress(out: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    path = out / f"stress-{seed}.json"
    program = [sys.executable, "tests/support/stress.py", "--device", options.device]
    bounds = ["--seconds", str(options.stress_seconds), "--seed", str(seed)]
    code = run([*program, *bounds, "--json", str(path)], out / f"stress-{seed}.log", options.stress_seconds + 90)
    if not path.is_file():
        log = (out / f"stress-{seed}.log").read_text()
        return {"seed": seed, "exit_code": code, "problems": [f"no report: {log[-600:]}"]}
    found: dict[str, Any] = json.loads(path.read_text())
    return {**found, "exit_code": code}


def lamella(out: Path, *arguments: str) -> None:
    """One of our own commands; its tables go to this program's output as well."""
    log = out / f"{arguments[0]}.log"
    code = run([sys.executable, "-c", "from lamella.cli.main import main; main()", *arguments], log, 400)
    print(log.read_text())
    if code:
        print(f"lamella {' '.join(arguments)} ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--stress-seconds", type=float, default=240)
    parser.add_argument("--arch", default="native", help="CUDA architecture that planted faults are built for")
    parser.add_argument("--faults", type=Path, default=ROOT / "out" / "faults", help="libraries with planted faults")
    parser.add_argument("--bench-options", default="", help="further options of lamella bench transfer")
    options = parser.parse_args()
    steps = options.steps.split(",")
    if unknown := set(steps) - {*STEPS, BUILD}:
        parser.error(f"steps are {', '.join(STEPS)} and {BUILD}, got {', '.join(sorted(unknown))}")
    if BUILD in steps:
        with ThreadPoolExecutor(at_once()) as pool:
            for folder in pool.map(lambda mutant: fault_library(mutant, options), planted_faults()):
                print(folder, flush=True)
        return 0
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    provenance = provenance_of(Device(options.device), ["benchmarks/gpu_report.py", *sys.argv[1:]], ROOT)
    report: dict[str, Any] = {"schema_version": 1, "provenance": asdict(provenance)}

    def keep(name: str, found: Any) -> None:
        """Written after every step, so that a machine that is taken away takes only what was unfinished."""
        report[name] = found
        write_json(out / "gpu-report.json", report)
        print(name, json.dumps(found)[:2500], flush=True)

    with ThreadPoolExecutor(4) as beside:
        stress: list[Future[dict[str, Any]]] = []
        if "stress" in steps:
            stress = [beside.submit(step_stress, out, options, seed) for seed in (1, 2)]
        if "tests" in steps:
            keep("tests", step_tests(out, options))
        others = {
            name: beside.submit(step, out, options)
            for name, step in (("sanitizer", step_sanitizer), ("mutants", step_mutants))
            if name in steps
        }
        for name, future in others.items():
            keep(name, future.result())
        if stress:
            keep("stress", [future.result() for future in stress])
    if report.get("tests", {}).get("failed"):
        keep("tests", tried_alone(report["tests"], out))
    if "bench" in steps:
        where = ["--device", options.device, "--json", str(out / "bench-transfer.json")]
        lamella(out, "bench", "transfer", *where, *options.bench_options.split())
    if "calibrate" in steps:
        lamella(out, "calibrate", str(out / "profile.json"), "--device", options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
