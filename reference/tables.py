"""Measured step times as tables, and the rule that makes a step of any batch out of them.

A prefill of n new tokens over c cached ones is measured alone, a decode step by batch and context. What a batch of both
costs follows from what the work is: the matrix products are over *all* tokens of the step together, attention is each
request's own. So, with T the prefill table and D the decode table::

    dense(N)        = T(0, N) - own attention of N tokens          the matrix products of N tokens
    attention(c, n) = T(c, n) - dense(n)                           n tokens looking at c + n
    step            = dense(sum of n, + batch) + sum of attention(c, n) + (D(batch, context) - D(batch, 0))

The own attention is taken from T's last column: n tokens look at n/2 tokens of their own on average, and the table says
what looking at the cached ones costs. A single prefill costs T to the nanosecond, a step that only decodes D.

Source: benchmarks/vllm_step_times.py measures batches and mixed steps beside the tables;
tests/reference/test_profile.py holds the rule against them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Time of a step with one prefill in it, by cached and new tokens; bilinear between the nodes, exact on them.

    Fewer new tokens than the smallest node cost what the smallest costs: such a step reads the weights and little else.

    Attributes:
        cached_tokens: nodes, rising from 0.
        new_tokens: nodes, rising.
        step_ns: `step_ns[i][j]` belongs to `new_tokens[i]` and `cached_tokens[j]`.

    Raises:
        ValueError: fewer than two nodes, nodes that do not rise, cached tokens that do not begin at 0, a row of another
            length, or a time below 1.
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    step_ns: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_nodes("cached_tokens", self.cached_tokens, least=0)
        check_nodes("new_tokens", self.new_tokens, least=1)
        if self.cached_tokens[0] != 0:
            raise ValueError(f"cached_tokens must begin at 0, got {self.cached_tokens[0]}")
        if [len(row) for row in self.step_ns] != [len(self.cached_tokens)] * len(self.new_tokens):
            raise ValueError(
                f"step_ns must have {len(self.new_tokens)} rows (new) of {len(self.cached_tokens)} (cached), got "
                f"{[len(row) for row in self.step_ns]}"
            )
        if any(time < 1 for row in self.step_ns for time in row):
            raise ValueError(f"every step_ns must be at least 1, got {min(map(min, self.step_ns))}")

    def with_row(self, new: int, factor: float) -> PrefillTable:
        """The table with a node at that many new tokens, whose times are `factor` of what the table says now.

        Raises:
            ValueError: fewer new tokens than 1, or a factor that makes a time 0.
        """
        row = tuple(round(factor * self.alone_ns(cached, new)) for cached in self.cached_tokens)
        rows = {**dict(zip(self.new_tokens, self.step_ns, strict=True)), new: row}
        return PrefillTable(self.cached_tokens, tuple(sorted(rows)), tuple(rows[tokens] for tokens in sorted(rows)))

    def covers(self, cached: int, new: int) -> bool:
        """Whether the point is inside the measured nodes."""
        return 0 <= cached <= self.cached_tokens[-1] and 1 <= new <= self.new_tokens[-1]

    def alone_ns(self, cached: int, new: int) -> float:
        """T: a step of this prefill and nothing else. Outside the nodes the outermost cells go on in a line."""
        column, across = _locate(self.cached_tokens, cached)
        row, down = _locate(self.new_tokens, max(new, self.new_tokens[0]))
        upper, lower = self.step_ns[row], self.step_ns[row + 1]
        above = upper[column] * (1 - across) + upper[column + 1] * across
        below = lower[column] * (1 - across) + lower[column + 1] * across
        return above * (1 - down) + below * down

    def dense_ns(self, tokens: int) -> float:
        """The matrix products of that many tokens."""
        farthest = self.cached_tokens[-1]
        tokens = max(tokens, self.new_tokens[0])
        nothing_cached = self.alone_ns(0, tokens)
        per_cached_token = (self.alone_ns(farthest, tokens) - nothing_cached) / farthest
        return nothing_cached - per_cached_token * tokens / 2


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Time of a step in which every request decodes one token, by batch and (mean) context.

    Linear in both between the nodes. A batch whose KV would not fit at a context has None there; since such a step only
    reads more of the same memory, its row goes on with its last slope.

    Attributes:
        batch: nodes, rising from 1.
        context_tokens: nodes, rising.
        step_ns: `step_ns[i][j]` belongs to `batch[i]` and `context_tokens[j]`; None only at the end of a row.

    Raises:
        ValueError: as for `PrefillTable`, a batch that does not begin at 1, or a row with fewer than two times.
    """

    batch: tuple[int, ...]
    context_tokens: tuple[int, ...]
    step_ns: tuple[tuple[int | None, ...], ...]

    def __post_init__(self) -> None:
        check_nodes("batch", self.batch, least=1)
        check_nodes("context_tokens", self.context_tokens, least=1)
        if self.batch[0] != 1:
            raise ValueError(f"batch must begin at 1, got {self.batch[0]}")
        if [len(row) for row in self.step_ns] != [len(self.context_tokens)] * len(self.batch):
            raise ValueError(
                f"step_ns must have {len(self.batch)} rows (batch) of {len(self.context_tokens)} (context), got "
                f"{[len(row) for row in self.step_ns]}"
            )
        for batch, row in zip(self.batch, self.step_ns, strict=True):
            known = [time for time in row if time is not None]
            if len(known) < 2 or list(row[: len(known)]) != known:
                raise ValueError(f"batch {batch} needs at least two times, None only after the last; got {row}")
            if min(known) < 1:
                raise ValueError(f"every step_ns must be at least 1, got {min(known)}")

    def covers(self, batch: int, context: float) -> bool:
        """Whether the point is inside the nodes."""
        return 1 <= batch <= self.batch[-1] and 0 <= context <= self.context_tokens[-1]

    def row(self, batch: int) -> tuple[float, ...]:
        """Step times of that batch at the context nodes, gaps filled. Batches beyond the last node go on in a line."""
        index, share = _locate(self.batch, batch)
        fewer, more = self._filled(index), self._filled(index + 1)
        return tuple(a * (1 - share) + b * share for a, b in zip(fewer, more, strict=True))

    def _filled(self, index: int) -> list[float]:
        filled: list[float] = []
        nodes = self.context_tokens
        for j, time in enumerate(self.step_ns[index]):
            if time is None:
                slope = (filled[j - 1] - filled[j - 2]) / (nodes[j - 1] - nodes[j - 2])
                filled.append(filled[j - 1] + slope * (nodes[j] - nodes[j - 1]))
            else:
                filled.append(float(time))
        return filled


class LinearCurve:
    """A piecewise linear curve with its integral, both going on in a straight line beyond the nodes.

    >>> curve = LinearCurve((0, 10), (5.0, 15.0))
    >>> curve.at(4), curve.integral(4)
    (9.0, 28.0)
    """

    __slots__ = ("_integrals", "_last", "_nodes", "_slopes", "_values")

    def __init__(self, nodes: Sequence[int], values: Sequence[float]) -> None:
        self._nodes, self._values = tuple(nodes), tuple(values)
        self._last = len(nodes) - 2  # segment
        self._slopes = tuple(
            (after - before) / (b - a)
            for (a, b), (before, after) in zip(pairwise(nodes), pairwise(values), strict=True)
        )
        self._integrals = [0.0]
        for (a, b), (before, after) in zip(pairwise(nodes), pairwise(values), strict=True):
            self._integrals.append(self._integrals[-1] + (b - a) * (before + after) / 2)

    def at(self, x: float) -> float:
        """The curve's value."""
        index = self._segment(x)
        return self._values[index] + self._slopes[index] * (x - self._nodes[index])

    def integral(self, x: float) -> float:
        """The area from the first node to x; negative to the left of it."""
        index = self._segment(x)
        along = x - self._nodes[index]
        return self._integrals[index] + along * (self._values[index] + self._slopes[index] * along / 2)

    def _segment(self, x: float) -> int:
        index = bisect_right(self._nodes, x) - 1  # not min(max()): the simulator spends a tenth of its time here
        if index < 0:
            return 0
        return index if index < self._last else self._last


class MeasuredCompute:
    """Step times out of the two tables by the rule above; a `ComputeModel` of the simulator.

    A step's time is spread evenly over its layers; embedding, output head and sampling are in it.
    Times of decode stretches are differences of one integral, so a stretch costs to the nanosecond what its parts cost.

    Args:
        prefill: one prefill alone.
        decode: decoding alone.
        num_layers: layers that share a step's time.
        extrapolate: go on in a straight line outside the tables; False raises there.
    """

    def __init__(
        self, prefill: PrefillTable, decode: DecodeTable, num_layers: int, *, extrapolate: bool = False
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._num_layers = num_layers
        self._extrapolate = extrapolate
        self._dense: dict[int, float] = {}  # by tokens; a replay asks for the same few thousand again and again
        self._begin = (0, 0, 0)  # batch, context, and the integral there
        self._curves: dict[int, LinearCurve] = {}  # of batches that were asked for: a profile may name any number

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._num_layers

    def step_layers_ns(
        self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context_tokens: int
    ) -> tuple[int, ...]:
        """Per layer, the time of a step with these prefills beside that many decoding requests.

        Args:
            prefills: (cached, new) tokens of each; at least one.
            decode_batch: requests that decode a token in this step.
            decode_context_tokens: the sum of their contexts.

        Raises:
            ValueError: a prefill or batch outside the tables, unless extrapolating.
        """
        whole = self.step_ns(prefills, decode_batch, decode_context_tokens)
        each, left = divmod(whole, self._num_layers)
        return (each + 1,) * left + (each,) * (self._num_layers - left)

    def step_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context_tokens: int) -> int:
        """The time of the whole step; arguments and errors as for `step_layers_ns`, or tables that make it negative."""
        table = self._prefill
        for cached, new in prefills:
            if not (self._extrapolate or table.covers(cached, new)):
                raise ValueError(
                    f"the profile has no prefill of {new} new tokens over {cached} cached ones (it covers 1 .. "
                    f"{table.new_tokens[-1]} over 0 .. {table.cached_tokens[-1]}); measure it, or extrapolate openly"
                )
        if decode_batch == 0 and len(prefills) == 1:
            return round(table.alone_ns(*prefills[0]))
        time = self._dense_ns(sum(new for _, new in prefills) + decode_batch)
        for cached, new in prefills:
            time += self.attention_ns(cached, new)
        if decode_batch:
            curve = self._curve(decode_batch)
            time += curve.at(decode_context_tokens / decode_batch) - curve.at(0)
        if time < 1:
            raise ValueError(
                f"the profile's tables contradict each other: prefills (cached, new) {list(prefills)} beside "
                f"{decode_batch} decoding requests would take {time:,.0f} ns; measure it again"
            )
        return round(time)

    def decode_ns(self, batch: int, context_tokens: int, num_steps: int) -> int:
        """The time of that many successive steps of nothing but decoding; the context grows by `batch` a step.

        Raises:
            ValueError: a batch outside the table, unless extrapolating.
        """
        curve = self._curve(batch)
        if self._begin[:2] != (batch, context_tokens):  # a stretch is asked about several of its ends
            self._begin = (batch, context_tokens, math.floor(curve.integral(context_tokens / batch)))
        return math.floor(curve.integral((context_tokens + num_steps * batch) / batch)) - self._begin[2]

    def attention_ns(self, cached: int, new: int) -> float:
        """`new` tokens looking at the cached ones and at themselves."""
        return self._prefill.alone_ns(cached, new) - self._dense_ns(new)

    def _dense_ns(self, tokens: int) -> float:
        found = self._dense.get(tokens)
        if found is None:
            found = self._dense[tokens] = self._prefill.dense_ns(tokens)
        return found

    def _curve(self, batch: int) -> LinearCurve:
        curve = self._curves.get(batch)
        if curve is None:
            if not (self._extrapolate or 1 <= batch <= self._decode.batch[-1]):
                raise ValueError(
                    f"the profile has decode batches of 1 .. {self._decode.batch[-1]}, not {batch}; limit the engine's "
                    f"batch, measure more, or extrapolate openly"
                )
            curve = self._curves[batch] = LinearCurve(self._decode.context_tokens, self._decode.row(batch))
        return curve


def check_nodes(name: str, nodes: Sequence[int], least: int) -> None:
    """The nodes can carry an interpolation.

    Raises:
        ValueError: fewer than two, not rising, or one below `least`; the message begins with `name`.
    """
    if len(nodes) < 2:
        raise ValueError(f"{name} needs at least 2 nodes, got {list(nodes)}")
    if any(b <= a for a, b in pairwise(nodes)):
        raise ValueError(f"{name} must rise, got {list(nodes)}")
    if nodes[0] < least:
        raise ValueError(f"{name} must be at least {least}, got {nodes[0]}")


def _locate(nodes: Sequence[int], x: float) -> tuple[int, float]:
    """The segment that holds x (an outermost one for x outside) and how far along it x is, 0 .. 1 inside."""
    index = bisect_right(nodes, x) - 1
    if index < 0:
        index = 0
    elif index > len(nodes) - 2:
        index = len(nodes) - 2
    return index, (x - nodes[index]) / (nodes[index + 1] - nodes[index])
