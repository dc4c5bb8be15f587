"""Ten thousand retrieves over eight connections, one in a hundred given up, a rank killed every five hundred."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from child_process import SUPPORT
from lamella.server.connection import Connection
from lamella.server.protocol import Stats, StatsReport, TransferSide
from rank_driver import ServerProcess, serving

pytestmark = pytest.mark.slow
RETRIEVES, RANKS, BETWEEN_KILLS = int(os.environ.get("LAMELLA_LOAD_RETRIEVES", "10000")), 8, 500
PROGRAM = SUPPORT / "rank_load.py"


class Load:
    """Eight ranks, half of each transfer side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seed = 0
        self.pids: list[int] = []
        self.counts: Counter[str] = Counter()
        self.selector = selectors.DefaultSelector()
        self.ranks = [self.start(index) for index in range(RANKS)]

    def start(self, index: int) -> subprocess.Popen[str]:
        self.seed += 1
        side = list(TransferSide)[index % 2]
        command = [sys.executable, str(PROGRAM), str(self.folder), f"engine-{index}", side.value, str(self.seed)]
        rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert rank.stdout is not None
        self.pids.append(rank.pid)
        self.selector.register(rank.stdout, selectors.EVENT_READ, index)
        return rank

    def kill(self, index: int) -> None:
        rank = self.ranks[index]
        assert rank.stdout is not None
        self.selector.unregister(rank.stdout)
        rank.kill()
        rank.wait(20)
        rank.stdout.close()

    def run(self, retrieves: int) -> None:
        """So many more have ended, and every 500 a rank was killed and started anew."""
        until, killed = self.counts.total() + retrieves, self.counts.total()
        silent_since = time.monotonic()
        while self.counts.total() < until:
            for key, _ in self.selector.select(1.0):
                line = os.read(key.fd, 65536).decode()
                assert line, f"rank {key.data} ended: {self.counts}"
                self.counts.update(word for word in line.split() if word)
                silent_since = time.monotonic()
            assert time.monotonic() - silent_since < 60, f"nothing ends any more: {self.counts}"
            if self.counts.total() - killed >= BETWEEN_KILLS:
                killed += BETWEEN_KILLS
                index = self.seed % RANKS
                self.kill(index)
                self.ranks[index] = self.start(index)

    def stop(self) -> None:
        for index in range(RANKS):
            self.kill(index)
        self.selector.close()


def _figures(folder: Path) -> dict[str, float]:
    with Connection(folder, timeout_s=5) as connection:
        return connection.call(Stats(), StatsReport).figures


def _rss_mib(server: ServerProcess) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    own = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(own[0].split()[1]) / 1024


@pytest.mark.timeout(1200)
def test_ten_thousand_retrieves_leave_no_wrong_byte_and_nothing_held(tmp_path: Path) -> None:
    with serving(tmp_path / "s", "--memory", "1MiB", "--lease", "5s") as server:
        load = Load(tmp_path / "s")
        began = time.monotonic()
        try:
            load.run(RETRIEVES // 5)
            warm_mib = _rss_mib(server)
            load.run(RETRIEVES - load.counts.total())
        finally:
            load.stop()
        took_s = time.monotonic() - began
        end = time.monotonic() + 12  # a lease, and the grace time of what the dead were writing
        while True:
            figures = _figures(tmp_path / "s")
            held = {
                name: value
                for name, value in figures.items()
                if value and (name.startswith("lamella_server_parts{") or name == "lamella_server_sessions")
            }
            if not held or time.monotonic() > end:
                break
            time.sleep(0.1)
        rss_mib = _rss_mib(server)
        pinned = {name: value for name, value in figures.items() if "state=pinned" in name or "state=writing" in name}
    pids = [*load.pids, server.process.pid]
    left = [name for name in os.listdir("/dev/shm") if any(f"-{pid}-" in name for pid in pids)]
    print(
        f"{load.counts.total()} retrieves in {took_s:.0f} s: {dict(load.counts)}; {load.seed - RANKS} ranks killed; "
        f"server RSS {warm_mib:.1f} -> {rss_mib:.1f} MiB; left in /dev/shm: {len(left)}; held: {held}; {pinned}"
    )
    assert load.counts["wrong"] == load.counts["hung"] == 0
    assert load.counts["failed"] <= load.counts.total() // 100
    assert held == {}
    assert not any(pinned.values())
    assert left == []
    assert rss_mib < warm_mib + 32, "memory does not come back to where it was"
