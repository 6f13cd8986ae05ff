"""Some rows of a matrix, read as if the checkpoint had no others of it."""

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

# Names of the parameters that are wanted -> their rows that are; None: all.
type Wanted = Mapping[str, range | None]


@dataclass(frozen=True)
class Rows:
    """Some rows of a parameter.

    Attributes:
        values: of these alone.
        begin: the first of them.
    """

    values: Any
    begin: int


def rows_alone(
    origin: Origin, shapes: Shapes, storage: Storage | None, rows: range | None
) -> tuple[Origin, Shapes] | None:
    """Where rows of a parameter come from, and its shape with these alone.

    None where it has to be read whole: it is turned or fused, or how it is rounded depends on all.
    """
    whole = shapes[origin.parameter]
    if rows is None or len(whole) != 2 + origin.stacked or not origin.is_rows(shapes):
        return None
    if origin.place.parts or (
        storage is not None and (storage.outliers or storage.method == "feedback")
    ):
        return None
    files = [_window(file, rows) for file in origin.files]
    if any(file is None for file in files):
        return None
    alone = tuple(file for file in files if file is not None)
    shape = (*whole[:-2], len(rows), whole[-1])
    return replace(origin, files=alone), {**shapes, origin.parameter: shape}


def _window(file: Tensor, rows: range) -> Tensor | None:
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
