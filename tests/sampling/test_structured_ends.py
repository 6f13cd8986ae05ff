"""From wherever a grammar lets an answer come, it has an end, and the answer is valid there.

Schemas of the JSON Schema test suite and mixed ones are followed by tokens drawn by chance, or
refused before the first token by the name of a keyword.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from jinfer.sampling.structured import ConstraintError, compile_constraint
from tests.sampling.schema_mixtures import mixed_schema
from tests.sampling.schema_outcomes import VALIDATORS, accepts, outcome, suite, validate, walk
from tests.sampling.test_structured_masks import SMALL
from tests.sampling.vocabularies import tokenizer

KEYWORDS = {
    *("no answer", "$ref", "$schema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
    *("$recursiveAnchor", "oneOf", "not", "if", "then", "else", "dependencies", "contains"),
    *("minContains", "maxContains", "dependentRequired", "dependentSchemas", "propertyNames"),
    *("uniqueItems", "unevaluatedItems", "unevaluatedProperties", "multipleOf", "format"),
    *("patternProperties", "minProperties", "additionalProperties"),
}
SCORE = {
    "type": "object",
    "properties": {"score": {"type": "integer"}},
    "required": ["score"],
    "additionalProperties": False,
    "patternProperties": {"^score$": {"type": "integer"}},
}
SUITE_SHARE = 30


def soak(values: range, start: int = 0) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.soak) for value in values[start:]]


@pytest.mark.parametrize("block", [0, *soak(range(40), 1)])
def test_mixed_schemas_are_followed_to_a_valid_end_or_refused(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        found = outcome(SMALL, mixed_schema(seed), "draft2020-12", walks=2)
        assert found == "followed" or found in KEYWORDS, f"schema {seed}"


@pytest.mark.parametrize("block", [0, *soak(range(20), 1)])
def test_mixed_schemas_with_a_real_vocabulary(block: int) -> None:
    found = tokenizer("smollm2")
    for seed in range(block * 12, block * 12 + 12):
        outcome(found, mixed_schema(seed), "draft2020-12", walks=1)


@pytest.mark.parametrize("share", [0, *soak(range(SUITE_SHARE), 1)])
@pytest.mark.parametrize("draft", VALIDATORS)
def test_suite_is_followed_to_a_valid_end_or_refused(draft: str, share: int) -> None:
    for name, schema, valid, invalid in suite()[draft][share::SUITE_SHARE]:
        found = outcome(SMALL, schema, draft, walks=2)
        assert found in KEYWORDS | {"followed"}, name
        if found == "followed":
            constraint = compile_constraint(SMALL, json_schema=schema)
            assert not any(accepts(constraint, json.dumps(one)) for one in invalid), name
        endless = "infinite" in name
        assert found != "no answer" or not valid or endless, name


ENDING: dict[str, dict[str, Any]] = {
    "a pattern that matches a property's name alone": SCORE,
    "a pattern of text": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}},
        "required": ["name"],
        "additionalProperties": False,
        "patternProperties": {"^name$": {"minLength": 2}},
    },
    "a pattern of several names": {
        "type": "object",
        "properties": {"a": {}, "b": {"enum": [1, 2]}, "c": {}},
        "required": ["b"],
        "additionalProperties": False,
        "patternProperties": {"^(a|b)$": {"enum": [2, 3]}, "^[c]$": {"const": None}},
    },
    "patterns that leave one name to additionalProperties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a", ""],
        "patternProperties": {".": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    },
    "patterns that leave no name": {
        "type": "object",
        "patternProperties": {".*": False},
        "additionalProperties": {"type": "boolean"},
    },
    "a merged pattern": {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
            {"patternProperties": {"^a$": {"enum": [2, 3]}}, "additionalProperties": False},
        ]
    },
    "an optional part that never ends": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/endless"}, "b": {"const": 1}},
        "additionalProperties": False,
        "$defs": {
            "endless": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/endless"}},
                "required": ["x"],
            }
        },
    },
    "an optional number that no multiple is in": {
        "type": "object",
        "properties": {"a": {"type": "number", "minimum": 1, "maximum": 2}, "b": {}},
        "allOf": [{"properties": {"a": {"multipleOf": 5}, "b": {"const": 1}}}],
        "additionalProperties": False,
    },
    "text of control characters": {
        "type": "array",
        "items": {"pattern": "^\\x01$", "type": "string"},
    },
}


@pytest.mark.parametrize("name", ENDING)
def test_answers_have_an_end_at_every_place(name: str) -> None:
    constraint = compile_constraint(SMALL, json_schema=ENDING[name])
    for seed in range(12):
        validate(walk(constraint, SMALL, seed), ENDING[name], "draft2020-12")


def test_a_pattern_of_a_name_leaves_no_comma_after_it() -> None:
    constraint = compile_constraint(SMALL, json_schema=SCORE)
    assert accepts(constraint, '{"score": 0}')
    matcher = constraint.start()
    for byte in b'{"score": 0':
        matcher.advance(byte)
    with pytest.raises(ConstraintError, match="is not allowed here"):
        matcher.advance(ord(","))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            r'{"a": 1, "b": "x"}',
            r'{"a": 1, "\u0061": "x"}',
        ),
        ({"patternProperties": {"^a": {"type": "null"}}}, r'{"a": null}', r'{"\u0061": 1}'),
        ({"prefixItems": [{"const": 1}], "additionalItems": True}, "[1, 2]", "[2]"),
        (
            {"items": [{"const": 1}], "anyOf": [{"type": "array"}], "additionalItems": False},
            "[1]",
            "[1, 1]",
        ),
        ({"minimum": 3, "exclusiveMinimum": True}, "4", "3"),
        ({"minimum": 3, "exclusiveMinimum": False}, "3", "2"),
        ({"maxItems": 1.0}, "[1]", "[1, 1]"),
        ({"const": "\u0001"}, r'"\u0001"', '"a"'),
        ({"$ref": "#/$defs/a[b]", "$defs": {"a[b]": {"type": "null"}}}, "null", "1"),
    ],
    ids=str,
)
def test_valid_answers_of_schemas(schema: Any, right: str, wrong: str) -> None:
    constraint = compile_constraint(SMALL, json_schema=schema)
    assert accepts(constraint, right)
    assert not accepts(constraint, wrong)


def test_schemas_within_grammars_are_prepared_too() -> None:
    grammar = f"start: /[xy]/ %json {json.dumps(SCORE)}"
    constraint = compile_constraint(SMALL, grammar=grammar)
    for seed in range(6):
        validate(walk(constraint, SMALL, seed)[1:], SCORE, "draft2020-12")
