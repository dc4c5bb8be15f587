"""The `lamella` command as a process: what no verb sees, such as where its output goes."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from lamella.cli.main import main; main()"]
SWEEP = ["sweep", "--concurrency", "1", "--ratios", "1"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that has no room")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], SWEEP])
def test_a_full_disk_is_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: cannot write: No space left on device"
    assert "Traceback" not in done.stderr


def test_a_file_longer_than_may_be_is_one_sentence_and_an_earlier_result_stays(tmp_path: Path) -> None:
    """As a quota that is spent, or a disk that fails: what cannot be written is nobody's fault in here."""
    earlier = tmp_path / "lamella-out" / "sweep.json"
    earlier.parent.mkdir()
    earlier.write_text("of a longer run")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); {COMMAND[-1]}"
    done = subprocess.run(
        [sys.executable, "-c", limited, *SWEEP], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: cannot write lamella-out/sweep.json: File too large"
    assert "Traceback" not in done.stderr
    assert [path.name for path in earlier.parent.iterdir()] == ["sweep.json"], "nothing half written beside it"
    assert earlier.read_text() == "of a longer run"


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EROFS])
def test_whatever_keeps_a_result_from_being_written_is_one_sentence(number: int) -> None:
    failing = (
        "import sys; from unittest import mock; from lamella.cli import main; "
        f"app = mock.Mock(side_effect=OSError({number}, 'no')); "
        "main.build_app = lambda: app; main.main()"
    )
    done = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: cannot write: no\n")


NO_UTF_8: dict[str, dict[str, str]] = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("encoding", NO_UTF_8)
@pytest.mark.parametrize(
    "verb", [SWEEP, ["simulate", "--concurrency", "1", "--requests", "2"]], ids=["sweep", "simulate"]
)
def test_a_terminal_without_unicode_costs_no_result(encoding: str, verb: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *verb],
        env={**os.environ, **NO_UTF_8[encoding]},
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode("latin-1")  # what is not of a table may be UTF-8 all the same
    assert said.splitlines()[-1].startswith(("Turn it on", "Leave it off"))
    assert (tmp_path / "lamella-out" / f"{verb[0]}.json").exists()


def test_a_reader_that_has_gone_is_no_traceback(tmp_path: Path) -> None:
    with subprocess.Popen([*COMMAND, *SWEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert b"Traceback" not in said


@pytest.mark.parametrize("group", [(), ("bench",), ("cache",)], ids=["lamella", "bench", "cache"])
def test_help_says_of_every_verb_what_it_does_in_a_line_that_is_not_cut(group: tuple[str, ...]) -> None:
    done = subprocess.run(
        [*COMMAND, *group, "--help"], env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True
    )
    verbs = done.stdout.partition("Commands:\n")[2].splitlines()
    assert len(verbs) > 1
    for verb in verbs:
        assert re.fullmatch(r"  [a-z]+ +[A-Z].*[.?]", verb), verb
        assert not verb.endswith("..."), verb


@pytest.mark.parametrize(
    ("verb", "named"), [("replay", "[TRACE]"), ("validate", "{RESULTS}..."), ("sweep", "STRATEGY")]
)
def test_help_calls_what_a_verb_takes_by_the_documents_names(verb: str, named: str) -> None:
    done = subprocess.run([*COMMAND, verb, "--help"], capture_output=True, text=True, check=True)
    assert named in done.stdout
    assert "list[str]" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["verify", "--tokens", "ten"], "--tokens", "ten"),
        (["replay", "--rate-scale", ""], "--rate-scale", ""),
        (["calibrate", "mine.json", "--repeats", "0"], "--repeats", "0"),
        (["bench", "transfer", "--repeats", "1.5"], "--repeats", "1.5"),
    ],
)
def test_a_value_that_is_not_of_its_options_type_or_range_is_named(
    arguments: list[str], option: str, value: str, tmp_path: Path
) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert option in said
    assert re.search(rf"\bgot '?{re.escape(value)}'?$", said), said
    assert not list(tmp_path.iterdir()), "nothing is written"
