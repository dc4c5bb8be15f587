"""`lamella serve`: the cache server of a host."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from lamella.cli._durations import parse_duration_s
from lamella.cli._refusal import refuse_bad_input
from lamella.cli._sizes import parse_bytes

_log = logging.getLogger("lamella.serve")

LEAST_POOL_BYTES: Final = 64 << 10
"""Less holds no object of any model, and is a unit that was forgotten."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""

    @app.command(short_help="Keeps objects for the engines of this host, until SIGTERM.")
    def serve(
        memory: Annotated[str, typer.Option(help="Memory for objects, such as 64GiB; all of it in /dev/shm.")] = "4GiB",
        folder: Annotated[
            Path | None, typer.Option(help="Where the socket lies; by default $XDG_RUNTIME_DIR/lamella.")
        ] = None,
        models: Annotated[int, typer.Option(min=1, max=1024, help="Models that share the memory, in equal parts.")] = 1,
        tier: Annotated[
            list[str] | None,
            typer.Option(metavar="URL", help="A slower store behind the memory: a folder or URL."),
        ] = None,
        tier_size: Annotated[str | None, typer.Option(help="Limit of each folder among the tiers.")] = None,
        tier_ttl: Annotated[str | None, typer.Option(help="How long tiers keep an object, such as 7d.")] = None,
        http: Annotated[
            str, typer.Option(help="HOST:PORT of /metrics and /healthz; port 0 takes a free one; off: none.")
        ] = "127.0.0.1:9471",
        device: Annotated[
            str | None, typer.Option(help='"cpu" or "cuda:N": also moves bytes for workers that ask for it.')
        ] = None,
        allow_kernels: Annotated[
            bool, typer.Option("--allow-kernels", help="With --device: also objects that need a kernel.")
        ] = False,
        lock_memory: Annotated[bool, typer.Option("--lock-memory", help="Keep the memory from being swapped.")] = False,
        numa_node: Annotated[int | None, typer.Option(min=0, help="Memory node to prefer.")] = None,
        lease: Annotated[str, typer.Option(help="How long what was looked up waits for its retrieve.")] = "30s",
        drain: Annotated[str, typer.Option(help="How long a stop waits for transfers and tiers.")] = "30s",
        tcp: Annotated[str | None, typer.Option(help="Also listen here, such as tcp://0.0.0.0:5570.")] = None,
        tcp_key: Annotated[Path | None, typer.Option(help="With --tcp: the server's .key_secret file.")] = None,
        tcp_clients: Annotated[
            Path | None, typer.Option(help="With --tcp: folder of the clients' public .key files.")
        ] = None,
        log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    ) -> None:
        """Keeps objects for the engines of this host, until SIGTERM; lines of JSON on stderr say what happens."""
        try:
            from lamella.cuda_ext.numa import online_nodes
            from lamella.server.endpoint import CurveKeys, default_folder
            from lamella.server.http import StatusPages
            from lamella.server.logs import level_of, log_json
            from lamella.server.loop import CacheServer
            from lamella.server.mover import movement
            from lamella.server.settings import ServerSettings
            from lamella.server.tcp import TcpDoor
        except ImportError as missing:
            remedy = "" if "pip install" in str(missing) else ": pip install 'lamella[server]'"
            typer.echo(f"Error: {missing}{remedy}", err=True)
            raise typer.Exit(1) from missing

        with refuse_bad_input(), contextlib.ExitStack() as opened:
            level = level_of(log_level)
            address = None if http == "off" else _address(http)
            for given, name, needs in (
                (tier_size or tier_ttl, "--tier-size and --tier-ttl limit", "--tier" if not tier else ""),
                (allow_kernels, "--allow-kernels is for", "--device" if device is None else ""),
                (tcp_key or tcp_clients, "--tcp-key and --tcp-clients are for", "--tcp" if tcp is None else ""),
            ):
                if given and needs:
                    raise ValueError(f"{name} {needs}, which is not given: name one, or leave them out")
            settings = ServerSettings(
                folder=folder or default_folder(),
                pool_bytes=_room(parse_bytes(memory), "--memory", memory),
                models=models,
                tiers=tuple(tier or ()),
                tier_max_bytes=None if tier_size is None else _room(parse_bytes(tier_size), "--tier-size", tier_size),
                tier_ttl_s=None if tier_ttl is None else parse_duration_s(tier_ttl),
                lease_s=parse_duration_s(lease),
                drain_s=parse_duration_s(drain),
                lock_memory=lock_memory,
                numa_node=numa_node,
            )
            _check_memory(settings.pool_bytes)
            for url in settings.tiers:
                _check_tier(url, settings.folder)
            if numa_node is not None and numa_node not in (nodes := online_nodes()):
                raise ValueError(
                    f"--numa-node must be one of this machine's memory nodes {', '.join(map(str, nodes))}; "
                    f"got {numa_node}"
                )
            door = None
            if tcp is not None:
                if tcp_key is None or tcp_clients is None:
                    raise ValueError("--tcp needs --tcp-key and --tcp-clients: without keys nobody is let in")
                _check_port(tcp)
                door = TcpDoor(tcp, CurveKeys.load(tcp_key), tcp_clients)
            moves = None
            if device is not None:
                try:
                    moves = movement(device, allow_kernels=allow_kernels)
                except (ImportError, RuntimeError) as missing:
                    raise ValueError(f"{device} cannot be used: {missing}") from missing
            try:
                server = CacheServer(settings, tcp=door, movement=moves)
            except RuntimeError as taken:
                raise ValueError(str(taken)) from taken
            opened.callback(server.close)
            if address is not None:
                pages = StatusPages(*address, server.metrics, server.health)
                http = f"{address[0]}:{pages.port}"
            opened.pop_all()

        def stop(number: int, frame: FrameType | None) -> None:
            server.stop()

        log_json(level)
        sys.setswitchinterval(0.0005)  # a tier's thread lets the loop go on at once
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        said = {"folder": str(settings.folder), "memory_bytes": settings.pool_bytes, "http": http, "tcp": tcp or "off"}
        _log.info("serving", extra=said)
        try:
            server.run()
        finally:
            if address is not None:
                pages.close()
        _log.info("stopped")
        if server.lost_folder:
            raise typer.Exit(1)


def _check_tier(url: str, folder: Path) -> None:
    """A folder among the tiers can be written, before an engine stands before one that cannot.

    Raises:
        ValueError: it is the server's own.
        OSError: it cannot be made or written.
    """
    from lamella.connector.storage.tier_url import TierUrl

    where = TierUrl.parse(url)
    if where.scheme != "file":
        return
    path = Path(where.url)
    if path.resolve() == folder.resolve():
        raise ValueError(f"--tier {url} is the server's own folder, where its socket lies: name another")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))


def _room(num_bytes: int, option: str, said: str) -> int:
    """The bytes, if an object may fit.

    Raises:
        ValueError: they are too few.
    """
    if num_bytes < LEAST_POOL_BYTES:
        raise ValueError(
            f"{option} must be at least {LEAST_POOL_BYTES >> 10} KiB, with a unit such as 64GiB; got {said!r}"
        )
    return num_bytes


def _check_memory(pool_bytes: int) -> None:
    space = os.statvfs("/dev/shm")
    if pool_bytes > space.f_bavail * space.f_frsize:
        raise ValueError(
            f"/dev/shm has {space.f_bavail * space.f_frsize} bytes left, --memory asks for {pool_bytes}: ask for less, "
            "or mount a larger one (docker: --shm-size; Kubernetes: an emptyDir of medium Memory)"
        )


def _check_port(tcp: str) -> None:
    """A port that is none is not taken modulo 65,536, as the library would: it would be another door than was said."""
    port = tcp.rpartition(":")[2]
    if port != "*" and not (re.fullmatch(r"[0-9]{1,5}", port) and int(port) <= 65535):
        raise ValueError(f"--tcp is tcp://HOST:PORT with a port up to 65535, got {tcp!r}")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"--http is HOST:PORT or off, got {text!r}")
    return host.strip("[]"), int(port)
