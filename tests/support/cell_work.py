"""Work for the tests of parallel sweeps, in a module of its own so that another process can import it."""

import math
import time
from pathlib import Path
from typing import Any

SHARED = {"factor": 0.1}


def work(shared: Any, cell: int, seed: int) -> dict[str, Any]:
    """Floats that JSON must not bend, and a seed that must not depend on who runs the cell."""
    return {"value": math.sin(cell) * shared["factor"], "seed": seed, "list": [cell, None, "é"]}


def counted(shared: Any, cell: int, seed: int) -> dict[str, Any]:
    """Writes down that it ran, in a file because another process may run it."""
    with (Path(shared["folder"]) / "ran").open("a") as file:
        file.write(f"{cell}\n")
    return work(SHARED, cell, seed)


def failing(shared: Any, cell: int, seed: int) -> dict[str, Any]:
    if cell == 9:
        raise RuntimeError("cell 9 is broken")
    return counted(shared, cell, seed)


def which_node(shared: Any, cell: int, seed: int) -> dict[str, Any]:
    import ray

    time.sleep(0.2)  # so that one node alone cannot take all
    return {"node": ray.get_runtime_context().get_node_id()}
