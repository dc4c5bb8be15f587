# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # How much must be recomputed when cached documents are put together?
#
# A prompt of retrieved documents is no prefix of anything that was computed before, so a prefix cache misses all of it
# but the first document. Each document's KV may be cached nevertheless, from a prefill of its own. Its keys can be
# turned to where it stands now, which is exact; what is missing is that its tokens never attended to the documents in
# front of them. A *blend* reuses the KV and computes a share of the tokens anew, those whose KV deviates most.
#
# Two questions: how does quality depend on that share, and does the recompute hide the loading?
#
# The model is a small transformer with random weights. Such a model attends to everything, so nearly every token
# deviates: a trained one needs far less (the CacheBlend paper finds 5 to 18% enough). What carries over is the shape.

# %%
import time
from collections.abc import Sequence

import torch

from lamella.connector.blend import Blended, Blender, Reuse, Rotation
from lamella.connector.blend_trace import to_chrome_trace
from lamella.connector.config import CacheSettings
from lamella.connector.in_process import InProcessCache
from lamella.connector.storage.tier import Leading, get_in_turn
from lamella.connector.streams import Recorder, Span
from lamella.cuda_ext.torch import cache_layout
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import ChunkKey, KeySpace
from lamella.reference.layout import ByteRange, ObjectLayout

LAYERS, KV_HEADS, HEAD, VOCAB = 10, 2, 16, 256
CHUNK, BLOCK = 32, 16
LAYOUT = ObjectLayout.single(KVGeometry(LAYERS, 2, KV_HEADS, HEAD, element_bytes=4, chunk_tokens=CHUNK), BLOCK)
SPACE = KeySpace("notebook", "float32", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, LAYERS))
ROTATION = Rotation.from_base(10_000, HEAD)
torch.set_num_threads(1)


class Model:
    """Grouped queries, rotary positions, and an MLP, in the parts that a blend asks for."""

    def __init__(self, seed: int, wide: int) -> None:
        self.random, self.wide, narrow = torch.Generator().manual_seed(seed), wide, KV_HEADS * HEAD
        shapes = {"q": (wide, wide), "k": (wide, narrow), "v": (wide, narrow), "o": (wide, wide)}
        shapes |= {"up": (wide, 4 * wide), "down": (4 * wide, wide)}
        self.layers = [
            {name: self.draw(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()} for _ in range(LAYERS)
        ]
        self.embedding = self.draw(VOCAB, wide)

    def draw(self, *shape: int) -> torch.Tensor:
        """Weights."""
        return torch.randn(shape, generator=self.random)

    def tokens(self, count: int) -> list[int]:
        """So many at random."""
        return torch.randint(VOCAB, (count,), generator=self.random).tolist()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What goes into layer 0."""
        return self.embedding[tokens]

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, the first two turned."""
        x = torch.nn.functional.rms_norm(hidden, (self.wide,))
        q, k, v = ((x @ self.layers[layer][name]).unflatten(-1, (-1, HEAD)) for name in "qkv")
        turns = ROTATION.turns(positions)
        for heads in (q, k):
            ROTATION.turn(heads, turns)
        return q, k, v

    def attend(
        self,
        layer: int,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Attention and MLP."""
        w, mask = self.layers[layer], torch.arange(len(keys)) <= positions[:, None]
        q, k, v = (heads.transpose(0, 1) for heads in (queries, keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        hidden = hidden + attended.transpose(0, 1).flatten(1) @ w["o"]
        return hidden + torch.relu(torch.nn.functional.rms_norm(hidden, (self.wide,)) @ w["up"]) @ w["down"]

    def prefill(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """What comes out for the last token, and (keys, values) of each layer."""
        hidden, positions, layers = self.embed(torch.tensor(tokens)), torch.arange(len(tokens)), []
        for layer in range(LAYERS):
            q, k, v = self.project(layer, hidden, positions)
            layers.append((k, v))
            hidden = self.attend(layer, hidden, q, k, v, positions)
        return hidden[-1], layers


# %% [markdown]
# Three documents are prefilled and stored one by one, as they were retrieved for other prompts. The prompt to answer
# has an instruction in front, the documents in another order, and a question behind them.


# %%
class Prompt:
    """Documents of three, two and four chunks, and a prompt made of them."""

    def __init__(self, seed: int, wide: int = 128) -> None:
        self.model = Model(seed, wide)
        self.documents = [self.model.tokens(chunks * CHUNK) for chunks in (3, 2, 4)]
        self.tokens, self.reuses = self.model.tokens(7), []
        for document in (self.documents[2], self.documents[0], self.documents[1]):
            self.reuses.append(Reuse(document, start=len(self.tokens)))
            self.tokens += document
        self.tokens += self.model.tokens(13)
        self.cache = [torch.zeros(2, 24, BLOCK, KV_HEADS, HEAD) for _ in range(LAYERS)]
        self.blocks = torch.randperm(24, generator=self.model.random)[: -(-len(self.tokens) // BLOCK)].tolist()

    def store(self, lamella: InProcessCache) -> None:
        """Every document is in the cache."""
        for document in self.documents:
            saving = lamella.cache_engine.store_layer(document, [range(24)])
            for kv, blocks in zip(self.model.prefill(document)[1], self.cache, strict=True):
                blocks.flatten(1, 2)[:, : len(document)] = torch.stack(kv)
                next(saving)
            assert next(saving) == len(document)

    def blend(
        self, lamella: InProcessCache, ratio: float | Sequence[float], recorder: Recorder | None = None
    ) -> Blended:
        """The prompt, put together."""
        engine, dtype = lamella.cache_engine, torch.float32
        blender = Blender(engine, self.model, ROTATION, dtype=dtype, ratio=ratio, recorder=recorder)
        return blender.blend(self.tokens, self.reuses, self.blocks)


SETTINGS = {"use_layerwise": True, "enable_blending": True, "blend_tokens": 384}
RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
SCHEDULE = (0.4, 0.3, 0.2)


def deviations(seed: int) -> list[float]:
    """How far the last hidden state is from a full prefill's, relative to it: at each ratio, and with the schedule."""
    prompt = Prompt(seed)
    settings = CacheSettings.from_mapping(SETTINGS)
    with InProcessCache(settings, SPACE, LAYOUT, [cache_layout("KNTHD", prompt.cache)]) as lamella:
        prompt.store(lamella)
        whole, _ = prompt.model.prefill(prompt.tokens)
        found = [prompt.blend(lamella, ratio).hidden[-1] for ratio in (*RATIOS, SCHEDULE)]
    return [float((one - whole).norm() / whole.norm()) for one in found]


SEEDS = 10
table = torch.tensor([deviations(seed) for seed in range(SEEDS)])  # [seeds, ratios + schedule]
mean, spread = table.mean(0), table.std(0) / SEEDS**0.5
for ratio, off, error in zip((*RATIOS, "schedule 0.4, 0.3, 0.2"), mean, spread, strict=True):
    print(f"ratio {ratio!s:>5}: off by {off:7.2%} ± {error:.2%}")

assert (mean[: len(RATIOS)].diff() < 0).all(), "in the mean, every further share brings it nearer"
assert mean[len(RATIOS) - 1] < 1e-4, "with ratio 1 it is a full prefill"

# %% [markdown]
# The first percent brings more than any other up to one half: the tokens chosen first are those that were furthest off.
# (The last ones are worth much again, since with all of them nothing is left to be wrong.) A schedule that chooses
# generously in layer 1 and lets go of some in each layer ends with as many tokens as ratio 0.2.

# %%
gain = -mean[: len(RATIOS)].diff() / torch.tensor(RATIOS).diff()
print("nearer by, for each percent computed anew:", " ".join(f"{value:.2f}%" for value in gain))
assert gain[0] > gain[1:5].max(), "the first percent brings the most, up to one half"
assert mean[RATIOS.index(0.3)] < mean[-1] < mean[RATIOS.index(0.2)], "and a schedule lies between what it passes"

# %% [markdown]
# ## Does recomputing hide loading?
#
# Documents now lie in a slow tier, which is read a layer at a time. What one layer takes is set to 40% of the quickest
# recompute of one here, so that recomputing is the longer of the two. A copy within host memory takes next to nothing,
# so what is to be hidden is the reading: it shows only where a layer's recompute could not begin because the layer was
# still being read.


# %%
class SlowTier:
    """Objects in a dictionary; a layer takes its time. The methods are those of every tier."""

    name = "slow"

    def __init__(self) -> None:
        self.objects: dict[ChunkKey, bytes] = {}
        self.layer_s = 0.0
        self.spans: list[Span] = []

    def exists(self, keys: Sequence[ChunkKey]) -> tuple[bool, ...]:
        """Which it has."""
        return tuple(key in self.objects for key in keys)

    def get_ranges(self, key: ChunkKey, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
        """Byte ranges of one object."""
        for wanted, buffer in zip(ranges, into, strict=True):
            buffer[:] = self.objects[key][wanted.offset : wanted.offset + wanted.num_bytes]

    def get_leading(
        self, keys: Sequence[ChunkKey], ranges: Sequence[ByteRange], into: Sequence[Sequence[memoryview]]
    ) -> Leading:
        """The same ranges of several objects, after a while."""
        start_ns = time.monotonic_ns()
        read = get_in_turn(self, keys, ranges, into)
        time.sleep(self.layer_s * len(keys) / CHUNKS)
        self.spans.append(Span("read", ranges[0].offset // ranges[0].num_bytes, 1, start_ns, time.monotonic_ns()))
        return read

    def put(self, key: ChunkKey, data: memoryview) -> None:
        """Kept."""
        self.objects[key] = bytes(data)

    def delete(self, key: ChunkKey) -> bool:
        """Gone."""
        return self.objects.pop(key, None) is not None

    def close(self) -> None:
        """Nothing to close."""


CHUNKS = 9
tier, spans = SlowTier(), list[Span]()
prompt = Prompt(0, wide=384)
settings = CacheSettings.from_mapping({**SETTINGS, "promote": False, "io_threads": 1})
caches = [cache_layout("KNTHD", prompt.cache)]
with InProcessCache(settings, SPACE, LAYOUT, caches, tiers=[tier], recorder=spans.append) as lamella:
    prompt.store(lamella)
    lamella.storage.flush(10)
    for document in prompt.documents:
        lamella.pool.discard(lamella.cache_engine.keys_of(document))
    assert len(tier.objects) == CHUNKS
    for _ in range(2):  # the first time, torch prepares what it computes with
        spans.clear()
        prompt.blend(lamella, 0.3, spans.append)
    layer_ns = min(span.end_ns - span.start_ns for span in spans if span.kind == "recompute")
    tier.layer_s = 0.4 * layer_ns / 1e9
    spans.clear()
    tier.spans.clear()
    prompt.blend(lamella, 0.3, spans.append)

# %%
STAGES = ("read", "load", "recompute", "scatter")
by_layer = {
    stage: {
        layer: (min(span.start_ns for span in found), max(span.end_ns for span in found))
        for layer in range(LAYERS)
        if (found := [span for span in (*spans, *tier.spans) if (span.kind, span.first_layer) == (stage, layer)])
    }
    for stage in STAGES
}
zero_ns = min(start for stage in by_layer.values() for start, _ in stage.values())
for stage in STAGES:
    row = " ".join(f"{(a - zero_ns) / 1e6:6.2f}-{(b - zero_ns) / 1e6:<6.2f}" for a, b in by_layer[stage].values())
    print(f"{stage:10} {row} ms")

read, recompute, scatter = (by_layer[stage] for stage in ("read", "recompute", "scatter"))
for layer in range(1, LAYERS):
    assert read[layer][1] <= recompute[layer][0], "a layer is recomputed once it is there"
    assert recompute[layer - 1][1] <= scatter[layer - 1][0], "and scattered once it was recomputed"


lasted = [end - start for start, end in read.values()]
stood = [lasted[0]] + [max(0, read[layer][1] - recompute[layer - 1][1]) for layer in range(1, LAYERS)]
print(f"{sum(lasted) / 1e6:.1f} ms of reading, {sum(stood) / 1e6:.1f} ms of standing still for it:")
print(f"{1 - sum(stood) / sum(lasted):.0%} hidden; {1 - sum(stood[1:]) / sum(lasted[1:]):.0%} without the first layer")
assert sum(stood[1:]) <= 0.2 * sum(lasted[1:]), "all but the first layer is read while another is recomputed"

# %% [markdown]
# The first layer's reading is all that must show: 1/N of the whole for N layers. The same spans, without the reading,
# as a Chrome trace, which Perfetto opens:

# %%
document = to_chrome_trace(spans, system="this machine")
print(len(document["traceEvents"]), "events,", document["otherData"])

# %%
try:
    from matplotlib import pyplot
except ImportError:
    print("for the pictures: pip install 'lamella[plot]'")
else:
    figure, (quality, timeline) = pyplot.subplots(2, 1, figsize=(9, 6), layout="constrained")
    quality.errorbar(
        [100 * ratio for ratio in RATIOS], 100 * mean[: len(RATIOS)], 100 * spread[: len(RATIOS)], marker="o"
    )
    quality.set_xlabel("reused tokens computed anew, %")
    quality.set_ylabel("last hidden state off by, %")
    quality.set_ylim(bottom=0)
    for place, stage in enumerate(reversed(STAGES)):
        for layer, (start, end) in by_layer[stage].items():
            timeline.barh(place, (end - start) / 1e6, left=(start - zero_ns) / 1e6, color=f"C{layer % 10}")
    timeline.set_yticks(range(len(STAGES)), reversed(STAGES))
    timeline.set_xlabel("ms; a colour is a layer")
    pyplot.show()
