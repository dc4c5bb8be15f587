"""Which chunk leaves next, against a model that looks at all of them; KEEP-1 and KEEP-2."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lamella.reference.prefix_ages import Kept, PrefixAges
from prefix_model import Prefix, PrefixModel, prefixes

documents = st.sampled_from([end for document in product((0, 1), repeat=3) for end in prefixes(document)])
firsts = st.sampled_from([0, 0, 0, 1, 2])


def chunks_of(*names: str) -> list[Kept[str]]:
    """One behind the other."""
    return [Kept(name, before) for before, name in pairwise((None, *names))]


def behind(before: str, *names: str) -> list[Kept[str]]:
    return [Kept(name, found) for found, name in pairwise((before, *names))]


def gone(ages: PrefixAges[str, Kept[str]], count: int, *keep: str) -> str:
    """Names of those that leave, in order."""
    return " ".join(chunk.key for chunk in ages.take(count, keep) or ())


def test_a_prompt_stored_in_two_steps_loses_its_tail_before_its_head() -> None:
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    for chunks in (chunks_of("a1", "a2"), chunks_of("b1"), behind("a2", "a3", "a4")):
        ages.add(chunks)
        ages.free(chunks)
    assert gone(ages, 5) == "b1 a4 a3 a2 a1", "the head counts as used when the tail was"


def test_a_head_was_used_when_its_tail_was_also_once_that_is_gone() -> None:
    """KEEP-2."""
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    tail = behind("a1", "a2")
    for chunks in (chunks_of("a1"), chunks_of("b1"), tail):
        ages.add(chunks)
        ages.free(chunks)
    ages.remove(tail[0])
    assert gone(ages, 2) == "b1 a1"


def test_of_what_was_used_together_what_has_lost_its_head_leaves_first() -> None:
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    chunks = chunks_of("a1", "a2", "a3")
    ages.add(chunks)
    ages.remove(chunks.pop(1))
    ages.free(chunks)
    assert gone(ages, 2) == "a3 a1"


def test_what_two_prompts_share_leaves_after_both() -> None:
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    for chunks in (chunks_of("s1", "s2"), behind("s2", "a"), behind("s2", "b")):
        ages.add(chunks)
        ages.free(chunks)
    assert gone(ages, 4) == "a b s2 s1"


def test_nothing_leaves_from_before_what_is_held_or_kept_out() -> None:
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    held, other = chunks_of("a1", "a2", "a3"), chunks_of("b1", "b2")
    for chunks in (held, other):
        ages.add(chunks)
        ages.free(chunks)
    held[1].is_free = False
    assert gone(ages, 1, "b2") == "a3"
    assert ages.take(1, ["b2"]) is None
    assert gone(ages, 2) == "b2 b1"
    assert ages.is_whole("a2")
    assert not ages.is_whole("a3")


def test_a_prompt_whose_head_was_taken_away_is_whole_again_with_its_head() -> None:
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    chunks = chunks_of("a1", "a2", "a3")
    ages.add(chunks)
    ages.free(chunks)
    ages.remove(chunks[0])
    assert not ages.is_whole("a3")
    again = chunks_of("a1")
    ages.add(again)
    assert ages.is_whole("a3")
    ages.free(again)
    assert gone(ages, 3) == "a3 a2 a1"


def test_keys_that_would_come_behind_themselves_are_refused_and_nothing_changes() -> None:
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    chunks = chunks_of("a", "b", "c")
    ages.add(chunks)
    ages.free(chunks)
    ages.remove(chunks[0])
    for wrong in (behind("c", "a"), behind("x", "a", "x2")[:1] + behind("b", "x")):
        with pytest.raises(ValueError, match="would come behind itself: name a prompt's keys in their order"):
            ages.check(wrong)
    ages.check(behind("elsewhere", "a"))
    assert gone(ages, 2) == "c b"


def test_a_use_costs_nothing_that_stays() -> None:
    """A pool that never fills is used for ever and takes nothing out."""
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    used, others = chunks_of("a1", "a2"), chunks_of("b1", "b2")
    for chunks in (others, used):
        ages.add(chunks)
        ages.free(chunks)
    for _ in range(10_000):
        ages.free(used)
    assert len(ages._leaves) < 100
    assert gone(ages, 4) == "b2 b1 a2 a1"


class Counted(str):
    """A key that counts how often it is looked for."""

    __slots__ = ()
    times = 0

    def __hash__(self) -> int:
        Counted.times += 1
        return super().__hash__()


def looks_behind(length: int, *, elsewhere_a_head_is_lost: bool) -> int:
    """Looks at keys that four chunks cost, from when they are added until they leave, behind a prompt so long."""
    ages: PrefixAges[str, Kept[str]] = PrefixAges()
    if elsewhere_a_head_is_lost:
        ages.add(other := chunks_of("b1", "b2"))
        ages.remove(other[0])
    head = chunks_of(*(Counted(number) for number in range(length)))
    ages.add(head)
    ages.free(head)
    assert ages.is_whole(head[-1].key), "looked up once where a head is lost"
    Counted.times = 0
    tail = behind(head[-1].key, *(Counted(f"tail {number}") for number in range(4)))
    assert ages.is_whole(head[-1].key)
    ages.check(tail)
    ages.add(tail)
    ages.free(tail)
    assert len(ages.take(4, [head[-1].key]) or ()) == 4
    return Counted.times


@pytest.mark.parametrize("lost", [False, True])
def test_chunks_behind_a_long_prompt_cost_what_they_cost_behind_a_short_one(lost: bool) -> None:
    long, short = (looks_behind(length, elsewhere_a_head_is_lost=lost) for length in (10_000, 2))
    assert long == short < 100


class AgesMachine(RuleBasedStateMachine):
    """Any order of what pools do, also what only their faults make them do: heads that go, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.ages: PrefixAges[Prefix, Kept[Prefix]] = PrefixAges()
        self.model = PrefixModel()
        self.free: set[Prefix] = set()

    @rule(document=documents, first=firsts)
    def add(self, document: Prefix, first: int) -> None:
        missing = [chunk for chunk in prefixes(document)[first:] if chunk not in self.model.used]
        chunks = [Kept(chunk, chunk[:-1] or None) for chunk in missing]
        self.ages.check(chunks)
        self.ages.add(chunks)
        self.model.add(missing)

    @rule(document=documents, first=firsts)
    def let_go(self, document: Prefix, first: int) -> None:
        found = [chunk for chunk in prefixes(document)[first:] if chunk in self.model.used]
        self.ages.free([self.ages.kept[chunk] for chunk in found])
        self.model.use(found)
        self.free.update(found)

    @rule(document=documents, first=firsts)
    def store(self, document: Prefix, first: int) -> None:
        self.add(document, first)
        self.let_go(document, first)

    @rule(document=documents)
    def hold(self, document: Prefix) -> None:
        for chunk in prefixes(document):
            if chunk in self.model.used:
                self.ages.kept[chunk].is_free = False
                self.free.discard(chunk)

    @rule(document=documents)
    def remove(self, document: Prefix) -> None:
        if document in self.model.used:
            self.ages.remove(self.ages.kept[document])
            self.model.remove(document)
            self.free.discard(document)

    @rule(count=st.integers(1, 6), keep=st.lists(documents, max_size=2))
    def take(self, count: int, keep: list[Prefix]) -> None:
        expected = self.model.leaving(count, self.free, keep)
        taken = self.ages.take(count, keep)
        assert (None if taken is None else [chunk.key for chunk in taken]) == expected
        for chunk in expected or ():
            self.model.remove(chunk)
            self.free.discard(chunk)

    @rule(pick=st.integers(0, 5))
    def use_for_long(self, pick: int) -> None:
        """Until what is out of date has been thrown away."""
        for chunk in sorted(self.free)[pick : pick + 1] * 100:
            self.ages.free([self.ages.kept[chunk]])
            self.model.use([chunk])

    @invariant()
    def the_same_chunks_are_kept(self) -> None:
        assert set(self.ages.kept) == set(self.model.used)
        assert all(found.before == (chunk[:-1] or None) for chunk, found in self.ages.kept.items())

    @invariant()
    def a_prompt_is_whole_where_every_chunk_of_it_is_kept(self) -> None:
        for chunk in self.model.used:
            assert self.ages.is_whole(chunk) == all(before in self.model.used for before in prefixes(chunk))


TestAgesMachine = AgesMachine.TestCase
