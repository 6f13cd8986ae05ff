"""Kernels that use AMX's tiles, where plain code does what these instructions do."""

import os
import subprocess
import sys

import pytest

from jinfer.cpu import build_library
from jinfer.cpu.isa import own_isa

TESTED = (
    "test_quantized_matmul.py",
    "test_bf16_prompts.py",
    "test_dense_matmul.py",
    "test_fused_layers.py",
    "test_batch_invariance_of_products.py",
)


@pytest.mark.soak
@pytest.mark.skipif(own_isa() not in ("avx512bf16", "amx"), reason="needs AVX-512 BF16")
def test_kernels_in_emulated_tiles() -> None:
    """The tests of products, with a library of its own."""
    here = os.path.dirname(__file__)
    env = os.environ | {build_library.LOWER: "amx", build_library.FLAGS: "-DJINFER_TILES_EMULATED"}
    shown = "from jinfer.cpu import build_library as build; print(build.isa())"
    stated = subprocess.check_output([sys.executable, "-c", shown], env=env, text=True)
    assert stated.strip() == "amx"
    tests = [os.path.join(here, name) for name in TESTED]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], env=env, check=True)
