"""A measured profile as it would be on another link or another GPU: derived, and said to be derived.

Nothing here was measured. A derived profile says so in its name and its sources, and every result carries both. The
step times stay those of the measured GPU unless a factor for them is given.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from lamella.reference.profile import DeviceProfile, Source, Wire
from lamella.reference.tables import DecodeTable, PrefillTable

PCIE_RATE: Final = {"pcie3": 8, "pcie4": 16, "pcie5": 32, "pcie6": 64}
"""GT/s a lane. Source: the PCI Express base specifications 3.0 to 6.0."""
MEASURED_LINK: Final = re.compile(r"PCIe (\d) x(\d+)")
RATE: Final = re.compile(r"(\d+(?:\.\d+)?) ?[Gg]B/[Ss]", flags=re.ASCII)
RATE_IN_BITS: Final = re.compile(r"(\d+(?:\.\d+)?) ?[Gg](?:b|bit|bits)(?:/s|ps)", flags=re.ASCII)
CARRIED: Final = re.compile(r"([a-z, ]+) from (\S+): ")
"""As `lamella calibrate` marks what it takes from its base profile."""
LEAST_GB_PER_S, LEAST_TIER_GB_PER_S, MOST_GB_PER_S = 0.1, 0.01, 10_000


def parse_rate(text: str, what: str, least_gb_per_s: float) -> int | None:
    """Bytes a second of a rate such as `24.5GB/s`; None for any other text.

    Raises:
        ValueError: a rate in bits; slower than the least, or faster than anything.

    >>> parse_rate("24.5GB/s", "a link", 0.1), parse_rate("pcie4", "a link", 0.1)
    (24500000000, None)
    """
    in_bits = RATE_IN_BITS.fullmatch(text)
    if in_bits:
        gb_per_s = float(in_bits[1]) / 8
        raise ValueError(f"{text!r} is in bits: say {gb_per_s:g}GB/s if that is meant, {what}'s rate is in bytes")
    found = RATE.fullmatch(text)
    if not found:
        return None
    gb_per_s = float(found[1])
    if not least_gb_per_s <= gb_per_s <= MOST_GB_PER_S:
        raise ValueError(f"{what} carries between {least_gb_per_s:g} and {MOST_GB_PER_S:,} GB/s, got {text!r}")
    return round(gb_per_s * 1e9)


def with_link(profile: DeviceProfile, link: str) -> DeviceProfile:
    """The profile behind another link.

    Args:
        link: `pcie3` .. `pcie6`, perhaps with a width (`pcie4x8`): the measured rates, scaled by the ratio of the
            links' signalling rates; or a rate you measured (`24.5GB/s`), to the device, the others in proportion.

    Raises:
        ValueError: no such link, or a profile that does not say what link it was measured on.

    >>> from lamella.sim.profiles import load_profile
    >>> with_link(load_profile(), "pcie4").wire.h2d_bytes_per_s
    27720000000
    """
    text = link.strip()
    if (rate := parse_rate(text, "a link", LEAST_GB_PER_S)) is not None:
        name = f"{rate / 1e9:g} GB/s to the device"
        how = f"{name}, as given"
        mark = f"{rate / 1e9:g}GBps"
        factor = rate / profile.wire.h2d_bytes_per_s
    else:
        mark = text.lower()
        asked = re.fullmatch(r"(pcie\d)(?:x(1|2|4|8|16))?", mark)
        if not asked or asked[1] not in PCIE_RATE:
            raise ValueError(
                f"a link is one of {', '.join(PCIE_RATE)}, such as pcie4 or pcie4x8, or 24GB/s; got {link!r}"
            )
        measured = MEASURED_LINK.search(profile.device)
        if not measured or f"pcie{measured[1]}" not in PCIE_RATE:
            raise ValueError(
                f"the profile {profile.name} does not say on which link it was measured ({profile.device}); "
                "give the rate instead, such as 24GB/s"
            )
        lanes = int(asked[2] or 16)
        factor = PCIE_RATE[asked[1]] * lanes / (PCIE_RATE[f"pcie{measured[1]}"] * int(measured[2]))
        if factor == 1:
            return profile
        name = f"{asked[1].replace('pcie', 'PCIe ')} x{lanes}"
        how = f"{name} by signalling rate, {factor:g} × the measured link"
    wire = profile.wire
    h2d, d2h, both = (
        round(rate * factor) for rate in (wire.h2d_bytes_per_s, wire.d2h_bytes_per_s, wire.both_bytes_per_s)
    )
    copies = tuple(
        replace(curve, bytes_per_s=tuple(max(1, round(min(rate, rate * factor))) for rate in curve.bytes_per_s))
        for curve in profile.copies
    )
    return replace(
        _derived(
            profile,
            name,
            f"link: {how}; step times stay the measured GPU's",
            mark,
            "wire rates, copies",
        ),
        wire=Wire(h2d, d2h, both, wire.slice_fixed_ns),
        copies=copies,
    )


def with_compute(profile: DeviceProfile, speed: float) -> DeviceProfile:
    """The profile of a GPU that computes `speed` times as fast as the measured one, in every step.

    Raises:
        ValueError: a speed outside 0.01 .. 100.
    """
    if not 0.01 <= speed <= 100:
        raise ValueError(f"compute speed must be between 0.01 and 100 times the measured GPU's, got {speed:g}")
    if speed == 1:
        return profile
    prefill = profile.prefill
    note = (
        f"compute: every step time divided by {speed:g}, decoding's too, which a GPU's memory rate bounds; room for KV "
        "stays the measured GPU's"
    )
    step_ns = tuple(tuple(round(ns / speed) for ns in row) for row in prefill.step_ns)
    return replace(
        _derived(profile, f"computing {speed:g} × as fast", note, f"compute-{speed:g}x", "prefill, decode"),
        prefill=PrefillTable(prefill.cached_tokens, prefill.new_tokens, step_ns),
        decode={graphs: _divided(table, speed) for graphs, table in profile.decode.items()},
    )


def _divided(table: DecodeTable, speed: float) -> DecodeTable:
    step_ns = tuple(tuple(None if ns is None else round(ns / speed) for ns in row) for row in table.step_ns)
    return DecodeTable(table.batch, table.context_tokens, step_ns)


def _derived(profile: DeviceProfile, what: str, note: str, suffix: str, covers: str) -> DeviceProfile:
    source = Source(covers, "not measured", "lamella.sim.what_if", f"derived from {profile.name}", note)
    return replace(
        profile,
        name=f"{profile.name}+{suffix}",
        device=f"{profile.device} (derived: {what})",
        sources=(*profile.sources, source),
    )


def derivations(profile: DeviceProfile) -> list[str]:
    """What of the profile was not measured on its device, a sentence each; empty for a profile as measured."""
    found = (CARRIED.match(source.covers) for source in profile.sources)
    carried = dict.fromkeys(f"{one[1]} are those of {one[2]}, carried over" for one in found if one is not None)
    derived = (f"derived ({source.note})" for source in profile.sources if source.measured == "not measured")
    return [f"not measured, {one}" for one in (*carried, *derived)]
