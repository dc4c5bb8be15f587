"""vLLM's OpenAI server of the tiny model, with the connector, in processes of its own, and how to ask it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from child_process import environment

_START_S: Final = 240.0
_CALL_S: Final = 60.0


@dataclass(frozen=True)
class HttpServer:
    """A server that answers, and the processes that it consists of."""

    port: int
    pid: int
    log: Path

    def call(self, method: str, path: str, body: Any = None) -> str:
        """What the server says; anything but success is an error."""
        connection = self._sent(method, path, body)
        try:
            return self._read(connection).decode()
        finally:
            connection.close()

    def _sent(self, method: str, path: str, body: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_CALL_S)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def _read(self, connection: http.client.HTTPConnection) -> bytes:
        response = connection.getresponse()
        said = response.read()
        assert response.status == 200, (response.status, said[:500])
        return said

    def complete(self, tokens: list[int], *, stream: bool = False, **more: Any) -> tuple[Any, ...]:
        """Twelve greedy tokens, their log-probabilities, and how many of the prompt's tokens were found."""
        said = self.call("POST", "/v1/completions", completion(tokens, stream=stream, **more))
        parts = [json.loads(line[5:]) for line in said.splitlines() if line.startswith("data: {")]
        choices, parts = [], parts if stream else [json.loads(said)]
        for part in parts:
            choices += part["choices"]
        usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
        found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        scores = [score for choice in choices for score in (choice.get("logprobs") or {}).get("token_logprobs", ())]
        return tuple(ids), tuple(scores), found

    def leave_after_first_token(self, tokens: list[int]) -> None:
        """A client that goes away in mid-answer."""
        connection = self._sent("POST", "/v1/completions", completion(tokens, stream=True, max_tokens=400))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    def counted(self, name: str) -> float:
        """A counter of the connector in `/metrics`, over all its labels."""
        lines = [line for line in self.call("GET", "/metrics").splitlines() if line.startswith(f"vllm:lamella_{name}")]
        assert lines, f"/metrics has no vllm:lamella_{name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def forgets_blocks(self) -> bool:
        """Whether vLLM's own prefix cache is empty now; it cannot be while anybody holds a block."""
        return bool(json.loads(self.call("POST", "/reset_prefix_cache"))["success"])


def completion(tokens: list[int], *, stream: bool, **more: Any) -> dict[str, Any]:
    """A request of OpenAI's form, with a prompt of token ids."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    body |= {
        "return_token_ids": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    return body | more


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word for each token id: a server wants to spell what it answers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number} ": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0 "))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0 ").save_pretrained(str(folder))


@contextmanager
def http_server(model: Path, extra: dict[str, Any], log: Path, *options: str) -> Iterator[HttpServer]:
    """The server answers; it is stopped by SIGTERM, and has stopped when this ends.

    Raises:
        AssertionError: it does not start, or does not stop by itself.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "LamellaConnector",
        "kv_connector_module_path": "lamella.connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    told = {
        "--model": str(model), "--served-model-name": "tiny", "--host": "127.0.0.1", "--port": str(port),
        "--dtype": "float32", "--max-model-len": "1024", "--block-size": "32", "--max-num-seqs": "8",
        "--max-num-batched-tokens": "256", "--num-gpu-blocks-override": "100", "--seed": "0",
        "--kv-transfer-config": json.dumps(transfer),
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *options]
    command += ["--enable-prompt-tokens-details", *(word for pair in told.items() for word in pair)]
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(**more), start_new_session=True
        )
    server = HttpServer(port, process.pid, log)
    try:
        _wait_until_healthy(server, process)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(server: HttpServer, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while True:
        assert process.poll() is None, server.log.read_text()[-3000:]
        assert time.monotonic() < end, server.log.read_text()[-3000:]
        try:
            server.call("GET", "/health")
            return
        except OSError:
            time.sleep(0.2)


def members(group: int) -> list[int]:
    """Processes that are left of a server's, by the session that it began."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _parent, _group, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:  # it has ended meanwhile
                continue
            if int(session) == group and state != "Z":
                found.append(int(entry.name))
    return found
