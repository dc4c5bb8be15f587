"""Facts of the machine that a measurement is written down with."""

from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

from lamella.cuda_ext.commit import commit_of
from lamella.cuda_ext.provenance import command_line


def provenance(torch: Any, vllm: Any) -> dict[str, Any]:
    """Where and when: everything a reader needs to repeat the run."""
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm",
        "--format=csv,noheader",
    ]
    return {
        "gpu": torch.cuda.get_device_name(),
        "nvidia_smi": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "commit": commit_of(),
    }


def wire_rates(torch: Any) -> dict[str, Any]:
    """Pinned copies of 1 GiB each way, and 1 GiB each way at once: GB/s of every repeat."""
    size = 1 << 30
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(i + 1) for i in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(3) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(down: bool, up: bool) -> float:
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        for stream, wanted, target, source, end in (
            (streams[0], down, device[0], host[0], ends[0]),
            (streams[1], up, host[1], device[1], ends[1]),
        ):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                if wanted:
                    target.copy_(source, non_blocking=True)
                end.record(stream)
        torch.cuda.synchronize()
        return size / 1e6 / max(begin.elapsed_time(end) for end in ends)

    rates = {
        name: [round(copy(*way), 3) for _ in range(11)][1:]
        for name, way in (("h2d", (True, False)), ("d2h", (False, True)), ("each_of_both", (True, True)))
    }
    return {"bytes": size, "gb_per_s": rates}
