"""Which commit a measurement names: what the environment says, what the installation was built from, the checkout."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.cuda_ext.commit import BUILT_FROM, VARIABLE, commit_of

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")

    def run(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return run


@pytest.fixture
def checkout(tmp_path: Path, git: Git) -> Path:
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    return tmp_path


def test_a_checkout_names_its_commit_and_what_is_not_committed(checkout: Path, git: Git) -> None:
    head = git("rev-parse", "HEAD")
    git("tag", "-a", "v1", "-m", "a tag is no commit")
    assert commit_of(checkout, {}) == head
    (checkout / "file").write_text("two")
    assert commit_of(checkout, {}) == f"{head}-dirty"


def test_an_installation_names_what_it_was_built_from_wherever_it_lies(checkout: Path) -> None:
    (checkout / BUILT_FROM).write_text("0123abcd\n")
    assert commit_of(checkout, {}) == "0123abcd"


def test_the_environment_goes_before_all(checkout: Path) -> None:
    (checkout / BUILT_FROM).write_text("0123abcd\n")
    assert commit_of(checkout, {VARIABLE: "of the job"}) == "of the job"
    assert commit_of(checkout, {VARIABLE: " "}) == "0123abcd", "an empty variable says nothing"


def test_a_folder_inside_of_another_checkout_does_not_name_its_commit(checkout: Path) -> None:
    inside = checkout / "lib" / "lamella"
    inside.mkdir(parents=True)
    assert commit_of(inside, {}) == "unknown"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_where_nothing_says_it_the_commit_is_unknown(content: bytes, tmp_path: Path) -> None:
    assert commit_of(tmp_path, {}) == "unknown"
    (tmp_path / BUILT_FROM).write_bytes(content)
    (tmp_path / ".git").write_text("no repository")
    assert commit_of(tmp_path, {}) == "unknown"


def test_without_git_a_checkouts_commit_is_unknown(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit_of(checkout, {}) == "unknown"
