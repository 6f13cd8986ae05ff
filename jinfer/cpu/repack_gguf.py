"""GGUF: repacks quantized blocks into `QuantizedTensor`'s tiles, in C++ without the GIL."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from jinfer.cpu import build_library

if TYPE_CHECKING:
    from jaxtyping import UInt8


def repack(
    type_name: str,
    rows: UInt8[np.ndarray, "rows bytes"],
    block: tuple[int, int],
    words: np.ndarray,
    scales: np.ndarray,
    steps: np.ndarray | None,
) -> bool:
    """Repacks rows of GGUF blocks into the first rows of tiles; releases the GIL.

    Args:
        type_name: GGML's, such as "Q4_K".
        block: bytes and weights of a block.
        words: uint32 [tiles, superblocks, bits, R, G]; a superblock holds whole blocks.
        scales, steps: [tiles, superblocks, R, ...], the numbers of a superblock's rows.

    Returns:
        False, with nothing written, if the library is not compiled (yet) or does not support the
        type or the layout.
    """
    library = build_library.opened_if_built()
    if library is None:
        return False
    tiles, superblocks, _, height, columns = words.shape
    blocks, rest = divmod(rows.shape[1], block[0])
    numbers = (rows.strides[0], len(rows), blocks, superblocks, height, columns)
    arrays = [words, scales] if steps is None else [words, scales, steps]
    if (
        rest
        or rows.strides[1] != 1
        or len(rows) > tiles * height
        or blocks * block[1] > superblocks * 32 * columns
        or not all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
    ):
        return False
    pointers = [array.ctypes.data for array in arrays] + [None] * (steps is None)
    done = library.jinfer_repack(
        type_name.encode(),
        ctypes.c_void_p(rows.ctypes.data),
        *map(ctypes.c_int64, numbers),
        *map(ctypes.c_void_p, pointers),
    )
    return bool(done)
