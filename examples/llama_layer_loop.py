"""A prompt's KV leaves for host memory and comes back slice by slice, each layer waiting for its own slice.

The logits equal, to the bit, those of a run whose KV never left. With --no-wait layers are read before they landed.
"""

import sys
import threading

import numpy as np
import torch
from small_llama import BLOCK, HEAD, KV_HEADS, LAYERS, VOCAB, forward, make_cache, make_weights

from lamella.cuda_ext.executors import HostObjects, choose_executor
from lamella.cuda_ext.torch import cache_layout
from lamella.reference.arrival import LayerArrivalGate
from lamella.reference.geometry import KVGeometry
from lamella.reference.layout import ObjectLayout
from lamella.reference.plan import Direction, TransferRequest, check_request, plan_layer_major
from lamella.reference.slices import plan_slices

PROMPT, QUESTION, CHUNK, WIDTH = 208, 24, 64, 2


def main(wait: bool) -> bool:
    """Whether the logits after the round trip are, to the bit, those of the run that stayed."""
    weights, cache = make_weights(seed=0), make_cache(num_blocks=64)
    prompt, question = torch.randint(VOCAB, (PROMPT + QUESTION,)).split([PROMPT, QUESTION])
    blocks, elsewhere = torch.randperm(64)[:30].chunk(2)
    forward(weights, prompt, 0, cache, blocks)
    stayed = forward(weights, question, PROMPT, cache, blocks)

    layout = ObjectLayout.single(KVGeometry(LAYERS, 2, KV_HEADS, HEAD, element_bytes=4, chunk_tokens=CHUNK), BLOCK)
    host = np.zeros((-(-PROMPT // CHUNK), layout.object_bytes), np.uint8)  # an object a chunk, the last one partial
    objects, engine = HostObjects([row.ctypes.data for row in host]), cache_layout("kv-nb-bs-h-d", cache)
    executor = choose_executor().executor

    def move(direction, block_ids, width, on_slice=None):
        request = TransferRequest(PROMPT, (tuple(block_ids.tolist()),))
        check_request(layout, [engine], request, direction)
        plan = plan_layer_major(layout, request, width, staging_bytes=1 << 20)
        executor.run(plan, [engine], objects, direction, on_slice=on_slice)

    move(Direction.STORE, blocks, width=1)
    for kv in cache:
        kv.fill_(torch.nan)  # evicted: nothing is left on the engine's side

    slices = plan_slices(LAYERS, WIDTH)
    gate, news, wire = LayerArrivalGate(slices), threading.Condition(), threading.Event()

    def landed(index):
        with news:
            gate.record(index, index, generation=0)
            gate.mark_landed(index, generation=0)
            news.notify_all()

    def wait_for_layer(layer):
        wire.set()
        with news:
            assert news.wait_for(lambda: gate.landed_layers > layer, timeout=30), f"layer {layer} never landed"

    # The wire moves once somebody waits, so that reading without waiting is reading too early every time.
    loader = threading.Thread(target=lambda: wire.wait() and move(Direction.RETRIEVE, elsewhere, WIDTH, landed))
    loader.start()
    returned = forward(weights, question, PROMPT, cache, elsewhere, *[wait_for_layer][: int(wait)])
    wire.set()
    loader.join()
    same = torch.equal(stayed, returned)
    how = "each layer waiting for its own" if wait else "without waiting"
    verdict = "equal to the bit" if same else "DIFFERENT"
    print(f"{PROMPT} tokens left and came back in {len(slices)} slices, {how}: logits {verdict}")
    return same


if __name__ == "__main__":
    sys.exit(0 if main(wait="--no-wait" not in sys.argv[1:]) else 1)
