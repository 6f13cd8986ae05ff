"""Specification values: expressions over numbers, dimensions and the checkpoint's config keys.

A value may be written as alternatives, `"$num_key_value_heads | heads"`: the first that has a value
is used. `$key` is looked up in the checkpoint's config (config.json, GGUF metadata, llama2.c's
header); dots go into nested tables; null counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from jinfer.modelspec.bounded_types import DEFAULT_CONTEXT
from jinfer.modelspec.expressions import FUNCTIONS, MAX_LENGTH, ExpressionError, evaluate, parse
from jinfer.modelspec.spec_errors import SpecError, nearest_hint, show_value

KEY = r"\$([A-Za-z_][A-Za-z0-9_]*(?:\.(?:[A-Za-z0-9_]+|\{i\}))*)"
_QUOTED_OR_KEY = re.compile(r"'[^']*'|\"[^\"]*\"|" + KEY)
_CONSTANTS = {"none": None, "true": True, "false": False, "True": True, "False": False}


class MissingKey(LookupError):
    """A `$key` that the checkpoint does not have."""


class NullKey(MissingKey):
    """A `$key` that is null, which counts as absent."""


class MissingTensor(MissingKey):
    """A tensor that the checkpoint does not have."""


def no_rows(pattern: str) -> int:
    """Counts the rows of a tensor, for a checkpoint without tensors: raises `MissingTensor`."""
    raise MissingTensor(pattern)


def row_counter(shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], int]:
    """Counts the rows (output features) of a tensor, by its name or a pattern of names."""

    def rows(pattern: str) -> int:
        if not isinstance(pattern, str):
            raise TypeError(f"{show_value(pattern)} is not the name of a tensor, in quotes")
        names = [pattern] if pattern in shapes else [n for n in shapes if fnmatchcase(n, pattern)]
        if not names:
            raise MissingTensor(pattern)
        if any(not shapes[name] for name in names):
            raise ValueError(f"{show_value(pattern)} is a single number, without rows")
        found = sorted({shapes[name][-2:][0] for name in names})
        if len(found) > 1:
            counts = ", ".join(map(str, found[:8]))
            raise ValueError(
                f"{len(names)} tensors match {show_value(pattern)}, with {counts} rows; name one"
            )
        return found[0]

    return rows


@dataclass
class SpecValues:
    """Evaluates the values of one specification.

    Attributes:
        path: the specification's file, for errors.
        dims: the texts or numbers of `[dims]`.
        lookup: `$key` -> value; raises `MissingKey`.
        has: whether the checkpoint has a tensor that matches a glob pattern.
        source: what `lookup` reads, for errors ("config.json").
        row_count: number of rows of the tensor that matches a pattern; raises `MissingTensor`.
        engine_context: the context that `[engine]` sets.
        names: values of further names, such as `i` in the modules of a layer.
        used: dimensions that were evaluated.
    """

    path: object
    dims: Mapping[str, Any]
    lookup: Callable[[str], Any]
    has: Callable[[str], bool]
    source: str = "the checkpoint"
    row_count: Callable[[str], int] = no_rows
    engine_context: int | None = None
    names: Mapping[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    _known: dict[str, Any] = field(default_factory=dict)
    _pending: list[str] = field(default_factory=list)

    def dim(self, name: str, asked_by: str) -> Any:
        """The value of a dimension of `[dims]`."""
        if name not in self.dims:
            raise SpecError(
                self.path, asked_by, f"needs dims.{name}, which is not given; set it in [dims]"
            )
        self.used.add(name)
        if name not in self._known:
            self._known[name] = self._evaluated_dim(name)
        return self._known[name]

    def served_context(self, asked_by: str) -> int | None:
        """The longest sequence of the engine, if it is known."""
        if self.engine_context is not None or "context" not in self.dims:
            return self.engine_context
        value = self.dim("context", asked_by)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
            written = show_value(self.dims["context"])
            reason = f"{show_value(value)} ({written}) is not a whole number from 1 on"
            raise SpecError(self.path, "dims.context", reason)
        return int(min(value, DEFAULT_CONTEXT))

    def _evaluated_dim(self, name: str) -> Any:
        key = f"dims.{name}"
        if name in self._pending:
            chain = " -> ".join([*self._pending, name])
            raise SpecError(self.path, key, f"is defined by itself: {chain}")
        self._pending.append(name)
        try:
            value = self.value(self.dims[name], key)
        finally:
            self._pending.pop()
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def value(
        self,
        written: Any,
        key: str,
        *,
        words: bool = False,
        names: Mapping[str, Any] | None = None,
    ) -> Any:
        """Evaluates the value at `key`.

        Args:
            written: a number, boolean or table (returned as it is) or the text of an expression.
            words: an alternative that is a single word evaluates to itself.
            names: values of further names, besides the dimensions.
        """
        if not isinstance(written, str):
            return written
        if len(written) > MAX_LENGTH:
            raise SpecError(self.path, key, f"is longer than {MAX_LENGTH} characters")
        missing: list[MissingKey] = []
        for alternative in _alternatives(written):
            if words and not re.search(r"[$'\"(]", alternative):
                return _CONSTANTS.get(alternative, alternative)
            try:
                return self._evaluate(alternative, key, names or {})
            except MissingKey as absent:
                # Its traceback would keep this list and its callers' frames, with all that is open,
                # alive.
                absent.__context__ = None
                missing.append(absent.with_traceback(None))
        where = key if key.startswith("dims.") else "it"
        reason = f"{self._lacking(missing)}; set {where} or add a default: '| ...'"
        raise SpecError(self.path, key, reason)

    def _lacking(self, missing: list[MissingKey]) -> str:
        """What the checkpoint lacks, keys and then tensors: a clause for an error."""
        tensors = [f"'{each}'" for each in missing if isinstance(each, MissingTensor)]
        keys = [f"'{each}'" for each in missing if not isinstance(each, MissingTensor)]
        clauses = [f"{self.source} has no {' or '.join(keys)}"] if keys else []
        if tensors:
            clauses.append(f"the checkpoint has no tensor {' or '.join(tensors)}")
        return " and ".join(clauses)

    def _evaluate(self, text: str, key: str, names: Mapping[str, Any]) -> Any:
        """The value of one alternative. Raises `MissingKey` if it reads a missing key."""
        keys: list[str] = []

        def placeholder(found: re.Match[str]) -> str:
            if found[1] is None:
                return found[0]
            keys.append(found[1].replace("{i}", str(names.get("i", self.names.get("i", "{i}")))))
            return f"_key{len(keys) - 1}"

        expression = _QUOTED_OR_KEY.sub(placeholder, text)
        try:
            return evaluate(parse(expression), _ValueScope(self, key, keys, names))
        except (MissingKey, SpecError):
            raise
        except ExpressionError as error:
            reason = str(error)
            for number, name in reversed(list(enumerate(keys))):  # _key12 before _key1
                reason = reason.replace(f"_key{number}", f"${name}")
            raise SpecError(self.path, key, reason) from error
        except RecursionError as error:  # a chain of dimensions with deep expressions
            raise SpecError(self.path, key, "is defined through too many others") from error
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise SpecError(self.path, key, f"{show_value(text)} has no value: {error}") from error


@dataclass(frozen=True)
class _ValueScope:
    """Names and functions of a value: `$keys` (as _key0, _key1, ...), dimensions, constants."""

    values: SpecValues
    key: str
    keys: list[str]
    names: Mapping[str, Any]

    def name(self, name: str) -> Any:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in self.names:
            return self.names[name]
        if name in self.values.dims:
            return self.values.dim(name, self.key)
        number = name.removeprefix("_key")
        if name != number and number.isdecimal() and int(number) < len(self.keys):
            return self.values.lookup(self.keys[int(number)])
        known = [*self.values.dims, *self.names, "none", "true", "false"]
        raise ExpressionError(f"unknown name {name!r}; {nearest_hint(name, known)}")

    def call(self, name: str, arguments: list[Any]) -> Any:
        if name == "has":
            return any(self.values.has(self._of_layer(pattern)) for pattern in arguments)
        if name == "rows":
            return self.values.row_count(*map(self._of_layer, arguments))
        if name == "is_null":
            return self._is_null(*arguments)
        functions = FUNCTIONS | _OF_CONFIG
        if name not in functions:
            known = nearest_hint(name, [*functions, "has", "rows", "is_null"])
            raise ExpressionError(f"unknown function {name!r}; {known}")
        return functions[name](*arguments)

    def _is_null(self, key: str) -> bool:
        try:
            self.values.lookup(key)
        except NullKey:
            return True
        except MissingKey:
            pass
        return False

    def _of_layer(self, pattern: Any) -> Any:
        """A pattern of tensor names with the layer's number for {i}, where there is a layer."""
        number = self.names.get("i", self.values.names.get("i"))
        known = isinstance(pattern, str) and number is not None
        return pattern.replace("{i}", str(number)) if known else pattern


def _indices(elements: Any, value: Any) -> list[int]:
    """The indices of the elements that are equal to a value."""
    if not isinstance(elements, list | tuple):
        raise TypeError("indices takes a list and a value")
    return [i for i, each in enumerate(elements) if each == value]


def _last(elements: Any, value: Any, end: Any) -> int:
    """The index of the last element before index `end` that is equal to a value."""
    if not isinstance(elements, list | tuple) or not isinstance(end, int):
        raise TypeError("last takes a list, a value and a whole number")
    found = _indices(elements[: max(end, 0)], value)
    if not found:
        raise ValueError(f"{show_value(value)} is not among the first {end}")
    return found[-1]


def _matching(table: Any, pattern: Any) -> list[Any]:
    """The values of a table's keys that match a glob pattern, in the table's order."""
    if not isinstance(table, Mapping) or not isinstance(pattern, str):
        raise TypeError("matching takes a table and a pattern")
    return [value for key, value in table.items() if fnmatchcase(key, pattern)]


_OF_CONFIG: dict[str, Callable[..., Any]] = {
    "indices": _indices,
    "last": _last,
    "matching": _matching,
}


def _alternatives(text: str) -> list[str]:
    """Splits at each `|` outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "|" and depth == 0:
            parts.append("")
            continue
        parts[-1] += character
    return [part.strip() for part in parts]
