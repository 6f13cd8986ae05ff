"""Floats of a few bits in small blocks: MXFP4 and NVFP4 (pairs of E2M1 in bytes), MXFP8; and MLX.

MXFP4 (OCP Microscaling Formats 1.0) has a power of two, 2^(e - 127), for each block of 32 numbers;
e = 255 is NaN. NVFP4 has a scale in E4M3 for each block of 16, and a scale of the tensor. The low
half of a byte is the first of its two numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from jinfer.loader.checkpoint.checkpoint_reader import Tensor
from jinfer.loader.checkpoint.grouped_codes import GroupedCodes, ScaledValues, unpack_stream
from jinfer.loader.checkpoint.layouts.module_tensors import (
    FLOATS,
    ModuleTensors,
    QuantSettings,
    TensorTable,
    as_float32,
)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign
E2M1 = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)
_MX, _NV = 32, 16  # numbers that share a scale
_POWERS = ("U8", "F8_E8M0")  # types of a byte that is an exponent of 2
_BLOCKS, _EXPONENTS = "_blocks", "_scales"  # of gpt-oss


def join_blocks(table: TensorTable) -> None:
    """MXFP4 of gpt-oss: `X_blocks` U8 [*stack, k / 32, 16] and `X_scales` [*stack, k / 32].

    Raises:
        CheckpointError: a tensor has no partner, or the two do not fit.
    """
    for name, tensor in list(table.tensors.items()):
        if name.endswith(_EXPONENTS) and tensor.type in _POWERS:
            weight = name.removesuffix(_EXPONENTS) + _BLOCKS
            if weight not in table.tensors:
                reason = f"there is no {weight[:200]!r} with its weights: is a file missing?"
                raise table.fail(name, reason)
        elif name.endswith(_BLOCKS) and tensor.type == "U8":
            _join_blocks(table, name, tensor)


def _join_blocks(table: TensorTable, name: str, blocks: Tensor) -> None:
    scales_name = name.removesuffix(_BLOCKS) + _EXPONENTS
    scales = table.find(scales_name)
    if scales is None:
        reason = f"there is no {scales_name[:200]!r} with its scales: is a file missing?"
        raise table.fail(name, reason)
    if scales.type not in _POWERS:
        kinds = " or ".join(_POWERS)
        raise table.fail(name, f"its scales {scales.name[:200]!r} are {scales.type}, not {kinds}")
    size = _MX // 2
    if len(blocks.shape) < 2 or blocks.shape[-1] != size or scales.shape != blocks.shape[:-1]:
        raise table.fail(
            name,
            f"is {list(blocks.shape)} with scales {list(scales.shape)}, but MXFP4 has {size} "
            "bytes for each scale",
        )
    shape = (*blocks.shape[:-2], blocks.shape[-2] * _MX)
    found = _codes(
        shape, _MX, lambda: blocks.read().reshape(*shape[:-1], -1), partial(powers, scales)
    )
    module = ModuleTensors(table, "")
    if len(shape) < 2:  # a single row
        module.join_values("MXFP4_BLOCKS", (blocks, scales), shape, _as_row(found), leaf=name)
    else:
        module.join("MXFP4_BLOCKS", (blocks, scales), found, leaf=name)


def _as_row(codes: GroupedCodes) -> Callable[[], np.ndarray]:
    row = GroupedCodes(
        (1, *codes.shape),
        codes.bits,
        codes.group,
        lambda: codes.codes()[None],
        lambda: codes.scales()[None],
        values=codes.values,
    )
    return lambda: row.dequantize()[0]


def join_microscaled(module: ModuleTensors, mode: str) -> None:
    """MLX's modes: `X.weight` U32 [*stack, o, k / 8], `X.scales` U8 [*stack, o, k / 32 or 16]."""
    weight = module.need("weight", ("U32",))
    block = _MX if mode == "mxfp4" else _NV
    *rows, words = weight.shape
    inputs = 8 * words
    if not rows or inputs % block:
        raise module.fail(
            "weight", f"is {list(weight.shape)}, which are no whole blocks of {block}"
        )
    scales = module.need("scales", ("U8", "F8_E4M3", "F8_E8M0"), (*rows, inputs // block))

    def halves() -> np.ndarray:
        return np.ascontiguousarray(weight.read()).view(np.uint8).reshape(*rows, -1)

    read = partial(powers, scales) if block == _MX else partial(_e4m3, scales)
    found = _codes((*rows, inputs), block, halves, read)
    module.join(mode.upper(), (weight, scales), found)


def join_mxfp8(module: ModuleTensors) -> None:
    """MLX's mode: `X.weight` U32 [*stack, o, k / 4], E4M3, `X.scales` U8 [*stack, o, k / 32]."""
    weight = module.need("weight", ("U32",))
    *rows, words = weight.shape
    inputs = 4 * words
    if not rows or inputs % _MX:
        raise module.fail("weight", f"is {list(weight.shape)}, which are no whole blocks of {_MX}")
    scales = module.need("scales", _POWERS, (*rows, inputs // _MX))

    def numbers() -> np.ndarray:
        return np.ascontiguousarray(weight.read()).view(ml_dtypes.float8_e4m3fn)

    def decoded() -> np.ndarray:
        values = numbers().reshape(*rows, -1, _MX).astype(np.float32)
        values *= powers(scales)[..., None]
        return values.reshape(*rows, inputs)

    kept = ScaledValues(numbers, partial(powers, scales), _MX, inputs // _MX)
    module.join_values("MXFP8", (weight, scales), (*rows, inputs), decoded, scaled=kept)


def join_mxfp4(module: ModuleTensors, weight_leaf: str) -> None:
    """`weight_leaf` U8 [*stack, o, k / 2], `weight_scale` U8 [*stack, o, k / 32]."""
    weight, shape = _halves(module, weight_leaf, _MX)
    scales = module.need("weight_scale", _POWERS, (*shape[:-1], shape[-1] // _MX))
    module.join("MXFP4", (weight, scales), _codes(shape, _MX, weight.read, partial(powers, scales)))


def join_nvfp4(module: ModuleTensors, weight_leaf: str, global_leaf: str, *, divide: bool) -> None:
    """`weight_leaf` U8 [*stack, o, k / 2], `weight_scale` E4M3 [*stack, o, k / 16], a global scale.

    Args:
        divide: divide scales by the global scale instead of multiplying.

    A `pre_quant_scale` [k], a factor of the activations, is multiplied into the weights, which are
    then decoded.
    """
    weight, shape = _halves(module, weight_leaf, _NV)
    scales = module.need("weight_scale", ("F8_E4M3",), (*shape[:-1], shape[-1] // _NV))
    whole = module.need(global_leaf, ("F32",))
    stack = shape[:-2]
    if whole.shape not in ((), (1,), stack, (*stack, 1)):
        raise module.fail(global_leaf, f"is {list(whole.shape)}, expected a single number")
    before = module.find("pre_quant_scale", FLOATS, (shape[-1],))

    def factor() -> np.ndarray:
        lead = stack if whole.shape[: len(stack)] == stack else ()
        return as_float32(whole).reshape(*lead, 1, 1)

    def unit() -> np.ndarray:
        return np.float32(1) / factor() if divide else factor()

    def read_scales() -> np.ndarray:
        values = as_float32(scales)
        return values / factor() if divide else values * factor()

    found = _codes(shape, _NV, weight.read, read_scales, unit)
    if before is None:
        module.join("NVFP4", (weight, scales, whole), found)
        return

    def decoded() -> np.ndarray:
        return found.dequantize() * as_float32(before)

    parts = (weight, scales, whole, before)
    module.join_values("NVFP4, inputs scaled", parts, shape, decoded)


def _halves(module: ModuleTensors, leaf: str, block: int) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor of pairs, and the shape of the matrix."""
    weight = module.need(leaf, ("U8",))
    if len(weight.shape) < 2 or weight.shape[-1] * 2 % block:
        raise module.fail(leaf, f"is {list(weight.shape)}, which are no whole blocks of {block}")
    return weight, (*weight.shape[:-1], weight.shape[-1] * 2)


def _codes(
    shape: tuple[int, ...],
    block: int,
    halves: Callable[[], np.ndarray],
    scales: Callable[[], np.ndarray],
    unit: Callable[[], np.ndarray] | None = None,
) -> GroupedCodes:
    """Return the codes in bytes [..., inputs / 2]."""

    def codes() -> np.ndarray:
        pairs = np.asarray(halves())
        result = np.empty((*pairs.shape, 2), np.uint8)
        np.bitwise_and(pairs, 15, out=result[..., 0])
        np.right_shift(pairs, 4, out=result[..., 1])
        return result.reshape(shape)

    return GroupedCodes(shape, 4, block, codes, scales, values=E2M1, unit=unit)


def powers(tensor: Tensor) -> np.ndarray:
    """2^(e - 127), NaN for 255."""
    return np.asarray(tensor.read()).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def _e4m3(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.read()).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


_BITS = (2, 3, 4, 5, 6, 8)


def read_mlx(table: TensorTable, settings: QuantSettings) -> None:
    """Join the tensors of each module of MLX: codes, with a scale and a bias for each group.

        X.weight  U32 [*stack, o, k b / 32]   a stream of bits along inputs, the lowest first
        X.scales, X.biases   [*stack, o, k / g]

    Embeddings and heads have the same format. Bits and size of a group are the same for all
    modules, or given for each, in the table `quantization` of config.json.

    Raises:
        CheckpointError: settings or tensors that cannot be read.
    """
    for module in table.modules("weight", ("U32",)):
        own = settings
        if isinstance(settings.value(module.prefix[:-1]), dict):
            own = settings.inner(module.prefix[:-1]) or settings
        mode = own.text("mode") or settings.text("mode", "affine")
        if mode == "affine":
            _join(module, own, settings)
        elif mode in ("mxfp4", "nvfp4"):
            join_microscaled(module, mode)
        elif mode == "mxfp8":
            join_mxfp8(module)
        else:
            raise own.refused(f"mode {mode[:40]!r}")


def _join(module: ModuleTensors, own: QuantSettings, general: QuantSettings) -> None:
    bits = own.number("bits", among=_BITS, default=general.number("bits", default=4))
    group = own.number("group_size", default=general.number("group_size", default=64))
    weight = module.need("weight", ("U32",))
    *rows, words = weight.shape
    inputs = words * 32 // bits
    if len(rows) < 1 or group < 1 or words * 32 % bits or inputs % group:
        reason = f"is {list(weight.shape)}, which are not whole groups of {group} with {bits} bits"
        raise module.fail("weight", reason)
    scales = module.need("scales", FLOATS, (*rows, inputs // group))
    biases = module.need("biases", FLOATS, (*rows, inputs // group))
    found = GroupedCodes(
        (*rows, inputs),
        bits,
        group,
        lambda: unpack_stream(np.asarray(weight.read()), bits),
        partial(as_float32, scales),
        biases=partial(as_float32, biases),
    )
    module.join(f"MLX {bits} bits", (weight, scales, biases), found)
