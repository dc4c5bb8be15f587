#!/usr/bin/env python3
"""What the model's advice owes to the graphs that decoding steps replay: points with full graphs and with piecewise.

    model_graphs.py OUT.json [--workers 2]

Each point is asked as `lamella sweep` asks its own: every setting on the same arrivals, three seeds, with the
connector's `full_graphs: before` and with `never`; on the bare device and behind the shipped host overheads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from result_file import write_json

from lamella.cuda_ext.commit import commit_of
from lamella.sim.overheads import open_overheads, shipped_overheads
from lamella.sim.parallel import Runner, Running
from lamella.sim.profiles import load_profile
from lamella.sim.regimes import WORTH_IT
from lamella.sim.strategies import FULL_GRAPHS, Device, Regime
from lamella.sim.study import Recommendation, compute_study, plan_study, study_strategies

HITS: Final = (1_024, 4_096, 15_360, 65_536)
NEWS: Final = (64, 256, 768, 2_048)
USERS: Final = (1, 4, 8)
OUTPUT_TOKENS: Final = 50


def advise(device: Device, regime: Regime, how: Running) -> Recommendation:
    """What to set at the point."""
    tried = study_strategies(device.profile.num_layers)
    return compute_study(plan_study(device, regime, (regime.concurrency,), tried), how=how).recommend()


def row_of(point: Regime, host: str, found: dict[str, Recommendation]) -> dict[str, Any]:
    """The point and what is said of it with each kind of graphs."""
    return {
        "hit_tokens": point.hit_tokens,
        "new_tokens": point.new_tokens,
        "concurrency": point.concurrency,
        "host": host,
        **{
            name: {
                "strategy": str(one.strategy),
                "turn_on": one.strategy.layerwise,
                "best_layerwise": str(one.best_layerwise),
                "ttft_change": one.change.mean,
                "latency_change": one.price.mean,
            }
            for name, one in found.items()
        },
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of how many points the advice differs, and by how much the best layerwise setting's effect does."""
    moved = {
        what: sorted(row["before"][what] - row["never"][what] for row in rows)
        for what in ("ttft_change", "latency_change")
    }
    later = {
        name: sum(row[name]["turn_on"] and row[name]["latency_change"] >= WORTH_IT for row in rows)
        for name in FULL_GRAPHS
    }
    return {
        "points": len(rows),
        "on": {name: sum(row[name]["turn_on"] for row in rows) for name in FULL_GRAPHS},
        "on_for_later_answers": later,
        "on_with_before_only": sum(row["before"]["turn_on"] > row["never"]["turn_on"] for row in rows),
        "on_with_never_only": sum(row["before"]["turn_on"] < row["never"]["turn_on"] for row in rows),
        "another_setting": sum(row["before"]["strategy"] != row["never"]["strategy"] for row in rows),
        **{
            f"{what}_moved_by": {"least": ones[0], "median": ones[len(ones) // 2], "most": ones[-1]}
            for what, ones in moved.items()
        },
    }


def main() -> None:
    """Asks, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    how = Running(Runner.PROCESSES, asked.workers)
    (shipped,) = shipped_overheads()
    profile = load_profile()
    rows = []
    for host, overheads in (("bare", None), (shipped, open_overheads(shipped).overheads)):
        devices = {name: Device(profile, overheads=overheads, graphs=graphs) for name, graphs in FULL_GRAPHS.items()}
        for hit in HITS:
            for new in NEWS:
                for users in USERS:
                    point = Regime(hit, new, users, OUTPUT_TOKENS)
                    found = {name: advise(device, point, how) for name, device in devices.items()}
                    rows.append(row_of(point, host, found))
    found_by_host = {host: summary([row for row in rows if row["host"] == host]) for host in ("bare", shipped)}
    document = {
        "kind": "lamella.model_graphs",
        "commit": commit_of(),
        "profile": profile.name,
        "summary": found_by_host,
        "points": rows,
    }
    write_json(asked.out, document)
    print(json.dumps(found_by_host, indent=1))


if __name__ == "__main__":
    main()
