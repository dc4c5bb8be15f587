"""What a metered tier counts."""

import itertools
from pathlib import Path

import pytest

from cache_driver import MemoryTier
from lamella.connector.storage.file_tier import FileTier
from lamella.connector.storage.metrics import MeteredTier, TierCounts, prometheus_text
from lamella.connector.storage.tier import DamagedObjectError, TierError
from lamella.reference.layout import ByteRange
from tier_objects import RUNS, SIZE, WHOLE, content, key, put, read


def test_calls_bytes_and_times_are_counted_by_what_came_of_them() -> None:
    ticks = itertools.count(0, 10)
    memory = MemoryTier(SIZE)
    tier = MeteredTier(memory, lambda: next(ticks))
    put(tier, 1)
    assert tier.exists([key(1), key(2)]) == (True, False)
    assert read(tier, 1, [ByteRange(0, 8)]) == content(1)[:8]
    into = [[memoryview(bytearray(SIZE))] for _ in range(2)]
    assert tier.get_leading([key(1), key(2)], WHOLE, into).num_objects == 1
    assert tier.counts() == TierCounts(
        lookups=2, found=1, reads=2, read_bytes=8 + SIZE, read_ns=20, lost=1, puts=1, put_bytes=SIZE, put_ns=10
    )
    memory.down = True
    with pytest.raises(TierError):
        tier.exists([key(1)])
    with pytest.raises(TierError):
        read(tier, 1)
    assert tier.counts().failures == 2


def test_damage_is_counted_apart_from_failures(tmp_path: Path) -> None:
    files = FileTier(tmp_path / "kv", SIZE, RUNS)
    tier = MeteredTier(files)
    put(tier, 1)
    path = files.path_of(key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedObjectError):
        read(tier, 1)
    assert (tier.counts().damaged, tier.counts().failures, tier.counts().reads) == (1, 0, 0)


def test_a_scraper_reads_every_count_of_every_tier_with_its_name_escaped() -> None:
    text = prometheus_text({'file:/a"b': TierCounts(reads=3), "redis:host:1/0": TierCounts(failures=2)})
    assert 'lamella_tier_reads_total{tier="file:/a\\"b"} 3' in text
    assert 'lamella_tier_failures_total{tier="redis:host:1/0"} 2' in text
    assert text.count("# TYPE") == len(TierCounts.__dataclass_fields__)
