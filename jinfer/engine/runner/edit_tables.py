"""Edit tables: which activations a step edits and captures, and the vectors that it is given.

A program is compiled for the places alone. Vectors, the tokens that they are for and the requests
that they are of come as tables next to the block tables; the sizes of these are padded, so that
another request at the same places finds the same program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jinfer.engine.activation_use import FORMS, ActivationUse, Form
from jinfer.nn.row_edits import CAPTURE, EDITS, EditTable

_VECTORS, _RANGES = (32, 512), (4, 32)  # sizes of tables; larger ones are powers of two


@dataclass(frozen=True)
class EditPlace:
    """A place where a step edits some rows, and the sizes of its table.

    Attributes:
        name: of the activation.
        form: what can be done there.
        shape: of one token's value.
        vectors, ranges: of the table.
    """

    name: str
    form: Form
    shape: tuple[int, ...]
    vectors: int
    ranges: int

    def table(self, sequences: int) -> EditTable:
        """An empty table, in NumPy."""
        vectors = (self.vectors, *self.shape)
        ranges: Any = np.zeros((sequences, self.ranges, 4), np.int32)
        parts: list[Any] = [np.zeros(vectors, np.float32) for _ in range(len(_PARTS[self.form]))]
        return EditTable(ranges, *parts)


_PARTS: dict[Form, tuple[str, ...]] = {
    "add": ("shift",),
    "scale": ("shift", "factor"),
    "project": ("shift", "factor", "along", "back"),
}


@dataclass(frozen=True)
class StepTaps:
    """What a step edits and captures.

    Attributes:
        capture: names of activations that it returns.
        places: where it edits.
    """

    capture: tuple[str, ...] = ()
    places: tuple[EditPlace, ...] = ()


def taps_of(uses: Iterable[ActivationUse | None]) -> StepTaps | None:
    """What a step of some requests edits and captures; None: nothing, and it is as any other."""
    some = dict.fromkeys(use for use in uses if use is not None)
    if not some:
        return None
    capture = sorted({name for use in some for name in use.capture})
    places = []
    for name in sorted({name for use in some for name in use.edits}):
        here = [use.edits[name] for use in some if name in use.edits]
        form = FORMS[max(FORMS.index(each.form) for each in here)]
        vectors = _padded(sum(len(each.shift) for each in here), _VECTORS)
        ranges = _padded(max(len(each.ranges) for each in here), _RANGES)
        places.append(EditPlace(name, form, here[0].shape, vectors, ranges))
    return StepTaps(tuple(capture), tuple(places))


def _padded(count: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if count <= size), 1 << (count - 1).bit_length())


def edit_tables(
    taps: StepTaps, sequences: int, uses: Sequence[tuple[int, ActivationUse]]
) -> dict[str, Any]:
    """The tables of a step, in NumPy, to stand among its block tables.

    Args:
        sequences: rows of the block tables.
        uses: (row, activations of its sequence).
    """
    tables: dict[str, Any] = {place.name: place.table(sequences) for place in taps.places}
    for name, table in tables.items():
        begins, count = dict[ActivationUse, int](), 0
        for row, use in uses:
            if (edit := use.edits.get(name)) is None:
                continue
            if use not in begins:
                end = count + len(edit.shift)
                for part in EditTable._fields[1:]:
                    if (values := getattr(table, part)) is not None:
                        values[count:end] = getattr(edit, part).reshape(-1, *edit.shape)
                begins[use], count = count, end
            own = edit.ranges + np.array([0, 0, begins[use], 0], np.int32)
            table.ranges[row, : len(own)] = own
    return _named(taps, tables)


def abstract_edit_tables(taps: StepTaps | None, sequences: int) -> dict[str, Any]:
    """The same as abstract arrays; nothing without taps."""
    if taps is None:
        return {}
    tables = {place.name: place.table(sequences) for place in taps.places}
    return jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), _named(taps, tables)
    )


def _named(taps: StepTaps, tables: dict[str, EditTable]) -> dict[str, Any]:
    # Captured names are keys without arrays: a part of a program, and none of its arguments.
    captured = {CAPTURE: dict.fromkeys(taps.capture)} if taps.capture else {}
    return captured | ({EDITS: tables} if tables else {})
