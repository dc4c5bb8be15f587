"""The laws of a transfer (XFER-1, XFER-5) for the engine on the CPU device: every copy method and carrier."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import ENGINE_MISSING, engine_move
from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.transfer import CopyMethod
from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase, Trial, carry_out, check_landing, check_round_trip
from lamella.reference.plan import Direction, TransferRequest
from strategies import transfer_cases

pytestmark = pytest.mark.skipif(ENGINE_MISSING is not None, reason=str(ENGINE_MISSING))

ANYWHERE = (CopyMethod.AUTO, CopyMethod.STAGED_BATCH, CopyMethod.STAGED_2D, CopyMethod.GATHER)
"""Methods that every layout allows."""


@given(case=transfer_cases(max_requests=2), method=st.sampled_from(ANYWHERE), carrier=st.sampled_from(Carrier))
def test_every_method_leaves_exactly_the_oracles_bytes(
    case: TransferCase, method: CopyMethod, carrier: Carrier
) -> None:
    difference = Trial(case).run(engine_move(method, carrier=carrier))
    assert difference is None, str(difference)


@given(case=transfer_cases())
def test_a_direct_copy_leaves_the_oracles_bytes_or_is_refused_before_the_first(case: TransferCase) -> None:
    trial = Trial(case)
    engine, host = trial.buffers()
    refusal = ""
    try:
        carry_out(case, trial.arena, engine, host, engine_move(CopyMethod.DIRECT_BATCH))
    except ValueError as refused:
        refusal = str(refused)
    if not refusal:
        assert trial.compare(engine, host) is None
        return
    assert "so they cannot go there directly" in refusal
    assert case.form is ObjectForm.TOKEN
    before = trial.buffers()
    assert (engine == before[0]).all()
    assert (host == before[1]).all()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("axes", "form", "allowed"),
    [
        ("NTHD", ObjectForm.TOKEN, True),
        ("KNTHD", ObjectForm.TOKEN, True),
        ("NHTD", ObjectForm.TOKEN, False),
        ("NHTD", ObjectForm.BLOCK, True),
        ("NKHTD", ObjectForm.BLOCK, True),
    ],
)
def test_a_direct_copy_is_allowed_exactly_where_runs_match_blocks(
    axes: str, form: ObjectForm, allowed: bool, direction: Direction
) -> None:
    cache = CacheCase((0, 1, 2), 2 if "K" in axes else 1, 3, 4, 2, 12, 4, axes)
    request = TransferRequest(24, (tuple(range(9, 2, -1)),), skip_tokens=4)
    trial = Trial(TransferCase((cache,), form, 8, (request,), direction, 2, 4096))
    if allowed:
        assert trial.run(engine_move(CopyMethod.DIRECT_BATCH)) is None
    else:
        with pytest.raises(ValueError, match="cannot go there directly"):
            trial.run(engine_move(CopyMethod.DIRECT_BATCH))


@given(case=transfer_cases(Direction.RETRIEVE), method=st.sampled_from(ANYWHERE))
def test_a_store_and_then_a_retrieve_is_the_identity(case: TransferCase, method: CopyMethod) -> None:
    difference = check_round_trip(case, engine_move(method))
    assert difference is None, str(difference)


@given(case=transfer_cases(Direction.RETRIEVE), method=st.sampled_from(ANYWHERE), carrier=st.sampled_from(Carrier))
def test_a_layer_waited_for_has_landed_and_nothing_behind_it_has_moved(
    case: TransferCase, method: CopyMethod, carrier: Carrier
) -> None:
    broken = check_landing(case, engine_move(method, carrier=carrier))
    assert broken is None, broken


@settings(max_examples=10)
@given(width=st.none() | st.integers(1, 8), method=st.sampled_from((*ANYWHERE, CopyMethod.DIRECT_BATCH)))
def test_neighbouring_slots_and_seams_leave_the_same_bytes(width: int | None, method: CopyMethod) -> None:
    # Objects in one slab, 16 of them side by side: rows merge into 2-D copies, and seams of the registration cut them.
    cache = CacheCase(tuple(range(8)), 1, 2, 16, 2, 40, 4, "NTHD")
    request = TransferRequest(128, (tuple(range(39, 3, -1)),))
    for piece in (None, 1000, 4096):
        case = TransferCase(
            (cache,), ObjectForm.TOKEN, 8, (request,), Direction.RETRIEVE, width, 1 << 15, registered_piece_bytes=piece
        )
        difference = Trial(case).run(engine_move(method))
        assert difference is None, str(difference)
