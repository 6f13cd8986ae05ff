"""Expressions, alternatives, `$keys` and dimensions."""

from dataclasses import replace
from typing import Any

import pytest

from jinfer.modelspec.config_lookup import lookup_in
from jinfer.modelspec.spec_errors import SpecError
from jinfer.modelspec.spec_values import MissingKey

from .helpers import one_line, values

CONFIG = {
    "hidden_size": 64,
    "act": "gelu_new",
    "bias": False,
    "window": None,
    "zero": 0,
    "rope": {"theta": 5.0, "deep": {"er": 7}, "null": None},
    "types": ["full", "sliding"],
}
DIMS = {"heads": 4, "hidden": "$hidden_size", "head_dim": "hidden / heads", "half": 0.5}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (3, 3),
        (True, True),
        ({"a": "$b"}, {"a": "$b"}),  # tables are read key by key, elsewhere
        ("3", 3),
        ("1e-5", 1e-5),
        ("none", None),
        ("true", True),
        ("false", False),
        ("$hidden_size", 64),
        ("$missing | $hidden_size", 64),
        ("$missing | $absent | 5", 5),
        ("$window | 9", 9),  # null counts as absent
        ("$zero | 9", 0),  # but zero and false are values
        ("$bias | true", False),
        ("$rope.theta", 5.0),
        ("$rope.deep.er", 7),
        ("$rope.missing | $rope.null | 1", 1),
        ("$hidden_size.x | 2", 2),  # a number has no keys
        ("$missing * 2 | hidden * 2", 128),
        ("head_dim", 16),
        ("hidden/heads + half", 16.5),
        ("2 ** 3 // 3 % 2", 0),
        ("-heads + +1", -3),
        ("1 if $bias else heads", 4),
        ("not $bias and heads > 3", True),
        ("$zero or heads", 4),
        ("1 < heads <= 4", True),
        ("1 < heads < 4", False),
        ("heads in [1, 4]", True),
        ("heads not in (1, 4)", False),
        ("$act == 'gelu_new'", True),
        ("'a|b' == 'a|b' | 3", True),  # no alternatives inside quotes or brackets
        ("$types[1]", "sliding"),
        ("$rope['theta']", 5.0),
        ("len($types)", 2),
        ("'sliding' in $types", True),
        ("sqrt(heads) + log(1) + floor(1.5) + ceil(1.5)", 5),
        ("min(heads, 3) + max(1, 2)", 5),
        ("has('a.weight')", True),
        ("has('b', 'a.weight')", True),
        ("has('b')", False),
        ("'$hidden_size'", "$hidden_size"),
        ("  7  ", 7),
    ],
)
def test_value(written: Any, expected: Any) -> None:
    assert values(DIMS, CONFIG, ("a.weight",)).value(written, "key") == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("silu", "silu"),
        ("none", None),
        ("true", True),
        ("$act | silu", "gelu_new"),
        ("$missing | silu", "silu"),
        ("heads", "heads"),  # a plain word stands for itself, even if a dimension has its name
        ("'silu' if $bias else 'relu'", "relu"),
    ],
)
def test_words(written: str, expected: Any) -> None:
    assert values(DIMS, CONFIG).value(written, "key", words=True) == expected


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("$missing", "config.json has no 'missing'; set it or add a default: '| ...'"),
        ("$a | $b.c", "config.json has no 'a' or 'b.c'; set it or add a default"),
        ("head", "unknown name 'head'; did you mean 'heads'?"),
        ("xyz", "unknown name 'xyz'; allowed: false, half, head_dim, heads, hidden, none"),
        ("sqr(4)", "unknown function 'sqr'; did you mean 'sqrt'? allowed: ceil, floor, has"),
        ("$hidden_size +", "cannot be read as an expression: '$hidden_size +'"),
        ("", "cannot be read as an expression"),
        ("$missing |", "cannot be read as an expression"),
        ("$", "cannot be read as an expression"),
        ("'open", "cannot be read as an expression"),
        ("1 / zero", "'1 / zero' has no value: division by zero"),
        ("sqrt(-1)", "has no value: "),
        ("sqrt()", "has no value: "),
        ("sqrt('a')", "has no value: "),
        ("len(3)", "has no value: "),
        ("heads < 'a'", "has no value: "),
        ("$types[9]", "has no value: list index out of range"),
        ("$rope['x']", "has no value: 'x'"),
        ("(-8) ** 0.5", "is not a real number"),
        ("'a' * 9", "arithmetic takes numbers only"),
        ("'%9999999999d' % 1", "arithmetic takes numbers only"),
        ("$types + $types", "arithmetic takes numbers only"),
        ("10 ** 65", "a power above 64 is not allowed"),
        ("2.0 ** (0 - 65)", "a power above 64 is not allowed"),
        ("(10 ** 60) ** 60", "is beyond what numbers may be here"),
        ("9" * 200, "is beyond what numbers may be here"),
        ("1e999", "is beyond what numbers may be here"),
        ("-1e999 * 0", "is beyond what numbers may be here"),
        ("[[1]]", "a list holds numbers and texts only"),
        ("_key0", "unknown name '_key0'"),
        ("_key7 + $zero", "unknown name '_key7'"),
        ("1" + "+1" * 3000, "is longer than 4096 characters"),
        ("1" + "+1" * 500, "is nested too deeply"),
        ("(" * 300 + "1" + ")" * 300, "cannot be read as an expression"),
        ("not " * 900 + "1", ""),
        ("-" * 4000 + "1", ""),
        ("|" * 9000, "is longer than 4096 characters"),
    ],
)
def test_value_refused(written: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        values(DIMS | {"zero": 0}, CONFIG).value(written, "some.key")
    text = one_line(caught.value)
    assert text.startswith("some.key: ")
    assert reason in text


TENSORS: dict[str, tuple[int, ...]] = {
    "up.weight": (48, 16),
    "up.bias": (48,),
    "one": (),
    "h.0.experts": (3, 24, 16),
    "h.1.experts": (5, 24, 8),
    "h.1.other": (7,),
}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("rows('up.weight')", 48),
        ("rows('up.bias')", 48),
        ("rows('up.*') // 2", 24),
        ("rows('h.*.experts')", 24),
        ("rows('down.weight') | rows('up.weight') | 1", 48),
        ("rows('down.weight') | $hidden_size", 64),
        ("$missing | rows('down.weight') | 5", 5),
        ("rows('down.weight') if has('down.weight') else none", None),
    ],
)
def test_rows(written: str, expected: int) -> None:
    assert values(DIMS, CONFIG, TENSORS).value(written, "key") == expected


def test_names_of_tensors_may_have_the_number_of_the_layer() -> None:
    layer = replace(values(DIMS, CONFIG, TENSORS), names={"i": 1})
    assert layer.value("rows('h.{i}.other')", "key") == 7
    pattern = "other if has('h.{i}.other') else plain"
    known = values(DIMS, CONFIG, TENSORS)
    words = {"other": "other", "plain": "plain"}
    chosen = [known.value(pattern, "key", names={**words, "i": i}) for i in range(2)]
    assert chosen == ["plain", "other"]
    assert known.value("has('h.{i}.other')", "key") is False  # outside of layers nothing is put in


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("rows('down')", "the checkpoint has no tensor 'down'; set it or add a default: '| ...'"),
        ("rows('a') | $b | rows('c')", "config.json has no 'b' and the checkpoint has no tensor "
         "'a' or 'c'; set it or add a default"),
        ("rows('h.1.*')", "has no value: 2 tensors match 'h.1.*', with 7, 24 rows; name one"),
        ("rows('one')", "has no value: 'one' is a single number, without rows"),
        ("rows()", "has no value: "),
        ("rows(3)", "has no value: 3 is not the name of a tensor, in quotes"),
        ("rows([1])", "has no value: [1] is not the name of a tensor, in quotes"),
        ("row('x')", "unknown function 'row'; did you mean 'rows'?"),
    ],
)  # fmt: skip
def test_rows_refused(written: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        values(DIMS, CONFIG, TENSORS).value(written, "some.key")
    assert reason in one_line(caught.value)


@pytest.mark.parametrize(
    "written",
    [
        "heads.real",
        "().__class__",
        "lambda: 1",
        "[x for x in [1]]",
        "{1: 2}",
        "{1}",
        "f'{heads}'",
        "(y := 1)",
        "min(*[1, 2])",
        "min(key=1)",
        "min(**{})",
        "(min)(1)(2)",
        "[1, 2][0:1]",
        "1j",
        "b'x'",
        "None",
        "...",
        "1 @ 2",
        "1 << 900",
        "1 & 1",
        "~1",
        "heads is none",
        "await heads",
        "(yield)",
        "__import__('os')",
        "import os",
        "x = 1",
        "1; 2",
        "1\n2",
        "\0",
    ],
)
def test_not_part_of_the_language(written: str) -> None:
    with pytest.raises(SpecError) as caught:
        values(DIMS, CONFIG).value(written, "some.key")
    assert one_line(caught.value).startswith("some.key: ")


@pytest.mark.parametrize("written", ["$act() + 1", "1 + $act @ 2", "$hidden_size[0:$act]"])
def test_error_shows_the_keys_as_written(written: str) -> None:
    with pytest.raises(SpecError, match=r"\$act") as caught:
        values({}, CONFIG).value(written, "key")
    assert "_key" not in str(caught.value)


def test_dims_are_evaluated_once_and_whole_numbers_stay_whole() -> None:
    asked = []
    evaluator = values({"a": "$x / 2", "b": "a + a", "c": "a / 4"})
    evaluator.lookup = lambda key: asked.append(key) or 6  # type: ignore[func-returns-value]
    assert (evaluator.dim("b", ""), evaluator.dim("a", "")) == (6, 3)
    assert type(evaluator.dim("a", "")) is int
    assert evaluator.dim("c", "") == 0.75
    assert asked == ["x"]
    assert evaluator.used == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ({"a": "b", "b": "c", "c": "a"}, "dims.a: is defined by itself: a -> b -> c -> a"),
        ({"a": "a"}, "dims.a: is defined by itself: a -> a"),
        ({"a": "$x | a"}, "dims.a: is defined by itself: a -> a"),
        ({"a": "bb", "b": 1}, "dims.a: unknown name 'bb'; did you mean 'b'?"),
        ({"a": "$x"}, "dims.a: config.json has no 'x'; set dims.a or add a default"),
        ({}, "asker: needs dims.a, which is not given; set it in [dims]"),
    ],
)
def test_dims_refused(dims: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        values(dims).dim("a", "asker")
    assert one_line(caught.value).startswith(reason)


def test_long_chain_of_dims_is_refused() -> None:
    dims: dict[str, Any] = {f"a{i}": f"a{i + 1}" for i in range(2000)} | {"a2000": 1}
    with pytest.raises(SpecError, match="is defined through too many others"):
        values(dims).dim("a0", "")
    assert values(dims).dim("a1990", "") == 1


@pytest.mark.parametrize("unit", ["{0} * {0}", "{0} + " * 40 + "{0}", "[{0}, {0}, {0}, {0}]"])
def test_chain_of_dims_cannot_grow_without_end(unit: str) -> None:
    dims: dict[str, Any] = {f"a{i}": unit.format(f"a{i + 1}") for i in range(60)} | {"a60": 1e9}
    with pytest.raises(SpecError, match=r"is beyond|a list holds|through too many others"):
        values(dims).dim("a0", "")


def test_lookup_in_nested_tables() -> None:
    lookup = lookup_in(CONFIG)
    assert lookup("rope.deep.er") == 7
    for key in ("missing", "window", "rope.null", "rope.theta.x", "types.9"):
        with pytest.raises(MissingKey):
            lookup(key)


def test_values_of_keys_that_match() -> None:
    known = values(config={"ids": {"IMG1": 4, "a": 5, "IMG2": 2}, "n": 1})
    assert known.value("matching($ids, 'IMG*')", "k") == [4, 2]
    assert known.value("matching($ids, 'x*')", "k") == []
    assert known.value("matching($none, '*') | 7", "k") == 7
    for wrong in ("matching($n, '*')", "matching($ids, 1)"):
        with pytest.raises(SpecError, match="matching takes a table and a pattern"):
            known.value(wrong, "k")
