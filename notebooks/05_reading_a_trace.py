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
# # Reading a trace: where did the time go, and who took it?
#
# A recording holds what happened in a run: each load slice by slice, each step with its stalls, each request's
# instants. Simulated and measured runs have the same form, a Chrome trace, so both open side by side in Perfetto
# (ui.perfetto.dev) and are explained by the same code. This notebook makes one, reads it, and follows one request.

# %%
import json
import tempfile
from collections import Counter
from pathlib import Path

from lamella.reference.chrome_trace import from_chrome_trace, to_chrome_trace
from lamella.reference.recording import Recording
from lamella.sim.explain import explain, explanation_lines
from lamella.sim.profiles import load_profile
from lamella.sim.record_run import record_world
from lamella.sim.serving import run_world
from lamella.sim.strategies import Device, Regime, Strategy, parse_strategy

device = Device(load_profile())
REGIME = Regime(hit_tokens=15_152, new_tokens=768, concurrency=4, output_tokens=50)


def record(strategy: Strategy) -> Recording:
    world = run_world(device, REGIME, strategy, requests_per_user=3, seed=0, keep=True)
    return record_world(world, device.profile.name, str(strategy), device.profile.num_layers)


interleaved = record(parse_strategy("round_robin/1/first"))
in_turn = record(parse_strategy("fifo/1/first"))

# %% [markdown]
# ## To a file and back
#
# The file opens in Perfetto as it is. Times for the eye are in µs; the exact ns stand in each event's `args`, and
# reading uses those, so nothing is lost.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "interleaved.trace.json"
    path.write_text(json.dumps(to_chrome_trace(interleaved)))
    document = json.loads(path.read_text())
assert from_chrome_trace(document) == interleaved
tracks = {
    (event["pid"], event["tid"]): event["args"]["name"]
    for event in document["traceEvents"]
    if event["name"] == "thread_name"
}
print("tracks:", ", ".join(tracks.values()))
assert {"steps", "h2d", "request 0"} <= set(tracks.values())

# %% [markdown]
# ## One request
#
# The slowest one. Its parts follow each other in time, so they add up to its time to first token exactly. Each wait on
# the link and each stall names whose slice it was.

# %%
slowest = max(interleaved.requests, key=lambda one: one.ttft_ns)
explanation = explain(interleaved, slowest.request)
print("\n".join(explanation_lines(interleaved, explanation)))
assert sum(ns for _, ns in explanation.parts()) == slowest.ttft_ns

# %% [markdown]
# ## All of them
#
# Added up over the requests, the parts say what a policy does to everybody.


# %%
def totals(recording: Recording) -> Counter[str]:
    total = Counter[str]()
    for one in recording.requests:
        total.update(dict(explain(recording, one.request).parts()))
    return total


both = {recording.strategy: totals(recording) for recording in (interleaved, in_turn)}
names = [name for name, _ in explanation.parts()]
print(f"{'mean of a request, ms':34}" + "".join(f"{strategy:>22}" for strategy in both))
for name in names:
    means = [total[name] / len(interleaved.requests) / 1e6 for total in both.values()]
    print(f"{name:34}" + "".join(f"{mean:22.1f}" for mean in means))
mean_ttft = {strategy: total.total() / len(interleaved.requests) / 1e6 for strategy, total in both.items()}
print(f"{'time to first token':34}" + "".join(f"{mean:22.1f}" for mean in mean_ttft.values()))
assert mean_ttft["fifo/1/first"] < mean_ttft["round_robin/1/first"]

# %% [markdown]
# One after another, requests wait for their turn on the link ("behind others"), then hardly stall, and compute while
# the link serves the next. Interleaved, they are ready together: the batch stands still layer by layer, and each then
# waits for the computing of all.

# %%
stall = {strategy: total["stall"] for strategy, total in both.items()}
assert stall["round_robin/1/first"] > 3 * stall["fifo/1/first"]
assert both["round_robin/1/first"]["computing"] > 2 * both["fifo/1/first"]["computing"]

# %% [markdown]
# ## Whose slices did the link carry while the engine stood?

# %%
blamed = Counter[bool]()
for one in interleaved.requests:
    for blame in explain(interleaved, one.request).stall_wire:
        blamed[blame.request == one.request] += blame.ns
print(f"its own {blamed[True] / 1e6:.0f} ms, others' {blamed[False] / 1e6:.0f} ms")
assert blamed[False] > 0, "interleaved, a request stands for others' slices too"

# %% [markdown]
# ## A picture
#
# The first 200 ms of both: the link above, the engine below, a colour a request; red is where a step stood still.

# %%
try:
    from matplotlib import pyplot
except ImportError:
    print("for the picture: pip install 'lamella[plot]'")
else:
    figure, axes = pyplot.subplots(2, 1, figsize=(10, 4.5), sharex=True, layout="constrained")
    for axis, recording in zip(axes, (interleaved, in_turn), strict=True):
        for busy in recording.occupations:
            if busy.begin_ns < 200e6:
                length = (busy.end_ns - busy.begin_ns) / 1e6
                axis.barh(1, length, left=busy.begin_ns / 1e6, color=f"C{busy.request % 10}")
        for step in recording.steps:
            if step.start_ns < 200e6:
                length = (step.end_ns - step.start_ns) / 1e6
                colour = f"C{step.chunks[0].request % 10}" if step.chunks else "lightgray"
                axis.barh(0, length, left=step.start_ns / 1e6, color=colour, edgecolor="white")
            for gap in step.stalls:
                landed = recording.request(gap.culprit).landed_ns(gap.layer)
                if landed is not None and landed < 200e6:
                    axis.barh(0, gap.stall_ns / 1e6, left=(landed - gap.stall_ns) / 1e6, color="red", height=0.4)
        axis.set_yticks([1, 0], ["link", "engine"])
        axis.set_title(f"{recording.strategy}: mean TTFT {mean_ttft[recording.strategy]:.0f} ms", loc="left")
    axes[-1].set_xlabel("ms")
    axes[-1].set_xlim(0, 200)
    pyplot.show()

# %% [markdown]
# From the command line: `lamella simulate` writes such a trace, `lamella explain slowest` reads it, and `lamella replay
# --trace-out` makes one of a recorded workload.
