"""What is left where JAX has dropped Pallas' Triton-style operations."""

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # importing it fails
import kernels_pallas
from jinfer.ops.backend import selected_backend
print(selected_backend())
"""


def test_xla_is_the_back_end_without_triton() -> None:
    program = [sys.executable, "-W", "ignore", "-c", WITHOUT]
    out = subprocess.run(program, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["xla"]
