"""Fields of `SamplingParams` as rows of a table: what each has besides its type and documentation.

Checks, columns of the device's arrays, fields of HTTP requests and flags follow from the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Literal, cast

from jinfer.modelspec.bounded_types import Bounds, details, fields, union
from jinfer.modelspec.foreign_names import keyword, parameter_aliases
from jinfer.modelspec.spec_errors import nearest_hint, show_value
from jinfer.sampling.request_errors import RequestError

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
ALIASES = parameter_aliases()


@dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
        name, default: of the field.
        type: the annotation, with bounds.
        group: its heading.
        fields: the fields of HTTP requests that set it, first the field that the page shows.
        column: whether samplers read it: it is a column of `SamplingMetadata`.
        draws: whether it has no effect unless tokens are drawn at random.
        needs: the parameter without which it has no effect.
        strategies: the only strategies that read it; none: all.
        minus_one: whether HTTP requests may write -1 for None, or for 0 where there is no None.
    """

    name: str
    type: Any
    default: Any
    group: Group = ""
    fields: tuple[str, ...] = ()
    column: bool = False
    draws: bool = False
    needs: str = ""
    strategies: tuple[str, ...] = ()
    minus_one: bool = False

    @cached_property
    def optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in union(self.type)

    @cached_property
    def kind(self) -> Any:
        """The type of its values: int, float, bool, or another."""
        return details(union(self.type)[0])[0]

    @cached_property
    def bounds(self) -> Bounds | None:
        """Its bounds, if it is a number."""
        note = details(union(self.type)[0])[1]
        return note if isinstance(note, Bounds) else None


def param(
    default: Any, group: Group = "", *, fields: str = "", strategies: str = "", **more: Any
) -> Any:
    """A field of `SamplingParams` with its row of the table.

    Args:
        group, more: as `Parameter` has them.
        fields, strategies: the same, names separated by spaces.
    """
    lists = {"fields": tuple(fields.split()), "strategies": tuple(strategies.split())}
    return field(default=default, metadata={"group": group, **lists, **more})


def parameters(table: Any) -> dict[str, Parameter]:
    """The rows of a dataclass whose fields `param` made, by name."""
    rows = {}
    for name, (row_field, hint) in fields(table).items():
        row = {**row_field.metadata, "fields": row_field.metadata["fields"] or (name,)}
        rows[name] = Parameter(name, hint, row_field.default, **row)
    return rows


def by_name[T](table: type[T]) -> type[T]:
    """Makes unknown names and positional arguments of a dataclass a `RequestError` of one line."""
    names = tuple(vars(table)["__dataclass_fields__"])
    init: Any = table.__init__

    @wraps(init)
    def checked(self: T, *args: object, **values: object) -> None:
        if args:
            raise RequestError(f"give parameters by name: {table.__name__}(max_tokens=50)")
        if wrong := next((name for name in values if name not in names), ""):
            raise RequestError(unknown_parameter(wrong, names))
        init(self, **values)

    cast("Any", table).__init__ = checked
    return table


def unknown_parameter(name: object, known: Iterable[str]) -> str:
    """The error of an unknown parameter: its equivalent here, or the nearest name."""
    return f"there is no parameter {show_value(name)}{parameter_hint(name, known)}"


def parameter_hint(name: object, known: Iterable[str]) -> str:
    """What to write instead of an unknown parameter, after its name in an error."""
    if (own := ALIASES.get(str(name))) is not None:
        return f"; here it is {own}: SamplingParams({own}=...)"
    foreign = keyword(str(name))
    if foreign is not None and foreign.key:
        return f"; it is a key of the model: LLM(source, **{{{foreign.key!r}: ...}})"
    return f": {foreign.python}" if foreign is not None else f"; {nearest_hint(name, known)}"
