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
# # Will it pay on my hardware?
#
# The shipped profile was measured on one H200 behind PCIe 5. On another machine two things differ: how fast bytes cross
# the link, and how fast the GPU computes. Whether layerwise transfer pays depends on how the two compare, T/P, and on
# how many requests are under way. This notebook asks for four machines, and says what each answer rests on.
#
# The same from the command line: `lamella sweep --prompt-tokens 16k --hit 90% --concurrency 8 --link pcie4`.

# %%
from lamella.reference.profile import Graphs
from lamella.sim.profiles import load_profile
from lamella.sim.serving import Slo
from lamella.sim.strategies import CHUNK_MAJOR, RECOMPUTE, Device, Regime, parse_strategy
from lamella.sim.study import answer_lines, compute_study, plan_study
from lamella.sim.what_if import derivations, with_compute, with_link

measured = load_profile()
MACHINES = {
    "H200, PCIe 5 (measured)": measured,
    "H200, PCIe 4": with_link(measured, "pcie4"),
    "a GPU half as fast, PCIe 4": with_compute(with_link(measured, "pcie4"), 0.5),
    "H200 behind a link of 400 GB/s": with_link(measured, "400GB/s"),
}
REGIME = Regime(hit_tokens=14_400, new_tokens=1_600, concurrency=8, output_tokens=50)
STRATEGIES = [parse_strategy(text) for text in ("fifo/1/first", "fifo/4/first", "fifo/1/jit", "round_robin/1/first")]

# %% [markdown]
# ## First: how do transfer and computing compare?
#
# The most that one request can gain alone is `min(T, P) / (T + P)`. Where either is small beside the other there is
# little to overlap, whatever one does.

# %%
ceilings = {}
for name, profile in MACHINES.items():
    device = Device(profile)
    transfer, prefill = device.transfer_ns(REGIME.hit_tokens), device.prefill_ns(REGIME.hit_tokens, REGIME.new_tokens)
    ceilings[name] = min(transfer, prefill) / (transfer + prefill)
    print(
        f"{name:31} T {transfer / 1e6:5.1f} ms, P {prefill / 1e6:5.1f} ms, at most {ceilings[name]:.0%} to gain alone"
    )
    for line in derivations(profile):
        print(f"{'':31} {line}")
assert derivations(measured) == [], "what was measured needs no excuse"
assert ceilings["H200, PCIe 4"] > ceilings["H200 behind a link of 400 GB/s"]

# %% [markdown]
# ## Then: with eight users
#
# Every strategy gets the same arrivals, three times. Off means the better of loading whole objects and recomputing.

# %%
answers = {}
for name, profile in MACHINES.items():
    plan = plan_study(Device(profile), REGIME, (1, 8), STRATEGIES, requests_per_user=5, repeats=3)
    study = compute_study(plan)
    answers[name] = study.recommend()
    print(f"{name}\n  " + "\n  ".join(answer_lines(study, Slo())) + "\n")

for name in ("H200, PCIe 5 (measured)", "H200, PCIe 4", "a GPU half as fast, PCIe 4"):
    assert answers[name].strategy.layerwise, name
    assert answers[name].change.certain_gain, name
assert answers["H200, PCIe 4"].change.mean < answers["H200, PCIe 5 (measured)"].change.mean, (
    "a slower link: more to hide"
)
gain_fast = answers["H200 behind a link of 400 GB/s"].change.mean
assert gain_fast > answers["H200, PCIe 5 (measured)"].change.mean, "a faster link: less to hide"

# %% [markdown]
# ## When to leave it off
#
# A short hit is not worth loading at all: computing it again takes no longer. And with `full_graphs: never` early
# release costs piecewise graphs, which make small decode steps slower.

# %%
short = Regime(hit_tokens=64, new_tokens=64, concurrency=1, output_tokens=50)
prices = {}
for graphs in Graphs:
    device = Device(measured, graphs=graphs)
    study = compute_study(plan_study(device, short, (1,), STRATEGIES, requests_per_user=4, repeats=2))
    print(f"{graphs.value} graphs: {answer_lines(study, Slo())[-1]}")
    assert not study.recommend().strategy.layerwise
    prices[graphs] = study.recommend().price.mean
assert prices[Graphs.FULL] < 0.01
assert prices[Graphs.PIECEWISE] > 0.05, "answers would end later for nothing"

# %% [markdown]
# ## Is loading worth it at all?
#
# The slower the link, the sooner recomputing wins. Where it does depends on the length of the hit.

# %%
for rate in (1, 2, 4, 8, 16):
    slow = Device(with_link(measured, f"{rate}GB/s"))
    study = compute_study(
        plan_study(slow, Regime(4_096, 256, 1, 16), (1,), STRATEGIES[:1], requests_per_user=2, repeats=1)
    )
    loaded, again = (study.mean(1, one) / 1e6 for one in (CHUNK_MAJOR, RECOMPUTE))
    print(f"{rate:2} GB/s: loading {loaded:6.1f} ms, recomputing {again:6.1f} ms")
    assert (loaded > again) == (rate <= 4), "below about 5 GB/s this hit is computed faster than loaded"

# %% [markdown]
# What this rests on: a model, one measured GPU, and factors where another was asked for. `lamella calibrate` measures
# your own; `lamella validate` holds the model against runs of the engine.
