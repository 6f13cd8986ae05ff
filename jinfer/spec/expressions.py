"""The safe subset of Python's expression syntax that specifications are written in.

A parsed expression is a tree of the node types listed here and nothing else: names, numbers,
strings, lists, indexing, arithmetic, comparisons, `and`/`or`/`not`, `a if c else b`, and calls of
functions by name. There are no attributes, keywords, lambdas or comprehensions, so an expression
can reach only what its scope hands to it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

MAX_LENGTH = 4096  # characters of one expression: far above any real one, far below a stack overflow
MAX_POWER = 64.0

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
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
_OTHER = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.Call)
_LEAVES = (ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Subscript)
_CONTEXT = (ast.Load, ast.And, ast.Or)
_ALLOWED = (*_OTHER, *_LEAVES, *_CONTEXT, *_BINARY, *_UNARY, *_COMPARE)

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
    """An expression outside the subset, or one that has no value. The message is one clause."""


class Scope(Protocol):
    """Where an expression finds what its names and calls mean."""

    def name(self, name: str) -> Any: ...

    def call(self, name: str, arguments: list[Any]) -> Any: ...


def parse(text: str) -> ast.expr:
    """Parses one expression. Raises `ExpressionError`."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"cannot be read as an expression: {text.strip()!r}") from error
    check(tree)
    return tree


def check(tree: ast.AST) -> None:
    """Raises `ExpressionError` unless every node of `tree` belongs to the subset."""
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ExpressionError(f"{ast.unparse(node)!r} is not part of the expression language")
        if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name)):
            raise ExpressionError(f"{ast.unparse(node)!r}: a call is name(argument, ...)")
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, str)):
            raise ExpressionError(f"{node.value!r} is not a number or a string")


def names(tree: ast.AST) -> Iterator[str]:
    """Names read by an expression, not those it calls."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called:
            yield node.id


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls in an expression, as (name, number of arguments)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, len(node.args)


def evaluate(node: ast.expr, scope: Scope) -> Any:
    """The value of a parsed expression in `scope`."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return scope.name(node.id)
        case ast.Call(func=ast.Name(id=name)):
            return scope.call(name, [evaluate(argument, scope) for argument in node.args])
        case ast.BinOp():
            left, right = evaluate(node.left, scope), evaluate(node.right, scope)
            return _binary(node.op, left, right)
        case ast.UnaryOp():
            return _UNARY[type(node.op)](evaluate(node.operand, scope))
        case ast.IfExp():
            return evaluate(node.body if evaluate(node.test, scope) else node.orelse, scope)
        case ast.BoolOp():
            return _boolean(node, scope)
        case ast.Compare():
            return _comparison(node, scope)
        case ast.List() | ast.Tuple():
            return [evaluate(element, scope) for element in node.elts]
        case ast.Subscript():
            return evaluate(node.value, scope)[evaluate(node.slice, scope)]
    raise ExpressionError(f"{ast.unparse(node)!r} is not part of the expression language")


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and isinstance(right, (int, float)) and abs(right) > MAX_POWER:
        raise ExpressionError(f"a power above {MAX_POWER:.0f} is not allowed")
    if isinstance(op, ast.Mult) and (isinstance(left, (str, list)) or isinstance(right, (str, list))):
        raise ExpressionError("only numbers are multiplied")
    return _BINARY[type(op)](left, right)


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
