"""Loads that begin before their step's batch is prepared, in the engine that schedules ahead."""

import pytest

from lamella.reference.release import First
from lamella.sim.ahead import AheadEngine
from lamella.sim.overheads import Overheads
from lamella.sim.requests import Job, Request
from rich_world import Ahead, load_of, run_ahead


def test_a_load_ordered_before_the_batch_lands_sooner_by_what_preparing_takes_and_its_step_waits_for_it() -> None:
    """The step begins as late as ever; one that parks its request begins its load with the pass, before and after."""
    preparing = Overheads(idle_ns=10, pass_ns=100, join_ns=150, order_ns=5)
    begun: dict[tuple[bool, bool], list[int]] = {}
    for joins in (True, False):
        for before in (False, True):
            ahead = Ahead(preparing, joins_at_once=joins, before_batch=before)
            world = run_ahead(ahead, (0, Request(8, 1, load=load_of(4000))), release=First())
            (record,) = world.records
            begun[joins, before] = [record.submitted_ns, record.started_ns, record.first_token_ns]
    hooked, told = begun[True, False], begun[True, True]
    assert [late - early for late, early in zip(hooked, told, strict=True)] == [245, 0, 245]
    assert begun[False, False] == begun[False, True]


@pytest.mark.parametrize("joining", [(0,), (1,), (2,), (0, 2), (1, 2), ()], ids=str)
def test_loads_of_one_pass_keep_their_order_on_the_link_whichever_of_them_begin_before_the_batch(
    joining: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` has chosen each of them by a link that serves them in the order in which they asked."""
    submit = AheadEngine._submit

    def some_join(engine: AheadEngine, job: Job) -> None:
        submit(engine, job)
        if job.sequence in joining:
            engine._join(job)

    monkeypatch.setattr(AheadEngine, "_submit", some_join)
    preparing = Overheads(idle_ns=10, pass_ns=100, join_ns=150, order_ns=5, submit_ns=1)
    begun = {}
    for before in (False, True):
        asking = [(0, Request(8, 1, load=load_of(4000)))] * 3
        world = run_ahead(Ahead(preparing, before_batch=before), *asking, release=First())
        begun[before] = [record.submitted_ns for record in world.records]
        assert begun[before] == sorted(begun[before]), before
    sooner = [late - early for late, early in zip(begun[False], begun[True], strict=True)]
    last = max(joining, default=-1)
    assert all(gained > 100 for gained in sooner[: last + 1])
    assert all(gained <= 0 for gained in sooner[last + 1 :])
