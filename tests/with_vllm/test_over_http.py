"""`vllm serve` with the connector: clients at once, some that leave, its metrics, and an end that leaves nothing."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from with_vllm.http_server import HttpServer, http_server, members, write_tokenizer
from with_vllm.tiny_engine import ON_GPU, prompt
from with_vllm.tiny_llama import VOCABULARY

for module in ("uvicorn", "prometheus_fastapi_instrumentator", "model_hosting_container_standards"):
    pytest.importorskip(module, reason="tests/with_vllm/requirements.txt names what vLLM's HTTP server needs")

EXTRA = {"layers_per_slice": 1, "chunk_tokens": 64, "host_pool_gib": 0.1, "wait_timeout_s": 60.0}
SHARED = [prompt(400, salt) for salt in range(3)]
ASKED = [SHARED[number % 3] + prompt(40, 100 + number) for number in range(8)]


def until_blocks_are_forgotten(server: HttpServer) -> None:
    end = time.monotonic() + 30
    while not server.forgets_blocks():
        assert time.monotonic() < end, "somebody holds blocks, and nobody asks for anything"
        time.sleep(0.05)


@pytest.mark.skipif(ON_GPU, reason="answers of other batches differ on a GPU; this is of the server, which is the same")
def test_clients_at_once_find_what_was_stored_get_the_same_answers_and_leave_nothing(
    tiny_llama: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    write_tokenizer(model, VOCABULARY)
    with http_server(model, EXTRA, tmp_path / "log") as server, ThreadPoolExecutor(10) as clients:
        # nobody else has the tenant, so nothing is found for it
        computed = [server.complete(tokens, cache_salt=f"alone {number}") for number, tokens in enumerate(ASKED)]
        assert [found for _tokens, _scores, found in computed] == [0] * 8
        for tokens in SHARED:
            server.complete(tokens)
        for _round in range(3):
            until_blocks_are_forgotten(server)
            leaving = [clients.submit(server.leave_after_first_token, ASKED[number] + [7, 8]) for number in (0, 5)]
            asked = [
                clients.submit(server.complete, tokens, stream=bool(number % 2)) for number, tokens in enumerate(ASKED)
            ]
            answers = [one.result() for one in asked]
            for one in leaving:
                one.result()
            assert [answer[:2] for answer in answers] == [answer[:2] for answer in computed]
            assert all(found >= 384 for _tokens, _scores, found in answers)
        until_blocks_are_forgotten(server)
        assert server.counted("hit_tokens_total") >= 3 * 3 * 384
        assert server.counted("loads_total") >= 9
        assert server.counted("loads_failed_total") == 0
    end = time.monotonic() + 10
    while left := members(server.pid):
        assert time.monotonic() < end, left
        time.sleep(0.1)
