"""Keys by other engines' names, or without their table, lead to those that there are."""

from pathlib import Path
from typing import Any

import pytest

from jinfer import LLM, RequestError
from jinfer.loader.open_keywords import check_keywords
from jinfer.loader.open_model import open_model
from jinfer.modelspec.foreign_names import foreign_names, keyword
from jinfer.modelspec.resolve_spec import TOP_KEYS
from jinfer.modelspec.spec_errors import SpecError

GOLDEN = Path(__file__).parents[1] / "goldens" / "llama2"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"n_ctx": 8192}, "here it is engine.context: LLM(source, **{'engine.context': 8192})"),
        ({"context": 100}, "here it is engine.context: LLM(source, **{'engine.context': 100})"),
        ({"max_model_len": 5}, "here it is engine.context"),
        ({"kv_tokens": 5}, "here it is engine.kv_tokens: LLM(source, **{'engine.kv_tokens': ...})"),
        ({"kv_cache": "q8"}, "here it is quantization.kv_cache"),
        ({"draft": "ngram"}, "here it is speculation.draft"),
        ({"device": "cuda"}, "the environment variable JAX_PLATFORMS chooses"),
        ({"lora": "x"}, "LoRA adapters are loaded by adapters="),
        ({"logits_processor": print}, "logits_processors=[function] are functions"),
        ({"temperature": 0.5}, "it is a parameter of requests"),
        ({"n_threads": 2}, "threads=... is the number of cores"),
    ],
)
def test_foreign_keys(given: dict[str, Any], told: str) -> None:
    (name,) = given
    with pytest.raises(RequestError) as caught:
        LLM(GOLDEN, **given)
    assert str(caught.value).startswith(f"there is no key {name!r}: {told}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"quantization": "q4"}, r"LLM\(source, \*\*\{'quantization.weights': 'q4'\}\)"),
        ({"speculation": "ngram"}, "this may be speculation.draft"),
        ({"engine": 512}, "this may be engine.context"),
    ],
)
def test_tables_that_other_engines_have_as_a_value(given: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        LLM(GOLDEN, **given)


@pytest.mark.parametrize("source", [5, None, ["llama2"]])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(RequestError, match=r"a source is .*; give a path, or a model's name"):
        LLM(source)


def test_keys_of_specifications_are_not_foreign() -> None:
    assert not any(row.key or row.python for name in TOP_KEYS if (row := keyword(name)))
    check_keywords({"engine.context": 5, "engine": {"slots": 2}, "dtype": "float32"})
    with pytest.raises(SpecError, match="nonsense: unknown key; allowed: "):
        open_model(GOLDEN, {"nonsense": 1})


def test_where_foreign_keys_lead_is_somewhere() -> None:
    for found in {row.key for row in foreign_names() if row.key}:
        table, _, key = found.partition(".")
        assert table in TOP_KEYS
        if key and key not in TOP_KEYS:  # without its table it leads to itself
            with pytest.raises(RequestError, match=f"here it is {found}"):
                check_keywords({key: 1})


def test_a_cache_of_less_than_a_block_is_refused() -> None:
    keys: dict[str, Any] = {"engine.kv_tokens": 10}
    with pytest.raises(SpecError, match=r"engine.kv_tokens: 10 is less than a block .* 64 tokens"):
        LLM(GOLDEN, **keys)
