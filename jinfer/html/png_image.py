"""PNG images of matrices: one colour, the more opaque, the larger the value."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

GAMMA = 0.5  # of opacity: small values are visible; `LIVE` inverts it


def matrix_png(
    values: Float[np.ndarray, "rows columns"], colour: tuple[int, int, int] = (217, 95, 2)
) -> bytes:
    """A PNG with a pixel for each value, from 0 (transparent) to 1 (opaque)."""
    codes = np.round(255 * np.clip(np.nan_to_num(values), 0, 1)).astype(np.uint8)
    rows, columns = codes.shape
    lines = np.zeros((rows, columns + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = codes
    opacity = np.round(255 * (np.arange(256) / 255) ** GAMMA).astype(np.uint8)
    return b"".join(
        _chunks(
            (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
            (b"PLTE", bytes(colour) * 256),
            (b"tRNS", opacity.tobytes()),
            (b"IDAT", zlib.compress(lines.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def data_uri(png: bytes) -> str:
    """An image as an address that contains it."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunks(*parts: tuple[bytes, bytes]) -> Iterator[bytes]:
    yield b"\x89PNG\r\n\x1a\n"
    for name, content in parts:
        checked = name + content
        yield struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))
