"""Jinja sandbox: runs untrusted templates with bounded time and memory.

Jinja's own sandbox protects Python's internals and the template's input, but does not stop a
template that loops or grows without end. Here every loop, macro and call checks the clock, all
output is counted, and whatever could grow in one step is checked first. (minijinja has a budget
of its own, but prints 28 of the 186 reference renderings differently.)
"""

# ruff: noqa: N802, N815 - Jinja finds the methods of a visitor by the names of its nodes

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from types import BuiltinMethodType, CodeType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jinfer.template import growth_guards
from jinfer.template import template_limits as limits
from jinfer.template.template_errors import TemplateError

# Of no use in a prompt, and unbounded in their arguments.
_REMOVED_FILTERS = ("wordwrap", "xmlattr", "urlize", "pprint", "striptags")
_REMOVED_GLOBALS = ("lipsum",)
# Types whose methods are checked before they are called.
_VALUES = (str, bytes, bytearray, memoryview, int, float, list, tuple, dict, set, frozenset)


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistant tokens for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates. Render inside `template_limits.limited()`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        # Constant folding would run filters at compile time, without a clock.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_checked_output,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        self.filters["tojson"] = growth_guards.to_json
        self.filters = {name: _guarded(name, run) for name, run in self.filters.items()}
        self.filters.update({_TICK: _tick, _SIZED: _sized, _CONCAT: _concat})
        tests: dict[str, Any] = self.tests
        self.tests = {name: _timed(run) for name, run in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Instrument().visit(tree)

    def _compile(self, source: str, filename: str) -> CodeType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings, as about 1[2]
            return super()._compile(source, filename)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        growth_guards.check_operator(operator, left, right)
        return _sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        limits.check_time()
        if isinstance(__obj, BuiltinMethodType | type):
            args = growth_guards.iterators(args)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, _VALUES):
            args = growth_guards.check_method(owner, __obj.__name__, args, kwargs)
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def call(*args: Any, **kwargs: Any) -> str:
            return wrapped(
                *growth_guards.check_method(value.__self__, "format", args, kwargs), **kwargs
            )

        return call


def _sized(value: Any) -> Any:
    """Checks and counts a value's size."""
    if isinstance(value, str):
        limits.check_size(len(value))
        limits.count_made(len(value))
    elif isinstance(value, list | tuple | dict | set):
        limits.count_made(limits.measure(value))
    elif isinstance(value, int) and value.bit_length() > limits.MAX_BITS:
        raise TemplateError(f"the template computes a number of more than {limits.MAX_BITS} bits")
    return value


def _tick(value: Any) -> Any:
    limits.check_time()
    return value


def _concat(values: tuple[Any, ...]) -> str:
    size = limits.measure(values)
    limits.count_made(size)
    return "".join(map(str, values))


@pass_context  # the context also keeps Jinja from calling it at compile time
def _checked_output(context: Context, value: Any) -> str:
    """Checks and counts what `{{ }}` and literal text output."""
    if not isinstance(value, str):
        limits.measure(value)
        value = str(value)
    limits.count_written(len(value))
    return value


def _guarded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(run, "jinja_pass_arg") else 0

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        checked = growth_guards.check_filter(name, args[skipped:], kwargs)
        return _sized(run(*args[:skipped], *checked, **kwargs))

    return call


def _timed(run: Callable[..., Any]) -> Callable[..., Any]:
    """A test that checks the clock: filters run it on every item of a list."""

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        limits.check_time()
        return run(*args, **kwargs)

    return call


_TICK, _SIZED, _CONCAT = " tick", " sized", " concat"  # no template can write them


class _Instrument(NodeTransformer):
    """Adds the checks to a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _clock(node.lineno))
        if node.test is not None:
            looked = _filter(_TICK, nodes.Const(True, lineno=node.lineno))
            node.test = nodes.And(looked, node.test, lineno=node.lineno)
        return node

    def _visit_body(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _clock(node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # so that it is counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_CONCAT, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_SIZED, node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_SIZED, node)

    visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_SIZED, node) if isinstance(node.arg, nodes.Slice) else node


def _filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _clock(line: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(_TICK, nodes.Const(None, lineno=line)), lineno=line)
