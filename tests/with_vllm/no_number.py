"""Where an early read shows in answers that are no number, and where it cannot."""

from __future__ import annotations

import pytest

from with_vllm.tiny_engine import ON_GPU

NO_NUMBER_IS_LOST = (
    "on a GPU an early read does not show in what is no number: where attention splits a sequence's KV, as "
    "FlashAttention does to decode, a part whose weights add up to no number is left out, and the answer is numbers "
    "(seen on an H200, vLLM 0.26, both model runners); where a prefill read so, the engine was not usable after it"
)
"""Why a reader of blocks that are no number is no yardstick there."""

READERS = [
    pytest.param(True, id="waits"),
    pytest.param(False, id="no waits", marks=pytest.mark.skipif(ON_GPU, reason=NO_NUMBER_IS_LOST)),
]
"""Whether the reader of blocks that hold no number waits; where it does not, the test is the yardstick's own."""
