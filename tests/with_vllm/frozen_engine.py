"""An engine on a cache server, in a process of its own, that stands still for ever with a load in the air.

    python frozen_engine.py MODEL FOLDER

Prints one line of JSON, what it computed, once its load has begun; whoever started it kills it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from with_vllm.served_engines import kept, on_folder
from with_vllm.tiny_engine import prompt

P = prompt(500)


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    live = on_folder(folder, model, paced=True)
    computed = kept(live, P)
    live.add("frozen", P)
    live.step_until(lambda: bool(live.loads))
    print("FROZEN " + json.dumps(computed._asdict()), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
