"""One engine in a process of its own: answers the prompts it is given, and says what its connector did.

    python engine_process.py '{"model": ..., "extra": {...} | null, "prompts": [[...]], "options": {...}}'

Prints one line of JSON: the answers in order, then the cached tokens. With `"connectorless"` semantics `extra` is null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    from with_vllm.answers import answer_of
    from with_vllm.tiny_engine import make_llm, sampling

    asked = json.loads(sys.argv[1])
    llm = make_llm(Path(asked["model"]), asked["extra"], **asked.get("options", {}))
    answers = []
    for tokens in asked["prompts"]:
        (output,) = llm.generate({"prompt_token_ids": tokens}, sampling(12), use_tqdm=False)
        answer = answer_of(output)
        answers.append([list(answer.tokens), [value.hex() for value in answer.logprobs], answer.reason, answer.cached])
        if asked.get("forget"):
            llm.reset_prefix_cache()
    print("ANSWERS " + json.dumps(answers), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
