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
# # When to let a request run: whole, first layer, or just in time?
#
# A release rule says from which instant a request whose KV is still landing may be put into a batch. Too early, and the
# whole batch stands still waiting for its layers, those who only decode included. Too late, and the request waits for
# nothing. *Just in time* is the earliest release without a stall. This notebook shows what each rule costs, and whom.

# %%
from lamella.reference.ordering import Fifo
from lamella.reference.profile import Graphs
from lamella.reference.release import First, JustInTime, ReleasePolicy, ReleaseView, Whole
from lamella.reference.slices import plan_slices
from lamella.sim.profiles import load_profile
from lamella.sim.requests import Request
from lamella.sim.stations import plan_load
from lamella.sim.strategies import Device, Strategy
from lamella.sim.world import World

device = Device(load_profile())
LAYERS = device.profile.num_layers
RULES: dict[str, ReleasePolicy] = {"whole": Whole(), "first": First(), "just in time": JustInTime()}

# %% [markdown]
# ## The rule as a formula
#
# A step that starts at S reaches layer l no earlier than S plus the computing time of the layers before it. So it never
# stalls if it starts at `max over l (arrival of l - computing before l)`. Ten layers that land every 4 ms and compute
# for 1 ms each: the last one decides.

# %%
view = ReleaseView(now_ns=0, arrival_ns=tuple(4 * (layer + 1) for layer in range(10)), layer_compute_ns=(1,) * 10)
print({name: rule.release_ns(view) for name, rule in RULES.items()}, "ms")
assert JustInTime().release_ns(view) == 40 - 9
assert First().release_ns(view) == 4
assert Whole().release_ns(view) == 40

# %% [markdown]
# ## One request, eight that decode
#
# Eight requests generate tokens. A ninth comes with 65,536 cached tokens, whose transfer takes 155 ms, and 64 new ones,
# which are computed in a few milliseconds: T is far longer than P.


# %%
def run(release: ReleasePolicy, device: Device = device) -> tuple[float, float, float]:
    """(TTFT of the newcomer, stall that it caused, mean TPOT of the eight), in ms."""
    strategy = Strategy(1, Fifo(), release)
    world = World(device.compute(strategy), Fifo(), release, device.settings(), make_engine=device.engine(strategy))
    for _ in range(8):
        world.arrive_at(0, Request(0, 64, output_tokens=80))
    slices = plan_slices(LAYERS, 1)
    load = plan_load(slices, 65_536 * device.profile.token_bytes // LAYERS, device.profile.wire.h2d_bytes_per_s, 6_000)
    world.arrive_at(100_000_000, Request(65_536, 64, output_tokens=2, load=load, tag=1))
    records = world.run()
    (newcomer,) = [record for record in records if record.tag == 1]
    others = [record for record in records if record.tag == 0]
    tpot = sum(record.tpot_ns for record in others) / len(others)
    return newcomer.ttft_ns / 1e6, newcomer.caused_stall_ns / 1e6, tpot / 1e6


found = {name: run(rule) for name, rule in RULES.items()}
for name, (ttft, stall, tpot) in found.items():
    print(
        f"{name:13} newcomer's TTFT {ttft:6.1f} ms, it stalls everybody for {stall:6.1f} ms, "
        f"TPOT of the others {tpot:.2f} ms"
    )

assert found["first"][1] > 100, "released on its first layer, it stops eight others for most of its transfer"
assert found["just in time"][1] == found["whole"][1] == 0, "the other two never stall anybody"
assert found["first"][2] > 1.15 * found["just in time"][2], "and those who decode pay for it"
assert found["just in time"][0] <= found["whole"][0], "just in time is never later than whole"
assert found["just in time"][0] - found["first"][0] < 12, "what first gains over it is about a step"

# %% [markdown]
# Where nobody stalls, those who decode do not notice which rule it was: their steps replay full CUDA graphs in any
# case, and one that must wait for a load waits in front of its graph (`full_graphs: before`, the connector's default).
# With `never` they replay piecewise graphs under rules that let steps wait, and the profile has both kinds of steps.

# %%
piecewise = Device(device.profile, graphs=Graphs.PIECEWISE)
slower = {name: run(rule, piecewise)[2] for name, rule in RULES.items()}
print(", ".join(f"{name} {tpot:.2f} ms" for name, tpot in slower.items()))
assert found["just in time"][2] < 1.005 * found["whole"][2], "with full graphs nothing is paid for a wait that is not"
assert slower["whole"] == found["whole"][2], "under whole release nothing ever waits"
assert slower["just in time"] > 1.1 * found["just in time"][2]

# %% [markdown]
# ## Where the engine looks only once a step
#
# An engine sees a release at its next poll, so just in time by the clock can be a step late. `jit:Nms` takes a stall of
# up to N ms rather than that; `jit:step` weighs the stall against the step, and against how many would stand still.

# %%
for text, rule in (("jit", JustInTime()), ("jit:5ms", JustInTime(5_000_000)), ("jit:step", JustInTime(None))):
    ttft, stall, tpot = run(rule)
    print(f"{text:9} newcomer's TTFT {ttft:6.1f} ms, stall {stall:5.2f} ms, TPOT of the others {tpot:.2f}")
    assert str(rule) == text
    assert stall <= 5.01, "what is tolerated is a bound"

# %% [markdown]
# ## And alone?
#
# With nobody to hurt, the newcomer's own stall is only its own waiting: all early rules end within a step of each
# other, and whole release loses the overlap. So the rule matters for bystanders, and the order of slices for the loads
# themselves (`01_why_interleaving_loses.py`).


# %%
def alone(release: ReleasePolicy, new_tokens: int) -> float:
    strategy = Strategy(1, Fifo(), release)
    world = World(device.compute(strategy), Fifo(), release, device.settings(), make_engine=device.engine(strategy))
    load = device.load(15_152, strategy)
    world.arrive(Request(15_152, new_tokens, load=load))
    return world.run()[0].ttft_ns / 1e6


for new_tokens in (64, 768, 2_048):
    times = {name: alone(rule, new_tokens) for name, rule in RULES.items()}
    print(f"{new_tokens:5} new tokens: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in times.items()))
    assert times["just in time"] - times["first"] < 1.1, "at most a poll of the idle engine"
    assert times["first"] < times["whole"]
