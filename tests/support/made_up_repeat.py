"""A repeat written down pass by pass, so that what each of its instants shows is known beforehand.

Nothing of the world or of the fit is in it. Beside the passes that show an overhead stand decoys: passes that must not
count for it, each with a value that would move its mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from lamella.sim.overheads import WHOLE, Overheads
from lamella.sim.recorded import RecordedCell, RecordedRepeat, RecordedRequest, RecordedStep
from lamella.sim.settings import StepsWait
from lamella.sim.strategies import Device

BATCH: Final = 4
IDLE_PASS_NS: Final = 100_000
LOAD_BYTES: Final = 1 << 30
LONG_LOAD_BYTES: Final = 16 << 30
MIB: Final = 1 << 20
DECOY: Final = 2.5
"""So many times its value: too little to be odd, enough to be seen."""
ODD: Final = 20
STANDING: Final = 2
"""Passes of a repeat that wait for a load."""
TOLD_NS: Final = 3_000
"""From a pass's begin until it was told of a release by forecast."""


@dataclass
class Diary:
    """What a repeat of requests of one shape holds so far.

    Args:
        true: what its engine takes.
        device: what it runs on.
        hit, new: tokens of its requests.
    """

    true: Overheads
    device: Device
    hit: int
    new: int
    now_ns: int = 0
    steps: list[RecordedStep] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: [0])
    firsts: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    loads: list[RecordedRequest] = field(default_factory=list)

    def repeat(self) -> RecordedRepeat:
        end_ns = self.now_ns + 10**12  # what was not handed out meanwhile
        requests = [
            RecordedRequest(0, 0, tuple(self.tokens), None, 0, None, None, None, None, (), 0),
            *(RecordedRequest(0, 0, (first,), None, 0, None, None, None, None, (), 0) for first in self.firsts),
            *(RecordedRequest(at, 0, (end_ns - at,), None, 0, None, None, None, None, (), 0) for at in self.arrivals),
            *(replace(load, token_ns=(end_ns,)) for load in self.loads),
        ]
        cell = RecordedCell("made up", BATCH, ((self.hit, self.new),), 16, 1, 0, None, False, 0, None)
        waited_ns = tuple(STANDING * self.true.gate_ns + layer for layer in range(self.device.profile.num_layers))
        return RecordedRepeat(
            cell,
            "made up",
            {"order": "fifo"},
            tuple(requests),
            tuple(self.steps),
            waited_ns,
            steps_wait=StepsWait.EVERY,
        )

    # ------------------------------------------------------------ passes

    def step(self, host_ns: int, tokens: int, decoding: int, orders_ns: int = 0, device_ns: int | None = None) -> None:
        self.steps.append(RecordedStep(self.now_ns, host_ns, tokens, decoding, orders_ns, device_ns))
        self.now_ns += host_ns

    def idle(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_ns += self.true.idle_ns
            self.step(IDLE_PASS_NS, 0, 0)

    def decode(self, *, host: float = 1, orders_ns: int = 0, device: float = 0.5) -> None:
        launch_ns = round(host * self.true.launch_ns)
        self.step(launch_ns + orders_ns, BATCH, BATCH, orders_ns, round(device * launch_ns))

    def hand_out(self, *, later: float = 1) -> None:
        """A batch's tokens one after another, the last of which the next pass waits for."""
        self.now_ns += round(later * self.true.report_ns)
        self.tokens.append(self.now_ns)
        self.now_ns += self.true.report_ns // 2
        self.tokens.append(self.now_ns)

    def prepare(self, *, longer: float = 1, arrives: bool = False) -> None:
        self.now_ns += round(longer * self.true.pass_ns)
        if arrives:
            self.arrivals.append(self.now_ns - 1)

    def jump(self, to_ns: int) -> None:
        """Nothing can be concluded from the time until then: a request comes."""
        self.now_ns = max(self.now_ns, to_ns) + 10
        self.arrivals.append(self.now_ns - 5)
        self.step(IDLE_PASS_NS, 0, 0)

    # ------------------------------------------------------------ what is shown

    def decoding(self) -> None:
        """Launches, reports and preparations, with passes that begin loads, are odd, disturbed or device-bound."""
        self.jump(self.now_ns)
        for decoy in ("", "", "orders", "", "odd", "", "bound", "", "arrives", ""):
            self.decode(
                host=ODD if decoy == "odd" else 1,
                orders_ns=self.true.launch_ns if decoy == "orders" else 0,
                device=3 if decoy == "bound" else 0.5,
            )
            self.hand_out()
            self.prepare(longer=DECOY if decoy == "arrives" else 1, arrives=decoy == "arrives")
            if decoy == "bound":
                self.decode()
                self.hand_out(later=DECOY)
                self.prepare()

    def asking(self, num_loads: int, *, odd: bool = False) -> None:
        """A pass that only begins loads; of a lone one its own share is not told apart."""
        each_ns = self.true.asking_ns(self.hit + self.new)
        asked = [self.now_ns + 1 + each_ns * number for number in range(num_loads)]
        if odd:
            asked = [asked[0], *(at_ns + ODD * each_ns for at_ns in asked[1:])]
            each_ns = (asked[-1] - asked[0]) // (num_loads - 1)
        self.now_ns = asked[-1] + each_ns + self.true.order_ns
        begin_ns, submit_ns = self.now_ns, self.true.submit_ns
        orders_ns = round(submit_ns * (num_loads if num_loads > 1 else DECOY))
        free_ns = begin_ns + submit_ns + self.true.first_slice_ns
        for number, at_ns in enumerate(asked):
            free_ns = self.load(free_ns, asked_ns=at_ns, ordered_ns=begin_ns + number * submit_ns, num_slices=2)
        self.step(orders_ns + IDLE_PASS_NS, 0, 0, orders_ns)
        self.jump(free_ns)

    def load(self, started_ns: int, num_bytes: int = LOAD_BYTES, num_slices: int = 1, **instants: int) -> int:
        """A load on a link that is free; returns when it ends."""
        layers, wire = self.device.profile.num_layers, self.device.profile.wire
        a_slice = (
            num_bytes * 1e9 / wire.h2d_bytes_per_s
            + self.true.load_ns_per_mib * num_bytes / MIB
            + num_slices * wire.slice_fixed_ns
        ) / num_slices
        landed = [started_ns + round(a_slice * (1 + layer * num_slices // layers)) for layer in range(layers)]
        self.loads.append(
            RecordedRequest(
                0,
                0,
                (),
                self.hit,
                0,
                instants.get("asked_ns"),
                instants.get("ordered_ns"),
                started_ns,
                instants.get("released_ns", landed[-1]),
                tuple(landed),
                num_bytes,
            )
        )
        return landed[-1]

    def prefill(self, beside: float) -> None:
        """A request joins and is computed, its step's device beside a load for such a share of its time."""
        self.jump(self.now_ns + 10**9)  # for the load to begin
        self.idle(2)
        self.now_ns += self.true.idle_ns + self.true.pass_ns + self.true.joining_ns(self.hit + self.new)
        (row,) = (permille for tokens, permille in self.true.prefill_rows if tokens == self.new)
        slower = 1 + beside * (self.true.beside_permille / WHOLE - 1)
        alone_ns = self.device.full_compute.step_ns([(self.hit, self.new)], 0, 0)
        device_ns = round(row / WHOLE * slower * alone_ns)
        ends_ns = self.now_ns + device_ns
        if beside:
            begun_ns = self.load_until(self.now_ns + round(beside * device_ns))
            assert begun_ns < self.now_ns, "else it is not beside all of it"
        self.step(self.true.prefill_launch_ns, self.new, 0, 0, device_ns)
        self.jump(ends_ns)

    def joining(self) -> None:
        """Requests that join a batch: behind its last token; and behind one, as others ask or come."""
        for decoy in ("", "asks", "arrives"):
            self.jump(self.now_ns)
            self.decode()
            self.hand_out()
            joining_ns = self.true.joining_ns(self.hit + self.new) + self.true.pass_ns
            self.now_ns += round(joining_ns * (DECOY if decoy else 1))
            if decoy == "arrives":
                self.arrivals.append(self.now_ns - 1)
            elif decoy:
                self.load(self.now_ns + self.true.prefill_launch_ns, asked_ns=self.now_ns - 1)
            self.step(self.true.prefill_launch_ns, self.new, 0, 0, self.true.prefill_launch_ns // 2)
            self.jump(self.now_ns + 10**9)

    def standing(self) -> None:
        """Passes that wait for a released load, layer by layer: a look found it, or the pass was told by forecast."""
        for told_ns in (0, TOLD_NS):
            self.jump(self.now_ns)
            ends_ns = self.load(self.now_ns, released_ns=self.now_ns + told_ns)
            self.loads[-1] = replace(self.loads[-1], by_forecast=told_ns > 0)
            self.decode(host=DECOY)
            self.hand_out()
            self.jump(ends_ns)

    def load_until(self, end_ns: int) -> int:
        """A load that ends then; returns when it begins."""
        took_ns = self.load(0, LONG_LOAD_BYTES)
        self.loads.pop()
        self.load(end_ns - took_ns, LONG_LOAD_BYTES)
        return end_ns - took_ns

    def first_token(self) -> None:
        """A prefill that the device does quickly, and the pass behind it, in which its first token is seen."""
        self.idle(2)
        self.now_ns += self.true.idle_ns + self.true.pass_ns + self.true.joining_ns(self.hit + self.new)
        self.step(self.true.prefill_launch_ns, self.new, 0, 0, self.true.prefill_launch_ns // 2)
        self.now_ns += self.true.pass_ns + self.true.after_join_ns
        self.decode()
        self.firsts.append(self.now_ns + self.true.report_ns + self.true.first_token_ns)
        self.jump(self.firsts[-1])


def write_repeat(true: Overheads, device: Device, hit: int, new: int) -> RecordedRepeat:
    """A repeat that shows every part that the diary knows."""
    diary = Diary(true, device, hit, new)
    diary.jump(10**9)  # so that a load can have begun before
    diary.idle(4)
    for num_loads in (3, 1, 2):
        diary.asking(num_loads)
    diary.asking(2, odd=True)
    diary.decoding()
    diary.joining()
    diary.standing()
    for beside in (0, 1, 0.5, 0, 1, 0.5):
        diary.prefill(beside)
    for _ in range(2):
        diary.first_token()
    return diary.repeat()
