"""How the requests of one regime come: users who ask again, a Poisson stream, or conversations of several turns.

Each is driven through the world, so what depends on an answer (the next question) waits for that answer. Instants are
drawn from a seed and do not depend on the strategy, so that strategies are compared on the same arrivals.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from lamella.sim.bounds import DAY_NS, MOST_REQUESTS, MOST_TOKENS, check_range
from lamella.sim.records import RequestRecord
from lamella.sim.requests import Request
from lamella.sim.strategies import Device, Regime, Strategy
from lamella.sim.world import World

BLOCK_TOKENS: Final = 16
"""A follow-up hits whole engine blocks of what was said before."""

MakeRequest = Callable[[int, int, int], Request]
"""(cached tokens, new tokens, tag) -> the request as the strategy lets it come."""
OnFinish = Callable[[RequestRecord], object]


class Arrivals(Protocol):
    """How requests come to a world."""

    def largest(self, regime: Regime) -> Regime:
        """The longest prompt it will send, to be checked against the profile before anything runs."""

    def drive(
        self, build: Callable[[OnFinish], World], make: MakeRequest, regime: Regime, count: int, seed: int
    ) -> World:
        """A world into which `count` requests will come once it runs.

        Args:
            build: makes the world, given what to call with each record.
            make: makes a request.
            regime: sizes and users.
            count: requests in all.
            seed: for everything drawn.
        """

    def __str__(self) -> str:
        """As a table or a sentence says it."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Each user asks, and again `think_ns` after the answer; first questions lie within `spread_ns`.

    Raises:
        ValueError: a negative time, or more than a day to think.
    """

    think_ns: int = 0
    spread_ns: int = 100_000_000

    def __post_init__(self) -> None:
        check_range("think_ns", self.think_ns, 0, DAY_NS)
        check_range("spread_ns", self.spread_ns, 0, math.inf)

    def largest(self, regime: Regime) -> Regime:
        """The regime itself: every question is alike."""
        return regime

    def drive(
        self, build: Callable[[OnFinish], World], make: MakeRequest, regime: Regime, count: int, seed: int
    ) -> World:
        """Users start at random instants."""
        world = build(lambda record: None)
        rng = random.Random(seed)
        starts = sorted(rng.randrange(max(1, self.spread_ns)) for _ in range(regime.concurrency))
        requests = (make(regime.hit_tokens, regime.new_tokens, tag) for tag in range(count))
        world.loop_closed(regime.concurrency, requests, self.think_ns, starts)
        return world

    def __str__(self) -> str:
        return "users ask again as soon as they are answered" + (
            f", {_s(self.think_ns)} later" if self.think_ns else ""
        )


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests come at random, `rate_per_s` of them a second on average, whatever the engine does.

    Raises:
        ValueError: a rate outside 0.001 .. 100,000.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        if not 0.001 <= self.rate_per_s <= 100_000:
            raise ValueError(f"a rate must be between 0.001 and 100,000 requests a second, got {self.rate_per_s:g}")

    def largest(self, regime: Regime) -> Regime:
        """The regime itself: every question is alike."""
        return regime

    def drive(
        self, build: Callable[[OnFinish], World], make: MakeRequest, regime: Regime, count: int, seed: int
    ) -> World:
        """All arrivals are known beforehand."""
        world = build(lambda record: None)
        for tag, instant in enumerate(self.instants_ns(count, seed)):
            world.arrive_at(instant, make(regime.hit_tokens, regime.new_tokens, tag))
        return world

    def instants_ns(self, count: int, seed: int) -> list[int]:
        """When each comes."""
        rng, now_s, instants = random.Random(seed), 0.0, []
        for _ in range(count):
            now_s += rng.expovariate(self.rate_per_s)
            instants.append(round(now_s * 1e9))
        return instants

    def __str__(self) -> str:
        return f"requests come at random, {self.rate_per_s:g} a second on average"


@dataclass(frozen=True, slots=True)
class Conversations:
    """Each user has conversations of several turns: a turn sends all that was said before, which is a hit.

    The first turn hits the regime's cached tokens (a document, a system prompt) and brings its new tokens; each later
    one hits everything said so far, in whole blocks, and brings `question_tokens` and what the blocks left over.
    Between an answer and the next turn lies a think time, exponential with mean `think_ns`. After its last turn a user
    begins anew.

    Raises:
        ValueError: turns, tokens or a time out of range.
    """

    turns: int
    question_tokens: int = 64
    think_ns: int = 5_000_000_000

    def __post_init__(self) -> None:
        check_range("turns", self.turns, 1, MOST_REQUESTS)
        check_range("question_tokens", self.question_tokens, 1, MOST_TOKENS)
        check_range("think_ns", self.think_ns, 0, DAY_NS)

    def largest(self, regime: Regime) -> Regime:
        """The last turn."""
        *_, (cached, new) = self.prompts(regime)
        return Regime(max(1, cached), new, regime.concurrency, regime.output_tokens)

    def prompts(self, regime: Regime) -> Iterator[tuple[int, int]]:
        """(cached, new) tokens of each turn."""
        cached, new = regime.hit_tokens, regime.new_tokens
        for _ in range(self.turns):
            yield cached, new
            said = cached + new + regime.output_tokens
            cached = said // BLOCK_TOKENS * BLOCK_TOKENS
            new = said - cached + self.question_tokens

    def drive(
        self, build: Callable[[OnFinish], World], make: MakeRequest, regime: Regime, count: int, seed: int
    ) -> World:
        """A turn comes a think time after the answer before it; the tag says which user and which turn."""
        prompts = list(self.prompts(regime))
        users = regime.concurrency
        # Think times are drawn by user and turn, not in the order of answers, which the strategy changes.
        rngs = [random.Random(f"{seed}/{user}") for user in range(users)]
        left = count

        def ask(user: int, turn: int) -> None:
            nonlocal left
            if left:
                left -= 1
                think = round(rngs[user].expovariate(1) * self.think_ns)
                request = make(*prompts[turn % self.turns], turn * users + user)
                world.arrive_at(world.clock.now_ns + think, request)

        def answered(record: RequestRecord) -> None:
            turn, user = divmod(record.tag, users)
            ask(user, turn + 1)

        world = build(answered)
        for user in range(users):
            ask(user, 0)
        return world

    def __str__(self) -> str:
        return (
            f"users have conversations of {self.turns} turns, {self.question_tokens:,} tokens a question, thinking "
            f"{_s(self.think_ns)} on average"
        )


def request_maker(device: Device, strategy: Strategy, output_tokens: int, tier: str = "") -> MakeRequest:
    """Makes requests of any prompt as the strategy lets them come; their loads come from that tier first."""

    def make(cached: int, new: int, tag: int) -> Request:
        if cached:
            request = device.request(Regime(cached, new, 1, output_tokens), strategy, tag)
            return request._replace(tier=tier) if strategy.loads else request
        return Request(0, new, output_tokens, tag=tag, admission_ns=device.profile.engine.admit_ns(new))

    return make


def _s(ns: int) -> str:
    return f"{ns / 1e9:g} s"
