"""Loads under way, as whoever chooses for the next request must see them: until when the link is taken, and who waits.

Nothing is measured here: a load is taken to last as long as was predicted, and what is observed, the end of a load,
anchors the rest anew. So an error does not add up over loads. Instants are of the owner's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lamella.reference.auto_view import WaitingLoad
from lamella.reference.slices import by_layer


@dataclass(slots=True)
class _Open:
    load_ns: int
    compute_ns: int
    landed_ns: int  # instant, forecast
    parked: bool = True


class LoadLedger:
    """Loads by number, in the order in which the link serves them.

    >>> ledger = LoadLedger()
    >>> ledger.began(0, now_ns=0, load_ns=100, compute_ns=30)
    >>> ledger.began(1, now_ns=10, load_ns=100, compute_ns=30)
    >>> ledger.link_wait_ns(now_ns=50), ledger.waiting(now_ns=50)
    (150, (WaitingLoad(landed_ns=50, compute_ns=30), WaitingLoad(landed_ns=150, compute_ns=30)))
    >>> ledger.ended(0, now_ns=80)
    >>> ledger.link_wait_ns(now_ns=80)
    100
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def began(self, number: int, now_ns: int, load_ns: int, compute_ns: int) -> None:
        """A load has been submitted behind the others; it will take `load_ns` and then compute for `compute_ns`.

        Raises:
            ValueError: a number that is under way already.
        """
        if number in self._open:
            raise ValueError(f"load {number} is under way already")
        self._open[number] = _Open(load_ns, compute_ns, max(now_ns, self._free_ns(now_ns)) + load_ns)

    def joined(self, number: int) -> None:
        """The load's request is in a step: it waits no more, although its load may still be landing."""
        if number in self._open:
            self._open[number].parked = False

    def ended(self, number: int, now_ns: int) -> None:
        """The load has landed, failed or been cancelled; those behind it are forecast anew."""
        if number not in self._open:
            return
        was_next = next(iter(self._open)) == number
        del self._open[number]
        free_ns: int | None = now_ns if was_next else None
        for load in self._open.values():
            free_ns = max(now_ns, load.landed_ns) if free_ns is None else free_ns + load.load_ns
            load.landed_ns = free_ns

    def link_wait_ns(self, now_ns: int) -> int:
        """How long the link is taken by what was submitted before."""
        return max(0, self._free_ns(now_ns) - now_ns)

    def window_ns(self, number: int) -> tuple[int, int]:
        """The instants between which the link carries that load, as forecast.

        Raises:
            KeyError: a load that is not under way.
        """
        load = self._open[number]
        return load.landed_ns - load.load_ns, load.landed_ns

    def arrival_ns(self, number: int, slice_layers: Sequence[int]) -> tuple[int, ...]:
        """When each layer will have landed, as forecast: a load has the link to itself from its begin to its end.

        Args:
            number: of a load that is under way.
            slice_layers: layers of each slice, in order.

        Raises:
            KeyError: a load that is not under way.
        """
        begins_ns, ends_ns = self.window_ns(number)
        num_layers = sum(slice_layers)
        landings = [begins_ns + (ends_ns - begins_ns) * end // num_layers for end in accumulate(slice_layers)]
        return by_layer(landings, slice_layers)

    def behind_ns(self, number: int, now_ns: int) -> int:
        """How long the link is busy with others once that load has landed."""
        load = self._open.get(number)
        return max(0, self._free_ns(now_ns) - max(now_ns, load.landed_ns if load else now_ns))

    def waiting(self, now_ns: int) -> tuple[WaitingLoad, ...]:
        """The requests that are parked, with the landing of each from now."""
        return tuple(
            WaitingLoad(load.landed_ns - now_ns, load.compute_ns) for load in self._open.values() if load.parked
        )

    @property
    def num_open(self) -> int:
        """Loads that have not ended."""
        return len(self._open)

    def _free_ns(self, now_ns: int) -> int:
        return max((load.landed_ns for load in self._open.values()), default=now_ns)
