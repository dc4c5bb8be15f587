"""What the scheduler side must know of the engine it serves."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.reference.keys import KeySpace


def is_taken_back_whole(num_groups: int, recomputes_windows: bool) -> bool:
    """Whether a load that fails is taken back as a whole, before anybody has run on it, and loads are released so.

    Of several groups vLLM takes back no part; where a window slides, what comes before the part would be gone.
    """
    return num_groups > 1 or recomputes_windows


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's caches and ranks.

    Attributes:
        block_tokens: of each KV cache group.
        token_bytes: KV bytes of a token on one rank.
        num_ranks: workers that report.
        space: key space of the engine, whatever the rank.
        prefix_caching: whether the engine itself shares blocks between requests.
        windows: tokens of each group's sliding window, None where blocks are kept to the end; fewer entries: as None.
        recomputes_windows: a failed load is computed anew, and there are windows.
        null_block: id of the block that stands for none.
        token_budget: most tokens in a step; None where nobody said.
        steps_ahead: whether the next step is scheduled while one computes.
        refusal: why nothing can be loaded here, or "".
        engine: name of the engine, the same for all of its ranks and no other's.
    """

    block_tokens: tuple[int, ...]
    token_bytes: int
    num_ranks: int
    space: KeySpace
    prefix_caching: bool = True
    windows: tuple[int | None, ...] = ()
    recomputes_windows: bool = False
    null_block: int = 0
    token_budget: int | None = None
    steps_ahead: bool = False
    refusal: str = ""
    engine: str = ""

    @property
    def is_taken_back_whole(self) -> bool:
        """See the function."""
        return is_taken_back_whole(len(self.block_tokens), self.recomputes_windows)
