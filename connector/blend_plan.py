"""Which tokens of a sequence come from the cache when it is put together from stored parts, and which are computed.

A *reuse* takes tokens `[first, end)` of a stored sequence and uses them again from position `start` on. Between reuses
are gaps, whose tokens are computed; so is what a reuse asks for and the cache does not hold, and the sequence's last
token, for its logits. What is left is the reused tokens: their KV was computed behind other tokens, so it deviates from
what this sequence would have, and some of them are *recomputed* (`RecomputeRatio`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens `[first, end)` of a stored sequence stand at `start`, `start + 1`, ... of another.

    Args:
        tokens: the stored sequence from its first token on, to `end` or further; to the end of the last chunk that is
            wanted, so that it can be found.
        start: where the part stands now.
        first: where it begins in the stored sequence.
        end: where it ends there; None: with `tokens`.

    Raises:
        ValueError: an empty part, one outside the stored sequence, or a negative start.
        TypeError: a place that is no whole number.
    """

    tokens: Sequence[int]
    start: int
    first: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        for name, place in (("start", self.start), ("first", self.first), ("end", self.stop)):
            if not isinstance(place, int | np.integer):
                raise TypeError(f"{name} must be a whole number, got {place!r}")
        if not 0 <= self.first < self.stop <= len(self.tokens):
            raise ValueError(
                f"a reuse takes tokens first .. end of {len(self.tokens)} stored ones, got {self.first} .. {self.stop}"
            )
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}")

    @property
    def stop(self) -> int:
        """Where the part ends in the stored sequence."""
        return len(self.tokens) if self.end is None else self.end

    @property
    def offset(self) -> int:
        """Positions that each of its tokens moved; by as much its keys are turned."""
        return self.start - self.first

    @property
    def num_tokens(self) -> int:
        """Tokens it asks for."""
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class RecomputeRatio:
    """How many of the reused tokens are computed anew: a share, or one for layer 1, 2, ... whose last one repeats.

    In layer 0 KV depends on the token and its position alone, so nothing deviates there. With a share above 0 layer 0
    computes every token, layer 1 compares, and the share that deviates most goes on. A schedule such as
    `(0.3, 0.2, 0.15)` compares again in each layer among those still computed, and lets go of some.

    Raises:
        ValueError: no share, one outside 0 .. 1, or one larger than that before it.

    Source: selection in layer 1 and gradual filtering are CacheBlend's (Yao et al., EuroSys 2025).
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares:
            raise ValueError("a recompute ratio needs at least one share")
        for share in self.shares:
            if not 0 <= share <= 1:
                raise ValueError(f"a recompute ratio must be between 0 and 1, got {share}")
        for earlier, later in zip(self.shares, self.shares[1:], strict=False):
            if later > earlier:
                raise ValueError(
                    f"a token that was let go cannot be computed again: shares must not rise, got {self.shares}"
                )

    @classmethod
    def of(cls, ratio: float | Sequence[float] | RecomputeRatio) -> RecomputeRatio:
        """From one share or several.

        Raises:
            TypeError: something else than numbers.

        >>> RecomputeRatio.of(0.15).kept(layer=1, num_tokens=1000)
        150
        """
        if isinstance(ratio, RecomputeRatio):
            return ratio
        shares: tuple[object, ...] = tuple(ratio) if isinstance(ratio, Sequence) else (ratio,)
        numbers = [float(share) for share in shares if isinstance(share, int | float) and not isinstance(share, bool)]
        if len(numbers) < len(shares):
            raise TypeError(f"a recompute ratio is a number between 0 and 1, or one a layer, got {ratio!r}")
        return cls(tuple(numbers))

    def kept(self, layer: int, num_tokens: int) -> int:
        """Of that many reused tokens, how many are computed from this layer on; in layer 0 all or none."""
        if layer == 0:
            return num_tokens if self.shares[0] > 0 else 0
        share = self.shares[min(layer, len(self.shares)) - 1]
        return min(num_tokens, math.ceil(share * num_tokens - 1e-9))


class BlendPlan(NamedTuple):
    """What becomes of each token of the sequence; arrays have one entry a token, `[num_tokens]`.

    Attributes:
        moved: positions that a token's cached KV moved; 0 where nothing is reused.
        reused: its KV comes from the cache.
        optional: reused, and recomputed only if selected. A reuse that stands where it stood, at the very beginning,
            has exactly the KV that this sequence gives it, and is not among them.
    """

    moved: NDArray[np.int64]
    reused: NDArray[np.bool_]
    optional: NDArray[np.bool_]

    @property
    def num_tokens(self) -> int:
        """Of the sequence."""
        return len(self.moved)

    def required(self) -> NDArray[np.bool_]:
        """Tokens that are computed whatever deviates: gaps and the last token."""
        found: NDArray[np.bool_] = ~self.reused
        found[-1] = True
        return found


def check_reuses(tokens: Sequence[int], reuses: Sequence[Reuse]) -> None:
    """The reuses fit the sequence and one another.

    Raises:
        TypeError: tokens that are no whole numbers, or a reuse that is none.
        ValueError: no tokens, a negative one, or not one a position; a reuse that reaches beyond the sequence, names
            other tokens than stand there, or stands where another does.
    """
    sequence = whole_numbers("tokens", tokens)
    if not len(sequence):
        raise ValueError("there is nothing to blend: the sequence has no tokens")
    taken = np.full(len(sequence), -1)
    for index, reuse in enumerate(reuses):
        if not isinstance(reuse, Reuse):
            raise TypeError(f"reuse {index} must be a Reuse, got {reuse!r}")
        end = reuse.start + reuse.num_tokens
        if end > len(sequence):
            raise ValueError(f"reuse {index} ends at {end}, the sequence at {len(sequence)}")
        differs = np.flatnonzero(sequence[reuse.start : end] != np.asarray(reuse.tokens[reuse.first : reuse.stop]))
        if differs.size:
            place = int(differs[0])
            raise ValueError(
                f"reuse {index} is of another token at position {reuse.start + place}: the sequence has "
                f"{sequence[reuse.start + place]}, what was stored {reuse.tokens[reuse.first + place]}"
            )
        others = taken[reuse.start : end]
        if (others >= 0).any():
            place = int(np.flatnonzero(others >= 0)[0])
            raise ValueError(f"reuses {others[place]} and {index} both stand at position {reuse.start + place}")
        taken[reuse.start : end] = index


def whole_numbers(name: str, given: Sequence[int]) -> NDArray[np.int64]:
    """The numbers as an array, `[count]`.

    Raises:
        TypeError: something else than whole numbers.
        ValueError: a negative one, or not one behind another.
    """
    numbers = np.asarray(given)
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise TypeError(f"{name} must be whole numbers, got {numbers.flat[0]!r} ({numbers.dtype})")
    if numbers.ndim != 1:
        raise ValueError(f"{name} must be one behind another, got an array of shape {numbers.shape}")
    if numbers.size and int(numbers.min()) < 0:
        raise ValueError(f"{name} must not be negative, got {numbers.min()}")
    return numbers.astype(np.int64)


def plan_blend(tokens: Sequence[int], reuses: Sequence[Reuse], found: Sequence[int]) -> BlendPlan:
    """What becomes of each token, where the cache holds `found[i]` leading tokens of what reuse i asks for.

    Raises:
        ValueError: as `check_reuses`, or a number of tokens found that nobody asked for.
    """
    check_reuses(tokens, reuses)
    num_tokens = len(tokens)
    moved = np.zeros(num_tokens, np.int64)
    reused = np.zeros(num_tokens, np.bool_)
    exact = np.zeros(num_tokens, np.bool_)
    for reuse, there in zip(reuses, found, strict=True):
        if not 0 <= there <= reuse.num_tokens:
            raise ValueError(f"found must be between 0 and the {reuse.num_tokens} tokens asked for, got {there}")
        rows = slice(reuse.start, reuse.start + there)
        moved[rows] = reuse.offset
        reused[rows] = True
        exact[rows] = reuse.start == reuse.first == 0
    optional = reused & ~exact
    optional[-1] = False
    return BlendPlan(moved, reused, optional)
