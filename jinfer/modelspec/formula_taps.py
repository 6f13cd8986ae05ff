"""Names of a formula's values, by which activation taps find them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from jinfer.modelspec.expressions import Statements, calls


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
