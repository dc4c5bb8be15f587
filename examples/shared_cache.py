"""Two engines, processes of their own, share a cache server: one loads, layer by layer, what the other computed.

`lamella serve` keeps the objects. The answers of both are equal to the bit.
"""

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from small_llama import BLOCK, HEAD, KV_HEADS, LAYERS, VOCAB, forward, make_cache, make_weights

from lamella.cuda_ext.torch import cache_layout
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace, chunk_keys
from lamella.reference.layout import ObjectLayout
from lamella.server.rank import RankCaches, RankOfEngine
from lamella.server.worker import Worker

PROMPT, QUESTION, CHUNK, WITHIN_S = 192, 24, 64, 30
LAYOUT = ObjectLayout.single(KVGeometry(LAYERS, 2, KV_HEADS, HEAD, element_bytes=4, chunk_tokens=CHUNK), BLOCK)
SPACE = KeySpace("small-llama", "float32", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, LAYERS))


def polled(worker: Worker, done) -> None:
    """Returns once a report says so; an engine polls once a step."""
    end = time.monotonic() + WITHIN_S
    while not done(worker.poll()):
        assert time.monotonic() < end, "the server did not answer in time"
        time.sleep(0.001)


def engine(name: str, folder: Path) -> str:
    """Answers prompt and question; the prompt's KV comes from the server or, computed here, goes there."""
    weights, cache = make_weights(seed=0), make_cache(num_blocks=64)
    tokens = torch.randint(VOCAB, (PROMPT + QUESTION,), generator=torch.Generator().manual_seed(7))
    blocks = torch.randperm(64)[: -(-len(tokens) // BLOCK)]  # each engine has blocks of its own
    caches = RankCaches(LAYOUT, (cache_layout("kv-nb-bs-h-d", cache),))
    keys, table = chunk_keys(SPACE, tokens[:PROMPT].tolist()), blocks.tolist()
    with Worker(folder, RankOfEngine(name, SPACE), caches, layers_per_slice=(1, 1, 2)) as worker:
        found = worker.lookup(keys)
        if loaded := found.num_chunks * CHUNK:
            worker.retrieve("only", found, [table], loaded)
            polled(worker, lambda report: "only" in report.received)  # its first slice is there: it may run
        else:
            worker.begin_step(num_tokens=PROMPT)
            worker.store("only", keys, [table])
            forward(weights, tokens[:PROMPT], 0, cache, blocks)
            worker.step_computed()  # what is stored leaves
            polled(worker, lambda report: report.readable)
        worker.begin_step(num_tokens=QUESTION, held_blocks=frozenset(table))
        logits = forward(weights, tokens[PROMPT:], PROMPT, cache, blocks, worker.wait_layer)
        worker.step_computed()
        assert not worker.errors(), "a layer did not come"
        polled(worker, lambda report: worker.num_open == 0)
    return f"{loaded} {hashlib.sha256(logits.numpy().tobytes()).hexdigest()}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "server")
        options = ["--folder", folder, "--memory", "16MiB", "--http", "off", "--log-level", "warning"]
        with subprocess.Popen([Path(sys.executable).with_name("lamella"), "serve", *options]) as server:
            try:
                while not (folder / "server.sock").exists():
                    assert server.poll() is None, "the server did not start"
                    time.sleep(0.01)
                run = [sys.executable, __file__, folder]
                first, second = (subprocess.check_output([*run, one], text=True).split() for one in ("first", "second"))
            finally:
                server.terminate()
    assert (first[0], second) == ("0", [str(PROMPT), first[1]]), "the answers DIFFER"
    print(f"the second engine loaded {second[0]} tokens that the first had computed: answers equal to the bit")


if __name__ == "__main__":
    print(engine(sys.argv[2], Path(sys.argv[1]))) if len(sys.argv) > 1 else main()
