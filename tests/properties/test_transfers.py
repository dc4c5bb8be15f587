"""The laws of a transfer (XFER-1, XFER-4, XFER-5) for every executor of this machine, on random cases.

`reference.laws` states them; here Hypothesis looks for a case that breaks one. The mutation suite
(`test_mutations.py`) plants wrong models and runs the functions of this file, unchanged, until one of them fails.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.cuda_ext.executors import expand_natively
from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase, Trial, check_landing, check_round_trip
from lamella.reference.plan import Direction, TransferRequest
from moves import MOVES, needs_native
from strategies import transfer_cases, widths


@needs_native
def test_the_native_executor_stands_trial_too() -> None:
    assert [named.name for named in MOVES if named.name.startswith("native")] == [
        "native-1, direct",
        "native-1, staged",
        "native-3, staged",
    ]


@given(case=transfer_cases())
def test_each_executor_leaves_exactly_the_oracles_bytes(case: TransferCase) -> None:
    trial = Trial(case)
    for name, move in MOVES:
        difference = trial.run(move)
        assert difference is None, f"{name}: {difference}"


@given(case=transfer_cases(Direction.RETRIEVE))
def test_a_slice_is_reported_when_it_has_landed_and_nothing_behind_it_has_moved(case: TransferCase) -> None:
    for name, move in MOVES:
        broken = check_landing(case, move)
        assert broken is None, f"{name}: {broken}"


@needs_native
@given(case=transfer_cases(max_requests=2))
def test_the_native_planner_makes_the_references_windows_and_pieces(case: TransferCase) -> None:
    for request in case.requests:
        plan = case.plan(request)
        assert expand_natively(plan).windows == plan.windows


@given(case=transfer_cases(), data=st.data())
def test_every_width_and_schedule_leaves_chunk_majors_bytes(case: TransferCase, data: st.DataObject) -> None:
    trial = Trial(case)
    num_layers = case.layout.num_layers
    schedule = data.draw(widths(num_layers))
    name, move = data.draw(st.sampled_from(MOVES))
    for width in (None, *range(1, num_layers + 1), schedule):
        difference = trial.moved_as(replace(case, width=width)).run(move)
        assert difference is None, f"{name}, width {width}: {difference}"


@given(case=transfer_cases(Direction.RETRIEVE))
def test_a_store_and_then_a_retrieve_is_the_identity(case: TransferCase) -> None:
    for name, move in MOVES:
        difference = check_round_trip(case, move)
        assert difference is None, f"{name}: {difference}"


@given(case=transfer_cases(max_requests=3))
def test_requests_leave_the_same_bytes_whichever_slice_goes_next(case: TransferCase) -> None:
    trial = Trial(case)
    for name, move in MOVES:
        difference = trial.run(move)
        assert difference is None, f"{name}: {difference}"


@settings(max_examples=10)
@given(
    form=st.sampled_from(ObjectForm),
    direction=st.sampled_from(Direction),
    memory=st.sampled_from(("KNTHD", "NKHTD", "NTHKD", "KNHTD")),
    width=st.sampled_from((None, 1, 2, (1, 2))),
    budget=st.sampled_from((1 << 18, 1 << 21, 1 << 23)),
    skip=st.integers(0, 15),
    piece=st.sampled_from((None, 100_000)),
)
def test_work_that_is_shared_between_threads_leaves_the_same_bytes(
    form: ObjectForm,
    direction: Direction,
    memory: str,
    width: int | tuple[int, ...] | None,
    budget: int,
    skip: int,
    piece: int | None,
) -> None:
    # 512 KiB a chunk, layer and kv: large enough to be cut into units and handed to several threads.
    if form is ObjectForm.BLOCK and memory == "NTHKD":
        memory = "NKHTD"
    cache = CacheCase((0, 1, 2), 2, 8, 64, 2, 64, 16, "KNTHD", memory)
    request = TransferRequest(
        900 if form is ObjectForm.TOKEN else 896,
        (tuple(range(60, 2, -1)),),
        skip * (16 if form is ObjectForm.BLOCK else 7),
    )
    case = TransferCase((cache,), form, 512, (request,), direction, width, budget, registered_piece_bytes=piece)
    trial = Trial(case)
    for name, move in MOVES:
        difference = trial.run(move)
        assert difference is None, f"{name}: {difference}"
