"""Row slices for tensor parallelism: some rows of a matrix, read without the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jinfer.checkpoint import Tensor
from jinfer.checkpoint.dtypes import DTYPES
from jinfer.checkpoint.ggml_types import BLOCKS, PLAIN, decode
from jinfer.weights.storage_plan import Storage
from jinfer.weights.tensor_mapping import Origin, Shapes

# Names of the parameters to be read -> the rows of them; None: all rows.
type Wanted = Mapping[str, range | None]


@dataclass(frozen=True)
class RowSlice:
    """Some rows of a parameter.

    Attributes:
        values: of these rows.
        begin: number of the first one.
    """

    values: Any
    begin: int


def row_slice(
    origin: Origin, shapes: Shapes, storage: Storage | None, rows: range | None
) -> tuple[Origin, Shapes] | None:
    """Where rows of a parameter come from, and the shapes with these rows alone.

    None where it has to be read as a whole: it is transposed or fused, or its rounding depends on
    all rows.
    """
    whole = shapes[origin.parameter]
    if rows is None or len(whole) != 2 + origin.stacked or not origin.is_rows(shapes):
        return None
    if origin.place.parts or (
        storage is not None and (storage.outliers or storage.method == "gptq")
    ):
        return None
    sliced = tuple(file for each in origin.files if (file := _slice(each, rows)) is not None)
    if len(sliced) < len(origin.files):
        return None
    shape = (*whole[:-2], len(rows), whole[-1])
    return replace(origin, files=sliced), {**shapes, origin.parameter: shape}


def _slice(file: Tensor, rows: range) -> Tensor | None:
    """A matrix with some of its rows alone."""
    plain = file.type in DTYPES or file.type in PLAIN
    if len(file.shape) != 2 or file.nbytes % file.shape[0] or not (plain or file.type in BLOCKS):
        return None
    shape, row = (len(rows), file.shape[1]), file.nbytes // file.shape[0]

    def raw() -> np.ndarray:
        return file.raw()[rows.start * row : rows.stop * row]

    def read() -> np.ndarray:
        return file.read()[rows.start : rows.stop] if plain else decode(file.type, raw(), shape)

    return replace(file, shape=shape, nbytes=len(rows) * row, read=read, raw=raw)
