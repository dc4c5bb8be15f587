"""A derived profile scales what it says, keeps the rest, and is named for what it is."""

import re
from dataclasses import replace

import pytest

from lamella.reference.profile import CopyMethod, DeviceProfile, Graphs, profile_from_mapping, profile_to_mapping
from lamella.sim.profiles import load_profile
from lamella.sim.strategies import Device
from lamella.sim.what_if import derivations, with_compute, with_link


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return load_profile()


@pytest.mark.parametrize(
    ("link", "factor"), [("pcie4", 0.5), ("PCIe3", 0.25), ("pcie6", 2), ("pcie4x8", 0.25), ("pcie5x4", 0.25)]
)
def test_a_link_scales_the_wire_by_its_signalling_rate(profile: DeviceProfile, link: str, factor: float) -> None:
    derived = with_link(profile, link)
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s"):
        assert getattr(derived.wire, name) == round(factor * getattr(profile.wire, name))
    assert derived.wire.slice_fixed_ns == profile.wire.slice_fixed_ns
    assert derived.prefill == profile.prefill
    assert Device(derived).transfer_ns(16_000) == pytest.approx(Device(profile).transfer_ns(16_000) / factor, rel=1e-3)


def test_a_rate_that_was_measured_is_taken_as_it_is(profile: DeviceProfile) -> None:
    derived = with_link(profile, "24.5 GB/s")
    assert derived.wire.h2d_bytes_per_s == 24_500_000_000
    assert derived.name == "h200-llama-3.1-8b+24.5GBps"


def test_the_measured_link_changes_nothing(profile: DeviceProfile) -> None:
    assert with_link(profile, "pcie5") is profile
    assert with_compute(profile, 1) is profile
    assert derivations(profile) == []


def test_copies_are_never_said_to_be_faster_than_they_were(profile: DeviceProfile) -> None:
    for link, factor in (("pcie4", 0.5), ("pcie6", 1)):
        for method in CopyMethod:
            before, after = (one.curve(method).bytes_per_s for one in (profile, with_link(profile, link)))
            assert after == tuple(round(factor * rate) for rate in before)


def test_a_faster_gpu_divides_every_step(profile: DeviceProfile) -> None:
    derived = with_compute(profile, 2)
    assert derived.wire == profile.wire
    for cached, new in ((0, 16), (15_152, 768), (65_536, 8_192)):
        assert derived.prefill.alone_ns(cached, new) == pytest.approx(profile.prefill.alone_ns(cached, new) / 2, abs=1)
    for graphs in Graphs:
        before, after = profile.decode[graphs].step_ns, derived.decode[graphs].step_ns
        assert [[ns is None for ns in row] for row in after] == [[ns is None for ns in row] for row in before]
        assert after[0][0] is not None
        assert before[0][0] is not None
        assert after[0][0] == round(before[0][0] / 2)


def test_what_is_derived_says_so_in_its_name_its_device_and_its_sources(profile: DeviceProfile) -> None:
    derived = with_compute(with_link(profile, "pcie4"), 0.5)
    assert derived.name == "h200-llama-3.1-8b+pcie4+compute-0.5x"
    assert derived.device == "one NVIDIA H200, PCIe 5 x16 (derived: PCIe 4 x16) (derived: computing 0.5 × as fast)"
    assert [source.measured for source in derived.sources[-2:]] == ["not measured"] * 2
    first, second = derivations(derived)
    assert "step times stay the measured GPU's" in first
    assert "every step time divided by 0.5" in second
    assert "room for KV stays the measured GPU's" in second
    assert profile_from_mapping(profile_to_mapping(derived)) == derived


def test_step_times_that_calibrate_carried_over_are_not_taken_for_measured(profile: DeviceProfile) -> None:
    sources = [replace(one, covers=f"engine, decode from {profile.name}: {one.covers}") for one in profile.sources]
    calibrated = replace(profile, name="mine", device="another GPU", sources=(profile.sources[0], *sources))
    said = "not measured, engine, decode are those of h200-llama-3.1-8b, carried over"
    assert derivations(calibrated) == [said]
    assert derivations(with_compute(calibrated, 0.5))[0] == said


@pytest.mark.parametrize("link", ["pcie9", "nvlink", "pcie4x3", "24", "0GB/s", "99999GB/s", ""])
def test_an_unknown_link_is_refused(profile: DeviceProfile, link: str) -> None:
    with pytest.raises(ValueError, match="a link (is one of pcie3|carries between)"):
        with_link(profile, link)


@pytest.mark.parametrize("link", ["24Gb/s", "24gb/s", "24 Gb/s", "24Gbit/s", "24Gbps", "200 gbit/s"])
def test_a_rate_in_bits_is_not_taken_for_one_in_bytes(profile: DeviceProfile, link: str) -> None:
    bytes_per_s = int(re.split("[gG]", link)[0]) / 8
    with pytest.raises(ValueError, match=re.escape(f"{link!r} is in bits: say {bytes_per_s:g}GB/s if that is meant")):
        with_link(profile, link)


def test_a_profile_that_does_not_say_its_link_needs_a_rate(profile: DeviceProfile) -> None:
    from dataclasses import replace

    unknown = replace(profile, device="a GPU")
    with pytest.raises(ValueError, match="does not say on which link it was measured"):
        with_link(unknown, "pcie4")
    assert with_link(unknown, "24GB/s").wire.h2d_bytes_per_s == 24 * 10**9


@pytest.mark.parametrize("speed", [0, -1, 101, float("nan")])
def test_an_impossible_speed_is_refused(profile: DeviceProfile, speed: float) -> None:
    with pytest.raises(ValueError, match="compute speed must be between 0.01 and 100"):
        with_compute(profile, speed)
