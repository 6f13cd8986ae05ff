"""Block-scaled weights (FP8, MXFP4): decoded to float32, with their scales, when they are read.

Two layouts are known, both with the scales in a tensor of their own:

FP8 (arXiv 2412.19437, section 3.3): `X` [..., rows, columns] in F8_E4M3, and `X_scale_inv`, a
factor for every block of rows and columns; the blocks at the edges may be cut.

MXFP4 (OCP Microscaling Formats 1.0): `X_blocks` [..., columns / 32, 16], each byte two E2M1
numbers, the one in the low half first, and `X_scales` [..., columns / 32], exponents of two with
127 added, of which 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jinfer.checkpoint.checkpoint_reader import Checkpoint, CheckpointError, Tensor

type Block = tuple[int, int]

_FACTORS = "_scale_inv"
_FACTOR_TYPES = ("F32", "F16", "BF16")
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
_BYTES = 16  # of a block of 32 numbers
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1 without its sign
_E2M1 = np.array(_MAGNITUDES + [-value for value in _MAGNITUDES], np.float32)
# byte -> its two numbers
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)


def read_block(config: Mapping[str, Any], path: Path) -> Block | None:
    """Rows and columns of an FP8 block, from config.json; None where it says nothing of them.

    Args:
        path: that file, for errors.

    Raises:
        CheckpointError: the weights are quantized in a way that cannot be read.
    """
    table = config.get("quantization_config")
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise CheckpointError(path, "quantization_config is not a table")
    method = str(table.get("quant_method", "a method without a name"))[:80]
    if "quant_method" not in table and any(str(key).startswith("load_in_") for key in table):
        method = "bitsandbytes"
    if method not in ("fp8", "mxfp4"):
        raise CheckpointError(
            path,
            f"quantization_config says that the weights are quantized by {method}, which jinfer "
            "does not read: use the original weights, or the model as GGUF",
        )
    block = table.get("weight_block_size")
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        reason = "quantization_config.weight_block_size is not a list of two sizes above 0"
        raise CheckpointError(path, reason)
    return sizes[0], sizes[1]


def decode_scaled(checkpoint: Checkpoint, block: Block | None) -> Checkpoint:
    """The checkpoint without its tensors of scales: those they belong to are scaled when read.

    Names stay as they are in the file.

    Args:
        block: rows and columns of an FP8 block; if given, no FP8 tensor may lack its scales.

    Raises:
        CheckpointError: a tensor has no partner, or the two do not fit.
    """
    tensors = dict(checkpoint.tensors)

    def fail(name: str, reason: str) -> CheckpointError:
        return CheckpointError(checkpoint.path, f"tensor {name[:200]!r}: {reason}")

    def partner(name: str, own: str, other: str, what: str) -> Tensor:
        wanted = name.removesuffix(own) + other
        if wanted not in checkpoint.tensors:
            raise fail(name, f"there is no {wanted[:200]!r} with {what}: is a file missing?")
        return checkpoint.tensors[wanted]

    for name, tensor in checkpoint.tensors.items():
        if name.endswith(_FACTORS):
            weight = partner(name, _FACTORS, "", "its weights")
            if block is None:
                needed = "quantization_config.weight_block_size in config.json"
                raise fail(name, f"the size of its blocks is not known: add {needed}")
            if problem := _fp8_problem(weight, tensor, block):
                raise fail(name, problem)
            tensors[weight.name] = _joined(
                weight, tensor, "F8_E4M3_BLOCKS", weight.shape, partial(_read_fp8, block=block)
            )
            del tensors[name]
        elif tensor.type == "F8_E4M3" and block is not None:
            partner(name, "", _FACTORS, "its scales")
        elif tensor.type == "U8" and name.endswith(_EXPONENTS):
            partner(name, _EXPONENTS, _BLOCKS, "its weights")
            del tensors[name]
        elif tensor.type == "U8" and name.endswith(_BLOCKS):
            scales = partner(name, _BLOCKS, _EXPONENTS, "its scales")
            if problem := _mxfp4_problem(tensor, scales):
                raise fail(name, problem)
            shape = (*tensor.shape[:-2], tensor.shape[-2] * 2 * _BYTES)
            tensors[name] = _joined(tensor, scales, "MXFP4_BLOCKS", shape, _read_mxfp4)
    return replace(checkpoint, tensors=tensors)


def _joined(
    weight: Tensor,
    scales: Tensor,
    type: str,
    shape: tuple[int, ...],
    read: Callable[[Tensor, Tensor], np.ndarray],
) -> Tensor:
    """Two tensors as one, with the weight's name."""
    return Tensor(
        weight.name,
        shape,
        type,
        weight.nbytes + scales.nbytes,
        partial(read, weight, scales),
        lambda: np.concatenate([weight.raw(), scales.raw()]),
    )


def _fp8_problem(weight: Tensor, scales: Tensor, block: Block) -> str:
    """Why these are not weights and their scales; empty if they are."""
    if weight.type != "F8_E4M3" or scales.type not in _FACTOR_TYPES:
        return (
            f"scales in {scales.type} for {weight.type}, but they are {', '.join(_FACTOR_TYPES)} "
            "for F8_E4M3"
        )
    wanted = list(weight.shape)
    if len(wanted) > 1:
        wanted[-2:] = (-(-size // of) for size, of in zip(wanted[-2:], block, strict=True))
    if len(wanted) < 2 or list(scales.shape) != wanted:
        return (
            f"is {list(scales.shape)}, which does not fit {list(weight.shape)} in blocks of "
            f"{block[0]} x {block[1]}; look at quantization_config.weight_block_size"
        )
    return ""


def _read_fp8(weight: Tensor, scales: Tensor, block: Block) -> np.ndarray:
    values = weight.read().astype(np.float32)
    factors = scales.read().astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are values like others
        for i in range(factors.shape[-2]):
            rows = slice(i * block[0], (i + 1) * block[0])
            row = np.repeat(factors[..., i, :], block[1], axis=-1)[..., : values.shape[-1]]
            values[..., rows, :] *= row[..., None, :]
    return values


def _mxfp4_problem(blocks: Tensor, scales: Tensor) -> str:
    """Why these are not blocks and their scales; empty if they are."""
    if scales.type != "U8":
        return f"its scales {scales.name[:200]!r} are {scales.type}, not U8"
    if len(blocks.shape) < 2 or blocks.shape[-1] != _BYTES or scales.shape != blocks.shape[:-1]:
        return (
            f"is {list(blocks.shape)} with scales {list(scales.shape)}, but MXFP4 has {_BYTES} "
            "bytes for each scale"
        )
    return ""


def _read_mxfp4(blocks: Tensor, scales: Tensor) -> np.ndarray:
    powers = scales.read().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    values = np.empty((*blocks.shape, 2), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are values like others
        for i, part in enumerate(blocks.read()):  # NumPy makes eight bytes of each to look it up
            np.multiply(_PAIRS[part], powers[i][..., None, None], out=values[i])
    return values.reshape(*blocks.shape[:-2], -1)
