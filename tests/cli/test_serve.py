"""`lamella serve`: what is refused before anything is served. Serving itself: tests/server/test_server_process.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli.main import build_app


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory", "lots"], "a size is a whole number"),
        (["--memory", "900000GiB"], "/dev/shm has"),
        (["--models", "0"], "for '--models'"),
        (["--tier", "ftp://host/x"], "a tier's URL begins with one of"),
        (["--tier", "/dev/null/x"], "/dev/null/x: Not a directory"),
        (["--tier", "/tmp", "--tier", "/tmp"], "a tier stands behind another, and none behind itself; got /tmp, /tmp"),
        (["--memory", "64"], "--memory must be at least 64 KiB, with a unit such as 64GiB; got '64'"),
        (
            ["--tier", "/tmp", "--tier-size", "200"],
            "--tier-size must be at least 64 KiB, with a unit such as 64GiB; got",
        ),
        (["--memory", "900000TiB"], "/dev/shm has"),
        (["--tier-ttl", "7d"], "--tier-size and --tier-ttl limit --tier, which is not given"),
        (["--tier-size", "1GiB"], "--tier-size and --tier-ttl limit --tier, which is not given"),
        (["--allow-kernels"], "--allow-kernels is for --device, which is not given"),
        (["--tcp-key", "server.key_secret"], "--tcp-key and --tcp-clients are for --tcp, which is not given"),
        (["--http", "9471"], "--http is HOST:PORT or off, got '9471'"),
        (["--http", "127.0.0.1:99999"], "--http is HOST:PORT or off"),
        (["--device", "tpu:0"], 'a device is "cpu" or "cuda:N"'),
        (["--device", "cuda:99"], "cuda:99 cannot be used: "),
        (["--tcp", "tcp://0.0.0.0:1"], "--tcp needs --tcp-key and --tcp-clients"),
        (["--tcp", "tcp://0.0.0.0:99999", "--tcp-key", "x", "--tcp-clients", "y"], "with a port up to 65535, got"),
        (["--tcp", "tcp://0.0.0.0", "--tcp-key", "x", "--tcp-clients", "y"], "--tcp is tcp://HOST:PORT"),
        (["--log-level", "loud"], "a log level is debug, info, warning or error, got 'loud'"),
        (["--lease", "soon"], "a span of time"),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_exit_code_2(options: list[str], says: str, tmp_path: Path) -> None:
    folder = tmp_path / "serve"
    result = CliRunner().invoke(build_app(), ["serve", "--folder", str(folder), "--memory", "1MiB", *options])
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
    assert not folder.exists() or not (folder / "server.sock").exists()


def test_a_folder_whose_path_no_socket_may_have_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    result = CliRunner().invoke(build_app(), ["serve", "--folder", str(folder), "--memory", "1MiB"])
    assert result.exit_code == 2, result.output
    assert result.output.strip().endswith(": name a shorter folder")
    assert not folder.exists()


def test_a_port_that_is_taken_is_said_with_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--folder", str(tmp_path / "serve"), "--memory", "1MiB", "--http", at]
        result = CliRunner().invoke(build_app(), ["serve", *options])
    assert result.exit_code == 2
    assert f"{at} cannot be served: Address already in use" in " ".join(result.output.split())


def test_a_file_in_the_place_of_a_folder_is_said_so_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "server"
    file.write_text("kept")
    serve = ["serve", "--folder", str(tmp_path / "s"), "--memory", "1MiB"]
    for options in (["serve", "--folder", str(file), "--memory", "1MiB"], [*serve, "--tier", str(file)]):
        result = CliRunner().invoke(build_app(), options)
        assert result.exit_code == 2
        assert f"{file} is a file, and a folder is wanted there: name another" in " ".join(result.output.split())
    assert file.read_text() == "kept"


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    result = CliRunner().invoke(build_app(), ["serve", "--folder", str(tmp_path / "open"), "--memory", "1MiB"])
    assert result.exit_code == 2
    assert "mode 0700" in result.output


def test_its_own_folder_is_no_tier(tmp_path: Path) -> None:
    folder = tmp_path / "serve"
    options = ["--folder", str(folder), "--memory", "1MiB", "--tier", f"{tmp_path}/./serve"]
    result = CliRunner().invoke(build_app(), ["serve", *options])
    assert result.exit_code == 2, result.output
    assert "is the server's own folder" in " ".join(result.output.split())
