"""XFER-1 on a device: whatever the case, the width, the order and the method, the oracle's bytes and no others."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.cuda_ext.arrival import Carrier
from lamella.cuda_ext.device import Device
from lamella.cuda_ext.engine_trial import TIMEOUT_S, PlacedTrial, engine_for, run_on_device, submit_all
from lamella.cuda_ext.transfer import CopyMethod, TransferState
from lamella.reference.arena import CacheCase
from lamella.reference.geometry import ObjectForm
from lamella.reference.laws import TransferCase, Trial
from lamella.reference.plan import Direction, TransferRequest
from strategies import transfer_cases

FORCED = (CopyMethod.STAGED_BATCH, CopyMethod.STAGED_2D, CopyMethod.GATHER)


def _holds(
    device: Device, trial: Trial, method: CopyMethod, carrier: Carrier = Carrier.EVENT, batch_entries: int = 64
) -> None:
    difference = run_on_device(device, trial, method, carrier, batch_entries)
    assert difference is None, str(difference)


@given(case=transfer_cases(max_requests=3), carrier=st.sampled_from(Carrier))
def test_the_engine_left_to_itself_leaves_the_oracles_bytes(
    device: Device, case: TransferCase, carrier: Carrier
) -> None:
    _holds(device, Trial(case), CopyMethod.AUTO, carrier)


@given(case=transfer_cases(max_requests=2), method=st.sampled_from(FORCED))
def test_each_method_leaves_the_oracles_bytes(device: Device, case: TransferCase, method: CopyMethod) -> None:
    _holds(device, Trial(case), method)


@given(case=transfer_cases(max_requests=2), method=st.sampled_from(FORCED))
def test_copies_issued_one_by_one_leave_the_oracles_bytes(
    device: Device, case: TransferCase, method: CopyMethod
) -> None:
    """Also what compute-sanitizer's initcheck runs: it does not see what a batched copy writes."""
    _holds(device, Trial(case), method, batch_entries=1)


@given(case=transfer_cases(max_requests=2))
def test_copies_straight_into_blocks_leave_the_oracles_bytes_or_are_refused_before_the_first(
    device: Device, case: TransferCase
) -> None:
    trial = Trial(case)
    with PlacedTrial(device, trial) as placed, engine_for(device, case) as engine:
        try:
            transfers = submit_all(engine, placed, CopyMethod.DIRECT_BATCH)
        except ValueError:
            assert case.form is ObjectForm.TOKEN, "blocks of the block form can always be copied as they are"
            return
        for transfer in transfers:
            transfer.wait(TIMEOUT_S)
        left = placed.left()
    difference = trial.compare(left.engine, left.host)
    assert difference is None, str(difference)


def _wide_case(num_layers: int, form: ObjectForm, direction: Direction, kv: int = 2, seed: int = 5) -> TransferCase:
    """A small cache of many layers: 3 chunks of 8 tokens in blocks of 4, the last chunk partly filled."""
    axes = "KNTHD" if kv == 2 else "NTHD"
    cache = CacheCase(tuple(range(num_layers)), kv, 2, 8, 2, num_blocks=9, block_tokens=4, axes=axes)
    request = TransferRequest(20, ((7, 2, 5, 0, 3),), skip_tokens=4)
    block = kv * 4 * 2 * 8 * 2
    return TransferCase((cache,), form, 8, (request,), direction, 1, staging_bytes=20 * block, num_windows=2, seed=seed)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("form", ObjectForm)
def test_every_width_of_32_layers_leaves_what_chunk_major_leaves(
    device: Device, form: ObjectForm, direction: Direction
) -> None:
    case = _wide_case(32, form, direction)
    trial = Trial(case)
    methods = [*FORCED, CopyMethod.AUTO] + [CopyMethod.DIRECT_BATCH] * (form is ObjectForm.BLOCK)
    for width, method in zip([None, *range(1, 33)], itertools.cycle(methods), strict=False):
        trial.case = replace(case, width=width)
        _holds(device, trial, method)
    for width in (None, 1, 2, 3, 8, 32, (1, 1, 2, 4)):
        trial.case = replace(case, width=width)
        for method in methods:
            _holds(device, trial, method)


@pytest.mark.known_fault(25)
@given(
    case=transfer_cases(max_requests=2),
    turns=st.lists(st.integers(0, 1), max_size=12),
    method=st.sampled_from((*FORCED, CopyMethod.AUTO)),
)
def test_two_transfers_at_once_in_any_order_do_not_touch_one_another(
    device: Device, case: TransferCase, turns: list[int], method: CopyMethod
) -> None:
    _holds(device, Trial(replace(case, turns=tuple(turns))), method)


@given(case=transfer_cases(), after=st.integers(0, 6), method=st.sampled_from((*FORCED, CopyMethod.AUTO)))
def test_a_cancelled_transfer_leaves_whole_slices_old_bytes_or_new_ones_and_nothing_else(
    device: Device, case: TransferCase, after: int, method: CopyMethod
) -> None:
    trial = Trial(case)
    with PlacedTrial(device, trial) as placed, engine_for(device, case) as engine:
        (transfer,) = submit_all(engine, placed, method)
        if after:
            transfer.wait_recorded(min(after, transfer.num_slices), TIMEOUT_S)
        transfer.cancel()
        state = transfer.wait_final(TIMEOUT_S)
        landed = transfer.landed()
        left = placed.left()
    assert state in (TransferState.CANCELLED, TransferState.LANDED)
    if state is TransferState.LANDED:
        assert trial.compare(left.engine, left.host) is None
        return
    written, source = (left.engine, left.host) if case.direction is Direction.RETRIEVE else (left.host, left.engine)
    assert np.array_equal(source, trial.source), "the side that is read is never written"
    assert ((written == trial.poison) | (written == trial.expected)).all(), "a byte from nowhere"
    if case.direction is Direction.RETRIEVE and landed:
        end_layer = case.plan(case.requests[0]).slices[landed - 1].end_layer
        found, wanted = trial.arena.planes(left.engine), trial.arena.planes(trial.expected)
        for group, cache in enumerate(case.caches):
            for index, layer in enumerate(cache.layers):
                if layer < end_layer:
                    for kv in range(cache.kv):
                        assert np.array_equal(found[group][index][kv], wanted[group][index][kv]), "said to have landed"


@given(down=transfer_cases(Direction.RETRIEVE), up=transfer_cases(Direction.STORE))
def test_a_store_beside_a_retrieve_leaves_both_right(device: Device, down: TransferCase, up: TransferCase) -> None:
    trials = Trial(down), Trial(up)
    with (
        PlacedTrial(device, trials[0]) as first,
        PlacedTrial(device, trials[1]) as second,
        engine_for(device, max(down, up, key=lambda case: case.staging_bytes // case.num_windows)) as engine,
    ):
        for transfer in [*submit_all(engine, first), *submit_all(engine, second)]:
            transfer.wait(TIMEOUT_S)
        left = first.left(), second.left()
    for trial, (engine_bytes, host_bytes) in zip(trials, left, strict=True):
        difference = trial.compare(engine_bytes, host_bytes)
        assert difference is None, str(difference)


@given(case=transfer_cases(Direction.RETRIEVE), carrier=st.sampled_from(Carrier))
def test_a_layer_that_was_waited_for_has_landed(device: Device, case: TransferCase, carrier: Carrier) -> None:
    """On the CPU device the wait is the caller's own; on CUDA the copy back is ordered behind it."""
    trial = Trial(case)
    with PlacedTrial(device, trial) as placed, engine_for(device, case, carrier) as engine:
        (transfer,) = submit_all(engine, placed)
        if device.is_cuda:
            transfer.wait(TIMEOUT_S)
        for layer in range(case.layout.num_layers):
            assert transfer.wait_layer(layer) >= 0
            if not device.is_cuda:
                found, wanted = trial.arena.planes(placed.left().engine), trial.arena.planes(trial.expected)
                for group, cache in enumerate(case.caches):
                    for index, own in enumerate(cache.layers):
                        if own <= layer:
                            for kv in range(cache.kv):
                                assert np.array_equal(found[group][index][kv], wanted[group][index][kv])
        transfer.wait(TIMEOUT_S)
