"""Release policies: from which instant a request may be scheduled.

To release a request is to tell the engine that it may put it into a batch, while some of its layers may still be on the
wire. A policy answers with an instant, not with yes or no, so that whoever polls can compare it with its clock and
whoever sleeps knows until when. It is pure: everything it may know is in the `ReleaseView`.

Contracts, whatever the policy: REL-3, REL-4 of `lamella.reference`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple, Protocol


class StallPrice(NamedTuple):
    """What it costs others if a step stands for a time, in ns of the released request's own waiting for each ns.

    Attributes:
        others: those who gain nothing by the link being busy.
        readers: those who come back to the link when they are done.
        busy_ns: how long the link has other loads to carry. A stall of half of that costs readers nothing: they would
            only queue there the earlier. Source: the closed loops of benchmarks/auto_regret.py, in which all of it
            cost throughput and none of it cost time to first token.
    """

    others: float
    readers: float = 0.0
    busy_ns: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseView:
    """What is known of one request at one poll.

    Attributes:
        now_ns: the instant of the poll.
        arrival_ns: per layer, when it landed, or the forecast of when it will; never falling.
        layer_compute_ns: per layer, how long the request's next step computes when it runs alone.
        start_delay_ns: from a poll that schedules the request to the start of its first layer.
        step_ns: how long the engine will be away if the request is not released at this poll: the length of the step
            that just ended, or the idle poll's interval.
        victims: requests that would stand still in a stall of the next step: the decoding ones.
        stall: what it costs others if the next step stands; None where nobody has weighed it.
    """

    now_ns: int
    arrival_ns: tuple[int, ...]
    layer_compute_ns: tuple[int, ...]
    start_delay_ns: int = 0
    step_ns: int = 0
    victims: int = 0
    stall: StallPrice | None = None


class ReleasePolicy(Protocol):
    """When a request may be scheduled."""

    @property
    def needs_forecast(self) -> bool:
        """Whether the answer depends on layers still on the wire. If not, it changes only when a layer lands."""

    @property
    def weighs_steps(self) -> bool:
        """Whether the answer depends on `step_ns`. If not, it changes from poll to poll only with the forecast."""

    def layers_needed(self, num_layers: int) -> int:
        """How many layers must have landed before the policy can release, 1 .. num_layers.

        Raises:
            ValueError: the policy asks for more layers than there are.
        """

    def release_ns(self, view: ReleaseView) -> int:
        """The earliest instant at which releasing is right; at most `view.now_ns` means now."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Released when the last layer has landed: what chunk-major must do, and safe everywhere."""

    needs_forecast: ClassVar[bool] = False
    weighs_steps: ClassVar[bool] = False

    def layers_needed(self, num_layers: int) -> int:
        """All of them."""
        return num_layers

    def release_ns(self, view: ReleaseView) -> int:
        """When the last layer lands."""
        return view.arrival_ns[-1]

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class First:
    """Released when the first `layers` layers have landed, whatever stall that brings to the batch.

    Raises:
        ValueError: layers < 1.
    """

    layers: int = 1
    needs_forecast: ClassVar[bool] = False
    weighs_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"release after the first layers needs at least 1 layer, got {self.layers}")

    def layers_needed(self, num_layers: int) -> int:
        """`layers`, if the model has that many."""
        if self.layers > num_layers:
            raise ValueError(f"release after {self.layers} layers needs as many, but the load has {num_layers}")
        return self.layers

    def release_ns(self, view: ReleaseView) -> int:
        """When layer `layers - 1` lands."""
        return view.arrival_ns[self.layers_needed(len(view.arrival_ns)) - 1]

    def __str__(self) -> str:
        return "first" if self.layers == 1 else f"first:{self.layers}"


@dataclass(frozen=True, slots=True)
class JustInTime:
    """Released so early that the remaining layers land just before compute needs them.

    A step that starts at S reaches layer l no earlier than S + (compute of the layers before l). So the batch never
    stalls if it is released at `max over l (arrival_l - compute before l) - start delay`, and each ns earlier is at
    most a ns of stall.

    An engine looks only once a step, so waiting for that instant can cost a whole step. `patience_ns` is the stall
    worth taking instead. None weighs it at each poll: released s ns too early, every victim stands still for s;
    released at the next poll, the request starts step_ns - s too late. So s is tolerated up to `step_ns / (1 +
    victims)`.

    Raises:
        ValueError: patience_ns < 0.
    """

    patience_ns: int | None = 0
    needs_forecast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.patience_ns is not None and self.patience_ns < 0:
            raise ValueError(f"patience_ns must be at least 0, got {self.patience_ns}")

    @property
    def weighs_steps(self) -> bool:
        """Whether the tolerated stall follows the step's length."""
        return self.patience_ns is None

    def layers_needed(self, num_layers: int) -> int:
        """One; the rest is a matter of time."""
        return 1

    def release_ns(self, view: ReleaseView) -> int:
        """The stall-free instant less the tolerated stall, but with the first layer there when the step starts."""
        before = accumulate(view.layer_compute_ns, initial=0)
        stall_free_ns = max(map(int.__sub__, view.arrival_ns, before)) - view.start_delay_ns
        tolerated_ns = view.step_ns // (1 + view.victims) if self.patience_ns is None else self.patience_ns
        return max(_first_there_ns(view), stall_free_ns - tolerated_ns)

    def __str__(self) -> str:
        if self.patience_ns is None:
            return "jit:step"
        whole, rest = divmod(self.patience_ns, 1_000_000)
        part = f".{rest:06}".rstrip("0") if rest else ""
        return f"jit:{whole}{part}ms" if self.patience_ns else "jit"


@dataclass(frozen=True, slots=True)
class WeighedRelease:
    """Released at the poll from which waiting for another would cost more than the stall.

    Released s ns too early, the next step stands still for s, which costs others `price * s`; released a poll later,
    the request starts `step_ns - s` too late. So s is tolerated up to `step_ns / (1 + price)`. With nobody to hurt, a
    stall is only the request's own waiting, and it is released so that it starts with its first layer.
    """

    needs_forecast: ClassVar[bool] = True
    weighs_steps: ClassVar[bool] = True

    def layers_needed(self, num_layers: int) -> int:
        """One; the rest is a matter of time."""
        return 1

    def release_ns(self, view: ReleaseView) -> int:
        """The stall-free instant less the stall worth taking, but with the first layer there when the step starts."""
        others, readers, busy_ns = view.stall or StallPrice(view.victims)
        if others == readers == 0:
            return _first_there_ns(view)
        free_ns = busy_ns / 2  # as far as this goes, readers lose nothing
        worth_ns = view.step_ns / (1 + others)
        if worth_ns > free_ns:
            worth_ns = (view.step_ns + readers * free_ns) / (1 + others + readers)
        if others == 0:
            worth_ns = max(worth_ns, free_ns)  # so far nobody is hurt
        return JustInTime(int(worth_ns)).release_ns(view)

    def __str__(self) -> str:
        return "weighed"


def _first_there_ns(view: ReleaseView) -> int:
    """From when on the first layer has landed, as far as is known, when the step of a release starts (REL-3)."""
    return view.arrival_ns[0] - view.start_delay_ns


def waits_its_turn(compute_ns: int, prefills: int, behind: int, step_fixed_ns: int) -> bool:
    """Whether a request that may run had better join the next step but one.

    Prefills that share a step end together: joining makes each of the `prefills` of the next step later by this one's
    `compute_ns`. A step of its own costs it, and those that wait behind it, what every step costs besides its tokens.

    >>> waits_its_turn(27_000_000, prefills=1, behind=2, step_fixed_ns=5_500_000)
    True
    >>> waits_its_turn(3_000_000, prefills=1, behind=2, step_fixed_ns=5_500_000)
    False
    """
    return prefills * compute_ns > (1 + behind) * step_fixed_ns


_FORMS: Final = "whole, first, first:K (layers), jit, jit:Nms (stall tolerated), jit:step, weighed"


def parse_release(text: str) -> ReleasePolicy:
    """The release policy written as `whole`, `first`, `first:4`, `jit`, `jit:2ms`, `jit:step` or `weighed`.

    `str` writes it back.

    Raises:
        ValueError: any other text, zero layers, or a negative tolerance.

    >>> parse_release("first:4"), str(parse_release("jit:1.5ms"))
    (First(layers=4), 'jit:1.5ms')
    """
    if text == "whole":
        return Whole()
    if text == "first":
        return First()
    if text == "jit":
        return JustInTime()
    if text == "jit:step":
        return JustInTime(None)
    if text == "weighed":
        return WeighedRelease()
    if match := re.fullmatch(r"first:([0-9]{1,4})", text):
        return First(int(match[1]))
    if match := re.fullmatch(r"jit:([0-9]{1,6}(?:\.[0-9]{1,6})?)ms", text):
        return JustInTime(round(float(match[1]) * 1e6))
    raise ValueError(f"release must be one of {_FORMS}; got {text!r}")
