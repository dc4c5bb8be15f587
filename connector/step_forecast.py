"""How long a request's prefill, a step and a load will take: a profile's times, put right by what workers observe.

One forecast for everybody who needs one: `auto` chooses by it, and a release just in time (`jit`) is timed by it.

Only steps of prefills are learned from. Of a request that decodes beside them with drafts, each token is computed as
another request's would be, over a context that is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lamella.connector.batch_blocks import StepBatch
from lamella.connector.engine_facts import EngineFacts
from lamella.connector.step_orders import LoadPlan, Observed
from lamella.connector.vllm_settings import ConnectorSettings, resolve_layers_per_slice
from lamella.reference.auto import AutoPolicy
from lamella.reference.correction import Correction
from lamella.reference.profile import DeviceProfile, profile_from_mapping
from lamella.reference.slices import plan_slices

_SHIPPED: Final = "lamella.sim.profiles"  # data that lies beside the simulator


def read_profile(name: str) -> DeviceProfile:
    """The shipped profile of that name, or the one in a file that `lamella calibrate` wrote.

    Raises:
        ValueError: no such profile, or one that is broken; the message says what would be one.
    """
    import json

    source = Path(name) if name.endswith(".json") else files(_SHIPPED) / f"{name}.json"
    try:
        return profile_from_mapping(json.loads(source.read_text("utf-8-sig")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        shipped = sorted(one.name[:-5] for one in files(_SHIPPED).iterdir() if one.name.endswith(".json"))
        raise ValueError(
            f"profile {name!r} cannot be used: {error}; name a file that lamella calibrate wrote, or one of "
            f"{', '.join(shipped)}"
        ) from error


class StepForecast:
    """See the module. On the scheduler's thread.

    Args:
        settings: the connector's.
        facts: of the engine.

    Raises:
        ValueError: a profile that cannot be read.
    """

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts) -> None:
        self.profile = read_profile(settings.profile)
        self.policy = AutoPolicy(
            self.profile,
            facts.space.layers[1] - facts.space.layers[0],
            facts.token_bytes,
            facts.token_budget,
            settings.bystander_weight,
        )
        """The profile's times, before correction."""
        self.correction = Correction()
        """What was observed so far."""
        self._settings = settings
        self._token_bytes = facts.token_bytes

    def plan(self, load_tokens: int, cached: int, new: int) -> LoadPlan:
        """The load of a request that then has `cached` tokens and computes `new` more: moved as the settings say."""
        num_layers = self.policy.num_layers
        width = resolve_layers_per_slice(self._settings.layers_per_slice, num_layers)
        num_slices = len(plan_slices(num_layers, width)) if width and not isinstance(width, str) else 1
        compute_ns, _all_steps_ns = self.policy.prefill_ns(cached, new, self.correction)
        load_ns = self.policy.load_ns(load_tokens, num_slices, self.correction)
        return LoadPlan(None, self._settings.release_policy, compute_ns, load_ns)

    def expected_ns(self, batch: StepBatch, requests: Mapping[str, Any]) -> int:
        """The profile's time of the step, uncorrected; 0 where it is no step of prefills, and not to be measured.

        Args:
            batch: of the step.
            requests: the engine's, by name.
        """
        if batch.num_tokens == len(batch.names):
            return 0
        prefills: list[tuple[int, int]] = []
        decoding = context = 0
        for one in batch.all():
            if one.decodes(one.num_tokens(requests)):
                decoding, context = decoding + one.new, context + one.end
            else:
                prefills.append((one.computed, one.new))
        return self.policy.step_ns(prefills, decoding, context) if prefills else 0

    def observed(self, observed: Observed) -> None:
        """The workers' measurements correct the profile."""
        if observed.loads:
            expected_ns = self.policy.wire_ns(observed.load_bytes // self._token_bytes)
            measured_ns = observed.load_ns - observed.slices * self.policy.slice_ns
            self.correction = self.correction.after_load(expected_ns, measured_ns)
        if observed.bounded:
            slices_ns = observed.bounded * self.policy.slice_ns
            self.correction = self.correction.after_bounded_load(
                self.policy.wire_ns(observed.bounded_bytes // self._token_bytes),
                observed.least_ns - slices_ns,
                observed.most_ns - slices_ns,
            )
        if observed.steps:
            self.correction = self.correction.after_steps(observed.step_expected_ns, observed.step_ns, observed.steps)


def forecast_if_needed(settings: ConnectorSettings, facts: EngineFacts) -> StepForecast | None:
    """The forecast of an engine whose settings need one.

    Raises:
        ValueError: a profile that cannot be read, needed or not: it stops an engine as any wrong setting does.
    """
    if settings.needs_forecast:
        return StepForecast(settings, facts)
    read_profile(settings.profile)
    return None
