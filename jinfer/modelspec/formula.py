"""Wiring formulas: how a layer, a stem or a head is composed of its modules.

A formula is a few lines `name = expression` of arithmetic and calls of modules of the same table.
Its value is that of its last line, an expression or an assignment to `x`. It is checked by
evaluating it once on abstract arrays, so errors show before any array is computed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, get_args

from jinfer.modelspec.block import ArrayKind
from jinfer.modelspec.expressions import (
    FORMULA,
    FUNCTIONS,
    ExpressionError,
    Statements,
    calls,
    check,
    evaluate,
    syntax_tree,
)
from jinfer.modelspec.feed_forward_blocks import Activation
from jinfer.modelspec.residual_contributions import Contribution, name_contributions
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value


class FormulaTaps(Protocol):
    """What sees, and may change, the values of a formula; names are as `value_names` has them."""

    def assigned(self, name: str, value: Any) -> Any:
        """The value to go on with in place of one that a line assigns, or adds to the stream."""
        ...

    def called(self, name: str, module: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        """The value to go on with in place of a module's output."""
        ...


class ValueNames(NamedTuple):
    """Names of a formula's values.

    Of two assignments to `x` the first is `x@1` and the last `x`; so are two calls of a module. The
    output of a module whose name is assigned too is `attn()`.

    Attributes:
        lines: the name of each line's value.
        calls: how often each module is called.
    """

    lines: tuple[str, ...]
    calls: Mapping[str, int]

    def of_call(self, module: str, number: int) -> str:
        """The name of a module's output, of the first call, the second, ..."""
        name = f"{module}()" if module in self.lines else module
        return _numbered(name, number, self.calls[module])


@lru_cache(maxsize=1024)
def value_names(statements: Statements, value_name: str) -> ValueNames:
    """The names of a formula's values.

    Args:
        statements: its lines: the name assigned or "", and the expression.
        value_name: the name for "".
    """
    targets = [target or value_name for target, _ in statements]
    often, seen, lines = Counter(targets), Counter[str](), list[str]()
    for target in targets:
        seen[target] += 1
        lines.append(_numbered(target, seen[target], often[target]))
    called = Counter(name for _, expression in statements for name in calls(expression))
    return ValueNames(tuple(lines), called)


def _numbered(name: str, number: int, often: int) -> str:
    return name if number == often else f"{name}@{number}"


_EXAMPLES = {
    "vectors": "vectors such as x",
    "indices": "tokens or positions",
    "encoded": "encoded",
    "grid": "grid",
}


@dataclass(frozen=True)
class Formula:
    """A checked formula.

    Attributes:
        text: its text, without the lines that call absent modules.
        calls: the modules it calls, in order of first use.
        constants: the values of its free names.
        takes: the values of earlier formulas that it reads.
        passing: modules with `Block.passes`, of a layer; None: it has no residual stream.
    """

    text: str
    calls: tuple[str, ...]
    constants: tuple[tuple[str, float], ...]
    takes: tuple[str, ...] = ()
    passing: tuple[tuple[str, int], ...] | None = None

    @property
    def statements(self) -> Statements:
        """Its lines: the name assigned or "", and the expression's syntax tree."""
        return _statements(self.text)

    @property
    def results(self) -> frozenset[str]:
        """The names it assigns; "logits" for the value of a line that assigns none."""
        return frozenset(target or "logits" for target, _ in _statements(self.text))

    @property
    def assigned(self) -> frozenset[str]:
        """The names it assigns."""
        return frozenset(target for target, _ in _statements(self.text) if target)

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """What it adds to the residual stream."""
        return name_contributions(self.statements, self.passing, self.constants)[1]

    def first_call(self, argument: str) -> str:
        """The first module called with this input alone. Raises `LookupError` if there is none."""
        for _, expression in self.statements:
            for node in ast.walk(expression):
                match node:
                    case ast.Call(func=ast.Name(id=module), args=[ast.Name(id=name)]):
                        if name == argument:
                            return module
        raise LookupError(f"no module is called with {argument}")

    def run(
        self,
        inputs: Mapping[str, Any],
        call: Callable[[str, list[Any]], Any],
        taps: FormulaTaps | None = None,
        value_name: str = "x",
    ) -> tuple[Any, dict[str, Any]]:
        """Evaluates the formula; returns its value and its results by name.

        Args:
            inputs: values of its inputs ("x", "tokens", "positions", ...).
            call: `call(module, arguments)` applies a module.
            taps: sees every assigned value, contribution and call, and may change them.
            value_name: what `taps` calls the value of a line that assigns none.
        """
        statements = self.statements
        scope = _EvaluationScope({**dict(self.constants), **inputs}, call)
        if taps is not None:
            names = value_names(statements, value_name)
            statements, added = name_contributions(statements, self.passing, self.constants)
            known = frozenset(one.name for one in added)
            scope = _TappedScope(scope.variables, call, taps, names, known)
        value = _run(statements, scope)
        return value, {name: scope.variables[name] for name in self.results}


@dataclass(frozen=True)
class _EvaluationScope:
    variables: dict[str, Any]
    module: Callable[[str, list[Any]], Any]

    def name(self, name: str) -> Any:
        return self.variables[name]

    def call(self, name: str, arguments: list[Any]) -> Any:
        return FUNCTIONS[name](*arguments) if name in FUNCTIONS else self.module(name, arguments)

    def assign(self, number: int, value: Any) -> Any:
        """The value of a line, by the line's number."""
        return value


@dataclass(frozen=True)
class _TappedScope(_EvaluationScope):
    taps: FormulaTaps
    names: ValueNames
    contributions: frozenset[str]
    seen: Counter[str] = field(default_factory=Counter)

    def call(self, name: str, arguments: list[Any]) -> Any:
        if name in FUNCTIONS:
            return FUNCTIONS[name](*arguments)
        if name in self.contributions:
            return self.taps.assigned(name, *arguments)
        self.seen[name] += 1
        called = self.names.of_call(name, self.seen[name])
        return self.taps.called(called, partial(self.module, name), arguments)

    def assign(self, number: int, value: Any) -> Any:
        return self.taps.assigned(self.names.lines[number], value)


def modules_called(text: Any, path: object, key: str) -> list[str]:
    """The modules that a formula calls, once for every call. Raises `SpecError` for bad syntax."""
    if not isinstance(text, str):
        reason = (
            "is missing; write the formula" if text is None else f"{show_value(text)} is no formula"
        )
        raise SpecError(path, key, reason)
    try:
        names = [name for _, expression in _statements(text) for name in calls(expression)]
    except ExpressionError as error:
        raise SpecError(path, key, str(error)) from error
    return [name for name in names if name not in FUNCTIONS]


def compile_formula(
    text: Any,
    *,
    path: object,
    key: str,
    inputs: Mapping[str, ArrayKind],
    before: Collection[str] = (),
    modules: Iterable[str],
    argument_kinds: Callable[[str], tuple[ArrayKind, ...]],
    constant: Callable[[str], Any],
    sizes: Collection[str] = (),
    absent: Collection[str] = (),
    ends: Collection[str] | None = ("", "x"),
) -> Formula:
    """Parses and checks a formula.

    Args:
        text: its lines.
        inputs: names of its input arrays -> their kinds.
        before: names that formulas before it assign; dimensions precede them.
        modules: the modules it may call.
        argument_kinds: the kinds of a module's arguments.
        constant: the value of a free name, or None if there is none.
        sizes: free names with values, for errors.
        absent: modules that the model does not have; lines that call them are dropped.
        ends: names that the last line may assign, "" for none; None: anything, as in a head.

    Raises:
        SpecError: syntax outside the subset, an unknown name or module, a wrong number or kind of
            arguments, arithmetic without a value, or a formula whose value is not a vector.
    """
    text = _without(text, absent, inputs, path, key, head=ends is None)
    names = modules_called(text, path, key)
    carried = {name: _AbstractArray(name, "vectors") for name in before if name not in sizes}
    scope = _CheckingScope(
        carried | {n: _AbstractArray(n, sort) for n, sort in inputs.items()},
        modules,
        argument_kinds,
        constant,
        sizes,
    )
    try:
        value, target = _run(_statements(text), scope), _statements(text)[-1][0]
        if ends is not None and target not in ends:
            raise ExpressionError(
                f"ends by assigning {target}: end it with an expression, or assign x"
            )
        if not isinstance(value, _AbstractArray) or value.sort != "vectors":
            raise ExpressionError("has no vectors as its value, but numbers or what modules take")
    except ExpressionError as error:
        raise SpecError(path, key, str(error)) from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(path, key, f"has no value: {error}") from error
    takes = tuple(name for name, one in carried.items() if one in scope.read)
    return Formula(text, tuple(dict.fromkeys(names)), tuple(scope.constants.items()), takes)


def _without(
    text: str,
    absent: Collection[str],
    inputs: Collection[str],
    path: object,
    key: str,
    head: bool,
) -> str:
    """The lines that call no absent module.

    Those of a head that read a name which only such lines assign are left out as well. If a head
    has no such line, or the others use `hidden` and assign none, the absent module's argument
    becomes that result: a decoder stored without its vocabulary head still has hidden states.
    """
    if not absent or not set(modules_called(text, path, key)) & set(absent):
        return text
    lines, hidden = list[str](), None
    known, lost = {*inputs}, set[str]()
    for target, expression in _statements(text):
        if not set(absent) & set(calls(expression)) and not lost & _names(expression):
            value = ast.unparse(expression)
            lines.append(f"{target} = {value}" if target else value)
            known.add(target)
            lost.discard(target)
            continue
        lost |= {target} - known if head else set()
        given = [
            call.args[0]
            for call in ast.walk(expression)
            if isinstance(call, ast.Call) and call.args
            if isinstance(call.func, ast.Name) and call.func.id in absent
        ]
        if given:  # the walk reaches the innermost call last
            hidden = len(lines), f"hidden = {ast.unparse(given[-1])}"
    if head and hidden is not None and (not lines or _needs_hidden(lines)):
        lines.insert(*hidden)
    if not lines:
        raise SpecError(path, key, f"every line needs one of {', '.join(absent)}, left out by when")
    return "\n".join(lines)


def _needs_hidden(lines: Iterable[str]) -> bool:
    """Whether lines use `hidden`, and none of them assigns it."""
    statements = _statements("\n".join(lines))
    used = any("hidden" in _names(expression) for _, expression in statements)
    return used and not any(target == "hidden" for target, _ in statements)


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


_SHOWN = 24  # names that an error lists


class _CheckingScope:
    """A scope for checking: arrays are abstract, and every name and call is checked."""

    def __init__(
        self,
        variables: dict[str, Any],
        modules: Iterable[str],
        takes: Callable[[str], tuple[ArrayKind, ...]],
        constant: Callable[[str], Any],
        sizes: Collection[str],
    ) -> None:
        self.variables, self.constants = variables, dict[str, float]()
        self.read = set[_AbstractArray]()
        self._sizes = sizes
        self._modules, self._takes, self._constant = tuple(modules), takes, constant

    def name(self, name: str) -> Any:
        if name in self.variables:
            value = self.variables[name]
            if isinstance(value, _AbstractArray):
                self.read.add(value)
            return value
        if name not in self.constants:
            number = self._constant(name)
            if not isinstance(number, int | float):
                raise ExpressionError(f"unknown name {name!r}; {self._instead_of(name)}")
            self.constants[name] = number
        return self.constants[name]

    def _instead_of(self, name: str) -> str:
        """The nearest name, the arrays and the sizes: a clause for an error."""
        near, word, _ = nearest_hint(name, [*self.variables, *self._sizes]).partition("allowed: ")
        arrays, sizes = (", ".join(sorted(n)[:_SHOWN]) for n in (self.variables, self._sizes))
        return f"{near}{word}{arrays}" + (f"; of [dims]: {sizes}" if sizes else "")

    def call(self, name: str, arguments: list[Any]) -> Any:
        if name in FUNCTIONS:
            if any(isinstance(argument, _AbstractArray) for argument in arguments):
                raise ExpressionError(f"{name} takes numbers, not arrays")
            return FUNCTIONS[name](*arguments)
        if name not in self._modules:
            if name in get_args(Activation):
                raise ExpressionError(
                    f"calls {name!r}, a function of arrays: make it a module, "
                    f'{{ kind = "activation", function = "{name}" }}'
                )
            known = [*self._modules, *FUNCTIONS]
            raise ExpressionError(f"calls {name!r}; {nearest_hint(name, known)}")
        sorts = self._takes(name)
        if len(arguments) != len(sorts):
            s = "" if len(sorts) == 1 else "s"
            raise ExpressionError(f"{name} takes {len(sorts)} argument{s}, not {len(arguments)}")
        for argument, sort in zip(arguments, sorts, strict=True):
            if not isinstance(argument, _AbstractArray) or argument.sort != sort:
                given = argument if isinstance(argument, _AbstractArray) else show_value(argument)
                raise ExpressionError(f"{name} takes {_EXAMPLES[sort]}, not {given}")
        return _AbstractArray(f"{name}(...)", "vectors")

    def assign(self, number: int, value: Any) -> Any:
        return value


class _AbstractArray:
    """An abstract array."""

    def __init__(self, text: str, sort: ArrayKind) -> None:
        self.text, self.sort = text, sort

    def __repr__(self) -> str:
        return self.text

    def _combined(self, other: Any) -> _AbstractArray:
        for operand in (self, other):
            if isinstance(operand, _AbstractArray) and operand.sort != "vectors":
                raise ExpressionError(f"{operand}: arithmetic takes vectors and numbers only")
        return _AbstractArray("vectors", "vectors")

    def __getitem__(self, part: Any) -> _AbstractArray:
        return self._combined(0)

    def _signed(self) -> _AbstractArray:
        return self._combined(0)

    def _refused(self, other: Any) -> _AbstractArray:
        raise ExpressionError("//, % and ** take numbers only, not arrays")

    __add__ = __sub__ = __mul__ = __truediv__ = _combined
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _combined
    __neg__ = __pos__ = _signed
    __pow__ = __mod__ = __floordiv__ = _refused
    __rpow__ = __rmod__ = __rfloordiv__ = _refused


def _run(statements: Statements, scope: _EvaluationScope | _CheckingScope) -> Any:
    """Evaluates a formula's lines in `scope`, assigning its variables; returns the last value."""
    value = None
    for number, (target, expression) in enumerate(statements):
        value = scope.assign(number, evaluate(expression, scope))
        scope.variables[target or "logits"] = value
    return value


@lru_cache(maxsize=1024)
def _statements(text: str) -> Statements:
    """A formula's lines as (name assigned or "", expression)."""
    lines = "\n".join(line.strip() for line in text.strip().splitlines())
    statements = []
    for statement in syntax_tree(lines, "exec").body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)], value=expression):
                pass
            case ast.Expr(value=expression):
                target = ""
            case _:
                kind = type(statement).__name__
                raise ExpressionError(
                    f"has a line ({kind}) that is neither 'name = expression' nor an expression"
                )
        check(expression, FORMULA)
        statements.append((target, expression))
    if not statements:
        raise ExpressionError("is empty")
    return tuple(statements)
