"""What an engine's host side adds to a step, a load and a request: few physical times, measured or fitted.

A profile has the times of the device. These are of the Python around it, differ between engines and versions, and are
all 0 where nobody has measured them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from lamella.sim.hardware import Hardware
from lamella.sim.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Overheads:
    """All in ns.

    Attributes:
        step_ns: each step begins so much after its poll.
        gated_step_ns: the same besides, in an engine whose steps wait for layers: hooks, piecewise graphs.
        launch_ns: launching a forward takes the host so long; see `EngineSettings`.
        submit_ns: each submission keeps the engine's thread busy so long.
        first_slice_ns: from submission until the first slice may begin.
        join_ns: a request that joins its first step keeps the engine's thread busy so long: tables, sampling.
        join_ns_per_1000_tokens: the same for each thousand tokens of its prompt.
        report_ns: from the end of a step until its token has been seen, which holds nobody up.
        wake_ns: from a landing until a step that stood waiting for it goes on.

    Raises:
        ValueError: a negative time.
    """

    step_ns: int = 0
    gated_step_ns: int = 0
    launch_ns: int = 0
    submit_ns: int = 0
    first_slice_ns: int = 0
    join_ns: int = 0
    join_ns_per_1000_tokens: int = 0
    report_ns: int = 0
    wake_ns: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")

    def settings(self, settings: EngineSettings, *, gated: bool) -> EngineSettings:
        """The engine's settings with what is added to each step and submission."""
        step_ns = settings.start_delay_ns + self.step_ns + (self.gated_step_ns if gated else 0)
        return replace(
            settings,
            start_delay_ns=step_ns,
            launch_ns=self.launch_ns,
            submit_ns=self.submit_ns,
            wake_ns=self.wake_ns,
        )

    def hardware(self, hardware: Hardware) -> Hardware:
        """The way with what is added before its first slice."""
        return replace(hardware, first_slice_ns=hardware.first_slice_ns + self.first_slice_ns)

    def joining_ns(self, prompt_tokens: int) -> int:
        """What a request costs the engine's thread when it joins."""
        return self.join_ns + self.join_ns_per_1000_tokens * prompt_tokens // 1000

    def changed(self, name: str, value: int) -> Self:
        """With another value of that part."""
        return replace(self, **{name: value})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Its parts."""
        return tuple(field.name for field in fields(cls))
