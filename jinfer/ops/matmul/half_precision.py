"""Half precision weights (BF16, F16): which form is fastest on this machine."""

from __future__ import annotations

from jinfer.cpu import build_library
from jinfer.ops.backend import has_cpu_calls


def reads_16_bit_weights() -> bool:
    """Whether 16-bit weights are multiplied with float32 as stored.

    Custom calls do. XLA converts whole matrices first, all layers at once, so without custom calls
    weights are widened when they are loaded, which costs no more memory.
    """
    return has_cpu_calls()


def f16_as_int_is_faster() -> bool:
    """Whether F16 weights are multiplied faster as integers (`jinfer.quant.f16_as_int`) here.

    With AVX2 alone, integer dot products have higher throughput than float32 FMA. Wider vectors
    keep F16.
    """
    return build_library.isa() == "avx2"
