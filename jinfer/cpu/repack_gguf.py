"""GGUF's blocks as tiles of words and numbers, by compiled code that needs no lock of Python's."""

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
    """Writes rows of blocks to the first rows of tiles; other threads of Python run meanwhile.

    Args:
        type_name: of GGML, "Q4_K".
        block: bytes of one, and weights.
        words: uint32 [tiles, superblocks, bits, R, G], whose superblocks hold whole blocks.
        scales, steps: [tiles, superblocks, R, ...], the numbers of a superblock's rows.

    Returns:
        Whether that was done: where the custom calls are not compiled (yet), or do not know the
        type, it is not.
    """
    library = build_library.opened_if_kept()
    if library is None:
        return False
    tiles, superblocks, _, height, columns = words.shape
    blocks, cut = divmod(rows.shape[1], block[0])
    numbers = (rows.strides[0], len(rows), blocks, superblocks, height, columns)
    parts = [words, scales] if steps is None else [words, scales, steps]
    if (
        cut
        or rows.strides[1] != 1
        or len(rows) > tiles * height
        or blocks * block[1] > superblocks * 32 * columns
        or not all(part.flags.c_contiguous and part.flags.writeable for part in parts)
    ):
        return False
    places = [part.ctypes.data for part in parts] + [None] * (steps is None)
    done = library.jinfer_repack(
        type_name.encode(),
        ctypes.c_void_p(rows.ctypes.data),
        *map(ctypes.c_int64, numbers),
        *map(ctypes.c_void_p, places),
    )
    return bool(done)
