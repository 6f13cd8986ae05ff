"""Wiring formulas: how a layer, a stem or a head is put together from its modules.

A formula is a few lines `name = expression`, in the syntax of `jinfer.spec.expressions`; calls are
of modules declared beside it (or sqrt and its like on numbers). Its value is its last line's
expression, or `x` where the last line assigns.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jinfer.spec.errors import SpecError, nearest
from jinfer.spec.expressions import FUNCTIONS, MAX_LENGTH, ExpressionError, calls, check, evaluate
from jinfer.spec.expressions import names as names_read


@dataclass(frozen=True)
class Formula:
    """A checked formula.

    Attributes:
        text: as it was written.
        calls: the modules it calls, in order of first use.
        constants: the numbers that its free names stand for.
    """

    text: str
    calls: tuple[str, ...]
    constants: tuple[tuple[str, float], ...]

    def run(
        self, inputs: Mapping[str, Any], call: Callable[[str, list[Any]], Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Evaluates the formula; returns its value and every name it assigned.

        Args:
            inputs: what its inputs stand for ("x", "tokens", "positions", ...).
            call: `call(module, arguments)` applies a module.
        """
        scope = _Running({**dict(self.constants), **inputs}, call)
        value = None
        for target, expression in _statements(self.text):
            value = evaluate(expression, scope)
            if target:
                scope.variables[target] = value
        return (scope.variables["x"] if target else value), scope.variables


@dataclass(frozen=True)
class _Running:
    variables: dict[str, Any]
    module: Callable[[str, list[Any]], Any]

    def name(self, name: str) -> Any:
        return self.variables[name]

    def call(self, name: str, arguments: list[Any]) -> Any:
        return FUNCTIONS[name](*arguments) if name in FUNCTIONS else self.module(name, arguments)


def compile_formula(
    text: Any,
    *,
    path: object,
    key: str,
    inputs: Iterable[str],
    modules: Mapping[str, int],
    constant: Callable[[str], float | None],
) -> Formula:
    """Parses and checks a formula.

    Args:
        text: its lines.
        inputs: names it is given values for.
        modules: the modules it may call -> how many arguments each takes.
        constant: the number a free name stands for, or None if there is none.

    Raises:
        SpecError: for anything outside the subset, an unknown name or module, a wrong number of
            arguments, or a formula that leaves no value.
    """
    if not isinstance(text, str):
        raise SpecError(path, key, f"{text!r} is not a formula")
    try:
        statements = _statements(text)
    except ExpressionError as error:
        raise SpecError(path, key, str(error)) from error
    known, used, constants = set(inputs), {}, {}
    for target, expression in statements:
        for name in names_read(expression):
            if name not in known and name not in constants:
                number = constant(name)
                if number is None:
                    raise SpecError(path, key, f"unknown name {name!r}; {nearest(name, known)}")
                constants[name] = number
        for name, count in calls(expression):
            if name in FUNCTIONS:
                continue
            if name not in modules:
                raise SpecError(path, key, f"calls {name!r}; {nearest(name, modules)}")
            if count != modules[name]:
                raise SpecError(path, key, f"{name} takes {modules[name]} argument(s), not {count}")
            used[name] = None
        if target:
            known.add(target)
    if statements[-1][0] and "x" not in known:
        raise SpecError(path, key, "has no value: end it with an expression, or assign x")
    return Formula(text, tuple(used), tuple(constants.items()))


def _statements(text: str) -> list[tuple[str, ast.expr]]:
    """A formula's lines as (name assigned or "", expression)."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"is longer than {MAX_LENGTH} characters")
    try:
        body = ast.parse("\n".join(line.strip() for line in text.strip().splitlines())).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"cannot be read as a formula: {text.strip()!r}") from error
    statements = []
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=expression):
                pass
            case ast.Expr(value=expression):
                target = ""
            case _:
                line = ast.unparse(statement)
                raise ExpressionError(f"{line!r}: a line is 'name = expression' or an expression")
        check(expression)
        statements.append((target, expression))
    if not statements:
        raise ExpressionError("is empty")
    return statements
