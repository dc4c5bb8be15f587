"""Prompts and shares as people write them are exact: no float loses a block, or a token."""

from hypothesis import example, given
from hypothesis import strategies as st

from lamella.cli._durations import parse_time_ns
from lamella.cli._regime import BLOCK_TOKENS, parse_regime, parse_tokens
from lamella.sim.bounds import MOST_TOKENS


@given(st.integers(1_600, MOST_TOKENS), st.integers(1, 99), st.booleans())
@example(1_600, 29, True)
@example(3_200, 57, False)
def test_a_share_of_a_prompt_is_all_the_whole_blocks_in_it(prompt: int, percent: int, as_percent: bool) -> None:
    hit = f"{percent}%" if as_percent else f"0.{percent:02}"
    regime = parse_regime(str(prompt), hit, None, None, 1, 1)
    assert regime.hit_tokens == prompt * percent // 100 // BLOCK_TOKENS * BLOCK_TOKENS
    assert regime.hit_tokens + regime.new_tokens == prompt


@given(st.integers(1, MOST_TOKENS))
@example(1_001)
@example(131_069)
def test_thousands_are_the_tokens_that_they_say(tokens: int) -> None:
    whole, rest = divmod(tokens, 1_000)
    assert parse_tokens(f"{whole}.{rest:03}k", "prompt_tokens") == parse_tokens(str(tokens), "prompt_tokens") == tokens


@given(st.integers(1, 86_400_000))
def test_a_time_is_the_same_in_every_unit(milliseconds: int) -> None:
    whole, rest = divmod(milliseconds, 1_000)
    times = {parse_time_ns(text) for text in (f"{milliseconds}ms", f"{whole}.{rest:03}s", f"{milliseconds * 1000}us")}
    assert times == {milliseconds * 1_000_000}
