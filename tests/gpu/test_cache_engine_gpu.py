"""The cache engine beside a real compute stream: stores wait for layers being computed, layers wait for their loads.

Each test has its control: without the order of streams the same program must leave wrong bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamella.connector.config import CacheSettings
from lamella.connector.layer_hooks import StepRequest
from lamella.connector.streams import Moment
from lamella.cuda_ext._library import LibraryMissingError
from lamella.cuda_ext.device import Device
from lamella.reference.geometry import KVGeometry, ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.layout import ObjectLayout

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch with CUDA"),
]

LAYERS, BLOCK, CHUNK, TOKENS = 8, 16, 256, 2048
DELAY_CYCLES = 10_000_000  # about 5 ms


class Model:
    """A paged cache `[2, NB, 16, 8, 64]` a layer on the GPU, and layers whose computing takes a while."""

    def __init__(self, stream: Any, **settings: Any) -> None:
        from lamella.connector.in_process import InProcessCache
        from lamella.cuda_ext.torch import cache_layout

        try:
            Device("cuda:0").facts()
        except (LibraryMissingError, RuntimeError) as missing:
            pytest.skip(f"no CUDA library here: {missing}")
        self.blocks = TOKENS // BLOCK
        shape = (2, 2 * self.blocks, BLOCK, 8, 64)
        self.cache = [torch.zeros(shape, dtype=torch.int16, device="cuda:0") for _ in range(LAYERS)]
        layout = ObjectLayout.single(KVGeometry(LAYERS, 2, 8, 64, 2, CHUNK), BLOCK)
        space = KeySpace("gpu-test", "int16", ObjectForm.TOKEN, "THD", CHUNK, 0, 1, (0, LAYERS))
        caches = [cache_layout("kv-nb-bs-h-d", self.cache)]
        read = CacheSettings.from_mapping({"use_layerwise": True, "pool_objects": 16, **settings})
        self.lamella = InProcessCache(read, space, layout, caches, device="cuda:0", compute_stream=stream)
        self.wanted = torch.randint(1, 2**15, (LAYERS, 2, self.blocks, BLOCK, 8, 64), dtype=torch.int16, device="cuda")
        self.tokens = list(range(TOKENS))
        order = np.random.default_rng(5).permutation(2 * self.blocks)
        self.here, self.there = order[: self.blocks], order[self.blocks :]

    def store(self) -> int:
        """A step whose layers are computed slowly and stored."""
        hooks = self.lamella.hooks
        where = torch.from_numpy(self.here).cuda()
        torch.cuda.synchronize()
        hooks.start_load_kv([StepRequest("a", self.tokens, [self.here.tolist()])])
        for layer in range(LAYERS):
            torch.cuda._sleep(DELAY_CYCLES)
            self.cache[layer][:, where] = self.wanted[layer]
            hooks.wait_for_layer_load(layer)
            hooks.save_kv_layer(layer)
        return hooks.wait_for_save().stored["a"]

    def load(self) -> list[bool]:
        """A step in which each layer reads what was loaded; whether it read the right bytes."""
        hooks = self.lamella.hooks
        where = torch.from_numpy(self.there).cuda()
        read = []
        torch.cuda.synchronize()
        hooks.start_load_kv([StepRequest("a", [*self.tokens, 1], [self.there.tolist()], 0, TOKENS, save=False)])
        for layer in range(LAYERS):
            hooks.wait_for_layer_load(layer)
            read.append(torch.index_select(self.cache[layer], 1, where))
        report = hooks.wait_for_save()
        assert report.loaded == {"a": TOKENS}
        torch.cuda.synchronize()
        return [bool(torch.equal(found, self.wanted[layer])) for layer, found in enumerate(read)]


class NoOrder:
    """The control: a compute stream that nothing waits for."""

    @property
    def handle(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def record(self) -> Moment:
        return Moment(None)


def compute_stream() -> Any:
    from lamella.connector.torch_stream import TorchStream

    return TorchStream("cuda:0")


@pytest.mark.parametrize("use_gpu", [True, False])
@pytest.mark.parametrize("width", [1, 3, "1,1,2"])
def test_layers_are_stored_after_they_were_computed_and_read_after_they_landed(use_gpu: bool, width: Any) -> None:
    model = Model(compute_stream(), layers_per_slice=width, use_gpu=use_gpu)
    with model.lamella, torch.cuda.stream(torch.cuda.Stream()):
        assert model.store() == TOKENS
        assert model.load() == [True] * LAYERS


def test_without_the_store_streams_wait_layers_are_stored_before_they_were_computed() -> None:
    model = Model(NoOrder())
    with model.lamella, torch.cuda.stream(torch.cuda.Stream()):
        model.store()
        assert False in model.load()


def test_what_one_process_stored_from_the_gpu_a_fresh_cache_loads_from_files(tmp_path: Path) -> None:
    folder = str(tmp_path / "kv")
    model = Model(compute_stream(), local_file_folder=folder)
    with model.lamella:
        assert model.store() == TOKENS
    again = Model(compute_stream(), local_file_folder=folder)
    again.wanted = model.wanted
    with again.lamella:
        assert again.load() == [True] * LAYERS
