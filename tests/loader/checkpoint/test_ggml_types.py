"""GGML blocks: sizes and values against the reference's, bit for bit."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from jinfer.loader.checkpoint import ggml_types

CODED = sorted(ggml_types.BLOCKS.keys() - ggml_types.PLAIN.keys())
BY_PACKAGE = {kind.name for kind in gguf.quants._type_traits}


def random_blocks(name: str, count: int) -> np.ndarray:
    """Random bytes: scales may be infinite, NaN or subnormal. uint8 [count * bytes]."""
    rng = np.random.default_rng(ggml_types.BLOCKS[name].type_id)
    return rng.integers(0, 256, count * ggml_types.BLOCKS[name].bytes, dtype=np.uint8)


def bits(values: np.ndarray) -> np.ndarray:
    assert values.dtype == np.float32
    return values.view(np.uint32)


def test_every_type_of_the_package_is_known_with_its_size() -> None:
    for kind, (values, nbytes) in gguf.GGML_QUANT_SIZES.items():
        # The package still has Q8_1's first layout, with float32 scales; ggml's has float16.
        nbytes = 36 if kind.name == "Q8_1" else nbytes
        expected = ggml_types.Block(kind.name, int(kind), values, nbytes)
        assert ggml_types.block_of(int(kind)) == expected == ggml_types.BLOCKS[kind.name]
    assert ggml_types.block_of(4) is None
    assert ggml_types.block_of(2**32 - 1) is None


def test_golden_blocks(goldens: Path) -> None:
    folder = goldens / "gguf_quants"
    types = json.loads((folder / "meta.json").read_text())["types"]
    with np.load(folder / "expected.npz") as arrays:
        for name, shown in types.items():
            size = (shown["ggml_type"], shown["block_values"], shown["block_bytes"])
            assert ggml_types.BLOCKS[name] == ggml_types.Block(name, *size)
            expected = arrays[f"{name}_f32"]
            decoded = ggml_types.decode(name, arrays[f"{name}_raw"].reshape(-1), expected.shape)
            np.testing.assert_array_equal(bits(decoded), bits(expected), err_msg=name)


@pytest.mark.parametrize("name", sorted(BY_PACKAGE - {"BF16"}))
def test_any_bytes_decode_as_in_the_package(name: str) -> None:
    values = ggml_types.BLOCKS[name].values
    count = ggml_types._CHUNK // values * 3 // 2  # a whole chunk and a part
    raw = random_blocks(name, count)
    decoded = ggml_types.decode(name, raw, (3, count // 3 * values))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(3, -1), gguf.GGMLQuantizationType[name])
    # A NaN's sign and payload depend on the order the compiler gave a multiplication's operands.
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(decoded[finite]), bits(expected[finite]))


def test_types_that_the_package_does_not_decode() -> None:
    assert set(CODED) - BY_PACKAGE == {"Q8_1", "Q8_K", "Q1_0"}
    rng = np.random.default_rng(0)
    q = rng.integers(-128, 128, (2, 256)).astype(np.int8)
    d = np.array([[0.5], [-3.0]])

    half = d.astype("<f2").view(np.uint8)
    q8_1 = np.hstack([half, half, q[:, :32].view(np.uint8)])
    decoded = ggml_types.decode("Q8_1", q8_1.reshape(-1), (2, 32))
    np.testing.assert_array_equal(decoded, d * q[:, :32])

    sums = q.reshape(2, 16, 16).sum(axis=2, dtype="<i2").view(np.uint8)
    q8_k = np.hstack([d.astype("<f4").view(np.uint8), q.view(np.uint8), sums])
    np.testing.assert_array_equal(
        ggml_types.decode("Q8_K", q8_k.reshape(-1), (512,)), (d * q).ravel()
    )

    signs = rng.integers(0, 2, (2, 128))
    q1_0 = np.hstack([half, np.packbits(signs.astype(bool), axis=1, bitorder="little")])
    decoded = ggml_types.decode("Q1_0", q1_0.reshape(-1), (2, 128))
    np.testing.assert_array_equal(decoded, np.where(signs == 1, d, -d))


@pytest.mark.parametrize("name", sorted(ggml_types.PLAIN))
def test_plain_types_become_float32(name: str) -> None:
    values = np.array([[0, 1, -2], [3, 100, -128]])
    raw = values.astype(ggml_types.PLAIN[name]).reshape(-1).view(np.uint8)
    decoded = ggml_types.decode(name, raw, (2, 3))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, values)


def test_float64_beyond_float32_is_infinite() -> None:
    assert ggml_types.decode("F64", np.array([-1e300]).view(np.uint8), (1,)) == -np.inf


def test_result_is_a_new_array() -> None:
    raw = np.zeros(8, np.uint8)
    ggml_types.decode("F32", raw, (2,))[:] = 1
    assert not raw.any()


@pytest.mark.parametrize("name", sorted(ggml_types._HALVES))
def test_big_endian_blocks(name: str) -> None:
    """Swapping twice changes nothing, once exactly the two bytes of every float16 field."""
    raw = random_blocks(name, 5)
    swapped = ggml_types.swap_bytes(name, raw)
    np.testing.assert_array_equal(ggml_types.swap_bytes(name, swapped), raw)
    expected = raw.reshape(5, -1).copy()
    for at in ggml_types._HALVES[name]:
        expected[:, at : at + 2] = expected[:, at : at + 2].view("u2").byteswap().view("u1")
    np.testing.assert_array_equal(swapped, expected.reshape(-1))


def test_scale_fields_scale_the_values() -> None:
    """Doubling every float16 field named for the byte swap doubles every value."""
    for name, offsets in ggml_types._HALVES.items():
        if not offsets:
            continue
        raw = random_blocks(name, 50).reshape(50, -1)
        double = raw.copy()
        for at in offsets:
            scale = np.linspace(0.1, 2, 50, dtype="<f2")
            raw[:, at : at + 2] = scale.view("u1").reshape(50, 2)
            double[:, at : at + 2] = (scale * np.float16(2)).view("u1").reshape(50, 2)
        shape = (50, ggml_types.BLOCKS[name].values)
        once, twice = (
            ggml_types.decode(name, blocks.reshape(-1), shape) for blocks in (raw, double)
        )
        np.testing.assert_array_equal(twice, 2 * once, err_msg=name)


def test_errors_name_the_type() -> None:
    with pytest.raises(ValueError, match=r"^Q4_9 is no GGML type; known are F32, "):
        ggml_types.decode("Q4_9", np.zeros(18, np.uint8), (32,))
    with pytest.raises(ValueError, match=r"^Q4_0 blocks of 32 values, 18 bytes: 18 bytes are not"):
        ggml_types.decode("Q4_0", np.zeros(18, np.uint8), (2, 32))
    with pytest.raises(ValueError, match=r"^Q4_0 blocks .*shape \(31,\)"):
        ggml_types.decode("Q4_0", np.zeros(18, np.uint8), (31,))
    with pytest.raises(ValueError, match=r"^big-endian IQ2_XXS is not defined"):
        ggml_types.swap_bytes("IQ2_XXS", np.zeros(66, np.uint8))
