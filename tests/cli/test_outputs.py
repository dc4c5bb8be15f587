"""A file that a verb writes holds all of a result or what it held before."""

import errno
import os
import stat
from pathlib import Path

import pytest

from lamella.cli._outputs import whole_file, write_text


def test_a_result_takes_the_place_of_an_earlier_one_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("earlier")
    path.chmod(0o640)
    write_text(path, "now")
    assert path.read_text() == "now"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_result_has_the_mode_that_any_new_file_has(tmp_path: Path) -> None:
    write_text(tmp_path / "result.json", "now")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "result.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "no room"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_a_result_that_was_not_finished_leaves_the_earlier_one_and_nothing_else(
    failure: BaseException, tmp_path: Path
) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("earlier")
    with pytest.raises(type(failure)) as raised, whole_file(path) as place:
        assert place.suffix == ".csv", "by which a table's form is known"
        place.write_text("half of")
        raise failure
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
    if isinstance(failure, OSError):
        assert raised.value.filename == str(path)


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("earlier")
    (tmp_path / "link.json").symlink_to("kept.json")
    write_text(tmp_path / "link.json", "now")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "kept.json").read_text() == "now"


def test_a_device_is_written_in_place() -> None:
    write_text(Path("/dev/null"), "now")
    assert not Path("/dev/null").is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into every folder")
def test_a_file_in_a_folder_that_takes_no_new_one_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("earlier")
    tmp_path.chmod(0o555)
    write_text(path, "now")
    assert path.read_text() == "now"
