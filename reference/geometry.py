"""The sizes of a kernel group's KV: the alphabet `[K, L, T, D]` that every other module spells with.

K = kv (2 for separate keys and values, 1 for MLA and packed layouts), L = layers, T = tokens of a chunk, D = hidden
elements of one token, one layer and one kv on this rank (heads * head_dim).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lamella.reference.whole import check_whole


class ObjectForm(enum.Enum):
    """How an object lies in host memory; the pool's creator picks one."""

    TOKEN = "token"
    """`[K, L, T, D]`, C-contiguous: portable between block sizes and layouts."""
    BLOCK = "block"
    """`[L, B, block bytes]`, the engine's own blocks byte for byte: no kernel to move it, not portable."""


def check_form(form: object) -> None:
    """The form is one of the two, not its name: a name would pass for the token form.

    Raises:
        TypeError: it is no `ObjectForm`.
    """
    if not isinstance(form, ObjectForm):
        raise TypeError(f"form must be ObjectForm.TOKEN or ObjectForm.BLOCK, got {form!r}")


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one kernel group: layers that share kv, heads, head size and element size.

    Args:
        num_layers: L, layers of this group on this pipeline stage.
        kv: K; 2 when keys and values are apart, 1 when a token has one run a layer (MLA, packed K and V).
        num_heads: KV heads on this rank; 1 for MLA.
        head_dim: elements of one head; for packed layouts 2 * head size, for MLA the latent width.
        element_bytes: 1, 2 or 4.
        chunk_tokens: T, tokens of one full object.

    Raises:
        TypeError: a size is no whole number.
        ValueError: a size is not positive, kv is not 1 or 2, or element_bytes is not 1, 2 or 4.
    """

    num_layers: int
    kv: int
    num_heads: int
    head_dim: int
    element_bytes: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "chunk_tokens"):
            check_whole(name, getattr(self, name), 1)
        for name in ("kv", "element_bytes"):
            check_whole(name, getattr(self, name), 0)
        if self.kv not in (1, 2):
            raise ValueError(f"kv must be 1 (MLA, packed) or 2 (keys and values apart), got {self.kv}")
        if self.element_bytes not in (1, 2, 4):
            raise ValueError(f"element_bytes must be 1, 2 or 4, got {self.element_bytes}")

    @property
    def hidden(self) -> int:
        """D, elements of one token, one layer, one kv."""
        return self.num_heads * self.head_dim

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token, one layer, one kv: the shortest run that is contiguous in every object."""
        return self.hidden * self.element_bytes

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer, all kv."""
        return self.kv * self.hidden_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.token_layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a full object."""
        return self.chunk_tokens * self.token_layer_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of a full object of this group; a partial last chunk keeps the full object's strides."""
        return self.num_layers * self.layer_bytes

    def num_chunks(self, num_tokens: int) -> int:
        """Chunks that hold the first `num_tokens` tokens, a partial last one included."""
        return -(-num_tokens // self.chunk_tokens)
