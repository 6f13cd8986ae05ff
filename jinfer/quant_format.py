"""Quantization formats: levels, block sizes, and the scales and offsets of a block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# Storage type of cached keys and values.
type Kind = DTypeLike | QuantFormat

FLOAT_DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def parse_cache_dtype(name: str) -> Kind:
    """Parses "f32", "bf16", "f16" or a width: "q8", "q6", "q5", "q4", "q3.5", "q3", "q2".

    Raises:
        ValueError: there is no such type.
    """
    kind = FLOAT_DTYPES.get(name) or FORMATS.get(name)
    if kind is None:
        known = ", ".join([*FLOAT_DTYPES, *FORMATS])
        raise ValueError(f"no kind of cache {name!r}; there are {known}")
    return kind


type Width = Literal["2", "3", "3.5", "4", "5", "6", "8", "16"]

# Levels of a weight, bits of a code, weights per code.
_WIDTHS: dict[str, tuple[int, int, int]] = {
    "2": (4, 2, 1),
    "3": (8, 3, 1),
    "3.5": (11, 7, 2),  # 11 * 11 = 121 pairs fit into 7 bits
    "4": (16, 4, 1),
    "5": (32, 5, 1),
    "6": (64, 6, 1),
    "8": (256, 8, 1),
    "16": (1 << 16, 16, 1),
}
_BLOCKS = (32, 64, 128)
_NAME = re.compile(r"q(?P<width>[\d.]+)(?:_b(?P<block>\d+))?(?:_(?P<kind>sym|affine|nl))?")
# Values of the non-linear formats: of least squared error for normal weights in blocks of 64, by
# Lloyd's algorithm over values and scales. They are not symmetric, as a scale may be negative.
TABLES: dict[str, tuple[int, ...]] = {
    "2": (-96, -21, 45, 127),
    "3": (-105, -64, -34, -8, 17, 44, 76, 127),
    "4": (-114, -89, -69, -53, -39, -27, -15, -3, 8, 19, 30, 43, 57, 73, 95, 127),
}


@dataclass(frozen=True)
class QuantFormat:
    """Weights as codes, with a scale and perhaps an offset for each block of weights along a row.

    A weight with code q, 0 <= q < levels, is

    - scale * q + base                  affine
    - scale * (q - levels // 2)         symmetric
    - scale * codebook[q]               with a codebook (non-linear)

    where scale and base are fp16, one of each per block; or, in two-level formats (GGUF's
    K-quants), scale = s * step and base = m * floor, with 8-bit integers s and m per block and fp16
    step and floor per 256 weights.

    Attributes:
        width: nominal bits of a weight.
        block: weights that share a scale: 16, 32, 64 or 128.
        symmetric: blocks have no base.
        two_level: scales are integers times a factor of 256 weights, as in GGUF's K-quants.
        codebook: values of the codes if they are not evenly spaced, in -128..127.
    """

    width: Width
    block: int = 32
    symmetric: bool = False
    two_level: bool = False
    codebook: tuple[int, ...] | None = None

    @property
    def levels(self) -> int:
        """Number of values that a weight can have within a block."""
        return _WIDTHS[self.width][0]

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return _WIDTHS[self.width][1]

    @property
    def per_code(self) -> int:
        """Weights per code: 2 if a code is levels * x + y."""
        return _WIDTHS[self.width][2]

    @property
    def zero(self) -> int:
        """The code of 0 in a symmetric format."""
        return self.levels // 2

    @property
    def numbers(self) -> int:
        """Numbers per block: its scale, and its base if it has one."""
        return 1 if self.symmetric else 2

    @property
    def bits_per_weight(self) -> float:
        """Bits of memory per weight, including scales and bases."""
        codes = self.code_bits / self.per_code
        if self.two_level:
            return codes + self.numbers * (8 / self.block + 16 / 256)
        return codes + self.numbers * 16 / self.block

    @property
    def name(self) -> str:
        """The shortest name that `parse_format` reads, if the format can be requested."""
        default = FORMATS.get(f"q{self.width}", F16_AS_INT)
        block = "" if self.block == default.block else f"_b{self.block}"
        if self.codebook is not None and self.can_be_requested:
            return f"q{self.width}{block}_nl"
        kind = "_sym" if self.symmetric else "_affine"
        return f"q{self.width}{block}{'' if self.symmetric == default.symmetric else kind}"

    @property
    def can_be_requested(self) -> bool:
        """Whether weights can be quantized to it; other formats are only read from files."""
        return not self.two_level and self.codebook in (None, TABLES.get(self.width))


# F16 weights as integers, where float32 is slower: see `jinfer.quant.f16_as_int`.
F16_AS_INT = QuantFormat("16", 64, symmetric=True)
# Formats that can be requested.
FORMATS = {
    f"q{width}": QuantFormat(width, symmetric=width == "8")  # type: ignore[arg-type]
    for width in _WIDTHS
    if width != F16_AS_INT.width
}


def parse_format(name: str) -> QuantFormat:
    """Parses "q3.5", "q4_b64", "q4_sym", "q8_b128_affine", "q4_b64_nl".

    The default block is 32; by default 8 bits are symmetric, fewer bits affine.

    Raises:
        ValueError: there is no such format.
    """
    match = _NAME.fullmatch(name.lower())
    default = FORMATS.get(f"q{match['width']}") if match else None
    block = int(match["block"] or 32) if match else 0
    table = TABLES.get(match["width"]) if match and match["kind"] == "nl" else None
    known = match is not None and (match["kind"] != "nl" or table is not None)
    if match is None or default is None or block not in _BLOCKS or not known:
        raise ValueError(
            f"no quantization format {name!r}; formats are {', '.join(FORMATS)}, "
            "optionally with _b32, _b64 or _b128 and _sym, _affine or (q2, q3, q4) _nl, such as "
            "q4_b64_sym"
        )
    symmetric = default.symmetric if match["kind"] is None else match["kind"] != "affine"
    return QuantFormat(default.width, block, symmetric, codebook=table)
