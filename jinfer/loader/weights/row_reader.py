"""Reading rows of the matrices of a checkpoint, a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jinfer.loader.checkpoint import Tensor
from jinfer.loader.checkpoint.dtypes import DTYPES
from jinfer.loader.checkpoint.ggml_types import BLOCKS, PLAIN, decode
from jinfer.loader.checkpoint.mapped_file import release

PIECE = 1 << 20  # weights


def row_reader(file: Tensor) -> Callable[[tuple[int, ...], Any], np.ndarray]:
    """A function of a matrix's index in its stack, and of rows: their values, float32.

    The index of a single matrix is ().
    """
    *stack, outputs, inputs = file.shape
    block = BLOCKS.get(file.type)
    plain = block is None or file.type in PLAIN or file.nbytes % block.bytes
    stored = file.read() if plain else file.raw().reshape(*stack, outputs, -1)

    def cut(index: tuple[int, ...], rows: Any) -> np.ndarray:
        part = stored[index][rows]
        size = (len(part), inputs)
        numbers = part.astype(np.float32) if plain else decode(file.type, part, size)
        release(part)
        return numbers

    return cut


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; memory holds no more than a few MB of each.

    Those of one type are compared as they are stored, and nothing is decoded.

    Raises:
        CheckpointError: the file is broken.
    """
    if one.shape != other.shape or not one.shape:
        return False
    if one.type == other.type and (one.type in DTYPES or one.type in BLOCKS):
        return _same_bytes(one.raw(), other.raw())
    if len(one.shape) == 1:
        return np.array_equal(one.read().astype(np.float32), other.read().astype(np.float32))
    height = max(1, PIECE // one.shape[-1])
    first, second = row_reader(one), row_reader(other)
    return all(
        np.array_equal(first(index, rows), second(index, rows))
        for index in np.ndindex(*one.shape[:-2])
        for begin in range(0, one.shape[-2], height)
        for rows in [slice(begin, min(begin + height, one.shape[-2]))]
    )


def _same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    if one.size != other.size:
        return False
    if one.ctypes.data == other.ctypes.data:  # pickles store what is shared once
        return True
    for begin in range(0, one.size, 4 * PIECE):
        rows = slice(begin, begin + 4 * PIECE)
        if not np.array_equal(one[rows], other[rows]):
            return False
        release(one[rows])
        release(other[rows])
    return True
