"""Errors of constraints: one line with the part and its location, after a bounded time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from jinfer.api.user_errors import USER_ERRORS
from jinfer.sampling.structured import (
    Constraint,
    ConstraintError,
    compile_constraint,
    constraint,
)
from jinfer.sampling.structured.constraint import UnfinishedError
from jinfer.sampling.structured.matcher import MAX_FORCED
from tests.sampling.test_structured_masks import SMALL
from tests.sampling.vocabularies import ListTokenizer, tokenizer

SCHEMAS: list[tuple[Any, str]] = [
    (False, "json_schema: false allows no answer at all"),
    ("{bad", "json_schema is not JSON: Expecting property name"),
    ([1], "json_schema must be an object, not [1]"),
    ({"const": {1, 2}}, "json_schema is not JSON: Object of type set"),
    ({"const": float("nan")}, "json_schema is not JSON: Out of range float"),
    ({"properties": {"a/b": {"not": {}}}}, "at /properties/a~1b: not is not supported"),
    ({"items": {"uniqueItems": True}}, "at /items: uniqueItems is not supported"),
    ({"if": {}, "then": {}}, "json_schema: if is not supported"),
    ({"dependentRequired": {}}, "json_schema: dependentRequired is not supported"),
    ({"anyOf": [{}, {"contains": 1}]}, "at /anyOf/1: contains is not supported"),
    ({"type": "strin"}, 'type cannot be "strin"; use one of array, boolean'),
    ({"type": [{}]}, "type cannot be {}"),
    ({"items": 5}, "at /items: a schema must be an object, true or false, not 5"),
    ({"properties": []}, "properties must be an object"),
    ({"required": "a"}, "required must be a list"),
    ({"required": [1]}, "required must be a list of names"),
    ({"enum": []}, "enum is empty, which allows no answer"),
    ({"minItems": -1}, "minItems must be a whole number from 0, not -1"),
    ({"maxLength": "3"}, 'maxLength must be a whole number from 0, not "3"'),
    ({"minimum": True}, "minimum must be a number, not true"),
    ({"minimum": 2**64}, "minimum must be at most 9223372036854774784"),
    ({"maximum": -(2**64)}, "maximum must be at least -9223372036854774784"),
    ({"multipleOf": 1_000_003}, "multipleOf must be above 0, and at most 100000"),
    ({"multipleOf": 0}, "multipleOf must be above 0"),
    ({"$ref": "http://a.example/b"}, "$ref must point into the schema itself (#/…), not to"),
    ({"$ref": 1}, "$ref must be a text"),
    ({"properties": {"q": {"$ref": "#/$defs/no"}}}, "at /properties/q: $ref to #/$defs/no, which"),
    (
        {"$defs": {"k": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "$ref": "#/$defs/k"},
        "at /$defs/k: oneOf is supported where no two branches can both fit",
    ),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "no answer at all: minimum (5) is greater"),
    (
        {
            "type": "array",
            "items": {"type": "string", "minLength": 5, "maxLength": 2},
            "minItems": 1,
        },
        "at /items: allows no answer at all: minLength (5) is greater than maxLength (2)",
    ),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "required property 'z'"),
    (
        {"properties": {"x": {"type": "string", "format": "iri"}}},
        "at /properties/x: format iri is not supported",
    ),
    (
        {"properties": {"x": {"type": "string", "pattern": "(?=a)b"}}},
        "at /properties/x: pattern: look-around, including look-ahead and look-behind, is not",
    ),
    (
        {
            "properties": {"x": {"type": "string", "pattern": "^a$", "minLength": 3}},
        }
        | {"type": "object", "required": ["x"]},
        "at /properties/x: allows no answer at all: no text fits pattern, format, minLength",
    ),
    ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties /a/ and /b/ are not disjoint"),
    (
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        "minProperties and maxProperties are supported where every name in properties is required",
    ),
    ({"type": "object", "minProperties": 2}, "minProperties is supported where all properties but"),
    (
        {"patternProperties": {f"^p{n}_": {} for n in range(101)}},
        "patternProperties has more than 100 patterns",
    ),
    ({"const": 2**60 + 1}, "const has 1152921504606846977, which no 64-bit float holds exactly"),
    ({"enum": [[2**64]]}, "enum has 18446744073709551616, which no 64-bit float holds exactly"),
    ('{"const": 1e400}', "const has a number beyond all 64-bit floats"),
    (
        {"properties": {"a": {"const": "\u0001"}}},
        "additionalProperties must be false in a schema whose const, enum or pattern needs control",
    ),
    (
        {
            "allOf": [
                {"patternProperties": {"^a": {}}},
                {"patternProperties": {"^[^a]|^$": {}}},
            ]
        },
        "patternProperties of several objects that match every name together are not supported",
    ),
    (
        {"properties": {"a\nb": {"patternProperties": {"[0-9]{2,}": {"format": "iri"}}}}},
        r"at /properties/a\nb/patternProperties/[0-9]{2,}: format iri is not supported",
    ),
    (
        {"type": "object", "properties": {"a": {"type": "null", "$ref": "#/$defs/no"}}},
        "at /properties/a: $ref to #/$defs/no, which the schema does not have",
    ),
    ({"$schema": "http://a.example/b"}, "$schema or $ref names http://a.example/b, which is not"),
    ({"x-guidance": {"foo": 1}, "type": "null"}, "x-guidance has no option foo"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no answer ever"),
    ({"$ref": "#"}, "no answer ever ends: a required part contains itself through $ref"),
    (
        {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}, "minItems": 1}}}
        | {"$ref": "#/$defs/l"},
        "no answer ever ends",
    ),
]
TEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "one of json_schema, regex, choice and grammar must be given, not none"),
    ({"regex": "a", "choice": ["b"]}, "must be given, not regex, choice"),
    ({"regex": 5}, "regex must be a text, not 5"),
    ({"regex": "(a"}, "regex: unclosed group at '(a'"),
    ({"regex": "x(?=a)b"}, "regex: look-around, including look-ahead and look-behind, is not"),
    ({"regex": r"(a)\1"}, r"regex: backreferences are not supported at '\\1'"),
    ({"regex": r"[^\s\S]"}, "regex: allows no answer at all"),
    ({"regex": "a\\"}, "ends in a backslash that escapes nothing"),
    ({"regex": "(?x)a\nb"}, "the flag x (comments) is supported in one line only"),
    ({"regex": "\ud800"}, "regex has half a surrogate pair"),
    ({"choice": []}, "choice must be a list of one text or more, not []"),
    ({"choice": "yes"}, "choice must be a list of one text or more, not 'yes'"),
    ({"choice": ["a", 1]}, "choice must be a list of one text or more"),
    ({"grammar": " "}, "grammar is empty"),
    ({"grammar": "start: foo"}, 'grammar: line 1, column 8: unknown name: "foo"'),
    ({"grammar": 'a: "b"\nstart: /(a/'}, "grammar: line 2, column 8: invalid regex"),
    ({"grammar": 'foo: "a"'}, "grammar: no start rule found"),
    ({"grammar": 'start: start "a"'}, "grammar: allows no answer at all"),
    ({"regex": "(x|y)[a&&b]"}, "regex: allows no answer at all"),
    ({"grammar": 'start: "x" A\nA: /a/ & /b/'}, "grammar: allows no answer at all"),
    ({"grammar": "start: /[xy]/ A\nA: /a/ & /b/"}, "an alternative of the rule start has no end"),
    ({"grammar": "start: /[xy]/ b\nb: /c/ b | ([/d/] /[^\\s\\S]/)"}, "alternative of the rule"),
    ({"grammar": 'start: /[xy]/ b?\nb: "c" b'}, "an alternative of the rule b has no end"),
    ({"grammar": "root ::= [ab] root"}, "an alternative of the rule start has no end"),
    ({"grammar": 'root ::= "a'}, "grammar (GBNF): Unexpected end of input"),
    ({"grammar": "start: <|nope|>"}, 'unknown special token: "<|nope|>"'),
    ({"grammar": '{"grammars": []}'}, "grammar: line 1, column 1"),
    ({"grammar": 'start: %json {"not": {}}'}, "json_schema: not is not supported"),
]


def message_of(**given: Any) -> str:
    with pytest.raises(ConstraintError) as caught:
        compile_constraint(SMALL, **given)
    assert isinstance(caught.value, USER_ERRORS)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize(("schema", "part"), SCHEMAS, ids=[part[:40] for _, part in SCHEMAS])
def test_schemas(schema: Any, part: str) -> None:
    assert part in message_of(json_schema=schema)


@pytest.mark.parametrize(("given", "part"), TEXTS, ids=[part[:40] for _, part in TEXTS])
def test_texts(given: dict[str, Any], part: str) -> None:
    assert part in message_of(**given)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def searches(count: int, shape: str) -> list[str]:
    return [shape % f"(a|b)*a(a|b){{{number}}}" for number in range(count)]


HOSTILE: dict[str, dict[str, Any]] = {
    "a million bytes without a choice": {"regex": "(a{1000}){1000}"},
    "any number of them": {"regex": "a{30000000}"},
    "some of them": {"regex": "(k{300}){300}"},
    "a long constant": {"json_schema": {"const": "x" * 100_000}},
    "nested": {"json_schema": nested(500)},
    "nested text": {"json_schema": "[" * 100_000},
    "nested regex": {"regex": "(" * 100_000 + ")" * 100_000},
    "nested grammar": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "nested GBNF": {"grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "enum of a million": {"json_schema": {"enum": [f"value {n}" for n in range(1_000_000)]}},
    "enum of 60,000": {"json_schema": {"enum": [f"a long value {n}" for n in range(60_000)]}},
    "properties": {"json_schema": {"properties": {f"p{n}": {} for n in range(10_000)}}},
    "objects of properties": {
        "json_schema": {
            "properties": {
                f"q{m}": {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}
                for m in range(20)
            }
        }
    },
    "tuple": {"json_schema": {"type": "array", "prefixItems": [{}] * 100_000}},
    "patterns": {
        "json_schema": {
            "allOf": [{"type": "string", "pattern": text} for text in searches(20, "%s")]
        }
    },
    "divisors": {
        "json_schema": {
            "properties": {
                f"p{n}": {"type": "integer", "multipleOf": 99_001 + 2 * n} for n in range(200)
            },
            "type": "object",
        }
    },
    "combinations": {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{n}": {"const": v}}} for v in (1, 2)]}
                for n in range(20)
            ]
        }
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_in_time(name: str) -> None:
    before = time.process_time()
    message_of(**HOSTILE[name])
    assert time.process_time() - before < 10  # of this process; another one is stopped after 2 s


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {"type": "array", "minItems": 10**9, "items": {"minItems": 10**9}}},
        {"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**6}},
        {"json_schema": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(a|b)*a(a|b){60}"},
        {"grammar": 'start: ((("a" | "b"){0,1000}){0,1000}){0,1000}'},
        {"choice": [f"value {n} of many" for n in range(40_000)]},
        {"json_schema": nested(30)},
    ],
    ids=lambda given: str(given)[:50],
)
def test_great_counts_are_kept_without_delay(given: dict[str, Any]) -> None:
    before = time.process_time()
    matcher = compile_constraint(tokenizer("tok_gpt2"), **given).start()
    words = np.zeros(19, np.uint32)
    for _ in range(8):
        matcher.mask(words)
        bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        matcher.advance(int(bits[-1]))
        if matcher.finished:
            break
    assert time.process_time() - before < 10


def test_forced_text_is_bounded_within_an_answer() -> None:
    """As many bytes as an answer may have to have at once, and one more after a choice."""
    words = np.zeros(-(-SMALL.vocab_size // 32), np.uint32)
    given = f"[bc]a{{{MAX_FORCED}}}"
    matcher = compile_constraint(SMALL, regex=given).start()
    matcher.mask(words)
    matcher.advance(ord("b"))
    assert sum(len(SMALL.tokens[id]) for id in matcher.forced()) >= MAX_FORCED - 1
    matcher = compile_constraint(SMALL, regex=given.replace("a{", "aa{")).start()
    matcher.advance(ord("b"))
    assert matcher.forced() == []
    for _ in range(2):
        with pytest.raises(ConstraintError, match=f"regex: after 1 tokens: more than {MAX_FORCED}"):
            matcher.mask(words)


def test_reason_of_a_rejected_constraint_is_cached() -> None:
    kept, made = constraint._Cache(), list[str]()

    def refuses(error: type[ConstraintError]) -> Constraint:
        made.append("")
        raise error("regex: no")

    for error, times in ((ConstraintError, 1), (UnfinishedError, 3)):
        made.clear()
        for _ in range(3):
            with pytest.raises(ConstraintError, match="regex: no"):
                kept.get(error, lambda error=error: refuses(error))  # type: ignore[misc]
        assert len(made) == times


@pytest.mark.parametrize("name", ["tok_spm_unigram_t5", "tok_m2m100", "tok_wordpiece"])
def test_a_vocabulary_that_cannot_write_json(name: str) -> None:
    found = tokenizer(name)
    with pytest.raises(ConstraintError, match="json_schema: "):
        compile_constraint(found, json_schema=True)
    with pytest.raises(ConstraintError, match=r"no tokens to write an answer|no answer at all"):
        compile_constraint(found, choice=["{x}", "#1"])


@pytest.mark.parametrize("name", ["tok_spm_unigram_t5", "tok_m2m100"])
def test_vocabulary_without_bytes_writes_available_text(name: str) -> None:
    found = tokenizer(name)
    matcher = compile_constraint(found, choice=["name", "the"], at_text_start=True).start()
    for token in found.encode_parts(["the"]):
        matcher.advance(token)
    assert matcher.may_end
    assert found.decode(list(matcher.tokens)) == "the"


def test_a_missing_byte_is_an_error_when_it_is_needed() -> None:
    """A quote opens the text, and none closes it: an answer could never end."""
    tokens = [bytes([byte]) for byte in range(0x20, 0x7F) if byte != ord('"')]
    found = ListTokenizer([*tokens, b'{"', b""], {"<|end|>": len(tokens) + 1}, (len(tokens) + 1,))
    with pytest.raises(ConstraintError, match="no tokens to write an answer with"):
        compile_constraint(found, grammar=r'start: "{\"" /[a-z]+/ "\""')
    matcher = compile_constraint(found, grammar=r'start: "{\"" /[a-z]+/ ("\"x" | "!")').start()
    matcher.advance(len(tokens))
    assert not matcher.may_end


def test_a_dead_end_is_an_error() -> None:
    found = ListTokenizer([b"a", b"ab", b"bc", b""], {"<|end|>": 3}, (3,))
    matcher = compile_constraint(found, choice=["abc"]).start()
    matcher.advance(1)
    with pytest.raises(ConstraintError, match="choice: after 1 tokens: no token of the vocabulary"):
        matcher.mask(np.zeros(1, np.uint32))
