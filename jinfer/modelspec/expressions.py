"""Expression language: the safe subset of Python's expressions that specifications use.

A parsed expression is a tree of the node types listed here and nothing else: names, numbers,
strings, lists, indexing, slices in formulas, arithmetic, comparisons, `and`/`or`/`not`, `a if c
else b`, and calls of functions by name. There are no attributes, keywords, lambdas or
comprehensions, so an expression can reach only what its scope provides. Its length, depth and
numbers are bounded, so its cost is too.
"""

from __future__ import annotations

import ast
import keyword
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, Protocol

from jinfer.modelspec.spec_errors import show_value

MAX_LENGTH = 4096  # characters
MAX_DEPTH = 64
MAX_NUMBER = 1e100
MAX_POWER = 64.0

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}

Nodes = tuple[type[ast.AST], ...]
# A formula's lines: the name assigned or "", and the expression.
Statements = tuple[tuple[str, ast.expr], ...]
ARITHMETIC: Nodes = (
    *(ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant),
    *(ast.Load, ast.USub, ast.UAdd),
    *_ARITHMETIC,
)
FORMULA: Nodes = (*ARITHMETIC, ast.Subscript, ast.Slice)
ALL: Nodes = (
    *ARITHMETIC,
    *(ast.Compare, ast.BoolOp, ast.IfExp, ast.List, ast.Tuple, ast.Subscript),
    *(ast.Not, ast.And, ast.Or),
    *_COMPARE,
)
# Python keywords that are neither names nor operators here.
_RESERVED = {*keyword.kwlist} - {"and", "or", "not", "in", "if", "else", "True", "False", "None"}
# Nodes without text of their own.
_OPERATORS = (ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "log": math.log,
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "len": len,
}


class ExpressionError(ValueError):
    """An expression outside the subset, or without a value. The message is one clause."""


class Scope(Protocol):
    """Resolves the names and calls of an expression."""

    def name(self, name: str) -> Any: ...

    def call(self, name: str, arguments: list[Any]) -> Any: ...


@lru_cache(maxsize=1024)
def parse(text: str) -> ast.expr:
    """Parses one expression. Raises `ExpressionError`."""
    tree = syntax_tree(text.strip(), "eval").body
    check(tree, ALL)
    return tree


def syntax_tree(text: str, mode: Literal["eval", "exec"]) -> Any:
    """Python's syntax tree of `text`, unchecked. Raises `ExpressionError`."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"is longer than {MAX_LENGTH} characters")
    try:
        with warnings.catch_warnings(action="ignore"):  # SyntaxWarnings
            return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f"cannot be read as an expression: {show_value(text)}"
        if reserved := sorted(set(re.findall(r"\w+", text)) & _RESERVED):
            reason += f"; {reserved[0]!r} can only stand in quotes"
        raise ExpressionError(reason) from error


def check(tree: ast.AST, allowed: Nodes) -> None:
    """Raises `ExpressionError` unless every node of `tree` is allowed and the depth is bounded."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ExpressionError("is nested too deeply")
    for node in ast.walk(tree):
        if not isinstance(node, _OPERATORS):
            _check_node(node, allowed)


def _check_node(node: ast.AST, allowed: Nodes) -> None:
    operators = [c for c in ast.iter_child_nodes(node) if isinstance(c, _OPERATORS)]
    if not all(isinstance(part, allowed) for part in (node, *operators)):
        raise ExpressionError(f"{show_value(ast.unparse(node))} is not allowed in this expression")
    if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name)):
        raise ExpressionError(f"{show_value(ast.unparse(node))}: a call is name(argument, ...)")
    if isinstance(node, ast.Subscript) and allowed is FORMULA and not _is_slice(node.slice):
        reason = f"{show_value(ast.unparse(node))} is not allowed in this expression"
        raise ExpressionError(f"{reason}; a part of a vector is x[begin:end]")
    if isinstance(node, ast.Constant):
        text = str in _constant_types(allowed)
        if not isinstance(node.value, _constant_types(allowed)):
            raise ExpressionError(f"{show_value(node.value)} is not a number{' or a text' * text}")
        _bounded(node.value)


def _is_slice(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.step is None


def _constant_types(allowed: Nodes) -> tuple[type, ...]:
    return (int, float) if allowed is FORMULA else (int, float, str)


def calls(tree: ast.AST) -> Iterator[str]:
    """The names that an expression calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def evaluate(node: ast.expr, scope: Scope) -> Any:
    """The value of a checked expression in `scope`.

    Raises:
        ExpressionError: a value is out of bounds or of the wrong type.
        TypeError, ArithmeticError, LookupError, ValueError: as raised by operators and functions.
    """
    return _bounded(_evaluate(node, scope))


def _evaluate(node: ast.expr, scope: Scope) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return scope.name(node.id)
        case ast.Call(func=ast.Name(id=name)):
            return scope.call(name, [evaluate(argument, scope) for argument in node.args])
        case ast.BinOp():
            return _binary(node.op, evaluate(node.left, scope), evaluate(node.right, scope))
        case ast.UnaryOp():
            return _UNARY[type(node.op)](evaluate(node.operand, scope))
        case ast.IfExp():
            return evaluate(node.body if evaluate(node.test, scope) else node.orelse, scope)
        case ast.BoolOp():
            return _boolean(node, scope)
        case ast.Compare():
            return _comparison(node, scope)
        case ast.List() | ast.Tuple():
            return _list([evaluate(element, scope) for element in node.elts])
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            ends = (None if end is None else _whole(evaluate(end, scope)) for end in (lower, upper))
            return evaluate(node.value, scope)[..., slice(*ends)]
        case ast.Subscript():
            return evaluate(node.value, scope)[evaluate(node.slice, scope)]
    raise ExpressionError(f"{show_value(ast.unparse(node))} is not allowed in this expression")


def _bounded(value: Any) -> Any:
    """`value`, unless it is NaN or too large."""
    if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise ExpressionError(f"{show_value(value)} is beyond what numbers may be here")
    return value


def _whole(value: Any) -> int:
    """An end of a slice."""
    if not isinstance(value, int | float) or not float(value).is_integer():
        raise ExpressionError(f"{show_value(value)} is not a whole number, as a slice needs")
    return int(value)


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    # Multiplying or adding strings and lists, or formatting, could grow without bound.
    if any(isinstance(operand, str | list | tuple | Mapping) for operand in (left, right)):
        raise ExpressionError("arithmetic takes numbers only")
    if isinstance(op, ast.Pow) and isinstance(right, int | float) and abs(right) > MAX_POWER:
        raise ExpressionError(f"a power above {MAX_POWER:.0f} is not allowed")
    value = _ARITHMETIC[type(op)](left, right)
    if isinstance(value, complex):
        raise ExpressionError(f"{show_value(left)} ** {show_value(right)} is not a real number")
    return value


def _boolean(node: ast.BoolOp, scope: Scope) -> Any:
    value: Any = None
    for operand in node.values:
        value = evaluate(operand, scope)
        if bool(value) != isinstance(node.op, ast.And):
            return value
    return value


def _comparison(node: ast.Compare, scope: Scope) -> bool:
    left = evaluate(node.left, scope)
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(right_node, scope)
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True


def _list(elements: list[Any]) -> list[Any]:
    # Nested lists could share parts and be exponentially longer written out than in memory.
    if any(isinstance(element, list | tuple | Mapping) for element in elements):
        raise ExpressionError("a list holds numbers and texts only")
    return elements
