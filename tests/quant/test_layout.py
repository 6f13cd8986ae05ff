"""The packed layout: every weight is where `QuantizedTensor` says."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jinfer.quant import FORMATS, QuantFormat, parse_format
from jinfer.quant.bit_packing import PIECES, pack, pack_fours, unpack, unpack_four
from jinfer.quant.quantized_tensor import abstract, from_codes, to_codes, with_columns

TWO_LEVEL = QuantFormat("6", 16, symmetric=True, two_level=True)


@pytest.mark.parametrize("bits", sorted(PIECES))
def test_packing_is_undone_by_unpacking(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 5, 32), dtype=np.uint8)
    words = pack(codes, bits)
    assert (words.shape, words.dtype) == ((3, 5, bits), np.uint32)
    np.testing.assert_array_equal(unpack(words, bits), codes)
    fours = np.stack([unpack_four(words, bits, s) for s in range(8)])
    np.testing.assert_array_equal(np.moveaxis(pack_fours(fours, bits), 0, -1), words)
    # The pieces of the codes fill every bit once.
    full = pack(np.full((1, 32), (1 << bits) - 1, np.uint8), bits)
    np.testing.assert_array_equal(full, np.uint32(0xFFFFFFFF))


@settings(max_examples=60)
@given(
    st.sampled_from([*FORMATS, "q4_b64_sym", "q3.5_b128", "q8_b64_affine"]),
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from([None, 1, 4, 16]),
    st.integers(0, 9),
)
def test_every_weight_is_where_the_equations_say(
    name: str, outputs: int, inputs: int, columns: int | None, seed: int
) -> None:
    format, rng = parse_format(name), np.random.default_rng(seed)
    codes = rng.integers(0, format.levels, (outputs, inputs), dtype=np.uint8)
    blocks = -(-inputs // format.block)
    numbers = rng.standard_normal((outputs, blocks, format.numbers)).astype(np.float16)
    tensor = from_codes(codes, numbers, format, columns=columns)
    r, g, p = tensor.rows, tensor.columns, format.per_code
    assert columns in (None, g)
    assert r * g >= 16

    for n, k in zip(rng.integers(0, outputs, 20), rng.integers(0, inputs, 20), strict=True):
        tile, row = divmod(int(n), r)
        column, rest = divmod(int(k), 32)
        halves, at = divmod(column, g)
        superblock, half = divmod(halves, p)
        code = unpack(tensor.words[tile, superblock, :, row, at], format.code_bits)[rest]
        if p == 2:
            code = code % format.levels if half else code // format.levels
        assert code == codes[n, k]
        s, share = tensor.scales.shape[-2], max(1, format.block // (32 * g * p))
        found = tensor.scales[tile, superblock // share, row, (k // format.block) % s]
        np.testing.assert_array_equal(found, numbers[n, k // format.block])

    # Padded rows are zeros, and the codes come back.
    assert not tensor.words[outputs // r :, :, :, outputs % r :].any()
    back, scales, _ = to_codes(tensor)
    np.testing.assert_array_equal(back[:, :inputs], codes)
    np.testing.assert_array_equal(scales[:, :blocks], numbers)


@pytest.mark.parametrize("format", [*FORMATS.values(), TWO_LEVEL], ids=lambda f: f.width)
def test_stacks_and_other_superblocks(format: QuantFormat) -> None:
    rng = np.random.default_rng(0)
    shape = (2, 3, 11, 600)
    codes = rng.integers(0, format.levels, shape, dtype=np.uint8)
    numbers = rng.integers(-99, 99, (2, 3, 11, -(-600 // format.block), format.numbers))
    numbers = numbers.astype(np.int8 if format.two_level else np.float16)
    steps = rng.random((2, 3, 11, 3, format.numbers)).astype(np.float16)
    tensor = from_codes(codes, numbers, format, steps=steps if format.two_level else None)
    assert (tensor.stack, tensor.shape) == ((2, 3), shape)
    one = from_codes(
        codes[1, 2], numbers[1, 2], format, steps=steps[1, 2] if format.two_level else None
    )
    for part, whole in ((one.words, tensor.words), (one.scales, tensor.scales)):
        np.testing.assert_array_equal(part, whole[1, 2])
    # There and back: padding differs, the matrix does not.
    for columns in (16, 8):
        other = with_columns(tensor, columns)
        assert other.words.shape == abstract(shape, format, columns).words.shape
        np.testing.assert_array_equal(to_codes(other)[0][..., :600], codes)
    back = with_columns(other, tensor.columns)
    np.testing.assert_array_equal(back.words, tensor.words)
    np.testing.assert_array_equal(back.scales, tensor.scales)


def test_a_block_may_be_wider_than_a_superblock_but_steps_are_not() -> None:
    assert abstract((4, 1024), parse_format("q4_b128"), 1).scales.shape == (1, 8, 16, 1, 2)
    with pytest.raises(ValueError, match=r"^superblocks of .* are not whole blocks of"):
        abstract((4, 1024), TWO_LEVEL, 4)
