"""A run of real vLLM, recorded: the form that simulated runs have, explained by the same code, true to the engine."""

from __future__ import annotations

import gc
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm import LLM
from vllm.config import KVTransferConfig

from lamella.cli.main import build_app
from lamella.connector.recorded_run import read_run
from lamella.reference.chrome_trace import from_chrome_trace
from lamella.reference.recording import Recording, RunSource
from lamella.sim.explain import explain
from with_vllm.tiny_engine import BEFORE_BATCH, BLOCK, prompt, sampling

EXTRA = {"layers_per_slice": 1, "release": "first", "host_pool_gib": 0.1, "chunk_tokens": 64}
DOCUMENT, QUESTION = 384, 24


def serve(llm: LLM, names: list[str], salt: int) -> None:
    for name in names:
        tokens = prompt(DOCUMENT, salt) + prompt(QUESTION, salt + sum(map(ord, name)))
        llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling(4))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


@pytest.fixture(scope="module")
def folder(deep_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of a run: a document is stored, the engine forgets it, and three requests load it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMELLA_RECORD", str(folder))
        options: dict[str, Any] = {"max_model_len": 1024, "block_size": BLOCK, "max_num_seqs": 8}
        llm = LLM(
            model=str(deep_llama),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            seed=0,
            max_num_batched_tokens=256,
            kv_transfer_config=KVTransferConfig(
                kv_connector="RecordingConnector",
                kv_connector_module_path="lamella.connector.vllm_recording",
                kv_role="kv_both",
                kv_connector_extra_config={"before_batch": BEFORE_BATCH, **EXTRA},
            ),
            **options,
        )
        serve(llm, ["first"], salt=3)
        for _ in range(100):
            llm.llm_engine.step()
        assert llm.reset_prefix_cache()
        serve(llm, ["a", "b", "c"], salt=3)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    return folder


@pytest.fixture(scope="module")
def recording(folder: Path) -> Recording:
    return read_run(folder)


def test_every_request_is_in_it_with_what_it_loaded_and_computed(recording: Recording) -> None:
    assert recording.source is RunSource.MEASURED
    assert recording.strategy == "fifo/1/first"
    assert len(recording.requests) == 4
    first, *hits = recording.requests
    assert (first.cached_tokens, first.new_tokens, first.landings) == (0, DOCUMENT + QUESTION, ())
    for one in hits:
        assert one.cached_tokens + one.new_tokens == DOCUMENT + QUESTION
    loaded = [one for one in hits if one.landings]
    assert loaded, "at least one of the three came from the host pool; the others may share its blocks"
    for one in loaded:
        assert one.cached_tokens == DOCUMENT
        assert [landing.num_layers for landing in one.landings] == [1] * recording.num_layers


def test_steps_computed_every_prompt_token_once_and_a_chunk_is_as_long_as_the_budget_allows(
    recording: Recording,
) -> None:
    computed = dict.fromkeys((one.request for one in recording.requests), 0)
    for step in recording.steps:
        for chunk in step.chunks:
            assert chunk.num_tokens <= 256
            computed[chunk.request] += chunk.num_tokens
    assert computed == {one.request: one.new_tokens for one in recording.requests}
    assert [one.output_tokens for one in recording.requests] == [4] * 4


def test_the_parts_of_a_measured_request_add_up_exactly_too(recording: Recording) -> None:
    for one in recording.requests:
        parts = dict(explain(recording, one.request).parts())
        assert sum(parts.values()) == one.ttft_ns
        assert min(parts.values()) >= 0
        assert parts["computing"] > 0


def test_a_load_lands_within_its_request_and_slices_follow_each_other(recording: Recording) -> None:
    for one in recording.requests:
        if one.landings:
            assert one.submitted_ns <= one.landings[0].landed_ns <= one.first_token_ns
    wire = sorted(recording.occupations, key=lambda busy: busy.begin_ns)
    assert all(later.begin_ns >= earlier.end_ns for earlier, later in pairwise(wire))


def test_the_command_explains_it_and_writes_the_trace(folder: Path, recording: Recording, tmp_path: Path) -> None:
    out = tmp_path / "measured.trace.json"
    result = CliRunner().invoke(build_app(), ["explain", "slowest", "--trace", str(folder), "--trace-out", str(out)])
    assert result.exit_code == 0, result.output
    assert "(measured, fifo/1/first)" in result.stdout
    assert "Note: a step ends when its forward pass has; sampling is not in it" in result.stdout
    assert from_chrome_trace(json.loads(out.read_text())) == recording
