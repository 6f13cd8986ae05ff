"""Names of activations: the values that can be captured and edited, with shapes and axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, overload

from jinfer.engine.output.completion import data_frame
from jinfer.engine.requests import RequestError
from jinfer.html.html_page import details_html, table_html
from jinfer.modelspec.spec_errors import show_value
from jinfer.nn.activation_shapes import ActivationShape

_SHOWN = 40  # names that a short text lists


@dataclass(frozen=True)
class ActivationName:
    """A named value of the model.

    Attributes:
        name: such as "decoder.3.attn.q".
        shape: sizes of its axes; of a free one a word: ("tokens", 9, 64).
        axes: their names: ("tokens", "heads", "head_dim").
    """

    name: str
    shape: tuple[int | str, ...]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = zip(self.axes, self.shape, strict=True)
        shown = ", ".join(axis if axis == size else f"{axis} {size}" for axis, size in sizes)
        return f"{self.name} [{shown}]"


class ActivationNames(Sequence[ActivationName]):
    """Named values; by number, or by name with tab completion: `names["decoder.3.x"].shape`."""

    def __init__(self, names: Iterable[ActivationName]) -> None:
        self._names = tuple(names)
        self._by_name = {item.name: item for item in self._names}

    @overload
    def __getitem__(self, index: int | str) -> ActivationName: ...
    @overload
    def __getitem__(self, index: slice) -> ActivationNames: ...
    def __getitem__(self, index: int | str | slice) -> ActivationName | ActivationNames:
        if isinstance(index, str):
            if index not in self._by_name:
                raise KeyError(f"there is no value {show_value(index)}{nearest(index, self)}")
            return self._by_name[index]
        found = self._names[index]
        return ActivationNames(found) if isinstance(found, tuple) else found

    def __contains__(self, name: object) -> bool:
        return name in self._by_name or name in self._names

    def __iter__(self) -> Iterator[ActivationName]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _ipython_key_completions_(self) -> list[str]:
        return [*self._by_name]

    def to_pandas(self) -> Any:
        """A row for each value: name, axes, shape. Raises `RequestError` without pandas."""
        rows = [(item.name, item.axes, item.shape) for item in self]
        columns = zip(("name", "axes", "shape"), zip(*rows, strict=True), strict=False)
        return data_frame({name: list(column) for name, column in columns})

    def __repr__(self) -> str:
        lines = [str(name) for name in self._names[:_SHOWN]]
        more = len(self) - len(lines)
        return "\n".join([*lines, *([f"... and {more} more"] if more else [])])

    def _repr_html_(self) -> str:
        rows = [
            (name.name, ", ".join(name.axes), " × ".join(map(str, name.shape)))
            for name in self._names
        ]
        title = f"{len(self)} value{'s' * (len(self) != 1)}"
        return details_html(title, table_html(("name", "axes", "shape"), rows))


def activation_names(shapes: Mapping[str, ActivationShape], pattern: str) -> ActivationNames:
    """The values whose names fit a pattern with `*`. Raises `RequestError` if none does."""
    if not isinstance(pattern, str):
        raise RequestError(f"a name is {show_value(pattern)}; give a text such as 'decoder.*.x'")
    return ActivationNames(
        ActivationName(name, *shapes[name]) for name in matching(pattern, shapes)
    )


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that fit a pattern with `*`, in their order. Raises `RequestError` if none does."""
    names = list(names)
    found = [name for name in names if name == pattern]
    if not found and "*" in pattern:
        # Other signs of a shell's patterns are no letters of names.
        plain = pattern.replace("[", "[[]").replace("?", "[?]")
        found = [name for name in names if fnmatchcase(name, plain)]
    if not found:
        raise RequestError(f"the model has no value {show_value(pattern)}{nearest(pattern, names)}")
    return found


def nearest(word: str, names: Iterable[ActivationName] | Iterable[str]) -> str:
    """A clause that follows an unknown name."""
    every = [name if isinstance(name, str) else name.name for name in names]
    known = {name.lower(): name for name in every}
    ends = [name for name in known if name.endswith(f".{word.lower()}")]  # of some layer
    close = ends or get_close_matches(word[:60].lower(), known, n=1, cutoff=0.6)
    hint = f"; did you mean {known[close[0]]!r}?" if close else ";"
    return f"{hint} llm.names() lists all"
