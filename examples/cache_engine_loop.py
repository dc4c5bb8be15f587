"""A model over the in-process cache engine: each layer waits for its own load, and is stored while the next computes.

A prompt is computed and stored in one step. Then its blocks are wiped and it comes back twice: from host memory, and in
a second process that finds nothing but the first one's files. The logits are equal to the bit each time.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from small_llama import BLOCK, HEAD, KV_HEADS, LAYERS, VOCAB, forward, make_cache, make_weights

from lamella.connector.config import CacheSettings
from lamella.connector.in_process import InProcessCache
from lamella.connector.layer_hooks import StepRequest
from lamella.cuda_ext.torch import cache_layout
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import ObjectLayout

PROMPT, QUESTION, CHUNK = 192, 24, 64
LAYOUT = ObjectLayout.single(KVGeometry(LAYERS, 2, KV_HEADS, HEAD, element_bytes=4, chunk_tokens=CHUNK), BLOCK)
SPACE = KeySpace("small-llama", "float32", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, LAYERS))


class Model:
    """The small Llama over a paged cache, with the cache engine's hooks around each step."""

    def __init__(self, folder: Path) -> None:
        self.weights, self.cache = make_weights(seed=0), make_cache(num_blocks=64)
        settings = CacheSettings(use_layerwise=True, layers_per_slice="1,1,2", local_file_folder=folder)
        self.lamella = InProcessCache(settings, SPACE, LAYOUT, [cache_layout("kv-nb-bs-h-d", self.cache)])

    def step(self, tokens, blocks, computed=0):
        """(logits of the last token, tokens loaded, tokens stored) after computing what the cache does not have."""
        hooks = self.lamella.hooks
        matched = self.lamella.cache_engine.num_new_matched_tokens(tokens.tolist(), computed)
        hooks.start_load_kv([StepRequest("only", tokens.tolist(), [blocks.tolist()], computed, matched)])

        def between_layers(layer):  # the layer's new KV has been written, its attention comes next
            hooks.wait_for_layer_load(layer)
            hooks.save_kv_layer(layer)

        start = computed + matched
        logits = forward(self.weights, tokens[start:], start, self.cache, blocks, between_layers)
        report = hooks.wait_for_save()
        assert not report.failed, report
        return logits, report.loaded.get("only", 0), report.stored["only"]


def main(folder: Path, *, first: bool) -> str:
    """A digest of the logits that follow prompt and question."""
    model = Model(folder)
    tokens = torch.randint(VOCAB, (PROMPT + QUESTION,))
    blocks, elsewhere = torch.randperm(64)[:28].chunk(2)
    with model.lamella:
        if first:
            _, _, stored = model.step(tokens[:PROMPT], blocks)
            stayed = forward(model.weights, tokens[PROMPT:], PROMPT, model.cache, blocks)
            for kv in model.cache:
                kv.fill_(torch.nan)
        logits, loaded, _ = model.step(tokens, elsewhere)
        assert loaded == PROMPT, loaded
    if first:
        assert torch.equal(stayed, logits), "logits DIFFER after the round trip through host memory"
        print(f"{stored} tokens stored layer by layer, {loaded} came back from host memory: logits equal to the bit")
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(print(main(Path(sys.argv[1]), first=False)))
    with tempfile.TemporaryDirectory() as name:
        digest = main(Path(name), first=True)
        again = subprocess.run([sys.executable, __file__, name], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert again.strip() == digest, "logits DIFFER in the second process"
    print("and in a second process from files alone: equal to the bit")
