"""Field types: types with bounds for declared fields, and the reading of values and texts.

Specification tables, sampling parameters and command-line flags are fields of frozen dataclasses:
the annotation says the type and its bounds, the section Attributes of the docstring is the
documentation. `read_as` reads a value of Python, TOML or JSON, `read_text` the text of a flag or
of an environment variable.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jinfer.modelspec.spec_errors import nearest_hint

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_FINITE = 1e300


class WrongValue(ValueError):
    """A value that its type does not allow.

    Attributes:
        expected: the allowed values, as a noun phrase.
        value: the value, for errors.
        hint: the nearest word and all allowed words, after a semicolon, or "".
    """

    def __init__(self, expected: str, value: Any, hint: str = "") -> None:
        super().__init__(expected)
        self.expected, self.value, self.hint = expected, value, hint


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum of a number.

    Attributes:
        text: their description in errors and documentation.
    """

    low: float
    high: float
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"from {self.low} to {self.high}"


@dataclass(frozen=True)
class Reader:
    """Reads the values of a type that has rules of its own.

    Attributes:
        read: normalizes a value of Python or JSON; raises `WrongValue`.
        expected: the allowed values, as a noun phrase.
        parse: converts the text of a flag; raises `ValueError`. None: the text is the value.
        repeated: whether a flag of the type may be repeated, once for each item.
        metavar: the name of the value in help texts.
    """

    read: Callable[[Any], Any]
    expected: str
    parse: Callable[[str], Any] | None = None
    repeated: bool = False
    metavar: str = "TEXT"


# Sizes end at JAX's 32-bit indices; other numbers stay well inside float32.
MAX_INDEX = 2**31 - 1
Size = Annotated[int, Bounds(1, MAX_INDEX, "from 1 to 2^31 - 1")]
Count = Annotated[int, Bounds(0, MAX_INDEX, "from 0 to 2^31 - 1")]
LayerCount = Annotated[int, Bounds(1, 10000)]
Positive = Annotated[float, Bounds(1e-30, 1e30, "above 0")]
Fraction = Annotated[float, Bounds(0, 1)]
NotNegative = Annotated[float, Bounds(0, 1e30, "from 0 on")]

# Default context length: a cache for the whole context of a modern model would fill the memory.
DEFAULT_CONTEXT = 4096


def dim(name: str, axis: str = "") -> Any:
    """A size that defaults to a dimension of `[dims]`.

    Args:
        axis: the logical axis of the block's parameters that has this size, if it can be divided.
    """
    return dataclasses.field(metadata={"dim": name, "axis": axis})


def option(
    default: Any = None,
    *,
    flag: str = "",
    key: str = "",
    metavar: str = "",
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A field that a command-line flag sets.

    Args:
        factory: makes the default, if that can be changed.
        flag: the name of the flag, if the field has another name.
        key: the key of a specification that it sets.
        metavar: the name of its value in help texts, if its type does not say enough.
    """
    metadata = {"flag": flag, "key": key, "metavar": metavar}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """The fields of a dataclass by name, with their types; dimensions are sizes."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: (field, Size if "dim" in field.metadata else hints[field.name])
        for field in dataclasses.fields(cls)
    }


@cache
def documentation(cls: Any) -> dict[tuple[str, ...], str]:
    """The texts of a dataclass's fields, from the docstrings of the class and its bases.

    Returns:
        The names of fields that are described together -> their text.
    """
    texts: dict[tuple[str, ...], str] = {}
    for base in (base for base in cls.__bases__ if base is not object):
        texts |= documentation(base)
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?=    \S)", section.partition("\n\n")[0]):
        names, _, text = " ".join(entry.split()).partition(": ")
        texts[tuple(names.split(", "))] = text
    return texts


def union(hint: Any) -> tuple[Any, ...]:
    """The members of a union; the type alone if it is none."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def details(option: Any) -> tuple[Any, Any]:
    """A type without its annotation, and the annotation: `Bounds`, a `Reader` or None."""
    return get_args(option)[:2] if get_origin(option) is Annotated else (option, None)


def describe(hint: Any) -> str:
    """The values of a type, as a noun phrase."""
    return " or ".join(dict.fromkeys(map(_describe, union(hint))))


def _describe(option: Any) -> str:
    inner, note = details(option)
    if isinstance(note, Reader):
        return note.expected
    if get_origin(inner) is Literal:
        words = get_args(inner)
        return "one of the allowed words" if len(words) > 1 else f'"{words[0]}"'
    if get_origin(inner) is tuple:
        return "a list of texts" if get_args(inner)[0] is str else "a list of numbers"
    if dataclasses.is_dataclass(inner):
        return "a table { ... }"
    name = "none" if inner is type(None) else _NAMES[inner]
    return f"{name} {note}" if isinstance(note, Bounds) else name


def read_as(hint: Any, value: Any) -> Any:
    """Normalizes a value of Python, TOML or JSON; NumPy's numbers become Python's.

    Args:
        hint: int, float, bool, str, a Literal, a tuple of numbers or texts, one of these with
            `Bounds` or a `Reader`, or a union of them.

    Raises:
        WrongValue: the type does not allow the value.
    """
    if not isinstance(value, int | float) and getattr(value, "ndim", None) == 0:
        value = value.item()
    wrong = None
    for option in union(hint):
        inner, note = details(option)
        try:
            return note.read(value) if isinstance(note, Reader) else _plain(inner, note, value)
        except WrongValue as error:
            wrong = error if isinstance(note, Reader) else wrong
    raise wrong or mismatch(hint, value)


def mismatch(hint: Any, value: Any) -> WrongValue:
    """The error of a value that a type does not allow."""
    literals = [option for option in union(hint) if get_origin(option) is Literal]
    words = [word for option in literals for word in get_args(option)]
    several = len(words) > 1
    return WrongValue(describe(hint), value, f"; {nearest_hint(value, words)}" if several else "")


def _plain(option: Any, bounds: Bounds | None, value: Any) -> Any:
    if get_origin(option) is Literal:
        fits = any(type(value) is type(word) and value == word for word in get_args(option))
        return value if fits else _refuse(value)
    if get_origin(option) is tuple:
        if not isinstance(value, list | tuple) or not value:
            _refuse(value)
        return tuple(_plain(*details(get_args(option)[0]), item) for item in value)
    if option in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(value)
        if option is int and not (isinstance(value, int) or value.is_integer()):
            _refuse(value)
        if option is float and not -_FINITE < value < _FINITE:
            _refuse(value)
        if bounds is not None and not bounds.low <= value <= bounds.high:
            _refuse(value)
        return option(value)
    return value if type(value) is option else _refuse(value)


def _refuse(value: Any) -> NoReturn:
    raise WrongValue("", value)


def from_text(hint: Any, text: str) -> Any:
    """The value that a text writes, before its bounds are checked.

    Raises:
        WrongValue: the text is none of the type.
    """
    kinds = [details(option) for option in union(hint)]
    for inner, note in kinds:
        if isinstance(note, Reader) and note.parse:
            try:
                return note.parse(text)
            except WrongValue:
                raise
            except ValueError:
                raise mismatch(hint, text) from None
        if inner is bool and text.lower() in _SWITCH:
            return _SWITCH[text.lower()]
        if inner in (int, float):
            try:
                return inner(text)
            except ValueError:
                raise mismatch(hint, text) from None
    if kinds[0][0] is bool and len(kinds) == 1:
        raise mismatch(hint, text)
    return text


def read_text(hint: Any, text: str) -> Any:
    """Reads the text of a flag or of an environment variable. Raises `WrongValue`."""
    return read_as(hint, from_text(hint, text))
