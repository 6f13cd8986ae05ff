"""Answers drawn by chance from what masks allow, with real vocabularies: always valid."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from jinfer.sampling.structured import Constraint, Matcher, compile_constraint
from jinfer.tokenizer import Tokenizer
from tests.sampling.schemas import random_schema
from tests.sampling.vocabularies import BYTE_COMPLETE, tokenizer

LONG = 120  # tokens, after which a walk prefers to close what it has opened
CLOSING = b'"}]@,:0123456789 tfn-.'
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def allowed(matcher: Matcher, size: int) -> np.ndarray:
    """The ids that a mask allows."""
    words = np.full(-(-size // 32) + 2, 0xFFFFFFFF, np.uint32)  # a model's table may be longer
    matcher.mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[size:].any()
    return np.flatnonzero(bits)


def walk(constraint: Constraint, found: Tokenizer, seed: int) -> tuple[str, list[int]]:
    """An answer of tokens drawn evenly; towards its end once it is long. With its last ids."""
    rng = np.random.default_rng(seed)
    matcher = constraint.start()
    while not matcher.finished and (found.eos_ids or not matcher.may_end):
        ids = allowed(matcher, found.vocab_size)
        forced = matcher.forced()
        assert not forced or ids.tolist() == [forced[0]]
        if len(matcher.tokens) > LONG:
            near = ids[np.argsort(closing(found)[ids], kind="stable")]
            ids = near[:1] if near[0] in found.eos_ids else near[: rng.choice([1, 14])]
        token = int(rng.choice(ids))
        matcher.advance(token)
        assert len(matcher.tokens) < 2000
    tokens = [token for token in matcher.tokens if token not in found.eos_ids]
    return found.decode([*found.encode("x"), *tokens])[1:], tokens


@cache
def closing(found: Tokenizer) -> np.ndarray:
    """For each token how late it should come in a walk to the end."""
    late = np.empty(found.vocab_size, np.int64)
    for id in range(found.vocab_size):
        data = found.token_bytes(id)
        place = CLOSING.find(data)
        late[id] = 100 * len(data) + (place if place >= 0 else 99)
    return late


def check_valid(text: str, schema: dict[str, Any]) -> None:
    """Parses strictly and validates; decimals as they are written, so that bounds are exact."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=FORMATS)
    validator.validate(json.loads(text, parse_float=Decimal))


@pytest.mark.parametrize(
    "block", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 8))]
)
def test_answers_to_random_schemas_are_valid(block: int) -> None:
    found = tokenizer("smollm2")
    for seed in range(block * 25, block * 25 + 25):
        schema = random_schema(seed)
        constraint = compile_constraint(found, json_schema=schema)
        for number in range(3):
            text, _ = walk(constraint, found, number)
            try:
                check_valid(text, schema)
            except (ValueError, jsonschema.ValidationError) as error:
                # llguidance's dates have a 29th of February in every year.
                if "is not a 'date'" not in str(error) or "02-29" not in text:
                    raise AssertionError(f"schema {seed}, walk {number}: {text}") from error


@pytest.mark.parametrize("name", BYTE_COMPLETE)
def test_every_tokenizer(name: str) -> None:
    found = tokenizer(name)
    for seed in range(6):
        schema = random_schema(seed)
        constraint = compile_constraint(found, json_schema=schema)
        check_valid(walk(constraint, found, seed)[0], schema)
        regex = r"(naïve|na){1,3} [a-c]+\.(日本|日)?"
        text, _ = walk(compile_constraint(found, regex=regex), found, seed)
        assert re.fullmatch(regex, text)
        choice = ["green", "greenish", " green", "größer als", "a\nb", ""]
        assert walk(compile_constraint(found, choice=choice), found, seed)[0] in choice


@pytest.mark.parametrize("name", BYTE_COMPLETE)
def test_forced_tokens_agree_with_masks(name: str) -> None:
    found = tokenizer(name)
    schema = {
        "type": "object",
        "properties": {
            "the_first_name": {"enum": ["Maximilian", "Friederike"]},
            "größe in Metern": {"const": [1, {"drei vier": None}]},
        },
        "required": ["the_first_name", "größe in Metern"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    constraint = compile_constraint(found, json_schema=schema)
    at_once, one_by_one = constraint.start(), constraint.start()
    saved = 0
    while not at_once.finished:
        forced = at_once.forced()
        saved += len(forced)
        for token in forced or [int(allowed(at_once, found.vocab_size)[-1])]:
            at_once.advance(token)
            assert not forced or allowed(one_by_one, found.vocab_size).tolist() == [token]
            one_by_one.advance(token)
    assert one_by_one.finished
    assert saved > len(at_once.tokens) / 3
    tokens = [token for token in at_once.tokens if token not in found.eos_ids]
    check_valid(found.decode([*found.encode("x"), *tokens])[1:], schema)


def test_forced_text_is_tokenized_as_the_tokenizer_does() -> None:
    found = tokenizer("smollm2")
    text = "The quick brown fox jumps over the lazy dog."
    assert compile_constraint(found, choice=[text]).start().forced() == found.encode(text)


@pytest.mark.parametrize("name", ["tok_spm_bpe", "tok_llama2c", "llama-spm"])
def test_leading_space_removed_by_the_decoder(name: str) -> None:
    found = tokenizer(name)
    inside = compile_constraint(found, choice=["yes"])
    start = compile_constraint(found, choice=["yes"], at_text_start=True)
    (spaced,) = {found.encode_parts(["yes"])[0]}
    assert found.token_bytes(spaced).startswith(b" ")
    assert spaced not in allowed(inside.start(), found.vocab_size)
    matcher = start.start()
    for token in found.encode_parts(["yes"]):
        assert token in allowed(matcher, found.vocab_size)
        matcher.advance(token)
    assert matcher.may_end
    assert found.decode(list(matcher.tokens)) == "yes"


@pytest.mark.parametrize(
    "given", [True, '{"type": "object"}', {"type": "object"}], ids=["true", "text", "dict"]
)
def test_any_object(given: Any) -> None:
    found = tokenizer("smollm2")
    for seed in range(4):
        text, _ = walk(compile_constraint(found, json_schema=given), found, seed)
        assert isinstance(json.loads(text), dict)


def test_white_space_is_bounded() -> None:
    found = tokenizer("smollm2")
    matcher = compile_constraint(found, json_schema=True).start()
    for text in ("{", "\n", "  "):
        (token,) = found.encode(text)
        assert token in allowed(matcher, found.vocab_size)
        matcher.advance(token)
    (newline,) = found.encode("\n")
    assert newline not in allowed(matcher, found.vocab_size)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "maximum": 2**63 - 1, "minimum": 2**62}, 2**62, 2**63),
        ({"type": "integer", "minimum": 2**57 + 1}, 2**57 + 32, 2**57),
        ({"type": "integer", "maximum": 2**57 - 1}, 2**57 - 32, 2**57),
        ({"type": "number", "maximum": 1e300}, 5.5, 1e19),
        ({"type": "array", "uniqueItems": False}, [1, 1], 1),
        ({"type": "integer", "multipleOf": 86_400}, 172_800, 172_801),
    ],
)
def test_bounds_that_floats_do_not_hold(schema: Any, right: Any, wrong: Any) -> None:
    found = tokenizer("smollm2")
    constraint = compile_constraint(found, json_schema=schema)
    assert accepts(constraint, found, json.dumps(right))
    assert not accepts(constraint, found, json.dumps(wrong))


def accepts(constraint: Constraint, found: Tokenizer, text: str) -> bool:
    """Whether the text, written in single bytes, is an answer."""
    single = {found.token_bytes(id): id for id in range(found.vocab_size)}
    matcher = constraint.start()
    try:
        for byte in text.encode():
            matcher.advance(single[bytes([byte])])
    except ValueError:
        return False
    return matcher.may_end
