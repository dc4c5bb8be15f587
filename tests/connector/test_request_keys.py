"""Which requests share keys: those of one tenant and one adapter, until keys are renewed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamella.connector.request_keys import RequestKeys
from lamella.reference.geometry import ObjectForm
from lamella.reference.keys import KeySpace

CHUNK, TOKENS = 8, list(range(20))
SPACE = KeySpace("m", "float32", ObjectForm.TOKEN, "logical", CHUNK, 0, 1, (0, 4))
TEXT = st.text(alphabet="ab:' 1", max_size=4)
ADAPTERS = st.none() | st.builds(SimpleNamespace, lora_name=TEXT, lora_path=TEXT)


def request_of(name: str = "r", salt: str | None = None, adapter: Any = None, **more: Any) -> Any:
    """A request as vLLM has it, as far as keys look."""
    common = {"mm_features": None, "prompt_embeds": None, "pooling_params": None, **more}
    return SimpleNamespace(request_id=name, all_token_ids=TOKENS, cache_salt=salt, lora_request=adapter, **common)


def keys_of(request: Any, keys: RequestKeys | None = None) -> tuple[Any, ...]:
    return (keys or RequestKeys(SPACE)).keys(request, len(TOKENS))


@given(st.tuples(TEXT | st.none(), ADAPTERS), st.tuples(TEXT | st.none(), ADAPTERS))
@example(  # were named alike
    (None, SimpleNamespace(lora_name="a at b", lora_path="c")),
    (None, SimpleNamespace(lora_name="a", lora_path="b at c")),
)
def test_tenants_and_adapters_share_no_key(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    mine, theirs = (
        keys_of(request_of(salt=one[0], adapter=one[1])),
        keys_of(request_of(salt=other[0], adapter=other[1])),
    )
    assert len(mine) == len(theirs) == 2
    alike = (one[0] or None, one[1]) == (other[0] or None, other[1])
    assert (mine == theirs) is alike
    assert alike or not set(mine) & set(theirs)


@pytest.mark.parametrize("what", ["mm_features", "prompt_embeds", "pooling_params"])
def test_a_prompt_that_is_not_tokens_alone_has_no_keys(what: str) -> None:
    assert keys_of(request_of(**{what: [object()]})) == ()


def test_renewed_keys_are_new_to_this_engine_and_to_every_other() -> None:
    engines = [RequestKeys(SPACE), RequestKeys(SPACE)]
    names = map(str, itertools.count())

    def found(keys: RequestKeys) -> list[tuple[Any, ...]]:
        return [keys_of(request_of(next(names), salt), keys) for salt in (None, "tenant")]

    every = found(engines[0])
    assert found(engines[1]) == every
    for _ in range(2):
        for keys in engines:
            keys.renew()
            every += found(keys)
            assert found(keys) == every[-2:], "an engine finds what it has stored since"
    assert len({key for keys in every for key in keys}) == 2 * len(every)


def test_a_request_that_was_under_way_when_keys_were_renewed_has_none_until_it_is_gone() -> None:
    keys = RequestKeys(SPACE)
    request = request_of("a")
    assert keys_of(request, keys)
    keys.renew()
    assert (keys.has_keys(request), keys_of(request, keys)) == (False, ())
    keys.forget("a")
    assert keys_of(request, keys)
