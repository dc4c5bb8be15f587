"""The profiles that are shipped, and the reading of profiles from files."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from lamella.reference.profile import DeviceProfile, profile_from_mapping

DEFAULT_PROFILE = "h200-llama-3.1-8b"


def shipped_profiles() -> list[str]:
    """Names of the shipped profiles, sorted."""
    names = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def load_profile(name: str = DEFAULT_PROFILE) -> DeviceProfile:
    """The shipped profile of that name, or the one in the file that `name` is the path of (ending in .json).

    Raises:
        ValueError: no such profile, a file that cannot be read or is not JSON, or what `profile_from_mapping` refuses.
    """
    if name in shipped_profiles():
        return parse_profile((files(__name__) / f"{name}.json").read_text("utf-8"), name)
    if not name.endswith(".json"):
        raise ValueError(f"no profile {name!r}; shipped: {', '.join(shipped_profiles())}; or name a .json file")
    try:
        text = Path(name).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read the profile {name}: {why}") from error
    return parse_profile(text, name)


def parse_profile(text: str, name: str) -> DeviceProfile:
    """The profile written in `text`; `name` says in messages where it came from.

    Raises:
        ValueError: not a JSON object, or what `profile_from_mapping` refuses.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(parsed).__name__}")
    try:
        return profile_from_mapping(parsed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
