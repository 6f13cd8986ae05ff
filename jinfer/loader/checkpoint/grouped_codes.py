"""Grouped codes: small integers, and scales that groups of inputs share, in quantized checkpoints.

GPTQ, AWQ, MLX and similar formats have this in common, in whichever order they store the bits. A
layout (`jinfer.loader.checkpoint.layouts`) finds the bits; `jinfer.loader.weights.grouped_blocks`
keeps the codes unchanged where a `QuantFormat` has the same grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8


_PIECE = 1 << 16  # weights dequantized at a time


@dataclass(frozen=True)
class GroupedCodes:
    """A quantized matrix [outputs, inputs], or a stack of matrices. The weight of a code q is

    - scale * (q - zero)      with `zero`, the same for all, or `zeros`
    - scale * q + bias        with `biases`
    - scale * values[q]       with `values`

    The functions read the file, and raise `CheckpointError`.

    Attributes:
        shape: [*stack, outputs, inputs].
        bits: size of a code.
        group: inputs that share a scale; the last group may be shorter.
        codes: uint8 [*stack, outputs, inputs].
        scales: float32 [*stack, outputs, groups].
        zero: the zero point of all groups.
        zeros, biases: a number for each group, as `scales`.
        values: the value of each code, if they are not evenly spaced.
        order: the group of each input, if it is not input // group.
        unit: a factor in the scales of a matrix, which divided by it have few bits, float32
            [*stack, 1, 1].
    """

    shape: tuple[int, ...]
    bits: int
    group: int
    codes: Callable[[], UInt8[np.ndarray, "*stack outputs inputs"]] = field(repr=False)
    scales: Callable[[], Float[np.ndarray, "*stack outputs groups"]] = field(repr=False)
    zero: int | None = None
    zeros: Callable[[], Float[np.ndarray, "*stack outputs groups"]] | None = None
    biases: Callable[[], Float[np.ndarray, "*stack outputs groups"]] | None = None
    values: tuple[float, ...] | None = None
    order: Callable[[], Int[np.ndarray, " inputs"]] | None = None
    unit: Callable[[], Float[np.ndarray, "*stack 1 1"]] | None = None

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return group_count(self.shape[-1], self.group)

    def group_of_inputs(self) -> Int[np.ndarray, " inputs"]:
        """The group of each input."""
        if self.order is not None:
            return self.order()
        return np.arange(self.shape[-1]) // max(1, self.group)

    @np.errstate(all="ignore")  # NaN and infinity are values like others
    def dequantize(self) -> Float[np.ndarray, "*stack outputs inputs"]:
        """The weights in float32. Raises `CheckpointError`."""
        result, codes = np.empty(self.shape, np.float32), self.codes()
        where = self.group_of_inputs()
        scales = self.scales()
        zeros = None if self.zeros is None else self.zeros()
        biases = None if self.biases is None else self.biases()
        table = None if self.values is None else np.array(self.values, np.float32)
        height = max(1, _PIECE // max(1, self.shape[-1]))
        for index in np.ndindex(*self.shape[:-2]):
            for begin in range(0, self.shape[-2], height):
                at = (*index, slice(begin, begin + height))
                part = codes[at].astype(np.float32) if table is None else table[codes[at]]
                if zeros is not None:
                    part -= zeros[at][:, where]
                elif self.zero:
                    part -= np.float32(self.zero)
                part *= scales[at][:, where]
                if biases is not None:
                    part += biases[at][:, where]
                result[at] = part
        return result


def group_count(inputs: int, group: int) -> int:
    """Return the number of groups in a row; the last group may be shorter."""
    return -(-inputs // max(1, group))


def unpack_stream(words: np.ndarray, bits: int) -> UInt8[np.ndarray, "*rows codes"]:
    """Codes that follow each other in words of 32 bits without gaps, the lowest bits first.

    Args:
        words: 32-bit integers [*rows, words].

    Returns:
        All whole codes of each row: [*rows, words * 32 // bits].
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    count = words.shape[-1] * 32 // bits
    if 8 % bits == 0:
        fields, per_byte = words.astype("<u4", copy=False).view(np.uint8), 8 // bits
        codes = np.empty((*fields.shape, per_byte), np.uint8)
        for i in range(per_byte):
            codes[..., i] = fields >> np.uint8(i * bits)
        codes &= np.uint8((1 << bits) - 1)
        return codes.reshape(*words.shape[:-1], count)
    codes = np.empty((*words.shape[:-1], count), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for i in range(min(count, 32)):  # the pattern repeats after 32 codes, in `bits` words
        word, low = divmod(i * bits, 32)
        columns = codes[..., i::32]
        size = columns.shape[-1]
        part = words[..., word::bits][..., :size] >> np.uint32(low)
        if low + bits > 32:
            part = part | words[..., word + 1 :: bits][..., :size] << np.uint32(32 - low)
        columns[...] = part & mask
    return codes


@dataclass(frozen=True)
class ScaledValues:
    """A matrix in FP8 (E4M3), [*stack, outputs, inputs], with a scale for each block of a row.

    Attributes:
        numbers: reads the numbers, float8_e4m3fn [*stack, outputs, inputs].
        scales: reads the scales of each row, float32 [*stack, outputs, ceil(inputs / block)].
        block: inputs that share a scale.
        blocks: number of blocks in a row.
    """

    numbers: Callable[[], np.ndarray]
    scales: Callable[[], Float[np.ndarray, "*stack outputs blocks"]]
    block: int
    blocks: int
