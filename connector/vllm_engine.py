"""What the connector reads off a vLLM engine's configuration, and what it refuses there.

Versions are told by features: 0.26 and 0.32 are the ones this was written for and run with, and any other is named in
the log once. What could not be right is refused at start, with the setting that makes it right.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any, Final

import vllm
from blake3 import blake3
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from lamella.connector.cache_shapes import GroupShape
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.connector.vllm_worker import RankFacts
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace

_log = logging.getLogger(__name__)
_TESTED: Final = ("0.26.", "0.32.")
_ATTENTION: Final = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"}
_DRAFTERS_WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")

TRY_GRAPH_WAITS: Final = "LAMELLA_TRY_GRAPH_WAITS"
"""Environment variable that lets an engine have waits inside full CUDA graphs."""


def check_engine(vllm_config: Any, settings: ConnectorSettings) -> None:
    """Raises ValueError where early release or layer waits could not be right, with the setting that makes them so."""
    if not vllm.__version__.startswith(_TESTED):
        _log.warning("vLLM %s is taken by its features; the connector was tested with 0.26 and 0.32", vllm.__version__)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ValueError(f"{name} {size} spreads a block's tokens over ranks, which is not supported: set it to 1")
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size {parallel.pipeline_parallel_size}: stages of a pipeline are not supported: set it "
            "to 1, and tensor_parallel_size to the number of GPUs"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False) and (settings.server or settings.file_tier):
        raise ValueError(
            "calculate_kv_scales gives each process scales of its own, so that none can read what another has kept: "
            f"leave it out, or leave {'server' if settings.server else 'file_tier'} out"
        )
    if not settings.waits_in_forward:
        return
    _check_forward(vllm_config, settings)
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        _check_full_graphs(mode, settings)
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    ahead = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    second_runner = bool(getattr(vllm_config, "use_v2_model_runner", False))
    if policy == "recompute" and (ahead or second_runner):
        raise ValueError(
            "kv_load_failure_policy recompute cannot take a running request back with asynchronous scheduling or Model "
            "Runner V2, and a load can fail after release: use the policy fail, or async_scheduling=False with "
            "VLLM_USE_V2_MODEL_RUNNER=0, or release: whole"
        )


def _no_waits(settings: ConnectorSettings) -> str:
    """What to set so that no forward pass waits by layers; each is enough."""
    has_release = not (settings.use_layerwise or settings.is_auto)
    return f"set layers_per_slice to 0{' or release to whole' if has_release else ''}"


def _check_forward(vllm_config: Any, settings: ConnectorSettings) -> None:
    """Raises where a step calls the hooks of a layer another number of times than once, and before it ends."""
    parallel, drafter = vllm_config.parallel_config, getattr(vllm_config, "speculative_config", None)
    if getattr(parallel, "use_ubatching", False):
        said = "enable_dbo" if parallel.enable_dbo else f"ubatch_size {parallel.ubatch_size}"
        raise ValueError(
            f"{said} computes each layer of a step in parts, and a layer's waits and stores are once a step: leave it "
            f"out, or {_no_waits(settings)}"
        )
    method = getattr(drafter, "method", None)
    if drafter is not None and method not in _DRAFTERS_WITHOUT_KV:
        raise ValueError(
            f"speculative decoding by {method} runs layers with KV of their own behind the forward pass, where their "
            f"waits can be missed: use one of {', '.join(_DRAFTERS_WITHOUT_KV)}, or {_no_waits(settings)}"
        )


def _check_full_graphs(mode: Any, settings: ConnectorSettings) -> None:
    """Raises where the layers' waits and graphs of whole steps do not go together; each remedy named is enough."""
    whole_prefills = mode.mixed_mode().name == "FULL"
    before = f"{'use FULL_AND_PIECEWISE and ' if whole_prefills else ''}set full_graphs to before"
    no_waits = _no_waits(settings)
    if settings.full_graphs == "never":
        raise ValueError(
            f"cudagraph_mode {mode.name} replays whole steps and passes over the layers' waits: {before}, or use "
            f"PIECEWISE, or {no_waits}"
        )
    if settings.full_graphs == "before" and whole_prefills:
        raise ValueError(
            f"cudagraph_mode {mode.name} replays prefills as whole graphs too, so that nothing of them could overlap "
            f"with a load: use FULL_AND_PIECEWISE, or set full_graphs to never (where vLLM itself makes it FULL), or "
            f"{no_waits}"
        )
    if settings.full_graphs == "inside" and os.environ.get(TRY_GRAPH_WAITS) != "1":
        raise ValueError(
            "full_graphs inside has not been shown right on a GPU: of its tests in vLLM 0.26 on an H200 five of six "
            "passed, and the sixth, their control, could not tell a layer read early from rounding. So "
            f"{before}, or {TRY_GRAPH_WAITS}=1 to try it where wrong answers do no harm"
        )


def check_stands_alone(connector: object) -> None:
    """Raises ValueError where the engine's connector is another one that passes calls on, as MultiConnector does.

    It counts who holds a request's blocks by what workers report, where this connector answers on the scheduler side,
    and it shows every child the others' reports: blocks would be freed in use, and others' loads never end.
    """
    group = get_kv_transfer_group() if has_kv_transfer_group() else connector
    if group is not connector:
        raise ValueError(
            f"LamellaConnector cannot share an engine's requests below {type(group).__name__}: name it as kv_connector "
            "itself; a folder of its own (file_tier) serves several engines"
        )


def why_refused(vllm_config: Any, kv_cache_config: Any, *, reports_requests: bool) -> str:
    """Why nothing can be loaded into these caches, or "".

    Args:
        vllm_config, kv_cache_config: vLLM's.
        reports_requests: whether the engine can be told of a failed load by request instead of by block.
    """
    if getattr(vllm_config, "diffusion_config", None) is not None:
        return "a diffusion model writes the KV of tokens more than once"
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in _ATTENTION:
            return f"a KV cache group of kind {kind} is not supported; known: {', '.join(sorted(_ATTENTION))}"
        if getattr(group.kv_cache_spec, "non_causal", False):
            return "its attention looks ahead (non_causal): a token's KV does not follow from those before it"
        if (states := getattr(group.kv_cache_spec, "tokens_per_state", 1)) != 1:
            return f"{states} tokens share a state (tokens_per_state), where a state for each is supported"
    if len(groups) > 1 and not reports_requests:
        return "this vLLM cannot be told of a failed load where there are several KV cache groups; 0.32 can"
    if _recomputes_windows(vllm_config, groups) and not reports_requests:
        return (
            "this vLLM computes a part of a failed load anew, and a sliding window has left behind what comes before: "
            "use kv_load_failure_policy fail"
        )
    return ""


def engine_facts(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, refusal: str) -> EngineFacts:
    """What the scheduler side must know."""
    groups = kv_cache_config.kv_cache_groups
    block_tokens = tuple(group.kv_cache_spec.block_size for group in groups)
    facts = EngineFacts(
        block_tokens=block_tokens,
        token_bytes=sum(
            len(group.layer_names) * group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size
            for group in groups
        ),
        num_ranks=vllm_config.parallel_config.world_size,
        space=_key_space(vllm_config, block_tokens, settings),
        windows=tuple(_window_of(group.kv_cache_spec) for group in groups),
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        token_budget=int(vllm_config.scheduler_config.max_num_batched_tokens),
        steps_ahead=bool(getattr(vllm_config.scheduler_config, "async_scheduling", False)),
        recomputes_windows=_recomputes_windows(vllm_config, groups),
        refusal=refusal,
        engine=_engine_name(vllm_config),
    )
    if facts.is_taken_back_whole and not refusal and settings.waits_in_forward:
        why = f"{len(groups)} KV cache groups" if len(groups) > 1 else "sliding windows and the policy recompute"
        _log.warning(
            "released when all of the KV has landed: with %s vLLM cannot take back a request whose load fails after "
            "release",
            why,
        )
    return facts


def _recomputes_windows(vllm_config: Any, groups: Any) -> bool:
    """Whether vLLM would compute a failed part of a load over what the window before it has left behind."""
    recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    return recomputes and any(_window_of(group.kv_cache_spec) is not None for group in groups)


def _window_of(spec: Any) -> int | None:
    """Tokens behind which vLLM frees blocks; a window that only attention knows of frees none."""
    if type(spec).__name__ != "SlidingWindowSpec":
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def rank_facts(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> RankFacts:
    """What a worker must know of its place; called in the worker, whose ranks are set up."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    groups = tuple(
        GroupShape(
            tuple(group.layer_names),
            group.kv_cache_spec.block_size,
            int(getattr(group.kv_cache_spec, "num_heads", 0) or getattr(group.kv_cache_spec, "num_kv_heads", 1)),
            int(getattr(group.kv_cache_spec, "head_size", 1)),
        )
        for group in kv_cache_config.kv_cache_groups
    )
    parallel = vllm_config.parallel_config
    first_layer, _end = vllm_config.model_config.get_layers_start_end_indices(parallel)
    space = _key_space(vllm_config, tuple(group.block_tokens for group in groups), settings)
    rank = get_tensor_model_parallel_rank()
    return RankFacts(
        groups,
        space,
        rank,
        first_layer,
        recomputes_windows=_recomputes_windows(vllm_config, kv_cache_config.kv_cache_groups),
        engine=_engine_name(vllm_config),
        rank=rank,
        num_ranks=parallel.world_size,
    )


def full_graphs(vllm_config: Any) -> str:
    """Which batches may be replayed as one captured graph: "", "decode" (a token a request) or "any".

    Called once the caches are there: until then the engine may still find that its attention cannot be captured.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return ""
    drafts = getattr(vllm_config, "speculative_config", None) is not None  # then a decode computes several tokens
    return "any" if drafts or mode.mixed_mode().name == "FULL" else "decode"


def _engine_name(vllm_config: Any) -> str:
    """The engine's own name, which all of its processes have and no other engine has."""
    return str(vllm_config.kv_transfer_config.engine_id)


def _key_space(vllm_config: Any, block_tokens: tuple[int, ...], settings: ConnectorSettings) -> KeySpace:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    unit = math.lcm(*block_tokens)
    cache_dtype = vllm_config.cache_config.cache_dtype
    config = blake3(repr(sorted(model.hf_config.to_dict().items(), key=str)).encode()).hexdigest()[:16]
    name = f"{model.model} revision {model.revision} quantization {model.quantization} config {config}"
    return KeySpace(
        model=name,
        dtype=str(model.dtype) if cache_dtype == "auto" else str(cache_dtype),
        form=ObjectForm.TOKEN,
        inner_layout="logical",
        chunk_tokens=max(unit, settings.chunk_tokens // unit * unit),
        tp_rank=0,
        tp_size=parallel.tensor_parallel_size,
        layers=(0, model.get_total_num_hidden_layers()),
        salt=settings.salt.encode(errors="surrogatepass"),
    )
