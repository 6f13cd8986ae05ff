"""Wiring formulas: what they compute, and everything that they refuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jinfer.modelspec.block import ArrayKind
from jinfer.modelspec.formula import Formula, compile_formula
from jinfer.modelspec.spec_errors import SpecError

from .helpers import PATH, one_line

INPUTS: dict[str, ArrayKind] = {
    "x": "vectors", "tokens": "indices", "positions": "indices", "encoded": "encoded",
}  # fmt: skip
MODULES: dict[str, tuple[ArrayKind, ...]] = {
    "attn": ("vectors",), "ffn": ("vectors",), "embed": ("indices",),
    "cross": ("vectors", "encoded"),
}  # fmt: skip
CONSTANTS = {"hidden": 64, "layers": 4, "scale": 0.5, "zero": 0, "word": "silu"}


def compiled(text: Any, **more: Any) -> Formula:
    return compile_formula(
        text,
        path=PATH,
        key="decoder.layer",
        inputs=INPUTS,
        modules=MODULES,
        argument_kinds=MODULES.__getitem__,
        constant=CONSTANTS.get,
        sizes=CONSTANTS,
        **more,
    )


def run(text: str) -> tuple[Any, dict[str, Any]]:
    """A formula on numbers: attn adds 10, ffn multiplies by 2, embed negates, cross multiplies."""
    effect: dict[str, Callable[..., Any]] = {
        "attn": lambda x: x + 10, "ffn": lambda x: x * 2, "embed": lambda x: -x,
        "cross": lambda x, encoded: x * encoded,
    }  # fmt: skip
    inputs = {"x": 3.0, "tokens": 5, "positions": 7, "encoded": 100}
    return compiled(text).run(inputs, lambda name, arguments: effect[name](*arguments))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x", 3),
        ("attn(x)", 13),
        ("x = x + attn(x)\nx = x + ffn(x)", 48),
        ("n = ffn(x)\nx = x + attn(n) + ffn(n)", 31),
        ("x = ffn(x)\nattn(x)", 16),
        ("y = ffn(x)\nx = x - y", -3),
        ("embed(tokens) * sqrt(hidden) + embed(positions)", -47),
        ("x + scale / sqrt(layers) * attn(x)", 6.25),
        ("-x + 2 ** 3 - (7 // 2) * (5 % 3)", -1),
        ("x * min(layers, 2) / max(1, 2)", 3),
        ("\n   x = attn(x)\n      x = ffn(x)  # a remark\n\n", 26),
        ("1 / x * +x", 1),
        ("x + cross(attn(x), encoded)", 1303),
    ],
)
def test_value(text: str, value: float) -> None:
    assert run(text)[0] == value


def test_parts_of_vectors() -> None:
    formula = compiled("n = x[:hidden / 16]\nx = n + x[hidden / 16 :] * attn(x[-layers:])")
    value, _ = formula.run({"x": np.arange(8.0)}, lambda _, given: given[0] + 10)
    assert value.tolist() == [0 + 4 * 14, 1 + 5 * 15, 2 + 6 * 16, 3 + 7 * 17]


def test_names_of_formulas_before() -> None:
    formula = compiled("y = n + hidden * e\nn = attn(y)\nx + n", before=("e", "hidden", "n", "u"))
    assert formula.takes == ("e", "n")  # and a dimension stays one
    assert formula.assigned == {"y", "n"}
    assert dict(formula.constants) == {"hidden": 64}


def test_names_assigned_are_returned() -> None:
    value, names = run("n = ffn(x)\nx = attn(n)")
    assert value == names["x"] == 16
    assert names["n"] == 6


def test_modules_are_listed_in_order_of_use_and_constants_by_name() -> None:
    formula = compiled("x = ffn(x) * scale\nx + attn(ffn(x)) / hidden")
    assert formula.calls == ("ffn", "attn")
    assert dict(formula.constants) == {"scale": 0.5, "hidden": 64}


def test_an_assigned_name_hides_a_dimension() -> None:
    formula = compiled("hidden = attn(x)\nx = x + hidden")
    assert formula.constants == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is missing; write the formula"),
        (5, "5 is no formula"),
        (["x"], "['x'] is no formula"),
        ("", "is empty"),
        ("  \n ", "is empty"),
        ("# nothing", "is empty"),
        ("x = ", "cannot be read as an expression: 'x ='"),
        ("attn(x", "cannot be read as an expression"),
        ("y = attn(x)\nx = x + n", "unknown name 'n'; allowed: encoded, positions, tokens"),
        ("x + token", "unknown name 'token'; did you mean 'tokens'?"),
        ("x = word", "unknown name 'word'"),
        ("x * gamma", "positions, tokens, x; of [dims]: hidden, layers, scale, word, zero"),
        ("x * scael", "unknown name 'scael'; did you mean 'scale'? allowed: encoded"),
        ("tanh(x)", 'make it a module, { kind = "activation", function = "tanh" }'),
        ("attnn(x)", "calls 'attnn'; did you mean 'attn'? allowed: attn, ceil, cross, embed"),
        ("x(x)", "calls 'x'"),
        ("attn()", "attn takes 1 argument, not 0"),
        ("attn(x, x)", "attn takes 1 argument, not 2"),
        ("attn(tokens)", "attn takes vectors such as x, not tokens"),
        ("attn(3)", "attn takes vectors such as x, not 3"),
        ("embed(x)", "embed takes tokens or positions, not x"),
        ("embed(attn(x))", "embed takes tokens or positions, not attn(...)"),
        ("attn + x", "unknown name 'attn'"),
        ("y = attn(x)", "ends by assigning y: end it with an expression, or assign x"),
        ("x = x\ny = attn(x)", "ends by assigning y"),
        ("tokens", "has no vectors as its value"),
        ("hidden * 2", "has no vectors as its value"),
        ("x = 3", "has no vectors as its value"),
        ("cross(x)", "cross takes 2 arguments, not 1"),
        ("cross(encoded, x)", "cross takes vectors such as x, not encoded"),
        ("cross(x, x)", "cross takes encoded, not x"),
        ("attn(encoded)", "attn takes vectors such as x, not encoded"),
        ("encoded", "has no vectors as its value"),
        ("x + encoded", "encoded: arithmetic takes vectors and numbers only"),
        ("x + tokens", "tokens: arithmetic takes vectors and numbers only"),
        ("x * -positions", "positions: arithmetic takes vectors and numbers only"),
        ("x / (1 / zero)", "has no value: division by zero"),
        ("x * sqrt(0 - 1)", "has no value: "),
        ("x * log(zero)", "has no value: "),
        ("x * sqrt(1, 2)", "has no value: "),
        ("x * len(3)", "has no value: "),
        ("sqrt(x)", "sqrt takes numbers, not arrays"),
        ("max(attn(x), x)", "max takes numbers, not arrays"),
        ("x ** 2", "//, % and ** take numbers only, not arrays"),
        ("2 ** x", "//, % and ** take numbers only, not arrays"),
        ("x // 2", "//, % and ** take numbers only, not arrays"),
        ("x % 2", "//, % and ** take numbers only, not arrays"),
        ("x * (2 ** 9999)", "a power above 64 is not allowed"),
        ("x * ((((10**64)**64)**64)**64)", "is beyond what numbers may be here"),
        ("x * 1e999", "is beyond what numbers may be here"),
        ("x.T", "'x.T' is not allowed in this expression"),
        ("x.__class__.__mro__", "is not allowed"),
        ("(lambda: x)()", ""),
        ("[x for x in x]", "is not allowed"),
        ("x[0]", "'x[0]' is not allowed in this expression; a part of a vector is x[begin:end]"),
        ("x[::2]", "'x[::2]' is not allowed"),
        ("x[: 3 / 2]", "1.5 is not a whole number, as a slice needs"),
        ("x[: x]", "x is not a whole number, as a slice needs"),
        ("tokens[:2]", "tokens: arithmetic takes vectors and numbers only"),
        ("attn[0](x)", "a call is name(argument, ...)"),
        ("attn.q(x)", "a call is name(argument, ...)"),
        ("attn(x)(x)", "a call is name(argument, ...)"),
        ("attn(x=x)", "a call is name(argument, ...)"),
        ("attn(*x)", "is not allowed"),
        ("attn(**x)", "a call is name(argument, ...)"),
        ("'x'", "'x' is not a number"),
        ("x + None", "None is not a number"),
        ("x + 1j", "is not a number"),
        ("x if hidden else x", "is not allowed"),
        ("x and x", "is not allowed"),
        ("not x", "is not allowed"),
        ("x < x", "is not allowed"),
        ("x, x", "is not allowed"),
        ("{x}", "is not allowed"),
        ("f'{x}'", "is not allowed"),
        ("x @ x", "'x @ x' is not allowed"),
        ("x << 3", "'x << 3' is not allowed"),
        ("~x", "'~x' is not allowed"),
        ("(y := x)", "is not allowed"),
        ("import os", "has a line (Import) that is neither"),
        ("from os import system", "has a line (ImportFrom) that is neither"),
        ("x += attn(x)", "has a line (AugAssign) that is neither"),
        ("x = y = attn(x)", "has a line (Assign) that is neither"),
        ("x, y = attn(x)", "has a line (Assign) that is neither"),
        ("x.y = attn(x)", "has a line (Assign) that is neither"),
        ("x: int = attn(x)", "has a line (AnnAssign) that is neither"),
        ("for y in x: y", "has a line (For) that is neither"),
        ("def f(): x", "has a line (FunctionDef) that is neither"),
        ("del x", "has a line (Delete) that is neither"),
        ("return x", "has a line (Return) that is neither"),
        ("pass", "has a line (Pass) that is neither"),
        ("yield x", ""),
        ("await x", ""),
        ("__import__('os')", "is not a number"),
        ("print(x)", "calls 'print'"),
        ("x" + " + x" * 2000, "is longer than 4096 characters"),
        ("x" + " + x" * 500, "is nested too deeply"),
        ("attn(" * 150 + "x" + ")" * 150, "is nested too deeply"),
        ("(" * 1000 + "x" + ")" * 1000, "cannot be read"),
        ("-" * 4000 + "x", ""),
        ("\0", "cannot be read"),
        ("x = '\\d'", "is not a number"),
        ("x\\", "cannot be read"),
    ],
)
def test_formula_refused(text: Any, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        compiled(text)
    message = one_line(caught.value)
    assert message.startswith("decoder.layer: ")
    assert reason in message
