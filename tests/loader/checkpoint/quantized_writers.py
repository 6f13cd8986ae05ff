"""Writers of quantized matrices, from the layouts' descriptions: tensors, and the weights they are.

Each function gives the tensors of one module by their last names, and its weights [o, k] in
float64. Bits are packed one by one, so that nothing is shared with the reader.
"""

import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

type Arrays = dict[str, np.ndarray]
type Module = tuple[Arrays, np.ndarray]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8 = ml_dtypes.float8_e4m3fn
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def stream(codes: np.ndarray, bits: int, dtype: Any = np.int32) -> np.ndarray:
    """Codes [rows, n] as words [rows, ceil(n bits / 32)], the lowest bits first."""
    each = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    flat = each.reshape(len(codes), -1)
    flat = np.pad(flat, [(0, 0), (0, -flat.shape[1] % 32)])
    return np.packbits(flat, axis=1, bitorder="little").view("<u4").view(dtype)


def random_codes(rng: np.random.Generator, o: int, k: int, bits: int) -> np.ndarray:
    return rng.integers(0, 1 << bits, (o, k))


def random_scales(
    rng: np.random.Generator, *shape: int, bits: int, width: int = 0, dtype: Any = np.float16
) -> np.ndarray:
    """So that weights are about as large as those of a matrix of `width` inputs."""
    size = 2.0 / (1 << bits) / np.sqrt(width or 64)
    return (rng.uniform(0.7, 1.3, shape) * size).astype(dtype)


def spread(numbers: np.ndarray, k: int, group: int) -> np.ndarray:
    """[o, groups] -> [o, k]."""
    return np.repeat(numbers.astype(np.float64), group, axis=1)[:, :k]


def gptq(
    rng: np.random.Generator,
    o: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = False,
    version: int = 1,
    reordered: bool = False,
    with_index: bool = True,
) -> Module:
    group = k if group < 0 else group
    count = -(-k // group)
    codes, scales = random_codes(rng, o, k, bits), random_scales(rng, o, count, bits=bits, width=k)
    zeros = rng.integers(0, 1 << bits, (o, count))
    if sym:
        zeros[:] = 1 << (bits - 1)
    index = np.arange(k) // group
    if reordered:
        index = index[rng.permutation(k)]
    weights = scales.astype(np.float64)[:, index] * (codes - zeros[:, index])
    stored = zeros if version == 2 else (zeros - 1) % (1 << bits)
    arrays = {
        "qweight": np.ascontiguousarray(stream(codes, bits).T),
        "qzeros": stream(stored.T, bits),
        "scales": np.ascontiguousarray(scales.T),
    }
    return arrays | ({"g_idx": index.astype(np.int32)} if with_index else {}), weights


def awq(rng: np.random.Generator, o: int, k: int, *, group: int = 32) -> Module:
    codes, scales = random_codes(rng, o, k, 4), random_scales(rng, o, k // group, bits=4, width=k)
    zeros = rng.integers(0, 16, (o, k // group))
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: np.ndarray) -> np.ndarray:  # [rows, o] -> [rows, o / 8]
        words = np.zeros((len(values), o // 8), np.uint32)
        for c in range(o // 8):
            for nibble, output in enumerate(order):
                words[:, c] |= values[:, 8 * c + output].astype(np.uint32) << np.uint32(4 * nibble)
        return words.view(np.int32)

    weights = spread(scales, k, group) * (codes - spread(zeros, k, group))
    arrays = {
        "qweight": packed(codes.T),
        "qzeros": packed(zeros.T),
        "scales": np.ascontiguousarray(scales.T),
    }
    return arrays, weights


def mlx(
    rng: np.random.Generator, o: int, k: int, *, bits: int = 4, group: int = 64, dtype: Any = None
) -> Module:
    dtype = dtype or ml_dtypes.bfloat16
    codes = random_codes(rng, o, k, bits)
    scales = random_scales(rng, o, k // group, bits=bits, width=k, dtype=dtype)
    middle = scales.astype(np.float64) * (1 << bits) / 2
    biases = (-middle * rng.uniform(0.8, 1.2, scales.shape)).astype(dtype)
    weights = spread(scales, k, group) * codes + spread(biases, k, group)
    return {"weight": stream(codes, bits, np.uint32), "scales": scales, "biases": biases}, weights


def packed_integers(
    rng: np.random.Generator,
    o: int,
    k: int,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    dtype: Any = np.float16,
    reordered: bool = False,
) -> Module:
    """pack-quantized of compressed-tensors."""
    group = k if group < 0 else group
    half, count = 1 << (bits - 1), -(-k // group)
    integers = rng.integers(-half, half, (o, k))
    scales = random_scales(rng, o, count, bits=bits, width=k, dtype=dtype)
    zeros = rng.integers(-half, half, (o, count)) if not symmetric else np.zeros((o, count), int)
    index = np.arange(k) // group
    if reordered:
        index = index[rng.permutation(k)]
    weights = scales.astype(np.float64)[:, index] * (integers - zeros[:, index])
    arrays = {
        "weight_packed": stream(integers + half, bits),
        "weight_scale": scales,
        "weight_shape": np.array([o, k], np.int64),
    }
    if not symmetric:
        stored = stream((zeros + half).T, bits).T
        arrays["weight_zero_point"] = np.ascontiguousarray(stored)
    if reordered:
        arrays["weight_g_idx"] = index.astype(np.int32)
    return arrays, weights


def int8(
    rng: np.random.Generator,
    o: int,
    k: int,
    *,
    rows: bool = True,
    dtype: Any = np.float32,
    symmetric: bool = True,
) -> Module:
    """int-quantized of compressed-tensors, and Quark's."""
    integers = rng.integers(-127, 128, (o, k)).astype(np.int8)
    scales = random_scales(rng, *((o, 1) if rows else (1,)), bits=8, width=k, dtype=dtype)
    arrays = {"weight": integers, "weight_scale": scales}
    if symmetric:
        return arrays, integers * scales.astype(np.float64)
    zeros = rng.integers(-60, 60, scales.shape).astype(np.int8)
    shifted = integers.astype(np.float64) - zeros
    return arrays | {"weight_zero_point": zeros}, shifted * scales.astype(np.float64)


def fp8(
    rng: np.random.Generator,
    o: int,
    k: int,
    *,
    per: str = "tensor",
    leaf: str = "weight_scale",
    block: tuple[int, int] = (16, 32),
    dtype: Any = np.float32,
) -> Module:
    values = rng.normal(0, 60, (o, k)).astype(FP8)
    blocks = (-(-o // block[0]), -(-k // block[1]))
    if per == "group":
        block, blocks = (1, 32), (o, k // 32)
    shape = {"scalar": (), "tensor": (1,), "row": (o, 1)}.get(per, blocks)
    size = 1 / 60 / np.sqrt(k)
    if dtype == "power":
        exponents = rng.integers(118, 121, shape).astype(np.uint8)
        scales, factors = exponents, 2.0 ** (exponents.astype(np.float64) - 127)
    else:
        scales = np.asarray(rng.uniform(0.7, 1.3, shape) * size).astype(dtype)
        factors = scales.astype(np.float64)
    wide = factors
    if per in ("block", "group"):
        wide = np.repeat(np.repeat(factors, block[0], 0)[:o], block[1], 1)[:, :k]
    return {"weight": values, leaf: scales}, values.astype(np.float64) * wide


def nvfp4(
    rng: np.random.Generator, o: int, k: int, *, divided: bool = False, inputs_scaled: bool = False
) -> Module:
    """modelopt's, or with `divided` that of compressed-tensors."""
    codes = random_codes(rng, o, k, 4)
    scales = rng.uniform(30, 400, (o, k // 16)).astype(FP8)
    whole = np.float32(1 / 900 / np.sqrt(k))
    weights = E2M1[codes] * spread(scales, k, 16) * np.float64(whole)
    names = ("weight", "weight_scale_2", np.array(whole, np.float32))
    if divided:
        names = ("weight_packed", "weight_global_scale", np.array([1 / whole], np.float32))
        weights = E2M1[codes] * spread(scales, k, 16) / np.float64(names[2][0])
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    arrays = {names[0]: pairs, "weight_scale": scales, names[1]: names[2]}
    if inputs_scaled:
        before = rng.uniform(0.5, 2, k).astype(ml_dtypes.bfloat16)
        arrays["pre_quant_scale"] = before
        weights = weights * before.astype(np.float64)
    return arrays, weights


def mxfp4(rng: np.random.Generator, o: int, k: int, *, leaf: str = "weight_packed") -> Module:
    codes = random_codes(rng, o, k, 4)
    exponents = rng.integers(120, 124, (o, k // 32)).astype(np.uint8)
    weights = E2M1[codes] * spread(2.0 ** (exponents.astype(np.float64) - 127), k, 32)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return {leaf: pairs, "weight_scale": exponents}, weights


def four_bits(
    rng: np.random.Generator, o: int, k: int, *, kind: str = "nf4", nested: bool = False,
    block: int = 64,
) -> Module:  # fmt: skip
    """NF4 or FP4 of bitsandbytes."""
    third = 1 / 3
    fp4 = [0, 0.0052083333, 2 / 3, 1, third, 0.5, third / 2, 0.25]
    values = np.array(NF4 if kind == "nf4" else fp4 + [-v for v in fp4], np.float32)
    codes = random_codes(rng, o, k, 4)
    count = -(-o * k // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
    arrays: Arrays = {"weight.quant_map": values}
    if nested:
        inner = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        indices = rng.integers(0, 256, count).astype(np.uint8)
        outer = rng.uniform(0.01, 0.03, -(-count // 256)).astype(np.float32)
        offset = 0.08
        absmax = inner.astype(np.float64)[indices] * np.repeat(outer, 256)[:count] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        arrays |= {"weight.absmax": indices, "weight.nested_absmax": outer}
        arrays["weight.nested_quant_map"] = inner
    else:
        absmax = rng.uniform(1, 2, count) / np.sqrt(k)
        arrays["weight.absmax"] = absmax.astype(np.float32)
        absmax = arrays["weight.absmax"].astype(np.float64)
    flat = codes.reshape(-1)
    weights = values.astype(np.float64)[flat] * np.repeat(absmax, block)[: o * k]
    arrays["weight"] = (flat[::2] << 4 | flat[1::2]).astype(np.uint8)[:, None]
    text = json.dumps(state | {"shape": [o, k]}).encode()
    arrays[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
    return arrays, weights.reshape(o, k)


def llm_int8(rng: np.random.Generator, o: int, k: int) -> Module:
    integers = rng.integers(-127, 128, (o, k)).astype(np.int8)
    largest = (rng.uniform(1, 2, o) / np.sqrt(k)).astype(np.float32)
    arrays = {"weight": integers, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return arrays, integers * largest.astype(np.float64)[:, None] / 127


def hqq(
    rng: np.random.Generator, o: int, k: int, *, bits: int = 4, group: int = 64, axis: int = 1
) -> Module:
    rows = o * k // group
    codes = random_codes(rng, rows, group, bits)
    scales = random_scales(rng, rows, 1, bits=bits, width=k)
    zeros = (rng.uniform(0.3, 0.7, (rows, 1)) * (1 << bits)).astype(np.float16)
    weights = (codes - zeros.astype(np.float64)) * scales.astype(np.float64)
    if axis == 0:
        codes, weights, scales, zeros = codes.T, weights.T, scales.T, zeros.T
    n = len(codes)
    if bits == 8:
        packed = codes.astype(np.uint8)
    elif bits == 3:
        tenth = -(-n // 10)
        padded = np.pad(codes, [(0, 10 * tenth - n), (0, 0)]).reshape(10, tenth, -1)
        packed = sum(padded[i] << (27 - 3 * i) for i in range(10)).astype(np.int32)
    else:
        each = 8 // bits
        parts = codes.reshape(each, n // each, -1)
        packed = sum(parts[i] << (8 - bits * (i + 1)) for i in range(each)).astype(np.uint8)
    arrays = {
        "W_q": packed, "scale": np.ascontiguousarray(scales), "zero": np.ascontiguousarray(zeros),
        "shape": np.array([o, k], np.int64), "nbits": np.array(bits, np.int64),
        "axis": np.array(axis, np.int64), "quant_scale": np.array(False),
        "stores_quant_config": np.array(True), "packing": np.frombuffer(b"4bit_u8", np.uint8),
    }  # fmt: skip
    return arrays, weights.reshape(o, k)


def torchao_int(
    rng: np.random.Generator, o: int, k: int, *, bits: int = 4, symmetric: bool = True
) -> Module:
    """IntxUnpackedToInt8Tensor, in groups of 32."""
    half, shape = 1 << (bits - 1), (o, k // 32)
    integers = random_codes(rng, o, k, bits) - half
    scales = random_scales(rng, *shape, bits=bits, width=k)
    zeros = np.zeros(shape, np.int8) if symmetric else rng.integers(-half, half, shape)
    weights = spread(scales, k, 32) * (integers - spread(zeros, k, 32))
    arrays = {"_weight_qdata": integers.astype(np.int8), "_weight_scale": scales}
    return arrays | {"_weight_zero_point": zeros.astype(np.int8)}, weights


def torchao_int4(rng: np.random.Generator, o: int, k: int, *, group: int = 32) -> Module:
    """Int4Tensor: zero points are what is added to a weight."""
    integers = random_codes(rng, o, k, 4) - 8
    scales = random_scales(rng, o, k // group, bits=4, width=k)
    added = (scales * rng.normal(0, 2, scales.shape)).astype(np.float16)
    pairs = (integers[:, ::2] & 15) | (integers[:, 1::2] & 15) << 4
    weights = spread(scales, k, group) * integers + spread(added, k, group)
    arrays = {"_weight_qdata": pairs.astype(np.uint8).view(np.int8)}
    turned = {"_weight_scale": scales.T, "_weight_zero_point": added.T}
    return arrays | {name: np.ascontiguousarray(each) for name, each in turned.items()}, weights


def mlx_float(rng: np.random.Generator, o: int, k: int, *, mode: str) -> Module:
    """MLX's floats of 4 and 8 bits in words, with a scale for 32 or 16 of them."""
    if mode == "mxfp8":
        arrays, weights = fp8(rng, o, k, per="group", dtype="power")
        stored, scales = arrays["weight"].view(np.uint32), arrays["weight_scale"]
    elif mode == "mxfp4":
        arrays, weights = mxfp4(rng, o, k)
        stored, scales = arrays["weight_packed"].view(np.uint32), arrays["weight_scale"]
    else:
        codes, numbers = random_codes(rng, o, k, 4), rng.uniform(0.01, 0.1, (o, k // 16))
        stored, scales = stream(codes, 4, np.uint32), numbers.astype(FP8).view(np.uint8)
        weights = E2M1[codes] * spread(scales.view(FP8), k, 16)
    return {"weight": stored, "scales": scales}, weights


def renamed(write: Callable[..., Module], names: dict[str, str]) -> Callable[..., Module]:
    """A writer whose tensors have other last names."""

    def write_renamed(rng: np.random.Generator, o: int, k: int) -> Module:
        arrays, weights = write(rng, o, k)
        return {names[leaf]: array for leaf, array in arrays.items()}, weights

    return write_renamed


def settled(write: Callable[..., Module], **how: Any) -> Callable[..., Module]:
    """A writer with its choices made."""
    return lambda rng, o, k: write(rng, o, k, **how)
