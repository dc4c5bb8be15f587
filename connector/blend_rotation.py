"""Keys at new positions: what rotary embeddings turned by the old position is turned on by the difference.

A rotation by p and then by d is one by p + d, so cached keys need no unrotated copy, and values need nothing. Only the
frequencies must be those the keys were made with, whatever scaling they come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

try:
    import torch
except ImportError as missing:
    raise ImportError("blending needs torch: pip install 'lamella[torch]'") from missing


class Turns(NamedTuple):
    """Cosine and sine of what each row turns by, float32 `[rows, 1, pairs]`."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position embedding as a model uses it.

    Args:
        frequencies: radians a position, one for each pair of elements that turns; elements behind the pairs do not.
            Fixed scaling (linear, Llama 3, YaRN) is in them; frequencies that depend on the sequence's length (dynamic
            NTK) are none.
        interleaved: pairs are neighbours, (0, 1), (2, 3), ...; otherwise element i turns with i + number of pairs.

    Raises:
        ValueError: no frequency, or one that is not finite.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.frequencies or not all(map(math.isfinite, self.frequencies)):
            raise ValueError(f"frequencies must be finite numbers, one a pair of elements, got {self.frequencies}")

    @classmethod
    def from_base(cls, base: float, rotary_dim: int, *, interleaved: bool = False) -> Rotation:
        """The usual frequencies, `base ** (-2 i / rotary_dim)`.

        Raises:
            ValueError: a base that is not positive, or an odd or empty rotary_dim.
        """
        if base <= 0 or rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"base must be positive and rotary_dim even, got {base} and {rotary_dim}")
        return cls(tuple(base ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)), interleaved)

    def turns(self, positions: torch.Tensor) -> Turns:
        """What turns a row by so many positions, `[rows]` of whole numbers, which may be negative."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)  # [pairs]
        angles = positions.to(torch.float64)[:, None, None] * frequencies  # [rows, 1, pairs]
        return Turns(angles.cos().float(), angles.sin().float())

    def turn(self, keys: torch.Tensor, turns: Turns) -> None:
        """The keys `[rows, H, D]`, turned in place; reckoned in float32, kept in their own type.

        Raises:
            ValueError: heads too small for the pairs.
        """
        pairs = len(self.frequencies)
        if keys.shape[-1] < 2 * pairs:
            raise ValueError(f"{pairs} pairs need heads of at least {2 * pairs} elements, got {keys.shape[-1]}")
        if self.interleaved:
            first, second = keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]  # [rows, H, pairs] each
        else:
            first, second = keys[..., :pairs], keys[..., pairs : 2 * pairs]
        x, y = first.float(), second.float()  # of float32 keys these are the keys themselves
        turned = x * turns.cos - y * turns.sin
        second.copy_(y * turns.cos + x * turns.sin)
        first.copy_(turned)
