"""Which steps of a live vLLM engine replay captured CUDA graphs, chosen between repeats.

An engine captures everything that one of its arms replays. Arms that say nothing replay what an engine with vLLM's
defaults and piecewise graphs has: steps of at most twice `max_num_seqs` tokens.
"""

from __future__ import annotations

from typing import Any, Final

KINDS: Final = ("piecewise", "prefill", "full", "both")
FULL: Final = ("full", "both")
"""Those by which whole decoding steps are replayed."""
_MOST_PADDING: Final = 16


def usual_sizes(max_num_seqs: int) -> list[int]:
    """Tokens of the steps that vLLM captures by its defaults, for up to 127 sequences."""
    return [1, 2, 4, *range(8, 2 * max_num_seqs + 1, 8)]


class GraphChoice:
    """See the module.

    Args:
        runner: a worker's model runner. One that captures nothing, or vLLM's first runner, leaves no choice.
    """

    def __init__(self, runner: Any) -> None:
        self._usual = 2 * runner.vllm_config.scheduler_config.max_num_seqs
        self._manager = getattr(runner, "cudagraph_manager", None)
        self._captured: dict[Any, list[Any]] = {} if self._manager is None else dict(self._manager._candidates)

    def choose(self, kind: str) -> None:
        """From the next step on.

        Raises:
            ValueError: an unknown kind, or one that this engine has no graphs for.
        """
        if kind not in KINDS:
            raise ValueError(f"graphs must be one of {', '.join(KINDS)}, got {kind!r}")
        if self._manager is None or not self._captured:
            return
        for part in ("prefill", "full") if kind == "both" else (kind,):
            if part != KINDS[0] and self._replayable(part) == self._replayable(KINDS[0]):
                raise ValueError(f"this engine captured no {part} graphs: use a group that has them")
        self._manager._candidates = self._replayable(kind)

    def _replayable(self, kind: str) -> dict[Any, list[Any]]:
        return {key: [one for one in found if self._allows(kind, one, key[0])] for key, found in self._captured.items()}

    def _allows(self, kind: str, descriptor: Any, num_tokens: int) -> bool:
        if descriptor.cg_mode.name == "FULL":
            return kind in FULL
        if descriptor.num_tokens <= self._usual:
            return True
        return kind in ("prefill", "both") and descriptor.num_tokens - num_tokens <= _MOST_PADDING
