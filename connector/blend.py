"""Blending: a prompt's KV put together from parts that were cached elsewhere, repaired where it deviates most.

A part's cached KV was computed behind other tokens and at other positions. Its keys are turned to their new positions,
which is exact. What is missing is that its tokens never attended to what stands before them now. A share of them, those
whose KV deviates most, is therefore computed anew, layer by layer, over everybody's KV:

    layer 0   every token is computed: its KV cannot deviate, but what it hands to layer 1 does
    layer 1   every token's new KV is compared with the cached one, and kept; the share that deviates most goes on
    layer 2   its KV replaces what was cached, it attends to all, and so on to the last layer

With a share of 1 this is a full prefill; with 0 it is plain reuse, where only what is not cached is computed. While
layer i is recomputed, layer i+1 is loaded and layer i-1 scattered (`lamella.connector.buffered`).

Source: CacheBlend (Yao et al., EuroSys 2025). It keeps the new KV of the selected tokens in layer 1; here everybody's
stays, since it was computed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lamella.connector.blend_layers import BlendError, BlendLayers, connector_of
from lamella.connector.blend_plan import BlendPlan, RecomputeRatio, Reuse
from lamella.connector.blend_rotation import Rotation
from lamella.connector.blend_tensors import LayerKV, ReadBack, layer_kv, tensor_over
from lamella.connector.blend_times import LayerTimer
from lamella.connector.cache_engine import CacheEngine
from lamella.connector.streams import Recorder

try:
    import torch
except ImportError as missing:
    raise ImportError("blending needs torch: pip install 'lamella[torch]'") from missing

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAMPLED_TOKENS = 256

__all__ = ["BlendError", "BlendModel", "Blended", "Blender", "RecomputeRatio", "Reuse", "Rotation"]


class BlendModel(Protocol):
    """A transformer that can be run layer by layer for some of a sequence's tokens. Positions are `[tokens]` int64."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What goes into layer 0, `[tokens, wide]`, for token ids `[tokens]`."""
        ...

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[tokens, heads, D]`, keys and values `[tokens, H, D]`; the first two turned by their positions."""
        ...

    def attend(
        self,
        layer: int,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The layer's output `[tokens, wide]`: attention and what follows it, residuals included.

        `keys` and `values` are the whole sequence's, `[sequence, H, D]` of the cached type; the query at position p
        sees rows 0 .. p. Positions rise, and name every row once if there are as many.
        """
        ...


@dataclass(frozen=True, slots=True)
class Blended:
    """What a blend computed.

    Attributes:
        hidden: what the last layer put out for the tokens that went through all layers, `[tokens, wide]`; the last row
            is the sequence's last token.
        positions: theirs, `[tokens]`, rising.
        plan: what became of each token.
        recomputed_tokens: reused tokens that went through all layers.
        sampled_deviation: relative deviation of the cached keys in layer 0 from those computed there, over a sample;
            nothing but rounding, or None where nothing was reused.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    plan: BlendPlan
    recomputed_tokens: int
    sampled_deviation: float | None


class _Active:
    """The tokens that are computed: all of `rows`, of which those at `optional` may be let go of.

    Sizes are known beforehand, so that nothing here waits for the device.
    """

    def __init__(self, rows: torch.Tensor, required: torch.Tensor, optional: torch.Tensor) -> None:
        self.rows = rows  # [tokens], positions, rising
        self.required = required  # [required], indices into rows
        self.optional = optional  # [optional], indices into rows

    @classmethod
    def of(cls, plan: BlendPlan, *, with_optional: bool, device: torch.device) -> _Active:
        wanted = plan.required() | (plan.optional if with_optional else False)
        rows = torch.from_numpy(wanted).nonzero().flatten()
        optional = torch.from_numpy(plan.optional)[rows]
        required = (~optional).nonzero().flatten()
        return cls(rows.to(device), required.to(device), optional.nonzero().flatten().to(device))

    def keep(self, chosen: torch.Tensor) -> tuple[_Active, torch.Tensor]:
        """Those required and those chosen, `[chosen]` indices into `optional`; and their indices into `rows`."""
        kept = torch.cat((self.required, self.optional[chosen]))
        order = kept.argsort()
        place = order.argsort()  # where each of `kept` goes
        kept = kept[order]
        split = len(self.required)
        return _Active(self.rows[kept], place[:split], place[split:]), kept


class Blender:
    """Puts sequences together from cached parts, on the current torch stream. For one thread.

    Args:
        cache_engine: of a buffered connector (`use_layerwise` and `enable_blending`).
        model: computes.
        rotation: how the model turns keys.
        ratio: how many of the reused tokens are computed anew, see `RecomputeRatio`.
        dtype: of the cached KV.
        packed: K = 1 with keys and values of a head together.
        tolerance: relative deviation of cached keys in layer 0 that counts as rounding. More means that they are
            another model's or another rotation's, and is refused.
        recorder: takes a span a layer; loads and scatters are told to the cache engine's.

    Raises:
        ValueError: a connector without buffers, KV whose keys cannot be told apart (MLA), a dtype that is not that of
            the objects, or a rotation wider than a head.
        TypeError: a ratio that is no number, or no `Rotation`.
    """

    def __init__(
        self,
        cache_engine: CacheEngine,
        model: BlendModel,
        rotation: Rotation,
        *,
        dtype: torch.dtype,
        ratio: float | Sequence[float] | RecomputeRatio = 0.15,
        packed: bool = False,
        tolerance: float = 0.05,
        recorder: Recorder | None = None,
    ) -> None:
        connector = connector_of(cache_engine)
        if not isinstance(rotation, Rotation):
            raise TypeError(f"rotation must be a Rotation, got {rotation!r}")
        geometry = connector.layout.groups[0].geometry
        if geometry.kv == 1 and not packed:
            raise ValueError(
                "one array a token holds MLA's latent, which has no keys that could be turned and compared: blending "
                "needs keys and values apart (kv = 2), or packed in a head (packed=True)"
            )
        if packed and (geometry.kv == 2 or geometry.head_dim % 2):
            raise ValueError(
                f"packed means one array with an even head, got kv = {geometry.kv}, head_dim = {geometry.head_dim}"
            )
        if dtype not in _DTYPES:
            raise ValueError(f"keys of {dtype} cannot be turned: blending knows {', '.join(map(str, _DTYPES))}")
        head = geometry.head_dim // 2 if packed else geometry.head_dim
        if 2 * len(rotation.frequencies) > head:
            raise ValueError(f"{len(rotation.frequencies)} pairs turn, but a head has {head} elements")
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {tolerance}")
        self.ratio = RecomputeRatio.of(ratio)
        self._cache_engine = cache_engine
        self._connector = connector
        self._model = model
        self._rotation = rotation
        self._tolerance = tolerance
        self._recorder = recorder
        self._device = torch.device(connector.engine.device)
        self._layers = [
            layer_kv(tensor_over(connector.layer_view(layer), dtype, connector.engine.device), packed=packed)
            for layer in range(connector.num_layers)
        ]

    def blend(
        self,
        tokens: Sequence[int],
        reuses: Sequence[Reuse],
        block_ids: Sequence[int],
        *,
        tenant: bytes | None = None,
    ) -> Blended:
        """The whole sequence's KV is in its blocks, for work given to the current stream from now on.

        What the cache does not hold of a reuse is computed, as gaps are.

        Args:
            tokens: the sequence.
            reuses: where parts of it were stored, in any order; a stored sequence may be used any number of times.
            block_ids: the engine's blocks for all tokens.
            tenant: whose objects; None: the key space's.

        Raises:
            ValueError: reuses, tokens or blocks that do not fit (nothing has moved), or cached keys that this model and
                rotation do not give. The blocks hold any mixture then.
            BlendError: a layer was lost on its way; the blocks hold any mixture.
        """
        with torch.no_grad(), BlendLayers(self._cache_engine, tokens, reuses, block_ids, tenant=tenant) as loading:
            plan = loading.plan
            active = _Active.of(plan, with_optional=self.ratio.kept(0, 1) > 0, device=self._device)
            num_optional = int(plan.optional.sum())
            ids = torch.as_tensor(tokens, dtype=torch.int64).to(self._device)  # [sequence]
            turns = self._rotation.turns(torch.from_numpy(plan.moved).to(self._device)) if plan.moved.any() else None
            sample = self._sample(plan)
            deviation: ReadBack | None = None
            hidden = self._model.embed(ids[active.rows])  # [tokens, wide]
            timer = LayerTimer(self._recorder, self._device)
            with closing(loading.layers()) as layers:
                for layer in layers:
                    with timer.layer(layer):
                        kv = LayerKV(*(part[: plan.num_tokens] for part in self._layers[layer]))
                        if turns is not None:
                            self._rotation.turn(kv.keys, turns)
                        if layer == 0 and sample is not None:
                            deviation = ReadBack(self._deviation(ids[sample], sample, kv))
                        kept = self.ratio.kept(layer, num_optional)
                        hidden, active = self._recompute(layer, hidden, active, kept, kv)
                    if deviation is not None and layer == 0:
                        self._refuse_foreign(deviation.value())  # the device goes on with the layer meanwhile
            timer.tell()
        measured = None if deviation is None else deviation.value()
        return Blended(hidden, active.rows, plan, len(active.optional), measured)

    def _recompute(
        self, layer: int, hidden: torch.Tensor, active: _Active, kept: int, kv: LayerKV
    ) -> tuple[torch.Tensor, _Active]:
        """The active tokens' output of the layer, after those that deviate least were let go of."""
        queries, keys, values = self._model.project(layer, hidden, active.rows)
        chosen: torch.Tensor | None = None
        if layer and kept < len(active.optional):
            new, rows = active.optional, active.rows[active.optional]
            deviates = (keys[new].float() - kv.keys[rows].float()).square().sum((1, 2))
            deviates += (values[new].float() - kv.values[rows].float()).square().sum((1, 2))  # [optional]
            chosen = deviates.topk(kept, sorted=False).indices  # [kept]
        kv.keys[active.rows] = keys.to(kv.keys.dtype)
        kv.values[active.rows] = values.to(kv.values.dtype)
        if chosen is not None:
            active, kept_rows = active.keep(chosen)
            hidden, queries = hidden[kept_rows], queries[kept_rows]
        return self._model.attend(layer, hidden, queries, kv.keys, kv.values, active.rows), active

    # ---- whether what is cached is this model's

    def _sample(self, plan: BlendPlan) -> torch.Tensor | None:
        """Positions of some reused tokens: evenly spread, and the first of every part."""
        reused = np.flatnonzero(plan.reused)
        if not len(reused):
            return None
        begins = np.ones(len(reused), dtype=np.bool_)
        begins[1:] = (np.diff(reused) > 1) | (np.diff(plan.moved[reused]) != 0)
        begins[:: max(1, len(reused) // _SAMPLED_TOKENS)] = True
        return torch.from_numpy(reused[begins]).to(self._device)

    def _deviation(self, ids: torch.Tensor, positions: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """How far cached keys are from those that layer 0 gives, relative to these: the worst token's."""
        _, keys, _ = self._model.project(0, self._model.embed(ids), positions)
        apart = (keys.float() - kv.keys[positions].float()).square().sum((1, 2))
        return (apart / keys.float().square().sum((1, 2)).clamp_min(1e-30)).max().sqrt()

    def _refuse_foreign(self, deviation: float) -> None:
        if not deviation <= self._tolerance:  # NaN is refused too
            raise ValueError(
                f"cached keys of layer 0 are off by {deviation:.3g} of their length, more than {self._tolerance}: they "
                "come from another model or another rotation (frequencies, pairing), or were stored at other positions"
            )
