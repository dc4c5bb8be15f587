"""`auto` on the scheduler side, and what the worker measures and leaves for later on its behalf."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamella.connector.auto_choice import AutoChoice
from lamella.connector.batch_blocks import Scheduled, StepBatch
from lamella.connector.connector_metrics import Metrics
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_forecast import read_profile
from lamella.connector.step_orders import Observed
from lamella.connector.vllm_settings import ConnectorSettings
from lamella.reference.auto import READER_SHARE
from lamella.reference.auto_view import Arm
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace
from lamella.reference.profile import profile_to_mapping
from lamella.reference.release import StallPrice, WeighedRelease
from lamella.sim.profiles import load_profile

MS = 1_000_000
SPACE = KeySpace("m", "bfloat16", ObjectForm.BLOCK, "logical", 256, 0, 1, (0, 32))


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def auto_of(
    clock: Clock | None = None, blocks: tuple[int, ...] = (16,), steps_ahead: bool = False, **settings: Any
) -> AutoChoice:
    facts = EngineFacts(blocks, 131_072, 1, SPACE, token_budget=8_192, steps_ahead=steps_ahead)
    return AutoChoice(ConnectorSettings(layers_per_slice="auto", **settings), facts, Metrics(), clock or Clock())


def total(auto: AutoChoice, arm: Arm) -> int:
    return auto._metrics.total(f"auto_{arm.value}")


def requests(**tokens: int) -> dict[str, Any]:
    return {name: SimpleNamespace(num_tokens=count) for name, count in tokens.items()}


def batch_of(*joined: Scheduled) -> StepBatch:
    output = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=one.request, num_computed_tokens=one.computed, block_ids=([],)) for one in joined
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={one.request: one.new for one in joined},
        total_num_scheduled_tokens=sum(one.new for one in joined),
    )
    return StepBatch(output, list(joined), [one.request for one in joined])


def test_a_lone_request_joins_the_next_step_and_is_counted_once_it_has_its_blocks() -> None:
    auto = auto_of()
    assert auto.choose("a", 4_096, 0, 5_120) is Arm.SYNC
    assert auto.joins("a")
    assert total(auto, Arm.SYNC) == 0
    plan = auto.planned("a", 0)
    assert total(auto, Arm.SYNC) == 1
    assert plan.load_ns > 4_096 * 131_072 / 55.44
    with pytest.raises(KeyError):
        auto.planned("a", 1)


def test_a_load_under_way_is_seen_by_whoever_asks_next_until_it_has_ended() -> None:
    clock = Clock()
    auto = auto_of(clock)
    auto.choose("a", 15_152, 0, 15_920)
    auto.planned("a", 0)
    auto.choose("b", 15_152, 0, 15_920)
    behind = auto._chosen["b"]
    assert behind.arm is Arm.EARLY
    auto.load_ended(0)
    auto.choose("b", 15_152, 0, 15_920)
    assert auto._chosen["b"].chosen.ttft_ns < behind.chosen.ttft_ns - 20 * MS


def test_computing_that_is_ahead_is_counted_from_the_choice_until_it_is_done() -> None:
    auto = auto_of()
    auto.choose("a", 4_096, 0, 4_160)
    alone = auto._chosen["a"].chosen.ttft_ns
    auto.missed("b", 0, 20_000)
    auto.choose("a", 4_096, 0, 4_160)
    assert auto._chosen["a"].chosen.ttft_ns > alone + 300 * MS
    weights = auto.step_made(batch_of(Scheduled("b", 0, 8_192)), requests(b=20_000))
    assert weights.full  # what is left fills the next step
    assert weights.prefills == (-1,)
    assert auto.expected_ns > 200 * MS
    auto.choose("a", 4_096, 0, 4_160)
    assert auto._chosen["a"].chosen.ttft_ns > alone + 200 * MS
    auto.step_made(batch_of(Scheduled("b", 8_192, 8_192)), requests(b=20_000))
    after = auto.step_made(batch_of(Scheduled("b", 16_384, 3_616)), requests(b=20_000))
    assert (after.full, after.prefills) == (False, ())
    auto.choose("a", 4_096, 0, 4_160)
    assert auto._chosen["a"].chosen.ttft_ns < alone + 20 * MS


def test_who_decodes_stands_in_the_price_of_a_stall_and_readers_apart() -> None:
    auto = auto_of(bystander_weight=0.5)
    auto.choose("r", 4_096, 0, 4_200)
    auto.planned("r", 0)
    auto.missed("b", 0, 100)
    batch = batch_of(Scheduled("r", 4_096, 104), Scheduled("b", 0, 100))
    assert auto.step_made(batch, requests(r=4_200, b=100)).price == StallPrice(0.5, 0.5 * READER_SHARE)
    auto.forget("r")
    assert auto.step_made(batch_of(Scheduled("b", 100, 1)), requests(b=101)).price == StallPrice(0.5, 0.0)


def test_an_engine_that_schedules_ahead_is_taken_for_busy_as_long_as_its_step_computes() -> None:
    clock = Clock()
    waits = []
    for ahead in (False, True):
        auto = auto_of(clock, steps_ahead=ahead)
        auto.step_made(batch_of(Scheduled("b", 0, 2_048)), requests(b=2_048))
        auto.choose("a", 4_096, 0, 4_160)
        waits.append(auto._chosen["a"].chosen.ttft_ns)
    assert waits[1] > waits[0] + 20 * MS


def test_what_the_engine_declines_is_counted_only_where_that_was_chosen() -> None:
    auto = auto_of()
    auto.observed(Observed(loads=1, slices=1, load_bytes=131_072 * 1_000, load_ns=2_000 * MS))
    for _ in range(4):
        auto.observed(Observed(loads=1, slices=1, load_bytes=131_072 * 1_000, load_ns=2_000 * MS))
    assert auto.choose("a", 4_096, 0, 4_160) is Arm.OFF
    auto.declined("a")
    auto.declined("a")
    auto.declined("never asked")
    assert total(auto, Arm.OFF) == 1


def test_a_probe_stays_one_when_it_is_asked_again_and_asking_again_brings_none() -> None:
    auto = auto_of()
    for _ in range(6):
        auto.observed(Observed(loads=1, slices=1, load_bytes=131_072 * 1_000, load_ns=2_000 * MS))
    arms = [auto.choose("again", 4_096, 0, 4_160) for _ in range(100)]
    assert set(arms) == {Arm.OFF}
    for number in range(30):
        auto.step_made(batch_of(), {})  # what was to be computed is not waited for any more
        auto.choose(f"r{number}", 4_096, 0, 4_160)
    auto.step_made(batch_of(), {})
    assert auto.choose("probe", 4_096, 0, 4_160) is not Arm.OFF
    assert auto.choose("probe", 4_096, 0, 4_160) is not Arm.OFF
    assert "as a probe" in auto._chosen["probe"].reason()


def test_reports_correct_the_profile_links_and_steps_apart() -> None:
    auto = auto_of()
    expected = auto._policy.wire_ns(1_000)
    auto.observed(Observed().with_load(1, 1_000 * 131_072, 2 * expected + auto._policy.slice_ns).with_step(100, 50))
    assert auto.correction.wire == pytest.approx(2, rel=1e-3)
    assert auto.correction.steps == pytest.approx(0.5)
    before = auto.correction
    auto.observed(Observed())
    assert auto.correction == before


def test_narrow_slices_are_left_out_where_a_rank_copies_them_slowly() -> None:
    auto = auto_of()
    auto.set_least_width(4)
    auto.choose("a", 15_152, 0, 15_920)
    assert auto.planned("a", 0).width == 4


def test_with_several_groups_everything_is_released_whole() -> None:
    auto = auto_of(blocks=(16, 16))
    assert auto.choose("a", 15_152, 0, 15_920) is Arm.CHUNK_MAJOR


def test_each_choice_is_one_line_of_reasons_for_who_debugs(caplog: pytest.LogCaptureFixture) -> None:
    auto = auto_of()
    auto.choose("a", 4_096, 0, 5_120)
    with caplog.at_level(logging.DEBUG, "lamella.connector.auto_choice"):
        auto.planned("a", 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("request a: sync, ")
    assert "regret" in line


def test_everything_of_a_request_that_is_gone_is_forgotten() -> None:
    auto = auto_of()
    auto.choose("a", 4_096, 0, 30_000)
    auto.planned("a", 0)
    auto.step_made(batch_of(Scheduled("a", 4_096, 8_192)), requests(a=30_000))
    auto.choose("b", 4_096, 0, 5_000)
    auto.missed("c", 0, 500)
    for name in "abc":
        auto.forget(name)
    auto.load_ended(0)
    for book in (auto._chosen, auto._numbers, auto._readers, auto._decoding, auto._cut, auto._began, auto._joining_ns):
        assert not book
    assert auto._ledger.num_open == 0


def test_a_profile_of_ones_own_is_read_and_a_broken_one_names_what_would_do(tmp_path: Path) -> None:
    own = tmp_path / "mine.json"
    own.write_text(json.dumps(profile_to_mapping(load_profile())), encoding="utf-8")
    assert read_profile(str(own)) == read_profile("h200-llama-3.1-8b")
    own.write_text("{}", encoding="utf-8")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000, encoding="utf-8")
    for name in (str(own), str(deep), "h100", str(tmp_path / "none.json")):
        with pytest.raises(ValueError, match=r"cannot be used: .*lamella calibrate.*h200-llama-3\.1-8b"):
            read_profile(name)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"release": "first"}, "auto chooses release for each request: leave release out"),
        ({"use_layerwise": True}, "auto chooses use_layerwise for each request"),
        ({"bystander_weight": -1}, "bystander_weight must be at least 0"),
    ],
)
def test_what_auto_chooses_cannot_be_set_beside_it(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ConnectorSettings.from_mapping({"layers_per_slice": "auto", **values})


def test_auto_waits_in_the_forward_pass_and_its_loads_without_a_plan_are_weighed() -> None:
    settings = ConnectorSettings.from_mapping({"layers_per_slice": " AUTO "})
    assert (settings.is_auto, settings.waits_in_forward) == (True, True)
    assert settings.release_policy == WeighedRelease()
