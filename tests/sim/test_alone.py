"""What one request alone can gain is never more than is said, whatever its load passes on its way (a poll aside)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.sim.alone import alone
from lamella.sim.hardware import FULL_SPEED, Hardware, Ratio, Tier
from lamella.sim.profiles import load_profile
from lamella.sim.serving import serve
from lamella.sim.strategies import CHUNK_MAJOR, Device, Regime, parse_strategy

DEVICE, FIFO_FIRST = Device(load_profile()), parse_strategy("fifo/1/first")
TIERS = st.one_of(
    st.just(()),
    st.builds(lambda rate, wait: (Tier("t", rate, wait),), st.integers(10**9, 10**11), st.integers(0, 10**7)),
)
RANKS = st.lists(st.sampled_from([FULL_SPEED, Ratio(1, 2), Ratio(4, 5)]), min_size=1, max_size=3)


def test_behind_a_tier_the_transfer_is_its_reading_and_then_the_link() -> None:
    regime, way = (
        Regime(15_152, 768, 1),
        Hardware(ranks=(FULL_SPEED, Ratio(1, 2)), tiers=(Tier("t", 10**9, 20_000_000),)),
    )
    plain, behind = alone(DEVICE, regime), alone(DEVICE, regime, way)
    assert plain.transfer_ns == plain.stages_ns == DEVICE.transfer_ns(15_152)
    assert plain.ceiling == pytest.approx(min(plain[0], plain[2]) / (plain[0] + plain[2]))
    assert behind.tier_ns == 15_152 * 131_072 + 20_000_000
    assert behind.transfer_ns == behind.tier_ns + 2 * plain.transfer_ns
    assert behind.ratio == behind.transfer_ns / plain.prefill_ns


@given(TIERS, RANKS, st.integers(1_024, 32_768), st.integers(16, 4_096))
def test_overlap_saves_no_more_than_the_ceiling_and_the_whole_load_takes_what_is_said(
    tiers: tuple[Tier, ...], ranks: list[Ratio], hit: int, new: int
) -> None:
    regime, way = Regime(hit, new, 1), Hardware(ranks=tuple(ranks), tiers=tiers)
    one = alone(DEVICE, regime, way)
    whole, early = (serve(DEVICE, regime, how, 1, 0, hardware=way) for how in (CHUNK_MAJOR, FIFO_FIRST))
    assert whole.first_layer_ns == pytest.approx(one.transfer_ns, abs=len(ranks) + 2)
    saved, poll_ns = whole.mean_ttft_ns - early.mean_ttft_ns, DEVICE.profile.engine.idle_poll_ns
    assert saved <= one.ceiling * (one.transfer_ns + one.prefill_ns) + poll_ns + 5
