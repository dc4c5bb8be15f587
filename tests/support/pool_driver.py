"""Pools of small objects, and keys by number."""

from lamella.cuda_ext.pool import HostPool
from lamella.reference.geometry import KVGeometry
from lamella.reference.keys import ChunkKey
from lamella.reference.layout import ObjectLayout

LAYOUT = ObjectLayout.single(KVGeometry(2, 2, 2, 4, 2, chunk_tokens=16), block_tokens=4)


def key_of(number: int) -> ChunkKey:
    return ChunkKey(b"space", number.to_bytes(4, "little"), 16)


def keys(*numbers: int) -> list[ChunkKey]:
    return [key_of(number) for number in numbers]


def fill(pool: HostPool, *numbers: int) -> tuple[int, ...]:
    reservation = pool.reserve(keys(*numbers))
    assert reservation is not None
    reservation.commit()
    return reservation.slots
