"""GGUF's blocks as quantized tensors: the same numbers as decoded, bit for bit."""

import inspect
import json
import tracemalloc
from functools import wraps
from pathlib import Path

import gguf
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jinfer.cpu import build_library, repack_gguf
from jinfer.loader.checkpoint import Tensor, ggml_types
from jinfer.loader.weights.gguf_blocks import REPACKED_FORMATS as FORMATS
from jinfer.loader.weights.gguf_blocks import repacked_format, repacked_tensor
from jinfer.quant import QuantFormat, QuantizedTensor
from jinfer.quant.quantized_tensor import ALIGNMENT, abstract, empty_tensor, from_codes, to_codes

KEPT = sorted(FORMATS)
OTHERS = sorted(ggml_types.BLOCKS.keys() - FORMATS.keys())
# Zeros, the least and the greatest subnormal, 1, the greatest number, infinity and NaN.
HALVES = np.array([0, 0x8000, 1, 0x83FF, 0x3C00, 0xFBFF, 0x7C00, 0xFE01], np.uint16)
# Bytes at which the float16 fields of the types stand whose big-endian form nobody defines.
MORE_FIELDS: dict[str, tuple[int, ...]] = {"Q5_0": (0,), "Q5_1": (0, 2), "IQ4_XS": (0,)}


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def repacked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything here, by compiled code and by the reference."""
    real = repack_gguf.repack

    @wraps(real)
    def repack(*args: object) -> bool:
        assert real(*args), "compiled code refuses what it should take"  # type: ignore[arg-type]
        return True

    if request.param == "numpy":
        monkeypatch.setattr(repack_gguf, "repack", lambda *_: False)
    elif build_library.available():
        monkeypatch.setattr(repack_gguf, "repack", repack)
    else:
        pytest.skip("no compiler on this machine")
    return str(request.param)


def stored(name: str, shape: tuple[int, ...], seed: int = 0, extremes: float = 0.1) -> Tensor:
    """A tensor of random bytes, with a share of its float16 fields at the limits."""
    rng = np.random.default_rng([seed, ggml_types.BLOCKS[name].type_id])
    block = ggml_types.BLOCKS[name]
    raw = rng.integers(0, 256, (int(np.prod(shape)) // block.values, block.bytes), dtype=np.uint8)
    for at in {**ggml_types._HALVES, **MORE_FIELDS}.get(name, ()):
        some = rng.random(len(raw)) < extremes
        raw[some, at : at + 2] = rng.choice(HALVES, (some.sum(), 1)).view(np.uint8)
    if name == "MXFP4":
        raw[:, 0] = rng.integers(104, 144, len(raw))
    return tensor(name, raw, shape)


def tensor(name: str, raw: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    raw = raw.reshape(-1)
    return Tensor(
        "w", shape, name, raw.size, lambda: ggml_types.decode(name, raw, shape), lambda: raw
    )


def kept(tensors: Tensor | list[Tensor], *args: object, **keywords: object) -> QuantizedTensor:
    result = repacked_tensor(tensors, *args, **keywords)  # type: ignore[arg-type]
    assert result is not None
    assert result.format == repacked_format(tensors)
    return result


def values(kept: QuantizedTensor) -> np.ndarray:
    """What the codes mean by `QuantFormat`'s equations, in NumPy's float32."""
    format, (codes, scales, steps) = kept.format, to_codes(kept)
    q = codes.astype(np.float32)
    if format.codebook is not None:
        q = np.array(format.codebook, np.float32)[codes]
    elif format.symmetric:
        q -= np.float32(format.zero)
    numbers = scales.astype(np.float32)
    with np.errstate(all="ignore"):
        if steps is not None:
            numbers *= np.repeat(steps.astype(np.float32), 256 // format.block, axis=-2)
        numbers = np.repeat(numbers, format.block, axis=-2)
        q *= numbers[..., 0]
        if not format.symmetric:
            q += numbers[..., 1]
    return q[..., : kept.inputs]


def assert_same(actual: object, expected: object) -> None:
    """Bit for bit, but for a NaN's sign and payload."""
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.dtype == b.dtype == np.float32
    assert a.shape == b.shape
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    finite = ~np.isnan(b)
    np.testing.assert_array_equal(a[finite].view(np.uint32), b[finite].view(np.uint32))


def test_golden_blocks(goldens: Path) -> None:
    folder = goldens / "gguf_quants"
    types = json.loads((folder / "meta.json").read_text())["types"]
    assert set(KEPT) <= set(types)
    with np.load(folder / "expected.npz") as arrays:
        for name, shown in types.items():
            shape = (shown["blocks"], shown["block_values"])
            read = tensor(name, arrays[f"{name}_raw"], shape)
            if name in KEPT:
                assert_same(values(kept(read)), arrays[f"{name}_f32"])
            else:
                assert repacked_tensor(read) is None


@pytest.mark.parametrize("name", KEPT)
def test_repacked_blocks_equal_decoded_blocks(name: str) -> None:
    block = ggml_types.BLOCKS[name].values
    wide = st.sampled_from([None, 8, 16, 32] if block == 256 else [None, 1, 4, 16, 32])

    @settings(max_examples=15)
    @given(st.integers(1, 40), st.integers(1, 12), wide, st.integers(0, 99))
    def check(outputs: int, blocks: int, columns: int | None, seed: int) -> None:
        read = stored(name, (outputs, blocks * block), seed)
        result = kept(read, columns=columns)
        assert_same(values(result), read.read())
        # The layout is that of `from_codes`, padding included.
        codes, scales, steps = to_codes(result)
        codes = codes[:, : result.inputs]
        again = from_codes(codes, scales, result.format, steps=steps, columns=columns)
        for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(again), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)

    check()


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, words, scales: (rows[:, :-1], words, scales),  # no whole blocks
        lambda rows, words, scales: (rows[:, ::-1], words, scales),
        lambda rows, words, scales: (np.tile(rows, (9, 1)), words, scales),
        lambda rows, words, scales: (np.tile(rows, (1, 2)), words, scales),
        lambda rows, words, scales: (rows, words[..., ::-1], scales),
        lambda rows, words, scales: (rows, words, scales[:, :, ::-1]),
    ],
)
def test_compiled_code_writes_only_its_rows(change: object, repacked_by: str) -> None:
    if repacked_by == "numpy":
        pytest.skip("not by NumPy")
    rows = stored("Q4_0", (16, 64)).raw().reshape(16, -1)
    target = empty_tensor((16, 64), FORMATS["Q4_0"])
    rows, words, scales = change(rows, target.words, target.scales)  # type: ignore[operator]
    refusing = inspect.unwrap(repack_gguf.repack)
    assert not refusing("Q4_0", rows, (18, 32), words, scales, None)


@pytest.mark.parametrize("name", ["Q5_1", "Q4_K", "Q6_K", "IQ4_XS"])
def test_reference_and_rows_under_jit(name: str) -> None:
    read = stored(name, (19, 768), extremes=0)
    ids = np.array([[0, 18, 3], [3, 7, 1]], np.int32)

    @jax.jit
    def both(weight: QuantizedTensor, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return weight.dequantize(), weight.take(ids, jnp.float32)

    every, some = both(jax.device_put(kept(read)), ids)
    assert_same(every, read.read())
    assert_same(some, read.read()[ids])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_weights_that_the_package_quantizes(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    weight = np.random.default_rng(0).standard_normal((33, 576)).astype(np.float32)
    weight *= np.logspace(-4, 1, 33, dtype=np.float32)[:, None]
    raw = gguf.quants.quantize(weight, kind)
    result = kept(tensor(name, raw, weight.shape))
    assert_same(values(result), gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_only_the_sum_is_rounded(name: str) -> None:
    """So that fused operations, and others, give the same."""
    read = stored(name, (64, 512), extremes=0)
    result = kept(read)
    codes, scales, steps = to_codes(result)
    assert steps is not None
    with np.errstate(all="ignore"):
        numbers = scales * np.repeat(steps.astype(float), 256 // result.format.block, axis=1)
        numbers = np.repeat(numbers, result.format.block, axis=1)
        exact = numbers[..., 0] * codes + numbers[..., 1]
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(read.read()[finite], exact[finite].astype(np.float32))


def test_formats() -> None:
    assert FORMATS["Q4_0"] == QuantFormat("4", symmetric=True)
    assert FORMATS["Q4_1"] == QuantFormat("4")
    assert FORMATS["Q8_0"] == QuantFormat("8", symmetric=True)
    assert FORMATS["Q6_K"] == QuantFormat("6", 16, symmetric=True, two_level=True)
    assert FORMATS["Q4_K"] == QuantFormat("4", 32, two_level=True)
    # Integers of 6 and 4 bits become bytes; all else takes what it takes in the file.
    more = {
        "Q2_K": 0.5,
        "Q3_K": 0.125,
        "Q4_K": 0.125,
        "Q5_K": 0.125,
        "IQ4_XS": 0.0625,
        "MXFP4": 0.25,
    }
    for name, format in FORMATS.items():
        block = ggml_types.BLOCKS[name]
        assert format.bits_per_weight == 8 * block.bytes / block.values + more.get(name, 0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_are_decoded(name: str) -> None:
    assert repacked_format(stored(name, (2, 256))) is None
    assert repacked_tensor(stored(name, (2, 256))) is None


def test_non_matrices_are_decoded() -> None:
    assert repacked_tensor(stored("Q8_0", (64,))) is None


def test_mixed_types_are_decoded() -> None:
    both = [stored("Q4_K", (4, 256)), stored("Q6_K", (4, 256))]
    assert repacked_format(both) is None
    assert repacked_tensor(both) is None


def test_scales_beyond_float16_are_decoded() -> None:
    for exponent, is_kept in ((103, False), (104, True), (143, True), (144, False), (255, False)):
        raw = np.full((4, 17), 0x21, np.uint8)
        raw[:, 0] = 127
        raw[2, 0] = exponent
        read = tensor("MXFP4", raw, (2, 64))
        assert (repacked_format(read) is not None) == is_kept
        if is_kept:
            assert_same(values(kept(read)), read.read())
        raw[2, 1:] = 0  # the scale of zeros does not matter
        np.testing.assert_array_equal(values(kept(read)), read.read())


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K"])
def test_chosen_rows(name: str) -> None:
    read = stored(name, (36, 512))
    grouped = np.arange(36).reshape(3, 12)[:, 4:8].reshape(-1)
    mask = np.arange(36) % 3 == 0
    for rows in (slice(5, 30), slice(None, None, -2), grouped, np.array([7]), mask):
        result = kept(read, rows)
        assert_same(values(result), read.read()[rows])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "IQ4_XS"])
def test_stacks(name: str) -> None:
    read = stored(name, (3, 10, 512))
    assert_same(values(kept(read)), read.read())
    assert_same(values(kept(read, slice(4, 9))), read.read()[:, 4:9])
    assert_same(values(kept(read)[1]), read.read()[1])
    experts = [stored(name, (10, 512), seed) for seed in range(3)]
    decoded = np.stack([expert.read() for expert in experts])
    assert_same(values(kept(experts)), decoded)
    assert_same(values(kept(experts, np.array([8, 1, 1]))), decoded[:, [8, 1, 1]])
    assert kept(experts[:1]).shape == (1, 10, 512)
    several = [stored(name, (2, 10, 512), seed) for seed in range(2)]
    assert_same(values(kept(several)), np.stack([each.read() for each in several]))


@pytest.mark.parametrize("name", KEPT)
def test_shapes_are_known_without_reading(name: str) -> None:
    result = kept(stored(name, (2, 9, 768)))
    expected = abstract((2, 9, 768), result.format)
    assert (result.format, result.shape) == (expected.format, expected.shape)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("name", ["Q4_0", "Q2_K", "Q6_K"])
def test_little_memory_in_addition_to_the_result(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory of its own: a slab has room for more, and so have huge pages.
    monkeypatch.setattr("jinfer.quant.quantized_tensor._SLAB", 0)
    monkeypatch.setattr("jinfer.quant.quantized_tensor._HUGE_PAGE", ALIGNMENT)
    read = stored(name, (2048, 2048))
    rows = np.arange(2048)[::-1]
    repacked_tensor(read)  # what is made once
    tracemalloc.start()
    try:
        result = kept(read, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < result.nbytes + 4e6
