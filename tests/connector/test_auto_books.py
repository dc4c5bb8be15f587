"""`auto`'s books over whole lives of requests, in any order in which an engine brings them, against a plain model.

Whoever asks sees the prefills of others that share the next step, each once, and never itself; and when everybody is
gone nothing is left.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.test_auto_choice import MS, SPACE, Clock, batch_of
from lamella.connector.auto_choice import AutoChoice
from lamella.connector.batch_blocks import Scheduled
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.auto_view import AutoView


class Member:
    """A request as the engine has it."""

    def __init__(self, name: str, prompt: int, hit: int) -> None:
        self.name, self.prompt, self.hit = name, prompt, hit
        self.num_tokens = prompt
        self.computed = 0
        self.state = "asks"  # asks, joins (without a load), waits (for its step, with one), parked, let_run, runs
        self.is_cut = False
        self.load: int | None = None


class AutoBooks(RuleBasedStateMachine):
    """An engine's life: requests ask, are parked, run, give up their blocks, end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.views: list[AutoView] = []
        self.members: dict[str, Member] = {}
        self.open_loads: list[int] = []
        self.count = self.loads = 0
        self.auto = self.made()
        choose = self.auto._policy.choose

        def noted(view: AutoView, *others: Any) -> Any:
            self.views.append(view)
            return choose(view, *others)

        setattr(self.auto._policy, "choose", noted)  # noqa: B010 - mypy knows no method as a variable

    def made(self) -> AutoChoice:
        """What is tried."""
        facts = EngineFacts((16,), 131_072, 1, SPACE, token_budget=8_192, steps_ahead=True)
        return AutoChoice(ConnectorSettings(layers_per_slice="auto"), facts, Metrics(), self.clock)

    def some(self, data: st.DataObject, *states: str) -> Member | None:
        found = [one for one in self.members.values() if one.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    # ---- requests

    @precondition(lambda self: len(self.members) < 8)
    @rule(prompt=st.integers(64, 30_000), share=st.sampled_from([0.0, 0.1, 0.5, 0.95]))
    def arrives(self, prompt: int, share: float) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.members[name] = Member(name, prompt, int(share * (prompt - 1)))

    @rule(data=st.data(), has_room=st.booleans())
    def asks(self, data: st.DataObject, has_room: bool) -> None:
        one = self.some(data, "asks")
        if one is not None:
            self._asks(one, has_room)

    @rule(data=st.data())
    def is_preempted(self, data: st.DataObject) -> None:
        """It stands first in the queue, and may find then what was stored of it."""
        one = self.some(data, "runs")
        if one is not None:
            one.hit = one.hit or 16
            self._asks(one, has_room=True)

    def _asks(self, one: Member, has_room: bool) -> None:
        one.state, one.is_cut, one.computed = "asks", False, 0
        others = [other for other in self.members.values() if other is not one]
        running = [other for other in others if other.state == "runs"]
        sharing = sum(other.state in ("joins", "let_run") for other in others) + sum(one.is_cut for one in running)
        decoding = sum(not other.is_cut for other in running)
        if not one.hit:
            self.auto.missed(one.name, 0, one.num_tokens)
            one.state = "joins"
            self.auto.declined(one.name)
            return
        self.views.clear()
        self.auto.choose(one.name, one.hit, 0, one.num_tokens)
        for view in self.views:
            assert (view.sharing, view.decoding) == (sharing, decoding)
        decision = self.auto.chosen(one.name)
        assert decision is not None
        if decision.loads:
            if has_room:
                joins = self.auto.joins(one.name)
                self.auto.planned(one.name, self.loads)
                self.open_loads.append(self.loads)
                one.load, one.state, one.computed = self.loads, "waits" if joins else "parked", one.hit
                self.loads += 1
        else:
            one.state = "joins"
            if has_room:
                self.auto.declined(one.name)

    @rule(data=st.data())
    def is_let_run(self, data: st.DataObject) -> None:
        """By a worker's look."""
        one = self.some(data, "parked")
        if one is not None:
            self.auto.released(one.name)
            one.state = "let_run" if one.load in self.open_loads else "waits"

    @rule()
    def step_is_handed_out(self) -> None:
        for name in self.auto.handed_out():
            assert self.members[name].state == "parked"
            self.auto.released(name)
            self.members[name].state = "let_run"

    @rule(data=st.data(), drafts=st.sampled_from([0, 0, 3]), ms=st.integers(1, 40))
    def step_is_made(self, data: st.DataObject, drafts: int, ms: int) -> None:
        self.clock.now_ns += ms * MS
        able = [one for one in self.members.values() if one.state in ("joins", "let_run", "runs", "waits")]
        taken = [one for one in able if data.draw(st.booleans())]
        budget, parts, firsts = 8_192, [], 0
        for one in taken:
            decodes = one.state == "runs" and not one.is_cut
            new = 1 + drafts if decodes else min(budget, one.num_tokens - one.computed)
            if new < 1 or new > budget:
                continue
            budget -= new
            parts.append(Scheduled(one.name, one.computed, new))
            one.state, one.computed = "runs", one.computed + new
            firsts += not decodes and one.computed >= one.num_tokens
            one.is_cut = one.computed < one.num_tokens
        self.auto.step_made(batch_of(*parts), self.members)
        assert self.auto._first_tokens == firsts
        for one in self.members.values():
            if one.state == "joins":
                one.state = "asks"  # it found no room, and asks again
            if one.state == "runs" and not one.is_cut:
                one.num_tokens = one.computed = max(one.num_tokens, one.computed) + 1
                one.computed -= 1

    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        if self.open_loads:
            number = data.draw(st.sampled_from(self.open_loads))
            one = next((one for one in self.members.values() if one.load == number), None)
            if one is not None and one.state == "parked":
                self.auto.released(one.name)
                one.state = "let_run"
            self.open_loads.remove(number)
            self.auto.load_ended(number)

    @rule(data=st.data())
    def is_gone(self, data: st.DataObject) -> None:
        """Done, or aborted wherever it stands."""
        if self.members:
            one = data.draw(st.sampled_from(list(self.members.values())))
            del self.members[one.name]
            self.auto.forget(one.name)

    # ---- what holds

    @invariant()
    def only_those_who_are_parked_wait_for_loads(self) -> None:
        parked = sum(one.state in ("parked", "waits") and one.load in self.open_loads for one in self.members.values())
        assert len(self.auto._ledger.waiting(self.clock.now_ns)) == parked

    def teardown(self) -> None:
        for name in list(self.members):
            self.auto.forget(name)
        for number in self.open_loads:
            self.auto.load_ended(number)
        self.auto.step_made(batch_of(), {})
        books = {
            name: book
            for name, book in vars(self.auto).items()
            if isinstance(book, dict | set) and name.startswith("_") and book
        }
        assert not books
        assert self.auto._ledger.num_open == 0


TestAutoBooks = AutoBooks.TestCase
