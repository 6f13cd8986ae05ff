"""What tests of custom calls share: this machine's instructions, and activation functions."""

from collections.abc import Callable

import numpy as np

from jinfer.cpu import build

BF16: tuple[build.Isa, ...] = ("avx512bf16", "amx")  # that multiply bfloat16 with bfloat16


def isas() -> list[build.Isa]:
    """What this machine can run; of AVX-512 the better of two, as most kernels are the same."""
    found = every_isa()
    return [isa for isa in found if isa != "avx512" or "avx512bf16" not in found]


def every_isa() -> list[build.Isa]:
    """What this machine can run."""
    return [isa for isa in build.ISAS if build.available() and _runs(isa)]


def _runs(isa: build.Isa) -> bool:
    with build.lowered_isa(isa):
        return build.isa() == isa


def _gelu_tanh(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu_tanh": _gelu_tanh,
    "relu": lambda v: np.maximum(v, 0),
}
