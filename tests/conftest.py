"""Settings every test shares: Hypothesis profiles, and how many examples the properties ran."""

import os

from hypothesis import HealthCheck, settings

# dev: a quick look while writing. ci: what every landing runs. nightly: as long as a night allows.
# No deadline: two cores shared with a compiler make single examples slow for no fault of theirs.
settings.register_profile("dev", max_examples=30, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True, database=None)
settings.register_profile("nightly", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
