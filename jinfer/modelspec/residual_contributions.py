"""Residual contributions: what the lines of a formula add to the residual stream, by name.

The stream is `x`, and a sum with it: also one that is assigned to another name first, multiplied
with a number, or goes through a norm. Each other summand on the way to the formula's value is a
contribution.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Literal, NamedTuple

from jinfer.modelspec.expressions import FUNCTIONS, Statements


class Contribution(NamedTuple):
    """What is added to the residual stream as one summand.

    Attributes:
        name: "attn.added", after its modules; of two equal ones the first is "attn.added@1".
        modules: whose outputs it is made of, in order; norms, factors and gates are none of them.
        through: the norms and the like that their outputs go through before they are added.
    """

    name: str
    modules: tuple[str, ...]
    through: tuple[str, ...]


class _Term(NamedTuple):
    """A summand, and where it is written."""

    sum: ast.BinOp
    side: Literal["left", "right"]
    modules: tuple[str, ...]
    through: tuple[str, ...]


class _Value(NamedTuple):
    """What is known of an expression's value; of a number nothing.

    Attributes:
        stream: whether it is the residual stream.
        terms: what was added to it.
        modules, through: of another value, as of `Contribution`.
    """

    stream: bool = False
    terms: tuple[_Term, ...] = ()
    modules: tuple[str, ...] = ()
    through: tuple[str, ...] = ()

    @property
    def number(self) -> bool:
        return not self.stream and not self.modules


@lru_cache(maxsize=1024)
def name_contributions(
    statements: Statements,
    passing: tuple[tuple[str, int], ...] | None,
    numbers: tuple[tuple[str, float], ...],
) -> tuple[Statements, tuple[Contribution, ...]]:
    """Finds the contributions of a formula, in the order in which they are added.

    Args:
        passing: of the modules that have it, `Block.passes`; None: there is no stream.
        numbers: its constants.

    Returns:
        The lines with a call `attn.added(...)` around each contribution, and what they are.
    """
    if passing is None:
        return statements, ()
    lines = deepcopy(statements)
    reader = _Reader(dict(passing), [name for name, _ in numbers])
    value = _Value()
    for target, expression in lines:
        value = reader.read(expression)
        # What replaces the stream is a new one.
        replaced = target == "x" and not value.stream
        reader.values[target] = _Value(stream=True) if replaced else value
    names = [f"{'+'.join(term.modules)}.added" for term in value.terms]
    often, seen, found = Counter(names), Counter[str](), list[Contribution]()
    for name, term in zip(names, value.terms, strict=True):
        seen[name] += 1
        name = name if seen[name] == often[name] else f"{name}@{seen[name]}"
        found.append(Contribution(name, term.modules, term.through))
        _wrap(term, name)
    return lines, tuple(found)


def _wrap(term: _Term, name: str) -> None:
    """Writes a call around a term; one that is subtracted is added with the other sign."""
    value: ast.expr = getattr(term.sum, term.side)
    if term.side == "right" and isinstance(term.sum.op, ast.Sub):
        term.sum.op, value = ast.Add(), ast.UnaryOp(ast.USub(), value)
    setattr(term.sum, term.side, ast.Call(ast.Name(name), [value], []))


class _Reader:
    """Reads the expressions of a formula's lines, one after the other."""

    def __init__(self, passing: Mapping[str, int], numbers: Collection[str]) -> None:
        self.values = {"x": _Value(stream=True), **{name: _Value() for name in numbers}}
        self.passing = passing

    def read(self, node: ast.expr) -> _Value:
        match node:
            case ast.Name(id=name):
                return self.values.get(name, _Value(modules=(name,)))
            case ast.Call(func=ast.Name(id=name), args=args):
                if name in FUNCTIONS:
                    return _Value()
                if count := self.passing.get(name, 0):
                    one = self._joined([self.read(argument) for argument in args[:count]])
                    return one._replace(through=_unique([*one.through, name]))
                return _Value(modules=(name,))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._sum(node)
            case ast.BinOp(op=ast.Mult() | ast.Div()):
                return self._product(node)
            case ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
                return self.read(inner)
        return _Value()

    def _sum(self, node: ast.BinOp) -> _Value:
        left, right = self.read(node.left), self.read(node.right)
        terms = list[_Term]()
        if left.stream and right.modules:
            terms.append(_Term(node, "right", right.modules, right.through))
        if right.stream and left.modules:
            terms.append(_Term(node, "left", left.modules, left.through))
        one = self._joined([left, right])
        return one._replace(terms=_unique([*one.terms, *terms]))

    def _product(self, node: ast.BinOp) -> _Value:
        """Of two values that are no numbers one is a gate: the other is a module's own output."""
        left, right = self.read(node.left), self.read(node.right)
        if left.number or right.number:
            return right if left.number else left
        first = self._is_module(node.left) and not self._is_module(node.right)
        one = left if first else right
        return _Value(modules=one.modules or ("x",), through=one.through)

    def _is_module(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return not self.passing.get(name)
        return False

    def _joined(self, values: Sequence[_Value]) -> _Value:
        if any(value.stream for value in values):
            values = [value for value in values if value.stream]
        return _Value(
            any(value.stream for value in values),
            _unique(term for value in values for term in value.terms),
            _unique(name for value in values for name in value.modules),
            _unique(name for value in values for name in value.through),
        )


def _unique[T](values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
