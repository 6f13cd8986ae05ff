"""The PTX of `kernels_pallas.matmul.unpack` in NumPy: what a GPU would compute, without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def elementwise_inline_asm(
    asm: str,
    *,
    args: Sequence[Any],
    constraints: str,
    pack: int,
    result_shape_dtypes: Sequence[Any],
) -> list[np.ndarray]:
    """Stands for Triton's: registers of two 16-bit numbers that lie side by side in a tile."""
    assert pack == 2
    assert constraints == ",".join(["=r"] + ["r"] * len(args))
    known = {f"${n}": _register(arg) for n, arg in enumerate(args, start=1)}
    for line in filter(None, (line.strip() for line in asm.strip("{}").split(";"))):
        if line.startswith(".reg .b32 "):
            continue
        operation, operands = line.split(maxsplit=1)
        into, *others = (name.strip() for name in operands.split(","))
        given = [known[name] if name in known else np.uint32(int(name, 0)) for name in others]
        known[into] = _OPERATIONS[operation](*given)
    (result,) = result_shape_dtypes
    whole = np.ascontiguousarray(np.broadcast_to(known["$0"], known["$1"].shape), np.uint32)
    return [whole.view(result.dtype).reshape(result.shape)]


def _register(tile: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(tile)).view(np.uint32)


def _prmt(a: Any, b: Any, selector: Any) -> np.ndarray:
    """Each number of the selector chooses a byte; its highest bit asks for eight times its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result: Any = np.uint32(0)
    for place in range(4):
        number = (selector >> np.uint32(4 * place)) & np.uint32(15)
        shift = (np.uint64(8) * (number & np.uint32(7))).astype(np.uint64)
        byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
        signs = np.where(byte >> np.uint32(7), np.uint32(255), np.uint32(0))
        byte = np.where(number & np.uint32(8), signs, byte)
        result = result | byte << np.uint32(8 * place)
    return np.asarray(result)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> np.ndarray:
    """Of each bit what the table has for its three."""
    result: Any = np.uint32(0)
    for row in range(8):
        if int(table) >> row & 1:
            parts = (v if row >> n & 1 else ~v for v, n in ((a, 2), (b, 1), (c, 0)))
            first, second, third = parts
            result = result | (first & second & third)
    return np.asarray(result)


def _in_halves(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """An operation on two fp16 numbers, rounded once."""

    def halves(*registers: Any) -> np.ndarray:
        wide = [np.atleast_1d(each).view(np.float16).astype(np.float64) for each in registers]
        pairs = [each.reshape(*each.shape[:-1], -1, 2) for each in wide]
        result = np.ascontiguousarray(compute(*pairs).astype(np.float16))
        return result.view(np.uint32)[..., 0]

    return halves


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mul.rn.f16x2": _in_halves(lambda a, b: a * b),
    "fma.rn.f16x2": _in_halves(lambda a, b, c: a * b + c),
}
