"""Where bytes lie: the engine's paged cache by strides, and a host object by form.

An engine layout is five numbers and a table. Whatever the axis order, K and V together or apart, a tensor a layer or
one for all, an address is

    bases[layer][kv] + block * block_stride + token * token_stride + head * head_stride + dim * dim_stride

so the same function serves every layout and every strided view of it, and nobody asks a framework for a contiguous
copy. The CUDA and C++ code computes the same sum (`cuda_ext/csrc/include/lamella/address.cuh`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lamella.reference.geometry import KVGeometry, ObjectForm, check_form
from lamella.reference.whole import check_whole

LAYOUTS: Mapping[str, str] = {
    "kv-nb-bs-h-d": "KNTHD",
    "nb-kv-bs-h-d": "NKTHD",
    "kv-nb-h-bs-d": "KNHTD",
    "nb-kv-h-bs-d": "NKHTD",
    "mla": "NTD",
    "packed-nhd": "NTHD",
    "packed-hnd": "NHTD",
    "separate-nhd": "NTHD",
    "separate-hnd": "NHTD",
    "cross-layer": "NLKTHD",
}
"""Axis order of each named layout, outermost first: K kv, N block, T token in block, H head, D dim, L layer.

`packed-*` has kv = 1 and head_dim = 2 * head size; `separate-*` has a tensor for K and one for V.
"""

_FARTHEST = (1 << 63) - 1  # that a stride of the native code holds

_AXIS_NAMES: Mapping[str, str] = {"K": "kv", "N": "block", "T": "token", "H": "head", "D": "dim", "L": "layer"}

GROUP_ALIGNMENT_BYTES = 256
"""Each kernel group's array starts at a multiple of this inside an object, so that wide loads stay aligned."""


class TensorView(NamedTuple):
    """A strided tensor in some memory, without its framework.

    `address` is the byte address (or offset) of element `[0, ..., 0]`; `strides` are in bytes and may be negative.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One kernel group's paged cache as byte addresses.

    Args:
        bases: `bases[layer][kv]`, address of block 0, token 0, head 0, dim 0.
        block_stride, token_stride, head_stride, dim_stride: bytes between neighbours; any sign.
        num_blocks, block_tokens, num_heads, head_dim, element_bytes: sizes.

    Raises:
        TypeError: a size or stride is no whole number.
        ValueError: a size is not positive, layers differ in their kv, keys and values begin at one address, or two
            elements of a block share a byte.
    """

    bases: tuple[tuple[int, ...], ...]
    block_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int
    num_blocks: int
    block_tokens: int
    num_heads: int
    head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "num_heads", "head_dim", "element_bytes"):
            check_whole(name, getattr(self, name), 1)
        for name in ("block_stride", "token_stride", "head_stride", "dim_stride"):
            check_whole(name, getattr(self, name), -_FARTHEST, _FARTHEST)
        if not self.bases or len({len(layer) for layer in self.bases}) != 1 or len(self.bases[0]) not in (1, 2):
            raise ValueError(f"bases must hold 1 or 2 addresses for each layer, got {[len(b) for b in self.bases]}")
        if any(len(set(layer)) != len(layer) for layer in self.bases):
            raise ValueError("keys and values of a layer begin at one address; pass both tensors, or kv 1 for one run")
        _refuse_aliases(
            self.element_bytes,
            [
                (self.dim_stride, self.head_dim, "dim"),
                (self.head_stride, self.num_heads, "head"),
                (self.token_stride, self.block_tokens, "token"),
                (self.block_stride, self.num_blocks, "block"),
            ],
        )

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.bases)

    @property
    def kv(self) -> int:
        """K, 1 or 2."""
        return len(self.bases[0])

    def address(self, layer: int, kv: int, block: int, token: int, head: int, dim: int) -> int:
        """Byte address of one element; the meaning of `engine_address` in the shared C++ header."""
        return (
            self.bases[layer][kv]
            + block * self.block_stride
            + token * self.token_stride
            + head * self.head_stride
            + dim * self.dim_stride
        )

    def inner_order(self) -> str | None:
        """Order of a block's own axes, `"THD"` or `"HTD"`, if its bytes are dense for each kv; otherwise None.

        Only a dense block can be an object's block byte for byte (`ObjectForm.BLOCK`).
        """
        for order in ("THD", "HTD"):
            expected = self.element_bytes
            for axis in reversed(order):
                size, stride = {
                    "T": (self.block_tokens, self.token_stride),
                    "H": (self.num_heads, self.head_stride),
                    "D": (self.head_dim, self.dim_stride),
                }[axis]
                if size > 1 and stride != expected:
                    break
                expected *= size
            else:
                return order
        return None

    def check_matches(self, geometry: KVGeometry) -> None:
        """Raises ValueError naming the first size in which this cache and `geometry` differ."""
        for name in ("num_layers", "kv", "num_heads", "head_dim", "element_bytes"):
            if getattr(self, name) != getattr(geometry, name):
                raise ValueError(
                    f"the engine's cache has {name} {getattr(self, name)}, the geometry {getattr(geometry, name)}: "
                    "describe the cache with the axes and geometry of this kernel group"
                )


def _refuse_aliases(element_bytes: int, axes: Sequence[tuple[int, int, str]]) -> None:
    """Every axis (stride, size, name) steps over what the axes of smaller strides cover.

    Raises:
        ValueError: one does not, so that elements would share bytes.
    """
    covered = element_bytes
    for stride, size, name in sorted((abs(stride), size, name) for stride, size, name in axes if size > 1):
        if stride < covered:
            raise ValueError(
                f"{name}_stride {stride} is smaller than the {covered} bytes it must step over: "
                "elements would share bytes; pass the tensor's own strides, not an expanded view"
            )
        covered = stride * (size - 1) + covered


def engine_layout(axes: str, tensors: Sequence[TensorView | tuple[TensorView, TensorView]]) -> EngineLayout:
    """Describes a paged cache from its tensors.

    Args:
        axes: order of the tensors' axes, letters as in `LAYOUTS`; `H` may be missing (one head), `K` may be missing
            (one run a token, or K and V in tensors of their own), `L` means one tensor for all layers.
        tensors: one entry for each layer (for an `L` layout exactly one entry); an entry is a tensor, or a pair
            (K tensor, V tensor) for layouts that keep them apart. All share shape and strides.

    Raises:
        ValueError: unknown or missing letters, wrong rank, other than 1 or 2 of keys and values, tensors that differ in
            shape or strides, strides by which elements share bytes, and as `EngineLayout`.

    >>> view = TensorView(address=0, shape=(8, 16, 4, 64), strides=(8192, 512, 128, 2), element_bytes=2)
    >>> layout = engine_layout("NTHD", [(view, view._replace(address=65536))])
    >>> layout.kv, layout.address(layer=0, kv=1, block=1, token=2, head=3, dim=4)
    (2, 75144)
    """
    if sorted(axes) != sorted(set(axes)) or not {"N", "T", "D"} <= set(axes) <= set("KNTHDL"):
        raise ValueError(f"axes must name N, T, D and at most K, H, L once each, got {axes!r}; known: {dict(LAYOUTS)}")
    parts = [(entry,) if isinstance(entry, TensorView) else entry for entry in tensors]
    if not parts:
        raise ValueError("a paged cache needs at least one tensor, got none")
    first = parts[0][0]
    for entry in parts:
        for view in entry:
            if len(view.shape) != len(axes):
                raise ValueError(f"axes {axes!r} need a tensor of {len(axes)} dimensions, got shape {view.shape}")
            if view[1:] != first[1:]:
                raise ValueError(f"all tensors of a kernel group share shape and strides, got {view} beside {first}")
    if ("K" in axes or "L" in axes) and any(len(entry) != 1 for entry in parts):
        raise ValueError(f"axes {axes!r} hold K and V or all layers in one tensor, got separate K and V tensors")
    if "L" in axes and len(parts) != 1:
        raise ValueError(f"axes {axes!r} hold every layer in one tensor, got {len(parts)} tensors")
    size = dict(zip(axes, first.shape, strict=True))
    if size.get("K", 1) not in (1, 2):
        raise ValueError(
            f"axes {axes!r} take dimension {axes.index('K')} for keys and values, of which there are 1 or 2, and shape "
            f"{first.shape} has {size['K']} there: name the axes in the tensors' order"
        )
    stride = dict(zip(axes, first.strides, strict=True))
    _refuse_aliases(first.element_bytes, [(stride[axis], size[axis], _AXIS_NAMES[axis]) for axis in axes])

    def bases_of(entry: tuple[TensorView, ...], layer: int) -> tuple[int, ...]:
        start = layer * stride.get("L", 0)
        if "K" in axes:
            return tuple(entry[0].address + start + kv * stride["K"] for kv in range(size["K"]))
        return tuple(view.address + start for view in entry)

    layers = [(parts[0], layer) for layer in range(size["L"])] if "L" in axes else [(entry, 0) for entry in parts]
    return EngineLayout(
        bases=tuple(bases_of(entry, layer) for entry, layer in layers),
        block_stride=stride["N"],
        token_stride=stride["T"],
        head_stride=stride.get("H", 0),
        dim_stride=stride["D"],
        num_blocks=size["N"],
        block_tokens=size["T"],
        num_heads=size.get("H", 1),
        head_dim=size["D"],
        element_bytes=first.element_bytes,
    )


class ByteRange(NamedTuple):
    """`num_bytes` bytes from `offset` of an object."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Layers of one shape.

    Args:
        geometry: their sizes.
        layers: the stage's layer index of each layer of the group, ascending; another group may hold a cache for the
            same layer (an indexer beside its latent cache).
        block_tokens: tokens of one engine block of this group; only the block form's bytes depend on it.
    """

    geometry: KVGeometry
    layers: tuple[int, ...]
    block_tokens: int

    def __post_init__(self) -> None:
        if len(self.layers) != self.geometry.num_layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers must be {self.geometry.num_layers} ascending layer indices, one a layer, got {self.layers}"
            )
        check_whole("block_tokens", self.block_tokens, 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one engine block in one layer, all kv."""
        return self.block_tokens * self.geometry.token_layer_bytes

    def span(self, first_layer: int, num_layers: int) -> tuple[int, int]:
        """(first, count) of this group's own layers among the stage's `num_layers` layers from `first_layer` on."""
        inside = [i for i, layer in enumerate(self.layers) if first_layer <= layer < first_layer + num_layers]
        return (inside[0], len(inside)) if inside else (0, 0)


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """One object in host memory: its kernel groups' arrays one after another, each `[K, L, T, D]` or `[L, B, bytes]`.

    Args:
        groups: at least one; all share chunk_tokens. Together they hold every layer `0 .. num_layers-1` of the stage.
        form: token or block.

    Raises:
        TypeError: a form that is only named.
        ValueError: no group, differing chunk_tokens, a layer that no group holds, or (block form) chunk_tokens that is
            not a multiple of a group's block_tokens.
    """

    groups: tuple[KernelGroup, ...]
    form: ObjectForm = ObjectForm.TOKEN

    def __post_init__(self) -> None:
        check_form(self.form)
        if not self.groups:
            raise ValueError("an object needs at least one kernel group, got none")
        chunk_sizes = {group.geometry.chunk_tokens for group in self.groups}
        if len(chunk_sizes) != 1:
            raise ValueError(f"all kernel groups of an object share chunk_tokens, got {sorted(chunk_sizes)}")
        held = {layer for group in self.groups for layer in group.layers}
        if held != set(range(len(held))):
            raise ValueError(f"the groups must hold every layer from 0 on, got {sorted(held)}")
        if self.form is ObjectForm.BLOCK:
            for group in self.groups:
                if self.chunk_tokens % group.block_tokens:
                    raise ValueError(
                        f"in block form chunk_tokens ({self.chunk_tokens}) must be a multiple of block_tokens "
                        f"({group.block_tokens}); choose another chunk or the token form"
                    )

    @classmethod
    def single(cls, geometry: KVGeometry, block_tokens: int, form: ObjectForm = ObjectForm.TOKEN) -> ObjectLayout:
        """The usual object: one kernel group that holds every layer."""
        return cls((KernelGroup(geometry, tuple(range(geometry.num_layers)), block_tokens),), form)

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return 1 + max(group.layers[-1] for group in self.groups)

    @property
    def chunk_tokens(self) -> int:
        """T, shared by all groups."""
        return self.groups[0].geometry.chunk_tokens

    def group_offset(self, group: int) -> int:
        """Byte offset of a group's array in the object."""
        offset = 0
        for earlier in self.groups[:group]:
            padded = -(-earlier.geometry.object_bytes // GROUP_ALIGNMENT_BYTES)
            offset += padded * GROUP_ALIGNMENT_BYTES
        return offset

    @property
    def object_bytes(self) -> int:
        """Bytes of one object, all groups."""
        return self.group_offset(len(self.groups) - 1) + self.groups[-1].geometry.object_bytes

    def ranges(
        self, group: int, first_layer: int, num_layers: int, first_token: int, num_tokens: int
    ) -> tuple[ByteRange, ...]:
        """The object's bytes for some of a group's layers and some of the chunk's tokens, in the staging image's order.

        Token form: K ranges when the tokens are the whole chunk, K * num_layers otherwise. Block form: one range when
        the blocks are all of the chunk's, num_layers otherwise; tokens must then be whole blocks.

        Raises:
            ValueError: layers or tokens outside the object, or (block form) tokens that cut a block.
        """
        geometry, base = self.groups[group].geometry, self.group_offset(group)
        if not (0 <= first_layer and 1 <= num_layers and first_layer + num_layers <= geometry.num_layers):
            raise ValueError(
                f"layers {first_layer} .. {first_layer + num_layers - 1} are outside 0 .. {geometry.num_layers - 1}"
            )
        if not (0 <= first_token and 1 <= num_tokens and first_token + num_tokens <= geometry.chunk_tokens):
            raise ValueError(
                f"tokens {first_token} .. {first_token + num_tokens - 1} are outside 0 .. {geometry.chunk_tokens - 1}"
            )
        if self.form is ObjectForm.BLOCK:
            block_tokens = self.groups[group].block_tokens
            if first_token % block_tokens or num_tokens % block_tokens:
                raise ValueError(
                    f"in block form tokens move by whole blocks of {block_tokens}, got {num_tokens} from {first_token}"
                )
            runs, row, start = 1, geometry.layer_bytes, first_token * geometry.token_layer_bytes
            length = num_tokens * geometry.token_layer_bytes
        else:
            runs, row = geometry.kv, geometry.chunk_tokens * geometry.hidden_bytes
            start, length = first_token * geometry.hidden_bytes, num_tokens * geometry.hidden_bytes
        found: list[ByteRange] = []
        for run in range(runs):
            plane = base + run * geometry.num_layers * row
            if length == row:
                found.append(ByteRange(plane + first_layer * row, num_layers * row))
            else:
                found += (ByteRange(plane + (first_layer + layer) * row + start, length) for layer in range(num_layers))
        return tuple(found)
