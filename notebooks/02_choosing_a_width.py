# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Which width?
#
# The width is the number of layers in a slice. Narrow slices let a prefill start sooner and overlap more of the
# transfer; each slice costs a little extra. How narrow is narrow enough, and what does the answer depend on? Everything
# here is the model on the shipped profile of one H200.

# %%
from dataclasses import replace

from lamella.reference.slices import plan_slices
from lamella.sim.profiles import load_profile
from lamella.sim.regimes import burst_ttft_ns
from lamella.sim.serving import serve
from lamella.sim.strategies import CHUNK_MAJOR, Device, Regime, Strategy, parse_strategy
from lamella.sim.study import compute_study, plan_study

device = Device(load_profile())
WIDTHS = (1, 2, 4, 8, 16, 32)
FIRST = {width: parse_strategy(f"fifo/{width}/first") for width in WIDTHS}
ALONE = Regime(hit_tokens=15_152, new_tokens=768, concurrency=1)

# %% [markdown]
# ## What a narrow slice costs on the wire
#
# On this device a further slice adds a few microseconds to a transfer of tens of milliseconds. So width 1 costs next to
# nothing in wire time, and cost is not what decides.

# %%
whole_ns = device.transfer_ns(ALONE.hit_tokens)
for width in WIDTHS:
    load = device.load(ALONE.hit_tokens, FIRST[width])
    extra, slices = sum(load.slice_ns) - whole_ns, len(load.slice_ns)
    print(f"width {width:2}: {slices:2} slices, {extra / 1e3:6.1f} µs more than one ({extra / whole_ns:.2%})")
    assert slices == len(plan_slices(device.profile.num_layers, width))
assert sum(device.load(ALONE.hit_tokens, FIRST[1]).slice_ns) < 1.01 * whole_ns

# %% [markdown]
# ## What a wide slice costs in overlap
#
# One request alone can save at most `min(T, P) / (T + P)` of transfer and computing. A wide first slice must land
# before anything computes, and a wide last one before the last layers do, so each doubling of the width gives some of
# it back.

# %%
off_ns = burst_ttft_ns(device, ALONE, CHUNK_MAJOR)[0]
saved = {width: 1 - burst_ttft_ns(device, ALONE, FIRST[width])[0] / off_ns for width in WIDTHS}
for width, share in saved.items():
    print(f"width {width:2}: {share:6.1%} less time to first token")
ordered = [saved[width] for width in WIDTHS]
assert ordered == sorted(ordered, reverse=True), "wider never saves more"
assert saved[32] < 0.01, "one slice of all layers cannot overlap with itself"
assert saved[1] - saved[4] < 0.06 < saved[1] - saved[16], "four layers a slice give back little, sixteen much"

# %% [markdown]
# ## A schedule: narrow first, then wide
#
# Only the first slice decides when computing can start. `1,1,2,4` starts as early as width 1 and ends with slices of
# four layers.

# %%
schedule = parse_strategy("fifo/1,1,2,4/first")
slices = len(device.load(ALONE.hit_tokens, schedule).slice_ns)
with_schedule = 1 - burst_ttft_ns(device, ALONE, schedule)[0] / off_ns
print(
    f"1,1,2,4: {slices} slices, {with_schedule:.1%} less; width 1: 32 slices, {saved[1]:.1%}; width 4: {saved[4]:.1%}"
)
assert slices == 10
assert saved[4] - 0.005 <= with_schedule <= saved[1]

# %% [markdown]
# ## Does the regime change the answer?
#
# What width 8 gives back against width 1 depends on how transfer and computing compare: most where they are equal.

# %%
lost = {}
for new_tokens in (64, 256, 768, 2_048, 8_192):
    regime = Regime(ALONE.hit_tokens, new_tokens, 1)
    narrow, wide = (burst_ttft_ns(device, regime, FIRST[width])[0] for width in (1, 8))
    ratio = whole_ns / device.prefill_ns(regime.hit_tokens, new_tokens)
    lost[ratio] = wide / narrow - 1
    print(f"T/P {ratio:5.2f}: width 8 takes {lost[ratio]:+.1%} against width 1")
nearest = min(lost, key=lambda ratio: abs(ratio - 1))
assert max(lost.values()) <= lost[nearest] + 0.03, "near T = P a wide slice costs most"
assert all(share >= 0 for share in lost.values()), "and nowhere is it faster"

# %% [markdown]
# ## Under load
#
# With several users the engine's steps quantise what a width can do: a request that becomes ready a millisecond earlier
# starts with the same step. The study runs the same arrivals through every width and says how sure it is.

# %%
tried: list[Strategy] = [FIRST[width] for width in (1, 4, 8, 16)]
study = compute_study(plan_study(device, Regime(15_152, 768, 4, 50), (1, 4), tried, requests_per_user=6, repeats=3))
for users in study.concurrencies:
    print(f"{users} users: " + ", ".join(f"width {one.width} {study.change(users, one)}" for one in tried))
best = study.recommend()
print(f"recommended: width {best.strategy.width}, {best.change} against {best.off}")
assert best.strategy.layerwise
assert study.change(4, FIRST[16]).mean > study.change(4, FIRST[4]).mean + 0.05, "sixteen layers a slice is too wide"

# %% [markdown]
# So on a device whose slices are cheap, take width 1 or a schedule; four layers a slice are nearly as good. Where a
# slice is dear (`lamella calibrate` measures it), the same lines answer for that device: here a slice costs a hundred
# times as much, and narrow is no longer best.

# %%
dear = Device(replace(device.profile, wire=replace(device.profile.wire, slice_fixed_ns=700_000)))
taken = {width: serve(dear, ALONE, FIRST[width], 3, seed=0).mean_ttft_ns for width in WIDTHS}
print({width: f"{ns / 1e6:.1f} ms" for width, ns in taken.items()})
assert min(taken, key=lambda width: taken[width]) in (4, 8)
