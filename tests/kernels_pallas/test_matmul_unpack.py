"""What a GPU's instructions make of words, by an emulation of them, against the definition."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as GGUF
from jinfer.quant_format import QuantFormat
from kernels_pallas.matmul.triton import numbers_of, operands, weights
from kernels_pallas.matmul.weight_layout import arrange_inputs
from tests.arrays import on_device
from tests.kernels_pallas.helpers import WIDTHS, random_blocks, random_matrix
from tests.kernels_pallas.ptx import elementwise_inline_asm

FORMATS = {
    **{f"q{width}": QuantFormat(width) for width in WIDTHS},
    **{f"q{width}_sym": QuantFormat(width, 64, symmetric=True) for width in WIDTHS},
    **GGUF,
}


class Ref:
    """An array that is read as a kernel's reference is."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape = self.array.shape

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        cut = (slice(i.start, i.start + i.size) if isinstance(i, pl.Slice) else i for i in index)
        return on_device(self.array[tuple(cut)])


@pytest.mark.parametrize("name", FORMATS)
def test_instructions_give_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "elementwise_inline_asm", elementwise_inline_asm)
    make = random_blocks if name in GGUF else random_matrix
    matrix, values = make(FORMATS[name], (16, 2048))
    expected = np.asarray(arrange_inputs(on_device(values), matrix))[:, 1]
    words, *numbers = (Ref(operand) for operand in operands(matrix))
    outputs, superblock = pl.ds(0, 16), 1
    tiles = [words[0, outputs, superblock, t] for t in range(matrix.bits)]
    known = numbers_of(matrix, numbers, (jnp.int32(0), outputs, jnp.int32(superblock)), asm=True)
    places = set()
    for place, w in weights(matrix, tiles, known, numbers[-1], asm=True):
        error = np.abs(np.asarray(w, np.float64) - expected[:, place])
        # A code of 0 gives a number that is rounded, a few times as large as the weights are.
        assert error.max() < 2**-9 * np.abs(expected).max(), place
        places.add(place)
    assert places == set(range(16 * matrix.per_code))
