"""Fields of `SamplingParams` as rows of a table: what each has besides its type and default.

Checks, other engines' names, columns of the device's arrays, fields of HTTP requests and flags are
made from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, Literal, cast

from jinfer.sampling.param_ranges import ParamRange
from jinfer.sampling.request_errors import RequestError
from jinfer.sampling.unknown_params import no_parameter

# The headings under which the server's page shows parameters, in its order; "" shows none.
Group = Literal[
    "Choice",
    "Filters",
    "Penalties",
    "Mirostat",
    "FSD",
    "Search",
    "Length and end",
    "Words",
    "Structure",
    "Speculation",
    "",
]


@dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
        name, type, default: of the field; the type as it is written.
        range: its valid values.
        group: its heading.
        aliases: other engines' names of it.
        fields: the fields of HTTP requests that set it, first the one that the page shows.
        column: whether samplers read it: it is a column of `SamplingMetadata`.
        draws: whether it does nothing where nothing is drawn.
        needs: the parameter without which it does nothing.
        strategies: the only strategies that read it; none: all.
        minus_one: whether HTTP requests may write -1 for None, or for 0 where there is no None.
    """

    name: str
    type: str
    default: Any
    range: ParamRange
    group: Group = ""
    aliases: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    column: bool = False
    draws: bool = False
    needs: str = ""
    strategies: tuple[str, ...] = ()
    minus_one: bool = False

    @cached_property
    def optional(self) -> bool:
        """Whether it may be None."""
        return "None" in self.type

    def read(self, value: Any) -> Any:
        """The normalized value. Raises `OutsideError`."""
        return self.range.none if value is None and self.optional else self.range.read(value)


def param(
    default: Any,
    range: ParamRange,
    group: Group = "",
    *,
    aliases: str = "",
    fields: str = "",
    strategies: str = "",
    **more: Any,
) -> Any:
    """A field of `SamplingParams` with its row of the table.

    Args:
        range, group, more: as `Parameter` has them.
        aliases, fields, strategies: the same, names separated by spaces.
    """
    names = {"aliases": aliases, "fields": fields, "strategies": strategies}
    row = {name: tuple(text.split()) for name, text in names.items()}
    return field(default=default, metadata={"range": range, "group": group, **row, **more})


def parameters(table: Any) -> dict[str, Parameter]:
    """The rows of a dataclass whose fields `param` made, by name."""
    rows = {}
    for each in fields(table):
        row = Parameter(each.name, str(each.type), each.default, **each.metadata)
        rows[each.name] = replace(row, fields=row.fields or (each.name,))
    return rows


def by_name[T](table: type[T]) -> type[T]:
    """Makes unknown names and positional arguments of a dataclass a `RequestError` of one line."""
    rows = parameters(table)
    aliases = {alias: row.name for row in rows.values() for alias in row.aliases}
    init: Any = table.__init__

    @wraps(init)
    def checked(self: T, *args: object, **values: object) -> None:
        if args:
            raise RequestError(f"give parameters by name: {table.__name__}(max_tokens=50)")
        if not rows.keys() >= values.keys():
            wrong = next(name for name in values if name not in rows)
            raise RequestError(no_parameter(wrong, rows, aliases))
        init(self, **values)

    cast("Any", table).__init__ = checked
    return table
