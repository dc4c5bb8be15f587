#!/usr/bin/env python3
"""Whether recomputing hides loading: a prompt put together from cached documents, on a transformer of Llama's shape.

  blend.py [--device cuda:0] [--ratios 0 0.15 0.3] [--repeats 9] [--out out] [--small]

Documents are prefilled on their own and stored; the prompt is a few tokens, the documents behind one another in another
order, and a question. Weights are random, of Llama-3.1-8B's sizes in bf16 (`--small`: tiny, for a CPU). For each
recompute ratio five arms take turns, each timed from an idle device to an idle device:

- raw: one copy of the documents' bytes between pinned memory and the device, by the driver's own call.
- settle: what comes before the first byte: keys, what is cached, the plan; it is in each of the next three.
- load: the pipeline's loads alone, layer by layer into its three buffers; nothing is computed or scattered.
- recompute: the pipeline without its loads: turning keys, projecting, selecting, attending, scattering.
- blend: all of it.

Without `settle` in any of them, `saved = load + recompute - blend` is the time in which both went on. Where recomputing
takes longer, the share of the load that it hides is `saved / load`; where loading takes longer, the share of the
recompute that is hidden behind it is `saved / recompute`. Both are written down for every ratio. The aim is 0.8 of the
shorter one.

Before anything is timed the bytes are checked: values in the blocks are those stored, to the bit, keys are theirs,
turned in float64, the rest of the cache keeps its poison, a run that waits for the device at every step computes the
same, and with ratio 1 the last token's hidden state is a full prefill's. Exit code 1 if a check fails, 2 if the aim is
missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blend_llama import Llama, Shape
from result_file import write_json

from lamella.connector.blend import Blended, Blender, Reuse
from lamella.connector.blend_layers import BlendLayers
from lamella.connector.blend_tensors import tensor_over
from lamella.connector.blend_trace import to_chrome_trace
from lamella.connector.buffered import BufferedConnector, BufferedPass
from lamella.connector.cache_engine import CacheEngine, let_go
from lamella.connector.in_flight import Load
from lamella.connector.layerwise import LayerFuture
from lamella.connector.storage.storage_manager import StorageManager
from lamella.connector.streams import Moment, Span
from lamella.cuda_ext.device import Device, ProbeMethod, RawCopy
from lamella.cuda_ext.engine import TransferEngine
from lamella.cuda_ext.pool import HostPool
from lamella.cuda_ext.provenance import provenance_of
from lamella.cuda_ext.torch import cache_layout
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import ObjectLayout
from lamella.reference.plan import Direction
from lamella.reference.slices import Slice

SCHEMA_VERSION = 1
CHECKOUT = Path(__file__).resolve().parents[1]
AIM = 0.8
BLOCK = 16
BIG = Shape(layers=32, wide=4096, heads=32, kv_heads=8, head=128, inner=14336, vocab=32768)
SMALL = Shape(layers=4, wide=128, heads=4, kv_heads=2, head=32, inner=256, vocab=512)


class ArmedConnector(BufferedConnector):
    """The buffered connector with its loads or its scatters switched off."""

    loads = scatters = True

    def _send(self, load: Load, part: Slice, future: LayerFuture, begun: Moment) -> None:
        if self.loads:
            super()._send(load, part, future, begun)
        else:
            future.add_done_callback(let_go)

    def _scatter(self, one: BufferedPass, *, through: int = -1) -> None:
        if self.scatters:
            super()._scatter(one, through=through)

    def _wait(self, one: BufferedPass, layer: int, *, on_host: bool) -> None:
        if self.scatters:
            super()._wait(one, layer, on_host=on_host)


class Case:
    """Documents in the pool, a prompt made of them, and whatever blends it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = Device(args.device)
        self.shape = SMALL if args.small else BIG
        documents, chunks, chunk, start, question = (3, 2, 32, 5, 24) if args.small else (5, 12, 256, 24, 232)
        shape = self.shape
        self.model = Llama(shape, self.device.name, seed=1)
        random = np.random.default_rng(2)
        self.documents = [random.integers(0, shape.vocab, chunks * chunk) for _ in range(documents)]
        self.order = random.permutation(documents).tolist()
        starts = [start + place * chunks * chunk for place in range(documents)]
        self.reuses = [Reuse(self.documents[index], at) for index, at in zip(self.order, starts, strict=True)]
        ends = random.integers(0, shape.vocab, start), random.integers(0, shape.vocab, question)
        self.prompt = np.concatenate([ends[0], *(self.documents[index] for index in self.order), ends[1]])
        self.cached_tokens = documents * chunks * chunk

        num_blocks = 2 * -(-len(self.prompt) // BLOCK)
        size = (2, num_blocks, BLOCK, shape.kv_heads, shape.head)
        self.cache = [torch.zeros(size, dtype=torch.bfloat16, device=self.device.name) for _ in range(shape.layers)]
        self.blocks: list[int] = random.permutation(num_blocks)[: num_blocks // 2].tolist()
        self.layout = ObjectLayout.single(KVGeometry(shape.layers, 2, shape.kv_heads, shape.head, 2, chunk), BLOCK)
        space = KeySpace("random", "bfloat16", ObjectForm.TOKEN, "THD", chunk, 0, 1, (0, shape.layers))
        self.stream: Any = None
        if self.device.is_cuda:
            from lamella.connector.torch_stream import TorchStream

            self.stream = TorchStream(self.device.name)
        registrar = self.device.registrar()
        self.pool = HostPool(self.layout, documents * chunks, registrar=registrar, numa_node=self.device.numa_node())
        self.engine = TransferEngine(self.device.name, num_layers=shape.layers)
        self.connector = ArmedConnector(
            self.engine,
            self.layout,
            [cache_layout("KNTHD", self.cache)],
            self.pool.memory,
            max_tokens=len(self.prompt),
            compute_stream=self.stream,
        )
        self.spans: list[Span] = []
        self.storage = StorageManager(self.pool)
        self.cache_engine = CacheEngine(space, self.storage, self.connector)
        self.traced = CacheEngine(space, self.storage, self.connector, recorder=self.spans.append)
        self.blenders: dict[tuple[float, float, bool], Blender] = {}
        self.stored: list[list[torch.Tensor]] = []  # [document][layer of those checked], [2, tokens, H, D]
        self.checked = sorted({0, shape.layers // 2, shape.layers - 1})

    def synchronize(self) -> None:
        if self.device.is_cuda:
            torch.cuda.synchronize()

    def blender(self, ratio: float, *, trace: bool = False, tolerance: float = 0.05) -> Blender:
        key = ratio, tolerance, trace
        if key not in self.blenders:
            self.blenders[key] = Blender(
                self.traced if trace else self.cache_engine,
                self.model,
                self.model.rotation,
                dtype=torch.bfloat16,
                ratio=ratio,
                tolerance=tolerance,
                recorder=self.spans.append if trace else None,
            )
        return self.blenders[key]

    @torch.no_grad()
    def store(self) -> None:
        """Each document is prefilled on its own and stored, once the pool's memory is registered."""
        deadline = time.monotonic() + 60
        while self.pool.report().occupancy.free < self.pool.num_slots:
            if time.monotonic() > deadline:
                raise SystemExit(f"the pool was not registered in 60 s: {self.pool.report()}")
            time.sleep(0.01)
        for document in self.documents:
            saving = self.cache_engine.store_layer(document, [self.blocks])
            rows = torch.tensor(self.blocks, device=self.device.name)[: len(document) // BLOCK]
            kept = []
            for layer, keys, values in self.model.prefill(document):
                kv = torch.stack((keys, values))  # [2, tokens, H, D]
                self.cache[layer][:, rows] = kv.unflatten(1, (-1, BLOCK))
                if layer in self.checked:
                    kept.append(kv)
                next(saving)
            if next(saving) != len(document):
                raise SystemExit("a document was not stored")
            saving.close()
            self.stored.append(kept)

    # ---- arms

    def raw(self) -> None:
        """The documents' objects as one batch of copies, one an object."""
        addresses = [self.pool.memory.addresses((slot,))[0] for slot in range(self.pool.num_slots)]
        size = self.layout.object_bytes
        with self.device.allocate(len(addresses) * size) as target:
            copy = RawCopy(
                Direction.RETRIEVE,
                ProbeMethod.BATCH,
                min(addresses),
                target.address,
                len(addresses),
                size,
                [address - min(addresses) for address in addresses],
                [index * size for index in range(len(addresses))],
            )
            self.raw_ns = self.device.copy(copy)[0].copy_ns

    def settle(self) -> None:
        with BlendLayers(self.cache_engine, self.prompt, self.reuses, self.blocks):
            pass

    def load(self) -> None:
        self.connector.scatters = False
        try:
            with BlendLayers(self.cache_engine, self.prompt, self.reuses, self.blocks) as loading:
                for _ in loading.layers():
                    pass
        finally:
            self.connector.scatters = True

    def recompute(self, ratio: float) -> None:
        self.connector.loads = False
        try:
            self.blend(ratio, tolerance=float("inf"))
        finally:
            self.connector.loads = True

    def blend(self, ratio: float, **options: Any) -> Blended:
        return self.blender(ratio, **options).blend(self.prompt, self.reuses, self.blocks)

    def timed(self, arm: Callable[[], object]) -> int:
        self.spans.clear()
        self.synchronize()
        start = time.perf_counter_ns()
        arm()
        self.synchronize()
        return time.perf_counter_ns() - start

    def close(self) -> None:
        self.storage.close()
        self.connector.close()
        self.engine.close()
        self.pool.close()


# ---- checks


def poison(case: Case) -> None:
    """Every byte of cache and buffers is 0xFF: NaN, so that what is read too early is seen."""
    for kv in case.cache:
        kv.view(torch.int16).fill_(-1)
    for layer in range(min(3, case.shape.layers)):
        tensor_over(case.connector.layer_view(layer), torch.int16, case.device.name).fill_(-1)
    case.synchronize()


def check_bytes(case: Case) -> dict[str, Any]:
    """Plain reuse leaves what was stored, keys turned, and nothing anywhere else."""
    poison(case)
    case.blend(0.0)
    case.synchronize()
    where = torch.tensor(case.blocks, device=case.device.name)
    others = torch.ones(case.cache[0].shape[1], dtype=torch.bool, device=case.device.name)
    others[where] = False
    worst, values_equal, poisoned, finite = 0.0, True, True, True
    for index, layer in enumerate(case.checked):
        rows = case.cache[layer][:, where].flatten(1, 2)[:, : len(case.prompt)]  # [2, tokens, H, D]
        finite &= bool(rows.isfinite().all())
        poisoned &= bool((case.cache[layer].view(torch.int16)[:, others] == -1).all())
        for document, reuse in zip(case.order, case.reuses, strict=True):
            stored = case.stored[document][index]
            keys, values = rows[:, reuse.start : reuse.start + reuse.num_tokens]
            values_equal &= torch.equal(values, stored[1])
            wanted = turned(stored[0], reuse.offset, case.model.frequencies)
            worst = max(worst, float((keys.double() - wanted).norm() / wanted.norm()))
    found = {"values_equal_to_the_bit": values_equal, "keys_relative_error": worst, "others_untouched": poisoned}
    return {**found, "all_finite": finite, "passed": values_equal and poisoned and finite and worst < 4e-3}


def turned(keys: torch.Tensor, by: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Keys turned in float64 as complex numbers."""
    pairs = len(frequencies)
    number = torch.complex(keys[..., :pairs].double(), keys[..., pairs:].double())
    angle = by * frequencies.double()
    number = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((number.real, number.imag), -1)


def check_results(case: Case) -> dict[str, Any]:
    """Waiting at every step changes nothing, and ratio 1 is a full prefill."""
    poison(case)
    pipelined = case.blend(0.15)
    case.synchronize()
    poison(case)
    case.model.before_layer = case.synchronize
    stepwise = case.blend(0.15)
    case.model.before_layer = lambda: None
    apart = relative(pipelined.hidden[-1], stepwise.hidden[-1])
    same_tokens = torch.equal(pipelined.positions, stepwise.positions)
    poison(case)
    whole = case.blend(1.0)
    last = case.model.prefill_hidden(case.prompt)[-1]
    error = relative(whole.hidden[-1], last)
    plain = relative(case.blend(0.0).hidden[-1], last)
    return {
        "pipelined_against_stepwise": apart,
        "same_tokens_selected": same_tokens,
        "ratio_1_against_full_prefill": error,
        "ratio_0_against_full_prefill": plain,
        "sampled_deviation": pipelined.sampled_deviation,
        "passed": apart < 1e-2 and same_tokens and error < 2e-2 and error < plain,
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---- measuring


def measure(case: Case, ratio: float, repeats: int) -> dict[str, Any]:
    arms: dict[str, Callable[[], object]] = {
        "raw": case.raw,
        "settle": case.settle,
        "load": case.load,
        "recompute": lambda: case.recompute(ratio),
        "blend": lambda: case.blend(ratio),
    }
    times: dict[str, list[int]] = {name: [] for name in arms}
    for repeat in range(repeats + 2):  # the first two are left out
        order = list(arms) if repeat % 2 else list(arms)[::-1]
        for name in order:
            took = case.timed(arms[name])
            if repeat >= 2:
                times[name].append(case.raw_ns if name == "raw" else took)
    median = {name: statistics.median(found) for name, found in times.items()}
    load, recompute, blend = (median[name] - median["settle"] for name in ("load", "recompute", "blend"))
    saved = load + recompute - blend
    row = {
        "ratio": ratio,
        "times_ns": times,
        "median_ms": {name: round(ns / 1e6, 3) for name, ns in median.items()},
        "saved_ms": round(saved / 1e6, 3),
        "longer": "recompute" if recompute >= load else "load",
        "hidden_of_load": round(saved / load, 4),
        "hidden_of_recompute": round(saved / recompute, 4),
        "hidden_of_shorter": round(saved / min(load, recompute), 4),
        "load_over_raw": round(load / median["raw"], 4),
    }
    print(f"ratio {ratio}: {row['median_ms']} hidden of the shorter {row['hidden_of_shorter']:.0%}", flush=True)
    return row


def trace(case: Case, ratio: float) -> dict[str, Any]:
    """One more run, with a span for everything."""
    case.synchronize()
    case.spans.clear()
    case.blend(ratio, trace=True)
    case.synchronize()
    return to_chrome_trace(case.spans, system=case.device.facts().name)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.15, 0.3])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    case = Case(args)
    case.store()
    print(f"set up in {time.monotonic() - began:.1f} s: {case.cached_tokens} cached of {len(case.prompt)}", flush=True)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "provenance": asdict(provenance_of(case.device, ["benchmarks/blend.py", *arguments], CHECKOUT)),
        "shape": asdict(case.shape),
        "prompt_tokens": len(case.prompt),
        "cached_tokens": case.cached_tokens,
        "cached_bytes": case.cached_tokens * case.layout.groups[0].geometry.token_bytes,
        "documents": len(case.documents),
        "aim": AIM,
    }
    report["checks"] = {"bytes": check_bytes(case), "results": check_results(case)}
    print(f"checks: {report['checks']}", flush=True)
    report["attention"] = case.model.attention_names()
    report["rows"] = []
    for ratio in args.ratios:
        report["rows"].append(measure(case, ratio, args.repeats))
        write_json(args.out / "blend.json", report)
        write_json(args.out / f"blend-{ratio}.trace.json", trace(case, ratio), indent=None)
    case.close()
    print(f"done in {time.monotonic() - began:.1f} s", flush=True)
    if not all(check["passed"] for check in report["checks"].values()):
        return 1
    return 0 if all(row["hidden_of_shorter"] >= AIM for row in report["rows"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
