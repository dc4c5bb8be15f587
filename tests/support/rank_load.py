"""A rank that retrieves without a pause, checks every byte, gives up one in a hundred, and says how each ended."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from lamella.server.protocol import TransferSide
from rank_driver import BLOCK, CHUNK, RankMemory, join, keys_of, store

CHUNKS, PROMPTS = 8, 4


def main(folder: Path, name: str, side: TransferSide, seed: int) -> None:
    choose = random.Random(seed)
    memory = RankMemory(num_layers=8, num_blocks=96)
    blocks = list(range(96))
    size = CHUNKS * CHUNK // BLOCK
    with join(folder, memory, engine=name, transfer_side=side, layers_per_slice=2) as worker:
        assert worker.transfer_side is side
        while True:
            prompt = choose.randrange(PROMPTS)
            keys = keys_of(memory, range(1000 * prompt, 1000 * prompt + CHUNKS * CHUNK))
            choose.shuffle(blocks)
            table = blocks[:size]
            locked = worker.lookup(keys)
            if locked.num_chunks < CHUNKS:
                worker.give_back(locked)
                try:
                    store(worker, memory, keys, table)
                except RuntimeError:  # another is storing the same, or the server is away
                    time.sleep(0.01)
                continue
            memory.cache[:, :, table] = 0xA5A5
            number = worker.retrieve("r", locked, (tuple(table),), CHUNKS * CHUNK)
            aborted = choose.random() < 0.01
            if aborted:
                worker.abort(number)
            end = time.monotonic() + 30
            while True:
                report = worker.poll()
                if number in report.loads:
                    break
                if time.monotonic() > end:
                    print("hung", flush=True)
                    return
                time.sleep(0.001)
            if aborted:
                print("aborted", flush=True)
            elif not report.loads[number].ok:
                print("failed", flush=True)
            else:
                right = memory.right_layers(keys, table) == list(range(8))
                print("right" if right else "wrong", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], TransferSide(sys.argv[3]), int(sys.argv[4]))
