"""Template sandbox: bounds the result of string methods, filters and operators before they run.

Loops are stopped by the clock, but these calls are single steps, and some multiply their input.
Calls that common templates use are linear in their input; all others need the sandbox process
(`require_sandbox`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinfer.template import template_limits as limits
from jinfer.template.template_errors import TemplateError

_WIDE_BRACE = re.compile(r"[:.][^{}]*\d{4}|\{[^{}]*\{")  # {:9999}, {:{width}}
_WIDTHS = re.compile(r"[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")  # after % and a name in parentheses
_MAX_DIGITS = 3  # of a width
_MAX_ROUND = 308  # decimal places
_MAX_STRIPPED = 64  # different characters that `strip` removes
_MAX_COUNT = 10_000  # of slices, batches, ...
_MAX_INDENT = 16
_MAX_LETTERS = 10_000  # of a text that is iterated as characters
_MAX_NAME = 256  # characters of an attribute name that is looked up in each item
_CONSUMERS = (  # filters that collect an iterator
    *("list", "join", "sort", "unique", "groupby", "batch", "slice", "sum", "reverse", "last"),
    *("min", "max"),
)
_EACH = {  # filters that loop over items in C, without a clock check
    *("groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr"),
    *("sort", "sum", "unique"),
}

_CHEAP_FILTERS = {
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby"),
    *("indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min"),
    *("reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort"),
    *("string", "tojson", "trim", "unique", "upper"),
}
_CHEAP_METHODS = {
    *("capitalize", "copy", "count", "endswith", "find", "get", "index", "isalnum", "isalpha"),
    *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "isupper", "items", "join"),
    *("keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "title", "upper", "values"),
}
_STRIPPING = ("strip", "lstrip", "rstrip", "trim")

Arguments = tuple[Any, ...]


def iterators(args: Arguments) -> Arguments:
    """The arguments with iterators replaced by lists, for a callee that collects them."""
    return tuple(limits.collect(arg) if isinstance(arg, Iterator) else arg for arg in args)


def check_method(owner: Any, name: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    """Checks a method call on a plain value; returns the arguments to call it with.

    Raises:
        TemplateError: the result would be too large, or the method is not allowed.
    """
    if isinstance(owner, bytes | bytearray | memoryview) or name == "to_bytes":
        raise TemplateError(f"the template calls {name} of bytes, which is not allowed")
    guard = _METHODS.get(name) if isinstance(owner, str) else None
    args = guard(owner, args, kwargs) if guard else args
    if name not in _CHEAP_METHODS:
        limits.require_sandbox()
    elif name in _STRIPPING:
        _strip(args)
    return args


def _strip(args: Arguments) -> None:
    """`strip` compares each character with all that are stripped."""
    if any(isinstance(arg, str) and len(arg) > _MAX_STRIPPED for arg in args):
        limits.require_sandbox()


def _format(owner: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    if _WIDE_BRACE.search(owner):
        raise TemplateError("the template formats with a width of thousands or a computed one")
    limits.check_size(
        len(owner) + owner.count("{") * (limits.measure(args) + limits.measure(kwargs) + _MAX_COUNT)
    )
    return args


def _replace(owner: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        limits.check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    return args


def _join(owner: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    if len(args) != 1:
        return args
    items = limits.collect(args[0])
    limits.check_size(limits.measure(items) + len(owner) * len(items))
    return (items,)


def _width(owner: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            limits.check_size((len(owner) + 1) * value if value > _MAX_COUNT else value)
            limits.check_size(owner.count("\t") * value)
    return args


def _translate(owner: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    limits.check_size(len(owner) * limits.measure(args))
    return args


_METHODS: dict[str, Callable[[str, Arguments, Mapping[str, Any]], Arguments]] = {
    "format": _format,
    "format_map": _format,
    "replace": _replace,
    "join": _join,
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "expandtabs": _width,
    "translate": _translate,
}


def check_operator(symbol: str, left: Any, right: Any) -> None:
    """Checks `left <symbol> right`. Raises `TemplateError` if the result would be too large."""
    limits.check_time()
    if symbol in ("**", "//", "/"):
        limits.require_sandbox()
    if isinstance(left, int) and isinstance(right, int):
        bits, other = left.bit_length(), right.bit_length()
        size = bits * right if symbol == "**" else bits + other
        if size > limits.MAX_BITS:
            raise TemplateError(
                f"the template computes a number of more than {limits.MAX_BITS} bits"
            )
    elif symbol == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | bytes | list | tuple) and isinstance(count, int):
                limits.check_size(limits.measure(value) * count)
    elif symbol == "+" and isinstance(left, str | bytes) and isinstance(right, str | bytes):
        limits.check_size(len(left) + len(right))
    elif symbol == "%" and isinstance(left, str):
        check_percent(left, right)


def check_percent(text: str, values: Any) -> None:
    """Checks `text % values`."""
    at = text.find("%")
    while at >= 0:
        found = _WIDTHS.match(text, _after_name(text, at + 1))
        assert found is not None  # the pattern can match the empty string
        for width in found.groups():
            if width == "*" or (width and len(width) > _MAX_DIGITS):
                reason = "the template formats with a width of thousands or a computed one"
                raise TemplateError(reason)
        # %% is a literal percent sign; other conversions were checked above.
        at = text.find("%", max(found.end() + text.startswith("%", found.end()), at + 1))
    limits.check_size(len(text) + text.count("%") * (limits.measure(values) + _MAX_COUNT))
    limits.require_sandbox()


def _after_name(text: str, at: int) -> int:
    """The index after a parenthesized name, which may contain parentheses."""
    if not text.startswith("(", at):
        return at
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def check_filter(name: str, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    """Checks a filter call, with its value first; returns the arguments to call it with.

    Raises:
        TemplateError: the result would be too large.
    """
    limits.check_time()
    if name not in _CHEAP_FILTERS:
        limits.require_sandbox()
    value, rest = args[0], args[1:]
    if name in _EACH:
        _each(value, (*rest, *kwargs.values()))
    if name in _CONSUMERS and isinstance(value, Iterator):
        value = limits.collect(value)
        args = (value, *rest)
    if name == "join":
        return _joined(value, rest, kwargs)
    if name == "replace":
        old, new = (*rest, *kwargs.values(), "", "")[:2]
        _replace(str(value), (str(old), str(new)), {})
    elif name == "format":
        check_percent(str(value), (*rest, *kwargs.values()))
    elif name in ("center", "indent"):
        text = str(value)
        for width in (*rest, *kwargs.values()):
            size = len(width) if isinstance(width, str) else int(width)
            limits.check_size(len(text) + (text.count("\n") + 1) * size)
    elif name in ("batch", "slice"):
        _count(rest, kwargs)
    elif name == "sum":
        start = kwargs.get("start", rest[1] if len(rest) > 1 else 0)
        if not isinstance(start, int | float):
            raise TemplateError("the template sums what is not numbers")
    elif name == "string":
        limits.measure(value)
    elif name == "trim":
        _strip((*rest, *kwargs.values()))
    elif name == "round":
        _round((*rest, *kwargs.values()))
    return args


def _each(value: Any, rest: Arguments) -> None:
    """A string is also a sequence of characters, and may be longer than any list."""
    if isinstance(value, str) and len(value) > _MAX_LETTERS:
        limits.require_sandbox()
    if any(isinstance(arg, str) and len(arg) > _MAX_NAME for arg in rest):
        limits.require_sandbox()


def _round(rest: Arguments) -> None:
    for value in rest:
        if isinstance(value, int) and abs(value) > _MAX_ROUND:
            raise TemplateError(f"the template rounds to more than {_MAX_ROUND} decimals")


def _joined(value: Any, rest: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
    if isinstance(value, Iterable):
        value = limits.collect(value)
        between = str((*rest, kwargs.get("d", ""))[0])
        limits.check_size(limits.measure(value) + len(between) * len(value))
    return (value, *rest)


def _count(rest: Arguments, kwargs: Mapping[str, Any]) -> None:
    for count in (*rest, *kwargs.values()):
        if isinstance(count, int) and count > _MAX_COUNT:
            raise TemplateError(f"the template asks for more than {_MAX_COUNT} parts")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes, non-ASCII characters as they are."""
    limits.measure(value)
    if indent is not None and not (isinstance(indent, int) and indent <= _MAX_INDENT):
        raise TemplateError(f"the template indents JSON by more than {_MAX_INDENT}")
    if separators is not None and max(map(len, separators)) > _MAX_INDENT:
        raise TemplateError(f"the template separates JSON by more than {_MAX_INDENT} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    chunks: list[str] = []
    size = 0
    for chunk in encoder.iterencode(value):  # indentation can make it long
        size += len(chunk)
        if size > limits.MAX_SIZE:
            limits.check_size(size)
        chunks.append(chunk)
    limits.check_time()
    return "".join(chunks)
