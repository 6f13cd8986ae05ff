"""Decoding a `QuantizedTensor` against its docstring, one bit and one weight at a time."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jinfer.quant import QuantFormat, QuantizedTensor, parse_format
from jinfer.quant.bit_packing import PIECES, pack
from jinfer.quant.quantized_tensor import abstract, from_codes, to_codes, with_columns
from tests.arrays import on_device

BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
PLAIN = [
    parse_format(f"q{width}{block}{kind}")
    for width in ("2", "3", "3.5", "4", "5", "6", "8")
    for block, kind in (("", ""), ("_b64", "_sym"), ("_b128", "_affine"))
]
OTHERS = [
    QuantFormat("2", 16, two_level=True),
    QuantFormat("5", 32, two_level=True),
    QuantFormat("6", 16, symmetric=True, two_level=True),
    QuantFormat("4", 32, symmetric=True, codebook=BOOK),
    QuantFormat("4", 32, symmetric=True, two_level=True, codebook=BOOK),
]


def random_tensor(
    shape: tuple[int, ...], format: QuantFormat, seed: int = 0, columns: int | None = None
) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, format.levels, shape, dtype=np.uint8)
    lead, inputs = shape[:-1], shape[-1]
    steps = None
    if format.two_level:
        scales = rng.integers(-99, 99, (*lead, -(-inputs // format.block), format.numbers))
        scales = scales.astype(np.int8)
        steps = rng.normal(size=(*lead, -(-inputs // 256), format.numbers)).astype(np.float16)
    else:
        scales = rng.normal(size=(*lead, -(-inputs // format.block), format.numbers))
        scales = scales.astype(np.float16)
    return from_codes(codes, scales, format, steps=steps, columns=columns)


def weight_at(tensor: QuantizedTensor, n: int, k: int) -> float:
    """One weight of a matrix, as the docstring finds it."""
    format, R, G = tensor.format, tensor.rows, tensor.columns
    p = format.per_code
    tile, r = divmod(n, R)
    superblock, within = divmod(k, 32 * G * p)
    half, within = divmod(within, 32 * G)
    g, within = divmod(within, 32)
    s, i = divmod(within, 4)
    code = 0
    for byte, low, width, at in PIECES[format.code_bits][s]:
        word = int(tensor.words[tile, superblock, byte, r, g])
        strip = word >> (8 * i) & 0xFF
        code |= (strip >> low & ((1 << width) - 1)) << at
    q = code if p == 1 else divmod(code, format.levels)[half]
    S, share = max(1, 32 * G * p // format.block), max(1, format.block // (32 * G * p))
    numbers = tensor.scales[tile, superblock // share, r, (k // format.block) % S].astype(
        np.float32
    )
    if tensor.steps is not None:
        numbers = numbers * tensor.steps[tile, superblock, r, k % (32 * G * p) // 256]
    if format.codebook is not None:
        return numbers[0] * np.float32(format.codebook[q])
    if format.symmetric:
        return numbers[0] * np.float32(q - format.levels // 2)
    return numbers[0] * np.float32(q) + numbers[1]


@pytest.mark.parametrize("bits", sorted(PIECES))
def test_pieces_are_a_code_and_every_bit_is_used_once(bits: int) -> None:
    places = [
        (piece.byte, piece.low + bit)
        for pieces in PIECES[bits]
        for piece in pieces
        for bit in range(piece.width)
    ]
    assert sorted(places) == [(byte, bit) for byte in range(bits) for bit in range(8)]
    for pieces in PIECES[bits]:
        assert [piece.at for piece in pieces] == list(
            np.cumsum([0] + [piece.width for piece in pieces])[:-1]
        )
    if 8 % bits:  # "byte t holds code t in its low bits"; with 3 bits two codes fit
        assert all(PIECES[bits][t][0][:2] == (t, 0) for t in range(bits))


@given(st.sampled_from(sorted(PIECES)), st.data())
def test_packing_bit_by_bit(bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=32, max_size=32))
    words = [0] * bits
    for index, code in enumerate(codes):
        s, i = divmod(index, 4)
        for byte, low, width, at in PIECES[bits][s]:
            words[byte] |= (code >> at & ((1 << width) - 1)) << (low + 8 * i)
    np.testing.assert_array_equal(pack(np.array(codes, np.uint8), bits), words)


@settings(max_examples=40)
@given(
    st.sampled_from([*PLAIN, *OTHERS]),
    st.integers(1, 40),
    st.integers(1, 600),
    st.integers(0, 99),
)
def test_decoding_one_weight_at_a_time(
    format: QuantFormat, outputs: int, inputs: int, seed: int
) -> None:
    tensor = random_tensor((outputs, inputs), format, seed)
    full = tensor.dequantize()
    assert full.shape == (outputs, inputs)
    rng = np.random.default_rng(seed)
    for n, k in zip(rng.integers(0, outputs, 25), rng.integers(0, inputs, 25), strict=True):
        expected = weight_at(tensor, int(n), int(k))
        assert full[n, k] == expected


@settings(max_examples=20)
@given(
    st.sampled_from([*PLAIN, *OTHERS]),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 35),
    st.integers(1, 700),
    st.sampled_from([1, 4, 8, 16, 32]),
)
def test_shapes_stacks_and_superblocks(
    format: QuantFormat, stack: list[int], outputs: int, inputs: int, columns: int
) -> None:
    shape = (*stack, outputs, inputs)
    tensor = random_tensor(shape, format)
    like = abstract(shape, format)
    assert (tensor.shape, tensor.stack) == (shape, tuple(stack)) == (like.shape, like.stack)
    for part, other in zip(jax.tree.leaves(tensor), jax.tree.leaves(like), strict=True):
        assert (part.shape, part.dtype) == (other.shape, other.dtype)
    assert tensor.nbytes == like.nbytes
    columns = max(columns, tensor.columns) if format.two_level else columns
    other = with_columns(tensor, columns)
    assert other.columns == columns
    for part, same in zip(to_codes(tensor), to_codes(other), strict=True):
        assert (part is None) == (same is None)
        if part is not None and same is not None:
            least = min(part.shape[-1], same.shape[-1]) if part.ndim == len(shape) else None
            blocks = None if least else min(part.shape[-2], same.shape[-2])
            np.testing.assert_array_equal(
                part[..., :least] if least else part[..., :blocks, :],
                same[..., :least] if least else same[..., :blocks, :],
            )
    if stack:
        last = tuple(size - 1 for size in stack)
        np.testing.assert_array_equal(tensor[last].words, tensor.words[last])
        assert tensor[last].shape == (outputs, inputs)


@pytest.mark.parametrize("format", [PLAIN[6], OTHERS[0], OTHERS[4]], ids=str)
def test_compiled_decoding(format: QuantFormat) -> None:
    tensor = random_tensor((37, 300), format)
    full = tensor.dequantize()
    rows = np.array([[0, 36, 5], [5, 16, 15]])

    @jax.jit
    def both(tensor: QuantizedTensor, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tensor.dequantize(), tensor.take(rows, jnp.float32)

    decoded, taken = both(jax.tree.map(on_device, tensor), on_device(rows))
    # XLA may round only the sum and not the product of scale and code.
    np.testing.assert_allclose(decoded, full, rtol=3e-7, atol=2e-5)
    np.testing.assert_allclose(taken, full[rows], rtol=3e-7, atol=2e-5)


def test_index() -> None:
    tensor = random_tensor((4, 64), PLAIN[0])
    assert tensor[...] is tensor
    with pytest.raises(IndexError, match="use take for rows"):
        tensor[0]
