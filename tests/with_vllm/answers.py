"""Answers of a real vLLM engine, and how far apart two right ones may be."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

_NOISE_FLOOR, _NOISE_LIMIT = 0.02, 0.4  # of a log-probability in bfloat16


class Tolerance:
    """How far apart two right answers may be; 0 on a CPU, where they are equal to the bit."""

    logprob = 0.0


class Answer(NamedTuple):
    """What a request gave. Logprobs are compared as well: small damage leaves tokens as they are."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str | None
    cached: int | None
    leads: tuple[float, ...] = ()
    """By how much each token was more likely than the next best."""

    def same(self, other: Answer) -> bool:
        """Equal to the bit, or on a GPU as near as the engine's own repetitions are."""
        if self[:3] == other[:3]:
            return True
        return self.reason == other.reason and self.deviation(other) <= Tolerance.logprob

    def deviation(self, other: Answer) -> float:
        """The smallest tolerance of a log-probability under which both are right.

        Where tokens differ it is half the larger lead that a chosen one had, or the difference of their own
        log-probabilities: within that, either is right, and what follows is another text that is not compared.
        Infinite where one of them is no number: something was read that nobody had written.
        """
        if len(self.tokens) != len(other.tokens) or any(map(math.isnan, (*self.logprobs, *other.logprobs))):
            return math.inf
        largest = 0.0
        leads = map(max, self.leads, other.leads)
        for mine, theirs, a, b, lead in zip(
            self.tokens, other.tokens, self.logprobs, other.logprobs, leads, strict=True
        ):
            if mine != theirs:
                return max(largest, lead / 2, abs(a - b))
            largest = max(largest, abs(a - b))
        return largest


def answer_of(output: Any) -> Answer:
    best = output.outputs[0]
    steps = [{token: found.logprob for token, found in step.items()} for step in best.logprobs or ()]
    logprobs = tuple(step[token] for step, token in zip(steps, best.token_ids, strict=True))
    leads = tuple(
        own - max(value for token, value in step.items() if token != chosen)
        for step, chosen, own in zip(steps, best.token_ids, logprobs, strict=True)
    )
    return Answer(tuple(best.token_ids), logprobs, best.finish_reason, output.num_cached_tokens, leads)


def tolerance_for(deviation: float) -> float:
    """Of a log-probability on a GPU, where the engine's own answers are so far apart."""
    assert deviation < _NOISE_LIMIT, f"the engine's own answers are {deviation} apart: no yardstick"
    return max(_NOISE_FLOOR, 2 * deviation)
