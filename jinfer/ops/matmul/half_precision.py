"""Weights of 16 bits: as what they are kept, on this machine."""

from __future__ import annotations

from jinfer.cpu import build_library
from jinfer.ops.backend import backend


def reads_as_stored() -> bool:
    """Whether weights of 16 bits are multiplied with float32 as they are.

    They are where there are custom calls. XLA converts whole matrices first, and those of all
    layers before it begins: it is faster, and takes no more memory, where that was done at loading.
    """
    return backend() == "cpu" and build_library.available()


def faster_as_whole_numbers() -> bool:
    """Whether F16 weights are multiplied faster as integers (`jinfer.quant.f16_as_int`) here.

    With AVX2 alone float32 has one instruction for 8 products, on two of four units. Products of
    whole numbers have two for 16, one of which any unit does. Longer vectors were not timed yet.
    """
    return build_library.isa() == "avx2"
